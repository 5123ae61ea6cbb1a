"""Where records of conversations have images, and what names each."""

import re
from itertools import chain
from typing import Any

from shared.process.errors import ConfigError
from shared.text.forms import FORMS, IMAGE
from shared.text.images import IMAGES, is_image

MARK = "<image>"
# columns whose texts may have marks, in their order in a conversation
TEXTS = (
    *("system", "history", "instruction", "input", "prompt", "messages", "conversations"),
    *("completion", "output"),
)
KEYS = ("image", "path", "url", "image_url", "bytes")  # of a part that is an image


def take_images(record: dict[str, Any], form: str, where: str) -> tuple[dict[str, Any], list[Any]]:
    """(the record, with IMAGE in its texts where an image stands; what names each image, in
    that order).

    An image is a part of a message's content, which names it or takes the next of the column; or a
    mark `<image>` in a text, which takes the next of the column `images` or `image`.

    Args:
        form: of `text.forms`, or the column of a prompt; marks count in its columns alone.

    Raises:
        ConfigError: there are two columns, or one has more or fewer images than the texts have
            places for.
    """
    if all(record.get(name) for name in IMAGES):
        raise ConfigError(f"{where}: has images in both columns {' and '.join(IMAGES)}: keep one")
    column = next((name for name in IMAGES if record.get(name)), None)
    listed = [] if column is None else record[column]
    listed = listed if isinstance(listed, list) else [listed]
    references: list[Any] = []  # None: the next of the column

    def replaced(value: Any) -> Any:
        if isinstance(value, str) and column is not None:
            references.extend([None] * value.count(MARK))
            return value.replace(MARK, IMAGE)
        if isinstance(value, list):
            return [replaced(entry) for entry in value]
        if not isinstance(value, dict):
            return value
        if is_image(value):
            references.append(next((value[key] for key in KEYS if value.get(key)), None))
            return {"type": "text", "text": IMAGE}
        return {key: v if key == "tool_calls" else replaced(v) for key, v in value.items()}

    of_form = [*chain(*FORMS.get(form, [("system", form)]))]
    names = [name for name in dict.fromkeys((*TEXTS, form)) if name in record and name in of_form]
    texts = {name: replaced(record[name]) for name in names}
    places = references.count(None)
    if places != len(listed):
        raise ConfigError(
            f"{where}: {len(listed)} image(s) in the column {column or IMAGES[0]!r}, but "
            f"{places} place(s) for them: write {MARK} in the texts where each of them stands"
        )
    rest = iter(listed)
    others = {name: value for name, value in record.items() if name not in IMAGES}
    return others | texts, [
        next(rest) if reference is None else reference for reference in references
    ]


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as chat templates take images: content with IMAGE as a list of parts."""
    return [
        {**message, "content": _parts(message["content"])}
        if IMAGE in str(message.get("content"))
        else message
        for message in messages
    ]


def _parts(content: str) -> list[dict[str, str]]:
    return [
        {"type": "image"} if piece == IMAGE else {"type": "text", "text": piece}
        for piece in re.split(f"({IMAGE})", content)
        if piece
    ]
