"""Tags of words, and the spans that they mark.

B- or I- and a kind, such as B-PER, mark a span of words; a word outside of all has O. Data are read
in any of IOB1 (I- begins, B- only after a span of the same kind), IOB2 (B- begins), and BIOES or
BILOU (E- or L- ends, S- or U- is alone). Models learn IOB2.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

import numpy as np

from shared.data.labels import in_order

OUTSIDE = "O"
Span = tuple[int, int, str]  # the first word, the one after the last, the kind
_MARKED = re.compile(r"([BIELSU])-(.+)", re.DOTALL)


def as_iob2(tags: Iterable[str]) -> list[str]:
    """The tags of a text, in any form, as IOB2. Others stay as they are.

    An I- after O or another kind begins a span, as conlleval and seqeval have it.
    """
    written = []
    before = OUTSIDE
    for tag in tags:
        if found := _MARKED.fullmatch(tag):
            mark, kind = found.groups()
            goes_on = mark in "IEL" and before[0] in "BI" and before[2:] == kind
            written.append(f"{'I' if goes_on else 'B'}-{kind}")
        else:
            written.append(tag)
        before = tag
    return written


def marks_spans(tags: Collection[str]) -> bool:
    """Whether all these tags but O begin with what marks spans."""
    return all(map(_MARKED.fullmatch, {*tags} - {OUTSIDE}))


def classes_of(tags: Collection[str]) -> tuple[str, ...]:
    """The classes of a model for these tags: O first, and both B- and I- of each kind."""
    names = {*tags} - {OUTSIDE}
    if not marks_spans(tags):
        return (*[OUTSIDE] * (OUTSIDE in tags), *in_order(names))
    kinds = in_order({name[2:] for name in names})
    return (OUTSIDE, *(f"{mark}-{kind}" for kind in kinds for mark in "BI"))


@lru_cache
def inside_of(classes: tuple[str, ...]) -> np.ndarray:
    """The class of a word's tokens after its first, by the class of the word: I- for B-."""
    marked = marks_spans(classes)
    names = ("I" + name[1:] if marked and name[0] == "B" else name for name in classes)
    return np.array([*map(classes.index, names)])


def spans_of(tags: Sequence[str], *, marked: bool) -> set[Span]:
    """The spans of a text. Of tags that mark none, each word but those with O is one."""
    if not marked:
        return {(n, n + 1, tag) for n, tag in enumerate(tags) if tag != OUTSIDE}
    spans: list[Span] = []
    for n, tag in enumerate(as_iob2(tags)):
        if tag[0] == "B":
            spans.append((n, n + 1, tag[2:]))
        elif tag != OUTSIDE:
            first, _, kind = spans.pop()
            spans.append((first, n + 1, kind))
    return {*spans}
