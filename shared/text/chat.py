"""Conversations prepared once, and read as samples."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shared import demo
from shared.data import prepared, records
from shared.data.order import IGNORED, Row, near_share, permute
from shared.data.records import Source
from shared.data.store import Encoded, Notes, Split, Store, prepare
from shared.models.hub import from_hub
from shared.process.errors import ConfigError
from shared.process.printing import note
from shared.process.ranks import is_main_rank
from shared.text.encoder import Encoder
from shared.text.forms import (
    parse_json_messages,
    read_example,
    recognise,
    refuse_other_meanings,
    unused,
)
from shared.text.options import RecordsConfig, SamplesConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


DEMO = Source(
    "functions of the Python standard library",
    lambda: [sys.version, demo.python_files()],
    demo.docstring_chats,
)
WARNINGS = {  # what an encoder notes: what is said about it, with the first place
    "lost": "turns have words that the chat template does not write or mark",
    "unlike": (
        "answers are learned after other tokens than the template's generation "
        "prompt gives at inference"
    ),
    "empty": "records have an empty answer, from which the model learns to say nothing",
    "joined": (
        "texts with a prompt are joined as they are, although the model has a chat template: "
        "messages would get it"
    ),
    "marked": "records mark a place for what is not text, and the mark is read as text",
    "special": "texts have the string of a special token in them, which is read as that token",
    "same": "pairs are dropped: their two answers are the same",
    "unequal": "pairs have prompts of different tokens before their two answers",
}


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with its own chat template, or else the one in the files of the
    model's processor.
    """
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    tokenizer: PreTrainedTokenizerBase = from_hub(AutoTokenizer, name)
    for file in ("chat_template.json", "processor_config.json"):
        if tokenizer.chat_template:
            break
        missing = ("missing_entries", "gated_repo", "connection_errors")
        path = cached_file(
            name, file, **{f"_raise_exceptions_for_{reason}": False for reason in missing}
        )
        template = (
            json.loads(Path(path).read_text(encoding="utf-8")).get("chat_template")
            if path
            else None
        )
        tokenizer.chat_template = template if isinstance(template, str) else None
    return tokenizer


def _hold_out(is_first: np.ndarray, percent: float) -> tuple[np.ndarray, str]:
    """(which samples to validate on, [samples] bool; how they were chosen, for people).

    Whole records, so that no text is on both sides. If these are not near the share, or all, the
    last samples.

    Args:
        is_first: [samples], whether a sample is the first of its record.
        percent: per cent held out.
    """
    record = np.cumsum(is_first) - 1
    count = int(record[-1]) + 1
    samples = len(record)

    def share(of: int) -> int:
        return max(1, min(round(of * percent / 100), of - 1))

    chosen = permute(np.arange(count), count, (0,))[: share(count)]
    held_out = np.isin(record, chosen)
    if samples == 1 or (not held_out.all() and near_share(held_out.sum(), share(samples))):
        return held_out, f"{held_out.sum():,}, from {len(chosen):,} of {count:,} records"
    held_out = np.arange(samples) >= samples - share(samples)
    return (
        held_out,
        f"{held_out.sum():,}, the last {held_out.mean():.0%} (whole records would "
        "be too much or too little)",
    )


class ToSamples:
    """Records to samples, see `store.Encode`. Plain text makes as many samples as it takes, any
    other record one.

    Makes the arrays `ids` and `learned`, the tokens of all samples and which of them the loss
    counts. The table has each sample's `targets`, whether it is the `first` of its record, and a
    `checksum` of its tokens. A line has the columns of its record that are not learned.
    """

    demo = DEMO  # what is read if no data is named
    kind = "chat"  # the name in the cache
    # What samples depend on.
    code: tuple[str, ...] = ("text/chat.py", "text/encoder.py", "text/forms.py", "text/special.py")
    recognise = staticmethod(recognise)  # (record, place) -> form

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: SamplesConfig) -> None:
        self.encoder = Encoder(tokenizer, getattr(config, "loss_on", "assistant"))
        self.seq_length = config.seq_length
        self.allowed = config.allow_unused_columns

    def identity(self) -> Any:
        tokenizer = self.encoder.tokenizer
        serialised = tokenizer.backend_tokenizer.to_str()  # type: ignore[attr-defined]
        return {
            "code": prepared.source_of(*self.code),
            "tokenizer": hashlib.sha256(serialised.encode()).hexdigest(),
            "template": str(tokenizer.chat_template),
            "special": [tokenizer.bos_token_id, tokenizer.eos_token_id],
            "samples": [self.seq_length, self.encoder.loss_on, self.allowed],
        }

    def items(self, source: Source, notes: Notes) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(form, place, record). All records of a file are expected to have the form of its
        first.
        """
        forms: dict[str, str] = {}
        are_messages: dict[str, dict[str, bool]] = {}  # see `parse_json_messages`
        for where, record in source.read():
            file = where.rpartition(":")[0]
            if file not in forms:
                forms[file] = self.recognise(record, where)
            yield (
                forms[file],
                where,
                parse_json_messages(record, where, are_messages.setdefault(file, {})),
            )

    def size(self, item: tuple[str, str, dict[str, Any]]) -> int:
        return len(str(item))

    def __call__(self, items: list[tuple[str, str, dict[str, Any]]], notes: Notes) -> Encoded:
        tokens = [np.zeros(0, np.int32)]
        marks = [np.zeros(0, bool)]
        first: list[bool] = []
        lines: list[dict[str, Any]] = []
        for form, where, record in items:
            of_record = Notes()
            samples = self.samples(record, form, where, of_record)
            names = of_record.named("unused ") if form != "plain text" else ()
            lines += [{name: record[name] for name in names if name in record}] * len(samples)
            notes.update(of_record)
            for number, (ids, learned) in enumerate(samples):
                tokens.append(np.array(ids, np.int32))
                marks.append(learned)
                first.append(number == 0)
            notes.add("read")
            notes.add(f"form {form}")
            if not samples:
                notes.add("dropped")
        # nothing predicts the first token
        targets = [int(learned[1:].sum()) for learned in marks[1:]]
        checksums = [len(ids) << 32 | zlib.crc32(ids.tobytes()) for ids in tokens[1:]]
        return Encoded(
            values={"ids": np.concatenate(tokens), "learned": np.concatenate(marks)},
            ends=np.cumsum([len(ids) for ids in tokens[1:]], dtype=np.int64),
            table={
                "targets": np.array(targets, np.int32),
                "first": np.array(first, bool),
                "checksum": np.array(checksums, np.int64),
            },
            lines=lines,
        )

    def encode(
        self, record: dict[str, Any], form: str, where: str, notes: Notes
    ) -> tuple[list[int], np.ndarray]:
        """(ids, [tokens] bool, which of them the loss counts) of a record of a form of `forms`."""
        template = str(self.encoder.tokenizer.chat_template)
        refuse_other_meanings(record, form, where, self.allowed)
        example = read_example(record, form, where)
        for name in unused(record, form, example, template):
            notes.add(f"unused {name}")
        if example.has_empty_answer:
            notes.add("empty", where)
        if example.prompt and self.encoder.came_with_template:
            notes.add("joined", where)
        if mark := re.search("<(?:image|video|audio)>", repr(example)):
            notes.add("marked", f"{where}: {mark[0]}")
        ids, learned = self.encoder(example, where, notes)
        if (
            learned.any()
            and (end := self.encoder.end_of(ids, int(np.flatnonzero(learned)[-1]) + 1)) is not None
        ):
            notes.add(f"end {end}")
        return ids, learned

    def samples(
        self, record: dict[str, Any], form: str, where: str, notes: Notes
    ) -> list[tuple[list[int], np.ndarray]]:
        """The samples of a record that have something to learn, as of `encode`."""
        ids, learned = self.encode(record, form, where, notes)
        most = self.seq_length + 1
        if form != "plain text" and len(ids) > most:
            notes.add("cut")
        last = len(ids) - 1 if form == "plain text" else 1
        # a sample begins with the last token of the one before
        starts = range(0, last, self.seq_length)
        parts = [(ids[start : start + most], learned[start : start + most]) for start in starts]
        return [(some, part) for some, part in parts if part[1:].any()]


class Conversations(Split):
    """Prepared samples, one conversation a row: `order.Samples`.

    Args:
        stores: see `Split`.
        numbers: see `Split`.
        end: the token that most learned turns end with, if there is one.
        own_template: whether the chat template is not the default one.
        how_held_out: of each store, how the samples to validate on were chosen, for people.
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        numbers: Sequence[np.ndarray],
        *,
        end: int | None,
        own_template: bool,
        how_held_out: Sequence[str],
    ) -> None:
        super().__init__(stores, numbers)
        self.end = end
        self.own_template = own_template
        self.how_held_out = how_held_out

    @cached_property
    def lengths(self) -> np.ndarray:
        """[samples] int64: positions of a row. Each token predicts the next one."""
        return super().lengths - 1

    @cached_property
    def targets(self) -> np.ndarray:
        return self.column("targets")

    def first_ids(self, count: int = 100_000) -> np.ndarray:
        """The first tokens of each source, as many in all: to look for rare ones."""
        return np.concatenate([store["ids"][: count // len(self.stores)] for store in self.stores])

    @property
    def context(self) -> float:
        """Length of a token's conversation, in the mean over tokens."""
        lengths = self.lengths.astype(float)
        return float((lengths**2).sum() / lengths.sum())

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, [tokens] int32; which of them the loss counts, [tokens] bool) of a sample."""
        ids, learned = self.values(index, "ids", "learned")
        return ids, learned

    def __getitem__(self, index: int) -> Row:
        ids, learned = self.tokens(index)
        ids = ids.astype(np.int64)
        return {"input_ids": ids[:-1], "labels": np.where(learned[1:], ids[1:], IGNORED)}

    def num_targets(self, indices: np.ndarray) -> int:
        return int(self.targets[indices].sum())

    def prompt(self, index: int) -> tuple[list[int], list[int], dict[str, Any]]:
        """(ids before the last learned turn, the ids of that turn, the columns of the record that
        are not learned): what to give the model, and what to compare with.
        """
        ids, learned = self.tokens(index)
        cut = np.flatnonzero(np.diff(learned, prepend=False) & learned)[-1]
        end = cut + learned[cut:].sum()
        cut = cut or min(16, len(ids) // 2)
        return ids[:cut].tolist(), ids[cut:end].tolist(), self.line(index)


def open_samples(
    config: RecordsConfig,
    tokenizer: PreTrainedTokenizerBase,
    kind: Callable[..., ToSamples] = ToSamples,
) -> tuple[Conversations, Conversations]:
    """Prepare the data, or each source of a mixture: samples to train on, and to validate on. Every
    rank calls this.

    Args:
        kind: what turns records into samples.

    Raises:
        ConfigError: wrong input, with its place, or no sample with anything to learn.
    """
    encode = kind(tokenizer, config)
    trained: dict[str, Store] = {}
    held_out: dict[str, Store] = {}
    numbers: list[np.ndarray] = []
    held_out_numbers: list[np.ndarray] = []
    how_held_out = []
    for name, of_source in config.sources().items():
        train, validation = records.open_sources(of_source, demo=encode.demo)
        store = trained[name] = _prepare(train, encode, config, config.max_train_samples)
        if validation is None:
            chosen, how = _hold_out(store["first"], config.validation_split_percentage)
            if chosen.all():
                raise ConfigError(
                    f"{train.name}: a single sample cannot be split; give --validation_file"
                )
            held_out[name] = store
            held_out_numbers.append(np.flatnonzero(chosen))
            numbers.append(np.flatnonzero(~chosen))
        else:
            others = _prepare(validation, encode, config, None)
            how = f"{len(others):,} of {validation.name}"
            if not (held_out and config.validation_file):  # which is the same for all sources
                held_out[name] = others
                held_out_numbers.append(np.arange(len(others)))
            numbers.append(np.arange(len(store)))
        how_held_out.append(how)
    ends = Notes()
    for store in trained.values():
        ends.update(store.notes)
    by_count = ends.named("end ")
    end = int(max(by_count, key=by_count.__getitem__)) if by_count else None
    own_template = encode.encoder.has_own_template
    splits = [
        Conversations(stores, chosen, end=end, own_template=own_template, how_held_out=how_held_out)
        for stores, chosen in ((trained, numbers), (held_out, held_out_numbers))
    ]
    if is_main_rank():
        _warn_of_copies(*splits)
    return splits[0], splits[1]


def _prepare(source: Source, encode: ToSamples, config: RecordsConfig, limit: int | None) -> Store:
    store = prepare(
        encode.kind, source, encode, limit=limit, processes=config.preprocessing_num_workers
    )
    counts = store.notes.counts
    if not len(store):
        raise ConfigError(
            f"{source.name}: none of its {counts['read']} samples has a token to learn within "
            f"--seq_length {config.seq_length}"
        )
    for what, said in WARNINGS.items():
        if counts[what]:
            note(f"warning: {counts[what]:,} {said}; the first is {store.notes.first[what]}")
    return store


def _warn_of_copies(train: Conversations, held_out: Conversations) -> None:
    if copies := int(np.isin(held_out.column("checksum"), train.column("checksum")).sum()):
        note(
            f"warning: {copies:,} of the {len(held_out):,} texts to validate on are "
            "trained on, too, word for word"
        )


def describe(samples: Conversations, config: SamplesConfig) -> str:
    """A line about the data to train on: form, counts, lengths, share of tokens that the loss
    counts.
    """
    parts = []
    for place, (store, held_out) in enumerate(
        zip(samples.stores, samples.how_held_out, strict=True)
    ):
        counts = store.notes.counts
        forms = store.notes.named("form ")
        template = ""
        of_source = slice(samples.starts[place], samples.starts[place + 1])
        lengths = samples.lengths[of_source]
        if forms.keys() - {"prompt and completion", "plain text"}:
            default = "the default chat template (### User / ### Assistant)"
            template = ", the model's chat template" if samples.own_template else f", {default}"
        elif "prompt and completion" in forms:
            template = ", texts joined as they are, lists of messages by the chat template"
        parts.append(
            f"{store.source}: {', '.join(forms)}{template}; {counts['read']:,} read, "
            f"{counts['cut']:,} cut to "
            f"{config.seq_length} tokens, {counts['dropped']:,} dropped because no answer is left; "
            f"{len(lengths):,} to train on, {lengths.min()}-{lengths.max()} tokens (mean "
            f"{lengths.mean():.0f}), "
            f"the loss counts {samples.targets[of_source].sum() / lengths.sum():.0%} of them; to "
            f"validate on: {held_out}"
            f"{records.not_used(store.notes.named('unused '))}"
        )
    return "; ".join(parts)


def marked(samples: Conversations, tokenizer: PreTrainedTokenizerBase, index: int = 0) -> str:
    """A sample as text, with the tokens that the loss counts between ⟦ and ⟧. Of a mixture, one of
    each source.
    """
    texts = []
    for start in samples.starts[:-1].tolist():
        ids, learned = samples.tokens(start + index)
        learned = np.append(False, learned[1:])
        parts = []
        for run in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(learned)) + 1):
            text = str(tokenizer.decode(ids[run].tolist()))
            parts.append(f"⟦{text}⟧" if learned[run[0]] else text)
        texts.append("".join(parts))
    return "\n".join(texts)
