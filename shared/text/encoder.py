"""Turn a conversation into tokens and a loss mask."""

from __future__ import annotations

import contextlib
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shared.data import prepared
from shared.demo import DEFAULT_TEMPLATE
from shared.process.errors import ConfigError
from shared.text.forms import Example, Messages, with_arguments
from shared.text.special import Special

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TODAY = datetime(2024, 7, 26)  # the date that Llama 3's chat templates write without a clock
HERE, NEXT = "\ue000", "\ue001"  # placeholders for the content of turns: characters for private use
SAYS = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")  # keys of what an assistant says
Span = tuple[int, int]  # first and last + 1 character in the rendered text


class Encoder:
    """Turn examples into (token ids, loss mask), with the tokenizer's chat template or a default one.

    Args:
        tokenizer: a fast one, because it reports token offsets. It gets DEFAULT_TEMPLATE if it has no chat template.
        loss_on: assistant, completion or all.

    Raises:
        ConfigError: the tokenizer is a slow one or has no end-of-text token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: str) -> None:
        if not tokenizer.is_fast:
            raise ConfigError("the tokenizer is a slow one, which cannot tell where its tokens stand in the text")
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-text token")
        self.tokenizer, self.loss_on = tokenizer, loss_on
        self.bos = prepared.leading_bos(tokenizer)
        self.came_with_template = bool(tokenizer.chat_template)
        if not self.came_with_template:
            tokenizer.chat_template = ("{{ bos_token }}" if self.bos else "") + DEFAULT_TEMPLATE
        self.has_own_template = not str(tokenizer.chat_template).endswith(DEFAULT_TEMPLATE)
        self.marks_turns = bool(re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)))
        special = Special(tokenizer)
        self.special, self._pattern = special.ids, special.pattern
        self.takes_parts = False  # whether the template writes content that is a list of parts, and not text
        self.ends = {tokenizer.eos_token_id}  # and what the chat template writes after an answer
        turns = [{"role": "user", "content": NEXT}, {"role": "assistant", "content": HERE}]
        for as_parts in (False, True):
            with contextlib.suppress(Exception):  # a template may refuse these turns
                written = _in_parts(turns) if as_parts else turns
                _, found, after = str(tokenizer.apply_chat_template(written, tokenize=False)).partition(HERE)
                if found:
                    self.takes_parts = as_parts
                    self.ends |= self.special.intersection(tokenizer(after, add_special_tokens=False)["input_ids"])
                    break
        self.lost: list[str] = []  # learned turns, and tools' answers, that are not written whole; the caller empties it
        self.unlike: list[str] = []  # learned turns that do not follow the generation prompt; the caller empties it

    def __call__(self, example: Example, where: str) -> tuple[list[int], np.ndarray]:
        """(ids, learned): the token ids, and [len(ids)] bool, true for the tokens in the loss.

        A learned turn ends with a special token in the loss, or else with the first word of what follows it. The last one
        gets the end-of-text token if the template, or a text, has no end token there, unless `example.continues`.

        Raises:
            ConfigError: the chat template refuses the conversation.
        """
        if example.messages is None:
            text = example.prompt + example.completion
            ids, learned, _ = self._tokens(text, [(len(example.prompt), len(text))])
            if ids[: len(self.bos)] != self.bos:  # text that is rendered already may begin with it
                ids, learned = self.bos + ids, np.concatenate([np.zeros(len(self.bos), bool), learned])
        else:
            ids, learned = self._chat(example.messages, example.tools, example.template_options, where)
        if self.loss_on == "all":
            learned = np.ones(len(ids), bool)
        for end in np.flatnonzero(np.diff(learned, append=False) & learned).tolist():  # the last token of each turn
            if self.end_of(ids, end + 1) is None:  # what the model has to write next, as it ends the turn there
                after = next((i for i in range(end + 1, len(ids)) if str(self.tokenizer.decode(ids[i])).strip()), end)
                if ids[after] in self.special or learned[end + 1 :].any():
                    learned[end + 1 : after + 1] = True
        last = int(np.flatnonzero(learned)[-1]) if learned.any() else -1
        found = self.end_of(ids, last + 1)
        if last >= 0 and not example.continues and found not in (self.ends if example.messages is None else self.special):
            ids, learned = [*ids[: last + 1], self.tokenizer.eos_token_id], np.append(learned[: last + 1], True)
        return ids, learned

    def special_in(self, example: Example, where: str) -> list[str]:
        """The places of texts with the string of a special token, which is read as that token."""
        texts = {where: example.prompt + example.completion}
        if example.messages is not None:
            texts = {f"{where}, message {n}": "\n".join(_words(turn)) for n, turn in enumerate(example.messages, 1)}
        matches = {place: self._pattern.search(text) for place, text in texts.items()}
        return [f"{place}: {match[0]!r}" for place, match in matches.items() if match]

    def _tokens(self, text: str, spans: Sequence[Span]) -> tuple[list[int], np.ndarray, np.ndarray]:
        """(ids, mask, places): the token ids, [len(ids)] bool, true for tokens in one of the spans, and [len(ids), 2].

        So the token " word" counts even if the prompt ends with the space and the completion begins with the word.
        """
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        places = np.fromiter(chain.from_iterable(encoded["offset_mapping"]), np.int64).reshape(-1, 2)
        inside = np.zeros(len(places), dtype=bool)
        for first, last in spans:
            inside[np.searchsorted(places[:, 1], first, side="right") : np.searchsorted(places[:, 0], last)] = True
        return list(encoded["input_ids"]), inside, places

    def end_of(self, ids: Sequence[int], stop: int) -> int | None:
        """The special token at the end of `ids[:stop]`, or None. White space after the token is ignored."""
        for token in (ids[place] for place in range(stop - 1, -1, -1)):
            if token in self.special:
                return token
            if str(self.tokenizer.decode([token])).strip():
                return None
        return None

    def _chat(
        self, messages: Messages, tools: Messages | None, template_options: dict[str, Any], where: str
    ) -> tuple[list[int], np.ndarray]:
        if tools and "tools" not in str(self.tokenizer.chat_template):
            raise ConfigError(f"{where}: has tools, but the chat template does not write them")
        if not self.has_own_template and any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
            raise ConfigError(
                f"{where}: calls a tool, but the default chat template has no tools: choose a model with a chat template"
            )
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = [n for n in (turns[-1:] if self.loss_on == "completion" else turns) if messages[n].get("weight", 1)]
        messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        try:
            template = self._with_fixed_date(tools)
            options: Any = {"tools": tools, "chat_template": template, **template_options}
            render: Any = partial(self._render, **options)
            messages = _with_accepted_calls(messages, render)
            if self.loss_on == "all":
                text = str(render(messages))
                spans: list[Span | None] = [(0, len(text))]
            elif self.marks_turns:
                from transformers.utils.chat_template_utils import render_jinja_template

                options |= {"return_assistant_tokens_mask": True, **self.tokenizer.special_tokens_map}
                marked: Any = render_jinja_template([_in_parts(messages) if self.takes_parts else messages], **options)
                text, spans = marked[0][0], [*_only_turns(marked[1][0], turns, wanted, where)]
            else:
                text = str(render(messages))
                parts = _parts(render, text, messages, len(wanted))
                spans = [_find_turn(render, _part_of(parts, number), number) for number in wanted]
        except ConfigError:
            raise
        except Exception as error:  # jinja2's errors, and templates' own raise_exception
            raise ConfigError(f"{where}: the chat template refuses this conversation ({error})") from None
        if None in spans:
            raise ConfigError(
                f"{where}: what the assistant says cannot be found in what the chat template makes of it: use a tokenizer "
                "whose template marks it with {% generation %}, --loss_on completion (the last answer), or --loss_on all"
            )
        found = [span for span in spans if span is not None]
        silent = [n for n in wanted if not str(messages[n].get("content") or "").strip()]
        dropped = {n for n in silent if _words(messages[n]) and _is_dropped(render, text, messages, n)}
        self._look_for({n: messages[n] for n in wanted}, [text[first:last] for first, last in found], dropped, where)
        shown = [(number, str(turn.get("content"))) for number, turn in enumerate(messages, 1) if turn["role"] == "tool"]
        self.lost += [f"{where}, message {number}: {said[:40]!r}" for number, said in shown if not _is_written(said, text)]
        ids, mask, places = self._tokens(text, found)
        if self.loss_on != "all":
            parts = _parts(render, text, messages, len(wanted)) if self.marks_turns else parts
            for number in wanted:
                self._compare(render, _part_of(parts, number), places, number, where)
        return ids, mask

    def _render(self, messages: Messages, **options: Any) -> str:
        turns = _in_parts(messages) if self.takes_parts else messages
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False, **options))

    def _compare(self, render: Callable[..., Any], part: _Part, places: np.ndarray, number: int, where: str) -> None:
        """Note a learned turn that does not follow the tokens that the template's generation prompt gives at inference."""

        def follows(**options: Any) -> bool:
            prompt = render(part.messages[: number - part.number], add_generation_prompt=True, **options)
            end = len(prompt) + part.place
            across = np.searchsorted(places[:, 0], end) > np.searchsorted(places[:, 1], end, side="right")  # has a token
            return part.text.startswith(prompt) and not across

        with contextlib.suppress(Exception):  # a template may refuse what is before this turn
            if not number or follows():
                return
            asked = [value for value in (False, True) if follows(enable_thinking=value)]
            way = (
                f', as it does with "chat_template_kwargs": {{"enable_thinking": {str(asked[0]).lower()}}}' if asked else ""
            )
            self.unlike.append(f"{where}, message {number + 1}{way}")

    def _look_for(self, learned: dict[int, dict[str, Any]], parts: list[str], dropped: set[int], where: str) -> None:
        """Note turns with words that are not in the rendered text. Refuse one of which nothing is there.

        Args:
            learned: the learned turns, by their numbers.
            parts: the learned parts of the rendered text.
            dropped: numbers of turns of which the template writes nothing. Short words may be in a part by chance.
        """
        may_be_empty = len(parts) == len(learned) or not self.marks_turns  # a turn without marks is no empty answer
        if len(parts) != len(learned):  # a template may mark several parts of a turn
            parts = ["".join(parts)] * len(learned)
        for (number, message), part in zip(learned.items(), parts, strict=True):
            words = _words(message)
            lost = [word for word in words if number in dropped or not _is_written(word, part)]
            if may_be_empty and lost and lost == words and not str(message.get("content") or "").strip():
                raise ConfigError(
                    f"{where}: the chat template writes nothing of what the assistant says in message {number + 1}, so an "
                    f"empty answer would be learned ({lost[0][:40]!r} is missing): choose a model whose chat template "
                    'writes it, or give the message "weight": 0'
                )
            self.lost += [f"{where}, message {number + 1}: {word[:40]!r}" for word in lost[:1]]

    def _with_fixed_date(self, tools: Messages | None) -> str:
        """The chat template for these `tools`. If it writes today's date, it gets a fixed date.

        Otherwise data prepared tomorrow would differ, and no run could resume on it.
        """
        template = self.tokenizer.get_chat_template(tools=tools)
        if "strftime_now" not in template:
            return template
        codes = [f"%{letter}" for letter in ("-d", "-m", "-H", "-I", *"aAbBdeFHIjmMpSTyY")]
        written = "format" + "".join(f".replace({code!r}, {TODAY.strftime(code)!r})" for code in codes)
        return f"{{%- macro strftime_now(format) -%}}{{{{ {written} }}}}{{%- endmacro %}}{{{{ '' }}}}{template}"


def _in_parts(messages: Messages) -> Messages:
    """The messages with texts as lists of parts, for templates of models that also take images."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _called(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The functions that a turn calls, with their arguments."""
    return [call["function"] for call in message.get("tool_calls") or []]


def _words(message: dict[str, Any]) -> list[str]:
    """What an assistant's turn says: its content, its reasoning, and the names and arguments of its calls."""

    def texts(value: Any) -> list[str]:
        if isinstance(value, dict):
            value = [*value, *value.values()]
        return [t for part in value for t in texts(part)] if isinstance(value, list) else [value] * isinstance(value, str)

    values = [message.get(key) for key in ("content", "reasoning_content", "reasoning", "thinking")]
    values += [call.get(key) for call in _called(message) for key in ("name", "arguments")]
    return [text for text in texts(values) if text.strip()]


def _is_written(word: str, text: str) -> bool:
    """Whether a text has `word` in it, as it is or as JSON. White space does not count, since templates change it."""
    if word in text:
        return True
    text = "".join(text.split())
    forms = [word, *(json.dumps(word, ensure_ascii=ascii)[1:-1] for ascii in (False, True))]
    return any("".join(form.split()) in text for form in forms)


def _with_accepted_calls(messages: Messages, render: Callable[..., Any]) -> Messages:
    """The messages, with calls of tools in a form that the template writes.

    Arguments are objects, or JSON text if the template refuses objects or prints them as Python. A turn that calls
    a tool, and has no text, gets an empty or a null content if the template needs one.
    """
    if not any(map(_called, messages)):
        return messages
    arguments = [function.get("arguments") for message in messages for function in _called(message)]
    objects = [value for value in arguments if isinstance(value, dict) and value]
    silent = [number for number, message in enumerate(messages) if _called(message) and not message.get("content")]
    plain = [dict(message) for message in messages]

    def to_json(value: Any) -> Any:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value

    as_json = [
        {**message, "tool_calls": [with_arguments(call, to_json) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]
    contents: list[dict[str, Any]] = [{}, {"content": ""}, {"content": None}]
    for content in contents if silent else contents[:1]:
        for form in (plain, as_json) if objects else (plain,):
            turns = [{**turn, **content} if number in silent else turn for number, turn in enumerate(form)]
            with contextlib.suppress(Exception):
                text = render(turns)
                as_python = form is plain and any(str(value) in text for value in objects)
                if text and not as_python and not any(_is_dropped(render, text, turns, n) for n in silent[:1]):
                    return turns
    return as_json if objects else messages


def _is_dropped(render: Callable[..., Any], text: str, messages: Messages, number: int) -> bool:
    """Whether the `text` of a conversation is the same without what a turn says and calls, by whatever name it has it."""
    turn = {key: value for key, value in messages[number].items() if key not in SAYS} | {"content": ""}
    with contextlib.suppress(Exception):  # a template may refuse an empty turn
        return bool(render([*messages[:number], turn, *messages[number + 1 :]]) == text)
    return False


def _only_turns(spans: list[Span], turns: list[int], wanted: list[int], where: str) -> list[Span]:
    """The spans that a template marks, reduced to those of the `wanted` turns."""
    runs: list[Span] = []
    for first, last in spans:
        if runs and runs[-1][1] == first:  # a template may mark parts of a turn one by one
            first = runs.pop()[0]
        runs.append((first, last))
    if wanted == turns:
        return runs
    if len(runs) != len(turns) and wanted != turns[-1:]:
        raise ConfigError(f"{where}: the chat template marks {len(runs)} of {len(turns)} turns, so some cannot be left out")
    return [run for number, run in zip(reversed(turns), reversed(runs), strict=False) if number in wanted][::-1]


class _Part(NamedTuple):
    """Some turns of a conversation after its first ones, as a short conversation with the same text."""

    messages: Messages
    text: str
    first: int  # number in the conversation of the first of these turns
    number: int  # to add to a turn's number here, to get that in the conversation
    place: int  # likewise to a place in the text


def _parts(render: Callable[..., Any], text: str, messages: Messages, wanted: int) -> list[_Part]:
    """The rendered conversation in parts, so that the time to find `wanted` turns grows with the conversation's length.

    A part is its first messages up to the first answer, some later turns, and the message after these. Rendered, the later
    turns have to be what they are in `text`, and all parts together `text`. Else the conversation is one part.
    """
    whole = [_Part(messages, text, 0, 0, 0)]
    after = [n for n in range(1, len(messages)) if messages[n - 1]["role"] == "assistant"]
    starts = [n for n in after if messages[n]["role"] == "user"]
    if len(starts) < len(messages) / 16:  # one task, and many calls of tools
        starts = [n for n in after if messages[n]["role"] in ("user", "tool")]
    firsts = [0]
    for n in starts:
        firsts += [n] * (n >= firsts[-1] + 6)
    if wanted < 4 or len(firsts) < 4:
        return whole
    heads: dict[str, tuple[Messages, str]] = {"": ([], "")}  # by the role of the message that follows
    parts, place = [], 0
    with contextlib.suppress(Exception):  # a template may refuse such a conversation
        for first, last in zip(firsts, [*firsts[1:], len(messages)], strict=True):
            role = messages[first]["role"] if first else ""
            if role not in heads:
                head = messages[: next(n for n in starts if messages[n]["role"] == role)]
                heads[role] = head, render([*head, {**messages[first], "content": HERE}]).partition(HERE)[0]
            head, before = heads[role]
            some, then = [*head, *messages[first:last]], messages[last : last + 1]
            written, found, _ = render(some + [{**turn, "content": HERE} for turn in then]).partition(HERE)
            size = len(written) - len(before)
            if before + text[place : place + size] != written or bool(then) != bool(found):
                return whole
            parts.append(_Part(some + then, written, first, first - len(head), place - len(before)))
            place += size
        return parts if place == len(text) else whole
    return whole


def _part_of(parts: list[_Part], number: int) -> _Part:
    """The part with a turn of the conversation."""
    return parts[bisect_right(parts, number, key=lambda part: part.first) - 1]


def _find_turn(render: Callable[..., Any], part: _Part, number: int) -> Span | None:
    """The span of an assistant's turn in the rendered `text`, including its end token. None if it cannot be found.

    Some templates render the last turn differently, with its thoughts or with another end token. Some write <think> in the
    generation prompt, but not in a finished conversation.
    """
    messages, text, number, place = part.messages, part.text, number - part.number, part.place
    if number:
        before = render(messages[:number], add_generation_prompt=True)
    else:
        before = render([{"role": "assistant", "content": HERE}]).partition(HERE)[0]  # templates refuse an empty list
    if not text.startswith(before):
        before = re.sub(r"(<think>\s*)?(</think>\s*)?$", "", before)
    if text.startswith(before):
        as_last_turn = render(messages[: number + 1]).rstrip()
        if text.startswith(as_last_turn):
            return place + len(before), place + len(as_last_turn)
    for calls in ({}, {"tool_calls": messages[number].get("tool_calls")}):
        with contextlib.suppress(Exception):  # a template may refuse a tool result without a call
            span = _find_by_placeholder(render, text, messages, number, before, calls)
            if span is not None:
                return place + span[0], place + span[1]
    return None


def _find_by_placeholder(
    render: Callable[..., Any], text: str, messages: Messages, number: int, before: str, calls: dict[str, Any]
) -> Span | None:
    """`_find_turn` for a turn before the last: render it and the next turn as placeholders, and find the text between."""
    until_here = [*messages[:number], {"role": "assistant", "content": HERE, **calls}]
    both = render([*until_here, {**messages[number + 1], "content": NEXT}, *messages[number + 2 :]])
    if HERE not in both or NEXT not in both:
        return None
    if not text.startswith(before):
        before = both.partition(HERE)[0]
    between = both.rpartition(HERE)[2].partition(NEXT)[0]
    end = text.find(between, len(before))
    if end < 0 or not text.startswith(before) or not between.strip():
        return None
    at_the_end = render(until_here).rpartition(HERE)[2]
    closing = "".join(a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(between, at_the_end, strict=False)))
    if not closing and at_the_end.strip() and not between[0].isspace():
        return None  # the last turn ends with another token
    whole = re.sub(r"<[^<>]*$", "", closing)  # drop a partial token, the common prefix of two, unless nothing else is left
    return len(before), end + len((whole if whole.strip() else closing).rstrip())
