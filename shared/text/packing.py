"""Several conversations in one row, and batches of rows."""

import sys
from bisect import bisect_left, insort
from functools import cached_property
from typing import Any

import numpy as np
import torch

from shared.data.loader import cu_seqlens_of
from shared.data.order import IGNORED, Batch, Row


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Bins of indices whose lengths sum to at most `capacity`: longest first, each into the fullest
    bin with room.

    Deterministic. O(n log capacity). Raises ValueError for a length above the capacity.
    """
    if len(lengths) and lengths.max() > capacity:
        raise ValueError(f"length {lengths.max()} is above the capacity {capacity}")
    bins: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # room left -> bins
    rooms: list[int] = []  # its keys, sorted
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            number = len(bins)
            room = capacity
            bins.append([])
        else:
            room = rooms[place]
            number = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        bins[number].append(index)
        left = room - length
        if left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        with_room[left].append(number)
    return bins


def joined(rows: list[Row]) -> Row:
    """Several rows as one, with `position_ids` that restart at each."""
    whole = {key: np.concatenate([row[key] for row in rows]) for key in rows[0] if key != "images"}
    positions = np.concatenate([np.arange(len(row["labels"])) for row in rows])
    return whole | {"position_ids": positions}


class Packed:
    """Rows of several conversations each, of a `chat.Conversations`: `order.Samples` with
    `position_ids` that restart at each.

    The sources of a mixture do not share rows. `sources` has the rows of each.
    """

    def __init__(self, samples: Any, capacity: int) -> None:
        self.samples = samples
        self.capacity = capacity
        self.sources: dict[str, int] = {}
        rows: list[np.ndarray] = []
        start = 0
        for name, size in getattr(samples, "sources", {"": len(samples.lengths)}).items():
            packed = best_fit_decreasing(samples.lengths[start : start + size], capacity)
            rows += [start + np.array(row) for row in packed]
            self.sources[name] = len(packed)
            start += size
        self._samples = np.concatenate(rows)
        self._ends = np.cumsum([len(row) for row in rows])

    def __len__(self) -> int:
        return len(self._ends)

    def bin(self, index: int) -> np.ndarray:
        """The samples of a row: [samples] int64."""
        return self._samples[self._ends[index - 1] if index else 0 : self._ends[index]]

    @cached_property
    def lengths(self) -> np.ndarray:
        """[rows] fp64. Rows of equal length are ordered by their number of conversations, in the
        fraction: from several of them, the model builds a mask, which takes memory.
        """
        starts = np.append(0, self._ends[:-1])
        return (
            np.add.reduceat(self.samples.lengths[self._samples], starts)
            + 1
            - 1 / np.diff(self._ends, prepend=0)
        )

    def __getitem__(self, index: int) -> Row:
        return joined([self.samples[int(i)] for i in self.bin(index)])

    def num_targets(self, indices: np.ndarray) -> int:
        return self.samples.num_targets(np.concatenate([self.bin(int(index)) for index in indices]))

    @property
    def waste(self) -> float:
        """Empty share of the rows' capacity."""
        return 1 - float(self.samples.lengths.sum()) / (len(self) * self.capacity)


def collate_packed(
    rows: list[Row], *, multiple_of: int = 1, at_most: int | None = None, longest: int = sys.maxsize
) -> Batch:
    """Packed rows -> {"input_ids", "labels", "position_ids"}: [batch, longest row] int64; also
    `targets`, `cu_seqlens` and `filled`, see `loss.causal_lm_loss`. If no position restarts,
    `position_ids` are left out.

    Padding comes after a row's last document and has no targets. There is no attention mask, since
    models separate documents by restarting positions only if they get none.

    Args:
        rows: of a `Packed`.
        multiple_of: pad rows to a multiple of this, since kernels are chosen, and compiled, for
            each length.
        at_most: but not beyond this length; no row is longer.
        longest: of a document. Positions of padding restart after as many: a model may have no
            more.
    """
    batch = collate_padded(rows, multiple_of=multiple_of, at_most=at_most)
    position_ids = np.zeros(batch["labels"].shape, np.int64)
    for i, row in enumerate(rows):
        own = row["position_ids"]
        missing = position_ids.shape[1] - len(own)
        position_ids[i] = np.append(own, (own[-1] + 1 + np.arange(missing)) % longest)
    if not position_ids[:, 1:].all():
        batch["position_ids"] = torch.from_numpy(position_ids)
        batch["cu_seqlens"] = torch.from_numpy(cu_seqlens_of(position_ids))
    return batch


def collate_padded(rows: list[Row], *, multiple_of: int = 1, at_most: int | None = None) -> Batch:
    """One conversation a row -> {"input_ids", "labels"}: [batch, longest row] int64; also
    `targets`, the places of the labels that count: looking for them on a device would wait for it;
    and `filled`, [batch], the tokens of each row without padding.

    There is no attention mask: a causal model never sees the padding, which comes last and has no
    targets. Padding is not recognised by a token's id, so the loss counts a real end-of-text token.
    For the arguments see `collate_packed`.
    """
    longest = max(len(row["labels"]) for row in rows)
    longest = min(longest + -longest % multiple_of, at_most or sys.maxsize)
    batch = {
        "input_ids": np.zeros((len(rows), longest), np.int64),
        "labels": np.full((len(rows), longest), IGNORED),
    }
    for i, row in enumerate(rows):
        for key, values in batch.items():
            values[i, : len(row[key])] = row[key]
    counts = {
        "targets": np.flatnonzero(batch["labels"] != IGNORED),
        "filled": np.array([len(row["labels"]) for row in rows]),
    }
    return {key: torch.from_numpy(value) for key, value in (batch | counts).items()}
