"""The forms of conversations that people have, read into one `Example`."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.data import records
from shared.data.records import kind
from shared.process.errors import ConfigError

Messages = list[dict[str, Any]]

ROLES = ["assistant", "system", "tool", "user"]
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ROLES}
FORMS = {  # form: the columns that tell it; the first match counts
    "chat messages": ("messages",),
    "ShareGPT conversations": ("conversations",),
    "prompt and completion": ("prompt", "completion"),
    "Alpaca instructions": ("instruction", "output"),
    "plain text": ("text",),
}


@dataclass(frozen=True)
class Example:
    """A record: either messages for the chat template, or prompt + completion, joined as they are.

    The loss does not count an assistant's turn with "weight": 0.
    """

    messages: Messages | None = None
    tools: Messages | None = None  # that the assistant may call, as chat templates take them
    prompt: str = ""
    completion: str = ""
    continues: bool = False  # in the next record, so no end-of-text is added


def recognise(record: dict[str, Any], where: str) -> str:
    """The form of a record, a key of FORMS. Raises ConfigError if its columns match none."""
    for form, columns in FORMS.items():
        if all(column in record for column in columns):
            return form
    known = "; ".join(f"{form}: {' + '.join(columns)}" for form, columns in FORMS.items())
    raise ConfigError(f"{where}: columns {', '.join(map(str, record)) or 'none'} are of no known form ({known})")


def read_example(record: dict[str, Any], form: str, where: str) -> Example:
    """A record of a known form as an `Example`.

    Raises:
        ConfigError: a missing, null or mistyped field, an unknown role, or no turn of the assistant.
    """
    for column in FORMS[form]:
        if column not in record:
            raise ConfigError(f"{where}: {column!r} is missing, but the first record has it ({form}): use one form")
    if form == "plain text":
        return Example(completion=_text(record, "text", where), continues=records.CONTINUES in record)
    if form == "prompt and completion" and not isinstance(record["prompt"], list):
        return Example(prompt=_text(record, "prompt", where), completion=_text(record, "completion", where))

    has_system = record.get("system") and form in ("Alpaca instructions", "ShareGPT conversations")
    system: Messages = [{"role": "system", "content": _text(record, "system", where)}] if has_system else []
    if form == "Alpaca instructions":
        question = _text(record, "instruction", where)
        if record.get("input"):
            question += "\n\n" + _text(record, "input", where)
        messages = system
        for asked, answer in [*_history(record, where), [question, _text(record, "output", where)]]:
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    elif form == "ShareGPT conversations":
        messages = system
        for number, turn in enumerate(_list(record, "conversations", where), 1):
            if (role := str(turn.get("from"))) not in _SHAREGPT_ROLES:
                raise ConfigError(f"{where}: turn {number} is from {role!r}, not {', '.join(_SHAREGPT_ROLES)}")
            others = {key: value for key, value in turn.items() if key not in ("from", "value")}
            messages.append({**others, "role": _SHAREGPT_ROLES[role], "content": turn.get("value")})
    elif form == "prompt and completion":
        prompt = [{**message, "weight": 0} for message in _list(record, "prompt", where)]
        messages = prompt + _list(record, "completion", where)
    else:
        messages = _list(record, "messages", where)
    tools = record.get("tools")
    if not tools or (isinstance(tools, str) and tools.strip() in ("", "null")):
        return Example(_checked(messages, where))
    return Example(_checked(messages, where), _list(record, "tools", where) or None)


def _text(record: dict[str, Any], column: str, where: str) -> str:
    if not isinstance(record[column], str):
        raise ConfigError(f"{where}: {column!r} is {kind(record[column])}, expected text")
    return record[column]


def _from_cell(value: Any) -> Any:
    """CSV has no lists: people put JSON into a cell."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return records.parse_json(value)
    return value


def _history(record: dict[str, Any], where: str) -> list[list[str]]:
    """Alpaca's earlier turns: pairs of a question and its answer."""
    pairs = _from_cell(record.get("history")) or []
    if not isinstance(pairs, list) or not all(isinstance(p, list) and [*map(type, p)] == [str, str] for p in pairs):
        raise ConfigError(
            f"{where}: 'history' is {kind(pairs)}, not [question, answer] pairs: rename it if it is something else"
        )
    return pairs


def _list(record: dict[str, Any], column: str, where: str) -> Messages:
    value = _from_cell(record[column])
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ConfigError(f"{where}: {column!r} is {kind(value)}, expected a list of objects")
    return value


def _checked(messages: Messages, where: str) -> Messages:
    """The messages as chat templates expect them: content is text, the arguments of calls are objects."""
    read = []
    for number, given in enumerate(messages, 1):
        message = {key: value for key, value in given.items() if value is not None or key == "content"}
        parts, calls = message.get("content"), message.get("tool_calls")
        if isinstance(parts, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
            message["content"] = "".join(part["text"] for part in parts)
        if message.get("role") == "developer":
            message["role"] = "system"
        if message.get("role") not in ROLES:
            raise ConfigError(f"{where}: message {number} has role {message.get('role')!r}, not {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str) and not calls:
            raise ConfigError(f"{where}: content of message {number} is {kind(message.get('content'))}, expected text")
        if message.get("weight", 1) not in (0, 1):
            raise ConfigError(f"{where}: weight of message {number} is {message['weight']!r}, not 0 or 1")
        if message.get("train") is False or message.get("loss") is False:  # other trainers' names for weight 0
            message["weight"] = 0
        if isinstance(calls, list):
            message["tool_calls"] = [with_arguments(call, _parsed) for call in calls]
        read.append(message)
    if not any(message["role"] == "assistant" for message in read):
        raise ConfigError(f"{where}: no message has the role assistant, so there is nothing to learn")
    return read


def with_arguments(call: Any, convert: Callable[[Any], Any]) -> Any:
    """A tool call with converted arguments."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": with_arguments(call["function"], convert)}
    return {**call, "arguments": convert(call["arguments"])} if "arguments" in call else call


def _parsed(arguments: Any) -> Any:
    """OpenAI's files hold arguments as a JSON string, which most templates would encode once more."""
    value = _from_cell(arguments)
    return value if isinstance(value, dict) else arguments
