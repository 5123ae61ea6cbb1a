"""The order of samples, and each rank's share of every global batch.

The order is a function of (seed, epoch, step) alone. The world size only decides who reads which slice of a global
batch, so a run resumes with a jump, on any number of processes, and sees the samples it would have seen.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import math
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from multiprocessing.sharedctypes import RawValue
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from shared.config import STOP_SIGNALS, CleanExit, stop_signals_wait

IGNORED = -100  # the label that no loss counts, as everywhere in PyTorch and transformers


DRAWN_AT_ONCE = 4096  # positions of an epoch


# Order -------------------------------------------------------------------------------------------------------------


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijective scramble of 64-bit words."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Where a keyed pseudo-random permutation of range(size) sends each entry of `index`.

    A balanced Feistel network on the next even power of two, walked until it lands inside the range (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002). Costs the same at any size and holds no table, so any
    step of any epoch is a jump.

    Args:
        index: [n], integers in range(size).
        size: number of samples, at most 2**62.
        key: integers that choose the permutation, (seed, epoch).

    Returns:
        [n] int64.
    """
    half = max(1, (int(size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    round_keys = np.random.SeedSequence(key).generate_state(8, np.uint64)

    def encrypt(x: np.ndarray) -> np.ndarray:
        left, right = x >> np.uint64(half), x & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        return (left << np.uint64(half)) | right

    with np.errstate(over="ignore"):
        result = encrypt(np.asarray(index, dtype=np.uint64))
        while (outside := result >= np.uint64(size)).any():
            result[outside] = encrypt(result[outside])
    return result.astype(np.int64)


@lru_cache(maxsize=8)
def permuted(size: int, key: tuple[int, ...], start: int, stop: int) -> np.ndarray:
    """`permute` of range(start, stop), kept for the next calls: many cost little more than one. Not to be written to."""
    result = permute(np.arange(start, stop), size, key)
    result.flags.writeable = False
    return result


def is_validation(numbers: np.ndarray, percent: float) -> np.ndarray:
    """Which documents, by their number in the source, belong to the validation split. Shape kept, bool.

    A hash of the number alone decides, so the split does not depend on seed, world size or corpus size.
    """
    with np.errstate(over="ignore"):
        hashed = _mix(np.asarray(numbers, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return hashed % np.uint64(10_000) < np.uint64(round(percent * 100))


def is_near(held_out: float, share: float) -> bool:
    """Whether what whole documents hold out, in samples or tokens, is at least half and at most twice the share wanted."""
    return share / 2 <= held_out <= 2 * share


@dataclass(frozen=True)
class Order:
    """Which samples make up each global batch. The last batch of an epoch may be smaller."""

    num_samples: int
    global_batch_size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False  # leave the smaller batch out; which samples that are differs from epoch to epoch

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def samples_per_epoch(self) -> int:
        return min(self.num_samples, self.steps_per_epoch * self.global_batch_size)

    def indices(self, step: int) -> np.ndarray:
        """The samples of optimizer step `step`, counted from 0 over all epochs: [<= global_batch_size] int64."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first = step_in_epoch * self.global_batch_size
        last = min(first + self.global_batch_size, self.num_samples)
        if not self.shuffle:
            return np.arange(first, last)
        drawn = self.global_batch_size * math.ceil(DRAWN_AT_ONCE / self.global_batch_size)
        start = first - first % drawn
        stretch = permuted(self.num_samples, (self.seed, epoch), start, min(start + drawn, self.num_samples))
        return stretch[first - start : last - start]


def micro_batches(indices: np.ndarray, rank: int, world_size: int, per_device: int) -> np.ndarray:
    """One rank's micro-batches of a global batch: [micro-batches, per_device] sample indices.

    All ranks get equally many, as their collectives require; where a ragged batch runs out, -1 stands for a row
    that is computed and counts for nothing. Over all ranks each index appears exactly once.
    """
    at_once = per_device * world_size
    padded = np.full(math.ceil(len(indices) / at_once) * at_once, -1, dtype=np.int64)
    padded[: len(indices)] = indices
    return padded.reshape(-1, world_size, per_device)[:, rank]


def cu_seqlens_of(position_ids: np.ndarray) -> np.ndarray:
    """Where each document begins in the flattened rows, and where the last one ends: [documents + 1] int32.

    Args:
        position_ids: [batch, seq], from 0 in each document.
    """
    return np.append(np.flatnonzero(position_ids == 0), position_ids.size).astype(np.int32)


# Loading -------------------------------------------------------------------------------------------------------------


Row = Mapping[str, Any]
Batch = dict[str, torch.Tensor]


class Samples(Protocol):
    """A map-style dataset that knows how many targets each sample has, so that no rank need ask the others."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def num_targets(self, indices: np.ndarray) -> int:
        """Target tokens (or images) of these samples together."""
        ...


class Spread:
    """`count` samples spread evenly over others, or all of them if there are fewer: what an evaluation uses."""

    def __init__(self, samples: Samples, count: int) -> None:
        self.samples = samples
        self.indices = np.linspace(0, len(samples) - 1, min(count, len(samples))).round().astype(np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Row:
        return self.samples[int(self.indices[index])]

    def num_targets(self, indices: np.ndarray) -> int:
        return self.samples.num_targets(self.indices[indices])


def seed_all(*key: int, devices: bool = True) -> None:
    """Seed the generators of torch (the CPU's alone unless `devices`), Python and NumPy with a hash of `key`.

    Those of the device in use and no others: torch.manual_seed asks every kind of device, and takes 50 times as long.
    """
    text = ",".join(map(str, key))
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
    torch.default_generator.manual_seed(seed)
    if devices and (device := _accelerator()) is not None:
        device.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed >> 32)  # torch on the CPU takes the lower half, and the same generator as NumPy


@cache
def _accelerator() -> Any:
    """torch.cuda or the like, None where there is none."""
    return torch.get_device_module() if torch.accelerator.is_available() else None


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
