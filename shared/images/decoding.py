"""One image file to pixels."""

import contextlib
import io
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms.v2.functional import pil_to_tensor

from shared.process.errors import first_line

# What may be decoded. Pillow's other decoders are seldom used, and some start programs: Ghostscript runs the file itself.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")  # JPEG with MPO, PPM with PGM and PBM


class BadImage(ValueError):
    """An image that cannot be read, and why."""


def decode(source: Path | bytes, at_least: int | None = None) -> Image.Image:
    """An image in RGB and upright, whatever it was stored as.

    EXIF rotation is applied; palettes, greys and CMYK are converted; 16-bit greys are scaled to 8; transparency is
    dropped; of an animation the first frame is taken. `transformers` pipelines do the same, but clip 16-bit greys.

    Args:
        source: a file, or its bytes.
        at_least: height and width in pixels below which a JPEG is not to be shrunk while it is decoded, which is much
            faster for photographs; None decodes in full.

    Raises:
        BadImage: it is empty, cut off, too large, or no image.
    """
    try:
        image: Image.Image = _open(source)
        if at_least is not None and min(image.size) >= 2 * at_least:
            image.draft(None, (at_least, at_least))  # type: ignore[arg-type]  # None: keep the mode
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):
            grey = np.asarray(image)
            if grey.min() < 0 or grey.max() > 0xFFFF or (image.mode == "I" and 0 < grey.max() <= 0xFF):
                raise BadImage("32-bit grey values, whose range is not known")
            image = Image.fromarray((grey >> 8).astype(np.uint8))
        if image.mode == "F":
            raise BadImage("floating-point values, whose range is not known")
        if image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")
        return image.convert("RGB")
    except BadImage:
        raise
    except FileNotFoundError:
        raise BadImage("no such file") from None
    except Image.DecompressionBombError:
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0) / 1e6
        raise BadImage(f"more than {limit:.0f} megapixels") from None
    except Exception as error:  # Pillow's plugins raise nearly anything on a damaged file
        empty = not (source.stat().st_size if isinstance(source, Path) and source.is_file() else len(bytes(source)))
        unknown = isinstance(error, Image.UnidentifiedImageError)
        known = f"not an image ({', '.join(FORMATS)})"
        reason = "the file is empty" if empty else known if unknown else first_line(error)[:100]
        raise BadImage(reason) from None


def _open(source: Path | bytes) -> Image.Image:
    return Image.open(source if isinstance(source, Path) else io.BytesIO(source), formats=FORMATS)


def decode_tensor(source: Path | bytes, at_least: int | None = None) -> torch.Tensor:
    """The pixels of `decode` as uint8 [3, height, width]. torchvision reads upright JPEGs: the same bits, but faster.

    torchvision prints its own line on stderr for damage that both decoders tolerate.

    Raises:
        BadImage: as `decode` does.
    """
    with contextlib.suppress(Exception):  # `decode` meets the same error again and names it
        with _open(source) as image:  # reads the header only
            shrinks = at_least is not None and min(image.size) >= 2 * at_least
            upright = image.format == "JPEG" and image.getexif().get(ExifTags.Base.Orientation, 1) == 1
        if upright and not shrinks:
            content = source.read_bytes() if isinstance(source, Path) else source
            return decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), mode=ImageReadMode.RGB)
    return pil_to_tensor(decode(source, at_least))
