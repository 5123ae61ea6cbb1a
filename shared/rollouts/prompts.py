"""Prompts, prepared once, with the columns that the answers to them are checked with."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.data import prepared
from shared.data.notes import Notes
from shared.data.records import Source, kind, not_used
from shared.data.store import Encoded
from shared.demo import DEFAULT_TEMPLATE
from shared.process.errors import ConfigError
from shared.process.printing import indented, note
from shared.rollouts.options import PromptConfig
from shared.text import chat
from shared.text.chat import Conversations
from shared.text.forms import Example, from_cell
from shared.text.images import see_images

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("prompt", "messages", "question", "problem")  # the first that is there counts
OF_REWARDS = ("chosen", "rejected", "label", "labels", "kto_tag", "score", "rank")
OF_TEMPLATE = ("system", "tools", "chat_template_kwargs")


def _largest() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, {"prompt", "answer"}) that ask for the largest of three digits."""
    for number, digits in enumerate(product(range(10), repeat=3)):
        prompt = "assert max({}, {}, {}) == ".format(*digits)
        yield f"question {number}", {"prompt": prompt, "answer": str(max(digits))}


DEMO = Source("the largest of three digits", list, _largest)


class ToPrompts(chat.ToSamples):
    """Each record makes one prompt, up to where the answer begins; a line has its other columns.

    A text is the turn of a user if the model has a chat template, and else continued as it is. A
    last turn of the assistant among messages is not part of the prompt, but its `reference`.
    """

    demo = DEMO
    kind = "prompts"
    code = (*chat.ToSamples.code, "rollouts/prompts.py")

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: PromptConfig) -> None:
        super().__init__(tokenizer, config)
        self.allowed += OF_REWARDS
        self.column = config.prompt_column
        self.system = config.system_prompt
        if self.system and not self.encoder.has_own_template:
            raise ConfigError("--system_prompt needs a model with a chat template")

    def identity(self) -> Any:
        return super().identity() | {"prompts": [self.column, self.system]}

    def recognise(self, record: dict[str, Any], where: str) -> str:
        """The column of the prompt. Raises ConfigError if there is none."""
        for column in [self.column] if self.column else COLUMNS:
            if column in record:
                return column
        raise ConfigError(
            f"{where}: none of the columns {', '.join(map(str, record))} is the prompt: name it "
            "with --prompt_column"
        )

    def items(self, source: Source, notes: Notes) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for column, where, record in super().items(source, notes):
            turns = from_cell(record.get(column))
            is_list = isinstance(turns, list) and turns
            if is_list and all(isinstance(turn, dict) and "role" in turn for turn in turns):
                record = record | {column: turns}  # CSV has no lists; other JSON is text
                if turns[-1]["role"] == "assistant":
                    said = turns[-1].get("content")
                    if isinstance(said, list) and all(isinstance(part, dict) for part in said):
                        said = "".join(str(part.get("text", "")) for part in said)
                    record |= {column: turns[:-1], "reference": said}
            yield column, where, record

    def __call__(self, items: list[tuple[str, str, dict[str, Any]]], notes: Notes) -> Encoded:
        encoded = super().__call__(items, notes)
        # other right answers are other data, too
        columns = encoded.lines["columns"]
        texts = [json.dumps(line, sort_keys=True, default=str).encode() for line in columns]
        encoded.table["others"] = np.array([*map(zlib.crc32, texts)], np.int64)
        return encoded

    def samples(
        self, record: dict[str, Any], form: str, where: str, notes: Notes
    ) -> list[tuple[list[int], np.ndarray]]:
        ids, learned = self.encode(record, form, where, notes)
        if not 0 < len(ids) <= self.seq_length:
            notes.add("long", where)
            return []
        return [(ids, learned)]

    def encode(
        self, record: dict[str, Any], form: str, where: str, notes: Notes
    ) -> tuple[list[int], np.ndarray]:
        """(ids of a prompt, [tokens] bool, false): nothing of it is learned."""
        for name in record.keys() - {form, *OF_TEMPLATE}:
            notes.add(f"unused {name}")  # kept in the sample's line
        example = self._example(record, form, where, notes)
        ids = self.encoder.prompt(example, where, notes)
        if example.messages:
            for end in self.encoder.end_tokens - {self.encoder.tokenizer.eos_token_id}:
                notes.add(f"end {end}")
        return ids, np.zeros(len(ids), bool)

    def _example(self, record: dict[str, Any], form: str, where: str, notes: Notes) -> Example:
        """A prompt alone. Raises ConfigError if the model would not see all of it."""
        asked = record.get(form)
        if not isinstance(asked, str | list):
            raise ConfigError(f"{where}: {form!r} is {kind(asked)}, expected text or messages")
        if isinstance(asked, str) and self.encoder.has_own_template:
            asked = [{"role": "user", "content": asked}]
        # without an answer, there is nothing to learn
        answer: Any = "-" if isinstance(asked, str) else [{"role": "assistant", "content": "-"}]
        others = {name: value for name, value in record.items() if name != form}
        if self.system and others.get("system"):
            raise ConfigError(f"{where}: has a system text: drop the column, or --system_prompt")
        if self.system:
            others["system"] = self.system
        made = {**others, "prompt": asked, "completion": answer}
        example = self.read(made, "prompt and completion", where, notes)
        return replace(example, messages=example.messages and example.messages[:-1])


def read_prompts(
    config: Any, tokenizer: PreTrainedTokenizerBase
) -> tuple[Conversations, Conversations]:
    """(prompts to train on, to validate on), tokenised. Notes the first. With images if one of the
    first records of a source to train on has any. Every rank calls this.

    Args:
        config: a template's, with `data`, `vision` and `model_name_or_path`.

    Raises:
        ConfigError: wrong input, with its place, or no prompt that is short enough.
    """
    kind: Any = ToPrompts
    if config.data.max_turns > 1:
        from shared.extras.turns import ToTalks

        kind = ToTalks
    if see_images(config.data):
        from shared.extras.vision.conversations import image_samples
        from shared.extras.vision.rollouts import ToImagePrompts

        kind = image_samples(config, tokenizer, ToImagePrompts)
    train, held_out = chat.open_samples(config.data, tokenizer, kind)
    ids, _, columns = train.prompt(0)
    # it may be of a model that never learned it
    is_default = str(tokenizer.chat_template).endswith(DEFAULT_TEMPLATE)
    how = " (messages get the default chat template, texts stand as they are)" * is_default
    note(f"first prompt{how}:", *indented(str(tokenizer.decode(ids))))
    note(f"the reward function also gets: {', '.join(columns) or 'nothing'}")
    return train, held_out


def describe(train: Conversations, held_out: Conversations, options: PromptConfig) -> str:
    """One line about the data: counts, lengths."""
    notes = Notes()
    for store in train.stores:
        notes.update(store.notes)
    lengths = train.lengths + 1  # tokens
    # rewards get other columns
    unread = [n for n in notes.named("unused ") if n.endswith(")") or n in OF_TEMPLATE]
    counts = notes.counts
    sources = ", ".join(store.source for store in train.stores)
    return (
        f"{sources}: {counts['read']:,} prompts read, {counts['long']:,} longer than "
        f"{options.seq_length} tokens and left out; {len(train):,} to train on, of "
        f"{lengths.min()}-{lengths.max()} tokens; {len(held_out):,} to validate on"
        f"{not_used(unread)}"
    )


def fingerprint(train: Conversations, held_out: Conversations, reward_model: Any = None) -> str:
    """Changes when the prompts, or what their answers are checked with, do."""
    judge = [reward_model.identity] if reward_model else []
    return prepared.fingerprint(prompts=[train.fingerprint, held_out.fingerprint, *judge])
