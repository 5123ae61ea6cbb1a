"""Every launch config learns what one process learns, and resumes what any other has saved.

Each test is a real `accelerate launch` on 2 or 4 CPU processes. Losses over 10 optimizer steps with accumulation and
clipping agree to 1e-5 (fp32), where only the order of sums differs. Checkpoints hold the same tensors whatever saved
them, and every config resumes one that was cut in two dimensions, some also one that was saved whole: so any config
resumes any other's.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shared.parallel import sharding
from shared.parallel.tensor import tensor_parallel
from shared.process.errors import ConfigError
from shared.run.tensors import read_tensors
from tests.conftest import ROOT, make_model, run, slow

# config: processes, as the manifest names it
STRATEGIES = {
    "ddp": (2, "DDP x 2"),
    "fsdp2": (2, "FSDP2 x 2"),
    "fsdp2_offload": (2, "FSDP2 x 2"),
    "hsdp": (4, "HSDP 2 x 2"),
    "tensor_parallel": (2, "TP 2"),
    "fsdp2_tensor_parallel": (4, "FSDP2 2 x TP 2"),
    "sequence_parallel": (2, "DDP x 2 with SP 2"),
    "fsdp2_sequence_parallel": (4, "FSDP2 4 with SP 2"),
    "deepspeed_zero2": (2, "ZeRO-2 x 2"),
    "deepspeed_zero3": (2, "ZeRO-3 x 2"),
    "deepspeed_zero3_offload": (2, "ZeRO-3 x 2"),
}
FIRST = ("ddp", "fsdp2", "tensor_parallel", "sequence_parallel", "deepspeed_zero3")  # the others are of the exhaustive tier
STEPS, SAVED = 10, 4
COMMON = ("--max_steps", STEPS, "--save_steps", SAVED, "--save_total_limit", 9, "--global_batch_size", 8)
COMMON = (*COMMON, "--max_grad_norm", 0.5, "--eval_samples", 9)


@pytest.fixture(scope="module")
def flags(text_file, chat_file, tiny_model):
    return {
        "pretrain": (*COMMON, "--train_file", text_file, "--seq_length", 32, "--model_name_or_path", tiny_model),
        "lora_finetune": (
            *(*COMMON, "--train_file", chat_file, "--seq_length", 64, "--model_name_or_path", tiny_model),
            *("--show_answers", 0, "--lora_dropout", 0.0),
        ),
        "full_finetune": (
            *(*COMMON, "--train_file", chat_file, "--seq_length", 64, "--model_name_or_path", tiny_model),
            *("--show_answers", 0, "--learning_rate", 3e-4),
        ),
    }


@pytest.fixture(scope="module")
def reference(flags, tmp_path_factory):
    """One process, each template: what all others are compared with."""
    return {
        template: run(template, tmp_path_factory.mktemp(template), *given, "--per_device_train_batch_size", 4)
        for template, given in flags.items()
    }


@pytest.fixture(scope="module")
def launched(flags, tmp_path_factory):
    """(template, config) -> its run, made once."""
    runs = {}

    def launch(template: str, config: str):
        if (template, config) not in runs:
            folder = tmp_path_factory.mktemp(f"{template}-{config}")
            micro = ("--per_device_train_batch_size", 1 if STRATEGIES[config][0] == 4 else 2)
            runs[template, config] = run(
                template, folder, *flags[template], *micro, processes=STRATEGIES[config][0], config=config
            )
        return runs[template, config]

    return launch


def test_the_table_has_every_launch_config_of_several_processes():
    files = {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")}
    elsewhere = {"cpu", "single_gpu", "fp8", "multi_node_ddp", "multi_node_hsdp"}
    assert files - elsewhere == set(STRATEGIES)


@pytest.mark.parametrize(
    ("template", "config"),
    [("pretrain", config) if config in FIRST else slow("pretrain", config) for config in STRATEGIES]
    + [slow("lora_finetune", config) for config in ("fsdp2", "hsdp", "tensor_parallel", "deepspeed_zero3")]
    + [slow("lora_finetune", "fsdp2_sequence_parallel"), slow("full_finetune", "sequence_parallel")]
    + [slow("full_finetune", config) for config in ("fsdp2", "fsdp2_tensor_parallel", "deepspeed_zero3")],
)
def test_learns_what_one_process_learns(reference, launched, template, config):
    processes, name = STRATEGIES[config]
    one, other = reference[template], launched(template, config)
    counts = [row["tokens"] for row in one.rows if "tokens" in row]
    assert template != "pretrain" or len(set(np.diff([0, *counts]).tolist())) == 2  # a ragged batch ends an epoch
    manifest = other.manifest(STEPS)
    assert manifest["world_size"] == processes
    assert manifest["strategy"] == f"{name} on cpu, fp32"
    assert f"{name} on cpu, fp32" in other.output
    assert "fused with the head" in other.summary
    assert other.losses == pytest.approx(one.losses, rel=1e-5)
    assert [row["grad_norm"] for row in other.rows if "grad_norm" in row] == pytest.approx(
        [row["grad_norm"] for row in one.rows if "grad_norm" in row], rel=1e-4
    )
    assert max(row["grad_norm"] for row in one.rows if "grad_norm" in row) > 0.5  # so that clipping did something
    assert other.last("eval_loss") == pytest.approx(one.last("eval_loss"), rel=1e-5)
    assert other.weights().keys() == one.weights().keys()
    for key, value in one.weights().items():
        torch.testing.assert_close(other.weights()[key], value, rtol=1e-3, atol=5e-5)
    if template == "lora_finetune":
        return
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
        *(
            slow("deepspeed_zero2", None),
            *(slow("fsdp2_sequence_parallel", config) for config in (None, "ddp", "tensor_parallel")),
            slow("fsdp2_tensor_parallel", "sequence_parallel"),
            *(slow("fsdp2_tensor_parallel", config) for config in (None, "fsdp2", "tensor_parallel", "deepspeed_zero2")),
        ),
    ],
)
def test_resumes_what_another_has_saved(reference, launched, flags, tmp_path, saved_by, config):
    source = launched("pretrain", saved_by) if saved_by else reference["pretrain"]
    processes = STRATEGIES[config][0] if config else 1
    start = ("--resume_from_checkpoint", source.folder / f"checkpoint-{SAVED:06d}", "--per_device_train_batch_size", 2)
    resumed = run("pretrain", tmp_path, *flags["pretrain"], *start, processes=processes, config=config)
    assert f"at step {SAVED}" in resumed.output
    name = STRATEGIES[config][1] if config else "1 process"
    assert resumed.manifest(STEPS)["strategy"] == f"{name} on cpu, fp32"
    assert resumed.losses == pytest.approx({s: v for s, v in source.losses.items() if s > SAVED}, rel=1e-5)


@pytest.fixture(scope="module")
def muon(text_file, tmp_path_factory):
    """Flags of a run from random weights, and what one process makes of them."""
    flags = (*COMMON, "--train_file", text_file, "--seq_length", 32, "--vocab_size", 300, "--learning_rate", 3e-3)
    flags = (*flags, "--config_overrides", "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2")
    return flags, run("pretrain", tmp_path_factory.mktemp("muon"), *flags, "--per_device_train_batch_size", 4)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2", "hsdp", "tensor_parallel", "fsdp2_tensor_parallel", "deepspeed_zero3"])
def test_random_weights_learn_by_muon_what_one_process_learns(muon, tmp_path, config):
    flags, one = muon
    processes, name = STRATEGIES[config]
    micro = ("--per_device_train_batch_size", 1 if processes == 4 else 2)
    other = run("pretrain", tmp_path, *flags, *micro, processes=processes, config=config)
    assert other.manifest(STEPS)["strategy"] == f"{name} on cpu, fp32"
    assert "optim muon (" in one.summary
    if config == "deepspeed_zero3":
        assert "optim adamw (" in other.summary
        return
    assert "optim muon (" in other.summary
    assert other.losses == pytest.approx(one.losses, rel=1e-5)
    assert one.losses[STEPS] < one.losses[1] - 0.3
    for key, value in one.weights().items():
        torch.testing.assert_close(other.weights()[key], value, rtol=1e-3, atol=5e-4)


@pytest.mark.slow
def test_an_adapter_of_the_head_learns_what_one_process_learns(flags, tmp_path):
    """ZeRO-3 has the adapter's weights only while the adapter runs."""
    given = (*flags["lora_finetune"], "--lora_target_modules", "q_proj", "lm_head")
    one = run("lora_finetune", tmp_path / "one", *given)
    two = run("lora_finetune", tmp_path / "two", *given, processes=2, config="deepspeed_zero3")
    assert "fused with the head" in two.summary
    assert two.losses == pytest.approx(one.losses, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["hsdp", "deepspeed_zero2"])
def test_qlora_learns_what_one_process_learns(flags, launched, tmp_path, config):
    given = (*flags["lora_finetune"], "--load_in_4bit")
    one = run("lora_finetune", tmp_path / "one", *given, "--per_device_train_batch_size", 4)
    processes = STRATEGIES[config][0]
    other = run(
        *("lora_finetune", tmp_path / "other", *given, "--per_device_train_batch_size", 2),
        processes=processes,
        config=config,
    )
    assert other.manifest(STEPS)["strategy"] == f"{STRATEGIES[config][1]} on cpu, fp32"
    assert other.losses == pytest.approx(one.losses, rel=1e-5)


@pytest.mark.parametrize(
    ("template", "config", "precision", "extra", "message"),
    [
        ("pretrain", "deepspeed_zero2", "no", ("--optim", "muon"), "under DeepSpeed only --optim adamw works"),
        ("lora_finetune", "tensor_parallel", "no", ("--load_in_4bit",), "tensor parallelism cannot cut quantised weights"),
        slow("pretrain", "tensor_parallel", "no", ("--optim", "adamw_8bit"), "--optim adamw_8bit does not work with tensor"),
        slow(
            "full_finetune",
            "deepspeed_zero2",
            "no",
            ("--weights_dtype", "bf16"),
            "under DeepSpeed only --optim adamw works, on fp32 weights",
        ),
        slow("pretrain", "tensor_parallel", "fp8", (), "tensor parallelism does not work with fp8"),
    ],
)
def test_what_a_strategy_cannot_do_is_one_line(flags, tmp_path, template, config, precision, extra, message):
    how = {"processes": 2, "config": config, "precision": precision, "check": False}
    done = run(template, tmp_path, *flags[template], *extra, **how)
    assert done.returncode != 0
    assert done.output.count(f"error: {message}") == 1 and "Traceback" not in done.output.split("torch/distributed")[0]


@pytest.mark.slow
def test_sizes_and_answers_that_do_not_agree_are_refused(flags, tmp_path):
    env = {"ACCELERATE_GRADIENT_CLIPPING": "1.0"}
    done = run("pretrain", tmp_path, *flags["pretrain"], processes=2, config="deepspeed_zero2", env=env, check=False)
    assert "error: gradient_clipping is 1.0 in the DeepSpeed config, but --max_grad_norm is 0.5" in done.output
    done = run("pretrain", tmp_path, *flags["pretrain"], processes=3, config="hsdp", check=False)
    assert "3 processes were launched, but the launch config's sizes are dp_replicate_size 2 x dp_shard" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("config", ["fsdp2_offload", "deepspeed_zero3"])
def test_one_process_rehearses_what_it_is_launched_as(flags, reference, tmp_path, config):
    given = (*flags["pretrain"], "--per_device_train_batch_size", 4)
    done = run("pretrain", tmp_path, *given, config=config)
    assert done.manifest(STEPS)["strategy"] == f"{'FSDP2' if config[0] == 'f' else 'ZeRO-3'} x 1 on cpu, fp32"
    assert done.losses == pytest.approx(reference["pretrain"].losses, rel=1e-5)


def test_adapters_with_norms_of_whole_weights_are_not_cut():
    import peft
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64))
    model = peft.get_peft_model(model, peft.LoraConfig(use_dora=True, target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="tensor parallelism does not work with --use_dora"):
        tensor_parallel(model, SimpleNamespace(size=lambda: 2, device_type="cpu"))


@pytest.mark.parametrize(
    ("kind", "shape", "ranks", "message"),
    [
        ("GPTNeoX", {"num_attention_heads": 3, "hidden_size": 48}, 2, "3 attention heads, which tp_size 2 does not divide"),
        ("Phi", {"qk_layernorm": True}, 2, "q_layernorm sees all heads"),
    ],
)
def test_models_that_tensor_parallelism_would_compute_otherwise_are_refused(kind, shape, ranks, message):
    import transformers

    usual = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**usual | shape))
    with pytest.raises(ConfigError, match=message):
        tensor_parallel(model, SimpleNamespace(size=lambda: ranks, device_type="cpu"))


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
    how = {"processes": processes, "config": config}
    eight = run(template, tmp_path / "fp8", *given, precision="fp8", **how)
    spread = "FSDP2 x 2" if config == "fsdp2" else "1 process"
    assert eight.manifest(STEPS)["strategy"] == f"{spread} on cpu, fp8"
    assert "fused with the head" in one.summary and "fused with the head" in eight.summary
    assert eight.losses != one.losses
    assert eight.losses == pytest.approx(one.losses, rel=5e-3)  # fp8 keeps 3 bits of each factor of a product
    start = ("--resume_from_checkpoint", eight.folder / f"checkpoint-{SAVED:06d}")
    resumed = run(template, tmp_path / "fp32", *given, *start)
    assert resumed.losses == pytest.approx({s: v for s, v in one.losses.items() if s > SAVED}, rel=5e-3)
    assert resumed.weights().keys() == eight.weights().keys()
