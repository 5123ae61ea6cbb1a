"""Conversations to tokens: the forms people have, which tokens are learned, packing, collators.

A sample is a pair of equally long arrays: `input_ids`, and `labels`, the next token of each position or -100 where
nothing is learned.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shared import data, demo, prepared, records
from shared.config import ConfigError, cache_dir
from shared.data import IGNORED, Batch, Order, Row
from shared.demo import DEFAULT_TEMPLATE
from shared.launch import on_main
from shared.options import ChatConfig
from shared.records import Source, kind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 6  # raised when the prepared files change meaning
AT_ONCE = 128  # records that a process is handed at a time
COPIED_AT_ONCE = 2**24  # bytes
TODAY = datetime(2024, 7, 26)  # what Llama 3's templates take for it without a clock
MINE, NEXT = "\ue000", "\ue001"  # characters that nobody writes
DEMO = Source("functions of the Python standard library", lambda: [sys.version, demo.python_files()], demo.docstring_chats)

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


def _serialised(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


# Tokens ----------------------------------------------------------------------------------------------------------------


class Encoder:
    """Examples to (token ids, which of them are learned), by the tokenizer's chat template or a stated default.

    Args:
        tokenizer: a fast one, for the places of tokens in the text; gets DEFAULT_TEMPLATE if it has none.
        loss_on: assistant, completion or all.

    Raises:
        ConfigError: the tokenizer knows no places or no end-of-text token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: str) -> None:
        if not tokenizer.is_fast:
            raise ConfigError("the tokenizer is a slow one, which cannot tell where its tokens stand in the text")
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-text token")
        self.tokenizer, self.loss_on = tokenizer, loss_on
        self.bos = prepared.begins_texts(tokenizer)
        if not tokenizer.chat_template:
            tokenizer.chat_template = ("{{ bos_token }}" if self.bos else "") + DEFAULT_TEMPLATE
        self.has_own_template = not str(tokenizer.chat_template).endswith(DEFAULT_TEMPLATE)
        self.marks_turns = bool(re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.special = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)

    def __call__(self, example: Example, where: str) -> tuple[list[int], np.ndarray]:
        """(ids, learned): the tokens, and [len(ids)] bool, the tokens that the loss counts.

        The token that ends the last learned turn is always among them: a template that writes none gets the
        end-of-text token.

        Raises:
            ConfigError: the chat template refuses the conversation.
        """
        if example.messages is None:
            text = example.prompt + example.completion
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            learned = _inside(encoded["offset_mapping"], [(len(example.prompt), len(text))])
            ids = encoded["input_ids"]
            if ids[: len(self.bos)] != self.bos:  # which a text that somebody rendered before has
                ids, learned = self.bos + ids, np.concatenate([np.zeros(len(self.bos), bool), learned])
        else:
            ids, learned = self._chat(example.messages, example.tools, where)
        last = int(np.flatnonzero(learned)[-1]) if learned.any() else -1
        if last >= 0 and not example.goes_on and self.end_of(ids[: last + 1]) is None:
            ids, learned = [*ids[: last + 1], self.tokenizer.eos_token_id], np.append(learned[: last + 1], True)
        if self.loss_on == "all":
            learned = np.ones(len(ids), bool)
        return ids, learned

    def end_of(self, ids: Sequence[int]) -> int | None:
        """The special token that `ids` end with, white space after it aside; None if there is none."""
        for token in reversed(ids):
            if token in self.special:
                return token
            if str(self.tokenizer.decode([token])).strip():
                return None
        return None

    def _chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, where: str
    ) -> tuple[list[int], np.ndarray]:
        if tools and "tools" not in str(self.tokenizer.chat_template):
            raise ConfigError(f"{where}: has tools, of which the chat template knows nothing")
        if not self.has_own_template and any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
            raise ConfigError(
                f"{where}: calls a tool, which the default chat template does not know: take a model whose own does"
            )
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [n for n in (turns[-1:] if self.loss_on == "completion" else turns) if messages[n].get("weight", 1)]
        messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        try:
            template = self._without_a_clock(tools)
            render: Any = partial(self.tokenizer.apply_chat_template, tools=tools, chat_template=template)  # type: ignore[arg-type]
            messages = self._as_the_template_takes_them(messages, render)
            if self.marks_turns:
                encoded: Any = render(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
                mask = np.array(encoded["assistant_masks"], dtype=bool)
                return list(encoded["input_ids"]), mask if wanted == turns else _some_turns(mask, turns, wanted, where)
            text = str(render(messages, tokenize=False))
            needed = [] if self.loss_on == "all" else wanted
            spans = [_turn(partial(render, tokenize=False), text, messages, number) for number in needed]
        except ConfigError:
            raise
        except Exception as error:  # jinja2 and templates' own raise_exception
            raise ConfigError(f"{where}: the chat template refuses this conversation ({error})") from None
        if None in spans:
            raise ConfigError(
                f"{where}: what the assistant says cannot be found in what the chat template makes of it: use a tokenizer "
                "whose template marks it with {% generation %}, --loss_on completion (the last answer), or --loss_on all"
            )
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(encoded["input_ids"]), _inside(encoded["offset_mapping"], [span for span in spans if span is not None])

    def _without_a_clock(self, tools: list[dict[str, Any]] | None) -> str:
        """The template for conversations with these `tools`; one that writes today's date always gets the same day.

        Otherwise the same data prepared tomorrow, or on another machine, were other samples, and no run could be resumed.
        """
        template = self.tokenizer.get_chat_template(tools=tools)
        if "strftime_now" not in template:
            return template
        codes = [f"%{letter}" for letter in ("-d", "-m", "-H", "-I", *"aAbBdeFHIjmMpSTyY")]
        written = "format" + "".join(f".replace({code!r}, {TODAY.strftime(code)!r})" for code in codes)
        return f"{{%- macro strftime_now(format) -%}}{{{{ {written} }}}}{{%- endmacro %}}{{{{ '' }}}}{template}"

    @staticmethod
    def _as_the_template_takes_them(messages: list[dict[str, Any]], render: Callable[..., Any]) -> list[dict[str, Any]]:
        """With calls' arguments as JSON in a string, if the template refuses objects or writes them in Python's way."""
        calls = [call for message in messages for call in message.get("tool_calls") or [] if isinstance(call, dict)]
        arguments = [(call.get("function") or call).get("arguments") for call in calls]
        objects = [value for value in arguments if isinstance(value, dict) and value]
        if not objects:
            return messages
        try:
            text = render(messages, tokenize=False)
        except Exception:
            text = ""
        if text and not any(str(value) in text for value in objects):
            return messages
        return [
            {**message, "tool_calls": [_with_arguments(call, _serialised) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in messages
        ]


def _some_turns(mask: np.ndarray, turns: list[int], wanted: list[int], where: str) -> np.ndarray:
    """Of [tokens] marked turns those that are `wanted`."""
    runs = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2).tolist()
    if len(runs) != len(turns) and wanted != turns[-1:]:
        raise ConfigError(f"{where}: the chat template marks {len(runs)} of {len(turns)} turns, so some cannot be left out")
    kept = np.zeros_like(mask)
    for number, (first, last) in zip(reversed(turns), reversed(runs), strict=False):
        kept[first:last] = number in wanted
    return kept


def _turn(render: Callable[..., Any], text: str, messages: list[dict[str, Any]], number: int) -> tuple[int, int] | None:
    """Where an assistant's turn stands in the rendered `text`, with the token that ends it; None where that is not clear.

    Some templates write a turn differently when it is the last: with its thoughts, say, or another token at its end. Some
    open a thought where an answer is to be generated, which the answers of a conversation need not have.
    """
    if number:
        before = render(messages[:number], add_generation_prompt=True)
    else:
        before = render([{"role": "assistant", "content": MINE}]).partition(MINE)[0]  # templates refuse to render nothing
    if not text.startswith(before):
        before = re.sub(r"(<think>\s*)?(</think>\s*)?$", "", before)
    if text.startswith(before):
        as_the_last = render(messages[: number + 1]).rstrip()
        if text.startswith(as_the_last):
            return len(before), len(as_the_last)
    for calls in ({}, {"tool_calls": messages[number].get("tool_calls")}):
        with contextlib.suppress(Exception):  # a template may refuse the answer of a tool that was not called
            span = _among_others(render, text, messages, number, before, calls)
            if span is not None:
                return span
    return None


def _among_others(
    render: Callable[..., Any], text: str, messages: list[dict[str, Any]], number: int, before: str, calls: dict[str, Any]
) -> tuple[int, int] | None:
    """`_turn` of one that is not the last, by what is written around another in its place."""
    turn = {"role": "assistant", "content": MINE, **calls}
    with_it = [*messages[:number], turn]
    both = render([*with_it, {**messages[number + 1], "content": NEXT}, *messages[number + 2 :]])
    if MINE not in both or NEXT not in both:
        return None
    if not text.startswith(before):
        before = both.partition(MINE)[0]
    between = both.rpartition(MINE)[2].partition(NEXT)[0]
    end = text.find(between, len(before))
    if end < 0 or not text.startswith(before) or not between.strip():
        return None
    at_the_end = render(with_it).rpartition(MINE)[2]
    closing = "".join(a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(between, at_the_end, strict=False)))
    if not closing and not between[0].isspace():
        return None  # another token altogether ends the last turn
    whole = re.sub(r"<[^<>]*$", "", closing)  # without what two tokens have in common, if that is not all
    return len(before), end + len((whole if whole.strip() else closing).rstrip())


def _inside(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Which tokens hold a character of one of the spans: [tokens] bool.

    A token that begins before a span and reaches into it counts, such as " word" where a prompt ends with the space.
    """
    places = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    inside = np.zeros(len(offsets), dtype=bool)
    for first, last in spans:
        inside |= (places[:, 1] > first) & (places[:, 0] < last)
    return inside


# Prepared samples ------------------------------------------------------------------------------------------------------


def prepare(config: ChatConfig, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Read, check and tokenise the data once; with the same data, tokenizer and settings it is there already.

    Every rank calls this; the main one works, the others wait.

    Raises:
        ConfigError: wrong input, with its place, or no sample with anything to learn.
    """
    encoder = Encoder(tokenizer, config.loss_on)
    train, validation = records.open_sources(config, demo=DEMO)
    serialised = tokenizer.backend_tokenizer.to_str()  # type: ignore[attr-defined]
    key = on_main(  # machines may see other file times, and the Hub may answer one of them only
        lambda: prepared.fingerprint(
            format=FORMAT,
            train=train.identity(),
            validation=validation and validation.identity(),
            tokenizer=hashlib.sha256(serialised.encode()).hexdigest(),
            template=str(tokenizer.chat_template),
            special=[tokenizer.bos_token_id, tokenizer.eos_token_id],
            settings=[config.seq_length, config.loss_on, config.max_train_samples, config.validation_split_percentage],
        )
    )

    def build(folder: Path) -> None:
        sizes, facts = _encode_all(train, folder / "all", config, tokenizer)
        facts |= {"source": train.name, "own_template": encoder.has_own_template}
        kept = np.ones(len(sizes), bool)
        if validation is None:
            held_out, facts["validation"] = _hold_out(sizes[:, 2], config.validation_split_percentage)
            kept = ~held_out
            splits = {"train": ("all", sizes, kept), "validation": ("all", sizes, ~kept)}
        else:
            others, _ = _encode_all(validation, folder / "others", replace(config, max_train_samples=None), tokenizer)
            facts["validation"] = f"{len(others):,} of {validation.name}"
            splits = {"train": ("all", sizes, kept), "validation": ("others", others, np.ones(len(others), bool))}
        if not kept.any():
            raise ConfigError(f"{train.name}: a single sample cannot be split; give --validation_file")
        lengths = sizes[kept, 0] - 1.0
        facts["context"] = float((lengths**2).sum() / lengths.sum())  # tokens of a token's sample, in the mean over tokens
        digest = hashlib.sha256()
        for split, (source, sizes_of, chosen) in splits.items():
            _select(folder / source, sizes_of, chosen, folder / split, digest)
        for name in {source for source, _, _ in splits.values()}:
            for file in _files(folder / name):
                file.unlink()
        (folder / "meta.json").write_text(json.dumps(facts | {"sha256": digest.hexdigest()}, indent=1))

    return prepared.build_once(cache_dir() / "chat" / key, build)


def _hold_out(is_first: np.ndarray, percent: float) -> tuple[np.ndarray, str]:
    """(which samples to validate on, [samples] bool; how that was chosen, for people).

    Whole records, so that no text is on both sides; where these are half or twice the share, or all, the last samples.

    Args:
        is_first: [samples], whether a sample is the first of its record.
        percent: per cent held out.
    """
    record = np.cumsum(is_first) - 1
    count, samples = int(record[-1]) + 1, len(record)

    def share(of: int) -> int:
        return max(1, min(round(of * percent / 100), of - 1))

    chosen = data.permute(np.arange(count), count, (0,))[: share(count)]
    held_out = np.isin(record, chosen)
    if samples == 1 or (not held_out.all() and data.is_near(held_out.sum(), share(samples))):
        return held_out, f"{held_out.sum():,}, from {len(chosen):,} of {count:,} records"
    held_out = np.arange(samples) >= samples - share(samples)
    return held_out, f"{held_out.sum():,}, the last {held_out.mean():.0%} (whole records would be too much or too little)"


class _Encode:
    """Records to samples: the tokens of all, which of them are learned, [samples, 3] tokens, targets and whether it is the
    first of its record, counts. A plain text makes as many samples as it takes, any other record one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: str, seq_length: int) -> None:
        self.encoder, self.most = Encoder(tokenizer, loss_on), seq_length + 1

    def __call__(self, chunk: tuple[str, list[tuple[str, dict[str, Any]]]]) -> tuple[Any, Any, Any, Counter[str]]:
        form, rows = chunk
        counts = Counter({"read": len(rows), form: len(rows)})
        every, marks, sizes = [np.zeros(0, np.int32)], [np.zeros(0, bool)], []
        for where, record in rows:
            ids, learned = self.encoder(read_example(record, form, where), where)
            if learned.any() and (end := self.encoder.end_of(ids[: np.flatnonzero(learned)[-1] + 1])) is not None:
                counts[f"end {end}"] += 1
            last = len(ids) - 1 if form == "plain text" else 1
            kept = 0
            for start in range(0, last, self.most - 1):  # one ends with the token that the next begins with
                part = learned[start : start + self.most]
                targets = int(part[1:].sum())  # the first token of a sample is nobody's next token
                if targets:
                    every.append(np.array(ids[start : start + self.most], np.int32))
                    marks.append(part)
                    sizes.append((len(part), targets, not kept))
                    kept += 1
            counts["cut"] += form != "plain text" and len(ids) > self.most
            counts["dropped"] += not kept
        return np.concatenate(every), np.concatenate(marks), np.array(sizes, np.int64).reshape(-1, 3), counts


def _chunks(source: Source, limit: int | None) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """(form, records): the first record's form, which all have to have, and some of the records with their places."""
    rows, form = islice(source.read(), limit), ""
    while chunk := list(islice(rows, AT_ONCE)):
        where, first = chunk[0]
        form = form or recognise(first, where)
        yield form, chunk


def _files(place: Path) -> list[Path]:
    return [place.with_name(f"{place.name}-{name}.bin") for name in ("ids", "learned")]


def _encode_all(
    source: Source, place: Path, config: ChatConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[np.ndarray, dict[str, Any]]:
    """Write the samples of a source, one after another, to `_files(place)`: (sizes as of `_Encode`, facts)."""
    from tqdm import tqdm

    sizes, counts = [], Counter[str]()
    parts = tokenizer, config.loss_on, config.seq_length
    chunks = _chunks(source, config.max_train_samples)
    results = prepared.in_order(_Encode, parts, chunks, config.preprocessing_num_workers)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(file.open("wb")) for file in _files(place)]
        results = stack.enter_context(contextlib.closing(results))
        bar = stack.enter_context(tqdm(desc=f"tokenising {source.name}", unit=" rows", leave=False, disable=None))
        for ids, learned, some, seen in results:
            for file, values in zip(files, (ids, learned), strict=True):
                file.write(values.tobytes())
            sizes.append(some)
            counts += seen
            bar.update(seen["read"])
    if not counts["read"]:
        raise ConfigError(f"{source.name}: no records in it")
    if counts["dropped"] == counts["read"]:
        raise ConfigError(
            f"{source.name}: none of its {counts['read']} samples has a token to learn within "
            f"--seq_length {config.seq_length}"
        )
    form = next(form for form in FORMS if counts[form])
    ends = [int(name.removeprefix("end ")) for name in counts if name.startswith("end ")]
    facts = {"form": form, "end": max(ends, key=lambda end: counts[f"end {end}"], default=None)}
    return np.concatenate(sizes), {**facts, **{name: counts[name] for name in ("read", "cut", "dropped")}}


def _select(source: Path, sizes: np.ndarray, chosen: np.ndarray, place: Path, digest: Any) -> None:
    """Copy the `chosen` samples, [samples] bool, of what `_encode_all` left at `source` to the files of a split."""
    ends = np.cumsum(sizes[chosen, 0])
    bounds = np.concatenate([[0], np.cumsum(sizes[:, 0])])[np.flatnonzero(np.diff(chosen, prepend=False, append=False))]
    for file, name, kind_of in zip(_files(source), ("ids", "learned"), (np.int32, np.bool_), strict=True):
        dtype = np.dtype(kind_of)
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (int(ends[-1]),)}
        with file.open("rb") as values, open(f"{place}-{name}.npy", "wb") as into:
            np.lib.format.write_array_header_1_0(into, header)
            for first, last in (dtype.itemsize * bounds).reshape(-1, 2).tolist():  # neighbours at once
                values.seek(first)
                for start in range(first, last, COPIED_AT_ONCE):
                    block = values.read(min(COPIED_AT_ONCE, last - start))
                    into.write(block)
                    digest.update(block)
    np.save(f"{place}-ends.npy", ends)
    digest.update(ends.tobytes())
    np.save(f"{place}-targets.npy", sizes[chosen, 1])


class Conversations:
    """One split of prepared samples, memory-mapped: `data.Samples`, one conversation an index."""

    def __init__(self, folder: Path, split: str) -> None:
        with prepared.reading(folder):
            self.meta = json.loads((folder / "meta.json").read_text())
            self.ids = np.load(folder / f"{split}-ids.npy", mmap_mode="r")
            self.learned = np.load(folder / f"{split}-learned.npy", mmap_mode="r")
            self.ends, self.targets = (np.load(folder / f"{split}-{name}.npy") for name in ("ends", "targets"))
            if not len(self.ids) == len(self.learned) == self.ends[-1] or len(self.ends) != len(self.targets):
                raise ValueError("its files are not of one length")
        self.starts = np.concatenate([[0], self.ends[:-1]])
        self.lengths = self.ends - self.starts - 1  # positions of a row: every token has to predict a next one

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Row:
        ids = np.asarray(self.ids[self.starts[index] : self.ends[index]], dtype=np.int64)
        learned = self.learned[self.starts[index] : self.ends[index]]
        return {"input_ids": ids[:-1], "labels": np.where(learned[1:], ids[1:], IGNORED)}

    def num_targets(self, indices: np.ndarray) -> int:
        return int(self.targets[indices].sum())

    def prompt(self, index: int) -> tuple[list[int], list[int]]:
        """(ids before the last learned turn, the learned ids after): what to give the model, and a reference."""
        ids = np.asarray(self.ids[self.starts[index] : self.ends[index]])
        learned = np.asarray(self.learned[self.starts[index] : self.ends[index]])
        gaps = np.flatnonzero(learned & ~np.concatenate([[False], learned[:-1]]))
        cut = max(int(gaps[-1]), min(16, len(ids) // 2)) if gaps[-1] == 0 else int(gaps[-1])
        return ids[:cut].tolist(), ids[cut:].tolist()


# Packing ---------------------------------------------------------------------------------------------------------------


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `capacity`: longest first, each into the fullest bin with room.

    Deterministic. O(n log capacity). Raises ValueError for a length above the capacity.
    """
    if len(lengths) and lengths.max() > capacity:
        raise ValueError(f"length {lengths.max()} is above the capacity {capacity}")
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # room left -> bins
    rooms: list[int] = []  # its keys, sorted
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            number, room = len(bins), capacity
            bins.append([])
        else:
            room = rooms[place]
            number = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        bins[number].append(index)
        left = room - length
        if left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        with_room[left].append(number)
    return bins


class Packed:
    """Rows of several conversations each: `data.Samples` with `position_ids` that restart at each one."""

    def __init__(self, samples: Conversations, capacity: int) -> None:
        self.samples, self.capacity = samples, capacity
        self.bins = best_fit_decreasing(samples.lengths, capacity)
        self.targets = np.array([samples.num_targets(np.array(b)) for b in self.bins])
        # Of rows of equal length that of more conversations is the longer one: it takes a mask, or a kernel more memory.
        self.lengths = np.array([samples.lengths[b].sum() + 1 - 1 / len(b) for b in self.bins])

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> Row:
        rows = [self.samples[i] for i in self.bins[index]]
        joined = {key: np.concatenate([row[key] for row in rows]) for key in ("input_ids", "labels")}
        return joined | {"position_ids": np.concatenate([np.arange(len(row["labels"])) for row in rows])}

    def num_targets(self, indices: np.ndarray) -> int:
        return int(self.targets[indices].sum())

    @property
    def waste(self) -> float:
        """Share of the rows' capacity that holds nothing."""
        return 1 - float(self.samples.lengths.sum()) / (len(self.bins) * self.capacity)


def collate_packed(rows: list[Row], *, flat: bool = False, multiple_of: int = 1, at_most: int | None = None) -> Batch:
    """Packed rows -> {"input_ids", "labels"}, mostly "position_ids": [batch, longest row] int64, or [1, all] if `flat`;
    and `targets` and `cu_seqlens`, see `lm_loss.causal_lm_loss`.

    Flash attention kernels tell documents apart in a single row only, at no cost for its length; SDPA's mask grows
    with the square of it.

    What fills a shorter row up comes after its last document and has no targets. There is no attention mask: models tell
    documents apart by restarting positions only when none is given. Nor are there positions where none restarts.

    Args:
        rows: of a `Packed`.
        flat: all in one row.
        multiple_of: lengthen rows to a multiple of this: kernels are chosen, and compiled, for each length that comes.
        at_most: but not beyond this length, which all rows keep to.
    """
    longest = _lengthened(rows, multiple_of, at_most)

    def fill(row: Row, key: str) -> np.ndarray:
        missing = longest - len(row[key])
        follow = row["position_ids"][-1] + 1 + np.arange(missing)
        tail = {"labels": np.full(missing, IGNORED), "position_ids": follow}.get(key, np.zeros(missing, int))
        return np.concatenate([row[key], tail])

    batch = {
        key: np.stack([fill(row, key) for row in rows]).reshape(1 if flat else len(rows), -1)
        for key in ("input_ids", "labels", "position_ids")
    }
    if batch["position_ids"][:, 1:].all():
        del batch["position_ids"]
    else:
        batch["cu_seqlens"] = data.cu_seqlens_of(batch["position_ids"])
    return _with_targets(batch)


def _lengthened(rows: list[Row], multiple_of: int, at_most: int | None) -> int:
    longest = max(len(row["labels"]) for row in rows)
    return min(longest + -longest % multiple_of, at_most or sys.maxsize)


def collate_padded(rows: list[Row], *, multiple_of: int = 1, at_most: int | None = None) -> Batch:
    """One conversation a row -> {"input_ids", "labels"}: [batch, longest row] int64, and `targets`, see
    `lm_loss.causal_lm_loss`.

    There is no attention mask: what fills a row up comes after all that its tokens see in a causal model, and has no
    targets. Not a pad token's id says where it begins, so a real end-of-text token stays learned.

    Args:
        rows: of a `Conversations`.
        multiple_of, at_most: see `collate_packed`.
    """
    longest = _lengthened(rows, multiple_of, at_most)
    batch = {"input_ids": np.zeros((len(rows), longest), np.int64), "labels": np.full((len(rows), longest), IGNORED)}
    for i, row in enumerate(rows):
        for key, values in batch.items():
            values[i, : len(row[key])] = row[key]
    return _with_targets(batch)


def _with_targets(batch: dict[str, np.ndarray]) -> Batch:
    """Where the labels are that count: found here, since whoever looks for them on a device waits for their number."""
    batch["targets"] = np.flatnonzero(batch["labels"] != IGNORED)
    return {key: torch.from_numpy(value) for key, value in batch.items()}


@dataclass(frozen=True)
class GroupedOrder(Order):
    """Global batches of similar lengths, so that padding is little: sorted within stretches of `GROUP` batches."""

    lengths: np.ndarray | None = None
    GROUP = 32

    def indices(self, step: int) -> np.ndarray:
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        stretch, batch = divmod(step_in_epoch, self.GROUP)
        size = self.GROUP * self.global_batch_size
        stop = min((stretch + 1) * size, self.num_samples)
        chosen = data.permuted(self.num_samples, (self.seed, epoch), stretch * size, stop)
        assert self.lengths is not None
        chosen = chosen[np.argsort(-self.lengths[chosen], kind="stable")]
        full = len(chosen) // self.global_batch_size  # a ragged last batch of the epoch stays last
        if batch < full:
            batch = int(data.permuted(full, (self.seed, epoch, stretch), 0, full)[batch])
        return chosen[batch * self.global_batch_size : (batch + 1) * self.global_batch_size]


def describe(samples: Conversations, config: ChatConfig) -> str:
    """One line about the data: form, counts, lengths, share learned."""
    meta, lengths = samples.meta, samples.lengths
    template = (
        ""
        if meta["form"] in ("plain text", "prompt and completion")
        else (
            ", the model's chat template"
            if meta["own_template"]
            else ", the default chat template (### User / ### Assistant)"
        )
    )
    return (
        f"{meta['source']}: {meta['form']}{template}; {meta['read']:,} read, {meta['cut']:,} cut to {config.seq_length} "
        f"tokens, {meta['dropped']:,} dropped with nothing to learn; {len(samples):,} to train on, "
        f"{lengths.min()}-{lengths.max()} tokens (mean {lengths.mean():.0f}), {samples.learned.mean():.0%} of them learned; "
        f"to validate on: {meta['validation']}"
    )


def marked(samples: Conversations, tokenizer: PreTrainedTokenizerBase, index: int = 0) -> str:
    """A sample as text, with the learned tokens between ⟦ and ⟧."""
    ids = np.asarray(samples.ids[samples.starts[index] : samples.ends[index]])
    learned = np.asarray(samples.learned[samples.starts[index] : samples.ends[index]]).copy()
    learned[0] = False
    parts = []
    for run in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(learned)) + 1):
        text = str(tokenizer.decode(ids[run].tolist()))
        parts.append(f"⟦{text}⟧" if learned[run[0]] else text)
    return "".join(parts)
