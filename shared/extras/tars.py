"""Images in tar files, read where they lie: nothing is unpacked. What is in them is listed once.

Two kinds are known: samples of WebDataset, `000001.jpg` beside `000001.cls` or a `000001.json` that
holds the label; and class folders, `cat/1.jpg`. Other members are counted by their endings. Hidden
ones are not looked at.
"""

import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from shared.data.loader import parallel_map
from shared.data.values import parse_json
from shared.images.decoding import SUFFIXES, Part, read
from shared.images.options import ImageConfig
from shared.images.sources import VALIDATION, Listed, column_of, count_others, tar_files
from shared.process.errors import ConfigError, first_line
from shared.process.printing import print_main


def with_validation(train: list[Path], config: ImageConfig) -> tuple[list[Path], list[Path]]:
    """The tar files to train on and those to validate on."""
    validation = tar_files(config.validation_file, "validation_file")
    if not validation:
        if config.validation_dir or config.validation_file:
            raise ConfigError("--train_file names tar files: --validation_file must do so, too")
        names_validation = [file for file in train if is_to_validate(file)]
        if 0 < len(names_validation) < len(train):
            raise ConfigError(
                f"--train_file {config.train_file[0]}: names tar files to validate on, too, "
                f"{names_validation[0]} for one: give these as --validation_file"
            )
    return train, validation


def is_to_validate(file: Path) -> bool:
    return not set(VALIDATION).isdisjoint(re.split("[^a-z]+", file.stem.lower()))


def list_images(train: list[Path], validation: list[Path], config: ImageConfig) -> Listed:
    """All images of `with_validation`.

    Raises:
        ConfigError: a tar file is damaged, or what is in it has no label.
    """
    files = [*train, *validation]
    print_main(f"listing the images in {len(files):,} tar files once")
    listed = Listed()
    work = partial(list_file, config=config)
    found = parallel_map(work, files, None if len(files) > 1 else 1)
    for number, (images, left_out) in enumerate(found):
        if number == len(train):
            listed.begin_validation(" ".join(config.validation_file))
        length = len(os.fsencode(files[number]))
        for sample, rest, label, part in images:
            listed.paths.append(os.fsencode(f"{sample}.{rest}"))
            listed.places.append(sample)
            listed.labels.append(label)
            listed.parts.append((length, *part))
        listed.left_out.update(left_out)
    listed.sizes = [size for _, _, size in listed.parts]
    return listed


# One file -----------------------------------------------------------------------------------------


def list_file(file: Path, config: ImageConfig) -> tuple[list[Any], Counter[str]]:
    """The images of a tar file and what is left out.

    Returns:
        ([(sample, rest of the name, label, (first byte, bytes))], counts of others by endings).
    """
    listed: list[Any] = []
    samples, left_out = _samples(file, config)
    for name, (images, record) in samples.items():
        where = f"{file}/{name}"
        if record or config.label_column:
            label = record[column_of(record, config, "label", where)]
            if not config.image_column:  # without masks beside the image, such as 1.seg.png
                images = {
                    rest: place for rest, place in images.items() if f".{rest}".lower() in SUFFIXES
                }
            if len(images) > 1:
                raise ConfigError(
                    f"{where}: several images ({', '.join(images)}): name one with --image_column"
                )
        elif "/" in name:
            label = name.split("/")[-2]
        else:
            expected = f"neither {name}.cls, {name}.json nor a class folder"
            raise ConfigError(f"{where}: an image without a label: {expected}")
        listed += [(where, rest, label, place) for rest, place in images.items()]
    if not listed:
        raise ConfigError(f"{file}: no images in it ({', '.join(SUFFIXES)})")
    return listed, left_out


def _samples(file: Path, config: ImageConfig) -> tuple[dict[str, Any], Counter[str]]:
    """What a tar file holds: by the names of members up to their first dot ({rest of the name:
    (first byte, bytes)} of its images, what members beside them say, the label for one); and counts
    of the others.
    """
    samples: dict[str, Any] = {}
    left_out: Counter[str] = Counter()
    for name, *place in _members(file, left_out):
        folder, slash, base = name.rpartition("/")
        stem, _, rest = base.partition(".")
        is_record = rest.lower() in ("cls", "json") or rest == config.label_column
        is_image = name.lower().endswith(SUFFIXES)
        if config.image_column:
            is_image = rest == config.image_column
        if not is_record and not is_image:
            left_out += count_others([base])
            continue
        images, record = samples.setdefault(folder + slash + stem, ({}, {}))
        if is_record:
            record |= _record(Part(file, *place), rest, f"{file}/{name}")
        else:
            images[rest] = place
    return samples, left_out


def _members(file: Path, left_out: Counter[str]) -> Iterator[tuple[str, int, int]]:
    """(name, first byte, bytes) of each regular member of a tar file. Others are counted.

    Raises:
        ConfigError: the file is damaged.
    """
    try:
        with file.open("rb") as content, tarfile.open(fileobj=content, mode="r:") as tar:
            before = -1
            size = file.stat().st_size
            while info := tar.next():
                tar.members.clear()  # type: ignore[attr-defined]  # they would fill the memory
                if info.offset <= before or info.size < 0 or info.offset_data + info.size > size:
                    raise ValueError(f"at byte {info.offset:,}")
                before = info.offset
                name = info.name.removeprefix("./")
                if info.isdir() or name.startswith(".") or "/." in name:
                    continue
                if info.isreg() and not info.issparse():
                    yield name, info.offset_data, info.size
                else:
                    left_out["links or devices"] += 1
            content.seek(tar.offset)
            # tarfile takes any damage between two members for the end
            if any(content.read(tarfile.BLOCKSIZE) or b"-"):
                raise ValueError(f"at byte {tar.offset:,}")
    except (tarfile.TarError, OSError, ValueError) as error:
        raise ConfigError(f"{file}: no tar file, or damaged ({first_line(error)})") from None


def _record(part: Part, name: str, where: str) -> dict[str, Any]:
    """What a member says: an object of JSON, or its text under its own name."""
    try:
        text = read(part).decode()
        value = parse_json(text) if name.lower() == "json" else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: cannot be read ({error})") from None
    return value if isinstance(value, dict) else {name.lower(): text.strip()}
