"""Whether records of conversations have images."""

from dataclasses import replace
from itertools import islice
from typing import Any

from shared.data import records
from shared.process.collectives import on_main
from shared.text import chat
from shared.text.options import RecordsConfig

IMAGES = ("images", "image")  # columns
LOOK = 100  # records of each source that are looked at


def see_images(options: RecordsConfig) -> bool:
    """Whether images are learned. Every rank calls this."""
    if options.is_demo or set(IMAGES) & set(options.allow_unused_columns):
        return False
    trained = [replace(of, validation_file=()) for of in options.sources().values()]
    sources = [records.open_sources(of, demo=chat.DEMO)[0] for of in trained]
    return on_main(lambda: any(_has_images(source.read()) for source in sources))


def is_image(part: Any) -> bool:
    """Whether a part of a message's content is an image."""
    return isinstance(part, dict) and str(part.get("type", "")) in ("image", "image_url")


def _has_images(found: records.Records) -> bool:
    """Whether one of the first records has images."""

    def search(value: Any) -> bool:
        if isinstance(value, dict):
            return is_image(value) or any(map(search, value.values()))
        return isinstance(value, list) and any(map(search, value))

    return any(
        any(record.get(name) for name in IMAGES) or search(record)
        for _, record in islice(found, LOOK)
    )
