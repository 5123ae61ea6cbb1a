"""Turn a conversation into tokens and a loss mask."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import cached_property, partial
from itertools import chain, pairwise
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shared.data.store import Notes
from shared.demo import DEFAULT_TEMPLATE
from shared.models.tokenizers import end_of_text, leading_bos
from shared.process.errors import ConfigError
from shared.text.forms import IMAGE, Example, Messages, with_arguments
from shared.text.special import Special

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TODAY = datetime(2024, 7, 26)  # the date that Llama 3's chat templates write without a clock
OPEN = "\ufdd0"
CLOSE = "\ufdd1"  # around the number of a turn, a placeholder: no text has these characters
MARK = re.compile(f"{OPEN}(\\d*){CLOSE}")
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
        ConfigError: the tokenizer has no end-of-text token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: str) -> None:
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
        self.ends = {end_of_text(tokenizer)}  # and what the chat template writes after an answer
        turns = [{"role": "user", "content": CLOSE}, {"role": "assistant", "content": OPEN}]
        for as_parts in (False, True):
            with contextlib.suppress(Exception):  # a template may refuse these turns
                written = _in_parts(turns) if as_parts else turns
                _, found, after = str(
                    tokenizer.apply_chat_template(written, tokenize=False)
                ).partition(OPEN)
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
        self._refuse_unwritten_tools(example, where)
        messages = example.messages or []
        turns = [n for n, turn in enumerate(messages) if turn["role"] == "assistant"]
        chosen = turns[-1:] if self.loss_on == "completion" else turns
        wanted = [n for n in chosen if messages[n].get("weight", 1)]
        marked: list[Span] = []  # by {% generation %}
        answers: list[Answer] = []
        with _refusals_named(where):
            options = self._options(example)
            render: Any = partial(self._render, **options)
            messages = _for_template(messages, render)
            if self.marks_turns:
                text, marked = self._render_marked(messages, **options)
            else:
                text = render(messages)
            if wanted and self.loss_on != "all":
                # it may refuse placeholders
                with contextlib.suppress(*([Exception] if self.marks_turns else [])):
                    answers = find_answers(render, text, messages, wanted)
        spans = [(answer.start, answer.stop) for answer in answers]
        learned = [text[start:stop] for start, stop in spans]  # of each wanted turn
        if self.loss_on == "all":
            spans = [(0, len(text))]
            learned = [text] * len(wanted)
        elif marked:
            of_answers = [
                [mark for mark in marked if mark[0] < stop and start < mark[1]]
                for start, stop in spans
            ]
            of_answers = of_answers or [marked] * len(wanted)
            learned = ["".join(text[a:b] for a, b in marks) for marks in of_answers]
            spans = marked if wanted == turns else [*chain(*of_answers)] * bool(answers)
        if wanted and not spans:
            raise ConfigError(
                f"{where}: what the assistant says cannot be found in what the chat template makes "
                "of it: use a tokenizer "
                "whose template marks it with {% generation %}, --loss_on completion (the last "
                "answer), or --loss_on all"
            )
        calling = {answer.turn for answer in answers if answer.calls}
        for n, part in zip(wanted, learned, strict=True):
            turn = messages[n]
            words = _words(turn)
            is_silent = not str(turn.get("content") or "").strip()
            # short words may be in `part` by chance
            is_dropped = words and is_silent and n not in calling
            is_dropped = is_dropped and _is_dropped(render, text, messages, n)
            lost = [word for word in words if is_dropped or not _is_written(word, part)]
            # a turn without marks is no empty answer
            if is_silent and lost and lost == words and (part or not self.marks_turns):
                raise ConfigError(
                    f"{where}: the chat template writes nothing of what the assistant says in "
                    f"message {n + 1}, so an empty answer would be learned ({lost[0][:40]!r} is "
                    "missing): choose a model whose chat template "
                    'writes it, or give the message "weight": 0'
                )
            if lost:
                notes.add("lost", f"{where}, message {n + 1}: {lost[0][:40]!r}")
        for n, turn in enumerate(messages, 1):
            if turn["role"] == "tool" and not _is_written(said := str(turn.get("content")), text):
                notes.add("lost", f"{where}, message {n}: {said[:40]!r}")
        ids, mask, places = self._tokens(text, spans)
        # of tokens, which do not go across the end of a prompt
        borders = {*places.ravel().tolist()}

        def unlike(found: list[Answer]) -> set[int]:
            """The turns that do not follow the generation prompt."""
            follow = {a.turn for a in found if a.follows and a.start in borders}
            return {a.turn for a in found} - follow - {0}

        thinking: dict[int, bool] = {}  # with which --enable_thinking a turn would follow it
        can_think = "enable_thinking" in options["chat_template"]
        for value in (False, True) if can_think and unlike(answers) else ():
            with contextlib.suppress(Exception):  # a template may refuse it
                with_value = partial(render, enable_thinking=value)
                found = find_answers(with_value, text, messages, wanted)
                follow = {a.turn for a in found} - unlike(found)
                thinking = dict.fromkeys(follow, value) | thinking
        for n in sorted(unlike(answers)):
            option = {"chat_template_kwargs": {"enable_thinking": thinking.get(n)}}
            how = f", as it does with {json.dumps(option)[1:-1]}" if n in thinking else ""
            notes.add("unlike", f"{where}, message {n + 1}{how}")
        return ids, mask

    def prompt(self, example: Example, where: str) -> list[int]:
        """The tokens of messages, up to where the next answer begins.

        Raises:
            ConfigError: the chat template refuses the conversation, or does not write its tools.
        """
        self._refuse_unwritten_tools(example, where)
        with _refusals_named(where):
            render = partial(self._render, **self._options(example))
            messages = _for_template(example.messages or [], render)
            text = render(messages=messages, add_generation_prompt=True)
        return self._tokens(text, [])[0]

    def _options(self, example: Example) -> Any:
        """What the chat template is rendered with, beside the messages."""
        return {
            "tools": example.tools,
            "chat_template": self._with_fixed_date(example.tools),
            **example.template_options,
        }

    def _render(self, messages: Messages, **options: Any) -> str:
        turns = _in_parts(messages) if self.takes_parts else messages
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False, **options))

    def _render_marked(self, messages: Messages, **options: Any) -> tuple[str, list[Span]]:
        """(the text, what the template marks with {% generation %})."""
        from transformers.utils.chat_template_utils import render_jinja_template

        turns: Any = _in_parts(messages) if self.takes_parts else messages
        options = {**options, **self.tokenizer.special_tokens_map}
        rendered: Any = render_jinja_template([turns], return_assistant_tokens_mask=True, **options)
        (text,), (marks,) = rendered
        return text, marks

    def _refuse_unwritten_tools(self, example: Example, where: str) -> None:
        if example.tools and "tools" not in str(self.tokenizer.chat_template):
            raise ConfigError(f"{where}: has tools, but the chat template does not write them")
        if not self.has_own_template and any(
            turn["role"] == "tool" or turn.get("tool_calls") for turn in example.messages or ()
        ):
            raise ConfigError(
                f"{where}: calls a tool, but the default chat template has no tools: choose a "
                "model with a chat template"
            )

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
            else (value.split(IMAGE) if isinstance(value, str) else [])
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


@contextlib.contextmanager
def _refusals_named(where: str) -> Iterator[None]:
    """Let an error of a chat template say of which record it is."""
    try:
        yield
    except Exception as error:  # jinja2's errors, and templates' own raise_exception
        raise ConfigError(
            f"{where}: the chat template refuses this conversation ({error})"
        ) from None


def _for_template(messages: Messages, render: Callable[..., Any]) -> Messages:
    """The messages without weights, which are for the loss, and with calls of tools in a form that
    the template writes.

    Arguments are objects, or JSON text if the template refuses objects or prints them as Python. A
    turn that calls a tool, and has no text, gets an empty or a null content if the template needs
    one.
    """
    messages = [{key: turn[key] for key in turn if key != "weight"} for turn in messages]
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


class Answer(NamedTuple):
    """Where an assistant's turn stands in the rendered text, with its end token."""

    turn: int
    start: int
    stop: int
    calls: bool  # tools, and they are written
    follows: bool  # what the template's generation prompt gives at inference


class _Gap(NamedTuple):
    """What the template writes before an answer."""

    turn: int  # that follows
    text: str
    thought: str  # <think> of the generation prompt, with which the answer may begin
    has_prompt: bool  # whether the text ends with the generation prompt
    end: int  # of the answer's end token, the characters that the next gap begins with


def find_answers(
    render: Callable[..., str], text: str, messages: Messages, wanted: list[int]
) -> list[Answer]:
    """The `wanted` turns in the rendered `text`. Empty if one of them cannot be found.

    The conversation is rendered once more, as an `_Outline` with placeholders for answers. That
    shows the gaps between answers. They are looked for in `text`, and what is between two of them
    is an answer: without the <think> of the generation prompt, and with its end token.
    """
    outline = _Outline(render, messages, wanted)
    if [*outline.marks] != wanted:
        return []
    gaps: list[_Gap] = []
    prompts: dict[str, tuple[str, str, bool]] = {}  # by the role of the message before the answer
    begin = 0
    for turn, (mark, mark_stop) in outline.marks.items():
        role = messages[turn - 1]["role"] if turn else ""
        if role not in prompts:
            prompts[role] = outline.prompt_before(turn)
        prompt, thought, is_alike = prompts[role]
        place = outline.text.rfind(prompt, outline.text.rfind(CLOSE, 0, mark) + 1, mark)
        stop = place + len(prompt) if place >= 0 else mark
        end = outline.length_of_end(turn)
        gap = _Gap(turn, outline.text[begin:stop], thought, place >= 0 and is_alike, end)
        begin = mark_stop
        if turn in outline.calling:
            if not (turn and prompt and place >= 0):
                return []
            # what closes arguments depends on what they are, so the next gap begins after it
            begin += end
            gap = gap._replace(end=0)
        gaps.append(gap)
    pieces = [MARK.sub("", piece) for piece in (*(gap.text for gap in gaps), outline.text[begin:])]
    places = _in_order(text, pieces)
    answers = []
    for gap, piece, place, next_place in zip(gaps, pieces, places, places[1:], strict=False):
        start = place + len(piece)
        thinks = text.startswith(gap.thought, start)
        start += len(gap.thought) * thinks
        stop = next_place + gap.end
        while text[stop - 1 : stop].isspace():
            stop -= 1
        calls = gap.turn in outline.calling
        answers.append(Answer(gap.turn, start, stop, calls, gap.has_prompt and thinks))
    return answers


class _Outline:
    """A conversation with placeholders as its `wanted` answers, as the template writes it.

    Attributes:
        turns: the messages with placeholders.
        text: what the template makes of them.
        marks: the place of each wanted turn's placeholders, from the first to the last; not of one
            that the template leaves out.
        calling: the wanted turns that have them in their calls of tools.
    """

    def __init__(self, render: Callable[..., str], messages: Messages, wanted: list[int]) -> None:
        self.render = render
        self.calling = {n for n in wanted if messages[n].get("tool_calls")}
        self._write(messages, wanted)
        if [*self.marks] != wanted:  # the template does not write all calls
            self.calling &= self.marks.keys()
            self._write(messages, wanted)

    def _write(self, messages: Messages, wanted: list[int]) -> None:
        self.turns = [
            _as_placeholder(turn, f"{OPEN}{n}{CLOSE}", calls=n in self.calling)
            if n in wanted
            else _divided(turn, before_answer=n + 1 in wanted)
            for n, turn in enumerate(messages)
        ]
        self.text = self.render(self.turns)
        self.marks: dict[int, Span] = {}
        for mark in MARK.finditer(self.text):
            if mark[1]:
                start, _ = self.marks.get(int(mark[1]), mark.span())
                self.marks[int(mark[1])] = start, mark.end()

    def prompt_before(self, turn: int) -> tuple[str, str, bool]:
        """What the template writes at inference after the message before a turn.

        Returns:
            (the generation prompt without its <think> part, which some templates leave out of a
            finished conversation; that part; whether the text up to the prompt is that of the
            outline).
        """
        before = ""
        prompt = self.text[: self.marks[turn][0]]
        if turn:  # templates refuse an empty list
            *turns, last = self.turns[:turn]
            asked = [*turns, {**last, "content": OPEN + CLOSE}]
            written = self.render(asked, add_generation_prompt=True)
            before, _, prompt = written.rpartition(OPEN + CLOSE)
        header = re.sub(r"(<think>\s*)?(</think>\s*)?$", "", prompt)
        return header, prompt.removeprefix(header), self.text.startswith(before)

    def length_of_end(self, turn: int) -> int:
        """Characters of what ends a turn, after its placeholder: the common beginning of what
        follows there, and of what follows the last turn.
        """
        after = self.text[self.marks[turn][1] :].partition(OPEN)[0]
        end = commonprefix([after, self._tails[turn in self.calling]])  # noqa: RUF071
        # without a part of a token
        return len(re.sub(r"(?<=\S)\s*<[^<>]*$", "", end).rstrip())

    @cached_property
    def _tails(self) -> dict[bool, str]:
        """What follows the last turn, of those that call tools (True) and of the others."""
        tails = {}
        for calls, last in {n in self.calling: n for n in self.marks}.items():
            is_end = last == len(self.turns) - 1
            text = self.text if is_end else self.render(self.turns[: last + 1])
            tails[calls] = text.rpartition(CLOSE)[2]
        return tails


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
    return {**message, "content": said[: len(said) // 2] + OPEN + CLOSE + said[len(said) // 2 :]}


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
