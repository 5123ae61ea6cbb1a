"""The images that conversations name: found, checked, kept as files, and decoded."""

import base64
import binascii
import hashlib
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from shared.data.files import is_url
from shared.data.remote import read_once
from shared.images.decoding import BadImage, check, decode, size_of
from shared.process.errors import ConfigError
from shared.process.files import cache_dir
from shared.vision.options import VisionConfig

DATA = re.compile(r"data:image/[\w.+-]+;base64,")
PLACE = re.compile(r"(?::\d+|: (?:row|record) \d+)$")  # of a record in its file


class Picture(NamedTuple):
    """An image as it is kept with a sample."""

    path: str
    width: int  # in pixels, upright
    height: int


def find(said: Any, where: str, config: VisionConfig) -> Picture:
    """The image that a record names: a path, bytes, a `data:` URL, or a URL.

    A path counts from the folder of the record's file, and may not leave it. Bytes, and what is
    downloaded, are kept in the cache.

    Args:
        said: a text, bytes, or an object with `bytes`, `path` or `url`.
        where: the place of the record.

    Raises:
        ConfigError: there is no such image, or it may not be read.
        BadImage: it is damaged.
    """
    if isinstance(said, dict):
        said = next((said[key] for key in ("bytes", "path", "url") if said.get(key)), None)
    if isinstance(said, str) and (prefix := DATA.match(said)):
        try:
            said = base64.b64decode(said[prefix.end() :], validate=True)
        except binascii.Error as error:
            raise BadImage(f"a data: URL that is not valid base64 ({error})") from None
    if isinstance(said, str) and is_url(said):
        if not config.fetch_images:
            raise ConfigError(
                f"{where}: the image {said} is on a server: add --fetch_images to download it"
            )
        said = read_once(said)
    if isinstance(said, bytes):
        path = _kept(said)
    elif isinstance(said, str):
        path = _inside(said, where)
    else:
        raise ConfigError(f"{where}: an image is {type(said).__name__}, not a path, bytes or a URL")
    check(path, in_full=config.skip_bad_images)
    return Picture(str(path), *size_of(path))


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
            "file's folder, and may not leave it"
        )
    return path


def _kept(content: bytes) -> Path:
    name = hashlib.sha256(content).hexdigest()
    path = cache_dir() / "pictures" / name[:2] / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # several processes may write the same
        temporary = path.with_name(f"{name}.{id(content)}.tmp")
        temporary.write_bytes(content)
        temporary.replace(path)
    return path


def shrunk(width: int, height: int, most: int | None) -> tuple[int, int]:
    """Width and height with at most so many pixels, in about the same ratio."""
    scale = math.sqrt(most / (width * height)) if most else 1.0
    if scale >= 1:
        return width, height
    return max(1, int(width * scale)), max(1, int(height * scale))


def open_picture(picture: Picture, most: int | None) -> Image.Image:
    """The image in RGB, upright, shrunk to at most so many pixels.

    Raises:
        BadImage: it cannot be read, or has another size than before.
    """
    image = decode(Path(picture.path))
    if image.size != (picture.width, picture.height):
        raise BadImage(
            f"it is {image.width} x {image.height} pixels now, and was {picture.width} x "
            f"{picture.height} when the data were prepared"
        )
    size = shrunk(*image.size, most)
    return image if size == image.size else image.resize(size, Image.Resampling.BICUBIC)
