"""The forms of conversations that people have, read into one `Example`."""

import contextlib
import difflib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from shared.data import records
from shared.data.records import kind
from shared.data.values import parse_json
from shared.process.errors import ConfigError

Messages = list[dict[str, Any]]

IMAGE = "\ufdd2"  # stands for an image in a text: no text has this character

ROLES = ["assistant", "system", "tool", "user"]
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
BESIDE_MESSAGES = ("system", "tools", "chat_template_kwargs")
# form: the columns that tell it, and others of its messages
FORMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # the first match counts
    "chat messages": (("messages",), BESIDE_MESSAGES),
    "ShareGPT conversations": (("conversations",), BESIDE_MESSAGES),
    "prompt and completion": (("prompt", "completion"), BESIDE_MESSAGES),
    "Alpaca instructions": (("instruction", "output"), ("input", "history", *BESIDE_MESSAGES)),
    "plain text": (("text",), ()),
}
_MESSAGE_KEYS = (
    "role",
    "content",
    "weight",
    "train",
    "loss",
    "tool_calls",
    "reasoning_content",
    "reasoning",
    "thinking",
)
# columns that change what an answer means, by what data with them are
_MEANINGS = {
    "preference data, for templates/dpo.py": ("chosen", "rejected"),
    "data with images, which are learned if one of the first 100 records has one, or with "
    "labels for image_classification.py": ("image", "images"),
    "data with video or sound": ("video", "videos", "audio", "audios"),
    "data with labels, for text_classification.py": ("label", "labels", "kto_tag"),
    "data with scores or ranks": ("score", "rank"),
}


@dataclass(frozen=True)
class Example:
    """A record: either messages for the chat template, or prompt + completion, joined as they are.

    The loss does not count an assistant's turn with "weight": 0.
    """

    messages: Messages | None = None
    tools: Messages | None = None  # that the assistant may call, as chat templates take them
    # variables of the chat template: enable_thinking
    template_options: dict[str, Any] = field(default_factory=dict)
    prompt: str = ""
    completion: str = ""
    continues: bool = False  # in the next record, so no end-of-text is added

    @property
    def has_empty_answer(self) -> bool:
        """Whether an answer that is learned says nothing and calls no tool."""
        if self.messages is None:
            return bool(self.prompt) and not self.completion.strip()
        return any(
            message["role"] == "assistant"
            and message.get("weight") != 0
            and not message.get("tool_calls")
            and not str(message.get("content") or "").strip()
            for message in self.messages
        )


def recognise(record: dict[str, Any], where: str) -> str:
    """The form of a record, a key of FORMS. Raises ConfigError if its columns match none."""
    for form, (columns, _) in FORMS.items():
        if all(column in record for column in columns):
            return form
    refuse_other_meanings(record, "", where)
    known = "; ".join(f"{form}: {' + '.join(columns)}" for form, (columns, _) in FORMS.items())
    wanted = {column for columns, _ in FORMS.values() for column in columns}
    near = {name: difflib.get_close_matches(str(name), wanted, 1, 0.8) for name in record}
    meant = [f"; did you mean {match[0]!r}, not {name!r}?" for name, match in near.items() if match]
    raise ConfigError(
        f"{where}: columns {', '.join(map(str, record)) or 'none'} are of no known form ({known})"
        f"{''.join(meant)}: rename them, for example a question to instruction and its answer to "
        "output; for several turns, see docs/data/chats.md"
    )


def parse_json_messages(record: dict[str, Any], where: str) -> dict[str, Any]:
    """A record with messages in place of their JSON in columns that may be text, too: CSV has no
    lists.

    Raises:
        ConfigError: it is Python's text of messages.
    """
    for column in ("prompt", "completion", "chosen", "rejected"):
        text = record.get(column)
        if not isinstance(text, str):
            continue
        if re.match(r"\s*\[?\s*\{\s*'(role|content)'\s*:", text):
            raise ConfigError(
                f"{where}: {column!r} is Python's text of messages: write it with json.dumps"
            )
        value = from_cell(text)
        messages = value if isinstance(value, list) else [value]
        if messages and all(map(_is_message, messages)):
            record = record | {column: messages}
    return record


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in (*ROLES, "developer")


def refuse_other_meanings(
    record: dict[str, Any], form: str, where: str, allowed: Collection[str] = ()
) -> None:
    """Raise ConfigError if columns of a record change what an answer means, except for the
    `allowed` ones.
    """
    joined = form == "plain text" or (
        form == "prompt and completion" and isinstance(record.get("prompt"), str)
    )
    meanings = {name: what for what, names in _MEANINGS.items() for name in names}
    if joined:
        meanings["system"] = "data with a system text, which only a chat template takes"
    found = [name for name in records.unused(record, allowed) if name in meanings]
    if found:
        what = " and ".join(dict.fromkeys(meanings[name] for name in found))
        alone = f"; to learn the text alone, add --allow_unused_columns {' '.join(found)}"
        raise ConfigError(
            f"{where}: this is {what} (columns: {', '.join(found)}){alone if form else ''}"
        )


def unused(record: dict[str, Any], form: str, example: Example, template: str) -> list[str]:
    """Columns of a record, and keys of its messages, that neither this module nor the chat template
    reads.
    """
    columns, others = FORMS[form]
    messages = example.messages or ()
    keys = {key: "messages" for message in messages for key in message if key not in _MESSAGE_KEYS}
    keys |= dict.fromkeys(example.template_options, "chat_template_kwargs")
    unread = [
        f"{key} (of {what})"
        for key, what in keys.items()
        if not re.search(rf"\b{re.escape(key)}\b", template)
    ]
    return records.unused(record, columns + (others if messages else ())) + unread


def read_example(record: dict[str, Any], form: str, where: str) -> Example:
    """A record of a known form as an `Example`.

    Raises:
        ConfigError: a missing, null or mistyped field, an unknown role, or no turn of the
            assistant.
    """
    require_columns(record, FORMS[form][0], form, where)
    if form == "plain text":
        return Example(
            completion=_text(record, "text", where), continues=records.CONTINUES in record
        )
    if form == "prompt and completion" and not isinstance(record["prompt"], list):
        return Example(
            prompt=_text(record, "prompt", where), completion=_text(record, "completion", where)
        )

    messages: Messages = []
    if form == "Alpaca instructions":
        question = _text(record, "instruction", where)
        if record.get("input"):
            question += "\n\n" + _text(record, "input", where)
        for asked, answer in [*_history(record, where), [question, _text(record, "output", where)]]:
            messages += [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": answer},
            ]
    elif form == "ShareGPT conversations":
        for number, turn in enumerate(
            read_list(record["conversations"], "conversations", where), 1
        ):
            if (role := str(turn.get("from"))) not in (known := (*_SHAREGPT_ROLES, *ROLES)):
                raise ConfigError(
                    f"{where}: turn {number} is from {role!r}, not {', '.join(known)}"
                )
            message = {key: value for key, value in turn.items() if key not in ("from", "value")}
            message |= {"role": _SHAREGPT_ROLES.get(role, role), "content": turn.get("value")}
            if role == "function_call":
                calls = read_list(turn.get("value"), role, f"{where}: turn {number}")
                message |= {"content": "", "tool_calls": calls}
            messages.append(message)
    elif form == "prompt and completion":
        prompt = [
            {**message, "weight": 0} for message in read_list(record["prompt"], "prompt", where)
        ]
        messages = prompt + read_list(record["completion"], "completion", where)
    else:
        messages = read_list(record["messages"], "messages", where)
    tools = read_list(from_cell(record.get("tools")) or [], "tools", where)
    options = from_cell(record.get("chat_template_kwargs")) or {}
    if not isinstance(options, dict):
        raise ConfigError(f"{where}: 'chat_template_kwargs' is {kind(options)}, expected an object")
    # Parquet adds nulls
    options = {key: value for key, value in options.items() if value is not None}
    messages = _checked(messages, where)
    if record.get("system"):
        if any(message["role"] == "system" for message in messages):
            raise ConfigError(
                f"{where}: a system text is in the column 'system' and among the messages: keep one"
            )
        messages = [{"role": "system", "content": _text(record, "system", where)}, *messages]
    return Example(messages, [_function(tool) for tool in tools] or None, options)


def require_columns(
    record: dict[str, Any], columns: Collection[str], form: str, where: str
) -> None:
    """Raise ConfigError if a record lacks a column of its file's form."""
    for column in columns:
        if column not in record:
            raise ConfigError(
                f"{where}: {column!r} is missing, but the first record of this file has it "
                f"({form}): use one form in a file; files may have different ones"
            )


def _text(record: dict[str, Any], column: str, where: str) -> str:
    if not isinstance(record[column], str):
        raise ConfigError(f"{where}: {column!r} is {kind(record[column])}, expected text")
    return record[column]


def from_cell(value: Any) -> Any:
    """CSV has no lists: people put JSON into a cell."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            return parse_json(value)
    return value


def _history(record: dict[str, Any], where: str) -> list[list[str]]:
    """Alpaca's earlier turns: pairs of a question and its answer."""
    pairs = from_cell(record.get("history")) or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and [*map(type, pair)] == [str, str] for pair in pairs
    ):
        raise ConfigError(f"{where}: 'history' is not a list of [question, answer] pairs")
    return pairs


def read_list(value: Any, column: str, where: str) -> Messages:
    """A list of objects, or a single one, perhaps as JSON. Raises ConfigError for anything else."""
    value = from_cell(value)
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ConfigError(f"{where}: {column!r} is {kind(value)}, expected a list of objects")
    return value


def _checked(messages: Messages, where: str) -> Messages:
    """The messages as chat templates expect them: content is text, the arguments of calls are
    objects.
    """
    read = []
    for number, given in enumerate(messages, 1):
        # null is as absent
        message = {key: value for key, value in given.items() if value is not None}
        if call := message.pop("function_call", None):  # OpenAI's older form
            message["tool_calls"] = [call]
        parts = message.get("content")
        calls = message.get("tool_calls")
        if isinstance(parts, list) and all(map(_is_text, parts)):
            message["content"] = "".join(part["text"] for part in parts)
        if message.get("role") == "developer":
            message["role"] = "system"
        if message.get("role") not in ROLES:
            raise ConfigError(
                f"{where}: message {number} has role {message.get('role')!r}, not "
                f"{', '.join(ROLES)}: rename it; what the assistant says is learned"
            )
        if not isinstance(message.get("content"), str) and not calls:
            raise ConfigError(
                f"{where}: content of message {number} is {kind(parts)}, expected text or parts of "
                f"type text; the message has {', '.join(message)} (images are seen if one of the "
                "first 100 records has one)"
            )
        weights = [message.pop(key, 1) for key in ("weight", "loss_weight")]
        if wrong := [weight for weight in weights if weight not in (0, 1)]:
            raise ConfigError(f"{where}: weight of message {number} is {wrong[0]!r}, not 0 or 1")
        # names of several trainers
        if 0 in weights or message.get("train") is False or message.get("loss") is False:
            message["weight"] = 0
        if calls:
            calls = [
                _function(call)
                for call in read_list(calls, "tool_calls", f"{where}: message {number}")
            ]
            if not all(
                isinstance(call.get("function"), dict) and call["function"].get("name")
                for call in calls
            ):
                raise ConfigError(f"{where}: message {number} calls a tool without its name")
            if any(
                isinstance(from_cell(call["function"].get("arguments")), list) for call in calls
            ):
                raise ConfigError(
                    f"{where}: message {number} calls a tool with a list of arguments, expected an "
                    'object: {"city": "Rome"}, not [["city", "Rome"]]'
                )
            message["tool_calls"] = [with_arguments(call, _parsed) for call in calls]
        read.append(message)
    if not any(message["role"] == "assistant" for message in read):
        raise ConfigError(
            f"{where}: no message has the role assistant, so there is nothing to learn"
        )
    return read


def _is_text(part: Any) -> bool:
    """Whether a part of a message's content is text, and not an image."""
    is_text = isinstance(part, dict) and part.get("type") in (None, "text")
    return is_text and isinstance(part.get("text"), str)


def _function(entry: dict[str, Any]) -> dict[str, Any]:
    """A tool, or a call of one, as chat templates take it: many files leave out what is around the
    function.
    """
    return (
        {"type": "function", "function": entry}
        if "name" in entry and "function" not in entry
        else entry
    )


def with_arguments(call: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """A tool call with converted arguments, if it has any."""
    given = {key: convert(value) for key, value in call["function"].items() if key == "arguments"}
    return {**call, "function": {**call["function"], **given}}


def _parsed(arguments: Any) -> Any:
    """OpenAI's files hold arguments as a JSON string, which most templates would encode once
    more.
    """
    value = from_cell(arguments)
    return value if isinstance(value, dict) else arguments
