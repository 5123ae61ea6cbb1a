"""Every launch config learns what one process learns, and resumes what any other has saved.

Each test is a real `accelerate launch` on 2 or 4 CPU processes. Losses over 6 optimizer steps with accumulation and
clipping agree to 1e-5 (fp32), where only the order of sums differs. Checkpoints hold the same tensors whatever saved
them, and each kind of sharding resumes one of another: so any config resumes any other's. How full_finetune.py learns
on several processes: tests/answers.
"""

from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn

from shared.config.options import OptimConfig
from shared.extras import tensor
from shared.parallel import sharding
from shared.process.errors import ConfigError
from shared.run.tensors import read_tensors
from shared.training import optim
from tests.conftest import ROOT, STRATEGIES, Run, learn_here, make_model, run, slow
from tests.same import assert_same_learning

FOUR = {"hsdp", "fsdp2_tensor_parallel", "fsdp2_sequence_parallel"}  # processes; of others two
FIRST = ("ddp", "fsdp2", "tensor_parallel", "sequence_parallel", "deepspeed_zero3")  # the others are of the exhaustive tier
STEPS, SAVED = 6, 3
COMMON = ("--max_steps", STEPS, "--save_steps", SAVED, "--save_total_limit", 9, "--global_batch_size", 8, "--seq_length", 64)
COMMON = (*COMMON, "--max_grad_norm", 0.5, "--eval_samples", 9)
SHAPE = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2"
FROM_SCRATCH = ("--vocab_size", 300, "--learning_rate", 3e-3, "--config_overrides", SHAPE)
QLORA = ("--load_in_4bit",)


@pytest.fixture(scope="module")
def flags(text_file, chat_file, tiny_model):
    """By template; muon: pretrain from random weights."""
    chats = (*COMMON, "--train_file", chat_file, "--model_name_or_path", tiny_model, "--show_answers", 0)
    return {
        "pretrain": (*COMMON, "--train_file", text_file, "--model_name_or_path", tiny_model),
        "lora_finetune": (*chats, "--lora_dropout", 0.0),
        "full_finetune": chats,
        "muon": (*COMMON, "--train_file", text_file, *FROM_SCRATCH),
    }


@pytest.fixture(scope="module")
def launched(flags, tmp_path_factory):
    """(key of `flags`, config, more flags) -> its run, made once; without a config one process, which others equal."""
    runs: dict[tuple, Run] = {}

    def launch(kind: str, config: str | None = None, more: tuple = ()) -> Run:
        if (kind, config, more) not in runs:
            processes = (4 if config in FOUR else 2) if config else 1
            given = (*flags[kind], *more, "--per_device_train_batch_size", 4 // processes)
            template, folder = kind.replace("muon", "pretrain"), tmp_path_factory.mktemp(f"{kind}-{config}")
            launch = {"processes": processes, "config": config} if config else {}
            runs[kind, config, more] = (run if config else learn_here)(template, folder, *given, **launch)
        return runs[kind, config, more]

    return launch


def test_the_table_has_every_launch_config_of_several_processes():
    files = {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    elsewhere = {"cpu", "single_gpu", "fp8", "multi_node_ddp", "multi_node_hsdp"}
    assert files - elsewhere == set(STRATEGIES)


@pytest.mark.parametrize(
    ("kind", "config", "more"),
    [
        *(("pretrain", config, ()) if config in FIRST else slow("pretrain", config, ()) for config in STRATEGIES),
        *(slow("lora_finetune", config, ()) for config in ("tensor_parallel", "fsdp2_sequence_parallel")),
        *(slow("lora_finetune", config, QLORA) for config in ("hsdp", "deepspeed_zero2")),
        # ZeRO-3 has the weights of an adapter of the head only while the adapter runs
        slow("lora_finetune", "deepspeed_zero3", ("--lora_target_modules", "q_proj", "lm_head")),
        # Under DDP and FSDP2: test_faults.py
        *(slow("muon", config, ()) for config in ("hsdp", "tensor_parallel", "fsdp2_tensor_parallel")),
    ],
)
def test_learns_what_one_process_learns(launched, kind, config, more):
    one, other = launched(kind, None, more), launched(kind, config, more)
    assert other.manifest(STEPS)["strategy"] in other.output
    assert "fused with the head" in other.summary
    assert_same_learning(one, other, atol=5e-4 if kind == "muon" else 5e-5)
    if kind == "muon":
        assert "optim muon (" in one.summary and "optim muon (" in other.summary
        assert one.losses[STEPS] < one.losses[1] - 0.3
    if kind == "muon" or more:
        return
    assert other.each("grad_norm") == pytest.approx(one.each("grad_norm"), rel=1e-4)
    assert max(one.each("grad_norm")) > 0.5  # so that clipping did something
    if kind == "lora_finetune":
        return
    assert len({*np.diff([0, *one.each("tokens")]).tolist()}) == 2  # a ragged batch ends an epoch
    saved, expected = (read_tensors(r.folder / f"checkpoint-{SAVED:06d}") for r in (other, one))
    assert saved.keys() == expected.keys()
    theirs = {key: torch.empty_like(value) for key, value in saved.items()}  # PyTorch's own reader puts it together alike
    dcp.load(theirs, storage_reader=dcp.HuggingFaceStorageReader(f"{other.folder}/checkpoint-{SAVED:06d}"), no_dist=True)
    assert all(value.equal(theirs[key]) for key, value in saved.items())
    for key, value in expected.items():
        scale = value.float().abs().max().item()  # second moments are tiny numbers
        torch.testing.assert_close(saved[key].float(), value.float(), rtol=1e-3, atol=2e-3 * scale + 1e-12, msg=key)


@pytest.mark.parametrize(
    ("saved_by", "config"),
    [
        *(("tensor_parallel", None), ("deepspeed_zero3", "fsdp2"), slow(None, "deepspeed_zero3"), slow("hsdp", "ddp")),
        *(slow("fsdp2_tensor_parallel", "deepspeed_zero2"), slow("fsdp2_sequence_parallel", "tensor_parallel")),
        slow("deepspeed_zero2", "sequence_parallel"),
    ],
)
def test_resumes_what_another_has_saved(launched, flags, tmp_path, saved_by, config):
    source = launched("pretrain", saved_by)
    processes = (4 if config in FOUR else 2) if config else 1
    start = ("--resume_from_checkpoint", source.folder / f"checkpoint-{SAVED:06d}", "--per_device_train_batch_size", 2)
    resumed = run("pretrain", tmp_path, *flags["pretrain"], *start, processes=processes, config=config)
    assert f"at step {SAVED}" in resumed.output
    assert resumed.losses == pytest.approx({s: v for s, v in source.losses.items() if s > SAVED}, rel=1e-5)


def test_what_a_strategy_cannot_do_is_one_line(flags, tmp_path):
    given = (*flags["pretrain"], "--optim", "muon")
    done = run("pretrain", tmp_path, *given, processes=2, config="deepspeed_zero2", check=False)
    assert done.returncode != 0 and "Traceback" not in done.output.split("torch/distributed")[0]
    assert done.output.count("error: under DeepSpeed only --optim adamw works, on fp32 weights") == 1, done.output


@pytest.mark.slow
def test_sizes_and_answers_that_do_not_agree_are_refused(flags, tmp_path):
    env = {"ACCELERATE_GRADIENT_CLIPPING": "1.0"}
    done = run("pretrain", tmp_path, *flags["pretrain"], processes=2, config="deepspeed_zero2", env=env, check=False)
    assert "error: gradient_clipping is 1.0 in the DeepSpeed config, but --max_grad_norm is 0.5" in done.output
    done = run("pretrain", tmp_path, *flags["pretrain"], processes=3, config="hsdp", check=False)
    assert "3 processes were launched, but the launch config's sizes are dp_replicate_size 2 x dp_shard" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("config", ["fsdp2_offload", "deepspeed_zero3"])
def test_one_process_rehearses_what_it_is_launched_as(flags, launched, tmp_path, config):
    given = (*flags["pretrain"], "--per_device_train_batch_size", 4)
    done = run("pretrain", tmp_path, *given, config=config)
    assert done.losses == pytest.approx(launched("pretrain").losses, rel=1e-5)


def with_norms_of_whole_weights(model):
    return peft.get_peft_model(model, peft.LoraConfig(use_dora=True, target_modules=["q_proj"]))


def quantised(model):
    model.lm_head.weight.quant_state = "nf4"
    return model


@pytest.mark.parametrize(
    ("kind", "shape", "change", "message"),
    [
        ("GPTNeoX", {"num_attention_heads": 3, "hidden_size": 48}, None, "3 attention heads, which tp_size 2 does not"),
        ("Phi", {"qk_layernorm": True}, None, "q_layernorm sees all heads"),
        ("Llama", {}, with_norms_of_whole_weights, "tensor parallelism does not work with --use_dora"),
        ("Llama", {}, quantised, "tensor parallelism cannot cut quantised weights"),
    ],
)
def test_models_that_tensor_parallelism_would_compute_otherwise_are_refused(kind, shape, change, message):
    usual = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**usual | shape))
    with pytest.raises(ConfigError, match=message):
        tensor.tensor_parallel(change(model) if change else model, SimpleNamespace(size=lambda: 2, device_type="cpu"))


@pytest.mark.parametrize(
    ("precision", "optimizer", "message"),
    [("fp8", "adamw", "tensor parallelism does not work with fp8"), ("no", "adamw_8bit", "adamw_8bit does not work with t")],
)
def test_precisions_and_optimizers_that_tensor_parallelism_does_not_have_are_refused(precision, optimizer, message):
    optimizers = optim.build(nn.Linear(2, 2), OptimConfig(optim=optimizer, learning_rate=1e-3))
    with pytest.raises(ConfigError, match=message):
        tensor.cut(SimpleNamespace(mixed_precision=precision), nn.Linear(2, 2), optimizers, None)


def test_a_model_that_keeps_weights_in_fp32_beside_bf16_ones_is_not_sharded():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=None), parallelism_config=None)
    with pytest.raises(ConfigError, match=r"keeps 2 weights in fp32, such as 0\.weight, which FSDP cannot shard together"):
        sharding._shard(accelerator, model, [], replicas=False)


@pytest.mark.slow
@pytest.mark.parametrize(("template", "config"), [("pretrain", "fsdp2"), ("lora_finetune", "fp8")])
def test_fp8_learns_nearly_what_bf16_learns_and_resumes_as_fp32(flags, tmp_path, template, config):
    # Products in fp8 are computed number by number where a CPU has no unit for them.
    model = make_model(tmp_path / "model", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    given = (*flags[template], "--model_name_or_path", model, "--per_device_train_batch_size", 2)
    one = run(template, tmp_path / "bf16", *given, config="single_gpu", precision="bf16")
    processes = 2 if config == "fsdp2" else 1
    eight = run(template, tmp_path / "fp8", *given, precision="fp8", processes=processes, config=config)
    assert eight.manifest(STEPS)["strategy"].endswith("on cpu, fp8")
    assert "fused with the head" in one.summary and "fused with the head" in eight.summary
    assert eight.losses != one.losses
    assert eight.losses == pytest.approx(one.losses, rel=5e-3)  # fp8 keeps 3 bits of each factor of a product
    start = ("--resume_from_checkpoint", eight.folder / f"checkpoint-{SAVED:06d}")
    resumed = run(template, tmp_path / "fp32", *given, *start)
    assert resumed.losses == pytest.approx({s: v for s, v in one.losses.items() if s > SAVED}, rel=5e-3)
    assert resumed.weights().keys() == eight.weights().keys()
