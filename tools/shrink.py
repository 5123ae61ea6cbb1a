"""Copy images once with their short side reduced, so that every epoch of a training decodes less.

python -m shared shrink photos photos-256                          # class folders
python -m shared shrink photos/train.csv photos/val.csv photos-256  # what lists name
python -m shared shrink shards/train-*.tar shards-256 --size 320

Names, order and labels stay, so the same seed trains on the same images in the same order. Images
that are small already keep their bytes, and so do images that cannot be made smaller without a
doubt: GIF, TIFF, AVIF, JPEG 2000, palettes, CMYK, 16 bits, animations. Pixels of JPEG and WebP are
compressed a second time, at quality 95. EXIF's rotation is applied and EXIF left out; colour
profiles stay. Hidden files are not copied.
"""

import argparse
import io
import os
import shlex
import shutil
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps
from tqdm import tqdm

from shared.data.loader import parallel_map
from shared.data.records import kind as kind_of
from shared.data.records import read_records
from shared.extras import tars as shards
from shared.images.decoding import (
    FORMATS,
    SUFFIXES,
    BadImage,
    Part,
    Source,
    check,
    decode,
    is_deep,
    read,
)
from shared.images.options import ImageConfig
from shared.images.sources import column_of
from shared.process.errors import ConfigError
from shared.process.files import discard, new_folder

# The formats that are made smaller, and how they are written.
WRITTEN: dict[str, dict[str, Any]] = {
    "BMP": {},
    "JPEG": {"quality": 95},
    "PNG": {},
    "PPM": {},
    "WEBP": {"quality": 95},
}
SMALLER = "made smaller"


@dataclass
class Plan:
    """What is copied, by its name in the output."""

    images: dict[str, Path] = field(default_factory=dict)
    tars: dict[str, Path] = field(default_factory=dict)
    others: dict[str, Path] = field(default_factory=dict)

    def add(self, name: str, path: Path) -> None:
        """Add a file that no list names."""
        ending = path.suffix.lower()
        kind = self.tars if ending == ".tar" else self.images if ending in SUFFIXES else self.others
        kind[name] = path


def plan_of(sources: list[Path], config: ImageConfig) -> Plan:
    """All files of one folder, or tar files and lists with the images that these name.

    Raises:
        ConfigError: a source that does not exist, an image that a list names elsewhere than below
            its own folder, two files that would have the same name.
    """
    plan = Plan()
    if sources[0].is_dir():
        if len(sources) > 1:
            raise ConfigError(f"{sources[0]}: a folder is copied alone: give one, or files")
        for path in _below(sources[0]):
            plan.add(str(path.relative_to(sources[0])), path)
        return plan
    for source in sources:
        if not source.is_file():
            raise ConfigError(f"{source}: no such file, and no folder that is given alone")
        if source.name in plan.tars | plan.others:
            raise ConfigError(f"{source}: another file has this name, too: copy them apart")
        if source.suffix.lower() == ".tar":
            plan.tars[source.name] = source
            continue
        plan.others[source.name] = source
        for where, record in read_records([source]):
            named = record[column_of(record, config, "image", where)]
            if not isinstance(named, str) or not named:
                raise ConfigError(f"{where}: the image is {kind_of(named)}, expected a path")
            name = os.path.normpath(named)
            path = source.parent / name
            if os.path.isabs(name) or name.startswith(".."):
                raise ConfigError(
                    f"{where}: {name} is not below {source.parent}: the copied list would still "
                    "name the large image; name images by paths from the list's folder"
                )
            if plan.images.setdefault(name, path) != path:
                raise ConfigError(f"{where}: {name} is named by a list of another folder, too")
    return plan


def _below(root: Path) -> Iterator[Path]:
    """All files, sorted, hidden ones left out. Links are followed."""
    seen = set()

    def refuse(error: OSError) -> None:
        raise ConfigError(f"{error.filename}: {error.strerror}")

    for place, folders, names in os.walk(root, followlinks=True, onerror=refuse):
        real = os.path.realpath(place)
        if real in seen:
            raise ConfigError(f"{place}: a link to a folder that is copied, too: remove one")
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in sorted(names) if not name.startswith("."))


# One image ----------------------------------------------------------------------------------------


def shrink(content: bytes, size: int) -> tuple[bytes, str]:
    """(an image with a short side of at most `size` pixels, what was done to it).

    Raises:
        BadImage: it cannot be decoded.
    """
    try:
        return _shrink(content, size)
    except BadImage:
        raise
    except Exception:  # Pillow's plugins raise nearly anything on a damaged file
        decode(content)  # meets the same error, and names it
        raise


def _shrink(content: bytes, size: int) -> tuple[bytes, str]:
    image: Image.Image = Image.open(io.BytesIO(content), formats=FORMATS)
    if min(image.size) <= size:
        return content, "small already"
    # MPO: several pictures of a camera, of which training takes the first
    kind = "JPEG" if image.format == "MPO" else str(image.format)
    if (
        kind not in WRITTEN
        or image.mode not in ("L", "LA", "RGB", "RGBA")
        or is_deep(image)
        or "transparency" in image.info
        or (kind != "JPEG" and getattr(image, "is_animated", False))
    ):
        return content, f"kept as they are ({kind} {image.mode})"
    check(content)  # Pillow reads JPEGs whose end was not written
    profile = image.info.get("icc_profile", b"")
    long = max(size, round(size * max(image.size) / min(image.size)))
    # JPEGs are decoded at 1/2, 1/4 or 1/8 if that leaves twice the pixels that are needed
    is_wide = image.width > image.height
    image.draft(None, (2 * long, 2 * size) if is_wide else (2 * size, 2 * long))  # type: ignore[arg-type]
    image = ImageOps.exif_transpose(image)
    edges = (long, size) if image.width > image.height else (size, long)
    # Each band by itself: training drops the transparency, and Pillow would blacken what is below.
    bands = [
        band.resize(edges, Image.Resampling.BICUBIC, reducing_gap=2.0)
        for band in (image.split() if image.mode in ("LA", "RGBA") else [image])
    ]
    made = Image.merge(image.mode, bands) if len(bands) > 1 else bands[0]
    made.info.clear()  # Pillow would write comments and the like again
    options = WRITTEN[kind] | ({"lossless": True} if b"VP8L" in content else {})
    into = io.BytesIO()
    made.save(into, kind, icc_profile=profile, **options)
    return into.getvalue(), "made smaller"


@dataclass(frozen=True)
class Task:
    """An image to be copied."""

    source: Source
    where: str
    copy: Path | None  # None: into a tar file, by the process that asks


@dataclass(frozen=True)
class Done:
    """A copied image."""

    content: bytes  # for a tar file
    before: int  # bytes
    after: int
    what: str


def _do(task: Task, size: int, skip_bad: bool) -> Done:
    """Copy an image.

    Raises:
        ConfigError: it is damaged and not to be skipped, or the disk does not take it.
    """
    content = b""  # of a file that does not exist: training skips an empty one, too
    try:
        try:
            content = read(task.source)
            made, what = shrink(content, size)
        except (BadImage, FileNotFoundError) as error:
            if not skip_bad:
                reason = getattr(error, "strerror", error)
                raise ConfigError(
                    f"{task.where}: {reason}; repair it or add --skip_bad_images"
                ) from None
            made, what = content, "damaged, kept as they are"
        if task.copy:
            task.copy.parent.mkdir(parents=True, exist_ok=True)
            task.copy.write_bytes(made)
    except OSError as error:
        raise ConfigError(f"{error.filename or task.where}: {error.strerror}") from None
    return Done(b"" if task.copy else made, len(content), len(made), what)


# All of them --------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What was done so far."""

    whats: Counter[str] = field(default_factory=Counter)
    before: int = 0  # bytes
    after: int = 0

    def add(self, done: Done) -> bytes:
        self.whats[done.what] += 1
        self.before += done.before
        self.after += done.after
        return done.content


def copy_all(plan: Plan, folder: Path, config: ImageConfig, size: int) -> Tally:
    """Copy all files of a plan into `folder`.

    Raises:
        ConfigError: no images, one that is damaged and not to be skipped, or a damaged tar file.
    """
    find = partial(shards.list_file, config=config)
    tars = list(plan.tars.values())
    members: list[list[Task]] = []  # the images of each tar file, as they lie there
    found = parallel_map(find, tars, None if len(tars) > 1 else 1)
    for path, (images, _) in zip(tars, found, strict=True):
        ordered = sorted(images, key=lambda image: image[3])
        members.append(
            [Task(Part(path, *at), f"{name}.{end}", None) for name, end, _, at in ordered]
        )
    tasks = [task for inside in members for task in inside]
    tasks += [Task(path, str(path), folder / name) for name, path in plan.images.items()]
    if not tasks:
        raise ConfigError("no images found there: --help says what is read")
    work = partial(_do, size=size, skip_bad=config.skip_bad_images)
    bar = tqdm(parallel_map(work, tasks, None), "shrinking", len(tasks), unit="image", disable=None)
    tally = Tally()
    contents = map(tally.add, bar)
    for name, path in plan.others.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
    for name, inside in zip(plan.tars, members, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        repack([task.source for task in inside], contents, folder / name)
    for _ in contents:  # these files are written by the processes
        pass
    return tally


def repack(parts: list[Any], contents: Iterator[bytes], copy: Path) -> None:
    """Copy a tar file with other contents of some members. All else stays, byte for byte.

    Args:
        parts: these members, see `Part`, as they lie in the file.
        contents: of each; not more are taken.
    """
    with parts[0].path.open("rb") as old, copy.open("wb") as new:
        for part in parts:
            content = next(contents)
            new.write(old.read(part.offset - tarfile.BLOCKSIZE - old.tell()))
            header = bytearray(old.read(tarfile.BLOCKSIZE))
            if tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").size != part.size:
                raise ConfigError(f"{part.path}: the size of a member is in an extended header")
            header[124:136] = b"%011o\0" % len(content)
            header[148:156] = b" " * 8  # as which the checksum counts itself
            header[148:156] = b"%06o\0 " % sum(header)
            new.write(header + content + bytes(-len(content) % tarfile.BLOCKSIZE))
            old.seek(part.size + -part.size % tarfile.BLOCKSIZE, os.SEEK_CUR)
        shutil.copyfileobj(old, new)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sources", nargs="+", type=Path, help="a folder, or tar files, or lists of images"
    )
    parser.add_argument("output", type=Path, help="folder of the copy, not there yet")
    parser.add_argument("--size", type=int, default=256, help="short side in pixels (256)")
    parser.add_argument(
        "--skip_bad_images", action="store_true", help="copy damaged images as they are, and go on"
    )
    parser.add_argument("--image_column", help="as the template has it")
    parser.add_argument("--label_column", help="as the template has it")
    options = parser.parse_args()
    output: Path = options.output
    if options.size < 1:
        raise ConfigError(f"--size must be at least 1, not {options.size}")
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists: choose another folder, nothing is overwritten")
    if any(source.resolve() in output.resolve().parents for source in options.sources):
        raise ConfigError(f"{output} lies in the folder that is copied: choose another one")
    config = ImageConfig(
        image_column=options.image_column,
        label_column=options.label_column,
        skip_bad_images=options.skip_bad_images,
    )
    plan = plan_of(options.sources, config)
    temporary = output.with_name(f".tmp-{output.name}")
    try:
        new_folder(temporary)
        tally = copy_all(plan, temporary, config, options.size)
        os.sync()  # once: a million files, one by one, would take an hour
        temporary.rename(output)
    except ConfigError as error:
        raise error.with_traceback(None) from None  # whose frames keep processes that still write
    except OSError as error:
        raise ConfigError(f"{error.filename or output}: {error.strerror}") from None
    finally:
        discard(temporary)
    print(f"{sum(tally.whats.values()):,} images:")
    for what, count in tally.whats.most_common():
        print(f"  {count:,} {what}")
    print(f"{tally.before / 1e6:,.1f} MB before, {tally.after / 1e6:,.1f} MB after")
    print("Train with the same flags, but on the copy:")
    print(f"  {flag_of(options.sources, plan, output)}")


def flag_of(sources: list[Path], plan: Plan, output: Path) -> str:
    """What names the copy on the command line of the template."""
    if sources[0].is_dir():
        return f"--train_dir {output}" if plan.images else f"--train_file {output}"
    flags: dict[str, list[str]] = {}
    for source in sources:
        flag = "--validation_file" if shards.is_to_validate(source) else "--train_file"
        flags.setdefault(flag, []).append(shlex.quote(str(output / source.name)))
    return " ".join(" ".join([flag, *names]) for flag, names in flags.items())


if __name__ == "__main__":
    main()
