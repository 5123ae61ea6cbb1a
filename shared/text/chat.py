"""Conversations prepared once, and read as samples."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shared import demo
from shared.config.parse import cache_dir
from shared.data import prepared, records
from shared.data.order import IGNORED, Row, is_near, permute
from shared.data.records import Source
from shared.process.collectives import on_main
from shared.process.errors import ConfigError
from shared.text.encoder import Encoder
from shared.text.forms import FORMS, read_example, recognise
from shared.text.options import ChatConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


FORMAT = 6  # raised when the prepared files change meaning
AT_ONCE = 128  # records that a process is handed at a time
COPIED_AT_ONCE = 2**24  # bytes
DEMO = Source("functions of the Python standard library", lambda: [sys.version, demo.python_files()], demo.docstring_chats)


# Prepared samples ------------------------------------------------------------------------------------------------------


def prepare(config: ChatConfig, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Read, check and tokenise the data once; with the same data, tokenizer and settings it is there already.

    Every rank calls this; the main one works, the others wait.

    Raises:
        ConfigError: wrong input, with its place, or no sample with anything to learn.
    """
    encoder = Encoder(tokenizer, config.loss_on)
    train, validation = records.open_sources(config, demo=DEMO)
    serialised = tokenizer.backend_tokenizer.to_str()  # type: ignore[attr-defined]
    key = on_main(  # machines may see other file times, and the Hub may answer one of them only
        lambda: prepared.fingerprint(
            format=FORMAT,
            train=train.identity(),
            validation=validation and validation.identity(),
            tokenizer=hashlib.sha256(serialised.encode()).hexdigest(),
            template=str(tokenizer.chat_template),
            special=[tokenizer.bos_token_id, tokenizer.eos_token_id],
            settings=[config.seq_length, config.loss_on, config.max_train_samples, config.validation_split_percentage],
        )
    )

    def build(folder: Path) -> None:
        sizes, facts = _encode_all(train, folder / "all", config, tokenizer)
        facts |= {"source": train.name, "own_template": encoder.has_own_template}
        kept = np.ones(len(sizes), bool)
        if validation is None:
            held_out, facts["validation"] = _hold_out(sizes[:, 2], config.validation_split_percentage)
            kept = ~held_out
            splits = {"train": ("all", sizes, kept), "validation": ("all", sizes, ~kept)}
        else:
            others, _ = _encode_all(validation, folder / "others", replace(config, max_train_samples=None), tokenizer)
            facts["validation"] = f"{len(others):,} of {validation.name}"
            splits = {"train": ("all", sizes, kept), "validation": ("others", others, np.ones(len(others), bool))}
        if not kept.any():
            raise ConfigError(f"{train.name}: a single sample cannot be split; give --validation_file")
        lengths = sizes[kept, 0] - 1.0
        facts["context"] = float((lengths**2).sum() / lengths.sum())  # tokens of a token's sample, in the mean over tokens
        digest = hashlib.sha256()
        for split, (source, sizes_of, chosen) in splits.items():
            _select(folder / source, sizes_of, chosen, folder / split, digest)
        for name in {source for source, _, _ in splits.values()}:
            for file in _files(folder / name):
                file.unlink()
        (folder / "meta.json").write_text(json.dumps(facts | {"sha256": digest.hexdigest()}, indent=1))

    return prepared.build_once(cache_dir() / "chat" / key, build)


def _hold_out(is_first: np.ndarray, percent: float) -> tuple[np.ndarray, str]:
    """(which samples to validate on, [samples] bool; how that was chosen, for people).

    Whole records, so that no text is on both sides; where these are half or twice the share, or all, the last samples.

    Args:
        is_first: [samples], whether a sample is the first of its record.
        percent: per cent held out.
    """
    record = np.cumsum(is_first) - 1
    count, samples = int(record[-1]) + 1, len(record)

    def share(of: int) -> int:
        return max(1, min(round(of * percent / 100), of - 1))

    chosen = permute(np.arange(count), count, (0,))[: share(count)]
    held_out = np.isin(record, chosen)
    if samples == 1 or (not held_out.all() and is_near(held_out.sum(), share(samples))):
        return held_out, f"{held_out.sum():,}, from {len(chosen):,} of {count:,} records"
    held_out = np.arange(samples) >= samples - share(samples)
    return held_out, f"{held_out.sum():,}, the last {held_out.mean():.0%} (whole records would be too much or too little)"


class _Encode:
    """Records to samples: the tokens of all, which of them are learned, [samples, 3] tokens, targets and whether it is the
    first of its record, counts. A plain text makes as many samples as it takes, any other record one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, loss_on: str, seq_length: int) -> None:
        self.encoder, self.most = Encoder(tokenizer, loss_on), seq_length + 1

    def __call__(self, chunk: tuple[str, list[tuple[str, dict[str, Any]]]]) -> tuple[Any, Any, Any, Counter[str]]:
        form, rows = chunk
        counts = Counter({"read": len(rows), form: len(rows)})
        every, marks, sizes = [np.zeros(0, np.int32)], [np.zeros(0, bool)], []
        for where, record in rows:
            ids, learned = self.encoder(read_example(record, form, where), where)
            if learned.any() and (end := self.encoder.end_of(ids[: np.flatnonzero(learned)[-1] + 1])) is not None:
                counts[f"end {end}"] += 1
            last = len(ids) - 1 if form == "plain text" else 1
            kept = 0
            for start in range(0, last, self.most - 1):  # one ends with the token that the next begins with
                part = learned[start : start + self.most]
                targets = int(part[1:].sum())  # the first token of a sample is nobody's next token
                if targets:
                    every.append(np.array(ids[start : start + self.most], np.int32))
                    marks.append(part)
                    sizes.append((len(part), targets, not kept))
                    kept += 1
            counts["cut"] += form != "plain text" and len(ids) > self.most
            counts["dropped"] += not kept
        return np.concatenate(every), np.concatenate(marks), np.array(sizes, np.int64).reshape(-1, 3), counts


def _chunks(source: Source, limit: int | None) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """(form, records): the first record's form, which all have to have, and some of the records with their places."""
    rows, form = islice(source.read(), limit), ""
    while chunk := list(islice(rows, AT_ONCE)):
        where, first = chunk[0]
        form = form or recognise(first, where)
        yield form, chunk


def _files(place: Path) -> list[Path]:
    return [place.with_name(f"{place.name}-{name}.bin") for name in ("ids", "learned")]


def _encode_all(
    source: Source, place: Path, config: ChatConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[np.ndarray, dict[str, Any]]:
    """Write the samples of a source, one after another, to `_files(place)`: (sizes as of `_Encode`, facts)."""
    from tqdm import tqdm

    sizes, counts = [], Counter[str]()
    parts = tokenizer, config.loss_on, config.seq_length
    chunks = _chunks(source, config.max_train_samples)
    results = prepared.in_order(_Encode, parts, chunks, config.preprocessing_num_workers)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(file.open("wb")) for file in _files(place)]
        results = stack.enter_context(contextlib.closing(results))
        bar = stack.enter_context(tqdm(desc=f"tokenising {source.name}", unit=" rows", leave=False, disable=None))
        for ids, learned, some, seen in results:
            for file, values in zip(files, (ids, learned), strict=True):
                file.write(values.tobytes())
            sizes.append(some)
            counts += seen
            bar.update(seen["read"])
    if not counts["read"]:
        raise ConfigError(f"{source.name}: no records in it")
    if counts["dropped"] == counts["read"]:
        raise ConfigError(
            f"{source.name}: none of its {counts['read']} samples has a token to learn within "
            f"--seq_length {config.seq_length}"
        )
    form = next(form for form in FORMS if counts[form])
    ends = [int(name.removeprefix("end ")) for name in counts if name.startswith("end ")]
    facts = {"form": form, "end": max(ends, key=lambda end: counts[f"end {end}"], default=None)}
    return np.concatenate(sizes), {**facts, **{name: counts[name] for name in ("read", "cut", "dropped")}}


def _select(source: Path, sizes: np.ndarray, chosen: np.ndarray, place: Path, digest: Any) -> None:
    """Copy the `chosen` samples, [samples] bool, of what `_encode_all` left at `source` to the files of a split."""
    ends = np.cumsum(sizes[chosen, 0])
    bounds = np.concatenate([[0], np.cumsum(sizes[:, 0])])[np.flatnonzero(np.diff(chosen, prepend=False, append=False))]
    for file, name, kind_of in zip(_files(source), ("ids", "learned"), (np.int32, np.bool_), strict=True):
        dtype = np.dtype(kind_of)
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (int(ends[-1]),)}
        with file.open("rb") as values, open(f"{place}-{name}.npy", "wb") as into:
            np.lib.format.write_array_header_1_0(into, header)
            for first, last in (dtype.itemsize * bounds).reshape(-1, 2).tolist():  # neighbours at once
                values.seek(first)
                for start in range(first, last, COPIED_AT_ONCE):
                    block = values.read(min(COPIED_AT_ONCE, last - start))
                    into.write(block)
                    digest.update(block)
    np.save(f"{place}-ends.npy", ends)
    digest.update(ends.tobytes())
    np.save(f"{place}-targets.npy", sizes[chosen, 1])


class Conversations:
    """One split of prepared samples, memory-mapped: `data.Samples`, one conversation an index."""

    def __init__(self, folder: Path, split: str) -> None:
        with prepared.reading(folder):
            self.meta = json.loads((folder / "meta.json").read_text())
            self.ids = np.load(folder / f"{split}-ids.npy", mmap_mode="r")
            self.learned = np.load(folder / f"{split}-learned.npy", mmap_mode="r")
            self.ends, self.targets = (np.load(folder / f"{split}-{name}.npy") for name in ("ends", "targets"))
            if not len(self.ids) == len(self.learned) == self.ends[-1] or len(self.ends) != len(self.targets):
                raise ValueError("its files are not of one length")
        self.starts = np.concatenate([[0], self.ends[:-1]])
        self.lengths = self.ends - self.starts - 1  # positions of a row: every token has to predict a next one

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Row:
        ids = np.asarray(self.ids[self.starts[index] : self.ends[index]], dtype=np.int64)
        learned = self.learned[self.starts[index] : self.ends[index]]
        return {"input_ids": ids[:-1], "labels": np.where(learned[1:], ids[1:], IGNORED)}

    def num_targets(self, indices: np.ndarray) -> int:
        return int(self.targets[indices].sum())

    def prompt(self, index: int) -> tuple[list[int], list[int]]:
        """(ids before the last learned turn, the learned ids after): what to give the model, and a reference."""
        ids = np.asarray(self.ids[self.starts[index] : self.ends[index]])
        learned = np.asarray(self.learned[self.starts[index] : self.ends[index]])
        gaps = np.flatnonzero(learned & ~np.concatenate([[False], learned[:-1]]))
        cut = max(int(gaps[-1]), min(16, len(ids) // 2)) if gaps[-1] == 0 else int(gaps[-1])
        return ids[:cut].tolist(), ids[cut:].tolist()


def describe(samples: Conversations, config: ChatConfig) -> str:
    """One line about the data: form, counts, lengths, share learned."""
    meta, lengths = samples.meta, samples.lengths
    template = (
        ""
        if meta["form"] in ("plain text", "prompt and completion")
        else (
            ", the model's chat template"
            if meta["own_template"]
            else ", the default chat template (### User / ### Assistant)"
        )
    )
    return (
        f"{meta['source']}: {meta['form']}{template}; {meta['read']:,} read, {meta['cut']:,} cut to {config.seq_length} "
        f"tokens, {meta['dropped']:,} dropped with nothing to learn; {len(samples):,} to train on, "
        f"{lengths.min()}-{lengths.max()} tokens (mean {lengths.mean():.0f}), {samples.learned.mean():.0%} of them learned; "
        f"to validate on: {meta['validation']}"
    )


def marked(samples: Conversations, tokenizer: PreTrainedTokenizerBase, index: int = 0) -> str:
    """A sample as text, with the learned tokens between ⟦ and ⟧."""
    ids = np.asarray(samples.ids[samples.starts[index] : samples.ends[index]])
    learned = np.asarray(samples.learned[samples.starts[index] : samples.ends[index]]).copy()
    learned[0] = False
    parts = []
    for run in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(learned)) + 1):
        text = str(tokenizer.decode(ids[run].tolist()))
        parts.append(f"⟦{text}⟧" if learned[run[0]] else text)
    return "".join(parts)
