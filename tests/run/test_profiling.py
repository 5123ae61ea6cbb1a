"""The profile's table says where the time goes."""

import json

import pytest

from shared.run import profiling
from tests.conftest import run


@pytest.mark.slow
def test_a_run_writes_its_profile_and_learns_the_same(text_file, tiny_model, tmp_path, processes=2):
    flags = ("--train_file", text_file, "--model_name_or_path", tiny_model, "--seq_length", 32, "--max_steps", 10)
    flags = (*flags, "--eval_samples", 2, "--global_batch_size", 4, "--per_device_train_batch_size", 1)
    plain = run("pretrain", tmp_path / "plain", *flags, processes=processes)
    traced = run("pretrain", tmp_path / "traced", *flags, "--profile", processes=processes)
    assert traced.losses == plain.losses
    assert traced.output.count("profile of 3 steps") == 1 and "Self CPU time total" in traced.output
    assert "aten::mm" in traced.output or "aten::addmm" in traced.output
    trace = json.loads((tmp_path / "traced" / profiling.TRACE).read_text())
    assert sum("ProfilerStep" in str(event.get("name")) for event in trace["traceEvents"]) >= 3


def test_a_run_that_is_shorter_than_the_profile_says_so(text_file, tiny_model, tmp_path):
    flags = ("--train_file", text_file, "--model_name_or_path", tiny_model, "--seq_length", 32, "--max_steps", 4)
    done = run("pretrain", tmp_path / "run", *flags, "--global_batch_size", 4, "--eval_samples", 2, "--profile")
    assert "no profile: it needs 9 steps after the start; this run makes 4" in done.output
    assert not (tmp_path / "run" / profiling.TRACE).exists()
