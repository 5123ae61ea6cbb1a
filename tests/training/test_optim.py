"""Which parameters decay, who optimises what, and learning rates as a function of the step."""

import functools
import itertools
import math
import sys

import pytest
import torch
import torchao.optim
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

from shared.config.options import FullOptimConfig, OptimConfig
from shared.extras.optimizers.layer_decay import layer_scales
from shared.extras.optimizers.low_memory import StochasticAdamW, round_stochastically
from shared.extras.optimizers.muon import Muon, orthogonal
from shared.process.errors import ConfigError
from shared.training import optim
from tests.small_models import of_images, on_meta

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def tiny_llama(*, tied=False):
    options = {"intermediate_size": 24, "attention_bias": True, "tie_word_embeddings": tied}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options))


def tiny_gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, n_positions=16, bos_token_id=0, eos_token_id=0))


def build(model, optim_name="adamw", **options):
    return optim.build(model, FullOptimConfig(optim=optim_name, **{"weight_decay": 0.3, "learning_rate": 3e-4} | options))


def named(model, parameters):
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)] for p in parameters}


def groups_by_decay(model, optimizers):
    """{weight decay: names} over all optimizers."""
    result = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            result.setdefault(group["weight_decay"], set()).update(named(model, group["params"]))
    return result


@pytest.mark.parametrize(("tied", "name"), [(False, "adamw"), (True, "adamw"), (False, "adamw_8bit"), (True, "sgd")])
def test_only_hidden_matrices_that_are_trained_decay(tied, name):
    model = tiny_llama(tied=tied)
    model.model.layers[1].mlp.requires_grad_(False)
    decay = groups_by_decay(model, build(model, name))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    matrices = {name for name in trained if name.endswith("proj.weight")}
    assert len(matrices) == 11
    assert decay == {0.3: matrices, 0.0: trained - matrices}
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"} <= decay[0.0]
    assert ("lm_head.weight" in decay[0.0]) is not tied
    model = tiny_gpt2()  # with embeddings of positions, and transposed matrices
    decay = groups_by_decay(model, build(model, name))
    assert {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight"} <= decay[0.0]
    assert decay[0.3] == {n for n, p in model.named_parameters() if p.ndim == 2 and ".h." in n}


def test_optimizers_take_their_settings_from_the_config():
    adam = {"lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-8}
    for name, kinds in (
        ("adamw", {torch.optim.AdamW: adam | {"fused": True}}),
        ("adamw_8bit", {torchao.optim.AdamW8bit: adam}),
        ("muon", {Muon: {"lr": 0.25, "momentum": 0.95}, torch.optim.AdamW: adam | {"fused": True}}),
        ("sgd", {torch.optim.SGD: {"lr": 0.25, "momentum": 0.9, "nesterov": True, "dampening": 0}}),
    ):
        optimizers = build(tiny_llama(), name, learning_rate=0.25, adam_beta1=0.5, adam_beta2=0.75)
        for optimizer, (kind, expected) in zip(optimizers, kinds.items(), strict=True):
            assert isinstance(optimizer, kind)
            for group in optimizer.param_groups:
                assert {key: group[key] for key in expected} == expected


def with_experts():
    """A matrix, a stack of matrices, an embedding and a vector."""
    model = nn.Module()
    model.matrix, model.experts, model.embedding = nn.Linear(4, 4), nn.Parameter(torch.ones(2, 4, 4)), nn.Embedding(5, 4)
    return model


@pytest.mark.parametrize("make", [tiny_llama, lambda: tiny_llama(tied=True), tiny_gpt2, with_experts])
def test_muon_and_adamw_share_out_each_trainable_parameter_exactly_once(make):
    model = make()
    muon, adamw = build(model, "muon")
    assert (type(muon), type(adamw)) == (Muon, torch.optim.AdamW)
    held = [id(p) for o in (muon, adamw) for g in o.param_groups for p in g["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    matrices, embeddings, vectors = optim.split_parameters(model)
    assert named(model, muon.param_groups[0]["params"]) == named(model, [p for p in matrices if p.ndim == 2])
    no_decay = {name for group in adamw.param_groups if not group["weight_decay"] for name in named(model, group["params"])}
    assert no_decay == named(model, embeddings + vectors)


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16)])
def test_muon_is_torchs_but_for_its_rounding(shape):
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    settings = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.9}
    pair = Muon([ours], **settings), torch.optim.Muon([theirs], **settings, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        for optimizer in pair:
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)
    assert (ours - torch.ones(shape)).abs().mean() > 0.05
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape), (3.4445, -4.775, 2.0315), 5))
    assert values.min() > 0.5 and values.max() < 1.3


def test_optimizers_that_cannot_be_built_say_so_or_fall_back(monkeypatch):
    (optimizer,) = build(nn.LayerNorm(4), "muon")
    assert type(optimizer) is torch.optim.AdamW  # without a matrix
    with pytest.raises(ConfigError, match="no parameter of the model is trainable"):
        build(nn.Linear(2, 2).requires_grad_(False), "muon")
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ConfigError, match="pip install torchao"):
        build(nn.Linear(2, 2), "adamw_8bit")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    (optimizer,) = build(model)
    assert type(optimizer) is StochasticAdamW
    with pytest.raises(ConfigError, match="--optim sgd would lose small updates of bf16 weights: use adamw"):
        build(model, "sgd")


def test_stochastic_rounding_is_exact_in_the_mean_and_repeats():
    values = torch.tensor([1.0, 1.0 + 2**-10, -3.1, 1e-30, 65504.0, 0.0]).repeat(20_000, 1)
    rounded = torch.empty_like(values, dtype=torch.bfloat16)
    round_stochastically(rounded, values.clone(), torch.Generator().manual_seed(0))
    neighbours = (rounded.float() - values).abs() <= values.abs() * 2**-7
    assert neighbours.all() and torch.equal(rounded[:, 0].float(), values[:, 0])
    torch.testing.assert_close(rounded.double().mean(0), values[0].double(), rtol=1e-4, atol=1e-40)
    again = torch.empty_like(rounded)
    round_stochastically(again, values.clone(), torch.Generator().manual_seed(0))
    assert torch.equal(again, rounded)


def test_bf16_weights_follow_fp32_adamw_where_rounding_to_nearest_stands_still():
    def weights(kind, dtype):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.ones(4096, dtype=dtype))
        groups = [{"params": [weight], "weight_decay": 0.1}]
        optimizer = kind(groups, lr=1e-4, betas=(0.9, 0.999), eps=1e-8)
        for step in range(100):
            weight.grad = torch.ones(4096, dtype=dtype) * (1 + step % 3)
            optimizer.step()
        return weight.detach().float(), optimizer.state[weight]["exp_avg_sq"].float()

    exact, moment = weights(torch.optim.AdamW, torch.float32)
    ours, ours_moment = weights(StochasticAdamW, torch.bfloat16)
    assert ours.mean() == pytest.approx(exact.mean().item(), abs=2e-4) and exact.mean() < 0.995
    assert ours_moment.mean() == pytest.approx(moment.mean().item(), rel=1e-2)
    nearest, _ = weights(torch.optim.AdamW, torch.bfloat16)
    assert (nearest == 1).all()  # each update is lost
    assert torch.equal(ours, weights(StochasticAdamW, torch.bfloat16)[0])


def test_a_weight_that_stays_fp32_beside_bf16_ones_gets_plain_adamw():
    def train(kind):
        torch.manual_seed(0)
        model = nn.ParameterList([nn.Parameter(torch.randn(64).bfloat16()), nn.Parameter(torch.randn(64))])
        optimizer = kind(model.parameters(), lr=1e-6, betas=(0.9, 0.95))
        for _ in range(5):
            for p in model:
                p.grad = torch.randn_like(p)
            optimizer.step()
        return model[1].detach(), optimizer.state[model[1]]

    ours, state = train(StochasticAdamW)
    exact, moments = train(functools.partial(torch.optim.AdamW, weight_decay=0.0))
    assert torch.equal(ours, exact) and not torch.equal(ours, ours.bfloat16().float())
    assert all(torch.equal(state[key], moments[key]) for key in ("exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "adamw_8bit"])
def test_making_room_for_the_state_changes_no_weight(name):
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kept = model[0].bias.grad = torch.zeros(8)  # as DDP's
    for optimizer in build(model, name, weight_decay=0.5, learning_rate=0.5):
        for _ in range(2):  # what is there stays
            optim.fill_state(optimizer)
        states = optimizer.state.values()
        assert len(states) == sum(len(group["params"]) for group in optimizer.param_groups)
        assert all(float(state.get("step", 1)) == 1 for state in states)
        assert {float(group["lr"]) for group in optimizer.param_groups} == {0.5}
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model[0].bias.grad is kept and sum(parameter.grad is not None for parameter in model.parameters()) == 1


SHARES = st.floats(0, 1)
CONFIGS = st.builds(
    FullOptimConfig,
    learning_rate=st.floats(1e-8, 10),
    lr_scheduler_type=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    warmup_steps=st.floats(0, 1, exclude_max=True) | st.integers(1, 50),
    min_lr_ratio=SHARES,
)
TOTALS = st.integers(1, 400)


@settings(deadline=None, max_examples=100)
@given(config=CONFIGS, total=TOTALS)
def test_every_schedule(config, total):
    """It rises in equal steps to exactly the peak, never rises again, and ends at its final share of the peak."""
    peak, low = config.learning_rate, config.min_lr_ratio * config.learning_rate
    warmup = config.warmup_steps if config.warmup_steps >= 1 else math.ceil(config.warmup_steps * total)
    assume(warmup <= total)
    rates = [optim.learning_rate(config, step, total) for step in range(total + 1)]
    assert all(0 < rate <= peak * (1 + 1e-9) for rate in rates[:-1])
    assert rates[:warmup] == pytest.approx([peak * (i + 1) / warmup for i in range(warmup)])
    assert rates[max(0, warmup - 1)] == pytest.approx(peak) == max(rates)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in itertools.pairwise(rates[warmup:]))
    assert min(rates[warmup:], default=1) >= low * (1 - 1e-9)
    assert optim.learning_rate(config, total + 50, total) == rates[-1]
    if config.lr_scheduler_type == "constant":
        assert rates[-1] == peak
    elif warmup < total:
        assert rates[-1] == pytest.approx(low, abs=1e-12)
    if config.lr_scheduler_type == "wsd":
        start = max(warmup, total - math.ceil(optim.DECAY * total))
        assert rates[warmup:start] == [peak] * (start - warmup)
        falls = [a - b for a, b in itertools.pairwise(rates[start:])]
        assert falls == pytest.approx(falls[:1] * len(falls), abs=1e-9 * peak)


def test_known_points_of_each_shape():
    def at(kind, step):
        config = FullOptimConfig(learning_rate=1.0, lr_scheduler_type=kind, warmup_steps=0.1, min_lr_ratio=0.2)
        return optim.learning_rate(config, step, 100)

    assert optim.learning_rate(OptimConfig(learning_rate=1.0, warmup_steps=0.0), 0, 100) == 1.0
    assert [at("linear", s) for s in (0, 4, 9, 10, 55, 100)] == pytest.approx([0.1, 0.5, 1, 1, 0.6, 0.2])
    assert [at("cosine", s) for s in (10, 32.5, 55, 100)] == pytest.approx([1, 0.2 + 0.8 * (1 + 0.5**0.5) / 2, 0.6, 0.2])
    assert [at("constant", s) for s in (0, 10, 99)] == pytest.approx([0.1, 1, 1])
    assert [at("wsd", s) for s in (9, 10, 80, 90, 100)] == pytest.approx([1, 1, 1, 0.6, 0.2])


def test_set_learning_rate_keeps_the_factors_of_the_layers():
    config = FullOptimConfig(optim="muon", learning_rate=1.0, lr_scheduler_type="linear", warmup_steps=0.0, layer_decay=0.5)
    model = tiny_llama()
    optimizers = optim.build(model, config)
    assert len(optimizers) == 2
    assert optim.set_learning_rate(optimizers, config, 25, 100) == 0.75
    rates = {name: group["lr"] for o in optimizers for group in o.param_groups for name in named(model, group["params"])}
    assert rates["lm_head.weight"] == 0.75
    assert rates["model.layers.1.mlp.up_proj.weight"] == rates["model.norm.weight"] == 0.75 / 2
    assert rates["model.layers.0.input_layernorm.weight"] == 0.75 / 4
    assert rates["model.embed_tokens.weight"] == 0.75 / 8
    assert optim.set_learning_rate(optimizers, config, 50, 100) == 0.5  # not of what was set before
    assert {g["lr"] for o in optimizers for g in o.param_groups} == {0.5, 0.25, 0.125, 0.0625}


def tiny_vision(name):
    return AutoModelForImageClassification.from_config(of_images(name, ("ant", "bee", "cow")))


# Beginnings of names, from the lowest factor to the head; a name belongs to the longest that fits.
STAGE = "convnext.encoder.stages"
DEPTHS = {
    "llama": ["model.embed_tokens", "model.layers.0", "model.layers.1 model.norm", "lm_head"],
    "vit": ["vit.embeddings", "vit.layers.0", "vit.layers.1", "vit.layers.2 vit.layernorm", "classifier"],
    "convnext": [
        *("convnext.embeddings", f"{STAGE}.0.layers.0", f"{STAGE}.0.layers.1 {STAGE}.1.downsampling_layer"),
        *(f"{STAGE}.1.layers.0 convnext.layernorm", "classifier"),
    ],
    "resnet": ["resnet.embedder", *(f"resnet.encoder.stages.{n}.layers.{m}" for n, m in ("00", "01", "10")), "classifier"],
    "timm": ["timm_model.conv1 timm_model.bn1", *(f"timm_model.layer{n}.0" for n in range(1, 5)), "timm_model.fc"],
}


@pytest.mark.parametrize("name", DEPTHS)
def test_each_block_learns_slower_than_the_next_and_the_head_at_the_full_rate(name, decay=0.5):
    model = tiny_llama() if name == "llama" else tiny_vision(name)
    scales = layer_scales(model, decay)
    assert set(scales) == set(model.parameters())
    starts = {start: depth for depth, group in enumerate(DEPTHS[name]) for start in group.split()}
    for key, parameter in model.named_parameters():
        (depth,) = [d for start, d in starts.items() if key.startswith(f"{start}.")]
        assert scales[parameter] == decay ** (len(DEPTHS[name]) - 1 - depth), key
    assert min(scales.values()) == decay ** (len(DEPTHS[name]) - 1)
    assert max(scales.values()) == 1


def test_models_without_blocks_with_another_head_or_layers_before_it_decay_what_is_before_the_head():
    probe = nn.Module()
    probe.score = nn.Linear(3, 2)
    assert {*layer_scales(probe, 0.5).values()} == {1.0}
    other = nn.Module()
    other.blocks, other.outlet = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), nn.Linear(3, 2)
    scales = layer_scales(other, 0.5)
    rates = {"blocks.0": 0.25, "blocks.1": 0.5, "outlet": 1.0}
    assert all(scales[p] == rates[name.rpartition(".")[0]] for name, p in other.named_parameters())
    sizes = {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 16], "image_size": 64}
    model = on_meta(transformers.MobileViTConfig(**sizes), AutoModelForImageClassification)
    scales = layer_scales(model, 0.5)
    assert {scales[p] for key, p in model.named_parameters() if ".conv_1x1_exp." in key} == {0.5}
    assert {key.split(".")[-2] for key, p in model.named_parameters() if scales[p] == 1} == {"classifier"}


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_factors_and_decay_groups_go_together(kind):
    model = tiny_vision("vit")
    optimizers = build(model, kind, layer_decay=0.5)
    scales = layer_scales(model, 0.5)
    held = [(p, group) for o in optimizers for group in o.param_groups for p in group["params"]]
    assert sorted(id(p) for p, _ in held) == sorted(id(p) for p in model.parameters())
    assert all(group["lr_scale"] == scales[p] for p, group in held)
    assert groups_by_decay(model, optimizers) == groups_by_decay(model, build(model, kind))
    if kind == "muon":  # it leaves the head to AdamW
        ours, others = (groups_by_decay(model, [optimizer]) for optimizer in optimizers)
        assert "classifier.weight" in others[0.3]
        assert ours[0.3] and all(".layers." in key for key in ours[0.3])


SWIN = {"embed_dim": 8, "depths": [1, 1], "image_size": 32, "patch_size": 4, "window_size": 4}
STAGES = {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]}
SPARED = {
    "vit": (transformers.ViTConfig(num_hidden_layers=1), ["cls_token", "position_embeddings"]),
    "convnext": (transformers.ConvNextConfig(num_stages=1, hidden_sizes=[8], depths=[1]), ["layer_scale_parameter"]),
    "swin": (transformers.SwinConfig(**SWIN, num_heads=[1, 2]), ["position_bias_table"]),
    "convnextv2": (transformers.ConvNextV2Config(**STAGES), ["grn.weight", "grn.bias"]),
    "swinv2": (transformers.Swinv2Config(**SWIN, num_heads=[2, 2]), ["logit_scale"]),
    "mamba": (transformers.MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4), ["A_log", ".D"]),
    "gpt_oss": (transformers.GptOssConfig(**SIZES, num_local_experts=4), ["proj_bias", "sinks"]),
}


@pytest.mark.parametrize("name", SPARED)
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_what_is_a_vector_in_spite_of_its_shape_does_not_decay(name, kind):
    config, ends = SPARED[name]
    auto_class = AutoModelForCausalLM if name in ("mamba", "gpt_oss") else AutoModelForImageClassification
    model = on_meta(config, auto_class)
    decay = groups_by_decay(model, build(model, kind))
    for end in ends:
        spared = {key for key, _ in model.named_parameters() if key.endswith(end)}
        assert spared and spared <= decay[0.0], end
    assert decay[0.3] and all(key.endswith(("weight", "_proj")) for key in decay[0.3])


def test_small_heads_and_experts_are_matrices_and_groups_of_one_s_own_have_the_plain_rate():
    model = nn.Module()
    model.experts, model.score = nn.Parameter(torch.ones(2, 3, 4)), nn.Linear(3, 2)
    assert named(model, optim.split_parameters(model)[0]) == {"experts", "score.weight"}
    assert [group["lr_scale"] for optimizer in build(model) for group in optimizer.param_groups] == [1.0, 1.0]
    own = torch.optim.SGD(model.parameters(), lr=1.0)
    optim.set_learning_rate([own], FullOptimConfig(learning_rate=0.5, lr_scheduler_type="constant", warmup_steps=0), 0, 9)
    assert own.param_groups[0]["lr"] == 0.5
