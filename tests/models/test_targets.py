"""Which class loads a checkpoint, what carries adapters, and recurrent layers that keep packed documents apart."""

from itertools import pairwise

import pytest
import torch
import transformers
from peft import PeftModel
from transformers.models.qwen3_5 import modeling_qwen3_5

from shared.models import isolation
from shared.models.adapters import add_adapters
from shared.models.loading import class_of, load_causal_lm, outer_parts
from shared.models.loss import causal_lm_loss
from shared.models.options import AdapterConfig
from shared.models.targets import describe, find_targets
from shared.process.errors import ConfigError
from shared.text.packing import collate_packed, collate_padded
from tests.model_families import make

QKVO = "k_proj o_proj q_proj v_proj"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Writes a family's checkpoint once."""
    root = tmp_path_factory.mktemp("families")

    def written(family):
        if not (root / family).exists():
            make(family, root / family)
        return str(root / family)

    return written


def test_the_class_that_architectures_names_loads_the_whole_checkpoint(checkpoint):
    name = checkpoint("qwen3_5")
    config = transformers.AutoConfig.from_pretrained(name)
    assert class_of(config) is transformers.Qwen3_5ForConditionalGeneration
    whole = load_causal_lm(name, attn_implementation="auto")
    assert outer_parts(whole) == ["model.visual"]
    frozen = {key for key, parameter in whole.named_parameters() if not parameter.requires_grad}
    assert frozen == {key for key, _ in whole.named_parameters() if key.startswith("model.visual.")}
    encoder_decoder = transformers.T5Config(architectures=["T5ForConditionalGeneration"])
    assert class_of(encoder_decoder) is transformers.AutoModelForCausalLM


@pytest.mark.parametrize(
    ("family", "flags", "modules", "parameters", "left_out"),
    [
        ("llama4", {}, "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj", 2, ["feed_forward.router (routers)"]),
        ("glm4_moe", {}, "k_proj o_proj q_proj v_proj", 5, []),
        (
            "glm4_moe",
            {"lora_experts": False},
            "k_proj o_proj q_proj v_proj",
            3,
            ["experts.down_proj", "experts.gate_up_proj"],
        ),
        (
            "glm4_moe",
            {"lora_dropout": 0.1},
            "k_proj o_proj q_proj v_proj",
            0,
            ["down_proj.weight", "not with --lora_dropout"],
        ),
        ("glm4_moe", {"load_in_4bit": True}, "k_proj o_proj q_proj v_proj", 2, ["gate_proj.weight", "(quantised)"]),
        ("nemotron_h", {}, "down_proj in_proj k_proj o_proj q_proj up_proj v_proj", 2, ["mixer.out_proj"]),
    ],
)
def test_routers_carry_no_adapters_and_experts_do_if_peft_can(checkpoint, family, flags, modules, parameters, left_out):
    base = load_causal_lm(checkpoint(family), attn_implementation="auto")
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
    base = load_causal_lm(checkpoint("glm4_moe"), attn_implementation="auto")
    named = find_targets(base, AdapterConfig(lora_target_modules=("q_proj", "experts.down_proj")))
    assert named.target_modules == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    assert named.target_parameters == ["experts.down_proj"]
    with pytest.raises(ConfigError, match="--lora_target_modules qproj: the model has no module of that name"):
        find_targets(base, AdapterConfig(lora_target_modules=("qproj",)))


def test_recurrent_layers_are_packed_where_their_kernels_know_the_documents(checkpoint, monkeypatch):
    """Stand-ins for the kernels: each document by itself. Packed rows then give what the documents give alone."""
    model = load_causal_lm(checkpoint("qwen3_5"), attn_implementation="auto").eval()
    apart, why = isolation.isolate_documents(model, CPU, 1000, 2)
    assert not apart and "`causal_conv1d_fn` can't keep packed sequences apart without `causal_conv1d`" in why
    with pytest.raises(ConfigError, match="Qwen3_5ForConditionalGeneration lets documents of one row see each other"):
        isolation.isolate_documents(model, CPU, 1000, 2, required=True)

    convolve, recur = modeling_qwen3_5.causal_conv1d_fn, modeling_qwen3_5.torch_chunk_gated_delta_rule

    def convolve_each(states, *arguments, seq_idx=None, **named):
        named.pop("cu_seq_lens_q", None)
        if seq_idx is None:
            return convolve(states, *arguments, **named)
        ends = [0, *(torch.diff(seq_idx[0]).nonzero().flatten() + 1).tolist(), states.shape[2]]
        return torch.cat([convolve(states[..., a:b], *arguments, **named) for a, b in pairwise(ends)], 2)

    def recur_each(*states, g, beta, cu_seqlens=None, **named):
        named.pop("seq_idx", None)
        if cu_seqlens is None:
            return recur(*states, g=g, beta=beta, **named)
        assert len(g) == 1  # as the kernels want it
        parts = [slice(a, b) for a, b in pairwise(cu_seqlens.tolist())]
        found = [recur(*(s[:, p] for s in states), g=g[:, p], beta=beta[:, p], **named)[0] for p in parts]
        return torch.cat(found, 1), None

    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", convolve_each)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", recur_each)
    assert isolation.isolate_documents(model, CPU, 1000, 2) == (True, "documents kept apart by an attention mask")
    assert model.row_form.flat and model.row_form.bounds

    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(8, 1000, (length + 1,), generator=generator).numpy() for length in (70, 9, 30, 5)]
    rows = [{"input_ids": ids[:-1], "labels": ids[1:]} for ids in documents]

    def pack(some):
        lengths = [range(len(row["labels"])) for row in some]
        joined = {key: torch.cat([torch.from_numpy(row[key]) for row in some]).numpy() for key in ("input_ids", "labels")}
        return joined | {"position_ids": torch.tensor([i for places in lengths for i in places]).numpy()}

    packed = causal_lm_loss(model, collate_packed([pack(rows[:2]), pack(rows[2:])]))
    alone = sum(causal_lm_loss(model, collate_padded([row])) for row in rows)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=0)
