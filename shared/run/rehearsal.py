"""What is tried before the first step."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared.data.loader import Loader
from shared.data.order import Batch
from shared.models.weights import persistent_buffers
from shared.parallel import zero
from shared.parallel.gradients import end_step, keeps_gradients
from shared.process.errors import ConfigError, is_out_of_memory
from shared.process.printing import print_main
from shared.run.checkpoint import Checkpointer, TrainState
from shared.training.optim import fill_state
from shared.training.step import _reduced, backward


class Longest(Protocol):
    """A `data.Loader`, or anything else that knows its longest micro-batch."""

    per_device: int

    def longest(self, rows: int) -> Batch: ...


def largest_that_fits(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: list[Any],
    loader: Loader,
    loss: Callable[[Batch], torch.Tensor],
    *,
    multiple: int = 1,
) -> int:
    """Rows of a micro-batch that memory suffices for, at most the loader's; the loader gets that many from now on.

    They divide the loader's, and are a multiple of `multiple`, as the loader's have to be.

    Tries the longest sample with the optimizer's state and gradients in place, and halves where memory runs out. The
    global batch stays what it is, so what is learned does, too. Every rank calls this, after `parallel.prepare`; where
    weights are cut over ranks these have to have equally much free memory, or one would wait for another that gave up.

    Raises:
        OutOfMemoryError: a single row does not fit.
        ConfigError: under DeepSpeed, whose engine cannot take a step back.
    """
    if zero.is_used(accelerator):
        raise ConfigError("--find_batch_size does not work under DeepSpeed: `python -m shared plan` predicts what fits")
    asked = rows = loader.per_device
    with _trial(accelerator, model, optimizers):
        while not _fits(accelerator, model, optimizers, loss, loader.longest(rows)):
            fewer = [n for n in range(multiple, rows // 2 + 1, multiple) if rows % n == 0]
            if not fewer:
                raise torch.OutOfMemoryError(f"a micro-batch of {rows} does not fit")
            smaller = max(fewer)
            print_main(
                f"out of memory with {rows} at once; trying {smaller} at once, accumulated {asked // smaller} times as often"
            )
            rows = smaller
    loader.per_device = rows
    return rows


def warm_up(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: list[Any],
    loader: Longest,
    loss: Callable[[Batch], torch.Tensor],
) -> None:
    """Let DDP lay out its buckets before the first step. Every rank calls this, once in each start.

    It orders gradients anew after its first backward, and from three ranks on a gradient's place decides the order in
    which it is added up: without this, the first step after a resume would differ in the last bit.
    """
    if accelerator.num_processes < 3 or not isinstance(model, DistributedDataParallel):
        return
    batch = loader.longest(loader.per_device)
    with _trial(accelerator, model):
        for _ in range(2):  # the second forward moves the gradients into their new buckets
            backward(accelerator, loss(batch), 0.0)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=not keeps_gradients(accelerator))


def dress_rehearsal(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: list[Any],
    loader: Longest,
    loss: Callable[[Batch], torch.Tensor],
    saver: Checkpointer,
    state: TrainState,
) -> None:
    """Do once what would otherwise fail after hours: the longest batch, a save and a load. Every rank calls this.

    Leaves weights, buffers and optimizers as they were. Call before the first step; the evaluation that comes next
    belongs to the rehearsal.

    Raises:
        OutOfMemoryError: the longest batch does not fit, with gradients and the optimizer's state in place.
        CheckpointError: a checkpoint cannot be written, or not be read back.
    """
    start = time.perf_counter()
    if zero.is_used(accelerator):
        raise ConfigError("--dress_rehearsal does not work under DeepSpeed, whose engine cannot take a step back")
    with _trial(accelerator, model, optimizers):
        if not _fits(accelerator, model, optimizers, loss, loader.longest(loader.per_device)):
            raise torch.OutOfMemoryError("the longest batch does not fit")
        trained = time.perf_counter()
        saver.save_and_load(state)
    saved = time.perf_counter()
    print_main(
        f"dress rehearsal: the longest batch, twice: {trained - start:.1f} s; a checkpoint of {saver.size() / 1e9:.2f} GB "
        f"saved and read back: {saved - trained:.1f} s"
    )


@contextlib.contextmanager
def _trial(accelerator: Accelerator, model: nn.Module, optimizers: Sequence[Any] = ()) -> Iterator[None]:
    """Give optimizers that have none a state, and take back in the end what trying changes: that, and BatchNorm's counts."""
    buffers = {b: b.clone() for b in persistent_buffers(accelerator.unwrap_model(model)).values()}
    fresh = [optimizer for optimizer in optimizers if not optimizer.state]
    for optimizer in fresh:
        fill_state(optimizer)
    try:
        yield
    finally:
        for optimizer in fresh:
            optimizer.state.clear()
        for buffer, value in buffers.items():
            buffer.copy_(value)


def _fits(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: list[Any],
    loss: Callable[[Batch], torch.Tensor],
    batch: Batch,
) -> bool:
    enough = True
    try:
        for _ in range(2):  # the second beside the gradients of the first
            with _reduced(accelerator, model, last=False):
                backward(accelerator, loss(batch), 0.0)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        enough = False
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=not keeps_gradients(accelerator))
    if not enough:
        end_step(model)
        gc.collect()
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
    return bool(accelerator.reduce(torch.tensor(float(enough), device=accelerator.device), "mean") == 1)
