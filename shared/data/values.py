"""Values as JSON has them, whatever file they come from."""

import json
import re
from decimal import Decimal
from typing import Any

from shared.process.errors import ConfigError, first_line


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError where json would keep the last of two equal keys."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key is there twice: {', '.join(key for key, _ in pairs)}")
    return found


_JSON = json.JSONDecoder(object_pairs_hook=_object)


def parse_json(text: str) -> Any:
    """JSON that tokenizers can take. Raises ValueError or RecursionError."""
    value = _JSON.decode(text)
    if re.search(r"\\u[dD]", text):  # json accepts half of a surrogate pair; encoding refuses it
        json.dumps(value, ensure_ascii=False).encode()
    return value


def as_json_lines(record: dict[str, Any], types: dict[str, Any], where: str) -> dict[str, Any]:
    """A record with the values that JSON lines would hold.

    Args:
        types: Arrow's, by column.

    Raises:
        ConfigError: a text that is not valid JSON, or a map that is no object of it.
    """
    plain = {}
    for name, value in record.items():
        try:
            plain[name] = _plain(value, types.get(name))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{where}: {name!r} is not valid JSON ({first_line(error)})"
            ) from None
    return plain


def _plain(value: Any, arrow_type: Any) -> Any:
    """A value of an Arrow type (None: unknown) as JSON lines hold it.

    JSON (https://arrow.apache.org/docs/format/CanonicalExtensions.html#json) is parsed. Structs
    lose their nulls, since Arrow gives each the keys of all others; null content of a message
    stays. A map is an object, and its keys are text. Decimals are numbers; dates are text.
    """
    if getattr(arrow_type, "extension_name", "") == "arrow.json":
        return None if value is None else parse_json(value)
    if isinstance(value, list) and hasattr(arrow_type, "key_type"):
        items = [(key, _plain(entry, arrow_type.item_type)) for key, entry in value]
        return _object([(k if isinstance(k, str) else json.dumps(k), v) for k, v in items])
    if isinstance(value, list) and value and not isinstance(value[0], int | float):  # often long
        of_entries = getattr(arrow_type, "value_type", None)
        return [_plain(entry, of_entries) for entry in value]
    if isinstance(value, dict):
        types = {field.name: field.type for field in getattr(arrow_type, "fields", ())}
        held = {key: entry for key, entry in value.items() if entry is not None or key == "content"}
        return {key: _plain(entry, types.get(key)) for key, entry in held.items()}
    if isinstance(value, Decimal):
        return int(value) if value == int(value) else float(value)
    return value if isinstance(value, str | float | int | bytes | list | None) else str(value)
