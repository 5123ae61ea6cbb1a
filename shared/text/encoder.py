"""A conversation as tokens and a loss mask: what a text teaches that a template has written."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.data.notes import Notes
from shared.demo import DEFAULT_TEMPLATE
from shared.models.tokenizers import end_of_text, leading_bos
from shared.process.errors import ConfigError
from shared.text.forms import IMAGE, Example, Messages, with_arguments
from shared.text.outline import CLOSE, OPEN, TEXTS, Answer, Span, find_answers
from shared.text.special import Special

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# among roles: a turn after its like, an answer that comes first, a system text that does not
OUT_OF_TURN = re.compile(r"\b(user|assistant) \1\b|^(?:system )?assistant|. system")
TODAY = datetime(2024, 7, 26)  # the date that Llama 3's chat templates write without a clock


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
        turns = [{"role": "user", "content": CLOSE}, {"role": "assistant", "content": OPEN}]
        self.takes_parts = False
        as_texts = _attempt(self._render, turns)
        as_parts = _attempt(self._render, _in_parts(turns))
        # whether the template writes content that is a list of parts, and not text
        self.takes_parts = OPEN not in as_texts and OPEN in as_parts
        after = (as_parts if self.takes_parts else as_texts).partition(OPEN)[2]
        # the special tokens that end an answer, or a text
        self.end_tokens = {end_of_text(tokenizer)} | self.special.intersection(
            tokenizer(after, add_special_tokens=False)["input_ids"]
        )

    def __call__(
        self, example: Example, where: str, notes: Notes | None = None
    ) -> tuple[list[int], np.ndarray]:
        """(ids, learned): the token ids, and [len(ids)] bool, true for the tokens in the loss.

        A learned turn ends with a special token in the loss, or else with the first word of what
        follows it. The last one gets the end-of-text token if the template, or a text, has no end
        token there, unless `example.continues`.

        Args:
            notes: gets `end N` (the token that the last learned turn ends with), and, each with
                its place, `special` (texts with the string of a special token, which is read as
                that token), `lost` (learned turns, and tools' answers, that are not written whole)
                `unlike` (learned turns that do not follow the generation prompt), `roles` (out of
                turn), `tools` (that no turn calls) and `no_end`.

        Raises:
            ConfigError: the chat template refuses the conversation.
        """
        notes = Notes() if notes is None else notes
        self._note_special(example, where, notes)
        if example.messages is None:
            text = example.prompt + example.completion
            ids, learned, _ = self._tokens(text, [(len(example.prompt), len(text))])
            ids = self._with_bos(ids)
            learned = np.append(np.zeros(len(ids) - len(learned), bool), learned)
        else:
            ids, learned = self._chat(example, where, notes)
        if self.loss_on == "all":
            learned = np.ones(len(ids), bool)
        stops = 1 + np.flatnonzero(np.diff(learned, append=False) & learned)  # of each learned turn
        for stop in stops.tolist():
            if self._end_token(ids[:stop]) is None:
                # what the model has to write next, as it ends the turn there
                words = (i for i in range(stop, len(ids)) if self._is_word(ids[i]))
                word = next(words, stop - 1)
                if ids[word] in self.special or stop != stops[-1]:
                    learned[stop : word + 1] = True
        stop = int(np.flatnonzero(learned)[-1]) + 1 if learned.any() else 0
        end_token = self._end_token(ids[:stop])
        # in a text, other special tokens are part of it
        known = self.end_tokens if example.messages is None else self.special
        if stop and not example.continues and end_token not in known:
            end_token = self.tokenizer.eos_token_id
            ids = [*ids[:stop], end_token]
            learned = np.append(learned[:stop], True)
        if end_token is not None:
            notes.add(f"end {end_token}")
        elif stop:
            notes.add("no_end", where)
        return ids, learned

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Tokens of a text after the one that begins texts; one that is rendered already may begin
        with it.
        """
        return ids if ids[: len(self.bos)] == self.bos else self.bos + ids

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
        places = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        inside = np.zeros(len(places), dtype=bool)
        for first, last in spans:
            inside |= (places[:, 1] > first) & (places[:, 0] < last)
        return list(encoded["input_ids"]), inside, places

    def _end_token(self, ids: Sequence[int]) -> int | None:
        """The special token that `ids` end with, but for white space after it; None without one."""
        for token in reversed(ids):
            if token in self.special:
                return token
            if self._is_word(token):
                return None
        return None

    def _is_word(self, token: int) -> bool:
        """Whether a token is more than white space."""
        return bool(str(self.tokenizer.decode([token])).strip())

    def _wanted(self, messages: Messages) -> list[int]:
        """The numbers of the turns that are learned."""
        turns = [n for n, turn in enumerate(messages) if turn["role"] == "assistant"]
        chosen = turns[-1:] if self.loss_on == "completion" else turns
        return [n for n in chosen if messages[n].get("weight", 1)]

    def _chat(self, example: Example, where: str, notes: Notes) -> tuple[list[int], np.ndarray]:
        messages = example.messages or []
        turns = [n for n, turn in enumerate(messages) if turn["role"] == "assistant"]
        if OUT_OF_TURN.search(" ".join(turn["role"] for turn in messages)):
            notes.add("roles", where)
        if example.tools and not any(map(_called, messages)):
            notes.add("tools", where)
        wanted = self._wanted(messages)
        marked: list[Span] = []  # by {% generation %}
        answers: list[Answer] = []
        options = self._options(example, where)
        render: Any = partial(self._render, **options)
        with _refusals_named(where):
            messages = _for_template(messages, render)
            if self.marks_turns:
                text, marked = self._render_marked(messages, **options)
            else:
                text = render(messages)
            if wanted and self.loss_on != "all":
                # it may refuse placeholders, and marks suffice
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
            spans = marked
            if wanted != turns:
                spans = [*chain(*of_answers)] if answers else []
        if wanted and not spans:
            raise ConfigError(
                f"{where}: what the assistant says cannot be found in what the chat template makes "
                "of it: use a tokenizer whose template marks it with {% generation %}, --loss_on "
                "completion (the last answer), or --loss_on all"
            )
        written = dict(zip(wanted, learned, strict=True))
        self._check_written(messages, written, text, where, notes)
        ids, mask, places = self._tokens(text, spans)
        for answer in answers:
            # a token may go across the end of the prompt
            if answer.turn and not (answer.follows and answer.start in places):
                notes.add("unlike", f"{where}, message {answer.turn + 1}")
        return ids, mask

    def _check_written(
        self, messages: Messages, learned: dict[int, str], text: str, where: str, notes: Notes
    ) -> None:
        """Refuse an empty answer that was none, and note words that the template leaves out.

        Args:
            learned: what is learned of each wanted turn.
            text: all that the template writes.
        """
        for n, part in learned.items():
            # a name of a letter may be in the end token
            words = [self._pattern.sub("", word) for word in _words(messages[n])]
            found = self._pattern.sub("", part)
            lost = [word for word in words if not _is_written(word, found)]
            is_silent = not str(messages[n].get("content") or "").strip()
            # a turn without marks is no empty answer
            if is_silent and lost and lost == words and (part or not self.marks_turns):
                raise ConfigError(
                    f"{where}: the chat template writes nothing of what the assistant says in "
                    f"message {n + 1}, so an empty answer would be learned ({lost[0][:40]!r} is "
                    "missing): choose a model whose chat template writes it, or give the message "
                    '"weight": 0'
                )
            if lost:
                notes.add("lost", f"{where}, message {n + 1}: {lost[0][:40]!r}")
        for n, turn in enumerate(messages, 1):
            if turn["role"] == "tool" and not _is_written(said := str(turn.get("content")), text):
                notes.add("lost", f"{where}, message {n}: {said[:40]!r}")

    def prompt(self, example: Example, where: str, notes: Notes) -> list[int]:
        """The tokens of a text, or of messages up to where the next answer begins.

        Args:
            notes: gets `special`, as of `__call__`.

        Raises:
            ConfigError: the chat template refuses the conversation, or does not write its tools.
        """
        self._note_special(example, where, notes)
        if example.messages is None:
            return self._with_bos(self._tokens(example.prompt, [])[0])
        render: Any = partial(self._render, **self._options(example, where))
        with _refusals_named(where):
            messages = _for_template(example.messages, render)
            text = render(messages, add_generation_prompt=True)
        return self._tokens(text, [])[0]

    def _options(self, example: Example, where: str) -> Any:
        """What the chat template is rendered with, beside the messages."""
        template = self.tokenizer.get_chat_template(tools=example.tools)
        if example.tools and "tools" not in template:
            raise ConfigError(
                f"{where}: has tools, but the chat template does not write them: remove the "
                "column, or take a model whose template has tools"
            )
        return {
            "tools": example.tools,
            "chat_template": _with_fixed_date(template),
            **example.template_options,
        }

    def _turns(self, messages: Messages) -> Any:
        """The messages as the chat template takes them."""
        return _in_parts(messages) if self.takes_parts else messages

    def _render(self, messages: Messages, **options: Any) -> str:
        turns = self._turns(messages)
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False, **options))

    def _render_marked(self, messages: Messages, **options: Any) -> tuple[str, list[Span]]:
        """(the text, what the template marks with {% generation %})."""
        from transformers.utils.chat_template_utils import render_jinja_template

        turns = [self._turns(messages)]
        options = {**options, **self.tokenizer.special_tokens_map}
        rendered: Any = render_jinja_template(turns, return_assistant_tokens_mask=True, **options)
        (text,), (marks,) = rendered
        return text, marks


def _with_fixed_date(template: str) -> str:
    """The chat template with a fixed date, if it writes today's.

    Otherwise data prepared tomorrow would differ, and no run could resume on it.
    """
    if "strftime_now" not in template:
        return template
    codes = dict.fromkeys(re.findall(r"%-?\w", template))
    written = "format" + "".join(f".replace({c!r}, {TODAY.strftime(c)!r})" for c in codes)
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
    calls = [[call.get("name"), call.get("arguments")] for call in _called(message)]
    texts = _texts_in([*(message.get(key) for key in TEXTS), calls])
    return [part for text in texts for part in text.split(IMAGE) if part.strip()]


def _texts_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return [text for part in value for text in _texts_in(part)] if isinstance(value, list) else []


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


def _attempt(render: Callable[..., str], messages: Messages) -> str:
    """What the template writes; nothing if it refuses the messages."""
    with contextlib.suppress(Exception):
        return render(messages)
    return ""


def _for_template(messages: Messages, render: Callable[..., str]) -> Messages:
    """The messages without weights, which are for the loss, and with calls of tools in a form that
    the template writes.

    A call without a text gets an empty one. Arguments are objects, or JSON text if the template
    refuses objects or prints them as Python.
    """
    messages = [{key: turn[key] for key in turn if key != "weight"} for turn in messages]
    messages = [{**turn, "content": turn.get("content") or ""} for turn in messages]
    arguments = [call.get("arguments") for turn in messages for call in _called(turn)]
    objects = [value for value in arguments if isinstance(value, dict) and value]
    if not objects:
        return messages
    text = _attempt(render, messages)
    if text and not any(str(value) in text for value in objects):
        return messages
    return [
        {**turn, "tool_calls": [with_arguments(call, _to_json) for call in turn["tool_calls"]]}
        if _called(turn)
        else turn
        for turn in messages
    ]


def _to_json(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
