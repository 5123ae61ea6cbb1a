"""Records that can be read from any place on: where reading stands, and what begins there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from shared.data import records
from shared.data.files import name_inside, open_bytes
from shared.data.records import Records, Source
from shared.process.printing import label, note
from shared.text.options import CorpusConfig

STATES = 256  # rows of a stream of the Hub between places where reading can begin


@dataclass
class Cursor:
    """Where reading stands: at a record. A new reader that is given one begins there, and moves
    it.
    """

    file: int = 0  # its file, by number; of a data set of the Hub, the row that `state` is at
    # lines (JSON lines), rows or records before it in the file, or in the data set of the Hub
    number: int = 0
    offset: int = 0  # bytes before it in the file, for JSON lines that are not compressed
    document: int = 0  # of a stream of documents: those before it
    tokens: int = 0  # and their tokens to train on
    state: Any = None  # of a data set of the Hub: `IterableDataset.state_dict`, JSON-like


@dataclass(frozen=True)
class StreamSource(Source):
    """A source that also gives its records from a cursor on, if it can."""

    read_from: Callable[[Cursor], Records] | None = None


def open_stream(config: CorpusConfig, demo: Source) -> StreamSource:
    """The records of a config to train on; `demo` when it names none.

    The identity is made of names and sizes only, so it survives a copy of the files and a Hub that
    does not answer. Every rank calls this.
    """
    if config.is_demo:
        return StreamSource(demo.name, demo.identity, demo.read)
    if config.dataset_name:
        (name,) = config.dataset_name
        of_hub = (name, config.dataset_config_name, config.train_split_name)
        identity = [*of_hub[1:], name]
        return _source(label(name), lambda: identity, partial(read_hub, *of_hub))
    listed = cache(partial(records.list_files, *records.named_files(config)))
    names = config.train_file
    return _source(
        label(names[0]) if len(names) == 1 else f"{len(names)} files",
        lambda: [[file.name, file.stat().st_size] for file in listed()[0]],
        lambda cursor: read_files(listed()[0], cursor),
    )


def _source(
    name: str, identity: Callable[[], Any], read_from: Callable[[Cursor], Records]
) -> StreamSource:
    return StreamSource(name, identity, lambda: read_from(Cursor()), read_from)


def read_files(files: Sequence[Path], cursor: Cursor) -> Records:
    """`records.read_records` from the cursor on, which moves."""
    for path in files[cursor.file :]:
        with records.errors_of(path):
            is_lines = records.is_json_lines(path)
            if is_lines and path == name_inside(path):
                yield from _lines(path, cursor)
            elif name_inside(path).suffix.lower() == ".parquet":
                first = cursor.number
                for number, record in enumerate(records.read_parquet(path, first), first):
                    cursor.number = number
                    yield record
            else:
                yield from _forward(path, cursor)
        cursor.file += 1
        cursor.number = 0
        cursor.offset = 0


def _lines(path: Path, cursor: Cursor) -> Records:
    with open_bytes(path) as file:
        file.seek(cursor.offset)
        for number, line in enumerate(file, cursor.number + 1):
            if line.strip():
                yield records.record_of(path, number, line)
            cursor.number = number
            cursor.offset += len(line)


def _forward(path: Path, cursor: Cursor) -> Iterator[Any]:
    """Of a file that can be read from its start only."""
    if first := cursor.number:
        note(
            f"{path}: has no index, so it is read from its start to record {first:,}, where the "
            "run continues"
        )
    for cursor.number, record in enumerate(records.reader_of(path)(path)):
        if cursor.number >= first:
            yield record


def read_hub(name: str, config_name: str | None, split: str, cursor: Cursor) -> Records:
    """`records.load_hub` as a stream, from the cursor on, which moves. `datasets` opens the file of
    that place.
    """
    dataset = records.load_dataset(name, config_name, split=split, streaming=True)
    with records.one_line(f"--dataset_name {name} (split {split})"):
        dataset = records.undecoded(dataset)
        first = cursor.number
        if cursor.state:
            dataset.load_state_dict(cursor.state)
        # a stream sees damaged files only here
        rows = records.rows_of(dataset, f"{name}:{split}", cursor.file)
        for number, record in enumerate(rows, cursor.file):
            if number >= first:
                cursor.number = number
                yield record
            if (number + 1) % STATES == 0:
                cursor.file = number + 1
                cursor.state = dataset.state_dict()
