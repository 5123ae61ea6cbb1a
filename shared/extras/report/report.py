"""A report on all the data of a run: data.json in its folder. With --preprocess_only also on the
screen, and as a page, data.html.

Nothing is read again: the preparation has counted, and kept a hash of each text or image.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shared.data.notes import PLACES, WARNINGS, Notes
from shared.extras.report.page import draw
from shared.process.errors import ConfigError
from shared.process.printing import print_main
from shared.process.redaction import redact

SENTENCES = WARNINGS | {  # by the name in --fail_on: what is said after a count
    "dropped": "records have no token to learn: raise --seq_length, or remove them",
    "cut": "samples are longer than --seq_length, and cut",
    "no_end": "samples have no end token, so the model does not learn to stop",
    "roles": "conversations have a role twice in a row, an answer first or a late system text",
    "tools": "conversations have tools that no message calls",
    "duplicates": "samples repeat an earlier one: remove them, unless that is meant",
    "overlap": "samples to validate on are also trained on, so their loss says little",
    "single": "classes have a single sample to train on: add some, or merge classes",
}
MOST = 10_000_000  # samples of an ordinary run: looking for copies takes memory
SHARES = {0.05: "5%", 0.01: "1%", 0.0: "none"}  # that a longer --seq_length may cut


@dataclass
class Part:
    """Samples that are reported on together.

    Args:
        hashes: [samples] int64, by which copies are found. In `parts_of`, those of samples to
            validate on are inverted: a copy of one to train on is an overlap, and no duplicate.
        lengths: [samples], in `unit`.
        place: where a sample is.
        numbers: more about them, by name.
        found: how many have what is in SENTENCES, of how many, where the first are, what is said.
    """

    name: str
    hashes: np.ndarray
    lengths: np.ndarray
    place: Callable[[int], str]
    notes: Notes = field(default_factory=Notes)
    unit: str = "tokens"
    numbers: dict[str, Any] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)

    def add(self, what: str, count: int, of: int, first: Iterable[str]) -> None:
        if count:
            about = {"first": [*first], "text": SENTENCES[what]}
            self.found[what] = {"count": count, "share": count / of, **about}

    def look(self) -> None:
        """Fill `numbers` and `found`."""
        counts = self.notes.counts
        samples = len(self.hashes)
        records = counts["read"] or samples
        for what in SENTENCES:
            self.add(what, counts[what], records, self.notes.first.get(what, ()))
        if counts["cut"]:
            self.found["cut"]["text"] += self.longer(records)
        _, first, numbers = np.unique(self.hashes, return_index=True, return_inverse=True)
        copies = np.flatnonzero(first[numbers] != np.arange(samples))
        self.add("duplicates", len(copies), samples, map(self.place, copies[:PLACES]))
        ends: Any = {"shortest": self.lengths.argmin(), "longest": self.lengths.argmax()}
        self.numbers = {"records": records, "samples": samples, **self.numbers}
        for name, sample in ends.items():
            self.numbers[name] = f"{self.lengths[sample]:,} {self.unit}: {self.place(sample)}"
        self.numbers["half have at most"] = f"{np.median(self.lengths):,.0f} {self.unit}"

    def longer(self, records: int) -> str:
        """Which --seq_length would cut fewer samples."""
        lengths = sorted(map(int, Counter(self.notes.named("length ")).elements()))
        enough = {}
        for share, said in SHARES.items():
            if (left := int(share * records)) < len(lengths):
                enough[lengths[-1 - left]] = said
        return "".join(f"; --seq_length {length} cuts {said}" for length, said in enough.items())


def write(setup: Any, train: Any, held_out: Any, tokenizer: Any) -> None:
    """Report on the samples. Main rank.

    Args:
        setup: a `run.setup.Setup`.
        train, held_out: conversations, pairs, prompts, texts, images or sequences of tokens.
        tokenizer: of their ids.

    Raises:
        ConfigError: there is more of something than --fail_on allows.
    """
    options = setup.config.data
    train, held_out = (getattr(data, "samples", data) for data in (train, held_out))  # of pairs
    if getattr(options, "streaming", False):
        return
    if len(train) > MOST and not (options.preprocess_only or options.fail_on):
        return
    parts = parts_of(train, held_out)
    shown = [*parts, together(parts)] if len(parts) > 1 else parts
    total = shown[-1]
    for part in shown:
        part.look()
    hashes, place = split_of(held_out)
    both = np.flatnonzero(np.isin(hashes, split_of(train)[0]))
    total.add("overlap", len(both), len(hashes), map(place, both[:PLACES]))
    labels = getattr(train, "labels", None)
    if labels is not None and len(counts := labels.counts()):
        total.numbers["classes"] = dict(zip(labels.classes, counts.tolist(), strict=True))
        single = [name for name, count in total.numbers["classes"].items() if count == 1]
        total.add("single", len(single), len(counts), single[:PLACES])
    report = {part.name: {**part.numbers, "found": part.found} for part in shown}
    text = redact(json.dumps({"version": 1, "parts": report}, indent=1, ensure_ascii=False))
    folder = setup.dir
    if options.preprocess_only:
        run = (setup.config.checkpoint.output_dir or Path("outputs", setup.name)).resolve()
        folder = run.with_name(f"{run.name}-data")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.json").write_text(text, encoding="utf-8")
    if options.preprocess_only:
        lines = [redact(line) for part in shown for line in lines_of(part)]
        draw(folder / "data.html", lines, total, train, tokenizer)
        print_main(*lines, f"wrote data.html and data.json to {folder}")
    for limit in (one for value in options.fail_on for one in value.split(",")):
        refuse(limit, total.found)


def parts_of(train: Any, held_out: Any) -> list[Part]:
    """Each source, whole; of images each split."""
    if hasattr(train, "files"):
        parts = [of_images(train, "to train on"), of_images(held_out, "to validate on")]
        trained = 1
    else:
        stores = {store.folder: store for data in (train, held_out) for store in stores_of(data)}
        parts = [of_store(store) for store in stores.values()]
        trained = len({store.folder for store in stores_of(train)})
    for part in parts[trained:]:
        part.hashes = ~part.hashes
    return parts


def stores_of(data: Any) -> list[Any]:
    return data.stores if hasattr(data, "stores") else [of.store for of in data.datasets]


def of_store(store: Any) -> Part:
    """A prepared source of texts. A pair counts once."""
    each = 2 if store.folder.parent.name == "preferences" else 1
    lengths = store.lengths - ("targets" in store)  # a sample's last token predicts none
    part = Part(
        store.source,
        store["text_hash"][::each],
        np.add.reduceat(lengths, np.arange(0, len(store), each)),
        lambda sample: place(store, each * sample),
        store.notes,
    )
    part.numbers["tokens"] = int(lengths.sum())
    if "targets" in store and (learned := int(store["targets"].sum())):
        part.numbers["learned"] = learned
    return part


def of_images(images: Any, name: str) -> Part:
    looks = np.empty(len(images), images.files[0].looks.dtype)
    for source, files in enumerate(images.files):
        mine = images.index[:, 0] == source
        looks[mine] = files.looks[images.index[mine, 1]]
    sides = np.minimum(looks["width"], looks["height"])
    part = Part(name, looks["hash"], sides, images.where, unit="pixels at the shorter side")
    part.numbers["modes"] = dict(Counter(looks["mode"].tolist()))
    return part


def together(parts: Sequence[Part]) -> Part:
    """All parts as one."""
    starts = np.cumsum([0, *(len(part.hashes) for part in parts)])

    def where(sample: int) -> str:
        of = int(np.searchsorted(starts, sample, side="right")) - 1
        return parts[of].place(sample - int(starts[of]))

    hashes, lengths = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("hashes", "lengths")
    )
    notes = Notes()
    numbers: Counter[str] = Counter()
    for part in parts:
        notes.update(part.notes)
        numbers.update({k: v for k, v in part.numbers.items() if isinstance(v, int)})
    return Part("in all", hashes, lengths, where, notes, parts[0].unit, numbers=dict(numbers))


def split_of(data: Any) -> tuple[np.ndarray, Callable[[int], str]]:
    """(hashes of a split's samples, or of the documents that are in it whole; their places)."""
    if hasattr(data, "files"):
        return of_images(data, "").hashes, data.where
    if hasattr(data, "column"):
        return data.column("text_hash"), lambda sample: place(*data.find(sample))
    found, numbers = [], []
    for tokens in data.datasets:
        ends, spans = tokens.store["ends"], tokens.spans
        span = np.searchsorted(spans[:, 1], ends).clip(max=len(spans) - 1)
        inside = (ends <= spans[span, 1]) & (ends - tokens.store.lengths >= spans[span, 0])
        numbers.append(np.flatnonzero(inside))
        found.append(tokens.store["text_hash"][inside])
    documents = np.concatenate(numbers)
    return np.concatenate(found), lambda sample: f"document {documents[sample] + 1:,}"


def place(store: Any, sample: int) -> str:
    """Where a sample of a store is."""
    if "place_ends" in store:
        return str(store.line("place", sample))
    of_text = "record_ends" in store
    return store.line("record", sample)["where"] if of_text else f"document {sample + 1:,}"


def lines_of(part: Part) -> list[str]:
    """What is said of a part."""
    lines = [part.name]
    for name, value in part.numbers.items():
        if isinstance(value, dict):
            most = [f"{key} {count:,}" for key, count in [*value.items()][:10]]
            value = ", ".join(most) + ", ..." * (len(value) > 10)
        elif isinstance(value, int):
            value = f"{value:,}"
        lines.append(f"  {name:<18} {value}")
    for what, found in part.found.items():
        lines.append(f"  {what:<18} {found['count']:,} {found['text']} ({found['share']:.1%})")
        lines += [f"  {'':<18} {where}" for where in found["first"]]
    return lines


def refuse(limit: str, found: dict[str, Any]) -> None:
    """Raise ConfigError if there is more than `limit` says: a count, or a share."""
    asked = re.fullmatch(r"(\w+)(?:=(\d+\.?\d*)(%?))?", limit)
    if not asked or asked[1] not in SENTENCES:
        names = ", ".join(SENTENCES)
        raise ConfigError(f"--fail_on {limit}: write NAME, NAME=10 or NAME=5%, of {names}")
    one, value = found.get(asked[1]), float(asked[2] or 0)
    if one and (one["share"] > value / 100 if asked[3] else one["count"] > value):
        places = "; the first is " + one["first"][0] if one["first"] else ""
        raise ConfigError(f"--fail_on {limit}: {one['count']:,} {one['text']}{places}")
