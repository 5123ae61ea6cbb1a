"""The arithmetic of MFU beside published figures, and the estimate of a step's time beside counts by hand."""

import functools
import sys

import numpy as np
import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MixtralConfig, MptConfig

from shared.models.counts import flops_per_token
from shared.process.errors import ConfigError
from shared.run import metrics
from tests.small_models import on_meta
from tools import memory, plan, reports, throughput
from tools.gpus import find_gpu
from tools.memory import CHECKPOINTING, Job
from tools.throughput import FIGURES, PARTS, Operator, Setting, estimate, fuse


# Dense bf16 TFLOP/s and TB/s as github.com/stas00/ml-engineering (compute/accelerator/README.md) and karpathy/nanochat
# (nanochat/common.py) have them from the data sheets; waredb.com for the RTX 4090.
@pytest.mark.parametrize(
    ("device", "tera", "per_second"),
    [
        ("NVIDIA H100 80GB HBM3", 989, 3.35),
        ("NVIDIA H100 PCIe", 756, 2.0),
        ("NVIDIA H100 NVL", 835, 3.9),
        ("NVIDIA H200", 989, 4.8),
        ("NVIDIA H200 NVL", 836, 4.8),
        ("NVIDIA GH200 480GB", 989, 4.0),
        ("NVIDIA B200", 2250, 8.0),
        ("NVIDIA A100-SXM4-80GB", 312, 2.04),
        ("NVIDIA A100-SXM4-40GB", 312, 1.555),
        ("NVIDIA A100 80GB PCIe", 312, 1.94),
        ("NVIDIA L40S", 362, 0.86),
        ("NVIDIA L40", 181, 0.86),
        ("NVIDIA L4", 121, 0.3),
        ("NVIDIA A10G", 70, 0.6),
        ("NVIDIA GeForce RTX 4090", 165.2, 1.008),
        ("AMD Instinct MI300X OAM", 1307.4, 5.3),
        ("NVIDIA RTX A1000", None, None),
    ],
)
def test_peaks_are_the_published_ones_of_the_device_and_of_no_other(monkeypatch, device, tera, per_second):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)
    peak = metrics.peak_flops(torch.device("cuda"))
    assert peak == (tera and pytest.approx(tera * 1e12, rel=0.002))
    assert tera is None or find_gpu(device).bandwidth == pytest.approx(per_second * 1e12, rel=0.01)
    assert metrics.peak_flops(torch.device("cpu")) is None


def mpt(width, blocks, heads, length):
    return MptConfig(d_model=width, n_layers=blocks, n_heads=heads, max_seq_len=length, vocab_size=50368)


PALM = {"hidden_size": 18432, "intermediate_size": 73728, "num_hidden_layers": 118, "vocab_size": 256000}
PALM |= {"num_attention_heads": 48, "num_key_value_heads": 1, "head_dim": 256, "tie_word_embeddings": True}


# github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md: MFU in % at tokens a second and GPU. It counts all
# of attention, though it is causal, and the head once, tied to the embedding: as here. It also counts learned positions,
# which are looked up: 1.2 % at 65536 tokens, so not asked for here. PaLM on 6144 TPU v4 of 275 TFLOP/s each: arXiv
# 2204.02311, as leonericsson.github.io has it.
@pytest.mark.parametrize(
    ("peak", "config", "length", "tokens_per_second", "published", "within"),
    [
        (find_gpu("H100").flops, mpt(2048, 24, 16, 8192), 8192, 29157, 37.73, 0.01),
        (find_gpu("H100").flops, mpt(7168, 48, 56, 2048), 2048, 2308, 43.92, 0.01),
        (find_gpu("A100").flops, mpt(2560, 32, 20, 8192), 8192, 7695, 59.34, 0.01),
        (6144 * 275e12, LlamaConfig(**PALM), 2048, 238.3e3, 46.2, 0.001),
    ],
)
def test_mfu_is_the_published_one(peak, config, length, tokens_per_second, published, within):
    flops = flops_per_token(on_meta(config), length)
    assert 100 * flops * tokens_per_second / peak == pytest.approx(published, rel=within)


def test_flops_are_those_of_nanogpt():
    """6 N + 12 L H Q T, N without the embedding of positions (github.com/karpathy/nanoGPT, model.py, `estimate_mfu`)."""
    model = on_meta(GPT2Config())
    n = sum(p.numel() for p in model.parameters()) - 1024 * 768
    assert n == 123_653_376
    assert flops_per_token(model, 1024) == 6 * n + 12 * 12 * 12 * 64 * 1024


SHAPE = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5}
JOB = Job(LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=2), batch=2, length=64)
MATRICES = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128  # of a block
GPU = find_gpu("H100")


@functools.cache
def figures(**setting):
    parts = estimate(JOB, Setting(**setting), GPU)
    return {part: dict(zip(FIGURES, row, strict=True)) for part, row in zip(PARTS, parts, strict=True)}


def test_flops_and_bytes_of_a_step_are_those_counted_by_hand():
    products, attention, weights, other, head, update = figures().values()
    tokens = 2 * 64
    assert products["flops"] == 5 * 6 * MATRICES * tokens
    assert head["flops"] == 6 * 512 * 64 * tokens
    assert attention["flops"] == 5 * 7 * 2 * tokens * 64 * 64 / 2  # 2 products forward and 5 backward, half of them masked
    parameters = 5 * (MATRICES + 2 * 64) + 2 * 512 * 64 + 64
    # The norm reads gradients; clipping reads and writes them; AdamW reads 4 and writes 3 numbers.
    assert update["bytes"] == pytest.approx((1 + 2 + 7) * 4 * parameters, rel=0.01)
    assert weights["bytes"] == 5 * 2 * (4 + 2) * MATRICES  # cast to bf16, and gradients back
    assert other["flops"] == weights["flops"] == update["flops"] == 0


def test_settings_change_what_they_change():
    plain, compiled, twice = figures(), figures(compiled=True), figures(micro_batches=2)
    for part in PARTS:
        same = part not in ("norms, activations, other", "embedding, head and loss")
        found, expected = compiled[part]["bytes"], plain[part]["bytes"]
        assert found == expected if same else found < expected
    assert twice["clipping and AdamW"] == plain["clipping and AdamW"]
    assert twice["attention"]["seconds"] == 2 * plain["attention"]["seconds"]
    sums = twice["casts of weights, sums of gradients"]["bytes"] - 2 * plain["casts of weights, sums of gradients"]["bytes"]
    assert sums == 5 * 3 * 4 * MATRICES  # read two, write one
    half, full = (figures(checkpointing=c)["matrix products of the blocks"]["flops"] for c in ("2", "full"))
    done = plain["matrix products of the blocks"]["flops"]
    assert full == pytest.approx(done * 4 / 3, rel=0.1) and half == (done + full) / 2  # the last product is not needed
    assert figures(fused=False)["embedding, head and loss"]["flops"] == plain["embedding, head and loss"]["flops"]


def test_operators_between_two_products_become_one():
    """1 -> 2 -> 3 pointwise, 3 -> 4 a product; 2 is needed again after it, with 4."""

    def pointwise(*reads, to):
        return Operator("other", True, 0.0, dict.fromkeys(reads, 8.0), {to: 8.0})

    product = Operator("product", False, 1.0, {3: 8.0}, {4: 8.0})
    fused = list(fuse([pointwise(1, to=2), pointwise(2, to=3), product, pointwise(2, 4, to=5), pointwise(5, to=6)]))
    assert [(set(op.reads), set(op.writes)) for op in fused] == [({3}, {4}), ({2, 4}, {6}), ({1}, {2, 3})]


def test_the_command_says_that_it_is_an_estimate(monkeypatch, capsys, tmp_path):
    JOB.config.save_pretrained(tmp_path)
    peak = memory.Peak(1e9, 1e9, 1e9, dict.fromkeys(CHECKPOINTING, 0))
    monkeypatch.setattr(memory, "plan", lambda *_: iter([("", 1, peak)]))
    command = ["plan", "--model_name_or_path", str(tmp_path), "--throughput", "--seq_length", "64", "--gpu"]
    monkeypatch.setattr(throughput, "estimate", lambda *_: np.ones((len(PARTS), len(FIGURES))))
    monkeypatch.setattr(sys, "argv", [*command, "A100", "--train_tokens", "3600e6"])
    plan.main()
    printed = capsys.readouterr().out
    assert "nothing is measured" in printed and "312 TFLOP/s" in printed and "fp8," not in printed
    slowest = printed.split("Hours are those")[0].replace(",", "").splitlines()[-2].split()
    assert float(slowest[-1]) == pytest.approx(1e6 / float(slowest[-4]), rel=0.05)  # hours; tokens a second
    assert all(part in printed for part in (*PARTS, *map("{:.0%}".format, throughput.SHARES.values())))
    monkeypatch.setattr(sys, "argv", [*command, "4090", "--lora_r", "4", "--load_in_4bit"])
    plan.main()
    printed = capsys.readouterr().out
    assert "165.2 TFLOP/s" in printed and "Turning 4 bits back into bf16 before each product is not counted" in printed
    monkeypatch.setattr(sys, "argv", [*command, "H1OO"])
    with pytest.raises(ConfigError, match="--gpu H1OO: known are GB200, B200"):
        plan.main()
    experts = MixtralConfig(**SHAPE, num_local_experts=4)
    with pytest.raises(ConfigError, match="--throughput cannot count the experts of MixtralConfig"):
        reports.of_throughput(Job(experts, 1, 8), plan.PlanConfig(throughput=True))
