"""Turn a conversation into tokens and a loss mask."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from itertools import chain, pairwise
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shared.data.store import Notes
from shared.demo import DEFAULT_TEMPLATE
from shared.models.tokenizers import leading_bos
from shared.process.errors import ConfigError
from shared.text.forms import Example, Messages, with_arguments
from shared.text.special import Special

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TODAY = datetime(2024, 7, 26)  # the date that Llama 3's chat templates write without a clock
HERE = "\ufdd0"
NEXT = "\ufdd1"  # around the number of a turn, a placeholder: no text has these characters
MARK = re.compile(f"{HERE}(\\d*){NEXT}")
# keys of what an assistant says
SAYS = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")
Span = tuple[int, int]  # first and last + 1 character in the rendered text


class Encoder:
    """Turn examples into (token ids, loss mask), with the tokenizer's chat template or a default
    one.

    Args:
        tokenizer: a fast one, because it reports token offsets. It gets DEFAULT_TEMPLATE if it has
            no chat template.
        loss_on: assistant, completion or all.

    Raises:
        ConfigError: the tokenizer is a slow one or has no end-of-text token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: str) -> None:
        if not tokenizer.is_fast:
            raise ConfigError(
                "the tokenizer is a slow one, which cannot tell where its tokens stand in the text"
            )
        if tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no end-of-text token")
        self.tokenizer = tokenizer
        self.loss_on = loss_on
        self.bos = leading_bos(tokenizer)
        self.came_with_template = bool(tokenizer.chat_template)
        if not self.came_with_template:
            tokenizer.chat_template = ("{{ bos_token }}" if self.bos else "") + DEFAULT_TEMPLATE
        self.has_own_template = not str(tokenizer.chat_template).endswith(DEFAULT_TEMPLATE)
        self.marks_turns = bool(
            re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template))
        )
        special = Special(tokenizer)
        self.special = special.ids
        self._pattern = special.pattern
        # whether the template writes content that is a list of parts, and not text
        self.takes_parts = False
        self.ends = {tokenizer.eos_token_id}  # and what the chat template writes after an answer
        turns = [{"role": "user", "content": NEXT}, {"role": "assistant", "content": HERE}]
        for as_parts in (False, True):
            with contextlib.suppress(Exception):  # a template may refuse these turns
                written = _in_parts(turns) if as_parts else turns
                _, found, after = str(
                    tokenizer.apply_chat_template(written, tokenize=False)
                ).partition(HERE)
                if found:
                    self.takes_parts = as_parts
                    self.ends |= self.special.intersection(
                        tokenizer(after, add_special_tokens=False)["input_ids"]
                    )
                    break

    def __call__(
        self, example: Example, where: str, notes: Notes | None = None
    ) -> tuple[list[int], np.ndarray]:
        """(ids, learned): the token ids, and [len(ids)] bool, true for the tokens in the loss.

        A learned turn ends with a special token in the loss, or else with the first word of what
        follows it. The last one gets the end-of-text token if the template, or a text, has no end
        token there, unless `example.continues`.

        Args:
            notes: gets `special` (texts with the string of a special token, which is read as that
                token), `lost` (learned turns, and tools' answers, that are not written whole) and
                `unlike` (learned turns that do not follow the generation prompt), each with its
                place.

        Raises:
            ConfigError: the chat template refuses the conversation.
        """
        notes = Notes() if notes is None else notes
        self._note_special(example, where, notes)
        if example.messages is None:
            text = example.prompt + example.completion
            ids, learned, _ = self._tokens(text, [(len(example.prompt), len(text))])
            if ids[: len(self.bos)] != self.bos:  # text that is rendered already may begin with it
                ids = self.bos + ids
                learned = np.concatenate([np.zeros(len(self.bos), bool), learned])
        else:
            ids, learned = self._chat(example, where, notes)
        if self.loss_on == "all":
            learned = np.ones(len(ids), bool)
        # the last token of each turn
        for end in np.flatnonzero(np.diff(learned, append=False) & learned).tolist():
            # what the model has to write next, as it ends the turn there
            if self.end_of(ids, end + 1) is None:
                after = next(
                    (
                        i
                        for i in range(end + 1, len(ids))
                        if str(self.tokenizer.decode(ids[i])).strip()
                    ),
                    end,
                )
                if ids[after] in self.special or learned[end + 1 :].any():
                    learned[end + 1 : after + 1] = True
        last = int(np.flatnonzero(learned)[-1]) if learned.any() else -1
        found = self.end_of(ids, last + 1)
        if (
            last >= 0
            and not example.continues
            and found not in (self.ends if example.messages is None else self.special)
        ):
            ids = [*ids[: last + 1], self.tokenizer.eos_token_id]
            learned = np.append(learned[: last + 1], True)
        return ids, learned

    def _note_special(self, example: Example, where: str, notes: Notes) -> None:
        texts = {where: example.prompt + example.completion}
        if example.messages is not None:
            texts = {
                f"{where}, message {n}": "\n".join(_words(turn))
                for n, turn in enumerate(example.messages, 1)
            }
        for place, text in texts.items():
            if match := self._pattern.search(text):
                notes.add("special", f"{place}: {match[0]!r}")

    def _tokens(self, text: str, spans: Sequence[Span]) -> tuple[list[int], np.ndarray, np.ndarray]:
        """(ids, mask, places): the token ids, [len(ids)] bool, true for tokens in one of the spans,
        and [len(ids), 2].

        So the token " word" counts even if the prompt ends with the space and the completion begins
        with the word.
        """
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        places = np.fromiter(chain.from_iterable(encoded["offset_mapping"]), np.int64).reshape(
            -1, 2
        )
        inside = np.zeros(len(places), dtype=bool)
        for first, last in spans:
            inside[
                np.searchsorted(places[:, 1], first, side="right") : np.searchsorted(
                    places[:, 0], last
                )
            ] = True
        return list(encoded["input_ids"]), inside, places

    def end_of(self, ids: Sequence[int], stop: int) -> int | None:
        """The special token at the end of `ids[:stop]`, or None. White space after the token is
        ignored.
        """
        for token in (ids[place] for place in range(stop - 1, -1, -1)):
            if token in self.special:
                return token
            if str(self.tokenizer.decode([token])).strip():
                return None
        return None

    def _chat(self, example: Example, where: str, notes: Notes) -> tuple[list[int], np.ndarray]:
        messages = example.messages or []
        tools = example.tools
        if tools and "tools" not in str(self.tokenizer.chat_template):
            raise ConfigError(f"{where}: has tools, but the chat template does not write them")
        if not self.has_own_template and any(
            m["role"] == "tool" or m.get("tool_calls") for m in messages
        ):
            raise ConfigError(
                f"{where}: calls a tool, but the default chat template has no tools: choose a "
                "model with a chat template"
            )
        turns = [
            number for number, message in enumerate(messages) if message["role"] == "assistant"
        ]
        wanted = [
            n
            for n in (turns[-1:] if self.loss_on == "completion" else turns)
            if messages[n].get("weight", 1)
        ]
        messages = [
            {key: value for key, value in message.items() if key != "weight"}
            for message in messages
        ]
        runs: list[Span] = []
        answers: list[_Answer] = []
        try:
            template = self._with_fixed_date(tools)
            options: Any = {"tools": tools, "chat_template": template, **example.template_options}
            render: Any = partial(self._render, **options)
            messages = _with_accepted_calls(messages, render)
            if self.marks_turns:
                from transformers.utils.chat_template_utils import render_jinja_template

                options |= {
                    "return_assistant_tokens_mask": True,
                    **self.tokenizer.special_tokens_map,
                }
                marked: Any = render_jinja_template(
                    [_in_parts(messages) if self.takes_parts else messages], **options
                )
                text = marked[0][0]
                runs = marked[1][0]
            else:
                text = render(messages)
            if wanted and self.loss_on != "all":
                # it may refuse placeholders
                with contextlib.suppress(*([Exception] if self.marks_turns else [])):
                    answers = _find_answers(render, text, messages, wanted)
        except Exception as error:  # jinja2's errors, and templates' own raise_exception
            raise ConfigError(
                f"{where}: the chat template refuses this conversation ({error})"
            ) from None
        spans = [(answer.first, answer.last) for answer in answers]
        parts = [text[first:last] for first, last in spans]
        if self.loss_on == "all":
            spans = [(0, len(text))]
            parts = [text] * len(wanted)
        elif runs:
            within = [
                [run for run in runs if run[0] < last and first < run[1]] for first, last in spans
            ]
            whole = "".join(text[first:last] for first, last in runs)
            parts = ["".join(text[first:last] for first, last in part) for part in within] or [
                whole
            ] * len(wanted)
            spans = runs if wanted == turns else [*chain(*within)]
        if wanted and not spans:
            raise ConfigError(
                f"{where}: what the assistant says cannot be found in what the chat template makes "
                "of it: use a tokenizer "
                "whose template marks it with {% generation %}, --loss_on completion (the last "
                "answer), or --loss_on all"
            )
        calling = {answer.number for answer in answers if answer.calls}
        silent = [
            n
            for n in wanted
            if n not in calling and not str(messages[n].get("content") or "").strip()
        ]
        dropped = {
            n for n in silent if _words(messages[n]) and _is_dropped(render, text, messages, n)
        }
        self._look_for({n: messages[n] for n in wanted}, parts, dropped, where, notes)
        shown = [
            (number, str(turn.get("content")))
            for number, turn in enumerate(messages, 1)
            if turn["role"] == "tool"
        ]
        for number, said in shown:
            if not _is_written(said, text):
                notes.add("lost", f"{where}, message {number}: {said[:40]!r}")
        ids, mask, places = self._tokens(text, spans)
        # of tokens, which do not go across the end of a prompt
        borders = {*places.ravel().tolist()}

        def unlike(found: list[_Answer]) -> set[int]:
            return {
                answer.number
                for answer in found
                if not (answer.follows and answer.first in borders)
            } - {0}

        asked: dict[int, bool] = {}
        for value in (False, True) if unlike(answers) and "enable_thinking" in template else ():
            with contextlib.suppress(Exception):  # a template may refuse it
                found = _find_answers(
                    partial(render, enable_thinking=value), text, messages, wanted
                )
                asked |= dict.fromkeys(
                    {answer.number for answer in found} - unlike(found) - asked.keys(), value
                )
        for number in sorted(unlike(answers)):
            option = json.dumps({"chat_template_kwargs": {"enable_thinking": asked.get(number)}})[
                1:-1
            ]
            how = f", as it does with {option}" if number in asked else ""
            notes.add("unlike", f"{where}, message {number + 1}{how}")
        return ids, mask

    def prompt(self, example: Example, where: str) -> list[int]:
        """The tokens of messages, up to where the next answer begins.

        Raises:
            ConfigError: the chat template refuses the conversation.
        """
        messages = [
            {key: value for key, value in message.items() if key != "weight"}
            for message in example.messages or []
        ]
        try:
            text = self._render(
                messages,
                tools=example.tools,
                chat_template=self._with_fixed_date(example.tools),
                add_generation_prompt=True,
                **example.template_options,
            )
        except Exception as error:  # jinja2's errors, and templates' own raise_exception
            raise ConfigError(
                f"{where}: the chat template refuses this conversation ({error})"
            ) from None
        return self._tokens(text, [])[0]

    def _render(self, messages: Messages, **options: Any) -> str:
        turns = _in_parts(messages) if self.takes_parts else messages
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False, **options))

    def _look_for(
        self,
        learned: dict[int, dict[str, Any]],
        parts: list[str],
        dropped: set[int],
        where: str,
        notes: Notes,
    ) -> None:
        """Note turns with words that are not in the rendered text. Refuse one of which nothing is
        there.

        Args:
            learned: the learned turns, by their numbers.
            parts: what is learned of each in the rendered text.
            dropped: numbers of turns of which the template writes nothing. Short words may be in a
                part by chance.
        """
        for (number, message), part in zip(learned.items(), parts, strict=True):
            words = _words(message)
            lost = [word for word in words if number in dropped or not _is_written(word, part)]
            marks_it = bool(part) or not self.marks_turns  # a turn without marks is no empty answer
            if (
                marks_it
                and lost
                and lost == words
                and not str(message.get("content") or "").strip()
            ):
                raise ConfigError(
                    f"{where}: the chat template writes nothing of what the assistant says in "
                    f"message {number + 1}, so an "
                    f"empty answer would be learned ({lost[0][:40]!r} is missing): choose a model "
                    "whose chat template "
                    'writes it, or give the message "weight": 0'
                )
            if lost:
                notes.add("lost", f"{where}, message {number + 1}: {lost[0][:40]!r}")

    def _with_fixed_date(self, tools: Messages | None) -> str:
        """The chat template for these `tools`. If it writes today's date, it gets a fixed date.

        Otherwise data prepared tomorrow would differ, and no run could resume on it.
        """
        template = self.tokenizer.get_chat_template(tools=tools)
        if "strftime_now" not in template:
            return template
        codes = [f"%{letter}" for letter in ("-d", "-m", "-H", "-I", *"aAbBdeFHIjmMpSTyY")]
        written = "format" + "".join(
            f".replace({code!r}, {TODAY.strftime(code)!r})" for code in codes
        )
        macro = f"{{%- macro strftime_now(format) -%}}{{{{ {written} }}}}{{%- endmacro %}}"
        return f"{macro}{{{{ '' }}}}{template}"


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
    """What an assistant's turn says: its content, its reasoning, and the names and arguments of its
    calls.
    """

    def texts(value: Any) -> list[str]:
        if isinstance(value, dict):
            value = [*value, *value.values()]
        return (
            [t for part in value for t in texts(part)]
            if isinstance(value, list)
            else [value] * isinstance(value, str)
        )

    values = [message.get(key) for key in ("content", "reasoning_content", "reasoning", "thinking")]
    values += [call.get(key) for call in _called(message) for key in ("name", "arguments")]
    return [text for text in texts(values) if text.strip()]


def _is_written(word: str, text: str) -> bool:
    """Whether a text has `word` in it, as it is or as JSON. White space does not count, since
    templates change it.
    """
    if word in text:
        return True
    text = "".join(text.split())
    forms = [word, *(json.dumps(word, ensure_ascii=ascii)[1:-1] for ascii in (False, True))]
    return any("".join(form.split()) in text for form in forms)


def _with_accepted_calls(messages: Messages, render: Callable[..., Any]) -> Messages:
    """The messages, with calls of tools in a form that the template writes.

    Arguments are objects, or JSON text if the template refuses objects or prints them as Python. A
    turn that calls a tool, and has no text, gets an empty or a null content if the template needs
    one.
    """
    if not any(map(_called, messages)):
        return messages
    arguments = [function.get("arguments") for message in messages for function in _called(message)]
    objects = [value for value in arguments if isinstance(value, dict) and value]
    silent = [
        number
        for number, message in enumerate(messages)
        if _called(message) and not message.get("content")
    ]
    to_json = partial(
        with_arguments,
        convert=lambda value: (
            json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
        ),
    )
    as_json = [
        {**message, "tool_calls": [*map(to_json, message["tool_calls"])]}
        if _called(message)
        else message
        for message in messages
    ]
    contents: list[dict[str, Any]] = [{}, {"content": ""}, {"content": None}]
    for content in contents if silent else contents[:1]:
        for form in (messages, as_json) if objects else (messages,):
            turns = [
                {**turn, **content} if number in silent else turn
                for number, turn in enumerate(form)
            ]
            with contextlib.suppress(Exception):
                text = render(turns)
                as_python = form is messages and any(str(value) in text for value in objects)
                if (
                    text
                    and not as_python
                    and not any(_is_dropped(render, text, turns, n) for n in silent[:1])
                ):
                    return turns
    return as_json if objects else messages


def _is_dropped(render: Callable[..., Any], text: str, messages: Messages, number: int) -> bool:
    """Whether the `text` of a conversation is the same without what a turn says and calls, by
    whatever name it has it.
    """
    turn = {key: value for key, value in messages[number].items() if key not in SAYS} | {
        "content": ""
    }
    with contextlib.suppress(Exception):  # a template may refuse an empty turn
        return bool(render([*messages[:number], turn, *messages[number + 1 :]]) == text)
    return False


class _Answer(NamedTuple):
    """Where an assistant's turn stands in the rendered text, with its end token."""

    number: int
    first: int
    last: int
    calls: bool  # tools, and they are written
    follows: bool  # what the template's generation prompt gives at inference, which ends at `first`


def _as_placeholder(message: dict[str, Any], mark: str, *, calls: bool) -> dict[str, Any]:
    """An assistant's turn that says nothing but `mark`: in its texts, or in its thoughts and the
    arguments of its calls.
    """
    said: dict[str, Any] = {key: mark for key in SAYS[:4] if message.get(key)}
    if not calls:
        return {**message, **(said or {"content": mark})}
    if "content" in said:  # some templates write it after the tool's answer
        said["content"] = ""
    marked = []
    for call in message["tool_calls"]:
        is_text = isinstance(call["function"].get("arguments"), str)
        marked.append(
            {
                **call,
                "function": {**call["function"], "arguments": mark if is_text else {mark: mark}},
            }
        )
    return {**message, **said, "tool_calls": marked}


def _divided(message: dict[str, Any], *, before_answer: bool) -> dict[str, Any]:
    """A turn that is not looked for, with a placeholder within its text: no generation prompt is
    looked for before it.

    Not so an answer further up, of which templates may write anything.
    """
    said = message.get("content") or ""
    further_up = (
        message["role"] == "assistant" and not message.get("tool_calls") and not before_answer
    )
    if further_up or not said.strip():
        return message
    return {**message, "content": said[: len(said) // 2] + HERE + NEXT + said[len(said) // 2 :]}


def _in_order(text: str, pieces: list[str]) -> list[int]:
    """Where `pieces` are in `text`, which the first begins and the last ends. Empty if there is no
    order, or several.
    """
    places = [0]
    for before, piece in pairwise(pieces):
        places.append(text.find(piece, places[-1] + len(before)))
    places[-1] = len(text) - len(pieces[-1])
    ends = zip(pieces[1:], places[1:], [*places[2:], len(text)], strict=True)
    fits = text.startswith(pieces[0]) and all(
        0 <= place == text.rfind(piece, 0, end) for piece, place, end in ends
    )
    return places if fits else []


def _find_answers(
    render: Callable[..., str], text: str, messages: Messages, wanted: list[int]
) -> list[_Answer]:
    """The `wanted` turns in the rendered `text`. Empty if one of them cannot be found.

    Rendered with placeholders as the answers, a conversation shows the text between answers, which
    is found in `text`, too. An answer begins after the generation prompt, without its <think>,
    which some templates leave out of a finished conversation. It ends with the common beginning of
    what follows it and of what follows the last one: its end token.
    """
    calling = {number for number in wanted if messages[number].get("tool_calls")}
    for _ in range(2):
        shown = [
            _as_placeholder(turn, f"{HERE}{n}{NEXT}", calls=n in calling)
            if n in wanted
            else _divided(turn, before_answer=n + 1 in wanted)
            for n, turn in enumerate(messages)
        ]
        written = render(shown)
        marks: dict[str, list[int]] = {}
        for found in MARK.finditer(written):
            marks.setdefault(found[1], [found.start(), 0])[1] = found.end()
        marks.pop("", None)
        if [*map(int, marks)] == wanted:
            break
        calling &= {*map(int, marks)}  # the template writes no calls
    else:
        return []
    last_with = {number in calling: number + 1 for number in wanted}
    tails = {
        calls: (render(shown[:stop]) if stop < len(shown) else written).rpartition(NEXT)[2]
        for calls, stop in last_with.items()
    }
    # by the role of the last message, what follows its text, and the last thought
    prompts: dict[str, tuple[str, str]] = {}
    pieces = []
    facts = []
    begin = 0
    for number, (first, last) in zip(wanted, marks.values(), strict=True):
        role = messages[number - 1]["role"] if number else ""
        before = ""
        if role not in prompts:
            after = written[:first]
            if number:  # templates refuse an empty list
                prompt = [*shown[: number - 1], {**shown[number - 1], "content": HERE + NEXT}]
                before, _, after = render(prompt, add_generation_prompt=True).rpartition(
                    HERE + NEXT
                )
            header = re.sub(r"(<think>\s*)?(</think>\s*)?$", "", after)
            prompts[role] = header, after.removeprefix(header)
        header, thought = prompts[role]
        place = written.rfind(header, written.rfind(NEXT, 0, first) + 1, first)
        if number in calling and not (number and header and place >= 0):
            return []
        pieces.append(MARK.sub("", written[begin : place + len(header) if place >= 0 else first]))
        shared = commonprefix([written[last:].partition(HERE)[0], tails[number in calling]])  # noqa: RUF071
        end = len(re.sub(r"(?<=\S)\s*<[^<>]*$", "", shared).rstrip())  # without a part of a token
        # the end of arguments depends on what they are
        begin = last + end if number in calling else last
        facts.append(
            (number, thought, place >= 0 and written.startswith(before), last + end - begin)
        )
    pieces.append(MARK.sub("", written[begin:]))
    places = _in_order(text, pieces)
    answers = []
    for (number, thought, follows, end), piece, place, last in zip(
        facts, pieces, places, places[1:], strict=False
    ):
        first = place + len(piece)
        last = last + end
        opened = text.startswith(thought, first)
        while text[last - 1 : last].isspace():
            last -= 1
        answers.append(
            _Answer(
                number, first + len(thought) * opened, last, number in calling, follows and opened
            )
        )
    return answers
