"""Counts of what the data held, and where each was first seen."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import xxhash

from shared.process.printing import note

PLACES = 3  # that are kept of each
WARNINGS = {  # what an encoder notes: what is said about it, with the first place
    "lost": "turns have words that the chat template does not write or mark",
    "unlike": (
        "answers are learned after other tokens than the template's generation "
        'prompt gives at inference (another "chat_template_kwargs": {"enable_thinking": false} or '
        "true in the records may mend it)"
    ),
    "empty": "records have an empty answer, from which the model learns to say nothing",
    "joined": (
        "texts with a prompt are joined as they are, although the model has a chat template: "
        "messages would get it"
    ),
    "marked": "records mark a place for what is not text, and the mark is read as text",
    "special": "texts contain the string of a special token, which is read as that token",
    "long": "samples are longer than --seq_length, and left out: raise it",
    "bad": (
        "samples have an image that cannot be read, and are left out (after a repair, touch the "
        "data file)"
    ),
    "same": "pairs are dropped: their two answers are the same",
    "unequal": "pairs have prompts of different tokens before their two answers",
}


@dataclass
class Notes:
    """What was seen in data: how often, and for what is worth a look, in which places first."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, list[str]] = field(default_factory=dict)
    seen: set[tuple[str, str]] = field(default_factory=set, repr=False)
    bad: list[tuple[str, str]] = field(default_factory=list)  # records that are refused, and why

    def add(self, what: str, place: str = "") -> None:
        """Count it. With a place, only if it is new there: an encoder may look at a text twice."""
        if place:
            if (what, place) in self.seen:
                return
            self.seen.add((what, place))
            self.first[what] = [*self.first.get(what, ()), place][:PLACES]
        self.counts[what] += 1

    def add_cut(self, length: int, place: str) -> None:
        """Count a sample of so many tokens, which --seq_length cuts."""
        self.add("cut", place)
        self.add(f"length {length // 64 * 64 + 64}")  # few different ones

    def warn_of_cuts(self, source: str, samples: int) -> None:
        """Say if --seq_length cuts more than a tenth of the samples, and which one cuts none."""
        if (cut := self.counts["cut"]) > samples / 10:
            lost = self.counts["dropped"]
            note(
                f"warning: --seq_length cuts {cut:,} of the {samples:,} samples of {source}"
                + (f" and leaves {lost:,} without an answer" if lost else "")
                + f"; --seq_length {max(map(int, self.named('length ')))} cuts none"
            )

    def update(self, later: "Notes") -> None:
        self.counts.update(later.counts)
        for what, places in later.first.items():
            self.first[what] = [*self.first.get(what, ()), *places][:PLACES]

    def named(self, prefix: str) -> dict[str, int]:
        """The counts whose name begins with `prefix`, by the rest of the name."""
        return {
            what.removeprefix(prefix): count
            for what, count in self.counts.items()
            if what.startswith(prefix) and count
        }


def text_hash(value: Any) -> int:
    """63 bits of a text, or of something JSON-like, by which copies are found. ASCII's case and
    white space do not count.
    """

    def short(other: Any) -> str:  # an image's bytes
        return xxhash.xxh3_64_hexdigest(other) if isinstance(other, bytes) else str(other)

    text = json.dumps(value, ensure_ascii=False, default=short)
    for white in ("\\n", "\\r", "\\t"):
        text = text.replace(white, "")
    letters = text.encode(errors="surrogatepass").lower()
    return xxhash.xxh3_64_intdigest(letters.translate(None, b" ")) >> 1
