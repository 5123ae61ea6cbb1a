"""Data that an encoder has made from a source: prepared once, batch after batch, and kept for later
runs.

A store belongs to one source, never to a split: a `Split` of it has the samples to train on. A
preparation that was killed goes on where it stood, and ends with the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any, Protocol, TypeVar

import numpy as np

from shared.data import prepared, records
from shared.data.loader import parallel_map
from shared.data.notes import Notes
from shared.data.records import Source
from shared.process import faults
from shared.process.collectives import on_main
from shared.process.errors import ConfigError
from shared.process.files import cache_dir
from shared.process.printing import note, print_main

T = TypeVar("T")

BATCH = 2**18  # characters that a process encodes at a time
BAD = 10  # records that are named together
SAVE_EVERY = 5.0  # seconds of work that a killed preparation loses, at most
STATE = "state.json"


@dataclass
class Encoded:
    """What an encoder made of a batch of items.

    Args:
        values: arrays of equal length, of all samples one after the other.
        ends: [samples], where each sample ends in them. What follows the last end belongs to a
            sample of a later batch.
        table: arrays with a row a sample.
        lines: lists with something JSON-like a sample, each kept in a file of its own.
    """

    values: dict[str, np.ndarray]
    ends: np.ndarray
    table: dict[str, np.ndarray] = field(default_factory=dict)
    lines: Mapping[str, Sequence[Any]] = field(default_factory=dict)


class Encode(Protocol):
    """Makes samples of records. It is sent to other processes.

    Attributes:
        kind: name of the folder in the cache.
        demo: what is read if no data is named.
    """

    kind: str
    demo: Source

    def identity(self) -> Any:
        """Something JSON-like that changes when the samples of a source do: settings, and
        `prepared.source_of` its code.
        """

    def items(self, source: Source, notes: Notes) -> Iterator[Any]:
        """What to encode, in order. This process reads it, all of it again where a killed
        preparation goes on.
        """

    def size(self, item: Any) -> int:
        """Characters of an item."""

    def where(self, item: Any) -> str:
        """Where an item is."""

    def __call__(self, items: list[Any], notes: Notes) -> Encoded:
        """The samples of a batch. They do not depend on what else is in it."""


def batches(items: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Lists of items, of BATCH characters or a little more."""
    batch: list[T] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += size(item)
        if characters >= BATCH:
            yield batch
            batch = []
            characters = 0
    if batch:
        yield batch


def prepare_sources(
    config: Any, encode: Encode, *, limit: int | None = None
) -> tuple[dict[str, Store], dict[str, Store]]:
    """Prepare the data, or each source of a mixture. Every rank calls this.

    Args:
        config: a `DataConfig` of text, with `preprocessing_num_workers`.
        limit: read only this many records of each source to train on.

    Returns:
        By the names of the sources, their stores to train on, and those to validate on if they are
        named. A --validation_file is that of all sources, and stands under the first name.

    Raises:
        ConfigError: wrong input, with its place.
    """
    processes = config.preprocessing_num_workers
    trained: dict[str, Store] = {}
    held_out: dict[str, Store] = {}
    for name, of_source in config.sources().items():
        train, validation = records.open_sources(of_source, demo=encode.demo)
        trained[name] = prepare(train, encode, limit=limit, processes=processes)
        if validation is not None and not (held_out and config.validation_file):
            held_out[name] = prepare(validation, encode, processes=processes)
    if {store.identity for store in trained.values()} & {of.identity for of in held_out.values()}:
        note("warning: the validation data are trained on, so their loss says nothing about others")
    return trained, held_out


def prepare(
    source: Source,
    encode: Encode,
    *,
    limit: int | None = None,
    processes: int | None = None,
) -> Store:
    """Encode a source, unless it is there already. Every rank calls this; the main one works, the
    others wait.

    Args:
        limit: read only this many records.
        processes: see `parallel_map`.

    Raises:
        ConfigError: there are no records, or `encode` refuses one.
    """
    key = on_main(  # machines may see other file times, and the Hub may answer one of them only
        lambda: prepared.fingerprint(
            source=source.identity(),
            encode=encode.identity(),
            limit=limit,
            code=prepared.source_of(
                *(
                    "data/store.py",
                    "data/notes.py",
                    "data/records.py",
                    "data/tables.py",
                    "data/values.py",
                )
            ),
        )
    )
    limited = replace(source, read=lambda: islice(source.read(), limit))
    folder = cache_dir() / encode.kind / key
    build = partial(_fill, source=limited, encode=encode, processes=processes)
    return Store(prepared.build_once(folder, build, continues=True))


def _fill(folder: Path, source: Source, encode: Encode, processes: int | None) -> None:
    notes = Notes()
    writer = _Writer(folder)
    if writer.state.source:  # it was killed while checksums were computed
        return
    items = islice(encode.items(source, notes), writer.state.items, None)
    found = parallel_map(partial(_encode_batch, encode), batches(items, encode.size), processes)
    printed = monotonic()
    bad: list[tuple[str, str]] = []
    for count, encoded, of_batch in found:
        bad += of_batch.bad
        if len(bad) >= BAD or (bad and monotonic() - printed > 10):
            break
        if bad:  # look for others
            continue
        writer.add(count, encoded, of_batch)
        if monotonic() - printed > 10:
            print_main(f"tokenising {source.name}: {writer.state.items:,} records")
            printed = monotonic()
        faults.point("prepare")
    if bad:
        raise ConfigError(*_named(bad))
    if not writer.state.items:
        raise ConfigError(f"{source.name}: no records in it")
    writer.close(source.name, notes)


def _named(bad: list[tuple[str, str]]) -> Iterator[str]:
    """A line for each error: the records that have it."""
    places: dict[str, list[str]] = {}
    for where, error in bad:
        places.setdefault(error, []).append(where)
    for error, (first, *others) in places.items():
        also = [*others[:BAD], *["..."] * (len(others) > BAD)]
        yield first + error + f" ({len(others):,} more: {', '.join(also)})" * bool(also)


def _encode_batch(encode: Encode, items: list[Any]) -> tuple[int, Any, Notes]:
    """(how many items, their samples, what was noted); without samples, all that is bad."""
    notes = Notes()
    try:
        return len(items), encode(items, notes), notes
    except ConfigError:
        for item in items:
            try:
                encode([item], Notes())
            except ConfigError as error:
                where = encode.where(item)
                notes.bad.append((where, str(error).removeprefix(where)))
        if not notes.bad:
            raise
        return len(items), None, notes


@dataclass
class _State:
    """How much of a store is whole."""

    items: int = 0
    values: int = 0  # of each array in `Encoded.values`
    arrays: dict[str, list[Any]] = field(default_factory=dict)  # by name: dtype, shape of a row
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of each file
    counts: dict[str, int] = field(default_factory=dict)  # see `Notes`
    first: dict[str, list[str]] = field(default_factory=dict)
    source: str = ""  # its name; empty while it is being written


class _Writer:
    """Appends batches to the files of a store: `<array>.bin`, `<list>.jsonl`, and STATE."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = _State()
        held = {path.name: path.stat().st_size for path in folder.iterdir()}
        if held.pop(STATE, 0):  # of a killed preparation
            state = _State(**json.loads((folder / STATE).read_text()))
            # a power cut may have lost the last writes: then start over
            if all(held.get(name, 0) >= size for name, size in state.sizes.items()):
                self.state = state
        self.notes = Notes(Counter(self.state.counts), self.state.first)
        for name in held:
            os.truncate(folder / name, self.state.sizes.get(name, 0))
        self._open: dict[str, Any] = {}
        self._saved = monotonic()

    def add(self, items: int, encoded: Encoded, notes: Notes) -> None:
        arrays = {**encoded.values, **encoded.table}
        arrays["ends"] = self.state.values + np.asarray(encoded.ends, np.int64)
        for name, values in encoded.lines.items():
            lines = [(json.dumps(value, default=str) + "\n").encode() for value in values]
            ends = np.cumsum([len(line) for line in lines])
            arrays[f"{name}_ends"] = self.state.sizes.get(f"{name}.jsonl", 0) + ends
            self._append(f"{name}.jsonl", b"".join(lines))
        for name, array in arrays.items():
            kind = [array.dtype.name, list(array.shape[1:])]
            assert self.state.arrays.setdefault(name, kind) == kind, (name, kind)
            self._append(f"{name}.bin", np.ascontiguousarray(array).tobytes())
        self.state.items += items
        self.state.values += len(next(iter(encoded.values.values())))
        self.notes.update(notes)
        if monotonic() - self._saved >= SAVE_EVERY:
            self._save()

    def _append(self, name: str, data: bytes) -> None:
        if name not in self._open:
            self._open[name] = (self.folder / name).open("ab")
        self._open[name].write(data)
        self.state.sizes[name] = self.state.sizes.get(name, 0) + len(data)

    def _save(self) -> None:
        self.state.counts = self.notes.counts
        self.state.first = self.notes.first
        temporary = self.folder / f"{STATE}.tmp"
        with temporary.open("w") as state:
            state.write(json.dumps(vars(self.state)))
            for file in (*self._open.values(), state):
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(self.folder / STATE)
        self._saved = monotonic()

    def close(self, source: str, notes: Notes) -> None:
        """Write what was noted while the items were read, too."""
        notes.update(self.notes)
        self.notes = notes
        self.state.source = source
        self._save()
        for file in self._open.values():
            file.close()


class Store:
    """A prepared source: the arrays of all samples, memory-mapped when they are first read.

    Attributes:
        source: its name, for people.
        notes: what was seen in it.
        identity: changes when the arrays do; lines do not count.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        state = _State(**json.loads((folder / STATE).read_text()))
        self.source = state.source
        self.notes = Notes(Counter(state.counts), state.first)
        self._arrays = state.arrays
        self._maps: dict[str, np.ndarray] = {}
        checksums = json.loads((folder / prepared.CHECKSUMS).read_text())
        # not how long the lines are: these have paths of files; labels are compared separately
        arrays = [name for name in self._arrays if not name.endswith(("_ends", "_hash"))]
        self.identity = prepared.fingerprint(**{name: checksums[f"{name}.bin"] for name in arrays})

    # a spawned worker maps the files itself
    def __reduce__(self) -> tuple[type[Store], tuple[Path]]:
        return Store, (self.folder,)

    def __contains__(self, array: str) -> bool:
        return array in self._arrays

    def __getitem__(self, array: str) -> np.ndarray:
        """An array of `Encoded.values` or `Encoded.table` over all samples, or `ends`."""
        if array not in self._maps:
            dtype, row = self._arrays[array]
            file = self.folder / f"{array}.bin"
            values = np.memmap(file, dtype, "r") if file.stat().st_size else np.zeros(0, dtype)
            self._maps[array] = values.reshape(-1, *row)
        return self._maps[array]

    def __len__(self) -> int:
        return len(self["ends"])

    def span(self, sample: int) -> slice:
        """Where the values of a sample are."""
        return slice(int(self["ends"][sample - 1]) if sample else 0, int(self["ends"][sample]))

    @property
    def lengths(self) -> np.ndarray:
        """[samples] int64: how many values each has."""
        return np.diff(self["ends"], prepend=0)

    def line(self, name: str, sample: int) -> Any:
        """What a list of `Encoded.lines` has of a sample."""
        with (self.folder / f"{name}.jsonl").open("rb") as file:
            file.seek(int(self[f"{name}_ends"][sample - 1]) if sample else 0)
            return json.loads(file.readline())

    def lines(self, name: str) -> list[Any]:
        """What it has of all samples."""
        text = (self.folder / f"{name}.jsonl").read_text()
        return json.loads(f"[{','.join(text.splitlines())}]")


class Split:
    """Chosen samples of a store, or of several: the sources of a mixture, one after the other.

    Subclasses add `__getitem__`, and so implement `order.Samples`.

    Args:
        stores: by the name of the source; of one that is not mixed, any name.
        numbers: of each store, the samples that belong to the split, in order.
    """

    def __init__(self, stores: Mapping[str, Store], numbers: Sequence[np.ndarray]) -> None:
        self.stores = list(stores.values())
        self.numbers = [np.asarray(chosen, np.int64) for chosen in numbers]
        self.sources = {name: len(chosen) for name, chosen in zip(stores, numbers, strict=True)}
        self.starts = np.cumsum([0, *self.sources.values()])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def find(self, index: int) -> tuple[Store, int]:
        """The store of a sample, and its number there."""
        of = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.stores[of], int(self.numbers[of][index - self.starts[of]])

    def line(self, name: str, index: int) -> Any:
        """What a list of `Encoded.lines` has of a sample."""
        store, number = self.find(index)
        return store.line(name, number)

    def values(self, index: int, *arrays: str) -> list[np.ndarray]:
        """The part of these arrays that is of a sample."""
        store, number = self.find(index)
        span = store.span(number)
        return [np.asarray(store[array][span]) for array in arrays]

    def column(self, array: str) -> np.ndarray:
        """A column of the table, for all samples."""
        return self._of_all(lambda store: store[array])

    @cached_property
    def lengths(self) -> np.ndarray:
        """[samples] int64: values of each sample."""
        return self._of_all(lambda store: store.lengths)

    def _of_all(self, column: Callable[[Store], np.ndarray]) -> np.ndarray:
        parts = zip(self.stores, self.numbers, strict=True)
        return np.concatenate([column(store)[chosen] for store, chosen in parts])

    @cached_property
    def fingerprint(self) -> str:
        """Changes when the samples do."""
        chosen = [hashlib.sha256(numbers.tobytes()).hexdigest() for numbers in self.numbers]
        return prepared.fingerprint(stores=[store.identity for store in self.stores], chosen=chosen)
