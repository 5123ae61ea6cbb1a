"""Data that are prepared chunk by chunk, each kept under a hash of its content: a killed preparation goes on there."""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from shared.config.parse import cache_dir
from shared.data import prepared
from shared.data.loader import parallel_map

T = TypeVar("T")

SIZE = 2**18  # bytes of content that a process gets at a time, at first
LARGEST = 64  # times as much, after many chunks: few files for much data, many processes for little
OPEN = 256  # files of an array that are mapped at once: each is an open file, of which a process may have 1,024

Content = Callable[[Any], bytes]  # of an item: all that its result depends on
Work = Callable[[list[Any]], tuple[dict[str, np.ndarray], dict[str, Any]]]  # a chunk -> (arrays by name, JSON-like facts)


def chunked(items: Iterable[T], content: Content, largest: int = 1) -> Iterator[list[T]]:
    """Lists of items, of SIZE bytes in the mean and, after every 64 of one size, twice as many, up to `largest` times.

    What a chunk ends with decides where it ends, so that the chunks after a change are the same as before it.
    """
    chunk: list[T] = []
    size = number = 0
    for item in items:
        data = content(item)
        chunk.append(item)
        size += len(data)
        half = SIZE * min(2 ** (number // 64), largest) // 2
        if size >= 4 * half or (size >= half and zlib.crc32(data) * half < len(data) << 32):
            yield chunk
            chunk, size, number = [], 0, number + 1
    if chunk:
        yield chunk


class Keep:
    """Work on a chunk, kept in a folder that a hash of the chunk names: `<array>.npy` for each array, and `facts.json`."""

    def __init__(self, work: Work, content: Content, kept: Path) -> None:
        self.work, self.content, self.kept = work, content, kept

    def __call__(self, chunk: list[Any]) -> Path:
        name = hashlib.sha256()
        for item in chunk:
            data = self.content(item)
            name.update(b"%d " % len(data) + data)

        def build(folder: Path) -> None:
            arrays, facts = self.work(chunk)
            for array, values in arrays.items():
                np.save(folder / f"{array}.npy", values)
            (folder / "facts.json").write_text(json.dumps(facts))

        return prepared.keep(self.kept / name.hexdigest()[:32], build)


def keep_all(
    items: Iterable[Any],
    content: Content,
    work: Work,
    place: Path,
    arrays: Sequence[str],
    *,
    processes: int | None,
    first: int = 0,
    **how: Any,
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Work on all items by several processes, except for chunks that are there already. Call on one rank.

    Args:
        place: those of the `arrays` that a chunk has are put there, as `<place>-00000-<array>.npy` and so on: see `Joined`.
        processes: see `parallel_map`.
        first: number of the first chunk.
        how: what results depend on besides the content, JSON-like. The code in data and text is added.

    Yields:
        (the folder of a chunk, its facts), in order.
    """
    kept = cache_dir() / "pieces" / prepared.fingerprint(code=prepared.source_of("data", "text"), **how)
    prepared.remove_abandoned(kept / "*")
    found = parallel_map(Keep(work, content, kept), chunked(items, content, LARGEST), processes)
    for number, folder in enumerate(found, first):
        for file in (file for file in folder.glob("*.npy") if file.stem in arrays):
            _link(file, _file(place, number, file.stem))
        yield folder, json.loads((folder / "facts.json").read_text())


def _file(place: Path, number: int, array: str) -> Path:
    return place.with_name(f"{place.name}-{number:05d}-{array}.npy")


def _link(file: Path, name: Path) -> None:
    """A second name of a file, or a copy where the file system has one name a file."""
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)


class Joined:
    """An array of all chunks, one after the other, as `keep_all` has left it. Files are memory-mapped when they are read.

    Args:
        sizes: values of each chunk.
    """

    def __init__(self, place: Path, array: str, sizes: Iterable[int]) -> None:
        self.place, self.array = place, array
        self.starts = np.cumsum([0, *sizes])
        self._forget()

    def _forget(self) -> None:
        self._map = lru_cache(OPEN)(lambda number: np.load(_file(self.place, number, self.array), mmap_mode="r"))

    def __getstate__(self) -> dict[str, Any]:  # a spawned worker maps the files itself
        return {name: value for name, value in self.__dict__.items() if name != "_map"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, part: slice) -> np.ndarray:
        """A contiguous part that is not empty. Of one file, it is a view."""
        parts = [*self.parts(*part.indices(len(self))[:2])]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def parts(self, first: int, last: int) -> Iterator[np.ndarray]:
        """Views of each file's part of [first, last)."""
        number = int(np.searchsorted(self.starts, first, side="right")) - 1
        while first < last:
            begin, end = self.starts[number : number + 2].tolist()
            yield self._map(number)[first - begin : last - begin]
            first, number = end, number + 1
