"""What is tried before the first step: does it fit, does a checkpoint work. It changes nothing."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object, release_memory
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shared.models.weights import persistent_buffers
from shared.parallel.gradients import end_step, keeps_gradients
from shared.parallel.strategy import Strategy
from shared.process import ranks
from shared.process.errors import is_out_of_memory
from shared.process.printing import print_main
from shared.run.checkpoint import Checkpointer
from shared.training.optim import fill_state
from shared.training.step import reduced


@dataclass(frozen=True)
class Rehearsal:
    """Forward and backward passes of the longest batch, taken back afterwards. Every rank makes one
    and calls it alike.

    Args:
        models, optimizers: as `Setup.prepare` returned them.
        loader: of the training data: has `per_device`, `multiple` and `longest(rows)`.
        loss: batch -> scalar, through all models.
    """

    strategy: Strategy
    models: Sequence[nn.Module]
    optimizers: Sequence[Any]
    loader: Any
    loss: Any

    def find_batch_size(self) -> int:
        """Halve the rows of a micro-batch until memory suffices; the loader uses the number from
        then on.

        They divide the loader's rows and are a multiple of its `multiple`. The optimizer's state
        and gradients are in place meanwhile. The global batch stays, so training learns the same.

        Raises:
            OutOfMemoryError: a single row does not fit; or FSDP's ranks do not have the same free
                memory.
            ConfigError: under DeepSpeed, whose engine cannot take a step back.
        """
        self.strategy.require("--find_batch_size")
        asked = rows = self.loader.per_device
        step = self.loader.multiple
        with self._taken_back(self.optimizers):
            while not self._fits(rows):
                fewer = [n for n in range(step, rows // 2 + 1, step) if rows % n == 0]
                if not fewer:
                    raise torch.OutOfMemoryError(f"a micro-batch of {rows} does not fit")
                print_main(
                    f"out of memory with {rows} at once; trying {max(fewer)} at once, accumulated "
                    f"{asked // max(fewer)} times as often"
                )
                rows = max(fewer)
        self.loader.per_device = rows
        return rows

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
        with self._taken_back():
            for _ in range(2):  # the second forward moves the gradients into their new buckets
                self.strategy.backward(self.loss(batch), 0.0)
        self._clear_gradients()

    def dress_rehearsal(self, saver: Checkpointer) -> None:
        """Do once what would otherwise fail after hours: the longest batch, a save and a load.

        Raises:
            OutOfMemoryError: the longest batch does not fit beside gradients and the optimizer's
                state.
            CheckpointError: a checkpoint cannot be written or read.
            ConfigError: under DeepSpeed, whose engine cannot take a step back.
        """
        self.strategy.require("--dress_rehearsal")
        start = time.perf_counter()
        with self._taken_back(self.optimizers):
            if not self._fits(self.loader.per_device):
                raise torch.OutOfMemoryError("the longest batch does not fit")
            trained = time.perf_counter()
            size = saver.save_and_load()
        saved = time.perf_counter()
        print_main(
            f"dress rehearsal: the longest batch, twice: {trained - start:.1f} s; a checkpoint of "
            f"{size / 1e9:.2f} GB saved and read back: {saved - trained:.1f} s"
        )

    def _clear_gradients(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=not keeps_gradients(self.strategy.accelerator))

    @contextlib.contextmanager
    def _taken_back(self, optimizers: Sequence[Any] = ()) -> Iterator[None]:
        """Fill empty optimizer states meanwhile. Take back these and BatchNorm's statistics at the
        end.
        """
        models = [self.strategy.accelerator.unwrap_model(model) for model in self.models]
        buffers = {b: b.clone() for model in models for b in persistent_buffers(model).values()}
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

    def _fits(self, rows: int) -> bool:
        """Whether the longest micro-batch of so many rows fits, on all ranks."""
        batch = self.loader.longest(rows)
        enough = True
        try:
            for _ in range(2):  # the second beside the gradients of the first
                with reduced(self.strategy.accelerator, self.models, last=False):
                    self.strategy.backward(self.loss(batch), 0.0)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            enough = False
        self._clear_gradients()
        if not enough:
            for model in self.models:
                end_step(model)
            release_memory()
        fits = gather_object([enough])
        gathers = ranks.sequence_ranks() > 1
        gathers |= any(isinstance(model, FSDPModule) for model in self.models)
        if any(fits) and not all(fits) and gathers:
            # The others' gathers still wait for the rank that gave up: nothing can be tried again.
            raise torch.OutOfMemoryError(
                f"{rows} rows at once fit on some ranks, but not on rank {fits.index(False)}"
            )
        return all(fits)
