"""Launches that would train something else than they seem to, and what launch.py promises."""

import os
import subprocess

import pytest
import torch
from accelerate.utils import parse_flag_from_env

from shared.process.errors import ConfigError, NotNow
from shared.process.ranks import data_parallel_size, env_flag
from shared.run import launch
from tests.conftest import ACCELERATE, LAUNCHER, ROOT, Run, command, free_port, learn_here, run, slow


def test_two_processes_that_each_believe_they_are_alone_are_refused(tmp_path):
    done = run("pretrain", tmp_path, "--max_steps", 1, processes=2, check=False, env={"ACCELERATE_USE_CPU": ""})
    assert done.returncode != 0
    assert done.output.count("error: 2 processes were launched but no GPU is visible") == 1
    assert "ACCELERATE_USE_CPU=true" in done.output
    assert not (tmp_path / "metrics.jsonl").exists()


def test_fp16_without_a_gpu_is_refused(tmp_path):
    """As in a notebook whose GPU is not turned on: Accelerate would compute half of a step in fp32, which raises."""
    ended = run("lora_finetune", tmp_path / "run", config="single_gpu", precision="fp16", check=False)
    assert ended.returncode != 0 and "error: fp16 needs a GPU, and none is in use" in ended.output


def test_what_accelerate_takes_for_yes_is_yes(monkeypatch):
    for word in ["1", "true", "TRUE", "t", "yes", "y", "on", "0", "false", "f", "no", "n", "off"]:
        monkeypatch.setenv("ACCELERATE_USE_CPU", word)
        assert env_flag("ACCELERATE_USE_CPU") == parse_flag_from_env("ACCELERATE_USE_CPU"), word


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "gradient_accumulation_steps is 4 in the launch config"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend is inductor .* give --torch_compile"),
        ({"ACCELERATE_USE_FSDP": "true"}, "fsdp_version is 1 .* use fsdp2.yaml"),  # what Accelerate takes it for
        (FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "fsdp_activation_checkpointing is True .*_checkpointing full"),
    ],
)
def test_no_value_has_two_owners(monkeypatch, variables, message):
    """Accelerate's wrappers would give weights names that neither final/ nor a checkpoint may have."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        launch.start(0)


@pytest.mark.parametrize(
    ("sizes", "sharded", "message"),
    [
        ({"tp_size": 2, "dp_shard_size": 2}, False, "dp_shard_size above 1 and FSDP need each other"),
        ({"dp_replicate_size": 4}, True, "dp_shard_size above 1 and FSDP need each other"),
        ({"dp_shard_size": 2, "cp_size": 2}, True, "cp_size, .* do not work: use sequence_parallel.yaml"),
    ],
)
def test_sizes_that_would_train_something_else_are_refused(monkeypatch, sizes, sharded, message):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(sharded).lower())
    for name, value in sizes.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}", str(value))
    with pytest.raises(ConfigError, match=message):
        data_parallel_size()


def test_a_gpu_that_pytorch_cannot_use_is_not_left_idle_in_silence(monkeypatch):
    monkeypatch.setattr(launch, "_nvidia_gpus", lambda: ["/dev/nvidia0"])
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(NotNow, match=r"this machine has a GPU, but PyTorch .* cannot use it"):
        launch.start(0)


def test_sharded_gradients_are_summed_in_fp32(tmp_path):
    """And what a model returns is not rounded, though the launch config says bf16 alone."""
    script = tmp_path / "policy.py"
    script.write_text(
        "from shared.process.printing import print_main\nfrom shared.run import launch\n"
        "accelerator = launch.start(0)\n"
        "policy = accelerator.state.fsdp_plugin.mixed_precision_policy\n"
        "print_main(f'{launch.strategy(accelerator)}: {policy.param_dtype}, {policy.reduce_dtype}, {policy.output_dtype}')\n"
    )
    argv = ["--config_file", str(ROOT / "accelerate_configs/fsdp2.yaml"), "--num_processes", "1"]
    argv += ["--mixed_precision", "bf16", "--main_process_port", str(free_port()), str(script)]
    code, output = LAUNCHER.run(argv, dict(os.environ) | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)})
    assert code == 0 and "FSDP2 x 1 on cpu, bf16: torch.bfloat16, torch.float32, None" in output, output


@pytest.fixture(scope="module")
def small(text_file, tiny_model, tmp_path_factory):
    """(flags of a run of three steps, its losses one row at a time)."""
    flags = ("--train_file", text_file, "--model_name_or_path", tiny_model, "--seq_length", 32, "--max_steps", 3)
    flags = (*flags, "--eval_samples", 2, "--global_batch_size", 8)
    folder = tmp_path_factory.mktemp("small")
    return flags, learn_here("pretrain", folder, *flags, "--per_device_train_batch_size", 1).losses


def short_of_memory(folder, where, *flags, processes=1, config=None):
    """Launch pretrain.py on a device that has no memory for more than one row at once, where it is to take four."""
    argv = command("pretrain", folder, *flags, "--per_device_train_batch_size", 4, processes=processes, config=config)
    place = argv.index(str(ROOT / "templates" / "pretrain.py"))
    argv[place : place + 1] = [str(ROOT / "tests" / "short_of_memory.py"), "1", where, "pretrain"]
    return Run(folder, *LAUNCHER.run(argv, dict(os.environ)))


@pytest.mark.parametrize(
    ("config", "processes", "where"), [("fsdp2", 2, "backward"), slow(None, 1, "forward"), slow("ddp", 2, "forward")]
)
def test_where_memory_runs_out_the_micro_batch_is_halved_and_nothing_else_changes(small, tmp_path, config, processes, where):
    flags, losses = small
    short = short_of_memory(tmp_path, where, *flags, "--find_batch_size", processes=processes, config=config)
    assert short.returncode == 0, short.output
    assert "out of memory with 4 at once; trying 2 at once, accumulated 2 times as often" in short.output
    assert f"{processes} process{'es' * (processes > 1)} x 1 at once x {8 // processes} accumulated" in short.output
    assert short.losses == pytest.approx(losses, rel=1e-5)


def test_out_of_memory_names_the_next_lever(small, tmp_path):
    short = short_of_memory(tmp_path, "backward", *small[0])
    assert short.returncode != 0
    advice = "error: out of memory: 4 rows do not fit\n  next: --per_device_train_batch_size 2"
    assert advice in short.output and "--gradient_checkpointing full" in short.output


STARTS = """
import sys
import torch
from shared.process import ranks
from shared.run import launch
ranks.cores = lambda: 14
launch._use_all_cores(2)
print("threads", torch.get_num_threads())
launch.start(0)
"""


def test_processes_that_were_asked_for_and_not_started_are_told(tmp_path):
    """`accelerate launch --cpu --num_processes 2` starts one process, and says nothing."""
    (tmp_path / "script.py").write_text(STARTS)
    argv = [*ACCELERATE, "--cpu", "--num_processes", "2", str(tmp_path / "script.py")]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True)
    assert "ConfigError: --num_processes 2, but this launch config starts one process: take ddp.yaml" in done.stderr
    assert done.returncode and done.stdout == "threads 1\n"  # the user's


@pytest.mark.parametrize("options", ["--num_processes=2", "--num-processes 2"])
def test_processes_are_asked_for_in_several_ways(monkeypatch, options):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(launch, "_of_launcher", lambda _: f"accelerate launch {options} x.py".replace(" ", "\0"))
    with pytest.raises(ConfigError, match="--num_processes 2, but this launch config starts one process"):
        launch._refuse_fewer_processes_than_asked_for()
