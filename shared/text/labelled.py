"""Texts with labels: prepared once, and read as samples."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shared import demo
from shared.data import prepared, records
from shared.data.labels import LabelledData, Labels, problem_type_of, read_labels, warn_of_joined
from shared.data.order import Batch, Row
from shared.data.records import Source
from shared.data.store import Encoded, Notes, Split, Store, prepare
from shared.models.hub import from_hub
from shared.process.errors import ConfigError
from shared.text.options import LabelledTextConfig
from shared.text.special import Special, read_as_text

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


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, which pads on the right. One without a padding token pads with its
    end-of-text token.

    Strings of special tokens in a text are text, also where the tokenizer is saved with a model.

    Raises:
        ConfigError: it cannot be loaded, or has neither token.
    """
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = from_hub(AutoTokenizer, name, split_special_tokens=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None or not tokenizer.is_fast:
        raise ConfigError(
            f"{name}: its tokenizer has no padding and no end-of-text token, or is a slow one"
        )
    tokenizer.padding_side = "right"
    return tokenizer


# The text, or both; and what is kept of the record: its label, its place, and the rest.
Item = tuple[tuple[str, ...], dict[str, Any]]


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
        line = self.line(number)
        return {"where": line["where"]} | line["record"]

    def position(self, number: int) -> tuple[int, int]:
        """Grows as the texts stand in the data."""
        store, of_store = self.find(number)
        return self.stores.index(store), of_store

    def draw(self, file: Any, title: str, tiles: list[tuple[int, str]]) -> None:
        """Texts are read in evaluation.json."""


def collate(rows: list[Row], *, pad_token_id: int, at_most: int, multiple_of: int = 8) -> Batch:
    """Rows of `Texts` -> {"input_ids" and perhaps "token_type_ids": [batch, longest] int64;
    "labels"}.

    And "attention_mask", if a row is shorter than the longest: without a mask the faster kernels
    can be used.

    Args:
        at_most: no row is longer.
        multiple_of: pad to a multiple of this, but not beyond `at_most`: fewer lengths mean fewer
            kernels to choose.
    """
    lengths = np.array([len(row["input_ids"]) for row in rows])
    longest = min(int(lengths.max()) + -int(lengths.max()) % multiple_of, at_most)
    fill = {"input_ids": pad_token_id} | (
        {"token_type_ids": 0} if "token_type_ids" in rows[0] else {}
    )
    batch = {key: np.full((len(rows), longest), value, np.int64) for key, value in fill.items()}
    if lengths.min() < longest:
        batch["attention_mask"] = (np.arange(longest) < lengths[:, None]).astype(np.int64)
    for i, row in enumerate(rows):
        for key in fill:
            batch[key][i, : len(row[key])] = row[key]
    batch["labels"] = np.stack([row["labels"] for row in rows])
    return {key: torch.from_numpy(value) for key, value in batch.items()}


class EncodeTexts:
    """Records to tokens, see `store.Encode`: `input_ids` and perhaps `token_type_ids`.

    A line has the label, the place and the rest of a record.
    """

    def __init__(self, config: LabelledTextConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.columns = {kind: getattr(config, f"{kind}_column") for kind in COLUMNS}
        self.seq_length = config.seq_length
        self.special = Special(tokenizer)
        self.tokenizer = tokenizer

    def identity(self) -> Any:
        serialised = self.tokenizer.backend_tokenizer.to_str()  # type: ignore[attr-defined]
        return {
            "code": prepared.source_of("text/labelled.py", "text/special.py"),
            "tokenizer": hashlib.sha256(serialised.encode()).hexdigest(),
            "makes": self.tokenizer.model_input_names,
            "seq_length": self.seq_length,
            "columns": self.columns,
        }

    def items(self, source: Source, notes: Notes) -> Iterator[Item]:
        columns: dict[str, str] = {}
        for where, record in source.read():
            columns = columns or self._columns_of(record, where)
            for column in columns.values():
                if column not in record:
                    raise ConfigError(
                        f"{where}: no column {column!r} (has: {', '.join(map(str, record))})"
                    )
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
            yield texts, {"label": label, "where": where, "record": others}

    def _columns_of(self, record: dict[str, Any], where: str) -> dict[str, str]:
        """The names of the columns: text, perhaps text_pair, and label."""
        found = {}
        for kind, usual in COLUMNS.items():
            named = self.columns[kind]
            column = named or next((name for name in usual if name in record), "")
            if column not in record and (named or usual):
                wanted = repr(named) if named else " or ".join(usual)
                has = ", ".join(map(str, record))
                unlabelled = ". Texts without labels: see docs/after_training.md" * (
                    kind == "label"
                )
                raise ConfigError(
                    f"{where}: no column {wanted} (has: {has}); name it with "
                    f"--{kind}_column{unlabelled}"
                )
            if column:
                found[kind] = column
        return found

    def size(self, item: Item) -> int:
        return sum(map(len, item[0]))

    def __call__(self, items: list[Item], notes: Notes) -> Encoded:
        texts, lines = zip(*items, strict=True)
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
                f"{lines[int(lengths.argmin())]['where']}: the tokenizer makes "
                "no token of this text"
            )
        values = {
            name: np.concatenate(encoded[name]).astype(kind)
            for name, kind in TOKENS.items()
            if name in encoded
        }
        added = np.concatenate(encoded["special_tokens_mask"]).astype(bool)
        values["input_ids"] = self.special.to_unknown(values["input_ids"], added)
        notes.counts["special"] += self.special.count([text for of_one in texts for text in of_one])
        notes.counts["cut"] += sum(bool(encoding.overflowing) for encoding in encoded.encodings)
        return Encoded(values, np.cumsum(lengths), lines=lines)


def open_texts(config: LabelledTextConfig, tokenizer: PreTrainedTokenizerBase) -> LabelledData:
    """Prepare the data, or each source of a mixture, and split them. Every rank calls this.

    Raises:
        ConfigError: wrong input, with its place; a class with nothing to train on; only one class.
    """
    encode = EncodeTexts(config, tokenizer)
    processes = config.preprocessing_num_workers
    stores: dict[str, Store] = {}
    given: dict[str, Store] = {}
    for name, of_source in config.sources().items():
        train, validation = records.open_sources(of_source, demo=DEMO)
        stores[name] = prepare("labelled", train, encode, processes=processes)
        if validation is not None and not (given and config.validation_file):  # the same for all
            given[f"validation {name}"] = prepare(
                "labelled", validation, encode, processes=processes
            )
    sources = len(stores)
    stores |= given
    bounds = np.cumsum([0, *map(len, stores.values())])
    trained = int(bounds[sources])
    raw = [line["label"] for store in stores.values() for line in store.lines()]

    def where(number: int) -> str:
        of = int(np.searchsorted(bounds, number, side="right")) - 1
        return [*stores.values()][of].line(number - int(bounds[of]))["where"]

    labels = read_labels(raw, config.problem_type or problem_type_of(raw), where, trained=trained)
    warn_of_joined(set(labels.classes), labels.problem_type)
    held_out = np.arange(len(labels)) >= trained
    if not given:
        held_out = labels.hold_out(config.validation_split_percentage)
    labels.take(np.flatnonzero(~held_out)).require_trained(f"{where(0)} and after", "text")
    source = ", ".join(store.source for store in [*stores.values()][:sources])
    if not held_out.any():
        raise ConfigError(f"{source}: no text to validate on")
    numbers = [np.flatnonzero(~held_out[a:b]) for a, b in pairwise(bounds)][:sources]
    held_out_numbers = [np.flatnonzero(held_out[a:b]) for a, b in pairwise(bounds)]
    for store, chosen in zip(stores.values(), held_out_numbers, strict=True):
        # batches of similar lengths
        chosen[:] = chosen[np.argsort(-store.lengths[chosen], kind="stable")]

    def texts(of: Mapping[str, Store], chosen: list[np.ndarray]) -> Texts:
        in_all = np.concatenate([start + some for start, some in zip(bounds, chosen, strict=False)])
        return Texts(of, chosen, labels.take(in_all), tokenizer)

    train_texts = texts(dict([*stores.items()][:sources]), numbers)
    validation_texts = texts(stores, held_out_numbers)
    identity = prepared.fingerprint(
        train=train_texts.fingerprint,
        validation=validation_texts.fingerprint,
        classes=labels.classes,
        labels=hashlib.sha256(labels.values.tobytes()).hexdigest(),
    )
    about = f"{source}: {_describe(train_texts, validation_texts, config)}"
    return LabelledData(train_texts, validation_texts, identity, about)


def _describe(train: Texts, validation: Texts, config: LabelledTextConfig) -> str:
    labels = train.labels
    lengths = train.lengths
    notes = Notes()
    for store in validation.stores:
        notes.update(store.notes)
    counts = labels.counts()
    most = [f"{labels.classes[c]}: {counts[c]:,}" for c in np.argsort(-counts, kind="stable")[:10]]
    most += [f"{len(counts) - 10:,} more classes"] * (len(counts) > 10)
    by_class = f" ({', '.join(most)})" if most else ""
    how = f"of {', '.join(store.source for store in validation.stores[len(train.stores) :])}"
    if len(validation.stores) == len(train.stores):
        of_each_class = "" if labels.problem_type == "regression" else " of each class"
        how = f"{config.validation_split_percentage:g}%{of_each_class} held out"
    return (
        f"{labels.problem_type}; {len(train):,} texts to train on{by_class}, "
        f"{lengths.min()}-{lengths.max()} tokens "
        f"(mean {lengths.mean():.0f}), {notes.counts['cut']:,} of all cut to {config.seq_length}; "
        f"{len(validation):,} to validate on, {how}{read_as_text(notes.counts['special'])}"
        f"{records.not_used(notes.named('unused '))}"
    )
