"""Where labelled images come from: class folders, lists, tar files, data sets of the Hub. No image is opened here."""

import hashlib
import os
import stat
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from PIL import Image

from shared.data import prepared, records
from shared.data.files import find_files, walk
from shared.data.labels import Labels, read_labels
from shared.data.loader import parallel_map
from shared.images.decoding import SUFFIXES, BadImage, Part, Source
from shared.images.options import ImageConfig
from shared.process.errors import ConfigError, shown
from shared.process.files import NOT_REGULAR
from shared.process.printing import note

SIDE_FILES = (".cls", ".csv", ".db", ".html", ".ini", ".json", ".jsonl", ".md", ".tsv", ".txt", ".xml", ".yaml", ".yml")
VALIDATION = ("val", "validation", "valid")  # names of a validation folder or split; the first one present is used
COLUMNS = {
    "image": ("image", "img", "image_path", "path", "file_name", "filename", "file", "jpg", "jpeg", "png", "webp"),
    "label": ("label", "labels", "class", "fine_label", "target", "cls"),
}


class Files:
    """Images in files, or within tar files. Worker processes share the arrays instead of copying a list.

    Args:
        paths: [n] bytes; within tar files `<tar file>/<member>`.
        places: [n, 3] int64: length of the tar file's own path, and the image's first byte and size; None: no tar files.
    """

    def __init__(self, paths: np.ndarray, places: np.ndarray | None = None) -> None:
        self.paths, self.places = paths, places

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Path | Part:
        if self.places is None:
            return Path(self.where(index))
        length, offset, size = self.places[index].tolist()
        return Part(Path(os.fsdecode(self.paths[index][:length])), offset, size)

    def where(self, index: int) -> str:
        return os.fsdecode(self.paths[index])


class Table:
    """Images in the rows of splits of a data set of `datasets`, one split after the other."""

    def __init__(self, name: str, splits: dict[str, Any], column: str) -> None:
        self.name, self.splits, self.column = name, splits, column
        self.images = {split: rows.select_columns([column]) for split, rows in splits.items()}

    def __len__(self) -> int:
        return sum(map(len, self.splits.values()))

    def _find(self, index: int) -> tuple[str, int]:
        for split, rows in self.images.items():
            if index < len(rows):
                return split, index
            index -= len(rows)
        raise IndexError(index)

    def __getitem__(self, index: int) -> Path | bytes:
        split, row = self._find(index)
        value = self.images[split][row][self.column] or {}
        if not (value.get("bytes") or value.get("path")):
            raise BadImage("no image")
        return value["bytes"] or Path(value["path"])

    def where(self, index: int) -> str:
        split, row = self._find(index)
        return f"{self.name}:{split}: row {row}"


class Joined:
    """The images of several sources, one source after the other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts, self.starts = parts, [0, *np.cumsum([len(part) for part in parts]).tolist()]

    def _find(self, index: int) -> tuple[Any, int]:
        part = bisect_right(self.starts, index) - 1
        return self.parts[part], index - self.starts[part]

    def __getitem__(self, index: int) -> Source:
        part, within = self._find(index)
        return part[within]

    def where(self, index: int) -> str:
        part, within = self._find(index)
        return part.where(within)


@dataclass
class Found:
    """All images that a config names, before any is opened."""

    name: str
    labels: Labels
    paths: list[bytes] = field(default_factory=list)  # empty for the rows of a table
    held_out_from: int | None = None  # images from this number on are for validation; None: not split yet
    about: str = ""  # where the validation images come from, for people
    version: str = ""  # of a table's contents
    facts: np.ndarray | None = None  # [n, 2] int64, bytes and nanoseconds of each image; None: `describe` looks
    places: np.ndarray | None = None  # of `Files`
    left_out: Counter[str] = field(default_factory=Counter)  # files that are no images, by their endings
    stamps: np.ndarray | None = None  # [n] uint64, hashes of each image's path, size and time: set by `describe`

    def describe(self) -> dict[str, Any]:
        """What all ranks must know, JSON-like.

        `key` changes when any image, label or name does, `identity` when what the model learns from does, wherever and
        whenever it was put. Sizes and times of files stand for their contents.

        Raises:
            ConfigError: an image is a pipe, a socket or a device.
        """
        code = prepared.source_of("data", "images")
        self.stamps = np.arange(len(self.labels), dtype=np.uint64)  # of a table's rows
        paths, sizes = self.paths or [b""] * len(self.labels), [-1] * len(self.labels)
        if self.paths:
            facts = _sizes_and_times(paths) if self.facts is None else self.facts
            sizes, times = facts.T.tolist()
            files = (b"%b %d %d" % file for file in zip(paths, sizes, times, strict=True))
            self.stamps = np.fromiter(map(xxhash.xxh3_64_intdigest, files), np.uint64, len(paths))
        labels = repr(self.labels.classes).encode(errors="surrogateescape") + self.labels.values.tobytes()
        identity = hashlib.sha256(f"{self.held_out_from} {len(self.labels)}".encode() + labels)
        images = zip(paths, sizes, strict=True)
        identity.update(b"".join([b"%b %d\n" % (path[path.rfind(b"/") + 1 :], size) for path, size in images]))
        key = hashlib.sha256(f"{code} {self.name} {self.about} {self.held_out_from} {self.version}".encode())
        key.update(self.stamps.tobytes())
        key.update(labels)
        return {
            "key": key.hexdigest()[:16],
            "identity": identity.hexdigest(),
            "name": self.name,
            "about": self.about,
            "held_out_from": self.held_out_from,
            "left_out": by_ending(self.left_out),
            "classes": self.labels.classes,
        }


def count_others(names: Iterable[str]) -> Counter[str]:
    """Count the files that are neither images nor what usually lies beside images, by their endings."""
    return Counter(
        os.path.splitext(name)[1].lower() for name in names if not name.lower().endswith((*SUFFIXES, *SIDE_FILES))
    )


def by_ending(counts: Counter[str]) -> str:
    """Such as "12 .heic, 6 without an ending"."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    parts = [f"{count:,} {shown(ending) or 'without an ending'}" for ending, count in ranked[:4]]
    if rest := sum(count for _, count in ranked[4:]):
        parts.append(f"{rest:,} with other endings")
    return ", ".join(parts)


def _sizes_and_times(paths: list[bytes]) -> np.ndarray:
    """[n, 2] int64, bytes and nanoseconds of each file, (-1, 0) of a missing one, which is named later.

    Raises:
        ConfigError: one is a pipe, a socket or a device.
    """
    chunks = [paths[at : at + 10_000] for at in range(0, len(paths), 10_000)]
    return np.concatenate([*parallel_map(_look, chunks, None if len(chunks) > 4 else 1)])


def _look(paths: list[bytes]) -> np.ndarray:
    def look(some: list[bytes]) -> np.ndarray:
        return np.fromiter(map(_size_and_time, some), np.dtype((np.int64, 2)), len(some))

    started, first = time.monotonic(), look(paths[:100])
    threads = 32 if time.monotonic() - started > 100 * 50e-6 else 1  # networks are slow; elsewhere more would not be faster
    with ThreadPoolExecutor(threads) as pool:
        return np.concatenate([first, *pool.map(look, (paths[at : at + 300] for at in range(100, len(paths), 300)))])


def _size_and_time(path: bytes) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return -1, 0
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{os.fsdecode(path)}: {NOT_REGULAR}")
    return found.st_size, found.st_mtime_ns


# Class folders ---------------------------------------------------------------------------------------------------------


def in_files(config: ImageConfig, root: Path | None) -> Found:
    """The images in class folders or in a list. Those to validate on may be named in the other way."""
    left_out: Counter[str] = Counter()
    if root:
        train, validation = _train_and_validation(root, config)
        labels, paths = _class_folders(train, left_out, training=True)
        places = [str(train)] * len(paths)
    else:
        validation = config.validation_dir
        labels, paths, places = _listed(config, "train_file")
        if not paths:
            raise ConfigError(f"--train_file {name_of(config)}: no records in it")
    trained, about = None, ""
    if validation or config.validation_file:
        trained, about = len(paths), str(validation or " ".join(config.validation_file))
        if validation:
            more: Any = (*_class_folders(validation, left_out, training=False), [])
        else:
            more = _listed(config, "validation_file")
        labels, paths, places = labels + more[0], paths + more[1], places + more[2]
    read = read_labels(labels, "single_label" if root else config.problem_type, places.__getitem__)
    return Found(name_of(config), read, paths, trained, about, left_out=left_out)


def name_of(config: ImageConfig) -> str:
    """What the training data are called in messages."""
    if config.is_demo:
        return "scikit-learn's handwritten digits"
    named = [str(name) for flag in config.SOURCES for name in getattr(config, flag)]
    return " ".join(named) if len(named) < 4 else f"{named[0]} and {len(named) - 1:,} more"


def _train_and_validation(root: Path, config: ImageConfig) -> tuple[Path, Path | None]:
    """The folder with the class folders to train on, and that to validate on."""
    train, validation, inside = root, config.validation_dir, {path.name for path in _folders(root)}
    others = inside - {"train", "test", *VALIDATION}
    if others and "train" in inside and inside & set(VALIDATION):
        raise ConfigError(
            f"{root}: holds train/ and a validation folder, but {min(others)}/ too; name those that count: --train_dir "
            f"{root / 'train'} --validation_dir {root / min(inside & set(VALIDATION))}"
        )
    if "train" in inside and not others:
        train = root / "train"
        if "test" in inside:
            note(f"{root / 'test'} is not looked at: it is for `evaluate`, or give it as --validation_dir")
        if not config.validation_file:
            validation = validation or next((root / name for name in VALIDATION if name in inside), None)
    if validation is not None and train.resolve() in validation.resolve().parents:
        raise ConfigError(f"{validation}: lies within {train}, whose folders are all trained on: move it out")
    return train, validation


def _folders(root: Path) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"{root}: {error.strerror}") from None


def _class_folders(root: Path, left_out: Counter[str], *, training: bool) -> tuple[list[str], list[bytes]]:
    """(labels, paths) of `root/<class>/**/<image>`, sorted. Files without an image's suffix are counted in `left_out`."""
    classes = _folders(root)
    if not classes:
        tar = "; --train_file takes tar files" * any(root.glob("*.tar"))
        raise ConfigError(f"{root}: no class folders in it; expected {root}/<class>/<image>{tar}")
    labels, paths = [], []
    for folder in classes:
        images: list[bytes] = []
        others: Counter[str] = Counter()
        for place, files in walk(folder):
            images += [os.fsencode(f"{place}/{name}") for name in files if name.lower().endswith(SUFFIXES)]
            others += count_others(files)
        if not images and training:
            held = f"; it holds {by_ending(others)}" * bool(others)
            raise ConfigError(f"{folder}: a class folder without an image ({', '.join(SUFFIXES)}){held}: fill or remove it")
        left_out.update(others)
        labels += [folder.name] * len(images)
        paths += sorted(images)
    return labels, paths


# Lists -----------------------------------------------------------------------------------------------------------------


def _listed(config: ImageConfig, flag: str) -> tuple[list[Any], list[bytes], list[str]]:
    """(labels, paths, places of the records) of the lists that --train_file or --validation_file names, in their order."""
    labels, paths, places = [], [], []
    for file in find_files(getattr(config, flag), flag=flag):
        for where, record in records.read_records([file]):
            image = record[column_of(record, config, "image", where)]
            labels.append(record[column_of(record, config, "label", where)])
            if not isinstance(image, str) or not image:
                instead = "; images in its rows: give its folder as --dataset_name" * isinstance(image, bytes | dict)
                raise ConfigError(f"{where}: the image is {records.kind(image)}, expected a path{instead}")
            paths.append(os.fsencode(os.path.join(file.parent, image)))
            places.append(where)
    return labels, paths, places


def column_of(record: Any, config: ImageConfig, kind: str, where: str) -> str:
    """The name of the column that holds the `image` or the `label`."""
    named = getattr(config, f"{kind}_column")
    column = named or next((name for name in COLUMNS[kind] if name in record), "")
    if column not in record:
        wanted = repr(named) if named else f"{', '.join(COLUMNS[kind][:-1])} or {COLUMNS[kind][-1]}"
        raise ConfigError(f"{where}: no column {wanted} (has: {', '.join(record)}); name it with --{kind}_column")
    return column


# Data sets -------------------------------------------------------------------------------------------------------------


def open_table(config: ImageConfig) -> Table:
    """The training and validation splits of a data set, images not decoded. Every rank calls this: one downloads."""
    import datasets

    (name,), first = config.dataset_name, config.train_split_name
    splits = records.load_dataset(name, config.dataset_config_name)
    held_out = config.validation_split_name or next((split for split in VALIDATION if split in splits), None)
    chosen = [first] if held_out is None else [first, held_out]
    for split in chosen:
        if split not in splits:
            raise ConfigError(f"--dataset_name {name}: no split {split!r} (has: {', '.join(splits)})")
    column = column_of(splits[first].features, config, "image", name)
    holds = splits[first].features[column]
    if not isinstance(holds, datasets.Image) and not _holds_bytes(holds):
        raise ConfigError(f"--dataset_name {name}: the column {column!r} holds no images")
    undecoded = datasets.Image(decode=False)
    return Table(name, {split: splits[split].cast_column(column, undecoded) for split in chosen}, column)


def _holds_bytes(feature: Any) -> bool:
    """Whether a column that no library of images wrote can be one: its cells are bytes, or have a field of them."""
    return getattr(feature.get("bytes") if isinstance(feature, dict) else feature, "dtype", "") in ("binary", "large_binary")


def rows_of(config: ImageConfig, table: Table) -> Found:
    labels: list[Any] = []
    for split, rows in table.splits.items():
        column = column_of(rows.features, config, "label", table.name)
        feature = rows.features[column]
        names = getattr(getattr(feature, "feature", feature), "names", None)  # of a class, or of a list of classes
        for row, value in enumerate(rows[column]):
            where = f"{table.name}:{split}: row {row}"
            if value is None or -1 in (value if isinstance(value, list) else [value]):  # -1: test sets without labels
                raise ConfigError(f"{where}: the label is {value}, expected a class")
            if names:
                value = [names[number] for number in value] if isinstance(value, list) else names[value]
            labels.append(value)
    sizes = [len(rows) for rows in table.splits.values()]
    version = " ".join(rows._fingerprint for rows in table.splits.values())
    held_out_from = sizes[0] if len(sizes) > 1 else None
    read = read_labels(labels, config.problem_type, table.where)
    return Found(table.name, read, [], held_out_from, f"split {[*table.splits][-1]}", version)


# The embedded default -------------------------------------------------------------------------------------------------


def write_digits(folder: Path) -> None:
    """Write scikit-learn's 1,797 handwritten digits as `folder/<digit>/<number>.png`, 8 x 8 pixels, 16 shades of grey.

    E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    for number, (pixels, label) in enumerate(zip(data.images, data.target, strict=True)):
        file = folder / str(label) / f"{number:04d}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(file)
