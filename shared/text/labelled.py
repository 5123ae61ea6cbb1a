"""Texts with labels: prepared once, and read as samples."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shared import demo
from shared.config.parse import cache_dir
from shared.data import prepared, records
from shared.data.chunks import Joined, chunked, keep_all
from shared.data.labels import LabelledData, Labels, problem_type_of, read_labels, warn_of_joined
from shared.data.order import Batch, Row
from shared.data.records import Source
from shared.models.hub import from_hub
from shared.process.collectives import on_main
from shared.process.errors import ConfigError
from shared.text.options import LabelledTextConfig
from shared.text.special import Special, read_as_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = {"input_ids": np.int32, "token_type_ids": np.uint8}  # what a tokenizer makes: as what it is kept
COLUMNS = {"text": ("text", "sentence"), "text_pair": (), "label": ("label", "labels")}
DEMO = Source("functions of the standard library", lambda: [sys.version, demo.python_files()], demo.functions_of_packages)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, which pads on the right. One without a padding token pads with its end-of-text token.

    Strings of special tokens in a text are text, also where the tokenizer is saved with a model.

    Raises:
        ConfigError: it cannot be loaded, or has neither token.
    """
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = from_hub(AutoTokenizer, name, split_special_tokens=True)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None or not tokenizer.is_fast:
        raise ConfigError(f"{name}: its tokenizer has no padding and no end-of-text token, or is a slow one")
    tokenizer.padding_side = "right"
    return tokenizer


class Texts:
    """One split of prepared texts: `order.Samples`, and what `report` asks for.

    Each row has `input_ids`, [tokens] int64, `token_type_ids` where the tokenizer makes them, and `labels`: a class number,
    a number, or [classes] fp32 with 1 for each class that the text has.

    Args:
        folder: of the prepared data.
        index: [n], the numbers of the texts.
        labels: of these texts.
        sources: texts of each source of a mixture, in this order.
    """

    def __init__(
        self, folder: Path, index: np.ndarray, labels: Labels, tokenizer: Any, sources: dict[str, int] | None = None
    ) -> None:
        self.folder, self.index, self.labels, self.tokenizer, self.sources = folder, index, labels, tokenizer, sources or {}
        self.arrays = _arrays(folder, json.loads((folder / "meta.json").read_text())["chunks"])
        self.ends = np.load(folder / "ends.npy")
        self.starts = np.concatenate([[0], self.ends[:-1]])
        self.lengths = (self.ends - self.starts)[index]

    def __len__(self) -> int:
        return len(self.index)

    def _part(self, number: int) -> slice:
        return slice(self.starts[self.index[number]], self.ends[self.index[number]])

    def __getitem__(self, number: int) -> Row:
        part = self._part(number)
        tokens = {name: array[part].astype(np.int64) for name, array in self.arrays.items()}
        return tokens | {"labels": self.labels[number]}

    def num_targets(self, indices: np.ndarray) -> int:
        return len(indices)

    @cached_property
    def records(self) -> dict[str, dict[str, Any]]:
        """The records to validate on, without their labels, by their numbers."""
        return json.loads((self.folder / "records.json").read_text())

    def shown(self, number: int) -> dict[str, Any]:
        """Where a text is from, and its record."""
        return self.records[str(self.index[number])]

    def position(self, number: int) -> int:
        return int(self.index[number])

    def draw(self, file: Path, title: str, tiles: list[tuple[int, str]]) -> None:
        """Texts are read in evaluation.json."""


def _arrays(folder: Path, chunks: list[int]) -> dict[str, Joined]:
    """What the tokenizer made of all texts, by its names; `chunks`: tokens of each."""
    names = [name for name in TOKENS if (folder / f"texts-00000-{name}.npy").exists()]
    return {name: Joined(folder / "texts", name, chunks) for name in names}


def collate(rows: list[Row], *, pad_token_id: int, at_most: int, multiple_of: int = 8) -> Batch:
    """Rows of `Texts` -> {"input_ids" and perhaps "token_type_ids": [batch, longest] int64; "labels"}.

    And "attention_mask", if a row is shorter than the longest: without a mask the faster kernels can be used.

    Args:
        at_most: no row is longer.
        multiple_of: pad to a multiple of this, but not beyond `at_most`: fewer lengths mean fewer kernels to choose.
    """
    lengths = np.array([len(row["input_ids"]) for row in rows])
    longest = min(int(lengths.max()) + -int(lengths.max()) % multiple_of, at_most)
    fill = {"input_ids": pad_token_id} | ({"token_type_ids": 0} if "token_type_ids" in rows[0] else {})
    batch = {key: np.full((len(rows), longest), value, np.int64) for key, value in fill.items()}
    if lengths.min() < longest:
        batch["attention_mask"] = (np.arange(longest) < lengths[:, None]).astype(np.int64)
    for i, row in enumerate(rows):
        for key in fill:
            batch[key][i, : len(row[key])] = row[key]
    batch["labels"] = np.stack([row["labels"] for row in rows])
    return {key: torch.from_numpy(value) for key, value in batch.items()}


def prepare(config: LabelledTextConfig, tokenizer: PreTrainedTokenizerBase) -> LabelledData:
    """Read, check and tokenise the data once, and split them. Every rank calls this; the main one works.

    Raises:
        ConfigError: wrong input, with its place; a class with nothing to train on; only one class.
    """
    sources = {name: records.open_sources(source, demo=DEMO) for name, source in config.sources().items()}
    trained = {name: train for name, (train, _) in sources.items()}
    validation = next(iter(sources.values()))[1]  # the same for all
    serialised = tokenizer.backend_tokenizer.to_str()  # type: ignore[attr-defined]
    how = {
        "kind": "labelled",
        "tokenizer": hashlib.sha256(serialised.encode()).hexdigest(),
        "texts": [tokenizer.model_input_names, config.seq_length],
    }
    key = on_main(
        lambda: prepared.fingerprint(
            code=prepared.source_of("data", "text"),
            train={name: source.identity() for name, source in trained.items()},
            validation=validation and validation.identity(),
            columns=[config.text_column, config.text_pair_column, config.label_column],
            settings=[config.problem_type, config.validation_split_percentage],
            **how,
        )
    )
    folder = prepared.build_once(
        cache_dir() / "labelled" / key, lambda into: _Building(config, tokenizer, into, how).build(trained, validation)
    )
    meta = json.loads((folder / "meta.json").read_text())
    labels = Labels(meta["problem_type"], tuple(meta["classes"]), np.load(folder / "labels.npy"))
    parts = [np.load(folder / f"{name}.npy") for name in ("train", "validation")]
    train, held_out = (Texts(folder, index, labels.take(index), tokenizer) for index in parts)
    train.sources = meta["sources"]
    about = meta["about"] + records.not_used(meta["unused"])
    return LabelledData(train, held_out, meta["sha256"], about)


Item = tuple[str, str, str | None]  # (place, text, second text)


def _content(item: Item) -> bytes:
    return json.dumps(item[1:]).encode()


class _Encode:
    """Items to `input_ids`, perhaps `token_type_ids`, and `lengths`, the tokens of each item.

    Counts how many were cut, and strings of special tokens in them.
    """

    def __init__(self, tokenizer: Any, seq_length: int) -> None:
        self.tokenizer, self.seq_length, self.special = tokenizer, seq_length, Special(tokenizer)

    def __call__(self, chunk: list[Item]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        parts, cut, special = [], 0, 0
        for some in chunked(chunk, _content):  # a part's encodings fill memory
            places, texts, others = zip(*some, strict=True)
            pairs = None if others[0] is None else list(others)
            options = {"truncation": True, "max_length": self.seq_length, "split_special_tokens": True}
            options |= {"return_special_tokens_mask": True, "return_attention_mask": False}
            encoded = self.tokenizer(list(texts), pairs, **options)
            lengths = np.array([len(ids) for ids in encoded["input_ids"]])
            if not lengths.all():
                raise ConfigError(f"{places[int(lengths.argmin())]}: the tokenizer makes no token of this text")
            found = {name: np.concatenate(encoded[name]).astype(kind) for name, kind in TOKENS.items() if name in encoded}
            added = np.concatenate(encoded["special_tokens_mask"]).astype(bool)
            found["input_ids"] = self.special.to_unknown(found["input_ids"], added)
            parts.append(found | {"lengths": lengths})
            special += self.special.count([*texts, *(pairs or [])])
            cut += sum(bool(encoding.overflowing) for encoding in encoded.encodings)
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return arrays, {"cut": cut, "special": special}


class _Building:
    """Fills the folder of prepared data."""

    def __init__(self, config: LabelledTextConfig, tokenizer: Any, folder: Path, how: dict[str, Any]) -> None:
        self.config, self.tokenizer, self.folder, self.how = config, tokenizer, folder, how
        self.places: list[str] = []
        self.labels: list[Any] = []
        self.lengths: list[np.ndarray] = []
        self.unused: Counter[str] = Counter()
        self.cut = self.special = 0

    def build(self, trained: dict[str, Source], validation: Source | None) -> None:
        sizes = {name: self._add(source) for name, source in trained.items()}
        size = len(self.labels)
        if validation is not None:
            self._add(validation)
        problem_type = self.config.problem_type or problem_type_of(self.labels)
        labels = read_labels(self.labels, problem_type, self.places.__getitem__, trained=size)
        warn_of_joined(set(labels.classes), labels.problem_type)
        percent = self.config.validation_split_percentage
        if validation:
            held_out = np.arange(len(labels)) >= size
            how = f"of {validation.name}"
        else:
            held_out = labels.hold_out(percent)
            how = f"{percent:g}%{' of each class' * (labels.problem_type != 'regression')} held out"
        name = ", ".join(source.name for source in trained.values())
        index = [np.flatnonzero(~held_out), np.flatnonzero(held_out)]
        trained_on = labels.take(index[0])
        trained_on.require_trained(f"{self.places[0]} and after", "text")
        if not held_out.any():
            raise ConfigError(f"{name}: no text to validate on")
        lengths = np.concatenate(self.lengths)
        read = lengths[index[0]]
        index[1] = index[1][np.argsort(-lengths[index[1]], kind="stable")]  # batches of similar lengths
        self._save(labels, lengths, index)
        self._save_records([validation] if validation else [*trained.values()], size if validation else 0, index[1])
        of = np.searchsorted(np.cumsum([*sizes.values()]), index[0], side="right")
        counts = trained_on.counts()
        most = [f"{labels.classes[c]}: {counts[c]:,}" for c in np.argsort(-counts, kind="stable")[:10]]
        most += [f"{len(counts) - 10:,} more classes"] * (len(counts) > 10)
        by_class = f" ({', '.join(most)})" if most else ""
        about = f"{name}: {labels.problem_type}; {len(index[0]):,} texts to train on{by_class}, "
        about += f"{read.min()}-{read.max()} tokens (mean {read.mean():.0f}), {self.cut:,} of all cut to "
        about += f"{self.config.seq_length}; {len(index[1]):,} to validate on, {how}{read_as_text(self.special)}"
        meta: dict[str, Any] = {
            "classes": labels.classes,
            "problem_type": labels.problem_type,
            "about": about,
            "unused": sorted(self.unused),
        }
        meta |= {"chunks": [int(some.sum()) for some in self.lengths]}
        meta |= {"sha256": self._digest(labels, index, _arrays(self.folder, meta["chunks"]))}
        meta |= {"sources": dict(zip(sizes, np.bincount(of, minlength=len(sizes)).tolist(), strict=True))}
        (self.folder / "meta.json").write_text(json.dumps(meta, indent=1))

    def _add(self, source: Source) -> int:
        """Tokenise all texts of a source. Returns their number."""
        from tqdm import tqdm

        before = len(self.labels)
        work, processes = _Encode(self.tokenizer, self.config.seq_length), self.config.preprocessing_num_workers
        with tqdm(desc=f"tokenising {source.name}", unit=" texts", leave=False, disable=None) as bar:
            place, options = self.folder / "texts", {"processes": processes, "first": len(self.lengths), **self.how}
            for kept, facts in keep_all(self._read(source), _content, work, place, [*TOKENS], **options):
                self.lengths.append(np.load(kept / "lengths.npy"))
                self.cut += facts["cut"]
                self.special += facts["special"]
                bar.update(len(self.lengths[-1]))
        if len(self.labels) == before:
            raise ConfigError(f"{source.name}: no records in it")
        return len(self.labels) - before

    def _read(self, source: Source) -> Iterator[tuple[str, str, str | None]]:
        """(place, text, second text or None) of each record. Its label and place are noted."""
        columns: dict[str, str] = {}
        for where, record in source.read():
            columns = columns or self._columns(record, where)
            for column in columns.values():
                if column not in record:
                    raise ConfigError(f"{where}: no column {column!r} (has: {', '.join(map(str, record))})")
            texts = [record[columns[kind]] for kind in ("text", "text_pair") if kind in columns]
            for kind, text in zip(columns, texts, strict=False):
                if not isinstance(text, str) or not text.strip():
                    found = "empty" if isinstance(text, str) else records.kind(text)
                    raise ConfigError(f"{where}: {columns[kind]!r} is {found}, expected text")
            self.unused.update(records.unused(record, columns.values()))
            label = record[columns["label"]]
            self.labels.append(int(label) if isinstance(label, float) and label.is_integer() else label)
            self.places.append(where)
            yield where, texts[0], texts[1] if len(texts) > 1 else None

    def _columns(self, record: dict[str, Any], where: str) -> dict[str, str]:
        """The names of the columns: text, perhaps text_pair, and label."""
        found = {}
        for kind, usual in COLUMNS.items():
            named = getattr(self.config, f"{kind}_column")
            column = named or next((name for name in usual if name in record), "")
            if column not in record and (named or usual):
                wanted = repr(named) if named else " or ".join(usual)
                has = ", ".join(map(str, record))
                unlabelled = ". Texts without labels: see docs/after_training.md" * (kind == "label")
                raise ConfigError(f"{where}: no column {wanted} (has: {has}); name it with --{kind}_column{unlabelled}")
            if column:
                found[kind] = column
        return found

    def _save(self, labels: Labels, lengths: np.ndarray, index: list[np.ndarray]) -> None:
        np.save(self.folder / "ends.npy", np.cumsum(lengths))
        np.save(self.folder / "labels.npy", labels.values)
        for name, numbers in zip(("train", "validation"), index, strict=True):
            np.save(self.folder / f"{name}.npy", numbers)

    def _save_records(self, sources: list[Source], first: int, wanted: np.ndarray) -> None:
        """Read once more, and keep the `wanted` records for reports; `first`: the number of the first that is read."""
        chosen, kept, number = set(wanted.tolist()), {}, first
        for source in sources:
            for where, record in source.read():
                if number in chosen:
                    label = self._columns(record, where)["label"]
                    kept[number] = {"where": where} | {k: v for k, v in record.items() if k not in (label, "where")}
                number += 1
        (self.folder / "records.json").write_text(json.dumps(kept, default=str))

    def _digest(self, labels: Labels, index: list[np.ndarray], arrays: dict[str, Joined]) -> str:
        digest = hashlib.sha256(json.dumps(labels.classes).encode())
        for array in (labels.values, *index):
            digest.update(array.tobytes())
        for part in (part for joined in arrays.values() for part in joined.parts(0, len(joined))):
            digest.update(part.data)
        digest.update((self.folder / "ends.npy").read_bytes())
        return digest.hexdigest()
