"""Rows whose tokens are divided over neighbouring ranks: Ulysses (Jacobs et al., arXiv 2309.14509).

The ranks of a group get the same rows, and each computes a stretch of their tokens. For attention
they exchange heads for tokens: each then has all tokens of some heads. Everything else needs the
rank's own tokens alone.
"""

import math
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from shared.data.order import Batch
from shared.extras.sequence.stretches import own_part
from shared.process import ranks


@cache
def group() -> Any:
    """The ranks that share rows. Every rank makes the first call."""
    return dist.new_subgroups(ranks.sequence_ranks())[0]


def over_rows(batch: Batch, function: Callable[[Batch], torch.Tensor]) -> torch.Tensor:
    """What `function` makes, [rows, length], of labels and positions of whole rows, for the tokens
    of the batch.
    """
    if "row_labels" not in batch:
        return function(batch)
    whole = {"labels": batch["row_labels"], "position_ids": batch["row_positions"]}
    return own_part(function(whole))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        total = value.clone()
        dist.all_reduce(total, group=group())
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


def sum_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks that share rows. Every rank calls this.

    Its gradient is that of this rank's tokens: the reduction of gradients adds the others'.
    """
    return _Sum.apply(value)


class _Exchange(torch.autograd.Function):
    """Divide tensors along one dimension over the ranks, and join what comes along another."""

    @staticmethod
    def forward(ctx: Any, divide: int, join: int, *tensors: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.dimensions = join, divide
        return _exchanged(divide, join, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        divide, join = ctx.dimensions
        return None, None, *_exchanged(divide, join, gradients)


def _exchanged(
    divide: int, join: int, tensors: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """One message to each rank, whatever the number of tensors: their order cannot differ."""
    count = ranks.sequence_ranks()
    parts = [t.unflatten(divide, (count, -1)).movedim(divide, 0) for t in tensors]
    sizes = [part[0].numel() for part in parts]
    sent = tensors[0].new_empty(count, sum(sizes))
    for space, part in zip(sent.split(sizes, 1), parts, strict=True):
        space.unflatten(1, part.shape[1:]).copy_(part)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group())
    del sent
    return tuple(
        torch.cat(space.unflatten(1, part.shape[1:]).unbind(), join)
        for space, part in zip(received.split(sizes, 1), parts, strict=True)
    )


def attend_to_whole_rows(
    attend: Callable[..., Any],
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of this rank's tokens to whole rows, if the mask is of such; else that of rows
    which the rank has alone.

    Args:
        attend: as without: [batch, heads, seq, head_dim] -> [batch, seq, heads, head_dim].
        mask: of whole rows longer than these; or [1, bounds], the `cu_seqlens` of whole rows, empty
            where they need no mask.
    """
    if mask is None or (mask.ndim != 2 and (mask.ndim == 1 or mask.shape[2] <= query.shape[2])):
        return attend(module, query, key, value, mask, **options)
    if mask.ndim == 2:
        mask = mask[0] if mask.numel() else None
    device = query.device.type
    mixed = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if mixed else value.dtype
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    count = ranks.sequence_ranks()
    repeats = count // math.gcd(count, key.shape[1])  # each rank needs a head of keys
    if repeats > 1:
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
        module = SimpleNamespace(
            num_key_value_groups=query.shape[1] // key.shape[1],
            is_causal=getattr(module, "is_causal", True),
        )
    query, key, value = _Exchange.apply(1, 2, query, key, value)  # heads for tokens
    output, _ = attend(module, query, key, value, mask, **options)
    return _Exchange.apply(1, 2, output)[0], None  # tokens for heads
