"""The images that conversations name: found, checked, kept as files, and decoded."""

import base64
import hashlib
import math
import os
import re
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from shared.data.files import is_url
from shared.extras.remote import read_once
from shared.images.decoding import BadImage, check, decode, read
from shared.process.errors import ConfigError, first_line
from shared.process.files import cache_dir
from shared.process.printing import label
from shared.text.options import VisionConfig

DATA = re.compile(r"data:image/[\w.+-]+;base64,")
MOST = 2**26  # bytes of an image that is downloaded
PLACE = re.compile(r"(?::\d+|: (?:row|record) \d+)$")  # of a record in its file


class Picture(NamedTuple):
    """An image as it is kept with a sample."""

    path: str
    width: int  # in pixels, upright
    height: int
    digest: int  # of its first bytes and its size


def find(reference: Any, where: str, config: VisionConfig) -> Picture:
    """The image that a record names: a path, bytes, a `data:` URL, or a URL.

    A path counts from the folder of the record's file, and may not leave it. Bytes, and what is
    downloaded, are kept in the cache.

    Args:
        reference: a text, bytes, or an object with `bytes`, `path` or `url`.
        where: the place of the record.

    Raises:
        ConfigError: it may not be read, or is named in a way that nobody understands.
        BadImage: there is no such image, or it is damaged.
    """
    try:
        path = _path_of(reference, where, config)
        size, _, _ = check(path)
        digest = zlib.crc32(read(path)[: 2**16]) ^ path.stat().st_size
    except (OSError, ValueError) as error:  # and of base64
        raise BadImage(first_line(error)) from None
    return Picture(str(path), *size, digest)


def _path_of(reference: Any, where: str, config: VisionConfig) -> Path:
    if isinstance(reference, dict):
        reference = next(
            (reference[key] for key in ("bytes", "path", "url") if reference.get(key)), None
        )
    if isinstance(reference, str) and (prefix := DATA.match(reference)):
        reference = base64.b64decode(reference[prefix.end() :], validate=True)
    if isinstance(reference, str) and is_url(reference):
        if not config.fetch_images or not reference.startswith(("http://", "https://")):
            raise ConfigError(
                f"{where}: the image {label(reference)} is not a local file; --fetch_images "
                "downloads http and https URLs"
            )
        try:
            reference = read_once(reference, MOST)
        except ConfigError as error:  # the server refuses
            raise BadImage(str(error)) from None
    if isinstance(reference, bytes):
        return _kept(reference)
    if isinstance(reference, str):
        return _inside(reference, where)
    raise ConfigError(
        f"{where}: an image is {type(reference).__name__}, not a path, bytes or a URL"
    )


def _inside(name: str, where: str) -> Path:
    file = Path(PLACE.sub("", where))
    if not file.is_file():
        raise ConfigError(
            f"{where}: the image {name!r} is named by a path, but not in a local file"
        )
    folder = file.parent.resolve()
    path = (folder / name).resolve()
    if not path.is_relative_to(folder):
        raise ConfigError(
            f"{where}: the image {name!r} is outside of {folder}: paths count from the data "
            "file's folder, and may not leave it, nor may symbolic links"
        )
    if not path.is_file():  # a pipe would wait for ever
        raise BadImage("no such file")
    return path


def _kept(content: bytes) -> Path:
    name = hashlib.sha256(content).hexdigest()
    path = cache_dir() / "pictures" / name[:2] / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")  # several processes may write the same
        temporary.write_bytes(content)
        temporary.replace(path)
    return path


def shrunk(width: int, height: int, max_pixels: int | None) -> tuple[int, int]:
    """Width and height with at most so many pixels, in about the same ratio."""
    scale = math.sqrt(max_pixels / (width * height)) if max_pixels else 1.0
    if scale >= 1:
        return width, height
    return max(1, int(width * scale)), max(1, int(height * scale))


def open_picture(picture: Picture, max_pixels: int | None) -> Image.Image:
    """The image in RGB, upright, shrunk to at most so many pixels.

    Raises:
        ConfigError: it cannot be read, or has another size than before.
    """
    try:
        image = decode(Path(picture.path))
    except BadImage as error:
        raise ConfigError(f"{picture.path}: {error}") from None
    if image.size != (picture.width, picture.height):
        raise ConfigError(
            f"{picture.path}: it is {image.width} x {image.height} pixels now, and was "
            f"{picture.width} x {picture.height} when the data were prepared: touch the data file "
            "to prepare it anew"
        )
    size = shrunk(*image.size, max_pixels)
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)
