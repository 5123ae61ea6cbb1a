"""Where labelled images come from: class folders, lists, tar files, data sets of the Hub. No image
is opened here.
"""

import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shared.data import records
from shared.data.files import find_files, walk
from shared.data.labels import Labels
from shared.data.loader import parallel_map
from shared.images.decoding import SUFFIXES, BadImage, Part, Source
from shared.images.options import ImageConfig
from shared.process.errors import ConfigError, shown
from shared.process.files import NOT_REGULAR
from shared.process.printing import print_main

# names of a validation folder or split; the first one present is used
VALIDATION = ("val", "validation", "valid")
COLUMNS = {
    "image": (
        "image",
        "img",
        "image_path",
        "path",
        "file_name",
        "filename",
        "file",
        "jpg",
        "jpeg",
        "png",
        "webp",
    ),
    "label": ("label", "labels", "class", "fine_label", "target", "cls"),
}


# Of each image: width and height in pixels, the mode of its file, and what tells copies.
LOOKS = np.dtype([("width", "i4"), ("height", "i4"), ("mode", "U8"), ("hash", "i8")])


@dataclass
class Files:
    """Images by number. Worker processes share the arrays instead of copying a list.

    Args:
        paths: [n] bytes, see `Listed`.
        parts: [n, 3] int64, where images lie in tar files, see `Listed`; [0] if they do not.
        rows: of a data set, see `open_table`; None: the images are files.
        looks: [n] LOOKS, once they were checked.
    """

    paths: np.ndarray
    parts: np.ndarray
    rows: Any
    looks: Any = None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Source:
        if self.rows is not None:
            (image,) = self.rows[number].values()
            if not image or not (image["bytes"] or image["path"]):
                raise BadImage("no image")
            return image["bytes"] or Path(image["path"])
        if len(self.parts):
            length, offset, size = self.parts[number].tolist()
            return Part(Path(os.fsdecode(self.paths[number][:length])), offset, size)
        return Path(self.where(number))

    def where(self, number: int) -> str:
        return os.fsdecode(self.paths[number])


@dataclass
class Listed:
    """All images of a source, before any is opened. Those to train on come first."""

    # In a tar file: <its path>/<member>; in a data set: <its name>:<split>: row <number>.
    paths: list[bytes] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)  # as the data have them
    places: list[str] = field(default_factory=list)  # of the labels; empty: the paths
    # In tar files: length of the tar file's own path, first byte, bytes.
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # of files or members, in bytes
    trained: int | None = None  # images to train on; None: not split yet
    validation: str = ""  # where the others are from, for people
    left_out: Counter[str] = field(default_factory=Counter)  # other files, by their endings

    def begin_validation(self, source: str) -> None:
        """All that is added from now on is from `source`, and to validate on."""
        self.trained = len(self.paths)
        self.validation = source

    def place(self, number: int) -> str:
        """Where the label of an image is."""
        return self.places[number] if self.places else os.fsdecode(self.paths[number])

    def identity(self, labels: Labels) -> str:
        """Changes when what the model learns from does, wherever it is. Sizes stand for
        contents.
        """
        text = f"{self.trained} {self.sizes} {labels.classes}"
        digest = hashlib.sha256(text.encode(errors="surrogateescape"))
        digest.update(labels.values.tobytes())
        digest.update(b"\0".join([re.split(b"[/:]", path)[-1] for path in self.paths]))
        return digest.hexdigest()


def name_of(config: ImageConfig) -> str:
    """What the training data are called in messages."""
    if config.is_demo:
        return "scikit-learn's handwritten digits"
    named = [str(name) for flag in config.SOURCES for name in getattr(config, flag)]
    return " ".join(named) if len(named) < 4 else f"{named[0]} and {len(named) - 1:,} more"


def tar_files(names: tuple[str, ...], flag: str) -> list[Path]:
    """The tar files among those that a flag names."""
    files = find_files(names, flag=flag) if names else []
    tars = [file for file in files if file.suffix.lower() == ".tar"]
    if 0 < len(tars) < len(files):
        print_main(f"--{flag}: of {len(files):,} files only the {len(tars):,} tar files are read")
    return tars


def list_files(config: ImageConfig, root: Path | None) -> tuple[Listed, str]:
    """(the images in class folders or in a list, a digest that changes when one of them or a label
    does). Those to validate on may be named in the other way.

    Args:
        root: with class folders, or with such folders in train/ and val/.
    """
    listed = Listed()
    validation = config.validation_dir
    if root:
        train, validation = _train_and_validation(root, config)
        _add_class_folders(listed, train, training=True)
    else:
        _add_lists(listed, config, "train_file")
        if not listed.paths:
            raise ConfigError(f"--train_file {name_of(config)}: no records in it")
    if validation:
        listed.begin_validation(str(validation))
        _add_class_folders(listed, validation, training=False)
    elif config.validation_file:
        listed.begin_validation(" ".join(config.validation_file))
        _add_lists(listed, config, "validation_file")
    chunks = [listed.paths[at : at + 10_000] for at in range(0, len(listed.paths), 10_000)]
    sizes_and_times = np.concatenate([*parallel_map(_look, chunks, None if len(chunks) > 4 else 1)])
    listed.sizes = sizes_and_times[:, 0].tolist()
    text = f"{listed.trained} {listed.validation} {listed.labels}"
    digest = hashlib.sha256(text.encode(errors="surrogateescape"))
    digest.update(b"\0".join(listed.paths))
    digest.update(sizes_and_times.tobytes())
    return listed, digest.hexdigest()


def count_others(names: Iterable[str]) -> Counter[str]:
    """Count the files that are no images, by their endings."""
    others = (name for name in names if not name.lower().endswith(SUFFIXES))
    return Counter(shown(os.path.splitext(name)[1].lower()) or "no ending" for name in others)


def _look(paths: list[bytes]) -> np.ndarray:
    """[n, 2] int64, bytes and time of change of each file; -1 of a missing one, named later.

    Raises:
        ConfigError: one is a pipe, a socket or a device.
    """
    facts = []
    for path in paths:
        try:
            found = os.stat(path)
        except (OSError, ValueError):
            facts.append((-1, -1))
            continue
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{os.fsdecode(path)}: {NOT_REGULAR}")
        facts.append((found.st_size, found.st_ctime_ns))  # of the permissions, too
    return np.array(facts, np.int64)


# Class folders ------------------------------------------------------------------------------------


def _train_and_validation(root: Path, config: ImageConfig) -> tuple[Path, Path | None]:
    """The folder with the class folders to train on, and that to validate on."""
    train = root
    validation = config.validation_dir
    inside = {path.name for path in _folders(root)}
    held_out = next((name for name in VALIDATION if name in inside), None)
    others = inside - {"train", "test", *VALIDATION}
    if "train" in inside and not others:
        train = root / "train"
        if held_out and not config.validation_file:
            validation = validation or root / held_out
    elif "train" in inside and held_out:
        raise ConfigError(
            f"{root}: holds train/ and {held_out}/, but {min(others)}/ too: name those that count "
            "with --train_dir and --validation_dir"
        )
    if validation is not None and train.resolve() in validation.resolve().parents:
        raise ConfigError(
            f"{validation}: lies within {train}, whose folders are all trained on: move it out"
        )
    return train, validation


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] != ".")


def _add_class_folders(listed: Listed, root: Path, *, training: bool) -> None:
    """Add `root/<class>/**/<image>`, sorted. Files without an image's suffix are counted."""
    classes = _folders(root)
    if not classes:
        raise ConfigError(
            f"{root}: no class folders in it; expected {root}/<class>/<image>, or tar files as "
            "--train_file"
        )
    for folder in classes:
        files = [f"{place}/{name}" for place, names in walk(folder) for name in names]
        images = sorted(os.fsencode(file) for file in files if file.lower().endswith(SUFFIXES))
        if not images and training:
            raise ConfigError(
                f"{folder}: a class folder without an image ({', '.join(SUFFIXES)}): fill or "
                "remove it"
            )
        listed.left_out += count_others(files)
        listed.labels += [folder.name] * len(images)
        listed.paths += images


# Lists --------------------------------------------------------------------------------------------


def _add_lists(listed: Listed, config: ImageConfig, flag: str) -> None:
    """Add what the lists name that `flag` gives, in their order."""
    for file in find_files(getattr(config, flag), flag=flag):
        for where, record in records.read_records([file]):
            image = record[column_of(record, config, "image", where)]
            label = record[column_of(record, config, "label", where)]
            if not isinstance(image, str) or not image:
                instead = "; images in its rows: give its folder as --dataset_name" * isinstance(
                    image, bytes | dict
                )
                raise ConfigError(
                    f"{where}: the image is {records.kind(image)}, expected a path{instead}"
                )
            listed.paths.append(os.fsencode(os.path.join(file.parent, image)))
            listed.labels.append(label)
            listed.places.append(where)


def column_of(record: Any, config: ImageConfig, kind: str, where: str) -> str:
    """The name of the column that holds the `image` or the `label`."""
    named = getattr(config, f"{kind}_column")
    column = named or next((name for name in COLUMNS[kind] if name in record), "")
    if column not in record:
        wanted = repr(named) if named else f"{', '.join(COLUMNS[kind][:-1])} or {COLUMNS[kind][-1]}"
        raise ConfigError(
            f"{where}: no column {wanted} (has: {', '.join(record)}); name it with --{kind}_column"
        )
    return column


# Data sets ----------------------------------------------------------------------------------------


def open_table(config: ImageConfig) -> tuple[dict[str, Any], Any]:
    """(the splits of a data set, the images of all, not decoded). Every rank calls this."""
    import datasets

    (name,) = config.dataset_name
    first = config.train_split_name
    splits = records.load_dataset(name, config.dataset_config_name)
    held_out = config.validation_split_name or next(
        (split for split in VALIDATION if split in splits), None
    )
    if config.validation_dir or config.validation_file:
        held_out = None
    chosen = [first] if held_out is None else [first, held_out]
    for split in chosen:
        if split not in splits:
            raise ConfigError(
                f"--dataset_name {name}: no split {split!r} (has: {', '.join(splits)})"
            )
    column = column_of(splits[first].features, config, "image", name)
    holds = splits[first].features[column]
    # binary: as pandas writes images
    if not isinstance(holds, datasets.Image) and "binary" not in str(holds):
        raise ConfigError(f"--dataset_name {name}: the column {column!r} holds no images")
    undecoded = datasets.Image(decode=False)
    named = {split: splits[split] for split in chosen}
    images = [
        rows.select_columns([column]).cast_column(column, undecoded) for rows in named.values()
    ]
    return named, datasets.concatenate_datasets(images)


def list_rows(config: ImageConfig, splits: dict[str, Any]) -> Listed:
    """The images of `open_table`."""
    import datasets

    (name,) = config.dataset_name
    listed = Listed()
    for split, rows in splits.items():
        if listed.paths:
            listed.begin_validation(f"split {split}")
        column = column_of(rows.features, config, "label", name)
        of = rows.features[column]
        of = getattr(of, "feature", of)  # of a list
        for row, value in enumerate(rows[column]):
            where = f"{name}:{split}: row {row}"
            # -1: test sets without labels
            if value is None or -1 in (value if isinstance(value, list) else [value]):
                raise ConfigError(f"{where}: the label is {value}, expected a class")
            named = isinstance(of, datasets.ClassLabel)
            listed.paths.append(where.encode())
            listed.labels.append(of.int2str(value) if named else value)
    return listed
