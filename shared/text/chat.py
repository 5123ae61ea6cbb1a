"""Conversations prepared once, and read as samples."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from shared import demo
from shared.data import prepared, records
from shared.data.notes import WARNINGS, Notes, text_hash
from shared.data.order import IGNORED, Batch, EvenSubset, Row, near_share, permute
from shared.data.records import Source
from shared.data.store import Encoded, Split, Store, prepare_sources
from shared.models.tokenizers import identity_of
from shared.process.errors import ConfigError
from shared.process.printing import collapsed, indented, note, print_main
from shared.text.encoder import Encoder
from shared.text.forms import (
    Example,
    parse_json_messages,
    read_example,
    recognise,
    refuse_other_meanings,
    unused,
)
from shared.text.options import ChatConfig, RecordsConfig, SamplesConfig
from shared.text.packing import collate_padded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


DEMO = Source(
    "functions of the Python standard library",
    lambda: [sys.version, demo.python_files()],
    demo.docstring_chats,
)
LOOKED_AT = 6  # samples that --preprocess_only prints
DEFAULT = "the default chat template (### User / ### Assistant)"


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


class Conversations(Split):
    """Prepared samples, one conversation a row: `order.Samples`.

    Args:
        stores: see `Split`.
        numbers: see `Split`.
        end: the token that most learned turns end with, if there is one.
        validated_on: how the samples to validate on were chosen, for people.
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        numbers: Sequence[np.ndarray],
        end: int | None,
        validated_on: str,
    ) -> None:
        super().__init__(stores, numbers)
        self.end = end
        self.validated_on = validated_on

    @cached_property
    def lengths(self) -> np.ndarray:
        """[samples] int64: positions of a row. Each token predicts the next one."""
        return super().lengths - 1

    @cached_property
    def targets(self) -> np.ndarray:
        return self.column("targets")

    def first_ids(self) -> np.ndarray:
        """The first tokens of each source, 100,000 in all: to look for rare ones."""
        count = 100_000 // len(self.stores)
        return np.concatenate([store["ids"][:count] for store in self.stores])

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

    why_not_packed = ""
    workers = 0  # processes that read samples, if the run names none

    def collate(self, rows: list[Row], **padding: Any) -> Batch:
        """A batch of rows, see `packing.collate_padded`."""
        return collate_padded(rows, **padding)

    def images_of(self, chosen: Sequence[int]) -> Any:
        """The images of the prompts of some samples, for `answers.answer`."""
        return None

    def prompt(self, index: int) -> tuple[list[int], list[int], dict[str, Any]]:
        """(ids before the last learned turn, the ids of that turn, the columns of the record that
        are not learned): what to give the model, and what to compare with. If nothing is learned,
        all ids are before it.
        """
        ids, learned = self.tokens(index)
        begins = np.flatnonzero(np.diff(learned, prepend=False) & learned)
        if not len(begins):
            return ids.tolist(), [], self.line("columns", index)
        cut = begins[-1]
        end = cut + learned[cut:].sum()
        cut = cut or min(16, len(ids) // 2)
        return ids[:cut].tolist(), ids[cut:end].tolist(), self.line("columns", index)


class ToSamples:
    """Records to samples, see `store.Encode`. Plain text makes as many samples as it takes, any
    other record one.

    Makes the arrays `ids` and `learned`, the tokens of all samples and which of them the loss
    counts. The table has each sample's `targets`, whether it is the `first` of its record, a
    `checksum` of its tokens and a `text_hash` of its record. `columns` has those of its record that
    are not learned, and `place` where the record is.
    """

    demo = DEMO  # what is read if no data is named
    kind = "chat"  # the name in the cache
    # What samples depend on.
    code: tuple[str, ...] = tuple(
        f"text/{name}.py" for name in ("chat", "encoder", "forms", "outline", "special")
    )
    recognise = staticmethod(recognise)  # (record, place) -> form
    opened: Callable[..., Conversations] = Conversations  # what opens the stores

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: RecordsConfig) -> None:
        self.encoder = Encoder(tokenizer, getattr(config, "loss_on", "assistant"))
        self.seq_length = config.seq_length
        self.allowed = config.allow_unused_columns

    def identity(self) -> Any:
        return {
            "code": prepared.source_of(*self.code),
            "tokenizer": identity_of(self.encoder.tokenizer),
            "samples": [self.seq_length, self.encoder.loss_on, self.allowed],
        }

    def items(self, source: Source, notes: Notes) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(form, place, record). All records of a file are expected to have the form of its
        first.

        Raises:
            ConfigError: a file without records, such as a README.md, among files of records.
        """
        forms: dict[str, str] = {}
        text = ""  # a file that is one text
        for where, record in source.read():
            file = where.rpartition(":")[0]
            text = text if file else where
            if file not in forms:
                forms[file] = self.recognise(record, where)
                if text and len({*forms.values()}) > 1:
                    raise ConfigError(
                        f"{text}: is one text, beside files of records: to leave it out, name the "
                        "files, as in 'FOLDER/*.jsonl'; to learn it, write it as JSON lines, "
                        '{"text": ...}'
                    )
            yield forms[file], where, parse_json_messages(record, where)

    def size(self, item: tuple[str, str, dict[str, Any]]) -> int:
        return len(str(item))

    def where(self, item: tuple[str, str, dict[str, Any]]) -> str:
        return item[1]

    def __call__(self, items: list[tuple[str, str, dict[str, Any]]], notes: Notes) -> Encoded:
        samples: list[tuple[list[int], np.ndarray]] = []
        first: list[bool] = []
        columns: list[dict[str, Any]] = []
        places: list[str] = []
        hashes: list[int] = []
        for form, where, record in items:
            of_record = Notes()
            made = self.samples(record, form, where, of_record)
            samples += made
            first += [number == 0 for number in range(len(made))]
            places += [where] * len(made)
            said = [
                value for name, value in record.items() if f"unused {name}" not in of_record.counts
            ]
            of_text = text_hash(said)
            hashes += [of_text ^ number for number in range(len(made))]
            names = of_record.named("unused ") if form != "plain text" else ()
            columns += [{name: record[name] for name in names if name in record}] * len(made)
            notes.update(of_record)
            notes.add("read")
            notes.add(f"form {form}")
            if not self.encoder.has_own_template and not form.startswith(("prompt", "plain")):
                notes.add("default template")
            if not made:
                notes.add("dropped", where)
        tokens = [np.array(ids, np.int32) for ids, _ in samples]
        marks = [learned for _, learned in samples]
        # nothing predicts the first token
        targets = [int(learned[1:].sum()) for learned in marks]
        checksums = [len(ids) << 32 | zlib.crc32(ids.tobytes()) for ids in tokens]
        return Encoded(
            values={
                "ids": np.concatenate([np.zeros(0, np.int32), *tokens]),
                "learned": np.concatenate([np.zeros(0, bool), *marks]),
            },
            ends=np.cumsum([len(ids) for ids in tokens], dtype=np.int64),
            table={
                "targets": np.array(targets, np.int32),
                "first": np.array(first, bool),
                "checksum": np.array(checksums, np.int64),
                "text_hash": np.array(hashes, np.int64),
            },
            lines={"columns": columns, "place": places},
        )

    def read(self, record: dict[str, Any], form: str, where: str, notes: Notes) -> Example:
        """A record of a form of `forms`, with notes of what is not read as it is meant."""
        template = str(self.encoder.tokenizer.chat_template)
        refuse_other_meanings(record, form, where, self.allowed)
        example = read_example(record, form, where)
        for name in unused(record, form, example, template):
            notes.add(f"unused {name}")
        for name, value in example.template_options.items():  # of switches and words
            if name.isidentifier() and str(value).isidentifier():
                notes.add(f"option {name} = {value!r}", where)
        if mark := re.search("<(?:image|video|audio)>", repr(example)):
            notes.add("marked", f"{where}: {mark[0]}")
        return example

    def encode(
        self, record: dict[str, Any], form: str, where: str, notes: Notes
    ) -> tuple[list[int], np.ndarray]:
        """(ids, [tokens] bool, which of them the loss counts) of a record of a form of `forms`."""
        example = self.read(record, form, where, notes)
        if example.has_empty_answer:
            notes.add("empty", where)
        if example.prompt and self.encoder.came_with_template:
            notes.add("joined", where)
        return self.encoder(example, where, notes)

    def samples(
        self, record: dict[str, Any], form: str, where: str, notes: Notes
    ) -> list[tuple[list[int], np.ndarray]]:
        """The samples of a record that have something to learn, as of `encode`."""
        ids, learned = self.encode(record, form, where, notes)
        most = self.seq_length + 1
        if form != "plain text" and len(ids) > most:
            notes.add_cut(len(ids) - 1, where)
        last = len(ids) - 1 if form == "plain text" else 1
        # a sample begins with the last token of the one before
        starts = range(0, last, self.seq_length)
        parts = [(ids[start : start + most], learned[start : start + most]) for start in starts]
        return [(some, part) for some, part in parts if part[1:].any()]


def open_samples(
    config: RecordsConfig,
    tokenizer: PreTrainedTokenizerBase,
    kind: Callable[..., ToSamples] = ToSamples,
    demo_samples: int | None = None,
) -> tuple[Conversations, Conversations]:
    """Prepare the data, or each source of a mixture: samples to train on, and to validate on. Every
    rank calls this.

    Args:
        kind: what turns records into samples.
        demo_samples: how many records of the demo are read, unless --max_train_samples says.

    Raises:
        ConfigError: wrong input, with its place, or no sample with anything to learn.
    """
    encode = kind(tokenizer, config)
    limit = config.max_train_samples or (demo_samples if config.is_demo else None)
    trained, held_out = prepare_sources(config, encode, limit=limit)
    for store in (*trained.values(), *held_out.values()):
        check(store, config)
    percent = config.validation_split_percentage
    if held_out:
        numbers = [np.arange(len(store)) for store in trained.values()]
        validated = [np.arange(len(store)) for store in held_out.values()]
        how = [f"{len(store):,} of {store.source}" for store in held_out.values()]
    else:
        for store in trained.values():
            if len(store) == 1:
                raise ConfigError(
                    f"{store.source}: a single sample cannot be split; give --validation_file"
                )
        held_out = trained
        splits = [_hold_out(store["first"], percent) for store in trained.values()]
        numbers = [np.flatnonzero(~chosen) for chosen, _ in splits]
        validated = [np.flatnonzero(chosen) for chosen, _ in splits]
        how = [stated for _, stated in splits]
    notes = Notes()
    for store in trained.values():
        notes.update(store.notes)
    end = end_of(notes)
    _keep_template_options(tokenizer, notes)
    validated_on = " and ".join(how)
    train = encode.opened(trained, numbers, end, validated_on)
    validation = encode.opened(held_out, validated, end, validated_on)
    is_copy = np.isin(validation.column("checksum"), train.column("checksum"))
    if copies := is_copy.sum():
        note(
            f"warning: {copies:,} of the {len(validation):,} validation texts are in the training "
            "data, too, word for word"
        )
    return train, validation


def end_of(notes: Notes) -> int | None:
    """The token that most learned turns end with, if there is one."""
    by_count = notes.named("end ")
    return int(max(by_count, key=by_count.__getitem__)) if by_count else None


def _keep_template_options(tokenizer: PreTrainedTokenizerBase, notes: Notes) -> None:
    """Make the variables that all records have defaults of the chat template, as final/ will have
    it: a question after training gets the prompt of training.
    """
    template = tokenizer.chat_template
    for option, count in notes.named("option ").items():
        if count == notes.counts["read"] and isinstance(template, str):
            name = option.split()[0]
            default = f"{{% if {name} is not defined %}}{{% set {option} %}}{{% endif %}}"
            default += "{{ '' }}"  # keeps a line break after it
            tokenizer.chat_template = template = default + template.replace(default, "")
            note(f"the chat template in final/ has the default of all records: {option}")


def check(store: Store, config: RecordsConfig) -> None:
    """Refuse a source without anything to learn, and say what is worth a look in it."""
    counts = store.notes.counts
    for what, warning in WARNINGS.items():
        if counts[what]:
            note(f"warning: {counts[what]:,} {warning}; the first is {store.notes.first[what][0]}")
    if not len(store):
        raise ConfigError(
            f"{store.source}: none of its {counts['read']} samples has a token to learn within "
            f"--seq_length {config.seq_length}"
        )
    store.notes.warn_of_cuts(store.source, counts["read"])


def describe(samples: Conversations, config: SamplesConfig, of_record: int = 1) -> str:
    """A line about the data to train on: form, counts, lengths, share of tokens that the loss
    counts.

    Args:
        of_record: how many samples make one to train on: two answers make a pair.
    """
    parts = []
    for store, start, stop in zip(samples.stores, samples.starts, samples.starts[1:], strict=False):
        counts = store.notes.counts
        template = f", {DEFAULT}" if counts["default template"] else ""
        lengths = samples.lengths[start:stop]
        parts.append(
            f"{store.source}: {len(lengths) // of_record:,} to train on, "
            f"{lengths.min()}-{lengths.max()} tokens (mean {lengths.mean():.0f}), "
            f"{samples.targets[start:stop].sum() / lengths.sum():.0%} of them learned; "
            f"{', '.join(store.notes.named('form '))}{template}; {counts['read']:,} read, "
            f"{counts['cut']:,} cut to {config.seq_length} tokens, "
            f"{counts['dropped']:,} dropped without an answer"
        )
    unused = {name for store in samples.stores for name in store.notes.named("unused ")}
    about = f"{'; '.join(parts)}; to validate on: {samples.validated_on}"
    return about + records.not_used(unused)


def marked(samples: Conversations, tokenizer: PreTrainedTokenizerBase, index: int) -> str:
    """A sample as text, with the tokens that the loss counts between ⟦ and ⟧."""
    ids, learned = samples.tokens(index)
    learned = np.append(False, learned[1:])
    parts = []
    for is_learned, group in groupby(zip(ids.tolist(), learned, strict=True), itemgetter(1)):
        text = collapsed(str(tokenizer.decode([token for token, _ in group])))
        parts.append(f"⟦{text}⟧" if is_learned else text)
    return "".join(parts)


def show_samples(
    samples: Conversations, tokenizer: PreTrainedTokenizerBase, config: ChatConfig
) -> None:
    """Note the first sample of each source; with --preprocess_only, print the line about the data
    and samples from all over them, whole.
    """
    shown = samples.starts[:-1].tolist()
    if not config.preprocess_only:
        texts = [marked(samples, tokenizer, index) for index in shown]
        note(
            "first sample; the loss counts the tokens between ⟦ and ⟧:",
            *indented("\n".join(texts)),
        )
        return
    print_main(describe(samples, config))
    for index in sorted({*shown, *EvenSubset(samples, LOOKED_AT).indices.tolist()}):
        print_main(
            f"sample {index}; the loss counts the tokens between ⟦ and ⟧:",
            *indented(marked(samples, tokenizer, index)),
        )
