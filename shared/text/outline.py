"""Where answers stand in what a chat template has written, without marks of its own.

The conversation is written twice: as it is, and with a placeholder (here ①, ②) for each answer.
What stands between two placeholders is a gap. The gaps are looked for in the text; what lies
between two of them is an answer, with the token that ends it:

    outline   <user>Hi<end><assistant>①<end><user>And?<end><assistant>②<end>
    gaps      [---------------------]  [------------------------------]  [--]
    text      <user>Hi<end><assistant>Hello!<end><user>And?<end><assistant>Fine.<end>
    answers                           [----------]                         [--------]
"""

import re
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from os.path import commonprefix
from typing import Any, NamedTuple

from shared.text.forms import Messages

OPEN = "\ufdd0"
CLOSE = "\ufdd1"  # around the number of a turn, a placeholder: no text has these characters
MARK = re.compile(f"{OPEN}(\\d*){CLOSE}")
TEXTS = ("content", "reasoning_content", "reasoning", "thinking")  # keys of an assistant's words
Span = tuple[int, int]  # first and last + 1 character in the rendered text


class Answer(NamedTuple):
    """Where an assistant's turn stands in the rendered text, with its end token."""

    turn: int
    start: int
    stop: int
    follows: bool  # what the template's generation prompt gives at inference


class _Gap(NamedTuple):
    """What the template writes before an answer, after the one before that."""

    turn: int  # of the answer
    text: str
    thought: str  # <think> of the generation prompt, with which the answer may begin
    is_prompt: bool  # the text ends as it does at inference, with the generation prompt
    end_length: int  # characters of the answer's end token, with which the next gap begins


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
    begin = 0  # of the gap, in the outline
    for turn, (mark, mark_stop) in outline.marks.items():
        role = messages[turn - 1]["role"] if turn else ""
        if role not in prompts:
            prompts[role] = outline.prompt_before(turn)
        prompt, thought, is_alike = prompts[role]
        place = outline.text.rfind(prompt, outline.text.rfind(CLOSE, 0, mark) + 1, mark)
        is_prompted = place >= 0
        written = outline.text[begin : place + len(prompt) if is_prompted else mark]
        end_length = outline.end_length(turn)
        begin = mark_stop
        if turn in outline.calling:
            if not (turn and prompt and is_prompted):
                return []
            # what closes arguments depends on what they are, so the next gap begins after it
            begin += end_length
            end_length = 0
        written = MARK.sub("", written)
        gaps.append(_Gap(turn, written, thought, is_prompted and is_alike, end_length))
    last = MARK.sub("", outline.text[begin:])
    places = _in_order(text, [*(gap.text for gap in gaps), last])
    answers = []
    for gap, (place, next_place) in zip(gaps, pairwise(places), strict=False):
        start = place + len(gap.text)
        thinks = text.startswith(gap.thought, start)
        start += len(gap.thought) * thinks
        stop = len(text[: next_place + gap.end_length].rstrip())
        answers.append(Answer(gap.turn, start, stop, gap.is_prompt and thinks))
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

    def end_length(self, turn: int) -> int:
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
    said: dict[str, Any] = {key: mark for key in TEXTS if message.get(key)}
    if not calls:
        return {**message, **(said or {"content": mark})}
    if "content" in said:  # some templates write it after the tool's answer
        said["content"] = ""
    marked = []
    for call in message["tool_calls"]:
        function = call["function"]
        is_text = isinstance(function.get("arguments"), str)
        function = {**function, "arguments": mark if is_text else {mark: mark}}
        marked.append({**call, "function": function})
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
