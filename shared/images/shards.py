"""Images in tar files, read where they lie: nothing is unpacked. A list of what is in each file is made once, and kept.

Two kinds are known: samples of WebDataset, `000001.jpg` beside `000001.cls` or a `000001.json` that holds the label; and
class folders, `cat/1.jpg`. Other members are counted by their endings. Hidden ones, links and devices are not looked at.
"""

import json
import os
import re
import tarfile
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from shared.config.parse import cache_dir
from shared.data import prepared, records
from shared.data.files import RECORD, find_files
from shared.data.labels import read_labels
from shared.data.loader import parallel_map
from shared.images.decoding import SUFFIXES
from shared.images.options import ImageConfig
from shared.images.sources import VALIDATION, Found, by_ending, column_of, count_others, name_of
from shared.process.collectives import on_main
from shared.process.errors import ConfigError, first_line
from shared.process.printing import print_main


def index(config: ImageConfig) -> Path | None:
    """The folder with the list of all images in a config's tar files; None if it names none. Every rank calls this.

    Raises:
        ConfigError: a tar file is damaged, or what is in it has no label.
    """
    named: tuple[list[Path], list[Path]] = [], []  # to train on, to validate on; filled on the main rank only

    def find() -> str | None:
        named[0].extend(_tars(config.train_file, "train_file"))
        named[1].extend(_tars(config.validation_file, "validation_file"))
        if named[0] and not named[1] and (config.validation_file or config.validation_dir):
            other = config.validation_dir or config.validation_file[0]
            raise ConfigError(f"to validate on {other}: no tar file, but --train_file names some")
        if len({_is_to_validate(file) for file in named[0]}) > 1 and not named[1]:
            raise ConfigError(
                f"--train_file {config.train_file[0]}: names tar files to validate on, too, "
                f"{next(filter(_is_to_validate, named[0]))} for one: give these as --validation_file"
            )
        return prepared.fingerprint(files=named, how=_how(config)) if named[0] else None

    key = on_main(find)
    if key is None:
        return None
    return prepared.build_once(cache_dir() / "images" / f"tars-{key}", lambda into: _join(*named, config, into))


def _tars(names: tuple[str, ...], flag: str) -> list[Path]:
    files = find_files(names, flag=flag, tars=True) if names else []
    tars = [file for file in files if file.suffix.lower() == ".tar"]
    if tars and len(tars) < len(files):
        other = next(file for file in files if file not in tars)
        print_main(f"--{flag}: of {len(files):,} files only the {len(tars):,} tar files are read, not {other}")
    return tars


def _is_to_validate(file: Path) -> bool:
    return not set(VALIDATION).isdisjoint(re.split("[^a-z]+", file.stem.lower()))


def _how(config: ImageConfig) -> list[Any]:
    return [config.image_column, config.label_column, config.problem_type, prepared.source_of("data", "images")]


def _join(train: list[Path], validation: list[Path], config: ImageConfig, into: Path) -> None:
    """Write the lists of all files as one, for `found`."""

    files = [*train, *validation]
    print_main(f"listing the images in {len(files):,} tar files once")
    folders = [*parallel_map(partial(_keep_list, config=config), files, None if len(files) > 1 else 1)]
    places = [np.load(folder / "places.npy") for folder in folders]
    lists = [json.loads((folder / "images.json").read_text(encoding="utf-8")) for folder in folders]
    counts = [*map(len, places)]
    paths = [os.fsencode(f"{file}/{name}") for file, each in zip(files, lists, strict=True) for name in each["names"]]
    np.save(into / "paths.npy", np.array(paths))
    lengths = np.repeat([len(os.fsencode(file)) for file in files], counts)
    np.save(into / "places.npy", np.column_stack([lengths, np.concatenate(places)]))
    np.save(into / "times.npy", np.repeat([file.stat().st_mtime_ns for file in files], counts))
    labels = [*chain.from_iterable(each["labels"] for each in lists)]
    held_out_from = sum(counts[: len(train)]) if validation else None
    left_out: Counter[str] = Counter()
    for each in lists:
        left_out.update(each["left_out"])
    content = {"labels": labels, "held_out_from": held_out_from, "left_out": left_out}
    (into / "images.json").write_text(json.dumps(content), encoding="utf-8")


def found(config: ImageConfig, folder: Path) -> Found:
    """The images of `index`. Call on the main rank."""
    known = json.loads((folder / "images.json").read_text(encoding="utf-8"))
    paths, places, times = (np.load(folder / f"{name}.npy") for name in ("paths", "places", "times"))

    def where(number: int) -> str:
        folder, _, name = os.fsdecode(paths[number]).rpartition("/")
        return f"{folder}/{name.partition('.')[0]}"

    return Found(
        name_of(config),
        read_labels(known["labels"], config.problem_type, where),
        paths.tolist(),
        known["held_out_from"],
        " ".join(config.validation_file),
        facts=np.column_stack([places[:, 2], times]),
        places=places,
        left_out=Counter(known["left_out"]),
    )


# One file -------------------------------------------------------------------------------------------------------------


def _keep_list(file: Path, config: ImageConfig) -> Path:
    """The folder with the list of one tar file, made now if it is not there."""
    name = f"tar-{prepared.fingerprint(file=file, how=_how(config))}"
    return prepared.keep(cache_dir() / "images" / name, partial(_list, file, config))


@dataclass
class Sample:
    """The members that have the same name up to its first dot."""

    images: dict[str, tuple[int, int]] = field(default_factory=dict)  # (first byte, bytes), by the rest of the name
    record: dict[str, Any] = field(default_factory=dict)  # what members beside them say, the label for one


def _list(file: Path, config: ImageConfig, into: Path) -> None:
    """Write first byte and bytes of each image in a tar file, [n, 2] int64, and names and labels."""
    names: list[str] = []
    places: list[tuple[int, int]] = []
    labels: list[Any] = []
    alone: list[str] = []
    above: set[str] = set()
    left_out: Counter[str] = Counter()
    for key, sample in _samples(file, config, left_out).items():
        where, images = f"{file}/{key}", sample.images
        if sample.record or config.label_column:
            column = column_of(sample.record, config, "label", where)
            label = sample.record[column]
            images = {rest: images[rest] for rest in images if config.image_column or f".{rest}".lower() in SUFFIXES}
            if len(images) > 1:
                raise ConfigError(f"{where}: several images ({', '.join(images)}): name one with --image_column")
            alone += [where] * (not images)
        elif images:
            if "/" not in key:
                raise ConfigError(f"{where}: an image without a label: neither {key}.cls, {key}.json nor a class folder")
            *folders, folder, _ = key.split("/")
            above.update(folders)
            label = folder
        names += [f"{key}.{rest}" for rest in images]
        places += images.values()
        labels += [label] * len(images)
    if not names:
        held = f"; it holds {by_ending(left_out)}" * bool(left_out)
        raise ConfigError(f"{file}: no images in it ({', '.join(SUFFIXES)}){held}")
    if "train" in above and (validation := above.intersection(VALIDATION)):
        raise ConfigError(f"{file}: holds train/ and {min(validation)}/; pack them apart, and add --validation_file")
    if alone:
        print_main(f"{file}: {len(alone):,} labels have no image, that of {alone[0]} for one")
    np.save(into / "places.npy", np.array(places, dtype=np.int64))
    content = {"names": names, "labels": labels, "left_out": left_out}
    (into / "images.json").write_text(json.dumps(content), encoding="utf-8")


def _samples(file: Path, config: ImageConfig, left_out: Counter[str]) -> dict[str, Sample]:
    """What a tar file holds, by the names up to their first dot. Members that are no images are counted in `left_out`."""
    samples: dict[str, Sample] = {}
    seen, odd = set(), []
    try:
        with file.open("rb") as content, tarfile.open(fileobj=content, mode="r:") as tar:
            before, size = -1, file.stat().st_size
            while info := tar.next():
                tar.members.clear()  # type: ignore[attr-defined]  # they would fill the memory
                if info.offset <= before or info.size < 0 or info.offset_data + info.size > size:
                    raise ValueError(f"at byte {info.offset:,}")
                before, name = info.offset, info.name.removeprefix("./")
                if info.isdir() or name.startswith(".") or "/." in name:
                    continue
                if not info.isreg() or info.issparse():
                    odd.append(name)
                    continue
                folder, slash, base = name.rpartition("/")
                stem, _, rest = base.partition(".")
                says = rest.lower() in ("cls", "json") or rest == config.label_column
                if not says and rest != config.image_column and (config.image_column or not name.lower().endswith(SUFFIXES)):
                    if not config.image_column:
                        left_out.update(count_others([base]))
                    continue
                where, sample = f"{file}/{name}", samples.setdefault(folder + slash + stem, Sample())
                if name in seen or info.size > RECORD:
                    raise ConfigError(f"{where}: {'is there twice' if name in seen else f'over {RECORD >> 20} MiB'}")
                seen.add(name)
                if says:
                    content.seek(info.offset_data)
                    sample.record |= _record(rest, content.read(info.size), where)
                else:
                    sample.images[rest] = info.offset_data, info.size
            content.seek(tar.offset)
            if any(content.read(tarfile.BLOCKSIZE) or b"-"):  # tarfile takes any damage between two members for the end
                raise ValueError(f"at byte {tar.offset:,}")
    except (tarfile.TarError, OSError, ValueError) as error:
        raise ConfigError(f"{file}: no tar file, or damaged ({first_line(error)})") from None
    if odd:
        print_main(f"{file}: {len(odd):,} links, devices or sparse files in it are not read, {odd[0]} for one")
    return samples


def _record(name: str, content: bytes, where: str) -> dict[str, Any]:
    """What a member says: an object of JSON, or its text under its own name."""
    try:
        text = content.decode()
        value = records.parse_json(text) if name.lower() == "json" else None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: cannot be read ({error})") from None
    return value if isinstance(value, dict) else {name.lower(): text.strip()}
