"""The forms of conversations that people have, read into one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.data import records
from shared.data.records import kind
from shared.process.errors import ConfigError

# Forms -----------------------------------------------------------------------------------------------------------------

ROLES = ["assistant", "system", "tool", "user"]
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"} | {role: role for role in ROLES}
FORMS = {  # what a record is called, by the columns that it is known by; the first match counts
    "chat messages": ("messages",),
    "ShareGPT conversations": ("conversations",),
    "prompt and completion": ("prompt", "completion"),
    "Alpaca instructions": ("instruction", "output"),
    "plain text": ("text",),
}


@dataclass(frozen=True)
class Example:
    """A record in one of two shapes: messages for the chat template, or (prompt, completion) joined as they are.

    A turn of the assistant with "weight": 0 is not learned.
    """

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None  # that the assistant may call, as chat templates take them
    prompt: str = ""
    completion: str = ""
    goes_on: bool = False  # in the next record, so nothing ends here


def recognise(record: dict[str, Any], where: str) -> str:
    """The form of a record, a key of FORMS. Raises ConfigError when its columns are those of none."""
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
        if record.get(column) is None:
            if column in record:
                raise ConfigError(f"{where}: {column!r} is null")
            raise ConfigError(
                f"{where}: {column!r} is missing; the first record has it ({form}), and all are to have one form"
            )
    if form == "plain text":
        return Example(completion=_text(record["text"], "'text'", where), goes_on=records.GOES_ON in record)
    if form == "Alpaca instructions":
        instruction = _text(record["instruction"], "'instruction'", where)
        extra = _text(record.get("input") or "", "'input'", where)
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"{instruction}\n\n{extra}" if extra else instruction},
            {"role": "assistant", "content": _text(record["output"], "'output'", where)},
        ]
        return Example(_messages(_system(record, where) + messages, where), _tools(record, where))
    if form == "ShareGPT conversations":
        turns = _list(record["conversations"], "'conversations'", where)
        messages = [{"role": turn.get("from"), "content": turn.get("value")} for turn in turns]
        for number, message in enumerate(messages, 1):
            if message["role"] not in list(_SHAREGPT_ROLES):  # a list also takes what cannot be hashed
                raise ConfigError(f"{where}: turn {number} is from {message['role']!r}, not {', '.join(_SHAREGPT_ROLES)}")
            message["role"] = _SHAREGPT_ROLES[message["role"]]
        return Example(_messages(_system(record, where) + messages, where), _tools(record, where))
    if form == "prompt and completion":
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            shown = [{**message, "weight": 0} for message in _list(prompt, "'prompt'", where)]
            return Example(_messages(shown + _list(completion, "'completion'", where), where), _tools(record, where))
        return Example(prompt=_text(prompt, "'prompt'", where), completion=_text(completion, "'completion'", where))
    return Example(_messages(_list(record["messages"], "'messages'", where), where), _tools(record, where))


def _text(value: Any, what: str, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {what} is {kind(value)}, expected text")
    return value


def _system(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    system = record.get("system")
    return [{"role": "system", "content": _text(system, "'system'", where)}] if system else []


def _tools(record: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
    tools = record.get("tools")
    if not tools or (isinstance(tools, str) and tools.strip() in ("", "null")):
        return None
    return _list(tools, "'tools'", where) or None


def _list(value: Any, what: str, where: str) -> list[dict[str, Any]]:
    if isinstance(value, str):  # CSV has no lists: people put JSON into a cell
        try:
            value = records.parse_json(value)
        except (ValueError, RecursionError):
            raise ConfigError(f"{where}: {what} is text, expected a list of objects") from None
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ConfigError(f"{where}: {what} is not a list of objects")
    return value


def _messages(messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Checked, in the form that chat templates are written for: text, and calls whose arguments are an object."""
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
        if isinstance(calls, list):
            message["tool_calls"] = [_with_arguments(call, _parsed) for call in calls]
        read.append(message)
    if not any(message["role"] == "assistant" for message in read):
        raise ConfigError(f"{where}: no message has the role assistant, so there is nothing to learn")
    return read


def _with_arguments(call: Any, function: Callable[[Any], Any]) -> Any:
    """A tool call with what `function` makes of its arguments."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"], function)}
    return {**call, "arguments": function(call["arguments"])} if "arguments" in call else call


def _parsed(arguments: Any) -> Any:
    """OpenAI's files hold them as a string, which most templates would encode once more."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(arguments, str) and isinstance(value := records.parse_json(arguments), dict):
            return value
    return arguments
