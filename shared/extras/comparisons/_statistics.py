"""Differences with their intervals."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 9_999
LEVEL = 0.95
POWER = 0.8


@dataclass
class Paired:
    """The difference of a value between two runs, second minus first, over the same samples.

    Attributes:
        difference: of the means.
        low, high: its 95 % interval, by bootstrap over samples.
        wins, losses: samples on which the second run is better, and worse.
        needed: samples that would tell a difference of this size, four times out of five.
    """

    difference: float
    low: float
    high: float
    wins: int
    losses: int
    needed: int

    @property
    def is_known(self) -> bool:
        return self.low > 0 or self.high < 0


def paired(one: Any, other: Any, weights: Any, *, lower: bool) -> Paired:
    """Compare sums by sample, [samples], of which the value is the sum over the sum of `weights`.

    Args:
        lower: less is better.
    """
    from scipy.stats import bootstrap, norm

    differences = np.asarray(other, float) - np.asarray(one, float)
    weights = np.asarray(weights, float)
    better = differences < 0 if lower else differences > 0
    wins, losses = int(better.sum()), int((differences != 0).sum() - better.sum())
    difference = float(differences.sum() / weights.sum())
    if not differences.any() or len(differences) < 2:
        edge = 0.0 if not differences.any() else math.inf
        return Paired(difference, -edge, edge, wins, losses, 0)

    def ratio(d: Any, w: Any, axis: int = -1) -> Any:
        return d.sum(axis) / w.sum(axis)

    found = bootstrap(
        (differences, weights),
        ratio,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="BCa",
        rng=np.random.default_rng(0),
    )
    interval = found.confidence_interval
    z = float(norm.ppf(0.5 + LEVEL / 2) + norm.ppf(POWER))
    error = float(found.standard_error)
    needed = math.ceil(len(differences) * (z * error / difference) ** 2) if difference else 0
    return Paired(difference, float(interval.low), float(interval.high), wins, losses, needed)


def noise_of(values: Any) -> tuple[float, float, float]:
    """(mean, standard deviation over seeds, by how much two runs that differ only in their seed
    differ at most, 19 times out of 20).
    """
    from scipy.stats import t

    values = np.asarray(values, float)
    spread = float(values.std(ddof=1))
    return float(values.mean()), spread, float(t.ppf(0.975, len(values) - 1) * spread * 2**0.5)
