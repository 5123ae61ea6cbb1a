"""Predicted memory of a training step, from a model's architecture alone: nothing is downloaded or allocated.

What a strategy divides (weights, gradients, optimizer state) is counted. What it does not (activations, temporaries) is
measured: PyTorch's memory tracker watches a forward and backward of one and of two blocks on fake tensors, which have
shapes and no contents, and more blocks follow a straight line.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from shared import model as models

CHECKPOINTING = ("none", "2", "full")
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # 4 bits, a byte a block of 64, and of those scales 32 bits a block of 256


@dataclass(frozen=True)
class Job:
    """What is trained, apart from where."""

    config: Any  # of transformers
    batch: int  # rows of one micro-batch
    length: int  # tokens of a row
    mixed: bool = True  # bf16 over fp32 weights, else fp32
    lora_r: int = 0  # 0: all weights are trained
    four_bits: bool = False  # of the frozen base

    def __hash__(self) -> int:
        return hash((id(self.config), self.batch, self.length, self.mixed, self.lora_r, self.four_bits))


@dataclass(frozen=True)
class Peak:
    """Bytes on one device at the worst moment of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: dict[str, float]  # by gradient checkpointing, temporaries and gathered weights included

    def total(self, checkpointing: str) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations[checkpointing]


@dataclass(frozen=True)
class Counts:
    """Parameters of one block and of the rest (embeddings, head, last norm), and which of them are trained."""

    blocks: int
    block: int
    rest: int
    block_matrices: int
    trained_block: int
    trained_rest: int

    @property
    def all(self) -> int:
        return self.blocks * self.block + self.rest

    @property
    def trained(self) -> int:
        return self.blocks * self.trained_block + self.trained_rest


def _build(job: Job, depth: int, dtype: torch.dtype) -> nn.Module:
    """The model with `depth` blocks, of tensors of the fake mode that this is called in."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(job.config)
    config.get_text_config().num_hidden_layers = depth
    if getattr(config.get_text_config(), "layer_types", None):
        config.get_text_config().layer_types = config.get_text_config().layer_types[:depth]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        if job.lora_r:
            from peft import LoraConfig, get_peft_model

            lora = LoraConfig(task_type="CAUSAL_LM", r=job.lora_r, target_modules="all-linear")
            model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    made: dict[Any, Any] = {}  # tied weights stay tied
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                kind = torch.float32 if p.requires_grad and job.lora_r else p.dtype
                fake = made.setdefault(p, nn.Parameter(torch.empty(p.shape, dtype=kind), requires_grad=p.requires_grad))
                module._parameters[name] = fake
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = torch.empty(b.shape, dtype=b.dtype)
    return model.train()


def count(job: Job) -> Counts:
    """Count parameters, on fake tensors."""
    with FakeTensorMode():
        one, two = (_build(job, depth, torch.float32) for depth in (1, 2))

    def numbers(model: nn.Module) -> tuple[int, int, int]:
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n and "lora_" not in n]
        trained = [p for p in model.parameters() if p.requires_grad]
        return (
            sum(p.numel() for p in model.parameters()),
            sum(p.numel() for p in matrices),
            sum(p.numel() for p in trained),
        )

    (all1, _, trained1), (all2, _, trained2) = numbers(one), numbers(two)
    block, trained_block = all2 - all1, trained2 - trained1
    return Counts(
        blocks=job.config.get_text_config().num_hidden_layers,
        block=block,
        rest=all1 - block,
        block_matrices=numbers(two)[1] - numbers(one)[1],
        trained_block=trained_block,
        trained_rest=trained1 - trained_block,
    )


@cache
def _measure(job: Job, depth: int, checkpointing: str, dtype: torch.dtype) -> float:
    """Bytes at the peak of a second micro-batch, over those of the weights and the gradients."""
    with FakeTensorMode():
        model = _build(job, depth, dtype)
        models.set_gradient_checkpointing(model, checkpointing)
        tokens = torch.zeros(job.batch, job.length, dtype=torch.int64)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=job.mixed):
                    loss = models.causal_lm_loss(model, {"input_ids": tokens, "labels": tokens})
                loss.backward()
                tracker.reset_mod_stats()
        peak = next(iter(tracker.get_tracker_snapshot("peak").values()))["Total"]
        kept = sum(p.numel() * p.element_size() * (1 + p.requires_grad) for p in model.parameters())
    return peak - kept


def activations(job: Job, dtype: torch.dtype) -> dict[str, float]:
    """Bytes of activations and temporaries by gradient checkpointing, for a model whose weights have `dtype`."""
    depth = job.config.get_text_config().num_hidden_layers
    lines = {}
    for setting in ("none", "full"):
        one, two = (_measure(job, d, setting, dtype) for d in (1, 2))
        lines[setting] = (one - (two - one), two - one)  # at no block, and for each
    (start, slope), (start_full, slope_full) = lines["none"], lines["full"]
    return {
        "none": start + slope * depth,
        "2": max(start, start_full) + (slope + slope_full) / 2 * depth,
        "full": start_full + slope_full * depth,
    }


def plan(job: Job, devices: int) -> Iterator[tuple[str, int, Peak]]:
    """Yield (launch config, devices it uses, peak of one device), by rising communication.

    With accumulation, so that gradients exist beside all activations. FSDP2 casts weights as it gathers them, two blocks
    at a time with the embeddings; without it autocast keeps 16-bit copies of all that are trained.
    """
    numbers = count(job)
    cast = 2 if job.mixed else 4
    frozen, trained = numbers.all - numbers.trained, numbers.trained
    in_4bits = numbers.blocks * numbers.block_matrices if job.four_bits else 0
    weights = (frozen - in_4bits) * cast + in_4bits * NF4_BYTES + trained * 4
    gradients, optimizer = trained * 4, trained * 8
    stored = torch.bfloat16 if job.mixed and job.lora_r else torch.float32
    whole = activations(job, stored)
    if job.four_bits:
        whole = {k: v + numbers.block_matrices * cast for k, v in whole.items()}  # dequantised where they are used
    yield "single_gpu", 1, Peak(weights, gradients, optimizer, whole)
    if devices == 1:
        return
    yield "ddp", devices, Peak(weights, gradients, optimizer, whole)
    if not job.four_bits:
        inputs = (numbers.all * cast, trained * cast / devices, (trained * 4 + optimizer) / devices)
        yield "deepspeed_zero2", devices, Peak(*inputs, whole)
    gathered_dtype = torch.bfloat16 if job.mixed else torch.float32
    computing = activations(job, gathered_dtype)
    gathered = cast * (2 * numbers.block + numbers.rest)
    unreduced = (cast + 4) * numbers.trained_block + cast * numbers.trained_rest
    sharded = {k: v + gathered + unreduced for k, v in computing.items()}
    groups = max(1, devices // 8) if devices > 8 else 2
    for name, pieces in (("hsdp", devices // groups), ("fsdp2", devices)):
        if pieces > 1:
            yield name, devices, Peak(weights / pieces, gradients / pieces, optimizer / pieces, sharded)
    text = job.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", 0)
    if heads and heads % devices == 0 and not job.four_bits and getattr(job.config, "base_model_tp_plan", None):
        cut = copy.deepcopy(job.config)
        narrow = cut.get_text_config()
        narrow.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        narrow.num_attention_heads, narrow.num_key_value_heads = text.num_attention_heads // devices, heads // devices
        narrow.intermediate_size = text.intermediate_size // devices
        piece = Job(cut, job.batch, job.length, job.mixed, job.lora_r)
        local = count(piece)
        mine = (local.all - local.trained) * cast + local.trained * 4
        yield "tensor_parallel", devices, Peak(mine, local.trained * 4, local.trained * 8, activations(piece, stored))
    yield "fsdp2_offload", devices, Peak(0.0, 0.0, 0.0, sharded)
