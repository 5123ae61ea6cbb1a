"""Sets of a model's weights, under any strategy: gathered whole, averaged, kept aside, swapped
in.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from shared.parallel.gradients import local_part, reshard
from shared.parallel.kept import Kept
from shared.parallel.shards import whole

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # by the values of flags


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to a model's state, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def gather_weights(
    accelerator: Accelerator,
    model: nn.Module,
    *,
    trainable_only: bool = False,
    dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """Full weights on the CPU of the main rank, from any strategy; empty on the others. Every rank
    calls this.

    Args:
        dtype: of all that the model does not always keep in fp32, as it does routers' biases.
    """
    model = accelerator.unwrap_model(model)
    reshard(model)
    kept: Any = getattr(model, "_keep_in_fp32_modules_strict", None)
    in_fp32 = "|".join(kept or ["^$"]).replace("*", ".*")  # as transformers reads it
    weights = {}
    values: dict[str, Any] = {
        name: p for name, p in model.named_parameters() if p.requires_grad or not trainable_only
    }
    for name, value in (values | persistent_buffers(model)).items():
        if hasattr(value, "ds_id") or hasattr(value, "_hp_mapping"):  # DeepSpeed has it elsewhere
            from shared.extras.deepspeed import full_weight

            value = full_weight(value)
        full = whole(value)
        if accelerator.is_main_process:
            cast = full.is_floating_point() and not re.search(in_fp32, name)
            # training may go on meanwhile
            copy = full.detach().to("cpu", dtype if cast else None, copy=True)
            weights[name] = copy.contiguous()
    return weights


@torch.no_grad()
def average_buffers(accelerator: Accelerator, named: Mapping[str, torch.Tensor]) -> None:
    """Make those of the named buffers that hold floating-point numbers the same on all ranks, their
    mean. Every rank calls this.

    These are BatchNorm's running statistics: each rank's are of the images that it saw. Updates are
    linear in the statistics, so averaging now and then amounts to averaging after each step.
    """
    buffers = [b for b in named.values() if b.is_floating_point()]
    if accelerator.num_processes == 1 or not buffers:
        return
    flat = accelerator.reduce(torch.cat([b.flatten() for b in buffers]), "mean")
    for buffer, mean in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))


class WeightCopy(Kept):
    """A second set of a model's trainable weights and buffers, sharded as the model's own are,
    which evaluations and final/ use: those that replicas agree on, or a moving average.

    Made after `sharding.prepare`, as a copy of the present ones.

    Attributes:
        live: the model's, by name.
        copies: the second set.
        buffers: of these, the buffers.
    """

    @torch.no_grad()
    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        self.model = accelerator.unwrap_model(model)
        live: dict[str, torch.Tensor] = {
            n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad
        }
        buffers = persistent_buffers(self.model)
        self.live = live | buffers
        self.copies = {name: value.clone() for name, value in self.live.items()}
        self.buffers = {name: self.copies[name] for name in buffers}

    def after(self, step: int) -> None:
        """What is due after optimizer step `step`."""

    def tensors(self, step: int) -> dict[str, Any]:
        return self.copies

    @torch.no_grad()
    def swap(self) -> None:
        """Let the model have these weights, and this copy the model's."""
        for name, value in self.live.items():
            mine = local_part(self.copies[name])
            theirs = local_part(value)
            kept = theirs.clone()
            theirs.copy_(mine)
            mine.copy_(kept)
        reshard(self.model)  # or a forward would go on with the gathered weights of the one before


@contextlib.contextmanager
def evaluation_weights(
    accelerator: Accelerator, model: nn.Module, other: WeightCopy | None
) -> Iterator[None]:
    """Give the model its `other` weights, if there are any, and the mean of all ranks' BatchNorm
    statistics. Every rank calls this; afterwards all is as before."""
    if other:
        other.swap()
    buffers = persistent_buffers(model)
    own = {name: buffer.clone() for name, buffer in buffers.items()}
    try:
        average_buffers(accelerator, buffers)
        yield
    finally:
        for name, value in own.items():
            buffers[name].copy_(value)
        if other:
            other.swap()
