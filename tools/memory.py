"""Predicted memory of a training step, from a model's architecture alone: nothing is downloaded or
allocated.

Weights, gradients and optimizer state, which a strategy divides, are counted. Activations and
temporaries are measured: a forward and backward of one block of each kind, and of one more, run on
fake tensors, which have shapes and no contents. The bytes of storages in use are counted. Deeper
models are extrapolated linearly. Mamba and linear attention are measured as PyTorch computes them
without kernels made for them, which need less.
"""

import copy
import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from shared.extras.experts.products import is_fused
from shared.models import fused_head
from shared.models import loss as lm_loss
from shared.models.adapters import add_adapters
from shared.models.attention import forward_rows
from shared.models.blocks import repeated_blocks, set_gradient_checkpointing
from shared.models.hub import from_architecture
from shared.models.loading import class_of, freeze_outer_parts, use_launch_precision
from shared.models.options import AdapterConfig

CHECKPOINTING = ("none", "2", "full")  # recompute no block, every second, all
# Bytes a weight: 4 bits, a scale of 1 byte for 64 weights, and 4 bytes for 256 of these scales.
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True)
class Job:
    """What is trained, apart from where."""

    config: Any = field(hash=False)  # of transformers
    batch: int  # rows of one micro-batch
    length: int  # tokens of a row
    # bf16 compute (trained weights in fp32, a base under LoRA in bf16), else fp32
    mixed: bool = True
    lora_r: int = 0  # 0: all weights are trained
    four_bits: bool = False  # of the frozen base
    packed: bool = False  # several documents in a row, which takes a mask
    bf16_weights: bool = False  # trained weights, their gradients and moments in bf16
    eight_bits: bool = False  # moments in 8 bits
    lora_experts: bool = True  # adapters on the fused weights of experts, too
    beside: float = 0.0  # bytes of another model, frozen, which FSDP divides


@dataclass(frozen=True)
class Peak:
    """Bytes on one device at the worst moment of a step."""

    weights: float
    gradients: float
    optimizer: float
    # by gradient checkpointing, temporaries and gathered weights included
    activations: dict[str, float]

    def total(self, checkpointing: str) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations[checkpointing]


@dataclass(frozen=True)
class Counts:
    """Parameters: all, those outside of what FSDP wraps (embeddings, head, norms), and those of the
    largest block.
    """

    all: int
    trained: int
    rest: int
    trained_rest: int
    block: int
    trained_block: int
    matrices: int  # that 4-bit loading would quantise
    block_matrices: int
    kinds: tuple[int, ...]  # the kind of each block, by number: of one class, type and size

    @property
    def last(self) -> tuple[int, ...]:
        """The last block of each kind."""
        return tuple(sorted({kind: i for i, kind in enumerate(self.kinds)}.values()))


@cache
def _on_meta(job: Job) -> Any:
    """The model on the meta device, as a run trains it.

    Raises:
        ConfigError: there is no such model.
    """
    config = copy.deepcopy(job.config)
    with torch.device("meta"):
        model = from_architecture(
            class_of(config),
            config,
            dtype=torch.bfloat16 if job.mixed and job.lora_r else torch.float32,
        )
        freeze_outer_parts(model)
        use_launch_precision(model)
        if job.lora_r:
            model = add_adapters(
                model, AdapterConfig(lora_r=job.lora_r, lora_experts=job.lora_experts)
            )
    return model


def _build(job: Job, chosen: tuple[int, ...], gathered: bool) -> Any:
    """The model with these of its blocks only, of tensors of the fake mode that this is called in.

    Args:
        gathered: weights in the compute dtype, as FSDP2 holds them after gathering.
    """
    whole = _on_meta(job)
    blocks = repeated_blocks(whole)
    places = next(m for m in whole.modules() if isinstance(m, nn.ModuleList) and [*m] == blocks)
    of_whole = places._modules
    with unset_fake_temporarily():
        again = [
            copy.deepcopy(blocks[i]) if i in chosen[:place] else blocks[i]
            for place, i in enumerate(chosen)
        ]
        places._modules = {str(place): block for place, block in enumerate(again)}
        model = copy.deepcopy(whole)
    places._modules = of_whole
    config = model.config.get_text_config()
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == len(blocks):  # a setting for each block
            vars(config)[name] = [value[i] for i in chosen]
    vars(config)["num_hidden_layers"] = len(chosen)
    return to_fake(model, torch.bfloat16 if job.mixed and gathered else torch.float32).train()


def fuse_head(model: Any, *, compiled: bool = False) -> None:
    """Let the head of a model of fake tensors compute the loss: see `fused_head.fuse_head`. What a model
    does to its logits counts as a cap: fake tensors have no values to measure."""
    plain: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda head, args, logits: plain.append(logits)
    )
    with torch.no_grad(), hook:
        logits = forward_rows(model, {"input_ids": torch.zeros(1, 16, dtype=torch.int64)}).logits
    model.fused_head = fused_head.FusedHead(
        model, None if logits is plain[0] else torch.tanh, compiled
    )


def to_fake(model: nn.Module, trained_dtype: torch.dtype | None = None) -> nn.Module:
    """Give a model on the meta device tensors of the fake mode that this is called in; trained ones
    of another dtype.
    """
    made: dict[Any, Any] = {}  # tied weights stay tied
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                kind = (trained_dtype if p.requires_grad else None) or p.dtype
                fake = made.setdefault(
                    p, nn.Parameter(torch.empty(p.shape, dtype=kind), requires_grad=p.requires_grad)
                )
                module._parameters[name] = fake
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = torch.empty(b.shape, dtype=b.dtype)
    return model


@cache
def count(job: Job) -> Counts:
    """Count parameters, on the meta device. Raises ConfigError for a model that cannot be built or
    has no blocks.
    """
    from transformers.pytorch_utils import Conv1D

    model = _on_meta(job)
    blocks = repeated_blocks(model)
    head = model.get_output_embeddings()
    wrapped = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    types = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(blocks)
    shapes = [
        (type(b), t, *(p.shape for p in b.parameters())) for b, t in zip(blocks, types, strict=True)
    ]

    def number(modules: list[nn.Module], trained: bool = False) -> int:
        found = {
            p for module in modules for p in module.parameters() if p.requires_grad or not trained
        }
        return sum(p.numel() for p in found)

    def matrices(module: nn.Module) -> int:
        linear = [
            m
            for n, m in module.named_modules()
            if isinstance(m, nn.Linear | Conv1D) and m is not head and "lora_" not in n
        ]
        fused = [
            p
            for m in module.modules()
            for name, p in m.named_parameters(recurse=False)
            if is_fused(m, name)
        ]
        return sum(m.weight.numel() for m in linear) + sum(p.numel() for p in fused)

    everything = number([model])
    trained = number([model], trained=True)
    return Counts(
        all=everything,
        trained=trained,
        rest=everything - number(blocks + wrapped),
        trained_rest=trained - number(blocks + wrapped, trained=True),
        block=max(number([block]) for block in blocks),
        trained_block=max(number([block], trained=True) for block in blocks),
        matrices=matrices(model),
        block_matrices=max(map(matrices, blocks)),
        kinds=tuple(map(shapes.index, shapes)),
    )


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations make, until they are freed; those of `known`
    are left out.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen = WeakIdKeyDictionary({tensor.untyped_storage(): True for tensor in known})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._note, result)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self.seen:
            self.seen[storage] = True
            self._add(storage.nbytes())
            weakref.finalize(storage, self._add, -storage.nbytes())

    def cut(self) -> float:
        """The peak so far; another begins."""
        peak = self.peak
        self.peak = self.now
        return peak

    def _add(self, count: int) -> None:
        self.now += count
        self.peak = max(self.peak, self.now)


@cache
def _measure(job: Job, chosen: tuple[int, ...], checkpointing: str, gathered: bool) -> list[float]:
    """Bytes at the peak around the loss, in the backward of each of these blocks, the last one
    first, and after them.

    Weights and gradients are left out. Measured in the second of two micro-batches, when gradients
    exist.
    """
    with FakeTensorMode():
        model = _build(job, chosen, gathered)
        fuse_head(model)
        set_gradient_checkpointing(model, checkpointing)
        tokens = torch.zeros(job.batch, job.length, dtype=torch.int64)
        batch = {"input_ids": tokens, "labels": tokens} | (
            {"position_ids": tokens} if job.packed else {}
        )
        # Frozen embeddings would spare the first block, and only it, the gradient of its input.
        model.get_input_embeddings().register_forward_hook(
            lambda _, __, states: states.requires_grad_()
        )
        peaks: list[float] = []
        live = _LiveBytes([*model.parameters(), *model.buffers()])
        for module in (*repeated_blocks(model), model.get_input_embeddings()):
            module.register_full_backward_pre_hook(lambda *_: peaks.append(live.cut()))
        with live:
            for _ in range(2):
                live.peak = live.now
                peaks.clear()
                with torch.autocast("cpu", torch.bfloat16, enabled=job.mixed):
                    loss = lm_loss.causal_lm_loss(model, batch)
                loss.backward()
        gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    return [peak - gradients for peak in (*peaks, live.peak)]


def activations(
    job: Job, *, gathered: bool = False, around_loss: float = 0, in_blocks: float = 0
) -> dict[str, float]:
    """Bytes of activations and temporaries by gradient checkpointing.

    One block of each kind is measured, in the order of each kind's last one, and then one more of
    each. What blocks keep adds up; temporaries exist once.

    Args:
        gathered: for weights as FSDP2 gathers them.
        around_loss, in_blocks: bytes to add to what is there while the loss, or a block's backward,
            is computed.
    """
    kinds = count(job).kinds
    chosen = count(job).last
    # The moments are those of `_measure`. At each, the blocks up to one keep what they need in
    # their backward.
    ends = [len(kinds) - 1, *chosen[::-1]]
    measured = np.array([[block <= end for end in ends] for block in chosen])  # [kinds, moments]
    real = np.array([[kinds[: end + 1].count(kinds[block]) for end in ends] for block in chosen])
    starts = {}
    lines = {}
    after = {}
    for setting in ("none", "full"):
        one = np.array(_measure(job, chosen, setting, gathered))
        more = np.array(
            [_measure(job, (block, *chosen), setting, gathered)[: len(ends)] for block in chosen]
        )
        each = more - one[: len(ends)]
        starts[setting] = one[: len(ends)] - (measured * each).sum(0)
        lines[setting] = (real * each).sum(0)
        after[setting] = one[len(ends) :]
    peaks = {setting: starts[setting] + lines[setting] for setting in starts}
    peaks["2"] = np.maximum(starts["none"], starts["full"]) + (lines["none"] + lines["full"]) / 2
    after["2"] = np.maximum(after["none"], after["full"])
    return {
        setting: float(
            max(
                peaks[setting][0] + around_loss,
                *peaks[setting][1:] + in_blocks,
                *after[setting] + in_blocks,
            )
        )
        for setting in CHECKPOINTING
    }


def _exchanged(job: Job, devices: int) -> int:
    """Numbers that a block's exchange of heads for tokens holds beside its attention: queries, keys
    and values as they leave and as they arrive.
    """
    text = job.config.get_text_config()
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    of_keys = math.lcm(getattr(text, "num_key_value_heads", None) or heads, devices)
    return 2 * job.batch * -(-job.length // devices) * (heads + 2 * of_keys) * size


def frozen(job: Job) -> float:
    """Bytes of a model that is not trained, in the compute dtype, its matrices in 4 bits if asked."""
    numbers = count(job)
    in_4bits = numbers.matrices if job.four_bits else 0
    return (numbers.all - in_4bits) * (2 if job.mixed else 4) + in_4bits * NF4_BYTES


def plan(job: Job, devices: int) -> Iterator[tuple[str, int, Peak]]:
    """Yield (launch config, devices it uses, peak of one device).

    Gradients are accumulated: they exist beside all activations. FSDP2 casts weights as it gathers
    them, two blocks at a time with the embeddings. Without it autocast keeps 16-bit copies of all
    trained weights.
    """
    numbers = count(job)
    cast = 2 if job.mixed else 4
    frozen = numbers.all - numbers.trained
    trained = numbers.trained
    in_4bits = numbers.matrices if job.four_bits else 0
    stored = cast if job.lora_r else 4
    master = 2 if job.bf16_weights else 4
    weights = (frozen - in_4bits) * stored + in_4bits * NF4_BYTES + trained * master
    weights += job.beside
    gradients = trained * master
    optimizer = trained * 2 * (1 if job.eight_bits else master)
    whole = activations(job, gathered=job.bf16_weights)  # no 16-bit copies beside them
    if job.four_bits:
        # dequantised where they are used
        whole = {k: v + numbers.block_matrices * cast for k, v in whole.items()}
    yield "single_gpu", 1, Peak(weights, gradients, optimizer, whole)
    if devices == 1:
        return
    yield "ddp", devices, Peak(weights, gradients, optimizer, whole)
    rest = cast * (numbers.rest + numbers.trained_rest)  # gathered, with its gradient, all the time
    # two gathered, two gradients being reduced
    block = 2 * cast * numbers.block + (cast + 8) * numbers.trained_block
    sharded = activations(job, gathered=True, around_loss=rest, in_blocks=rest + block)
    yield (
        "fsdp2",
        devices,
        Peak(weights / devices, gradients / devices, optimizer / devices, sharded),
    )
    text = job.config.get_text_config()
    is_recurrent = any(isinstance(module, nn.Conv1d) for module in _on_meta(job).modules())
    if text.num_attention_heads % devices == 0 and not is_recurrent:
        part = activations(
            replace(job, length=-(-job.length // devices)),
            gathered=True,
            around_loss=rest,
            in_blocks=rest + block + _exchanged(job, devices) * cast,
        )
        shards = Peak(weights / devices, gradients / devices, optimizer / devices, part)
        yield "fsdp2_sequence_parallel", devices, shards
    heads = getattr(text, "num_key_value_heads", 0)
    if (
        heads
        and heads % devices == 0
        and not (job.four_bits or job.eight_bits)
        and getattr(job.config, "base_model_tp_plan", None)
    ):
        cut = copy.deepcopy(job.config)
        narrow = cut.get_text_config()
        narrow.head_dim = (
            getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        )
        narrow.num_attention_heads = text.num_attention_heads // devices
        narrow.num_key_value_heads = heads // devices
        for width in {"intermediate_size", "moe_intermediate_size"} & set(vars(text)):
            setattr(narrow, width, getattr(text, width) // devices)
        piece = replace(job, config=cut)
        local = count(piece)
        here = activations(piece, gathered=job.bf16_weights)
        mine = (local.all - local.trained) * stored + local.trained * master
        yield (
            "tensor_parallel",
            devices,
            Peak(mine + job.beside, local.trained * master, local.trained * 2 * master, here),
        )
    yield "fsdp2_offload", devices, Peak(job.beside / devices, 0.0, 0.0, sharded)
