"""Which class loads a checkpoint, what carries adapters, and recurrent layers that keep packed documents apart."""

import random
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel

from shared.models import isolation
from shared.models.adapters import add_adapters
from shared.models.loading import class_of, load_causal_lm, outer_parts
from shared.models.options import AdapterConfig
from shared.models.targets import describe, find_targets
from shared.process.errors import ConfigError
from tests.conftest import ROOT, run, sentence, slow, write_lines
from tests.model_families import make
from tests.plain_loop import number_of_rows

QKVO = "k_proj o_proj q_proj v_proj"
CPU = torch.device("cpu")
KERNELS = Path(__file__).parent / "kernels"


def test_the_class_that_architectures_names_loads_the_whole_checkpoint(checkpoint):
    name = str(checkpoint("qwen3_5")[0])
    config = transformers.AutoConfig.from_pretrained(name)
    assert class_of(config) is transformers.Qwen3_5ForConditionalGeneration
    whole = load_causal_lm(name, attn_implementation="auto")
    assert outer_parts(whole) == ["model.visual"]
    frozen = {key for key, parameter in whole.named_parameters() if not parameter.requires_grad}
    assert frozen == {key for key, _ in whole.named_parameters() if key.startswith("model.visual.")}
    encoder_decoder = transformers.T5Config(architectures=["T5ForConditionalGeneration"])
    assert class_of(encoder_decoder) is transformers.AutoModelForCausalLM


def test_a_weight_that_its_class_freezes_is_frozen_when_it_is_loaded(checkpoint):
    """It gets no gradient, for which DDP would wait."""
    model = load_causal_lm(str(checkpoint("ernie4_5_moe")[0]), attn_implementation="auto")
    assert outer_parts(model) == []
    frozen = {key for key, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {"model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"}


@pytest.mark.parametrize(
    ("family", "flags", "modules", "parameters", "left_out"),
    [
        ("llama4", {}, "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj", 2, ["feed_forward.router (routers)"]),
        ("glm4_moe", {}, QKVO, 5, []),
        ("glm4_moe", {"lora_experts": False}, QKVO, 3, ["experts.down_proj", "experts.gate_up_proj"]),
        ("glm4_moe", {"lora_dropout": 0.1}, QKVO, 0, ["down_proj.weight", "not with --lora_dropout"]),
        ("glm4_moe", {"load_in_4bit": True}, QKVO, 5, []),
        ("nemotron_h", {}, "down_proj in_proj k_proj o_proj q_proj up_proj v_proj", 2, ["mixer.out_proj"]),
    ],
)
def test_routers_carry_no_adapters_and_experts_do_if_peft_can(checkpoint, family, flags, modules, parameters, left_out):
    base = load_causal_lm(str(checkpoint(family)[0]), attn_implementation="auto")
    targets = find_targets(base, AdapterConfig(**flags))
    assert {name.rpartition(".")[2] for name in targets.target_modules} == set(modules.split())
    assert targets.target_modules == [name for name, _ in base.named_modules() if name in targets.target_modules]
    assert len(targets.target_parameters) == parameters
    about = "; ".join(targets.left_out)
    assert all(part in about for part in left_out) and bool(about) == bool(left_out)


def test_the_adapter_that_is_saved_has_short_names_and_loads_by_peft_alone(tmp_path):
    """As PEFT shortens them itself, 20 or more."""
    name = str(tmp_path / "base")
    make("glm4_moe", tmp_path / "base", num_hidden_layers=5)
    model = add_adapters(load_causal_lm(name, attn_implementation="auto"), AdapterConfig())
    assert "experts.gate_up_proj" in describe(model) and "gate_proj.weight" in describe(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(8, 40)[None]
    loaded = PeftModel.from_pretrained(transformers.Glm4MoeForCausalLM.from_pretrained(name), tmp_path / "adapter")
    with torch.no_grad():
        expected, found = (m.eval()(input_ids=ids, use_cache=False).logits for m in (model, loaded))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(loaded.merge_and_unload()(input_ids=ids).logits, expected, atol=1e-4, rtol=1e-4)
    assert all(len(target.split(".")) <= 2 for target in loaded.peft_config["default"].target_modules)


def test_parameters_can_be_named(checkpoint):
    base = load_causal_lm(str(checkpoint("glm4_moe")[0]), attn_implementation="auto")
    named = find_targets(base, AdapterConfig(lora_target_modules=("q_proj", "experts.down_proj")))
    assert named.target_modules == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    assert named.target_parameters == ["experts.down_proj"]
    with pytest.raises(ConfigError, match="--lora_target_modules qproj: the model has no module of that name"):
        find_targets(base, AdapterConfig(lora_target_modules=("qproj",)))
    base = load_causal_lm(str(checkpoint("mistral_large4")[0]), attn_implementation="auto")
    for name in ("experts.down_proj", "shared_experts.up_proj"):  # its adapter, and what is merged, would be empty
        with pytest.raises(ConfigError, match=f"PEFT would not load that of model.language_model.layers.1.mlp.{name}"):
            find_targets(base, AdapterConfig(lora_target_modules=("o_proj", name)))


def test_recurrent_layers_are_not_packed_without_their_kernels(checkpoint):
    model = load_causal_lm(str(checkpoint("qwen3_5")[0]), attn_implementation="auto").eval()
    apart, why = isolation.isolate_documents(model, CPU, 2)
    assert not apart and "`causal_conv1d_fn` can't keep packed sequences apart without `causal_conv1d`" in why
    with pytest.raises(ConfigError, match="Qwen3_5ForConditionalGeneration lets documents of one row see each other"):
        isolation.isolate_documents(model, CPU, 2, required=True)


FLA, CONV, MAMBA = "causal_conv1d, fla", "causal_conv1d", "causal_conv1d, mamba_ssm"
ONE_GROUP = {"mamba_n_groups": 1}  # as in their checkpoints: mamba_ssm norms each group, these models all of them
PACKED_BY = {
    **dict.fromkeys(("qwen3_5", "kimi_linear", "qwen3_next", "qwen3_5_moe", "olmo_hybrid"), (FLA, {})),
    "nemotron_h": (MAMBA, {}),
    **dict.fromkeys(("lfm2", "lfm2_moe"), (CONV, {})),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid"), (MAMBA, ONE_GROUP)),
}


@pytest.mark.parametrize("family", [name if name == "qwen3_5" else slow(name) for name in PACKED_BY])
def test_recurrent_layers_packed_by_their_kernels_learn_what_documents_alone_teach(tmp_path, family):
    """Kernels: stand-ins with the arguments of the real ones. Alone, transformers computes the layers without them."""
    kernels, changes = PACKED_BY[family]
    make(family, tmp_path / "base", **changes)
    rng = random.Random(3)
    rows = [{"instruction": sentence(rng, 3), "output": sentence(rng, 4 * (i + 1))} for i in range(8)]
    file = write_lines(tmp_path / "rows.jsonl", rows)
    whole = number_of_rows(transformers.AutoTokenizer.from_pretrained(tmp_path / "base"), file, 96)
    flags = ["--model_name_or_path", tmp_path / "base", "--train_file", file, "--validation_file", file]
    flags += ["--seq_length", 96, "--max_steps", 2, "--show_answers", 0, "--metric_for_best_model", "none"]
    alone = run("lora_finetune", tmp_path / "alone", *flags, "--packing", "off", "--global_batch_size", 8)
    flags += ["--packing", "on", "--global_batch_size", whole, "--per_device_train_batch_size", whole]
    flags += ["--gradient_checkpointing", "full"]
    packed = run("lora_finetune", tmp_path / "packed", *flags, env={"PYTHONPATH": f"{ROOT}:{KERNELS}"})
    assert f"documents kept apart by {kernels} in recurrent layers, in others by" in packed.summary
    assert "not installed" not in packed.output
    assert packed.losses == pytest.approx(alone.losses, rel=1e-4)
    for name, value in packed.weights().items():  # AdamW's first steps have the size of the rate, however small a gradient
        assert (value - alone.weights()[name]).norm() <= 0.05 * value.norm(), name
