"""Windows of micro-batches for one rank, from any optimizer step on."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.sharedctypes import RawValue
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from shared.data.order import IGNORED, Batch, Order, Row, Samples, micro_batches, seed_all
from shared.process.errors import CleanExit
from shared.process.signals import STOP_SIGNALS, stop_signals_wait


def cu_seqlens_of(position_ids: np.ndarray) -> np.ndarray:
    """Where each document begins in the flattened rows, and where the last one ends: [documents + 1] int32.

    Args:
        position_ids: [batch, seq], from 0 in each document.
    """
    return np.append(np.flatnonzero(position_ids == 0), position_ids.size).astype(np.int32)


@dataclass
class Window:
    """What one rank computes for one optimizer step."""

    micro_batches: list[Batch]
    num_targets: int  # of the whole global batch, over all ranks: what its loss is divided by
    num_samples: int  # likewise
    epoch: int
    epoch_samples: int | None  # that a whole epoch uses; None where a stream's length is not known
    indices: np.ndarray  # [micro-batches, rows] samples of this rank, -1 where a row counts for nothing


class _Rows(Dataset):
    """Transformed rows by (index, epoch); index -1 gives a row that has the shape of the first and no targets."""

    def __init__(self, samples: Samples, transform: Callable[[Row], Row] | None, seed: int) -> None:
        self.samples, self.transform, self.seed = samples, transform, seed

    def __getitem__(self, key: tuple[int, int]) -> Row:
        index, epoch = key
        row = self.samples[max(index, 0)]
        if self.transform is not None:
            seed_all(self.seed, epoch, max(index, 0), 1, devices=False)
            row = self.transform(row)
        return row if index >= 0 else {**row, "labels": np.full_like(row["labels"], IGNORED)}

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Row] | CleanExit:
        try:
            return [self[key] for key in keys]
        except CleanExit as error:  # raised by the training process: a reading one would wrap it into a traceback
            return error


@dataclass(frozen=True)
class _Collate:
    rows: Callable[[list[Row]], Batch]

    def __call__(self, rows: list[Row] | CleanExit) -> Batch | CleanExit:
        return rows if isinstance(rows, CleanExit) else self.rows(rows)


class _Ending:
    """Whether the training process is at its end, seen by the reading ones."""

    def __init__(self) -> None:
        self.flag = RawValue(ctypes.c_bool, False)
        atexit.register(self.begin)  # runs before multiprocessing ends its children with SIGTERM and waits for them

    def begin(self) -> None:
        self.flag.value = True


def _ignore_stop_signals(_worker: int, *, ending: Any) -> None:
    """They are the training process's business: a reading process that died of them would take the step with it."""

    def handle(_number: int, _frame: object) -> None:
        if ending.value:
            os._exit(0)

    for number in STOP_SIGNALS:
        signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


class ToDevice:
    """Puts batches on a device. Pinned ones cross to a GPU on a stream of their own, beside the step that it computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batches: list[Batch]) -> list[Batch]:
        if self.stream is None:
            return [{key: tensor.to(self.device) for key, tensor in batch.items()} for batch in batches]
        using = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            batches = [{k: tensor.to(self.device, non_blocking=True) for k, tensor in batch.items()} for batch in batches]
        using.wait_stream(self.stream)
        for batch in batches:
            for tensor in batch.values():
                tensor.record_stream(using)  # or its memory is taken again while that stream still reads it
        return batches


class Loader:
    """Windows of micro-batches for one rank, from any optimizer step on.

    Args:
        samples: the whole data set; every rank holds the same.
        collate: rows -> a batch of tensors, `labels` among them.
        order: the global batches.
        per_device: rows of one micro-batch.
        rank, world_size: this rank's place among those that read different data.
        device: where the batches are put.
        num_workers: reading processes; 0 for none. They stay for all epochs, and for all passes over one range.
        transform: what is done to a row where it is read, augmentation for one. All it draws, from the generators of
            torch, Python or NumPy, is a function of (order.seed, epoch, sample index).
    """

    def __init__(
        self,
        samples: Samples,
        collate: Callable[[list[Row]], Batch],
        order: Order,
        *,
        per_device: int,
        rank: int,
        world_size: int,
        device: torch.device,
        num_workers: int = 0,
        transform: Callable[[Row], Row] | None = None,
    ) -> None:
        self.samples, self.collate, self.order, self.transform = samples, collate, order, transform
        self.per_device, self.rank, self.world_size = per_device, rank, world_size
        self.device, self.num_workers = device, num_workers
        self._readers: dict[tuple[int, int], DataLoader] = {}  # of the latest range
        self._to_device = ToDevice(device)

    @property
    def steps_per_epoch(self) -> int | None:
        return self.order.steps_per_epoch

    def windows(self, start: int, stop: int) -> Iterator[Window]:
        """Yield one window for each optimizer step in range(start, stop). Nothing is skipped through to get there.

        Raises:
            CleanExit: that reading a sample raised.
        """
        if (start, stop) not in self._readers:
            self._readers = {(start, stop): self._reader(start, stop)}
        with stop_signals_wait():
            batches = iter(self._readers[start, stop])  # starts the reading processes
        for step in range(start, stop):
            indices = self.order.indices(step)
            split = micro_batches(indices, self.rank, self.world_size, self.per_device)
            rows = [next(batches) for _ in split]
            for batch in rows:
                if isinstance(batch, CleanExit):
                    raise batch
            rows = self._to_device(rows)
            epoch = step // self.order.steps_per_epoch
            yield Window(rows, self.samples.num_targets(indices), len(indices), epoch, self.order.samples_per_epoch, split)

    def longest(self, rows: int) -> Batch:
        """The longest sample and `rows` - 1 times another, of the shortest, on the device: what memory has to suffice for.

        All rows are as long as the longest, some may be packed, which takes a mask, and all tokens count as targets.
        """
        lengths = getattr(self.samples, "lengths", np.zeros(1))
        read = _Rows(self.samples, self.transform, self.order.seed)
        longest, shortest = (read[int(index), 0] for index in (np.argmax(lengths), np.argmin(lengths)))
        batch = self.collate([longest] + [shortest] * (rows - 1))
        batch.pop("targets", None)
        return {key: tensor.to(self.device) for key, tensor in batch.items()}

    def _reader(self, start: int, stop: int) -> DataLoader:
        keys = _Keys(self.order, range(start, stop), (self.rank, self.world_size, self.per_device))
        return DataLoader(
            _Rows(self.samples, self.transform, self.order.seed),
            batch_sampler=keys,
            collate_fn=_Collate(self.collate),
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=4 if self.num_workers else None,
            worker_init_fn=partial(_ignore_stop_signals, ending=_Ending().flag),
            generator=torch.Generator(),  # leave the global one alone
        )


@dataclass(frozen=True)
class _Keys:
    """(index, epoch) of each row of each micro-batch of a range of steps."""

    order: Order
    steps: range
    share: tuple[int, int, int]  # of micro_batches: rank, world size, rows at once

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in self.steps:
            epoch = step // self.order.steps_per_epoch
            for indices in micro_batches(self.order.indices(step), *self.share):
                yield [(int(index), epoch) for index in indices]
