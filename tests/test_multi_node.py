"""Two machines on one: two network namespaces joined by a cable, and the multi-node launch configs started in each."""

import os
import subprocess
import time

import pytest

from tests.conftest import ACCELERATE, ROOT, Run, processes_on, run

STEPS = 8


@pytest.fixture(scope="module")
def flags(text_file, tiny_model):
    return (
        *("--train_file", text_file, "--model_name_or_path", tiny_model, "--seq_length", 32, "--max_steps", STEPS),
        *("--save_steps", 2, "--save_total_limit", 9, "--eval_samples", 4, "--global_batch_size", 8),
        *("--per_device_train_batch_size", 1, "--report_to", "none", "--logging_steps", 1),
    )


def start(machines, number, folder, config, processes, flags, *launcher):
    argv = [*("--config_file", ROOT / "accelerate_configs" / f"{config}.yaml", "--num_processes", processes), *launcher]
    argv += ["--mixed_precision", "no", "--main_process_ip", "10.77.0.1", "--machine_rank", number]
    argv += [ROOT / "templates" / "pretrain.py", *flags, "--output_dir", folder]
    log = (folder.parent / f"{folder.name}-{number}.log").open("a")
    return subprocess.Popen(
        ["ip", "netns", "exec", machines[number], *ACCELERATE, *map(str, argv)],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "eth0"},
        stdout=log,
        stderr=subprocess.STDOUT,
    )


def train(machines, folder, config, processes, flags, *launcher) -> Run:
    nodes = [start(machines, number, folder, config, processes, flags, *launcher) for number in (0, 1)]
    codes = [node.wait(timeout=300) for node in nodes]
    assert codes == [0, 0], (folder.parent / f"{folder.name}-0.log").read_text()
    return Run(folder, 0, "")


@pytest.fixture(scope="module")
def reference(flags, tmp_path_factory):
    return run("pretrain", tmp_path_factory.mktemp("one"), *flags)


def test_hsdp_over_two_machines_learns_what_one_process_learns(machines, flags, reference, tmp_path):
    cut = ("--parallelism_config_dp_shard_size", 2)
    hsdp = train(machines, tmp_path / "hsdp", "multi_node_hsdp", 4, flags, *cut)
    manifest = hsdp.manifest(STEPS)
    assert manifest["strategy"] == "HSDP 2 x 2 on cpu, fp32" and manifest["world_size"] == 4
    assert manifest["held"]["weights"] == pytest.approx(0.5, abs=0.01)
    assert hsdp.losses == pytest.approx(reference.losses, rel=1e-5)


def test_a_machine_that_was_killed_and_started_again_continues(machines, flags, reference, tmp_path):
    """SIGKILL of everything on the second machine; the first ends with an error; the same commands again."""
    folder = tmp_path / "ddp"
    nodes = [start(machines, number, folder, "multi_node_ddp", 2, flags) for number in (0, 1)]
    deadline = time.monotonic() + 120
    while not (folder / "checkpoint-000004").exists():
        assert time.monotonic() < deadline and nodes[0].poll() is None
        time.sleep(0.01)
    for pid in processes_on(machines[1]):
        subprocess.run(["kill", "-9", str(pid)], capture_output=True)
    assert nodes[0].wait(timeout=120) != 0 and nodes[1].wait(timeout=10) != 0
    assert not (folder / "final").exists()
    again = train(machines, folder, "multi_node_ddp", 2, flags)
    assert "resumed from" in (tmp_path / "ddp-0.log").read_text()
    assert again.manifest(STEPS)["strategy"] == "DDP x 2 on cpu, fp32"
    assert again.losses == pytest.approx(reference.losses, rel=1e-5)
    assert sorted(again.losses) == list(range(1, STEPS + 1))
