"""Labelled images: listed, checked for damage once, split, and decoded when they are read."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
from torch.utils.data import Dataset
from tqdm import tqdm

from shared.data import prepared
from shared.data.labels import LabelledData, Labels, in_order, read_labels
from shared.data.loader import parallel_map
from shared.data.order import Row
from shared.images import sources
from shared.images.decoding import BadImage, Source, check, decode
from shared.images.digits import write_digits
from shared.images.options import ImageConfig
from shared.images.sources import LOOKS, Files, Listed
from shared.images.tiles import draw_tiles
from shared.process.collectives import on_main
from shared.process.errors import ConfigError
from shared.process.files import cache_dir
from shared.process.printing import label, note, print_main
from shared.process.ranks import is_main_rank

REPAIR = "repair it or add --skip_bad_images, and --allow_changed data if this run has a checkpoint"


@dataclass(eq=False)
class Images(Dataset):
    """A dataset of labelled images: rows {"image": the result of `decode`, "labels": see `Labels`}.

    Args:
        files: the images of each source.
        index: [n, 2] int32, the source of each image and its number there.
        labels: of these images.
        sources: how many images are of each source of a mixture.
        decode: the function that decodes images, `decode` or `decode_tensor`.
        at_least: its other argument.
    """

    files: Sequence[Files]
    index: np.ndarray
    labels: Labels
    sources: dict[str, int] = field(default_factory=dict)
    decode: Callable[[Source, int | None], Any] = decode
    at_least: int | None = None

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Row:
        source, at = self.index[number].tolist()
        try:
            image = self.decode(self.files[source][at], self.at_least)
        except BadImage as error:
            raise ConfigError(f"{self.where(number)}: {error}; {REPAIR}") from None
        return {"image": image, "labels": self.labels[number]}

    def num_targets(self, indices: np.ndarray) -> int:
        return len(indices)

    def where(self, number: int) -> str:
        """The path of an image, or its row in the table."""
        source, at = self.index[number].tolist()
        return self.files[source].where(at)

    def shown(self, number: int) -> dict[str, Any]:
        return {"image": self.where(number)}

    def position(self, number: int) -> int:
        return number  # they are in the order of the data

    def draw(self, file: Path, title: str, tiles: list[tuple[int, str]]) -> None:
        """Draw images with a text above each.

        Args:
            tiles: (number of an image, its text).
        """
        draw_tiles(file, title, [(self[number]["image"], text) for number, text in tiles])


def prepare(config: ImageConfig) -> LabelledData:
    """Find the images, check them once, and split them. Every rank calls this.

    The classes of several sources are the same where their names are.

    Raises:
        ConfigError: no images, an image that `check` finds bad (without --skip_bad_images), a class
            without images. The error names the path.
        NotNow: the Hub does not answer.
    """
    configs = config.sources()
    is_shared = bool(config.validation_dir or config.validation_file)  # by all sources
    is_apart = is_shared and bool(config.dataset_name)  # files, in place of its splits
    parts = [_prepare(source, whole=is_apart) for source in configs.values()]
    if is_apart:
        parts.append(_to_validate(config))
    classes = tuple(in_order({name for part in parts for name in part.labels.classes}))
    labels = [part.labels.numbered_as(classes) for part in parts]

    def images(chosen: list[np.ndarray]) -> Images:
        """The chosen images of the sources, one source after the other."""
        values = [of.values[numbers] for of, numbers in zip(labels, chosen, strict=False)]
        sizes = [len(numbers) for numbers in chosen]
        source = np.repeat(np.arange(len(sizes)), sizes)
        return Images(
            [part.files for part in parts],
            np.stack([source, np.concatenate(chosen)], axis=1).astype(np.int32),
            replace(labels[0], values=np.concatenate(values)),
            dict(zip(configs, sizes, strict=False)),
        )

    train = images([part.train for part in parts])
    # without a data set, each source has them all
    chosen = parts[:1] if is_shared and not is_apart else parts
    validation = images([part.validation for part in chosen])
    name = ", ".join(label(sources.name_of(source)) for source in configs.values())
    train.labels.require_trained(name, "image")
    if not validation.labels.counts().any():
        raise ConfigError(f"{name}: no image to validate on that has a label")
    identity = prepared.fingerprint(sources=[part.identity for part in parts])
    return LabelledData(train, validation, identity, "; ".join(part.about for part in parts))


class _Part(NamedTuple):
    """One source: its images, and the numbers of those to train and to validate on."""

    files: Files
    labels: Labels  # of all its images
    train: np.ndarray
    validation: np.ndarray
    identity: str
    about: str


def _to_validate(config: ImageConfig) -> _Part:
    """The images to validate on that are named beside a data set."""
    files = ImageConfig(
        train_dir=(config.validation_dir,) if config.validation_dir else (),
        train_file=config.validation_file,
        image_column=config.image_column,
        label_column=config.label_column,
        problem_type=config.problem_type,
        skip_bad_images=config.skip_bad_images,
    )
    part = _prepare(files, whole=True)
    about = f"validation: {part.about}"
    return part._replace(train=part.validation, validation=part.train, about=about)


def _prepare(config: ImageConfig, *, whole: bool) -> _Part:
    """`prepare` for one source. If it is to stay `whole`, nothing is held out."""
    splits, rows = sources.open_table(config) if config.dataset_name else ({}, None)
    root = config.train_dir[0] if config.train_dir else None
    if config.is_demo:
        root = prepared.build_once(cache_dir() / "images" / "sklearn-digits-1", write_digits)
    listings: list[Callable[[], Listed]] = []  # one, on the main rank

    def find() -> str:
        facts: Any
        if files := sources.tar_files(config.train_file, "train_file"):
            from shared.extras import tars

            train, validation = facts = tars.with_validation(files, config)
            listings.append(partial(tars.list_images, train, validation, config))
        elif splits:
            facts = [[split, part._fingerprint] for split, part in splits.items()]
            listings.append(partial(sources.list_rows, config, splits))
        else:
            listed, facts = sources.list_files(config, root)
            listings.append(lambda: listed)
        return prepared.fingerprint(
            facts=facts,
            columns=[config.image_column, config.label_column, config.problem_type],
            decoder=PIL.__version__,
            code=prepared.source_of(
                *("images", "data/labels.py", "data/records.py", "data/tables.py", "data/values.py")
            ),
        )

    key = on_main(find)

    def build(into: Path) -> None:
        listed = listings[0]()
        problem_type = "single_label" if root else config.problem_type
        labels = read_labels(listed.labels, problem_type, listed.place)
        files = Files(np.array(listed.paths), np.array(listed.parts, np.int64), rows)
        np.save(into / "paths.npy", files.paths)
        np.save(into / "parts.npy", files.parts)
        np.save(into / "labels.npy", labels.values)
        bad, looks = _look(files)
        np.save(into / "looks.npy", looks)
        facts = {
            "problem_type": labels.problem_type,
            "classes": labels.classes,
            "trained": listed.trained,
            "validation": listed.validation,
            "left_out": listed.left_out,
            "identity": listed.identity(labels),
            "bad": bad,
        }
        (into / "facts.json").write_text(json.dumps(facts), encoding="utf-8")

    folder = prepared.build_once(cache_dir() / "images" / key, build)
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))

    def load(name: str) -> np.ndarray:
        return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))

    labels = Labels(facts["problem_type"], tuple(facts["classes"]), load("labels"))
    if whole:
        facts["trained"] = len(labels)
    files = Files(load("paths"), load("parts"), rows, load("looks"))
    return _split(config, files, labels, facts)


def _look(files: Files) -> tuple[list[tuple[int, str]], np.ndarray]:
    """((number, reason) of each image that `check` finds bad; of each image what `Files` has in
    `looks`).
    """
    count = len(files)
    print_main(f"reading {count:,} images once, to find those that are damaged")
    found = parallel_map(partial(_check, files=files), range(count), None if count > 500 else 1)
    bar = tqdm(found, "checking", count, unit="image", disable=None)
    reasons, looks = zip(*bar, strict=True)
    bad = [(number, reason) for number, reason in enumerate(reasons) if reason]
    return bad, np.array([*looks], LOOKS)  # a list: a tuple would be one row


def _check(number: int, files: Files) -> tuple[str, tuple[Any, ...]]:
    """(what is wrong with an image; empty if nothing is. How it looks.)"""
    try:
        size, mode, checksum = check(files[number])
    except BadImage as error:
        return str(error), (0, 0, "", 0)
    return "", (*size, mode, checksum)


def _split(config: ImageConfig, files: Files, labels: Labels, facts: dict[str, Any]) -> _Part:
    bad = facts["bad"]
    numbers = np.arange(len(files))
    bad_numbers = [number for number, _ in bad]
    good = ~np.isin(numbers, bad_numbers)
    if bad:
        number, reason = bad[0]
        first = f"{files.where(number)}: {reason}"
        if not config.skip_bad_images:
            others = f", and {len(bad) - 1:,} more cannot be read" if len(bad) > 1 else ""
            raise ConfigError(f"{first}{others}; --skip_bad_images leaves such images out")
        skipped = f"skipped {len(bad):,} of {len(files):,} images that cannot be read"
        note(f"{skipped}; the first is {first}")
    if facts["trained"] is None:
        held_out = labels.hold_out(config.validation_split_percentage)
        how = f"{config.validation_split_percentage:g}% of each class held out"
    else:
        held_out = numbers >= facts["trained"]
        how = label(facts["validation"])
    train = numbers[good & ~held_out]
    validation = numbers[good & held_out]
    if is_main_rank():
        _warn_of_overlap(files.paths, train, validation)
    about = f"{label(sources.name_of(config))}: {len(train):,} images of "
    about += f"{len(labels.classes)} classes"
    if how:
        about += f"; validation: {len(validation):,}, {how}"
    if bad:
        about += f"; {len(bad):,} that cannot be read are left out"
    if left_out := facts["left_out"]:
        others = ", ".join(f"{count:,} {ending}" for ending, count in sorted(left_out.items()))
        about += f"; left out: {others}"
    if labels.problem_type == "multi_label":
        about += f"; {labels.values[good].sum() / max(1, good.sum()):.2f} labels an image"
    split = hashlib.sha256(validation.tobytes()).hexdigest()
    identity = prepared.fingerprint(content=facts["identity"], split=split, bad=bad_numbers)
    return _Part(files, labels, train, validation, identity, about)


def _warn_of_overlap(paths: np.ndarray, train: np.ndarray, validation: np.ndarray) -> None:
    """Warn of images that are in both training and validation, by path. A link to an image counts
    as another image.
    """
    trained = set(map(os.path.abspath, paths[train].tolist()))
    if both := sum(os.path.abspath(path) in trained for path in paths[validation].tolist()):
        what = f"{both:,} of the {len(validation):,} images to validate on"
        note(f"warning: {what} are trained on, too: their accuracy says little")
