"""Conversations prepared once, and read as samples."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shared import demo
from shared.config.parse import cache_dir
from shared.data import prepared, records
from shared.data.chunks import Joined, keep_all
from shared.data.mixture import Mixed
from shared.data.order import IGNORED, Row, near_share, permute
from shared.data.records import Source
from shared.models.hub import from_hub
from shared.process.collectives import on_main
from shared.process.errors import ConfigError
from shared.process.printing import note
from shared.text.encoder import Encoder
from shared.text.forms import parse_json_messages, read_example, recognise, refuse_other_meanings, unused
from shared.text.options import ChatConfig, SamplesConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


DEMO = Source("functions of the Python standard library", lambda: [sys.version, demo.python_files()], demo.docstring_chats)
WARNINGS = {  # what is counted: what is said about it, with the first place
    "lost": "turns have words that the chat template does not write or mark",
    "unlike": "answers are learned after other tokens than the template's generation prompt gives at inference",
    "empty": "records have an empty answer, from which the model learns to say nothing",
    "joined": "texts with a prompt are joined as they are, although the model has a chat template: messages would get it",
    "marked": "records mark a place for what is not text, and the mark is read as text",
    "special": "texts have the string of a special token in them, which is read as that token",
    "same": "pairs are dropped: their two answers are the same",
    "unequal": "pairs have prompts of different tokens before their two answers",
}


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with its own chat template, or else the one in the files of the model's processor."""
    from transformers import AutoTokenizer
    from transformers.utils import cached_file

    tokenizer: PreTrainedTokenizerBase = from_hub(AutoTokenizer, name)
    for file in ("chat_template.json", "processor_config.json"):
        if tokenizer.chat_template:
            break
        missing = ("missing_entries", "gated_repo", "connection_errors")
        path = cached_file(name, file, **{f"_raise_exceptions_for_{reason}": False for reason in missing})
        template = json.loads(Path(path).read_text(encoding="utf-8")).get("chat_template") if path else None
        tokenizer.chat_template = template if isinstance(template, str) else None
    return tokenizer


def prepare(config: SamplesConfig, tokenizer: PreTrainedTokenizerBase, kind: type[ToSamples] | None = None) -> Path:
    """Read, check and tokenise the data once. With the same data, tokenizer and settings it is there already.

    Every rank calls this; the main one works, the others wait.

    Args:
        kind: what turns records into samples; None: `ToSamples`.

    Raises:
        ConfigError: wrong input, with its place, or no sample with anything to learn.
    """
    loss_on = getattr(config, "loss_on", "assistant")
    work = (kind or ToSamples)(Encoder(tokenizer, loss_on), config)
    train, validation = records.open_sources(config, demo=work.demo)
    serialised = tokenizer.backend_tokenizer.to_str()  # type: ignore[attr-defined]
    how = {
        "kind": work.folder,
        "tokenizer": hashlib.sha256(serialised.encode()).hexdigest(),
        "template": str(tokenizer.chat_template),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "samples": [config.seq_length, loss_on, config.allow_unused_columns],
    }
    key = on_main(  # machines may see other file times, and the Hub may answer one of them only
        lambda: prepared.fingerprint(
            code=prepared.source_of("data", "text"),
            train=train.identity(),
            validation=validation and validation.identity(),
            settings=[config.max_train_samples, config.validation_split_percentage],
            **how,
        )
    )

    def build(folder: Path) -> None:
        sizes, facts = _write_samples(train, folder / "all", config, work, how)
        facts |= {"source": train.name, "own_template": work.encoder.has_own_template}
        held_out, others = np.zeros(len(sizes), bool), sizes[:0]
        if validation is None:
            held_out, facts["validation"] = _hold_out(sizes[:, 2], config.validation_split_percentage)
        else:
            given = replace(config, max_train_samples=None)
            others, of_others = _write_samples(validation, folder / "others", given, work, how)
            facts |= {"validation": f"{len(others):,} of {validation.name}", "chunks": facts["chunks"] | of_others["chunks"]}
        validated = others if validation else sizes[held_out]
        if copies := int(np.isin(validated[:, 3], sizes[~held_out, 3]).sum()):
            note(f"warning: {copies:,} of the {len(validated):,} texts to validate on are trained on, too, word for word")
        if held_out.all():
            raise ConfigError(f"{train.name}: a single sample cannot be split; give --validation_file")
        lengths = sizes[~held_out, 0] - 1.0
        facts["context"] = float((lengths**2).sum() / lengths.sum())  # length of a token's sample, in the mean over tokens
        splits = {"train": ("all", sizes, ~held_out), "validation": ("all", sizes, held_out)}
        if validation is not None:
            splits["validation"] = "others", others, np.ones(len(others), bool)
        digest = hashlib.sha256()
        for split, (name, of, chosen) in splits.items():
            bounds = np.append(0, np.cumsum(of[:, 0]))
            np.save(folder / f"{split}-spans.npy", np.stack([bounds[:-1], bounds[1:]], axis=1)[chosen])
            np.save(folder / f"{split}-targets.npy", of[chosen, 1])
            runs = bounds[np.flatnonzero(np.diff(chosen, prepend=False, append=False))].reshape(-1, 2)  # of neighbours
            for values in (Joined(folder / name, array, facts["chunks"][name]) for array in ("ids", "learned")):
                for part in (part for run in runs.tolist() for part in values.parts(*run)):
                    digest.update(part.data)
            digest.update(np.cumsum(of[chosen, 0]).tobytes())
        (folder / "meta.json").write_text(json.dumps(facts | {"sha256": digest.hexdigest()}, indent=1))

    return prepared.build_once(cache_dir() / work.folder / key, build)


def _hold_out(is_first: np.ndarray, percent: float) -> tuple[np.ndarray, str]:
    """(which samples to validate on, [samples] bool; how they were chosen, for people).

    Whole records, so that no text is on both sides. If these are not near the share, or all, the last samples.

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
    if samples == 1 or (not held_out.all() and near_share(held_out.sum(), share(samples))):
        return held_out, f"{held_out.sum():,}, from {len(chosen):,} of {count:,} records"
    held_out = np.arange(samples) >= samples - share(samples)
    return held_out, f"{held_out.sum():,}, the last {held_out.mean():.0%} (whole records would be too much or too little)"


class ToSamples:
    """Items (form, place, record) to samples. Plain text makes as many samples as it takes, any other record one.

    Gives the arrays `ids` and `learned`, the tokens of all samples and which of them the loss counts; `sizes`, [samples, 4]
    (tokens, targets, whether it is the first of its record, a checksum of its tokens); counts, and what is warned of (see
    WARNINGS): how often, the number of the first item, and what is said after its place.
    """

    demo, folder = DEMO, "chat"  # the embedded data; the name in the cache
    recognise = staticmethod(recognise)  # (record, place) -> form

    def __init__(self, encoder: Encoder, config: SamplesConfig) -> None:
        self.encoder, self.seq_length, self.allowed = encoder, config.seq_length, config.allow_unused_columns
        self.counts = Counter[str]()
        self.found: dict[str, list[str]] = {}  # places by keys of WARNINGS

    def __call__(self, chunk: list[tuple[str, str, dict[str, Any]]]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        self.counts = counts = Counter(read=len(chunk))
        self.found = {what: [] for what in WARNINGS} | {"lost": self.encoder.lost, "unlike": self.encoder.unlike}
        tokens, marks, sizes = [np.zeros(0, np.int32)], [np.zeros(0, bool)], []
        firsts: dict[str, tuple[int, str]] = {}
        for item, (form, where, record) in enumerate(chunk):
            samples = self.samples(record, form, where)
            for number, (ids, learned) in enumerate(samples):
                tokens.append(np.array(ids, np.int32))
                marks.append(learned)
                known = len(ids) << 32 | zlib.crc32(tokens[-1].tobytes())
                sizes.append((len(ids), int(learned[1:].sum()), number == 0, known))  # nothing predicts the first token
            counts.update({"dropped": not samples, f"form {form}": 1})
            for what, places in self.found.items():
                if places and what not in firsts:
                    firsts[what] = item, places[0].removeprefix(where)
        warned = {what: [len({*self.found[what]}), *first] for what, first in firsts.items()}
        self.encoder.lost.clear()
        self.encoder.unlike.clear()
        arrays = {"ids": np.concatenate(tokens), "learned": np.concatenate(marks)}
        return arrays | {"sizes": np.array(sizes, np.int64).reshape(-1, 4)}, {"counts": counts, "warned": warned}

    def encode(self, record: dict[str, Any], form: str, where: str) -> tuple[list[int], np.ndarray]:
        """(ids, [tokens] bool, which of them the loss counts) of a record of a form of `forms`."""
        template = str(self.encoder.tokenizer.chat_template)
        refuse_other_meanings(record, form, where, self.allowed)
        example = read_example(record, form, where)
        self.counts.update(f"unused {name}" for name in unused(record, form, example, template))
        marks = re.findall("<(?:image|video|audio)>", repr(example))[:1]
        self.found["empty"] += [where] * example.has_empty_answer
        self.found["joined"] += [where] * bool(example.prompt and self.encoder.came_with_template)
        self.found["marked"] += [f"{where}: {mark}" for mark in marks]
        self.found["special"] += self.encoder.special_in(example, where)
        ids, learned = self.encoder(example, where)
        if learned.any() and (end := self.encoder.end_of(ids, int(np.flatnonzero(learned)[-1]) + 1)) is not None:
            self.counts[f"end {end}"] += 1
        return ids, learned

    def samples(self, record: dict[str, Any], form: str, where: str) -> list[tuple[list[int], np.ndarray]]:
        """The samples of a record that have something to learn, as of `encode`."""
        ids, learned = self.encode(record, form, where)
        most = self.seq_length + 1
        self.counts["cut"] += form != "plain text" and len(ids) > most
        last = len(ids) - 1 if form == "plain text" else 1
        starts = range(0, last, self.seq_length)  # a sample begins with the last token of the one before
        parts = [(ids[start : start + most], learned[start : start + most]) for start in starts]
        return [(some, part) for some, part in parts if part[1:].any()]


def _content(item: tuple[str, str, dict[str, Any]]) -> bytes:
    """All of an item of `ToSamples` but its place."""
    form, _, record = item
    return json.dumps([form, record], default=repr).encode()


def _write_samples(
    source: Source, place: Path, config: SamplesConfig, work: ToSamples, how: dict[str, Any]
) -> tuple[np.ndarray, dict[str, Any]]:
    """Put `ids` and `learned` of a source's samples at `place`, as `keep_all` does: (sizes as of `ToSamples`, facts)."""
    from tqdm import tqdm

    places: deque[str] = deque()  # of the records that were read, and of no chunk yet that is done

    def items() -> Iterator[tuple[str, str, dict[str, Any]]]:
        forms: dict[str, str] = {}  # by file: all of its records are expected to have that of the first
        are_messages: dict[str, dict[str, bool]] = {}  # by file, too
        for where, record in islice(source.read(), config.max_train_samples):
            file = where.rpartition(":")[0]
            if file not in forms:
                forms[file] = work.recognise(record, where)
            places.append(where)
            yield forms[file], where, parse_json_messages(record, where, are_messages.setdefault(file, {}))

    sizes, counts = [], Counter[str]()
    warned: dict[str, tuple[int, str]] = {}  # how many, and the first
    arrays, processes = ("ids", "learned"), config.preprocessing_num_workers
    with tqdm(desc=f"tokenising {source.name}", unit=" rows", leave=False, disable=None) as bar:
        for kept, facts in keep_all(items(), _content, work, place, arrays, processes=processes, **how):
            sizes.append(np.load(kept / "sizes.npy"))
            counts.update(facts["counts"])
            read = [places.popleft() for _ in range(facts["counts"]["read"])]
            for what, (number, record, rest) in facts["warned"].items():
                before, first = warned.get(what, (0, read[record] + rest))
                warned[what] = before + number, first
            bar.update(len(read))
    if not counts["read"]:
        raise ConfigError(f"{source.name}: no records in it")
    if counts["dropped"] == counts["read"]:
        raise ConfigError(
            f"{source.name}: none of its {counts['read']} samples has a token to learn within "
            f"--seq_length {config.seq_length}"
        )

    def counted(what: str) -> dict[str, int]:
        return {name.removeprefix(what): count for name, count in counts.items() if name.startswith(what) and count}

    for what, said in WARNINGS.items():
        if what in warned:
            note(f"warning: {warned[what][0]:,} {said}; the first is {warned[what][1]}")
    ends = {int(end): count for end, count in counted("end ").items()}
    facts = {name: counts[name] for name in ("read", "cut", "dropped")} | {"unused": [*counted("unused ")]}
    facts |= {"forms": counted("form "), "end": max(ends, key=ends.__getitem__, default=None)}
    return np.concatenate(sizes), facts | {"chunks": {place.name: [int(some[:, 0].sum()) for some in sizes]}}


class Conversations:
    """One split of prepared samples, memory-mapped: `order.Samples`, one conversation an index."""

    def __init__(self, folder: Path, split: str) -> None:
        self.meta = json.loads((folder / "meta.json").read_text())
        chunks = self.meta["chunks"]
        name = "others" if split == "validation" and "others" in chunks else "all"
        self.ids, self.learned = (
            Joined(folder / name, array, chunks[name]) for array in ("ids", "learned")
        )  # of all splits
        self.spans, self.targets = (np.load(folder / f"{split}-{name}.npy", mmap_mode="r") for name in ("spans", "targets"))
        self.lengths = np.diff(self.spans)[:, 0] - 1  # positions of a row: each token predicts the next one

    def __len__(self) -> int:
        return len(self.spans)

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, [tokens] int32; which of them the loss counts, [tokens] bool) of a sample."""
        part = slice(*self.spans[index].tolist())
        return np.asarray(self.ids[part]), np.array(self.learned[part])

    def __getitem__(self, index: int) -> Row:
        ids, learned = self.tokens(index)
        ids = ids.astype(np.int64)
        return {"input_ids": ids[:-1], "labels": np.where(learned[1:], ids[1:], IGNORED)}

    def num_targets(self, indices: np.ndarray) -> int:
        return int(self.targets[indices].sum())

    def prompt(self, index: int) -> tuple[list[int], list[int]]:
        """(ids before the last learned turn, the ids from it on): what to give the model, and a reference."""
        ids, learned = self.tokens(index)
        cut = int(np.flatnonzero(np.diff(learned, prepend=False) & learned)[-1])
        if cut == 0:
            cut = min(16, len(ids) // 2)
        return ids[:cut].tolist(), ids[cut:].tolist()


class MixedConversations(Mixed):
    """The samples of several sources, one after the other. Has what `Conversations` has."""

    def __init__(self, parts: dict[str, Conversations]) -> None:
        super().__init__(parts)
        metas = [part.meta for part in self.parts]
        self.meta = metas[0] | {"sha256": prepared.fingerprint(sources=[meta["sha256"] for meta in metas])}
        self.meta["context"] = float(np.mean([meta["context"] for meta in metas]))
        self.lengths = np.concatenate([part.lengths for part in self.parts])
        self.ids = np.concatenate([part.ids[: 100_000 // len(parts)] for part in self.parts])  # to look for rare tokens

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        part, within = self.find(index)
        return part.tokens(within)

    def prompt(self, index: int) -> tuple[list[int], list[int]]:
        part, within = self.find(index)
        return part.prompt(within)


def open_samples(config: ChatConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, Any]:
    """(training, validation) samples: `Conversations`, or those of a mixture's sources. Every rank calls this.

    Raises:
        ConfigError: as of `prepare`.
    """
    folders = {name: prepare(source, tokenizer) for name, source in config.sources().items()}
    train = {name: Conversations(folder, "train") for name, folder in folders.items()}
    if config.validation_file:  # the same for all
        folders = dict([*folders.items()][:1])
    held_out = {name: Conversations(folder, "validation") for name, folder in folders.items()}
    if not config.mix_weights:
        return train[""], held_out[""]
    mixed = MixedConversations(train)
    held_out_mixed = MixedConversations(held_out)
    held_out_mixed.meta = mixed.meta
    return mixed, held_out_mixed


def describe(samples: Conversations | MixedConversations, config: ChatConfig) -> str:
    """One line about the data: form, counts, lengths, share of tokens that the loss counts."""
    if isinstance(samples, MixedConversations):
        return "; ".join(describe(part, config) for part in samples.parts)
    meta, lengths, forms, template = samples.meta, samples.lengths, samples.meta["forms"], ""
    if forms.keys() - {"prompt and completion", "plain text"}:
        default = "the default chat template (### User / ### Assistant)"
        template = ", the model's chat template" if meta["own_template"] else f", {default}"
    elif "prompt and completion" in forms:
        template = ", texts joined as they are, lists of messages by the chat template"
    return (
        f"{meta['source']}: {', '.join(forms)}{template}; {meta['read']:,} read, {meta['cut']:,} cut to {config.seq_length} "
        f"tokens, {meta['dropped']:,} dropped because no answer is left; {len(samples):,} to train on, "
        f"{lengths.min()}-{lengths.max()} tokens (mean {lengths.mean():.0f}), the loss counts "
        f"{samples.targets.sum() / lengths.sum():.0%} of them; to validate on: {meta['validation']}"
        f"{records.not_used(meta['unused'])}"
    )


def marked(samples: Conversations | MixedConversations, tokenizer: PreTrainedTokenizerBase, index: int = 0) -> str:
    """A sample as text, with the tokens that the loss counts between ⟦ and ⟧. Of a mixture, one of each source."""
    if isinstance(samples, MixedConversations):
        return "\n".join(marked(part, tokenizer, index) for part in samples.parts)
    ids, learned = samples.tokens(index)
    learned[0] = False
    parts = []
    for run in np.split(np.arange(len(ids)), np.flatnonzero(np.diff(learned)) + 1):
        text = str(tokenizer.decode(ids[run].tolist()))
        parts.append(f"⟦{text}⟧" if learned[run[0]] else text)
    return "".join(parts)
