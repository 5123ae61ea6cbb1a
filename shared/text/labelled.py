"""Texts with labels: prepared once, and read as samples."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shared import demo
from shared.data import prepared, records
from shared.data.labels import LabelledData, Labels, problem_type_of, read_labels
from shared.data.notes import Notes, text_hash
from shared.data.order import Batch, Row
from shared.data.records import Source
from shared.data.store import Encoded, Split, Store, prepare_sources
from shared.models.tokenizers import identity_of
from shared.process.errors import ConfigError
from shared.text.options import LabelledTextConfig
from shared.text.special import Special

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# what a tokenizer makes: as what it is kept
TOKENS = {"input_ids": np.int32, "token_type_ids": np.uint8}
COLUMNS = {"text": ("text", "sentence"), "text_pair": (), "label": ("label", "labels")}
DEMO = Source(
    "functions of the standard library",
    lambda: [sys.version, demo.python_files()],
    demo.functions_of_packages,
)


# The text, or both; its label; and what is kept of the record: its place, and the rest
Item = tuple[tuple[str, ...], Any, dict[str, Any]]


class Texts(Split):
    """Prepared texts with their labels: `order.Samples`, and what an evaluation asks for.

    Each row has `input_ids`, [tokens] int64, `token_type_ids` where the tokenizer makes them, and
    `labels`: a class number, a number, or [classes] fp32 with 1 for each class that the text has.

    Args:
        stores: see `Split`.
        numbers: see `Split`.
        labels: of these texts.
        tokenizer: that encoded them.
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        numbers: Sequence[np.ndarray],
        labels: Labels,
        tokenizer: Any,
    ) -> None:
        super().__init__(stores, numbers)
        self.labels = labels
        self.tokenizer = tokenizer
        self._names = [name for name in TOKENS if name in self.stores[0]]

    def __getitem__(self, index: int) -> Row:
        tokens = zip(self._names, self.values(index, *self._names), strict=True)
        row = {name: array.astype(np.int64) for name, array in tokens}
        return row | {"labels": self.labels[index]}

    def num_targets(self, indices: np.ndarray) -> int:
        return len(indices)

    def shown(self, number: int) -> dict[str, Any]:
        """Where a text is from, and its record without the label."""
        line = self.line("record", number)
        return {"where": line["where"]} | line["record"]

    def position(self, number: int) -> tuple[int, int]:
        """Grows as the texts stand in the data."""
        store, of_store = self.find(number)
        return self.stores.index(store), of_store

    def draw(self, file: Any, title: str, tiles: list[tuple[int, str]]) -> None:
        """Texts are read in evaluation.json."""


def collate(rows: list[Row], *, pad_token_id: int, at_most: int) -> Batch:
    """Rows of `Texts` -> {"input_ids" and perhaps "token_type_ids": [batch, longest] int64;
    "labels"}. Padded to a multiple of 8: fewer lengths mean fewer kernels to choose.

    And "attention_mask", if a row is shorter than the longest: without a mask the faster kernels
    can be used.

    Args:
        at_most: no row is longer, nor padded to more.
    """
    lengths = np.array([len(row["input_ids"]) for row in rows])
    longest = min(int(lengths.max()) + -int(lengths.max()) % 8, at_most)
    batch = {}
    for key in TOKENS.keys() & rows[0].keys():
        batch[key] = np.full((len(rows), longest), pad_token_id if key == "input_ids" else 0)
        for i, row in enumerate(rows):
            batch[key][i, : len(row[key])] = row[key]
    if lengths.min() < longest:
        batch["attention_mask"] = (np.arange(longest) < lengths[:, None]).astype(np.int64)
    batch["labels"] = np.stack([row["labels"] for row in rows])
    return {key: torch.from_numpy(value) for key, value in batch.items()}


class EncodeTexts:
    """Records to tokens, see `store.Encode`: `input_ids` and perhaps `token_type_ids`.

    Of each record, it keeps the `label`, and the place and the rest as `record`.
    """

    kind = "labelled"
    demo = DEMO

    def __init__(self, config: LabelledTextConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.columns = {kind: getattr(config, f"{kind}_column") for kind in COLUMNS}
        self.seq_length = config.seq_length
        self.special = Special(tokenizer)
        self.tokenizer = tokenizer

    def identity(self) -> Any:
        return {
            "code": prepared.source_of("text/labelled.py", "text/special.py"),
            "tokenizer": identity_of(self.tokenizer),
            "seq_length": self.seq_length,
            "columns": self.columns,
        }

    def items(self, source: Source, notes: Notes) -> Iterator[Item]:
        for where, record in source.read():
            columns = self._columns_of(record, where)
            texts = tuple(
                record[columns[kind]] for kind in ("text", "text_pair") if kind in columns
            )
            for kind, text in zip(columns, texts, strict=False):
                if not isinstance(text, str) or not text.strip():
                    found = "empty" if isinstance(text, str) else records.kind(text)
                    raise ConfigError(f"{where}: {columns[kind]!r} is {found}, expected text")
            for name in records.unused(record, columns.values()):
                notes.add(f"unused {name}")
            label = record[columns["label"]]
            if isinstance(label, float) and label.is_integer():
                label = int(label)
            others = {
                name: value
                for name, value in record.items()
                if name not in (columns["label"], "where")
            }
            yield texts, label, {"where": where, "record": others}

    def _columns_of(self, record: dict[str, Any], where: str) -> dict[str, str]:
        """The names of the columns: text, perhaps text_pair, and label."""
        found = {}
        for kind, usual in COLUMNS.items():
            named = self.columns[kind]
            names = (named,) if named else usual
            there = [name for name in names if name in record]
            if there:
                found[kind] = there[0]
            elif names:
                wanted = " or ".join(names)
                has = ", ".join(map(str, record))
                unlabelled = ". Texts without labels: see docs/after_training.md"
                raise ConfigError(
                    f"{where}: no column {wanted} (has: {has}); name it with --{kind}_column"
                    f"{unlabelled if kind == 'label' else ''}"
                )
        return found

    def size(self, item: Item) -> int:
        return sum(map(len, item[0]))

    def where(self, item: Item) -> str:
        return str(item[2]["where"])

    def __call__(self, items: list[Item], notes: Notes) -> Encoded:
        texts, labels, kept = zip(*items, strict=True)
        encoded = self.tokenizer(
            *(list(column) for column in zip(*texts, strict=True)),
            truncation=True,
            max_length=self.seq_length,
            split_special_tokens=True,
            return_special_tokens_mask=True,
            return_attention_mask=False,
        )
        lengths = np.array([len(ids) for ids in encoded["input_ids"]])
        if not lengths.all():
            raise ConfigError(
                f"{kept[int(lengths.argmin())]['where']}: the tokenizer makes no token of this text"
            )
        values = {
            name: np.concatenate(encoded[name]).astype(kind)
            for name, kind in TOKENS.items()
            if name in encoded
        }
        added = np.concatenate(encoded["special_tokens_mask"]).astype(bool)
        values["input_ids"] = self.special.to_unknown(values["input_ids"], added)
        for encoding, of_one in zip(encoded.encodings, kept, strict=True):
            if encoding.overflowing:
                whole = sum(map(len, [encoding, *encoding.overflowing]))
                notes.add_cut(whole, of_one["where"])
        table = {"text_hash": np.array([text_hash(of_one) for of_one in texts], np.int64)}
        lines = {"label": labels, "record": kept}
        return Encoded(values, np.cumsum(lengths), table, lines)


def open_texts(config: LabelledTextConfig, tokenizer: PreTrainedTokenizerBase) -> LabelledData:
    """Prepare the data, or each source of a mixture, and split them. Every rank calls this.

    Args:
        tokenizer: pads on the right from now on, with its end-of-text token if it has no other.

    Raises:
        ConfigError: wrong input, with its place; a class with nothing to train on; only one class.
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    encode = EncodeTexts(config, tokenizer)
    trained, given = prepare_sources(config, encode)
    source = ", ".join(store.source for store in trained.values())
    for store in trained.values():
        store.notes.warn_of_cuts(store.source, len(store))
    stores = [*trained.values(), *given.values()]
    everything = Split(
        {str(n): store for n, store in enumerate(stores)},
        [np.arange(len(store)) for store in stores],
    )
    raw = [label for store in stores for label in store.lines("label")]

    def where(number: int) -> str:
        return everything.line("record", number)["where"]

    first_given = sum(map(len, trained.values()))
    problem_type = config.problem_type or problem_type_of(raw)
    labels = read_labels(raw, problem_type, where, trained=first_given)
    held_out = np.arange(len(labels)) >= first_given
    if not given:
        held_out = labels.hold_out(config.validation_split_percentage)
    labels.take(np.flatnonzero(~held_out)).require_trained(f"{where(0)} and after", "text")
    if not held_out.any():
        raise ConfigError(f"{source}: no text to validate on")

    def texts(of: Mapping[str, Store], first: int, chosen: np.ndarray) -> Texts:
        """The texts of some stores, `first` before them, that are `chosen`, [texts] bool."""
        numbers = []
        in_all = []
        for store in of.values():
            in_store = np.flatnonzero(chosen[first : first + len(store)])
            if chosen is held_out:  # batches of similar lengths
                in_store = in_store[np.argsort(-store.lengths[in_store], kind="stable")]
            numbers.append(in_store)
            in_all.append(first + in_store)
            first += len(store)
        return Texts(of, numbers, labels.take(np.concatenate(in_all)), tokenizer)

    train = texts(trained, 0, ~held_out)
    validation = texts(given or trained, first_given if given else 0, held_out)
    identity = prepared.fingerprint(
        train=train.fingerprint,
        validation=validation.fingerprint,
        classes=labels.classes,
        labels=hashlib.sha256(labels.values.tobytes()).hexdigest(),
    )
    about = f"{source}: {_describe(train, validation, config)}"
    return LabelledData(train, validation, identity, about)


def _describe(train: Texts, validation: Texts, config: LabelledTextConfig) -> str:
    labels = train.labels
    lengths = train.lengths
    notes = Notes()
    for store in {*train.stores, *validation.stores}:
        notes.update(store.notes)
    counts = labels.counts()
    most = [f"{labels.classes[c]}: {counts[c]:,}" for c in np.argsort(-counts, kind="stable")[:10]]
    most += [f"{len(counts) - 10:,} more classes"] * (len(counts) > 10)
    by_class = f" ({', '.join(most)})" if most else ""
    how = f"of {', '.join(store.source for store in validation.stores)}"
    if validation.stores == train.stores:
        of_each_class = "" if labels.problem_type == "regression" else " of each class"
        how = f"{config.validation_split_percentage:g}%{of_each_class} held out"
    return (
        f"{labels.problem_type}; {len(train):,} texts to train on{by_class}, "
        f"{lengths.min()}-{lengths.max()} tokens (mean {lengths.mean():.0f}), "
        f"{notes.counts['cut']:,} of all cut to {config.seq_length}; {len(validation):,} to "
        f"validate on, {how}{records.not_used(notes.named('unused '))}"
    )
