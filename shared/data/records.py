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
from shared.data.tables import read_table
from shared.data.values import as_json_lines, parse_json
from shared.process.errors import CleanExit, ConfigError, NotNow, first_line, is_of_the_network
from shared.process.printing import label, note

if TYPE_CHECKING:
    from shared.data.options import DataConfig

# (place, record); the place is `file:line` or `file: row N`, for messages
Records = Iterator[tuple[str, dict[str, Any]]]

JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
PIECE = 2**18  # characters of plain text in one record, at most
# key of each record of a plain-text file except the last
CONTINUES = "(the text continues in the next record)"


@dataclass(frozen=True)
class Source:
    """Where records come from.

    Args:
        name: for people. It is written to a run's files, so it holds no secrets.
        identity: gives something JSON-like, with a Path for each file, that changes when the
            records do.
        read: gives all records from the start.
    """

    name: str
    identity: Callable[[], Any]
    read: Callable[[], Records]


def open_sources(config: DataConfig, *, demo: Source) -> tuple[Source, Source | None]:
    """(training, validation or None) records of a config; `demo` when it names none.

    If --train_file names a folder that also holds the validation files, these are not trained on.
    Every rank calls this.
    """
    if config.is_demo:
        return demo, None
    named, held_out = named_files(config)
    listed = cache(partial(list_files, named, held_out))

    def source(number: int, names: Sequence[str]) -> Source:
        name = label(names[0]) if len(names) == 1 else f"{len(names)} files or folders"
        return Source(name, lambda: listed()[number], lambda: read_records(listed()[number]))

    hub = partial(_hub_source, config)
    train = hub(config.train_split_name) if config.dataset_name else source(0, config.train_file)
    if split := config.validation_split_name:
        return train, hub(split)
    return train, source(1, config.validation_file) if held_out else None


def named_files(config: DataConfig) -> tuple[list[str | Path], list[str | Path]]:
    """What --train_file and --validation_file name; of URLs, the copies. Every rank calls this."""

    def fetched(url: str) -> Path:
        from shared.extras import remote

        return remote.fetched(url)

    train, held_out = (
        [fetched(name) if is_url(name) else name for name in names]
        for names in (config.train_file, config.validation_file)
    )
    return train, held_out


def list_files(named: list[str | Path], held_out: list[str | Path]) -> list[list[Path]]:
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


def _hub_source(config: DataConfig, split: str) -> Source:
    (name,) = config.dataset_name
    part = config.dataset_config_name
    read = partial(load_hub, name, part, split)
    return Source(label(name), lambda: [part, split, *_hub_identity(name)], read)


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


def read_records(files: Sequence[Path]) -> Records:
    """Yield (place, record) for each record, in order.

    JSON lines, one JSON list, CSV, TSV and Parquet hold records. Any other file is one text:
    {"text": content}, or several records of at most PIECE characters, all but the last with the key
    CONTINUES. a.csv.gz is CSV, unpacked here.

    Raises:
        ConfigError: a file that cannot be read or parsed, with its place.
    """
    for path in files:
        with errors_of(path):
            yield from reader_of(path)(path)


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """What goes wrong when a file is read, in one line."""
    if name_inside(path).suffix.lower() in ARCHIVES:
        raise ConfigError(f"{path}: an archive: unpack it first, and name what was in it")
    try:
        yield
    except UnicodeDecodeError:
        place = f"{path}:{_line_of_bad_bytes(path)}"
        raise ConfigError(f"{place}: not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or first_line(error)}") from None


def reader_of(path: Path) -> Callable[[Path], Records]:
    """What reads the records of such a file."""
    if is_json_lines(path):
        return _read_jsonl
    return READERS.get(name_inside(path).suffix.lower(), _read_text)


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


def _read_jsonl(path: Path) -> Records:
    with open_bytes(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield record_of(path, number, line)


def record_of(path: Path, number: int, line: bytes) -> tuple[str, dict[str, Any]]:
    """(place, record) of a line of JSON lines, counted from 1."""
    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    record = _json_of(path, text.rstrip(), number)
    if not isinstance(record, dict):
        raise ConfigError(f"{path}:{number}: expected a JSON object, found {kind(record)}")
    return f"{path}:{number}", record


def is_json_lines(path: Path) -> bool:
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


def read_parquet(path: Path, first: int = 0) -> Records:
    """The rows from `first` on."""
    import pyarrow as pa
    import pyarrow.parquet as pq

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
                        where = f"{path}: row {number + 1}"
                        yield where, as_json_lines(record, types, where)
                    number += 1
    except (pa.ArrowException, ValueError) as error:
        raise ConfigError(f"{path}: not valid Parquet ({first_line(error)})") from None


# Any other file is one text.
READERS: dict[str, Callable[[Path], Records]] = {
    ".parquet": read_parquet,
    ".json": _read_list,
    ".csv": read_table,
    ".tsv": read_table,
}


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
        with one_line(f"--dataset_name {name}"):
            place = root if os.path.isdir(name) else name
            return datasets.load_dataset(place, *arguments, **options)
    finally:
        datasets.data_files.resolve_pattern = resolve


@contextmanager
def one_line(what: str) -> Iterator[None]:
    """An error of `datasets`, which raises many types for a mistyped name, in one line."""
    try:
        yield
    except CleanExit:
        raise
    except Exception as error:
        kind_of = NotNow if is_of_the_network(error) else ConfigError
        raise kind_of(f"{what}: {first_line(error)}") from None


def load_hub(name: str, config_name: str | None, split: str) -> Records:
    """Yield (place, record) of a data set from the Hub, or from a folder that `datasets` can load.
    Classes have their names.

    Raises:
        ConfigError: the data set or the split does not exist or cannot be read.
        NotNow: the Hub does not answer.
    """
    dataset = load_dataset(name, config_name, split=split)
    with one_line(f"--dataset_name {name} (split {split})"):
        yield from rows_of(undecoded(dataset.to_iterable_dataset()), f"{name}:{split}")


def undecoded(dataset: Any) -> Any:
    """A data set that is iterated, of which no image is opened."""
    return dataset.decode(False) if dataset.features else dataset  # else it holds plain JSON


def rows_of(dataset: Any, where: str, start: int = 0) -> Records:
    """(place, record) of a data set that is iterated, whose first row has the number `start`."""
    import datasets

    features = dataset.features or datasets.Features()
    classes = {key: getattr(of, "feature", of) for key, of in features.items()}  # of lists, too
    classes = {key: of for key, of in classes.items() if isinstance(of, datasets.ClassLabel)}
    types = {field.name: field.type for field in features.arrow_schema}
    for number, record in enumerate(dataset, start):
        for key, of in classes.items():  # -1: there is no label
            record[key] = None if record[key] in (None, -1) else of.int2str(record[key])
        place = f"{where}: row {number}"
        yield place, as_json_lines(record, types, place)
