"""Several pretend GPUs, whose group takes tensors of devices alone, as NCCL does: every strategy, and a rank that fails."""

import json

import pytest

from tests.conftest import ROOT, slow
from tests.pretend_cuda.test_templates import PRETRAIN, comparable

# AdamW: DTensor's products of sharded matrices, which Muon needs, are beyond the pretend device.
FLAGS = [*PRETRAIN, "--optim", "adamw", "--global_batch_size", 8, "--max_steps", 4, "--eval_steps", 4]
FLAGS += ["--save_steps", 2, "--logging_steps", 2]


@pytest.fixture(scope="module")
def flags(text_file):
    return [*FLAGS, "--train_file", text_file]


@pytest.fixture(scope="module")
def alone(on_cuda, flags, tmp_path_factory):
    return on_cuda("pretrain", tmp_path_factory.mktemp("alone") / "run", *flags, "--per_device_train_batch_size", 2)


# What a step sends: DDP's buckets and the norm's answer; FSDP's gathers; tensor parallelism's sums inside of blocks.
SENDS = {
    "ddp": {"c10d::allreduce_"},
    "fsdp2": {"c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_"},
    "fsdp2_tensor_parallel": {
        *("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_"),
        *("_c10d_functional::all_reduce", "_c10d_functional::_wrap_tensor_autograd"),
    },
}


@pytest.mark.parametrize(
    ("config", "processes", "kind"),
    [
        ("fsdp2", 2, "FSDP2 x 2"),
        ("ddp", 2, "DDP x 2"),
        ("fsdp2_offload", 2, "FSDP2 x 2"),
        ("fsdp2_tensor_parallel", 4, "FSDP2 2 x TP 2"),
    ],
)
@pytest.mark.slow
def test_a_strategy_learns_the_same_and_sends_only_what_its_devices_hold(
    on_cuda, flags, alone, tmp_path, config, processes, kind
):
    given, env = [*flags, "--per_device_train_batch_size", 1], {}
    if config == "ddp":  # one rank prepares the data for longer than a collective waits: the others are in none
        env = {"TEMPLATES_CACHE": str(tmp_path / "cache"), "TEMPLATES_FAULT": "prepare:pause#0"}
        given += ["--ddp_timeout", 4]
    many = on_cuda("pretrain", tmp_path / "run", *given, processes=processes, config=config, env=env)
    assert f"{kind} on cuda: NVIDIA H100 80GB HBM3, fp32 (TF32 in matrix products)" in many.summary
    assert many.manifest(4)["world_size"] == processes and len(many.logs) == processes
    assert many.losses == pytest.approx(alone.losses, rel=1e-5)
    assert many.last("eval_loss") == pytest.approx(alone.last("eval_loss"), rel=1e-5)
    for rank in range(processes):
        steady = many.at(3, rank)  # neither logs nor saves
        sent = {what.split()[2] for what in steady if what.startswith("device collective")}
        assert config not in SENDS or sent == SENDS[config]
        if "offload" in config:  # its optimizer is on the host, which reads the gradients
            continue
        assert {what.split(":")[0] for what in steady if "collective" not in what} == {"copy loader.py"}
        (flags,) = (what for what in steady if what.startswith("host collective"))
        assert flags.startswith("host collective c10d::allreduce_ guard.py") and steady[flags] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "precision", "more"),
    [
        ("ddp", "bf16", ["--optim", "muon"]),
        ("ddp", "fp16", ["--gradient_checkpointing", "full"]),
        ("sequence_parallel", "bf16", ["--gradient_checkpointing", "offload", "--isolate_documents"]),
        ("fsdp2", "bf16", ["--async_save", "--ema_decay", 0.9, "--isolate_documents"]),
        ("ddp", "bf16", ["--streaming", "--tokenizer_name", ROOT / "shared" / "demo" / "tiny-llama"]),
    ],
)
def test_other_paths_train_and_resume(on_cuda, flags, tmp_path, config, precision, more):
    launch = {"processes": 2, "config": config, "precision": precision}
    given = [*flags, *more, "--deterministic", "--per_device_train_batch_size", 2]
    straight = on_cuda("pretrain", tmp_path / "straight", *given, **launch)
    stop = {"TEMPLATES_FAULT": "update:term@3"}
    assert on_cuda("pretrain", tmp_path / "run", *given, **launch, env=stop, check=False).returncode != 0
    resumed = on_cuda("pretrain", tmp_path / "run", *given, **launch)
    assert "resumed from" in resumed.output and comparable(resumed) == comparable(straight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "config", "precision"), [(1, "single_gpu", "bf16"), (1, "single_gpu", "fp16"), (2, "fsdp2", "bf16")]
)
def test_a_4_bit_base_is_quantised_on_its_device(on_cuda, chat_file, tiny_model, tmp_path, processes, config, precision):
    flags = ["--train_file", chat_file, "--model_name_or_path", tiny_model, "--seq_length", 64, "--max_new_tokens", 2]
    flags += ["--load_in_4bit", "--max_steps", 3, "--global_batch_size", 4, "--logging_steps", 1]
    made = on_cuda("lora_finetune", tmp_path / "run", *flags, processes=processes, config=config, precision=precision)
    assert "attention of variable lengths, without a mask" in made.summary
    assert all(0 < loss < 20 for loss in made.losses.values()) and (made.folder / "final").exists()


@pytest.mark.slow
def test_where_one_ranks_memory_runs_out_all_halve_the_micro_batch(on_cuda, flags, alone, tmp_path):
    short = {"PRETEND_OUT_OF_MEMORY": "1 aten.mm 95"}
    given = [*flags, "--per_device_train_batch_size", 4, "--find_batch_size"]
    found = on_cuda("pretrain", tmp_path / "run", *given, processes=2, config="ddp", env=short)
    assert "out of memory with 4 at once; trying 2 at once, accumulated 2 times as often" in found.output
    assert "2 processes x 2 at once x 2 accumulated" in found.summary
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.parametrize("config", [slow("ddp"), slow("fsdp2")])
def test_out_of_memory_on_one_rank_ends_all_with_one_line(on_cuda, flags, tmp_path, config):
    short = {"PRETEND_OUT_OF_MEMORY": "1 aten.mm 150"}
    given = [*flags, "--per_device_train_batch_size", 4]
    ended = on_cuda("pretrain", tmp_path / "run", *given, processes=2, config=config, env=short, check=False)
    assert ended.returncode != 0
    assert "error on rank 1: out of memory: CUDA out of memory. Tried to allocate" in ended.output
    assert "next: --per_device_train_batch_size 2, which learns the same" in ended.output
    assert "destroy_process_group" not in ended.output
    end = json.loads((ended.folder / "exit.json").read_text())
    assert end["exit_code"] == 2 and end["rank"] == 1


def test_the_device_refuses_what_a_gpu_refuses(on_cuda, tmp_path):
    """The instrument itself: mixed devices, NCCL on CPU tensors, kernels past the dispatcher, too much memory; and reads."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    on_cuda(script, tmp_path, processes=2, config="ddp")


SCRIPT = """
import pytest
import torch
import torch.distributed as dist

import device

rank = torch.distributed.init_process_group("nccl") or dist.get_rank()
torch.cuda.set_device(rank)
here = torch.device("cuda", rank)
with pytest.raises(RuntimeError, match="same device"):
    torch.ones(2, device=here) + torch.ones(2)
with pytest.raises(RuntimeError, match="No backend type"):
    dist.all_reduce(torch.ones(2))
with pytest.raises(torch.OutOfMemoryError):
    torch.empty(100 << 30, dtype=torch.uint8, device=here)
with pytest.raises(RuntimeError, match="CUDA"):
    with torch.utils._python_dispatch._disable_current_modes():
        torch.ones(2, device=here) + 1
total = torch.full((2,), rank + 1.0, device=here)
dist.all_reduce(total)
assert total.device == here and total.tolist() == [3.0, 3.0]
everyone = [None, None]
dist.all_gather_object(everyone, rank)
assert everyone == [0, 1]
before = sum(n for (_, what), n in device.LOG.rows.items() if what.startswith("read"))
assert total.sum().item() == 6
after = sum(n for (_, what), n in device.LOG.rows.items() if what.startswith("read"))
assert after == before + 1
torch.manual_seed(1)
first = torch.rand(3, device=here)
state = torch.cuda.get_rng_state()
second = torch.rand(3, device=here)
torch.cuda.set_rng_state(state)
assert torch.equal(torch.rand(3, device=here), second) and not torch.equal(first, second)
dist.destroy_process_group()
"""
