"""Labelled images from class folders, lists and the Hub: found, looked at once, decoded."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from shared.config.parse import cache_dir
from shared.data import prepared, records
from shared.data.files import find_files, walk
from shared.data.order import Row, permute
from shared.images.decoding import BadImage, decode
from shared.images.options import ImageConfig
from shared.process.collectives import on_main
from shared.process.errors import ConfigError, NotNow, first_line, is_of_the_network
from shared.process.printing import print_main, redact
from shared.process.ranks import cores, is_main_rank

FORMAT = 2  # raised when the prepared files change meaning
SUFFIXES = (".avif", ".bmp", ".gif", ".jp2", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
VALIDATION = ("val", "validation", "valid")  # names of a validation folder or split, the first that is there
IMAGE_COLUMNS = ("image", "img", "image_path", "path", "file_name", "filename", "file")
LABEL_COLUMNS = ("label", "labels", "class", "fine_label", "target")


# Where images come from ------------------------------------------------------------------------------------------------


class _Files:
    """Images in files.

    Args:
        text: uint8, all paths one after the other: an array, which reading processes share instead of copying.
        ends: [n] int64, where each path ends in it.
    """

    def __init__(self, text: np.ndarray, ends: np.ndarray) -> None:
        self.text, self.ends = text, ends

    def __getitem__(self, index: int) -> Path:
        start = self.ends[index - 1] if index else 0
        return Path(os.fsdecode(self.text[start : self.ends[index]].tobytes()))

    def where(self, index: int) -> str:
        return str(self[index])


class _Table:
    """Images in the rows of data sets of `datasets`, one after the other."""

    def __init__(self, name: str, parts: dict[str, Any], column: str) -> None:
        self.name, self.parts, self.column = name, parts, column
        self.pictures = {split: part.select_columns([column]) for split, part in parts.items()}

    def _find(self, index: int) -> tuple[str, int]:
        for split, part in self.parts.items():
            if index < len(part):
                return split, index
            index -= len(part)
        raise IndexError(index)

    def __getitem__(self, index: int) -> Path | bytes:
        split, row = self._find(index)
        value = self.pictures[split][row][self.column]
        if value is None or (value["bytes"] is None and value["path"] is None):
            raise BadImage("no image")
        return value["bytes"] if value["bytes"] is not None else Path(value["path"])

    def where(self, index: int) -> str:
        split, row = self._find(index)
        return f"{self.name}:{split}: row {row}"


class Images(Dataset):
    """Labelled images: rows {"image": what `decode` makes of it, "labels": class number}.

    Args:
        source: finds an image by its number.
        index: [n, 2] int64, the number and the class of each.

    Attributes:
        decode: the function above, or another that takes the same.
        at_least: see `decode`.
    """

    def __init__(self, source: _Files | _Table, index: np.ndarray) -> None:
        self.source, self.index = source, index
        self.decode: Callable[[Path | bytes, int | None], Any] = decode
        self.at_least: int | None = None

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Row:
        at, label = self.index[number].tolist()
        try:
            return {"image": self.decode(self.source[at], self.at_least), "labels": np.array(label)}
        except BadImage as error:
            raise ConfigError(f"{self.source.where(at)}: {error}") from None

    def num_targets(self, indices: np.ndarray) -> int:
        return len(indices)

    def where(self, number: int) -> str:
        """The path, or the row, of an image."""
        return self.source.where(int(self.index[number, 0]))


@dataclass(frozen=True)
class ImageData:
    """Training and validation images of a config."""

    train: Images
    validation: Images
    classes: tuple[str, ...]  # names, by class number
    identity: str  # changes when the images or their labels do
    about: str  # a line for people

    def numbered_as(self, classes: tuple[str, ...]) -> ImageData:
        """The same images with the class numbers of `classes`, the same names in another order."""
        number = np.array([classes.index(name) for name in self.classes])

        def renumbered(images: Images) -> Images:
            return Images(images.source, np.stack([images.index[:, 0], number[images.index[:, 1]]], axis=1))

        return ImageData(renumbered(self.train), renumbered(self.validation), classes, self.identity, self.about)

    def class_weights(self) -> torch.Tensor:
        """[classes] fp32, inversely proportional to how often a class occurs, 1 on average over the images."""
        counts = np.bincount(self.train.index[:, 1], minlength=len(self.classes))
        return torch.tensor(len(self.train) / (len(self.classes) * counts), dtype=torch.float32)


@dataclass
class _Found:
    """All images a config names, before any is opened."""

    name: str
    labels: list[str]
    held_out_from: int | None  # the images from this number on are for validation; None: not split yet
    paths: list[str] | None = None  # None: rows of a table
    about: str = ""  # the validation images, for people
    version: str = ""  # of a table's contents


def _write_digits(folder: Path) -> None:
    """Write scikit-learn's 1,797 handwritten digits as `folder/<digit>/<number>.png`, 8 x 8 pixels, 16 shades of grey.

    E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    for number, (pixels, label) in enumerate(zip(data.images, data.target, strict=True)):
        file = folder / str(label) / f"{number:04d}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(file)


def prepare(config: ImageConfig) -> ImageData:
    """Find the images, look at each once (later runs remember what was seen), split. Every rank calls this.

    Raises:
        ConfigError: no images, an image that cannot be read (without --skip_bad_images), an empty class, a label that
            training does not know; with the path.
        NotNow: the Hub does not answer.
    """
    table = None
    if config.dataset_name is not None:
        table = _open_table(config)
    found: list[_Found] = []

    def look() -> str:
        found.append(_rows_of(config, table) if table else _listed(config) if config.train_file else _in_folders(config))
        return _fingerprint(found[0])

    is_demo = config.is_demo
    if is_demo:
        folder = prepared.build_once(cache_dir() / "images" / "sklearn-digits-1", _write_digits)
        config = ImageConfig(train_dir=folder, validation_split_percentage=config.validation_split_percentage)
    key = on_main(look)
    folder = cache_dir() / "images" / key
    looked_before = folder.exists()
    prepared.build_once(folder, lambda into: _write(found[0], table, into))
    with prepared.reading(folder):
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        source: _Files | _Table = table or _Files(
            *(np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ("paths", "ends"))
        )
        labels = np.load(folder / "labels.npy", mmap_mode="r")
        if isinstance(source, _Files) and len(labels) != len(source.ends):
            raise ValueError("its files are not of one length")

    def still_bad() -> list[tuple[int, str]]:  # what failed once, for want of a permission or a decoder, may be readable now
        again = _Look(source)
        return [(number, why) for number, before in meta["bad"] if (why := again[number] if looked_before else before)]

    meta["bad"] = on_main(still_bad)
    if is_demo:
        meta["name"] = "scikit-learn's handwritten digits"
    return _split(config, source, labels, meta)


def _write(found: _Found, table: _Table | None, into: Path) -> None:
    names = sorted(set(found.labels), key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name))
    number_of = {name: number for number, name in enumerate(names)}
    labels = np.array([number_of[label] for label in found.labels], dtype=np.int64)
    np.save(into / "labels.npy", labels)
    source: _Files | _Table
    if table is None:
        assert found.paths is not None
        encoded = [os.fsencode(path) for path in found.paths]
        text = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        ends = np.cumsum([len(path) for path in encoded], dtype=np.int64)
        np.save(into / "paths.npy", text)
        np.save(into / "ends.npy", ends)
        source = _Files(text, ends)
    else:
        source = table
    meta: dict[str, Any] = {
        "name": redact(found.name),
        "about": redact(found.about),
        "classes": names,
        "held_out_from": found.held_out_from,
    }
    meta["bad"] = _look_at_all(source, len(labels))
    # What is learned from, wherever and whenever it was put: labels, and files' names and sizes.
    digest = hashlib.sha256(f"{found.held_out_from} {len(labels)}".encode())
    for number, label in enumerate(found.labels):
        path = found.paths[number] if found.paths else ""
        size = os.path.getsize(path) if os.path.isfile(path) else -1
        digest.update(f"{label} {os.path.basename(path)} {size}\n".encode(errors="surrogateescape"))
    meta["identity"] = digest.hexdigest()
    (into / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


class _Look(Dataset):
    """Why each image cannot be read; "" for one that can."""

    def __init__(self, source: _Files | _Table) -> None:
        self.source = source

    def __getitem__(self, index: int) -> str:
        try:
            decode(self.source[index], at_least=1)  # reads all of a file at the least cost
        except BadImage as error:
            return str(error)
        return ""


def _look_at_all(source: _Files | _Table, count: int) -> list[tuple[int, str]]:
    """(number, reason) of the images that cannot be read, found by decoding every one on all cores."""
    print_main(f"reading {count:,} images once, to find those that are damaged")
    workers = cores() if count > 5000 else 0
    loader: DataLoader = DataLoader(
        _Look(source),
        sampler=range(count),
        batch_size=64,
        num_workers=workers,
        collate_fn=list,
        generator=torch.Generator(),  # a run that finds the images looked at already must draw the same initial weights
    )
    quiet = not (is_main_rank() and sys.stderr.isatty())
    reasons: list[str] = []
    with tqdm(total=count, desc="reading", unit="image", disable=quiet) as bar:
        for batch in loader:
            reasons += batch
            bar.update(len(batch))
    return [(number, reason) for number, reason in enumerate(reasons) if reason]


def _split(config: ImageConfig, source: _Files | _Table, labels: np.ndarray, meta: dict[str, Any]) -> ImageData:
    names: list[str] = meta["classes"]
    bad = {int(number): reason for number, reason in meta["bad"]}
    if bad and not config.skip_bad_images:
        first = min(bad)
        others = f", and {len(bad) - 1:,} more cannot be read" if len(bad) > 1 else ""
        raise ConfigError(f"{source.where(first)}: {bad[first]}{others}; --skip_bad_images leaves such images out")
    if bad:
        reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(bad.values()).most_common(5))
        print_main(f"skipped {len(bad):,} of {len(labels):,} images: {reasons}; the first is {source.where(min(bad))}")
    held_out = np.zeros(len(labels), dtype=bool)
    if meta["held_out_from"] is not None:
        held_out[meta["held_out_from"] :] = True
        how = f"{meta['about']}"
    else:
        held_out = hold_out(np.asarray(labels), config.validation_split_percentage)
        how = f"{config.validation_split_percentage:g}% of each class held out"
    good = np.ones(len(labels), dtype=bool)
    good[list(bad)] = False
    index = np.stack([np.arange(len(labels)), labels], axis=1)
    train, validation = index[good & ~held_out], index[good & held_out]
    in_training = np.bincount(train[:, 1], minlength=len(names))
    unknown = validation[in_training[validation[:, 1]] == 0]
    if len(unknown):
        where, label = source.where(int(unknown[0, 0])), names[unknown[0, 1]]
        raise ConfigError(f"{where}: the class {label!r} has no image to train on")
    if not in_training.all():  # all of a class's images were bad
        raise ConfigError(f"{meta['name']}: the class {names[int(in_training.argmin())]!r} has no image that can be read")
    if len(names) < 2 or not len(validation):
        problem = f"only one class, {names[0]!r}" if len(names) < 2 else "no image to validate on"
        raise ConfigError(f"{meta['name']}: {problem}")
    absent = sorted(set(range(len(names))) - set(validation[:, 1].tolist()))
    if absent:
        print_main(
            f"warning: no validation image of {len(absent)} of {len(names)} classes ({names[absent[0]]!r} for one): "
            "means over classes leave them out"
        )
    about = f"{meta['name']}: {len(train):,} images of {len(names)} classes; validation: {len(validation):,}, {how}"
    if bad:
        about += f"; {len(bad):,} that cannot be read are left out"
    split = hashlib.sha256(validation.tobytes()).hexdigest()
    identity = prepared.fingerprint(content=meta["identity"], split=split, bad=sorted(bad))
    return ImageData(Images(source, train), Images(source, validation), tuple(names), identity, about)


def hold_out(labels: np.ndarray, percent: float) -> np.ndarray:
    """Which images to validate on: the same share of every class, at least one image, and never all.

    Depends on labels and their order alone, on no seed.

    Args:
        labels: [n] int64, class numbers.
        percent: per cent of each class.

    Returns:
        [n] bool.
    """
    held_out = np.zeros(len(labels), dtype=bool)
    order = np.argsort(labels, kind="stable")
    classes, starts = np.unique(labels[order], return_index=True)
    for label, members in zip(classes, np.split(order, starts[1:]), strict=True):
        count = min(max(1, round(len(members) * percent / 100)), len(members) - 1)
        chosen = permute(np.arange(count), len(members), (int(label),)) if count else np.zeros(0, dtype=np.int64)
        held_out[members[chosen]] = True
    return held_out


def _fingerprint(found: _Found) -> str:
    """Changes when any image, label or name does; sizes and times stand for contents, so no file is opened."""
    digest = hashlib.sha256(f"{FORMAT} {found.name} {found.about} {found.held_out_from} {found.version}".encode())
    for number, label in enumerate(found.labels):
        line = label
        if found.paths is not None:
            path = found.paths[number]
            try:
                stat = os.stat(path)
                line = f"{path} {stat.st_size} {stat.st_mtime_ns} {label}"
            except OSError:
                line = f"{path} {label}"
        digest.update(line.encode(errors="surrogateescape") + b"\n")
    return digest.hexdigest()[:16]


def _in_folders(config: ImageConfig) -> _Found:
    root = config.train_dir
    assert root is not None
    train, validation = root, config.validation_dir
    inside = {path.name for path in _folders(root)}
    others = inside - {"train", "test", *VALIDATION}
    if others and "train" in inside and inside & set(VALIDATION):
        raise ConfigError(
            f"{root}: holds train/ and a validation folder, but {min(others)}/ too; give train/ as --train_dir"
        )
    if "train" in inside and not others:
        train = root / "train"
        validation = validation or next((root / name for name in VALIDATION if name in inside), None)
    if validation is not None and train.resolve() in validation.resolve().parents:
        raise ConfigError(f"{validation}: lies within {train}, whose folders are all trained on: move it out")
    if validation is not None and train.resolve() == validation.resolve():
        print_main(f"warning: {train} is trained on and validated on: the accuracy will say nothing of other images")
    labels, paths = _class_folders(train, training=True)
    held_out_from = None
    if validation is not None:
        held_out_from = len(paths)
        more_labels, more_paths = _class_folders(validation, training=False)
        labels, paths = labels + more_labels, paths + more_paths
    return _Found(str(root), labels, held_out_from, paths, about=str(validation or ""))


def _folders(root: Path) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise ConfigError(f"{root}: {error.strerror}") from None


def _class_folders(root: Path, *, training: bool) -> tuple[list[str], list[str]]:
    """(labels, paths) of `root/<class>/**/<image>`, sorted; files without an image's suffix are not looked at."""
    classes = _folders(root)
    if not classes:
        raise ConfigError(f"{root}: no class folders in it; expected {root}/<class>/<image>")
    labels, paths = [], []
    for folder in classes:
        images = []
        for place, files in walk(folder):
            images += [os.path.join(place, f) for f in files if f.lower().endswith(SUFFIXES)]
        if not images and training:
            raise ConfigError(f"{folder}: a class folder without an image ({', '.join(SUFFIXES)}): fill or remove it")
        labels += [folder.name] * len(images)
        paths += sorted(images)
    if not paths:
        raise ConfigError(f"{root}: no images in its class folders")
    return labels, paths


def _listed(config: ImageConfig) -> _Found:
    labels: list[str] = []
    paths: list[str] = []
    held_out_from = None
    first: tuple[str, str] | None = None  # where the first label is, and what it is
    for flag in ("train_file", "validation_file"):
        for file in find_files(getattr(config, flag), flag=flag) if getattr(config, flag) else []:
            if file.suffix.lower() in SUFFIXES:
                raise ConfigError(f"--{flag} {file}: a picture, not a list of pictures; folders of them go with --train_dir")
            if flag == "validation_file" and held_out_from is None:
                held_out_from = len(paths)
            for where, record in records.read_records([file]):
                image = record[_column(record, config.image_column, IMAGE_COLUMNS, "image_column", where)]
                label = record[_column(record, config.label_column, LABEL_COLUMNS, "label_column", where)]
                if not isinstance(image, str) or not image:
                    raise ConfigError(f"{where}: the image is {records.kind(image)}, expected a path")
                label = label.strip() if isinstance(label, str) else label  # CSV keeps what follows a comma
                if not isinstance(label, str | int) or label == "":
                    raise ConfigError(f"{where}: the label is {records.kind(label)}, expected a name or a number")
                first = first or (where, records.kind(label))
                if records.kind(label) != first[1]:  # 1 and "one", or 1 and "1": who knows which of them are one class
                    raise ConfigError(f"{where}: the label is {records.kind(label)}, that of {first[0]} {first[1]}: use one")
                paths.append(os.path.join(file.parent, image))
                labels.append(str(label))
        if not paths:
            raise ConfigError(f"--train_file {' '.join(config.train_file)}: no records in it")
    _warn_of_repeats(paths, held_out_from)
    about = " ".join(config.validation_file)
    return _Found(" ".join(config.train_file), labels, held_out_from, paths, about=about)


def _warn_of_repeats(paths: list[str], held_out_from: int | None) -> None:
    """What a list names twice may stand on both sides of the split, and what two lists name does."""
    whole = cache(os.path.realpath)  # of folders, fewer than images; a linked picture is taken for another
    paths = [os.path.join(whole(place), name) for place, name in map(os.path.split, paths)]
    if held_out_from is not None:
        known = set(paths[:held_out_from])
        count, both = len(paths) - held_out_from, sum(path in known for path in paths[held_out_from:])
        if both:
            print_main(
                f"warning: {both:,} of the {count:,} images to validate on are trained on, too: their accuracy says little"
            )
    elif repeats := len(paths) - len(set(paths)):
        print_main(
            f"warning: {repeats:,} of {len(paths):,} lines name an image that is named before: it may be on both sides "
            "of the split"
        )


def _column(record: Any, named: str | None, usual: Sequence[str], flag: str, where: str) -> str:
    column = named or next((name for name in usual if name in record), None)
    if column is None or column not in record:
        wanted = repr(named) if named else f"{', '.join(usual[:-1])} or {usual[-1]}"
        raise ConfigError(f"{where}: no column {wanted} (has: {', '.join(record)}); name it with --{flag}")
    return column


def _open_table(config: ImageConfig) -> _Table:
    """The training and validation splits of a data set, images not decoded. The main rank downloads first."""
    import datasets

    assert config.dataset_name is not None
    name = config.dataset_name

    def load() -> Any:
        datasets.disable_progress_bars()
        try:
            return datasets.load_dataset(name, config.dataset_config_name)
        except Exception as error:  # datasets raises a wide range of types for what the user typed
            kind_of = NotNow if is_of_the_network(error) else ConfigError
            raise kind_of(f"--dataset_name {name}: {first_line(error)}") from None

    splits = load()  # on every rank: the library lets one download and the others wait, however long that takes
    first = config.train_split_name
    if first not in splits:
        raise ConfigError(f"--dataset_name {name}: no split {first!r} (has: {', '.join(splits)})")
    held_out = config.validation_split_name or next((split for split in VALIDATION if split in splits), None)
    if held_out is not None and held_out not in splits:
        raise ConfigError(f"--validation_split_name {held_out}: {name} has no such split (has: {', '.join(splits)})")
    parts = {split: splits[split] for split in (first, held_out) if split is not None}
    column = _column(splits[first].features, config.image_column, IMAGE_COLUMNS, "image_column", name)
    if not isinstance(splits[first].features[column], datasets.Image):
        raise ConfigError(f"--dataset_name {name}: the column {column!r} holds no images")
    parts = {split: part.cast_column(column, datasets.Image(decode=False)) for split, part in parts.items()}
    return _Table(name, parts, column)


def _rows_of(config: ImageConfig, table: _Table) -> _Found:
    labels: list[str] = []
    for split, part in table.parts.items():
        column = _column(part.features, config.label_column, LABEL_COLUMNS, "label_column", table.name)
        to_name = getattr(part.features[column], "int2str", str)
        for row, value in enumerate(part[column]):
            if value is None or value == -1:  # -1: what test sets without labels have
                raise ConfigError(f"{table.name}:{split}: row {row}: no label")
            if not isinstance(value, str | int):
                raise ConfigError(f"{table.name}:{split}: row {row}: the label is {records.kind(value)}, expected one class")
            try:
                labels.append(str(to_name(value)))
            except (ValueError, IndexError):
                raise ConfigError(f"{table.name}:{split}: row {row}: the label {value} is none of its classes") from None
    splits = list(table.parts)
    held_out_from = len(table.parts[splits[0]]) if len(splits) > 1 else None
    version = " ".join(part._fingerprint for part in table.parts.values())
    return _Found(table.name, labels, held_out_from, about=f"split {splits[-1]}", version=version)
