"""Find labelled images, check each one for damage, split them and decode them."""

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from shared.config.parse import cache_dir
from shared.data import prepared
from shared.data.labels import LabelledData, Labels, in_order, warn_of_joined
from shared.data.order import Row
from shared.images import shards, sources
from shared.images.decoding import BadImage, Source, check, decode, largest_of_16_bits
from shared.images.options import ImageConfig
from shared.images.sources import Files, Found, Joined, Table
from shared.process.collectives import on_main
from shared.process.errors import ConfigError
from shared.process.printing import label, note, print_main
from shared.process.ranks import cores, is_main_rank

REPAIR = "repair it or add --skip_bad_images, and --allow_changed data if this run has a checkpoint"


class Images(Dataset):
    """A dataset of labelled images. Each row is {"image": the result of `decode`, "labels": class number}.

    With several labels an image, the labels of a row are [classes] fp32, 1 for each class that the image has.

    Args:
        source: returns where an image is, or its bytes, by its number in the data.
        index: [n] int64, the number of each image.
        labels: of these images.
        sources: images of each source of a mixture, in this order.

    Attributes:
        decode: the function that decodes images, `decode` or `decode_tensor`.
        at_least, white_level: its other arguments.
    """

    def __init__(
        self,
        source: Files | Table | Joined,
        index: np.ndarray,
        labels: Labels,
        sources: dict[str, int] | None = None,
    ) -> None:
        self.source, self.index, self.labels, self.sources = source, index, labels, sources or {}
        self.decode: Callable[[Source, int | None, int], Any] = decode
        self.at_least: int | None = None
        self.white_level = 0

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Row:
        at = self.position(number)
        try:
            image = self.decode(self.source[at], self.at_least, self.white_level)
        except BadImage as error:
            raise ConfigError(f"{self.where(number)}: {error}; {REPAIR}") from None
        return {"image": image, "labels": self.labels[number]}

    def num_targets(self, indices: np.ndarray) -> int:
        return len(indices)

    def where(self, number: int) -> str:
        """The path of an image, or its row in the table."""
        return self.source.where(self.position(number))

    def shown(self, number: int) -> dict[str, Any]:
        return {"image": self.where(number)}

    def position(self, number: int) -> int:
        return int(self.index[number])

    def draw(self, file: Path, title: str, tiles: list[tuple[int, str]]) -> None:
        """Draw images with a text above each, if there are any.

        Args:
            tiles: (number of an image, its text).
        """
        from matplotlib.figure import Figure

        if not tiles:
            return
        rows = math.ceil(len(tiles) / 8)
        figure = Figure(figsize=(14, 2.1 * rows + 0.5), layout="constrained")
        figure.suptitle(title)
        for place, (number, text) in enumerate(tiles, 1):
            image = self[number]["image"]
            image.thumbnail((160, 160))
            axes = figure.add_subplot(rows, 8, place, xticks=[], yticks=[])
            axes.set_title(text, fontsize=8)
            axes.imshow(image)
        figure.savefig(file, dpi=110)


def prepare(config: ImageConfig) -> LabelledData:
    """Find the images, check those that no earlier run has checked, and split them. Every rank calls this.

    Raises:
        ConfigError: no images, an image that `check` finds bad (without --skip_bad_images), a class without images.
            The error names the path.
        NotNow: the Hub does not answer.
    """
    data = _mix(config) if config.mix_weights else _prepare(config)
    classes = data.classes
    name = ", ".join(label(sources.name_of(source)) for source in config.sources().values())
    data.train.white_level = data.validation.white_level = config.white_level
    data.train.labels.require_trained(name, "image")
    validated = data.validation.labels.counts()
    if not config.train_dir:
        warn_of_joined(set(classes), data.problem_type)
    if not validated.any():
        raise ConfigError(f"{name}: no image{' with a label' * bool(len(data.validation))} to validate on")
    if not validated.all():
        print_main(
            f"warning: no validation image of {(validated == 0).sum()} of {len(classes)} classes "
            f"({classes[int(validated.argmin())]!r} for one): means over classes leave them out"
        )
    return data


def _mix(config: ImageConfig) -> LabelledData:
    """The images of several sources. Their classes are the same where their names are."""
    found = {name: _prepare(source) for name, source in config.sources().items()}
    for name, data in found.items():
        if not len(data.train):
            raise ConfigError(f"{name}: no image to train on")
    classes = tuple(in_order({name for data in found.values() for name in data.classes}))
    parts = [data.numbered_as(classes) for data in found.values()]
    source = Joined([data.train.source for data in parts])
    validated = parts[:1] if config.validation_dir or config.validation_file else parts  # the same for all

    def joined(some: list[Images]) -> Images:
        index = np.concatenate([part.index + start for part, start in zip(some, source.starts, strict=False)])
        values = np.concatenate([part.labels.values for part in some])
        return Images(source, index, Labels(parts[0].problem_type, classes, values))

    train = joined([data.train for data in parts])
    train.sources = {name: len(data.train) for name, data in found.items()}
    return LabelledData(
        train,
        joined([data.validation for data in validated]),
        prepared.fingerprint(sources=[data.identity for data in parts]),
        "; ".join(data.about for data in parts),
    )


def _prepare(config: ImageConfig) -> LabelledData:
    """`prepare` for one source."""
    table = sources.open_table(config) if config.dataset_name else None
    tars = shards.index(config) if config.train_file else None
    root = next(iter(config.train_dir), None)
    if config.is_demo:
        root = prepared.build_once(cache_dir() / "images" / "sklearn-digits-1", sources.write_digits)
    found: list[Found] = []  # filled on the main rank only

    def find() -> dict[str, Any]:
        if table:
            found.append(sources.rows_of(config, table))
        elif tars:
            found.append(shards.found(config, tars))
        else:
            found.append(sources.in_files(config, root))
        return found[0].describe()

    meta = on_main(find)
    if config.is_demo:
        meta["name"] = "scikit-learn's handwritten digits"

    def read_all(into: Path) -> None:
        paths, places = np.array(found[0].paths), found[0].places
        np.save(into / "paths.npy", paths)
        if places is not None:
            np.save(into / "places.npy", places)
        np.save(into / "labels.npy", found[0].labels.values)
        kind = {"about": meta["about"], "version": found[0].version, "code": prepared.source_of("images")}
        name = prepared.fingerprint(
            name=meta["name"], in_full=config.skip_bad_images, white_level=config.white_level, **kind
        )
        assert found[0].stamps is not None
        images = table or Files(paths, places)
        _check_range(meta["name"], images, config.white_level)
        bad = _find_bad(
            images,
            found[0].stamps,
            cache_dir() / "images" / f"good-{name}.npy",
            in_full=config.skip_bad_images,
            white_level=config.white_level,
        )
        (into / "bad.json").write_text(json.dumps(bad), encoding="utf-8")

    folder = cache_dir() / "images" / f"{meta['key']}{'-in-full' * config.skip_bad_images}-{config.white_level}"
    prepared.build_once(folder, read_all)
    load = lambda name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))  # noqa: E731
    labels = Labels(config.problem_type or "single_label", tuple(meta["classes"]), load("labels"))
    bad = json.loads((folder / "bad.json").read_text(encoding="utf-8"))
    source = table or Files(load("paths"), load("places") if tars else None)
    # Read the damaged ones again: a missing permission or decoder may be there now.
    return _split(config, source, labels, meta, on_main(lambda: _reasons(source, bad, white_level=config.white_level)))


def _check_range(name: str, source: Files | Table, white_level: int) -> None:
    """Refuse images of 16 bits that use little of their range, by a sample: scaled by the whole range, they were black.

    Cameras and microscopes write 10, 12 or 14 bits into 16: github.com/python-pillow/Pillow/issues/3011 (2018).

    Raises:
        ConfigError: names the largest value, and --white_level with the value that it may have.
    """
    largest = {"": 0}
    for number in range(0, len(source), len(source) // 100 + 1):
        with contextlib.suppress(BadImage):  # it is named later
            kind, value = largest_of_16_bits(source[number])
            largest[kind] = max(value, largest.get(kind, 0))
    greys, colours = largest.get("greys", 0), largest.get("colours", 0xFFFF)
    if colours <= 0xFFFF // 4 or ("colours" in largest and white_level):
        why = f"their largest value is about {colours:,} of 65,535, but they" if not white_level else "they"
        raise ConfigError(
            f"{label(name)}: colours of 16 bits: {why} cannot be scaled by --white_level: convert them to 8 bits"
        )
    if 0 < greys <= 0xFFFF // 4 and not white_level:
        fits = 2 ** max(8, greys.bit_length()) - 1
        raise ConfigError(
            f"{label(name)}: greys of 16 bits whose largest value is {greys:,} of 65,535, so they would be nearly black: "
            f"give the value that is white, such as --white_level {fits}, or 65535 if they are as dark as that"
        )


def _find_bad(source: Files | Table, stamps: np.ndarray, known: Path, *, in_full: bool, white_level: int) -> list[int]:
    """`check` the images that were not good in an earlier run, and return the numbers of those that are bad.

    Args:
        stamps: [n], each image's: see `Found`.
        known: where the stamps of good images are kept, from time to time, so that a check that is killed goes on.
    """
    good = np.zeros(len(stamps), dtype=bool)
    with contextlib.suppress(OSError, ValueError, EOFError):
        good = np.isin(stamps, np.load(known))
    left = np.flatnonzero(~good)
    print_main(f"{'reading' if in_full else 'looking at'} {len(left):,} images once, to find those that are damaged")
    loader: DataLoader = DataLoader(
        left,  # type: ignore[arg-type]
        batch_size=64,
        num_workers=cores() if len(left) > 5000 else 0,
        collate_fn=partial(_reasons, source, in_full=in_full, white_level=white_level),
        generator=torch.Generator(),  # the global one is for the initial weights: this check must not change them
    )
    bad: list[int] = []
    saved = time.monotonic()
    batches = tqdm(loader, "checking", unit="image", unit_scale=64, disable=None)  # None: a bar on terminals only
    for number, reasons in enumerate(batches, 1):
        bad += reasons
        good[left[64 * (number - 1) : 64 * number]] = True
        good[list(reasons)] = False
        if time.monotonic() - saved > 20 or number == len(loader):
            with contextlib.suppress(OSError):  # they are read again
                np.save(temporary := known.with_name(f".{os.getpid()}-{known.name}"), stamps[good])
                temporary.replace(known)
            saved = time.monotonic()
    return bad


def _reasons(source: Files | Table, numbers: Iterable[int], *, in_full: bool = True, white_level: int) -> dict[int, str]:
    """For each image that `check` finds bad: its number, and the reason."""
    bad = {}
    for number in map(int, numbers):
        try:
            check(source[number], in_full=in_full, white_level=white_level)
        except BadImage as error:
            bad[number] = str(error)
    return bad


def _split(
    config: ImageConfig, source: Files | Table, labels: Labels, meta: dict[str, Any], bad: dict[int, str]
) -> LabelledData:
    name, classes = label(meta["name"]), meta["classes"]
    if bad:
        first = f"{source.where(min(bad))}: {bad[min(bad)]}"
        if not config.skip_bad_images:
            others = f", and {len(bad) - 1:,} more cannot be read" if len(bad) > 1 else ""
            raise ConfigError(f"{first}{others}; --skip_bad_images leaves such images out")
        note(f"skipped {len(bad):,} of {len(labels):,} images that cannot be read; the first is {first}")
    numbers = np.arange(len(labels))
    if meta["held_out_from"] is None:
        held_out = labels.hold_out(config.validation_split_percentage)
        how = f"{config.validation_split_percentage:g}% of each class held out"
    else:
        held_out, how = numbers >= meta["held_out_from"], label(meta["about"])
    good = ~np.isin(numbers, list(bad))
    train, validation = numbers[good & ~held_out], numbers[good & held_out]
    if isinstance(source, Files) and is_main_rank() and (config.train_file or meta["held_out_from"] is not None):
        _warn_of_overlap(source, train, validation)
    about = f"{name}: {len(train):,} images of {len(classes)} classes; validation: {len(validation):,}, {how}"
    if bad:
        about += f"; {len(bad):,} that cannot be read are left out"
    if meta["left_out"]:
        about += f"; left out: {meta['left_out']}"
    if config.white_level:
        about += f"; 16-bit greys: 0 to {config.white_level} became 0 to 255 (do the same before inference)"
    if config.is_multi_label:
        about += f"; {labels.values[good].sum() / max(1, good.sum()):.2f} labels an image"
    split = hashlib.sha256(validation.tobytes()).hexdigest()
    identity = prepared.fingerprint(content=meta["identity"], split=split, bad=sorted(bad))
    return LabelledData(
        Images(source, train, labels.take(train)),
        Images(source, validation, labels.take(validation)),
        identity,
        about,
    )


def _warn_of_overlap(source: Files, train: np.ndarray, validation: np.ndarray) -> None:
    """Warn of images that are in both training and validation, by path. A link to an image counts as another image."""
    whole = cache(os.path.realpath)  # called for folders only: there are fewer folders than images

    def paths(numbers: np.ndarray) -> Iterator[tuple[bytes, bytes]]:
        places = (path.rpartition(b"/") for path in source.paths[numbers].tolist())
        return ((whole(folder or b"."), name) for folder, _, name in places)

    trained = set(paths(validation)).intersection(paths(train))
    if both := sum(path in trained for path in paths(validation)):
        what = f"{both:,} of the {len(validation):,} images to validate on"
        note(f"warning: {what} are trained on, too: their accuracy says little")
