"""Answers without work for those that have ended: rows that end leave the batch, and prompts that
wait enter it.
"""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import DynamicCache

from shared.models.angles import kind_of
from shared.models.attention import scaled_from
from shared.models.checks import context_of
from shared.models.generation import MAX_ERRORS, generate, sees_padding
from shared.models.loading import without_adapters

SEGMENT = 16  # tokens between two looks at which rows have ended


class Refill:
    """Answers to prompts, in a batch whose rows are aligned at their ends. Which tokens an answer
    has depends on its row alone, up to rounding.

    Args:
        model: prepared; see `can_refill`.
        prompts: token ids of all.
        max_new_tokens, ends, draws: see `generation.generate`; `draws` has a row for each prompt.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        ends: Sequence[int],
        draws: np.ndarray | None = None,
    ) -> None:
        # inside of DDP, whose forward waits for the other ranks
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        context = context_of(without_adapters(model))
        self.prompts = [[*ids[-context:]] for ids in prompts]
        self.limits = [min(max_new_tokens, context + 1 - len(ids)) for ids in self.prompts]
        self.found: list[list[int]] = [[] for _ in prompts]
        self.ends = ends
        self.draws = draws

    def answers(self, numbers: Sequence[int], at_once: int) -> Iterator[tuple[int, list[int]]]:
        """Yield (number of a prompt, token ids of its answer) for some of the prompts."""
        waiting = deque(numbers)
        rows: list[int] = []
        cache: Any = None
        while rows or waiting:
            free = at_once - len(rows)
            # several together: prompts are read in a call of their own
            if waiting and (not rows or 4 * free >= at_once):
                begun = [waiting.popleft() for _ in range(min(free, len(waiting)))]
                read = DynamicCache()
                going = self._go_on(begun, read)
                if going:
                    cache = joined(cache, read) if rows else read
                rows, ended = rows + going, {*begun} - {*going}
            else:
                going = self._go_on(rows, cache)
                rows, ended = going, {*rows} - {*going}
            for number in ended:
                yield number, self.found[number]

    def _go_on(self, rows: list[int], cache: Any) -> list[int]:
        """Give these rows a segment more. Returns those that have not ended, whose the cache is."""
        count = min(SEGMENT, *(self.limits[n] - len(self.found[n]) for n in rows))
        draws = None
        if self.draws is not None:
            draws = np.stack([self.draws[n, len(self.found[n]) :][:count] for n in rows])
        found = generate(
            self.model,
            [self.prompts[n] + self.found[n] for n in rows],
            max_new_tokens=count,
            ends=self.ends,
            draws=draws,
            cache=cache,
        )
        going = []
        for place, (number, ids) in enumerate(zip(rows, found, strict=True)):
            self.found[number] += ids
            if ids[-1] not in self.ends and len(self.found[number]) < self.limits[number]:
                going.append(place)
        rows = [rows[place] for place in going]
        longest = max((len(self.prompts[n] + self.found[n]) for n in rows), default=2) - 1
        for layer in cache.layers:
            layer.keys, layer.values = (x[going, :, -longest:] for x in (layer.keys, layer.values))
        return rows


def joined(cache: Any, other: Any) -> Any:
    """The rows of both caches, aligned at their ends."""
    longest = max(cache.get_seq_length(), other.get_seq_length())
    for layer, more in zip(cache.layers, other.layers, strict=True):
        for name in ("keys", "values"):
            both = [getattr(one, name) for one in (layer, more)]
            padded = [F.pad(x, (0, 0, longest - x.shape[2], 0)) for x in both]
            setattr(layer, name, torch.cat(padded))
    return cache


@torch.no_grad()
def can_refill(model: nn.Module) -> bool:
    """Whether rows that enter a batch have the logits that they have alone: tried once on the
    prepared model. Not where ranks share its weights, or where it keeps more than keys and values.
    Every rank calls this.
    """
    whole: Any = without_adapters(model)
    if not hasattr(whole, "can_refill"):
        works = not (sees_padding(model) or kind_of(whole) or scaled_from(whole) < sys.maxsize)
        works &= type(model) is DistributedDataParallel or not (
            isinstance(model, FSDPModule) or hasattr(model, "module")
        )
        try:
            works = works and _error(model, whole) < 1
        except Exception:  # a model may raise anything if it gets another cache
            works = False
        whole.can_refill = all(gather_object([works]))
    return bool(whole.can_refill)


def _error(model: nn.Module, whole: Any) -> float:
    """Of the logits of three rows, two of which have entered: the largest, as a part of what
    rounding may do.
    """
    seen: list[torch.Tensor] = []
    trial = Refill(model, [[*range(1, n)] for n in (9, 5, 7)], max_new_tokens=99, ends=())
    one, others = DynamicCache(), DynamicCache()
    head = whole.get_output_embeddings()
    with head.register_forward_hook(lambda *call: seen.append(call[-1][:, -1])):
        trial._go_on([0], one)
        trial._go_on([1, 2], others)
        trial._go_on([0, 1, 2], joined(one, others))
        together = seen[-1]
        for prompt, found in zip(trial.prompts, trial.found, strict=True):
            generate(
                trial.model, [prompt + found[:-1]], max_new_tokens=1, ends=(), cache=DynamicCache()
            )
    alone = torch.cat(seen[-3:])
    error = (together - alone).float().norm(dim=1) / alone.float().norm(dim=1)
    return float(error.max()) / MAX_ERRORS[alone.dtype.itemsize == 2]
