"""Records from files and from the Hub: JSON lines, JSON, CSV, TSV, Parquet, plain text. Each record
knows its place.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from shared.data.files import ARCHIVES, find_files, is_url, name_inside, open_bytes, open_text
from shared.data.remote import fetched
from shared.data.tables import read_table
from shared.data.values import as_json_lines, parse_json
from shared.process.errors import CleanExit, ConfigError, NotNow, first_line, is_of_the_network
from shared.process.printing import label, note

if TYPE_CHECKING:
    from shared.data.options import DataConfig

# (place, record); the place is `file:line` or `file: row N`, for messages
Records = Iterator[tuple[str, dict[str, Any]]]

JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
STATES = 256  # rows of a stream of the Hub between places where reading can begin
PIECE = 2**18  # characters of plain text in one record, at most
# key of each record of a plain-text file except the last
CONTINUES = "(the text continues in the next record)"


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
class Source:
    """Where records come from.

    Args:
        name: for people. It is written to a run's files, so it holds no secrets.
        identity: gives something JSON-like, with a Path for each file, that changes when the
            records do.
        read: gives all records from the start.
        read_from: gives them from a cursor on, if the source can.
    """

    name: str
    identity: Callable[[], Any]
    read: Callable[[], Records]
    read_from: Callable[[Cursor], Records] | None = None


def open_sources(
    config: DataConfig, *, demo: Source, streaming: bool = False
) -> tuple[Source, Source | None]:
    """(training, validation or None) records of a config; `demo` when it names none.

    If --train_file names a folder that also holds the validation files, these are not trained on.
    The identity of a stream is made of names and sizes only, so it survives a copy of the files and
    a Hub that does not answer. Every rank calls this.
    """
    if config.is_demo:
        return demo, None
    # every rank takes part in fetching
    named, held_out = (
        [fetched(name) if is_url(name) else name for name in names]
        for names in (config.train_file, config.validation_file)
    )
    listed = cache(partial(_list_files, named, held_out))

    def source(number: int, names: Sequence[str]) -> Source:
        def identity() -> list[Any]:
            files = listed()[number]
            return [[file.name, file.stat().st_size] for file in files] if streaming else files

        def read(cursor: Cursor | None = None) -> Records:
            return read_records(listed()[number], cursor)

        name = label(names[0]) if len(names) == 1 else f"{len(names)} files"
        return Source(name, identity, read, read)

    hub = partial(_hub_source, config, streaming=streaming)
    train = hub(config.train_split_name) if config.dataset_name else source(0, config.train_file)
    if split := config.validation_split_name:
        return train, hub(split)
    return train, source(1, config.validation_file) if held_out else None


def _list_files(named: list[str | Path], held_out: list[str | Path]) -> list[list[Path]]:
    """The files to train on, and those to validate on if they are named."""
    train = find_files(named, flag="train_file") if named else []
    if not held_out:
        return [train]
    validation = find_files(held_out, flag="validation_file")
    not_trained = {file.resolve() for file in validation}
    files = [file for file in train if file.resolve() not in not_trained]
    if left_out := len(train) - len(files):
        of_all = f"{left_out} of the {len(train)} files of --train_file"
        note(f"--validation_file names {of_all}{': left out' * bool(files)}")
    return [files or train, validation]


def _hub_source(config: DataConfig, split: str, streaming: bool) -> Source:
    (name,) = config.dataset_name
    part = config.dataset_config_name

    def identity() -> list[Any]:
        return [part, split, *([name] if streaming else _hub_identity(name))]

    read = partial(load_hub, name, part, split, streaming=streaming)
    return Source(label(name), identity, read, read if streaming else None)


def _hub_identity(name: str) -> list[Any]:
    """The files of a folder, or the revision of a data set on the Hub (only its name when
    offline).
    """
    if Path(name).exists():
        return [*find_files([name], flag="dataset_name")]
    from huggingface_hub import HfApi

    try:
        return [name, HfApi().dataset_info(name, timeout=10).sha]
    except Exception:  # offline; if the data set does not exist, reading it will say so
        return [name]


def kind(value: Any) -> str:
    """A value's type, for a message."""
    if value is None or value == "":
        return "null" if value is None else "empty"
    if repr(value) == "nan":
        return "NaN"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def unused(record: dict[str, Any], used: Collection[str]) -> list[str]:
    """The columns of a record that hold something and are not among the `used` ones."""
    return [
        key
        for key, value in record.items()
        if key not in (*used, CONTINUES) and value not in (None, "", [], {})
    ]


def not_used(names: Collection[str]) -> str:
    """The end of a line about data with these unused columns."""
    return f"; not used: {', '.join(sorted(names))}" if names else ""


def read_records(files: Sequence[Path], cursor: Cursor | None = None) -> Records:
    """Yield (place, record) for each record, in order. A `cursor` says where to begin, and then
    where reading stands.

    JSON lines, one JSON list, CSV, TSV and Parquet hold records. Any other file is one text:
    {"text": content}, or several records of at most PIECE characters, all but the last with the key
    CONTINUES. a.csv.gz is CSV, unpacked here.

    Raises:
        ConfigError: a file that cannot be read or parsed, with its place.
    """
    cursor = cursor or Cursor()
    for path in files[cursor.file :]:
        suffix = name_inside(path).suffix.lower()
        if suffix in ARCHIVES:
            raise ConfigError(f"{path}: an archive: unpack it first, and name what was in it")
        try:
            if suffix == ".parquet":
                yield from _read_parquet(path, cursor)
            elif not _is_json_lines(path):
                yield from _forward(READERS.get(suffix, _read_text)(path), path, cursor)
            elif path == name_inside(path):
                yield from _read_jsonl(path, cursor)
            else:
                yield from _forward(_read_jsonl(path, Cursor()), path, cursor)
        except UnicodeDecodeError:
            place = f"{path}:{_line_of_bad_bytes(path)}"
            raise ConfigError(f"{place}: not UTF-8 text; save it as UTF-8") from None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or first_line(error)}") from None
        cursor.file += 1
        cursor.number = 0
        cursor.offset = 0


def _forward(records: Records, path: Path, cursor: Cursor) -> Records:
    """The records from the cursor on, of a file that can be read from its start only."""
    if first := cursor.number:
        note(
            f"{path}: has no index, so it is read from its start to record {first:,}, where the "
            "run continues"
        )
    for cursor.number, record in enumerate(records):
        if cursor.number >= first:
            yield record


def split_text(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Cut the text that `blocks` make, which may not fit into memory. Yield (piece, whether more
    pieces follow).

    A piece has at most PIECE characters. It ends after a line end if it has one, else after white
    space if it has any. The pieces do not depend on how the text is spread over the blocks. No text
    is one empty piece.
    """
    held = ""
    for block in blocks:
        held += block
        while len(held) > PIECE:
            cut = _CUT.match(held, 0, PIECE).end()  # type: ignore[union-attr]
            yield held[:cut], True
            held = held[cut:]
    yield held, False


_CUT = re.compile(r"(?s:.*\n|.*\s|.+)")


def _read_text(path: Path) -> Records:
    with open_text(path) as file:
        for piece, continues in split_text(iter(partial(file.read, PIECE), "")):
            yield str(path), {"text": piece, CONTINUES: True} if continues else {"text": piece}


def _line_of_bad_bytes(path: Path) -> int:
    with open_bytes(path) as file:
        good = takewhile(lambda line: line.decode(errors="replace").encode() == line, file)
        return 1 + sum(1 for _ in good)


def _json_of(path: Path, text: str, line: int = 1) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        place = f"{path}:{line + error.lineno - 1}"
        raise ConfigError(f"{place}: not valid JSON ({error.msg}, column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}:{line}: not valid JSON ({error})") from None


def _read_jsonl(path: Path, cursor: Cursor) -> Records:
    """Moves the cursor, and begins at it."""
    with open_bytes(path) as file:
        if cursor.offset:
            file.seek(cursor.offset)
        for number, line in enumerate(file, cursor.number + 1):
            if line.strip():
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                record = _json_of(path, text.rstrip(), number)
                if not isinstance(record, dict):
                    raise ConfigError(
                        f"{path}:{number}: expected a JSON object, found {kind(record)}"
                    )
                yield f"{path}:{number}", record
            cursor.number = number
            cursor.offset += len(line)


def _is_json_lines(path: Path) -> bool:
    suffix = name_inside(path).suffix.lower()
    if suffix != ".json":
        return suffix in JSON_LINES
    with open_text(path) as file:  # many people call JSON lines .json
        return not next(filter(str.strip, file), "").lstrip().startswith("[")


def _read_list(path: Path) -> Records:
    with open_text(path) as file:
        records = _json_of(path, file.read())
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise ConfigError(f"{path}: record {number} is {kind(record)}, expected an object")
        yield f"{path}: record {number}", record


# Of files that are read from their start. Any other file is one text.
READERS = {".json": _read_list, ".csv": read_table, ".tsv": read_table}


def _read_parquet(path: Path, cursor: Cursor) -> Records:
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = cursor.number
    number = 0
    try:
        file = pq.ParquetFile(path)
        columns = file.schema_arrow.names
        if len(set(columns)) < len(columns):  # a join writes them
            raise ConfigError(f"{path}: a column is there twice ({', '.join(columns)})")
        types = {field.name: field.type for field in file.schema_arrow}
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if number + rows <= first:
                number += rows
                continue
            for batch in file.iter_batches(batch_size=64, row_groups=[group]):
                for record in batch.to_pylist():
                    if number >= first:
                        cursor.number = number
                        where = f"{path}: row {number + 1}"
                        yield where, as_json_lines(record, types, where)
                    number += 1
    except (pa.ArrowException, ValueError) as error:
        raise ConfigError(f"{path}: not valid Parquet ({first_line(error)})") from None


def load_dataset(name: str, *arguments: Any, **options: Any) -> Any:
    """`datasets.load_dataset` of a data set on the Hub or in a folder. Its README.md may name its
    own files only.

    Raises:
        ConfigError: it names others, or `datasets` cannot load it.
        NotNow: the Hub does not answer.
    """
    import datasets

    root = os.path.realpath(name) if os.path.isdir(name) else "hf://datasets"
    resolve = datasets.data_files.resolve_pattern

    def own(pattern: str, base_path: str, *rest: Any, **more: Any) -> Any:
        place = pattern if urlsplit(pattern).scheme else os.path.join(base_path, pattern)
        if "::" in pattern or not os.path.normpath(place).startswith(
            os.path.normpath(root) + os.sep
        ):
            raise ConfigError(
                f"--dataset_name {name}: its README.md names {place}, which is not "
                "a file of this data set"
            )
        return resolve(pattern, base_path, *rest, **more)

    datasets.disable_progress_bars()
    datasets.data_files.resolve_pattern = own
    try:
        with _one_line(f"--dataset_name {name}"):
            place = root if os.path.isdir(name) else name
            return datasets.load_dataset(place, *arguments, **options)
    finally:
        datasets.data_files.resolve_pattern = resolve


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """An error of `datasets`, which raises many types for a mistyped name, in one line."""
    try:
        yield
    except CleanExit:
        raise
    except Exception as error:
        kind_of = NotNow if is_of_the_network(error) else ConfigError
        raise kind_of(f"{what}: {first_line(error)}") from None


def load_hub(
    name: str,
    config_name: str | None,
    split: str,
    cursor: Cursor | None = None,
    *,
    streaming: bool = False,
) -> Records:
    """Yield (place, record) of a data set from the Hub, or from a folder that `datasets` can load.
    Classes have their names.

    Of a stream, the `cursor` says where to begin, and then where reading stands. `datasets` opens
    the file of that place.

    Raises:
        ConfigError: the data set or the split does not exist or cannot be read.
        NotNow: the Hub does not answer.
    """
    import datasets

    dataset = load_dataset(name, config_name, split=split, streaming=streaming)
    with _one_line(f"--dataset_name {name} (split {split})"):
        dataset = dataset if streaming else dataset.to_iterable_dataset()
        if dataset.features:  # else it holds plain JSON
            dataset = dataset.decode(False)  # no image is opened
        features = dataset.features or datasets.Features()
        classes = {key: getattr(of, "feature", of) for key, of in features.items()}  # of lists, too
        classes = {key: of for key, of in classes.items() if isinstance(of, datasets.ClassLabel)}
        types = {field.name: field.type for field in features.arrow_schema}
        cursor = cursor or Cursor()
        first = cursor.number
        if cursor.state:
            dataset.load_state_dict(cursor.state)
        # a stream sees damaged files only here
        for number, record in enumerate(dataset, cursor.file):
            for key, of in classes.items():  # -1: there is no label
                record[key] = None if record[key] in (None, -1) else of.int2str(record[key])
            if number >= first:
                cursor.number = number
                where = f"{name}:{split}: row {number}"
                yield where, as_json_lines(record, types, where)
            if streaming and (number + 1) % STATES == 0:
                cursor.file = number + 1
                cursor.state = dataset.state_dict()
