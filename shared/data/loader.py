"""Worker processes, and windows of micro-batches for one rank from any optimizer step on."""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from itertools import islice
from multiprocessing.sharedctypes import RawValue
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from shared.data.order import (
    IGNORED,
    Batch,
    Order,
    Row,
    Samples,
    draws_kept,
    micro_batches,
    seed_all,
)
from shared.process.errors import CleanExit, ConfigError
from shared.process.ranks import cores
from shared.process.signals import STOP_SIGNALS, stop_signals_wait


def cu_seqlens_of(position_ids: np.ndarray) -> np.ndarray:
    """Where each document begins in the flattened rows, and where the last one ends: [documents +
    1] int32.

    Args:
        position_ids: [batch, seq], from 0 in each document.
    """
    return np.append(np.flatnonzero(position_ids == 0), position_ids.size).astype(np.int32)


@dataclass
class MicroBatches:
    """Micro-batches that are read when they are asked for, and not kept: memory does not grow with
    their number.

    Raises:
        RuntimeError: someone goes through them a second time.
    """

    batches: Iterator[Batch]
    is_taken: bool = False

    def __iter__(self) -> Iterator[Batch]:
        if self.is_taken:
            raise RuntimeError(
                "micro-batches are read once and not kept: use `step.batches`, or "
                "make a list of them"
            )
        self.is_taken = True
        return self.batches

    def skip(self) -> None:
        """Read what is left, so that the next step's can follow."""
        self.is_taken = True
        for _ in self.batches:
            pass


@dataclass(frozen=True)
class Share:
    """What one process reads of each global batch: its rank among those that read different data,
    and how many there are.

    Batches are put on `device`, after `cut` has taken this process's part of each row.
    """

    rank: int
    world_size: int
    device: torch.device
    cut: Callable[[Batch], Batch] = dict


@dataclass
class Window:
    """What one rank computes for one optimizer step."""

    micro_batches: Iterable[Batch]  # of a `Loader`: to be gone through once, before the next window
    num_targets: int  # of the whole global batch, over all ranks: what its loss is divided by
    num_samples: int  # likewise
    epoch: int
    epoch_samples: int | None  # that a whole epoch uses; None where a stream's length is not known
    # [micro-batches, rows] samples of this rank, -1 where a row counts for nothing
    indices: np.ndarray
    # of a mixture: see `Order.used`, after this step
    sources: dict[str, tuple[int, int]] = field(default_factory=dict)
    # JSON, of a stream: where it goes on after this step; goes into checkpoints
    place: dict[str, Any] | None = None


@dataclass(frozen=True)
class Rows:
    """Micro-batches by their keys (index, epoch). Index -1 gives a row that has the shape of the
    first and no targets.
    """

    samples: Samples
    collate: Callable[[list[Row]], Batch]
    transform: Callable[[Row], Row] | None
    seed: int
    cut: Callable[[Batch], Batch]

    def row(self, index: int, epoch: int) -> Row:
        row = self.samples[max(index, 0)]
        if self.transform is not None:
            seed_all(self.seed, epoch, max(index, 0), 1, devices=False)
            before = np.count_nonzero(row["labels"] != IGNORED)
            row = self.transform(row)
            # the loss would be divided by `before`
            if (after := np.count_nonzero(row["labels"] != IGNORED)) != before:
                raise ConfigError(
                    f"sample {index}: the transform changed the number of targets from {before} to "
                    f"{after}: keep it"
                )
            places = row.get("position_ids", np.zeros(0))
            # a gap would begin another document
            if not ((np.diff(places) == 1) | (places[1:] == 0)).all():
                raise ConfigError(
                    f"sample {index}: the transform leaves gaps in position_ids: "
                    "number each document anew"
                )
        return row if index >= 0 else {**row, "labels": np.full_like(row["labels"], IGNORED)}

    def __call__(self, keys: list[list[int]]) -> Batch:
        # Without workers, this runs in the training process, whose draws it must not change.
        with draws_kept() if self.transform else contextlib.nullcontext():
            return self.batch([self.row(*key) for key in keys])

    def batch(self, rows: list[Row]) -> Batch:
        return self.cut(self.collate(rows))


class _Work(Dataset):
    """What workers do with each item, as the data set of a DataLoader."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work

    def __getitems__(self, item: Any) -> Any:
        try:
            return item if isinstance(item, CleanExit) else self.work(item)
        # if a worker raised it, DataLoader would put a traceback into its message
        except CleanExit as error:
            return error


def _and_its_error(items: Iterable[Any]) -> Iterator[Any]:
    """The items, and the CleanExit that ends them: a traceback through DataLoader would keep its
    processes and threads.
    """
    try:
        yield from items
    except CleanExit as error:
        yield error


def _or_raise(results: Iterable[Any]) -> Iterator[Any]:
    for result in results:
        if isinstance(result, CleanExit):
            raise result
        yield result


def _as_it_is(result: Any) -> Any:
    return result


def use_tokenizer_threads(use: bool) -> None:
    """Whether tokenizers use threads, which do not survive a fork. A no is for good; where nothing
    is said, they warn at each fork.
    """
    if use:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    else:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


@cache
def _ending() -> Any:
    """A flag that workers see. True: the training process exits."""
    flag = RawValue(ctypes.c_bool, False)
    # runs before multiprocessing ends its children with SIGTERM and waits
    atexit.register(setattr, flag, "value", True)
    return flag


def _ignore_stop_signals(_worker: int, ending: Any) -> None:
    """In a worker: a stop signal is for the training process, which still needs this step's
    batches.
    """

    def handle(_number: int, _frame: object) -> None:
        if ending.value:
            os._exit(0)

    for number in STOP_SIGNALS:
        signal.signal(number, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _workers(
    work: Callable[[Any], Any], items: Iterable[Any], num_workers: int, **options: Any
) -> DataLoader:
    """A DataLoader that gives `work(item)`, or the CleanExit it raised, in the order of the items,
    which are read as needed. On Linux without /dev/shm, the calling process does the work.
    """
    if sys.platform == "linux" and not os.path.isdir("/dev/shm"):
        num_workers = 0
        options = {}
    return DataLoader(
        _Work(work),
        batch_sampler=items,  # type: ignore[arg-type]
        collate_fn=_as_it_is,
        num_workers=num_workers,
        worker_init_fn=partial(_ignore_stop_signals, ending=_ending()) if num_workers else None,
        generator=torch.Generator(),  # leave the global one alone
        **options,
    )


def parallel_map(
    work: Callable[[Any], Any], items: Iterable[Any], processes: int | None
) -> Iterator[Any]:
    """`map(work, items)` by several processes. The results come in the order of the items.

    Args:
        work: a function that can be pickled.
        items: are read as they are needed, a few ahead.
        processes: None takes one for each processor; 1 works in this process.

    Raises:
        ConfigError: a process was killed.
        CleanExit: raised by `work`.
    """
    processes = cores() if processes is None else processes
    if processes > 1:
        use_tokenizer_threads(False)
    results: Any = None
    try:
        with stop_signals_wait():
            results = iter(_workers(work, _and_its_error(items), processes if processes > 1 else 0))
        yield from _or_raise(results)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise ConfigError(
            "a process that prepares the data has died, perhaps for lack of memory: choose fewer "
            "with --preprocessing_num_workers"
        ) from None
    finally:
        # ends the processes now: garbage collection would close files that the reader's own threads
        # close
        del results


@cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """A batch on a device. A pinned one is copied to a GPU while it computes the batch before, and
    the host does not wait.
    """
    if device.type != "cuda":
        return {key: tensor.to(device) for key, tensor in batch.items()}
    using = torch.cuda.current_stream(device)
    with torch.cuda.stream(_copies(device)):
        moved = {key: tensor.to(device, non_blocking=True) for key, tensor in batch.items()}
    using.wait_stream(_copies(device))
    for tensor in moved.values():  # else its memory is reused while that stream still reads it
        tensor.record_stream(using)
    return moved


@dataclass
class Loader:
    """Windows of micro-batches for one rank, from any optimizer step on.

    Args:
        samples: the whole data set, the same on every rank.
        collate: rows -> a batch of tensors, `labels` among them.
        order: the global batches.
        share: what this process reads, see `sharding.share`.
        per_device: rows of one micro-batch.
        one_shape: all batches have one shape, so that compiled code is compiled once.
        multiple: the rows of a micro-batch have to be a multiple of this.
        num_workers: reading processes; 0 for none. They stay for all epochs, and for all passes
            over one range.
        transform: applied to each row where it is read, for example augmentation. It keeps the
            number of targets, and `position_ids` of a packed row count from 0 in each document. Its
            random draws (torch, Python, NumPy) are a function of (order.seed, epoch, sample index).
    """

    samples: Samples
    collate: Callable[[list[Row]], Batch]
    order: Order
    share: Share
    _: KW_ONLY
    per_device: int
    one_shape: bool = False
    multiple: int = 1
    num_workers: int = 0
    transform: Callable[[Row], Row] | None = None
    # of the latest range of steps
    _readers: dict[tuple[int, int], DataLoader] = field(default_factory=dict, init=False)

    @property
    def steps_per_epoch(self) -> int | None:
        return self.order.steps_per_epoch

    def windows(self, start: int, stop: int) -> Iterator[Window]:
        """Yield one window for each optimizer step in range(start, stop). It begins at `start`
        without reading what comes before.

        Micro-batches are read as they are asked for; what a window has left is skipped when the
        next one is asked for.

        Raises:
            CleanExit: raised by reading a sample, here or in the micro-batches.
        """
        if (start, stop) not in self._readers:
            self._readers = {(start, stop): self._reader(start, stop)}
        with stop_signals_wait():
            batches = _or_raise(iter(self._readers[start, stop]))  # starts the reading processes
        for step in range(start, stop):
            indices = self.order.indices(step)
            split = micro_batches(indices, self.share.rank, self.share.world_size, self.per_device)
            own = islice(batches, len(split))
            rows = MicroBatches(to_device(batch, self.share.device) for batch in own)
            yield Window(
                rows,
                num_targets=self.samples.num_targets(indices),
                num_samples=len(indices),
                epoch=self.order.position(step)[0],
                epoch_samples=self.order.samples_per_epoch,
                indices=split,
                sources=self.order.used(step + 1),
            )
            rows.skip()

    def longest(self, rows: int) -> Batch:
        """The batch that takes the most memory, on the device: the longest sample and `rows` - 1
        times the shortest.

        It is as long as the longest sample, may have packed rows, which take a mask, and all its
        tokens are targets.
        """
        lengths = getattr(self.samples, "lengths", np.zeros(1))
        read = self._rows()
        longest, shortest = (
            read.row(int(index), 0) for index in (np.argmax(lengths), np.argmin(lengths))
        )
        batch = read.batch([longest] + [shortest] * (rows - 1))
        batch.pop("targets", None)
        return to_device(batch, self.share.device)

    def _rows(self) -> Rows:
        seed = self.order.seed
        return Rows(self.samples, self.collate, self.transform, seed, self.share.cut)

    def _reader(self, start: int, stop: int) -> DataLoader:
        return _workers(
            self._rows(),
            _Keys(
                self.order,
                range(start, stop),
                (self.share.rank, self.share.world_size, self.per_device),
            ),
            self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=self.share.device.type == "cuda",
            prefetch_factor=4 if self.num_workers else None,
        )


@dataclass(frozen=True)
class _Keys:
    """(index, epoch) of each row of each micro-batch of a range of steps."""

    order: Order
    steps: range
    share: tuple[int, int, int]  # rank, world size, rows of a micro-batch

    def __iter__(self) -> Iterator[list[list[int]]]:
        for step in self.steps:
            keys = self.order.keys(step)
            # -1 where a row counts for nothing
            for places in micro_batches(np.arange(len(keys)), *self.share):
                rows = keys[places]
                rows[places < 0, 0] = -1
                yield rows.tolist()
