"""Passes before the first step, which change nothing."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared.models.weights import persistent_buffers
from shared.parallel.gradients import keeps_gradients
from shared.parallel.strategy import Strategy
from shared.training.optim import fill_state


@dataclass(frozen=True)
class Rehearsal:
    """Forward and backward passes of the longest batch, taken back afterwards. Every rank makes one
    and calls it alike.

    Args:
        models, optimizers: as `Setup.prepare` returned them.
        loader: of the training data: has `per_device`, `multiple` and `longest(rows)`.
        loss: batch -> scalar, through all models.
        kept: tensors that the loss may change.
    """

    strategy: Strategy
    models: Sequence[nn.Module]
    optimizers: Sequence[Any]
    loader: Any
    loss: Any
    kept: Sequence[torch.Tensor] = ()

    def settle_ddp(self) -> None:
        """Let DDP lay out its buckets before the first step, once in each start.

        DDP orders gradients anew after its first backward pass. From three ranks on a gradient's
        place decides the order of its sum, so the first step after a resume would differ in the
        last bit.
        """
        if self.strategy.accelerator.num_processes < 3 or not any(
            isinstance(m, DistributedDataParallel) for m in self.models
        ):
            return
        batch = self.loader.longest(self.loader.per_device)
        with self.taken_back():
            for _ in range(2):  # the second forward moves the gradients into their new buckets
                self.strategy.backward(self.loss(batch), 0.0)
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not keeps_gradients(self.strategy.accelerator))

    @contextlib.contextmanager
    def taken_back(self, optimizers: Sequence[Any] = ()) -> Iterator[None]:
        """Fill empty optimizer states meanwhile. Take back these, BatchNorm's statistics and kept
        tensors at the end.
        """
        models = [self.strategy.accelerator.unwrap_model(model) for model in self.models]
        buffers = [b for model in models for b in persistent_buffers(model).values()]
        before = [(tensor, tensor.clone()) for tensor in (*buffers, *self.kept)]
        fresh = [optimizer for optimizer in optimizers if not optimizer.state]
        for optimizer in fresh:
            fill_state(optimizer)
        try:
            yield
        finally:
            for optimizer in fresh:
                optimizer.state.clear()
            for tensor, value in before:
                tensor.copy_(value)
