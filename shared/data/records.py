"""Records from files and from the Hub: JSON lines, JSON, CSV, TSV, Parquet, plain text. Each knows where it stood."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.data.files import find_files
from shared.process.errors import ConfigError, NotNow, first_line, is_of_the_network
from shared.process.printing import print_main, redact

if TYPE_CHECKING:
    from shared.data.options import DataConfig


JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
PIECE = 2**18  # characters of plain text in one record, at most
GOES_ON = "(the next record goes on with this text)"  # key of a record that is not the last of its plain-text file


@dataclass(frozen=True)
class Source:
    """Where records come from.

    `name` is for people, and goes into what a run writes: without secrets. `identity()` is JSON-like, with a Path for
    each file, and changes when the records do; `read()` yields (where, record) from the start.
    """

    name: str
    identity: Callable[[], Any]
    read: Callable[[], Iterator[tuple[str, dict[str, Any]]]]


def open_sources(config: DataConfig, *, demo: Source, streaming: bool = False) -> tuple[Source, Source | None]:
    """(training, validation or None) records of a config; `demo` when it names none.

    Files that are named for validation are not trained on where a folder or a glob for training holds them, too. A
    stream's identity outlives copied files and a Hub that does not answer for a while: names and sizes only.

    Raises:
        ConfigError: files that are missing or empty.
    """
    if config.dataset_name is not None:
        name, part = config.dataset_name, config.dataset_config_name

        def from_hub(split: str) -> Source:
            identity = lambda: [part, split, *([name] if streaming else _hub_identity(name))]  # noqa: E731
            return Source(redact(name), identity, lambda: load_hub(name, part, split, streaming=streaming))

        other = config.validation_split_name
        return from_hub(config.train_split_name), from_hub(other) if other else None
    if config.is_demo:
        return demo, None

    def from_files(files: list[Path]) -> Source:
        name = str(files[0]) if len(files) == 1 else f"{len(files)} files"
        identity = (lambda: [[file.name, file.stat().st_size] for file in files]) if streaming else (lambda: files)
        return Source(redact(name), identity, lambda: read_records(files))

    found = find_files(config.train_file, flag="train_file")
    if not config.validation_file:
        return from_files(found), None
    held_out = find_files(config.validation_file, flag="validation_file")
    named = {file.resolve() for file in held_out}
    files = [file for file in found if file.resolve() not in named]
    if len(files) < len(found):
        if not files:
            print_main("warning: --validation_file names all that is trained on: its loss says nothing about other data")
            return from_files(found), from_files(held_out)
        print_main(
            f"{len(found) - len(files)} of the {len(found)} files of --train_file left out: --validation_file names them"
        )
    return from_files(files), from_files(held_out)


def _hub_identity(name: str) -> list[Any]:
    """The files of a folder, or the revision of a data set on the Hub (unknown, and so its name, when offline)."""
    if Path(name).exists():
        return [*find_files([name], flag="dataset_name")]
    from huggingface_hub import HfApi

    try:
        return [name, HfApi().dataset_info(name, timeout=10).sha]
    except Exception:  # offline, or it does not exist, which reading it will tell
        return [name]


def kind(value: Any) -> str:
    """A value's type, for a message."""
    if value is None or value == "":
        return "null" if value is None else "empty"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def read_records(files: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, record) for each record, in order; `where` is `file:line` or `file:row N`, for messages.

    JSON lines, one JSON list, CSV, TSV and Parquet hold records; any other file is one text, {"text": content}, or
    several of at most PIECE characters, of which all but the last have the key GOES_ON.

    Raises:
        ConfigError: a file that cannot be read or parsed, with its place.
    """
    for path in files:
        suffix = path.suffix.lower()
        try:
            if suffix in JSON_LINES:
                yield from _read_jsonl(path)
            elif suffix == ".json":
                yield from _read_json(path)
            elif suffix in (".csv", ".tsv"):
                yield from _read_csv(path) if suffix == ".csv" else _read_tsv(path)
            elif suffix == ".parquet":
                yield from _read_parquet(path)
            else:
                yield from _read_text(path)
        except UnicodeDecodeError as error:
            line, byte = _first_bad_byte(path)
            raise ConfigError(f"{path}:{line}: not UTF-8 text (byte {byte}); save it as UTF-8") from error
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from None


def pieces(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield (piece, whether more follow) of the text that `blocks` make, which may be longer than memory holds.

    A piece has at most PIECE characters and ends after a line end, where there is none after a white space, where there
    is none anywhere. How the text is spread over the blocks makes no difference. No text is one empty piece.
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


def _read_text(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for piece, goes_on in pieces(iter(partial(file.read, PIECE), "")):
            yield str(path), {"text": piece, GOES_ON: True} if goes_on else {"text": piece}


def _first_bad_byte(path: Path) -> tuple[int, int]:
    """(line, byte of the file) at which a file ceases to be UTF-8."""
    decoder, place, number = codecs.getincrementaldecoder("utf-8")(), 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                decoder.decode(line)
            except UnicodeDecodeError as error:
                return number, place + error.start
            place += len(line)
    return number, place


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):  # json would keep the last one in silence
        raise ValueError(f"the key {_twice(key for key, _ in pairs)!r} is there twice")
    return record


def _twice(names: Iterable[str]) -> str | None:
    """A name that is there more than once, or None."""
    return next((name for name, count in Counter(names).items() if count > 1), None)


def parse_json(text: str) -> Any:
    """JSON that has each key once and whole characters only. Raises ValueError or RecursionError."""
    value = json.loads(text, object_pairs_hook=_no_duplicates)
    if re.search(r"\\u[dD]", text):  # json takes half of a surrogate pair, which no tokenizer and no file does
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{str(error.object)[error.start]!a} is half a character") from None
    return value


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{path}:{number}", _json_object(line, f"{path}:{number}")


def _read_json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig") as lines:
        first = next((line for line in lines if line.strip()), "")
    if not first.lstrip().startswith("["):  # many people call JSON lines .json
        yield from _read_jsonl(path)
        return
    try:
        records = parse_json(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}:{getattr(error, 'lineno', 1)}: not valid JSON ({_json_fault(error)})") from None
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise ConfigError(f"{path}: record {number} is {kind(record)}, expected an object")
        yield f"{path}: record {number}", record


def _json_fault(error: Exception) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    return f"{error.msg.removesuffix(' at')}, column {error.colno}"


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        record = parse_json(line.rstrip())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON ({_json_fault(error)})") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: expected a JSON object, found {kind(record)}")
    return record


def _read_tsv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Some programs put quotes around fields, others write plain tabs between them: what reads well to the end counts."""
    try:
        deque(_read_csv(path, delimiter="\t"), maxlen=0)
    except ConfigError:
        yield from _read_csv(path, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        yield from _read_csv(path, delimiter="\t")


def _read_csv(path: Path, **form: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True, **form)  # else a quote that nothing closes takes all that follows
        read = 0  # lines that were: a quote that nothing closes stands after them, however far the reader came
        try:
            if (column := _twice(reader.fieldnames or ())) is not None:
                raise ConfigError(f"{path}:1: the column {column!r} is there twice")
            read = reader.line_num
            for record in reader:
                if None in record or None in record.values():
                    raise ConfigError(f"{path}:{reader.line_num}: not as many fields as the header has")
                yield f"{path}:{reader.line_num}", dict(record)
                read = reader.line_num
        except csv.Error as error:
            raise ConfigError(f"{path}:{read + 1}: not valid CSV ({error})") from None


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        file = pq.ParquetFile(path)
        if (column := _twice(file.schema_arrow.names)) is not None:
            raise ConfigError(f"{path}: the column {column!r} is there twice")
        for batch in file.iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", without_nulls(record)
    except pa.ArrowException as error:
        raise ConfigError(f"{path}: not valid Parquet ({str(error).splitlines()[0]})") from None


def without_nulls(record: dict[str, Any]) -> dict[str, Any]:
    """A record of Arrow's without the nulls in its objects: there each object has the keys of all.

    Its own stay, and a message's content, of which null says that there is none.
    """

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(inner) for key, inner in value.items() if inner is not None or key == "content"}
        return [strip(inner) for inner in value] if isinstance(value, list) else value

    return {column: strip(value) for column, value in record.items()}


def load_hub(name: str, config_name: str | None, split: str, *, streaming: bool = False) -> Iterator[tuple[str, dict]]:
    """Yield (where, record) of a data set from the Hub, or from a folder that `datasets` can load.

    Raises:
        ConfigError: the data set or the split cannot be had.
        NotNow: the Hub does not answer.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        dataset = datasets.load_dataset(name, config_name, split=split, streaming=streaming)
        for number, record in enumerate(dataset):  # a stream meets what is wrong with its files only here
            yield f"{name}:{split}: row {number}", without_nulls(record)  # type: ignore[arg-type]
    except Exception as error:  # datasets raises a wide range of types for what the user typed
        kind_of = NotNow if is_of_the_network(error) else ConfigError
        raise kind_of(f"--dataset_name {name} (split {split}): {first_line(error)}") from None
