"""One image file to pixels."""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from PIL import ExifTags, Image, ImageOps
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2.functional import pil_to_tensor

from shared.process.errors import first_line

# What may be decoded. Pillow's other decoders are seldom used, and some start programs: Ghostscript
# runs the file itself.
# JPEG with MPO, PPM with PGM and PBM
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
# How their files end. The installed Pillow knows .jfif, .jpe, .apng, ...
SUFFIXES = tuple(
    sorted(end for end, kind in Image.registered_extensions().items() if kind in (*FORMATS, "MPO"))
)


class BadImage(ValueError):
    """An image that cannot be read, and why."""


@dataclass(frozen=True)
class Part:
    """A stretch of a file, in bytes: a member of a tar file."""

    path: Path
    offset: int
    size: int


Source = Path | bytes | Part  # of one image


def read(source: Source) -> bytes:
    """The bytes of an image."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, Path):
        return source.read_bytes()
    with source.path.open("rb") as file:
        file.seek(source.offset)
        return file.read(source.size)


def check(source: Source) -> tuple[tuple[int, int], str, int]:
    """Decode all of an image, to see whether it can be.

    Returns:
        ((width, height) in pixels of what `decode` gives, the mode of the file, 63 bits by which
        copies are found: of the pixels, and of a JPEG's last scan.)

    Raises:
        BadImage: it cannot, or it is a JPEG of which the end was not written.
    """
    # the cheapest way to read the whole file
    pixels, mode, size, kind = _decode(source, at_least=1)
    found = xxhash.xxh3_64(pixels.tobytes())
    if kind in ("JPEG", "MPO"):
        content = read(source)
        # the last scan of a JPEG never ends
        if content.rfind(b"\xff\xd9") < content.rfind(b"\xff\xda"):
            raise BadImage("the end of the file is missing")
        found.update(content[content.rfind(b"\xff\xda") :])
    return size, mode, found.intdigest() >> 1


def is_deep(image: Image.Image) -> bool:
    """Whether it has more than 8 bits a channel. Call before the image is loaded."""
    return ";16" in str(image.tile) or image.mode.startswith(("I", "F"))  # type: ignore[attr-defined]


def decode(source: Source, at_least: int | None = None) -> Image.Image:
    """An image in RGB and upright, whatever it was stored as.

    EXIF rotation is applied; palettes, greys and CMYK are converted; transparency is dropped; of an
    animation the first frame is taken. `transformers` pipelines do the same.

    Args:
        source: a file, a part of one, or its bytes.
        at_least: height and width in pixels below which a JPEG is not to be shrunk while it is
            decoded, which is much faster for photographs; None decodes in full.

    Raises:
        BadImage: it is empty, cut off, too large, of more than 8 bits, or no image.
    """
    return _decode(source, at_least)[0]


def _decode(
    source: Source, at_least: int | None
) -> tuple[Image.Image, str, tuple[int, int], str | None]:
    """(what `decode` gives; the mode of the file; its width and height if it were not shrunk; its
    format).
    """
    try:
        image: Image.Image = _open(source)
        mode, size, kind, shrunk = image.mode, image.size, image.format, None
        if at_least is not None and min(size) >= 2 * at_least:  # None: keep the mode
            shrunk = image.draft(None, (at_least, at_least))  # type: ignore[arg-type]
        if is_deep(image):  # who scales cameras' 12 bits by 16 learns black pictures
            raise BadImage("more than 8 bits a channel: convert it to 8, scaled by what is white")
        image.load()
        if shrunk and image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8):
            size = size[::-1]
        image = ImageOps.exif_transpose(image)
        if image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")
        return image.convert("RGB"), mode, size if shrunk else image.size, kind
    except BadImage:
        raise
    except FileNotFoundError:
        raise BadImage("no such file") from None
    except Image.UnidentifiedImageError:
        known = f"not an image ({', '.join(FORMATS)})"
        raise BadImage(known if read(source) else "the file is empty") from None
    except Exception as error:  # Pillow's plugins raise nearly anything on a damaged file
        raise BadImage(first_line(error)[:100]) from None


def _open(source: Source) -> Image.Image:
    return Image.open(
        source if isinstance(source, Path) else io.BytesIO(read(source)), formats=FORMATS
    )


def decode_tensor(source: Source, at_least: int | None = None) -> torch.Tensor:
    """The pixels of `decode` as uint8 [3, height, width]. torchvision reads upright JPEGs: the same
    bits, but faster.

    torchvision prints its own line on stderr for damage that both decoders tolerate.

    Raises:
        BadImage: as `decode` does.
    """
    with contextlib.suppress(Exception):  # `decode` meets the same error again and names it
        content = read(source)
        with _open(content) as image:  # reads the header only
            shrinks = at_least is not None and min(image.size) >= 2 * at_least
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
            if image.format == "JPEG" and not shrinks and not turned:
                pixels = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                return decode_jpeg(pixels, mode=ImageReadMode.RGB)
    return pil_to_tensor(decode(source, at_least))
