"""A conversation to tokens, and which of them the loss counts."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.data import prepared
from shared.demo import DEFAULT_TEMPLATE
from shared.process.errors import ConfigError
from shared.text.forms import Example, _with_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TODAY = datetime(2024, 7, 26)  # what Llama 3's templates take for it without a clock
MINE, NEXT = "\ue000", "\ue001"  # characters that nobody writes


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
