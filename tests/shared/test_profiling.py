"""The profile's table says where the time goes."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from shared.run import metrics, profiling
from tests.conftest import run


@dataclass
class Event:
    name: str
    start: float
    end: float
    gpu: bool = False
    thread: int = 1

    @property
    def device_type(self):
        return torch.autograd.DeviceType.CUDA if self.gpu else torch.autograd.DeviceType.CPU

    @property
    def time_range(self):
        return SimpleNamespace(start=self.start, end=self.end, elapsed_us=lambda: self.end - self.start)

    @property
    def self_cpu_time_total(self):
        return self.end - self.start


def test_idle_is_what_no_kernel_covers():
    steps = [
        Event("ProfilerStep#7", 0, 1000),
        Event("ProfilerStep#8", 1000, 2000),
        Event("ProfilerStep#7", 0, 990, gpu=True),
    ]
    kernels = [Event("gemm", 0, 600, gpu=True), Event("gemm", 500, 900, gpu=True), Event("norm", 1200, 1300, gpu=True)]
    said = profiling.report([*steps, *kernels, Event("aten::mm", 0, 5)])
    rows = [line.split() for line in said.splitlines()]
    assert rows[0] == ["share", "ms", "a", "step", "calls", "kernel"]
    assert rows[1] == ["90.9%", "0.50", "1", "gemm"] and rows[2] == ["9.1%", "0.05", "0", "norm"]
    assert said.endswith("a step takes 1.0 ms; the GPU idles 50.0% of it")


def test_without_a_gpu_the_training_thread_counts():
    steps = [Event("ProfilerStep#7", 0, 1000)]
    said = profiling.report(
        [*steps, Event("aten::mm", 0, 400), Event("aten::add", 300, 500), Event("read", 0, 900, thread=2)]
    )
    assert said.endswith("the training thread idles 50.0% of it")


def test_no_step_is_no_error():
    assert "no whole step" in profiling.report([Event("aten::mm", 0, 5)])


@pytest.mark.parametrize("steps", [4, 6, 8])
def test_a_run_that_is_too_short_for_a_profile_says_so(text_file, tiny_model, tmp_path, steps):
    flags = ("--train_file", text_file, "--model_name_or_path", tiny_model, "--seq_length", 32, "--max_steps", steps)
    done = run("pretrain", tmp_path / "run", *flags, "--global_batch_size", 4, "--profile")
    assert f"no profile: it is of the 3 steps after the first 6 of a start, which made {steps}" in done.output
    assert "profile of" not in done.output
    assert not (tmp_path / "run" / profiling.TRACE).exists()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_writes_its_profile_and_learns_the_same(text_file, tiny_model, tmp_path, processes):
    flags = ("--train_file", text_file, "--model_name_or_path", tiny_model, "--seq_length", 32, "--max_steps", 10)
    flags = (*flags, "--eval_samples", 2, "--global_batch_size", 4, "--per_device_train_batch_size", 1)
    plain = run("pretrain", tmp_path / "plain", *flags, processes=processes)
    traced = run("pretrain", tmp_path / "traced", *flags, "--profile", processes=processes)
    assert traced.losses == plain.losses
    assert traced.output.count("profile of 3 steps") == 1 and "the training thread idles" in traced.output
    assert "aten::mm" in traced.output or "aten::addmm" in traced.output
    trace = json.loads((tmp_path / "traced" / profiling.TRACE).read_text())
    assert sum("ProfilerStep" in str(event.get("name")) for event in trace["traceEvents"]) >= 3


def test_a_run_that_is_shorter_than_the_profile(text_file, tiny_model, tmp_path):
    flags = ("--train_file", text_file, "--model_name_or_path", tiny_model, "--seq_length", 32, "--max_steps", 3)
    short = run("pretrain", tmp_path / "run", *flags, "--eval_samples", 2, "--profile")
    assert short.returncode == 0 and not (tmp_path / "run" / profiling.TRACE).exists()


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA A10G", 70),
        ("Tesla T4", 65),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA T400 4GB", None),
    ],
)
def test_peaks_are_those_of_the_device_and_of_no_other(monkeypatch, device, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)
    assert metrics.peak_flops(torch.device("cuda")) == (peak and peak * 1e12)
