"""Mixtures: several sources of samples, each with its share.

The source of each sample of the run follows from its number alone, and so does the sample: no table
is stored, and a run resumes at any step on any number of processes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from shared.data.order import DRAWN_AT_ONCE, Order, permute

# samples after which the sources repeat their turns, at most; finer shares are rounded to it
PERIOD = 2**16


@lru_cache(maxsize=1)
def turns(weights: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Whose turn it is: a sequence that is repeated for the whole run, as long as the ratio of the
    weights asks for.

    After n samples each source has had its share of n, rounded up or down: of the sources that are
    not ahead of their share, the one whose next sample is due first takes its turn.

    Returns:
        ([period] the source of each turn, [period + 1, sources] turns of each source before it).
    """
    given = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(given) for weight in given]
    period = min(math.lcm(*(share.denominator for share in shares)), PERIOD)
    each = np.array([max(1, round(share * period)) for share in shares])
    period = int(each.sum())
    before = np.zeros((period + 1, len(each)), np.int64)
    for turn in range(period):
        had = before[turn]
        due = -(-(had + 1) * period // each)  # the turn by whose end the next sample is owed
        source = np.where(had * period < each * (turn + 1), due, period + 1).argmin()
        before[turn + 1] = had
        before[turn + 1, source] += 1
    return np.diff(before, axis=0).argmax(1), before


@dataclass(frozen=True)
class Mixture(Order):
    """Global batches of several sources. In each stretch of the run, each source has its share of
    the samples.

    A source begins anew when all of its samples were used: each source has epochs of its own. An
    epoch of the mixture has as many samples as all sources together. All batches are full.

    Args:
        sources: (name, samples) of each, in the order of the data set.
        weights: their shares, in any unit.
        lengths: [num_samples]; if given, each batch is sorted by them, for little padding.
    """

    sources: tuple[tuple[str, int], ...] = ()
    weights: tuple[float, ...] = ()
    lengths: np.ndarray | None = field(default=None, compare=False)

    @property
    def samples_per_epoch(self) -> int:
        return self.steps_per_epoch * self.global_batch_size

    def position(self, step: int) -> tuple[int, int]:
        return divmod(step * self.global_batch_size, self.samples_per_epoch)

    def indices(self, step: int) -> np.ndarray:
        return self.keys(step)[:, 0]

    def keys(self, step: int) -> np.ndarray:
        size = self.global_batch_size
        steps = math.ceil(DRAWN_AT_ONCE / size)
        first = step % steps * size
        keys = _drawn(self, step // steps * steps * size, steps * size)[first : first + size]
        if self.lengths is not None:
            return keys[np.argsort(-self.lengths[keys[:, 0]], kind="stable")]
        if not self.shuffle:
            return keys
        # else some rank might read one source only
        return keys[permute(np.arange(size), size, (self.seed, step))]

    def used(self, step: int) -> dict[str, tuple[int, int]]:
        _, before = turns(self.weights)
        rounds, rest = divmod(step * self.global_batch_size, len(before) - 1)
        counts = (rounds * before[-1] + before[rest]).tolist()
        return {
            name: (size, count) for (name, size), count in zip(self.sources, counts, strict=True)
        }

    def describe(self, steps: int) -> str:
        """One line: shares, and epochs of each source in a run of so many steps."""
        each = turns(self.weights)[1][-1]
        epochs = [drawn / size for size, drawn in self.used(steps).values()]
        parts = zip(each / each.sum(), self.sources, epochs, strict=True)
        return ", ".join(
            f"{share:.1%} {name} ({epochs:.2f} epochs)" for share, (name, _), epochs in parts
        )


def mixture_of(
    samples: Any, global_batch_size: int, seed: int, weights: Sequence[float], **options: Any
) -> Mixture:
    """The order of the sources of `samples`, see `order.Mixed`, with these weights."""
    sources = tuple(samples.sources.items())
    return Mixture(
        len(samples), global_batch_size, seed, sources=sources, weights=tuple(weights), **options
    )


@lru_cache(maxsize=2)
def _drawn(mixture: Mixture, start: int, count: int) -> np.ndarray:
    """(index, epoch of its source) of a stretch of the run's samples: [count, 2] int64."""
    turn_of, before = turns(mixture.weights)
    rounds, turn = np.divmod(np.arange(start, start + count), len(turn_of))
    keys = np.empty((count, 2), np.int64)
    offset = 0
    for source, (_, samples) in enumerate(mixture.sources):
        mine = np.flatnonzero(turn_of[turn] == source)
        drawn = rounds[mine] * before[-1, source] + before[turn[mine], source]
        epochs, places = np.divmod(drawn, samples)
        for epoch in np.unique(epochs).tolist():
            now = epochs == epoch
            chosen = places[now]
            if mixture.shuffle:
                chosen = permute(chosen, samples, (mixture.seed, epoch, source))
            keys[mine[now], 0] = offset + chosen
        keys[mine, 1] = epochs
        offset += samples
    keys.flags.writeable = False
    return keys
