"""Mixtures of sources: shares, the epochs of each source, and what each template makes of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.data.mixture import PERIOD, Mixture, turns
from shared.data.order import permute

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=7)


def mixture(sizes, weights, batch, seed=0) -> Mixture:
    sources = tuple((f"source {number}", size) for number, size in enumerate(sizes))
    return Mixture(sum(sizes), batch, seed, sources=sources, weights=tuple(weights))


@settings(deadline=None, max_examples=60)
@given(weights=WEIGHTS, data=st.data(), batch=st.integers(1, 17), seed=st.integers(0, 3))
def test_equals_a_table_of_the_whole_run(weights, data, batch, seed):
    """The reference goes through the run from its start: whose turn, then that source's next sample of its epoch."""
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=len(weights), max_size=len(weights)))
    order = mixture(sizes, weights, batch, seed)
    steps, total = 30, sum(weights)
    whose, _ = turns(tuple(weights))
    drawn, table = [0] * len(sizes), []
    for number in range(steps * batch):
        source = int(whose[number % len(whose)])
        epoch, place = divmod(drawn[source], sizes[source])
        within = permute(np.array([place]), sizes[source], (seed, epoch, source))[0]
        table.append((sum(sizes[:source]) + int(within), epoch))
        drawn[source] += 1
        for count, weight in zip(drawn, weights, strict=True):
            assert abs(count - weight / total * len(table)) < 1
    for step in np.random.default_rng(0).permutation(steps):  # any step, without those before
        keys = order.keys(int(step))
        assert sorted(map(tuple, keys.tolist())) == sorted(table[step * batch : (step + 1) * batch])
        assert order.indices(int(step)).tolist() == keys[:, 0].tolist()
    assert [count for _, count in order.used(steps).values()] == drawn


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1, 1), (0.5, *[0.01] * 50), (1e9, 1), (0.693584, 0.306416)])
def test_shares_hold_in_every_stretch(weights):
    whose, before = turns(weights)
    assert len(whose) <= PERIOD + len(weights)
    share = np.array(weights) / sum(weights)
    twice = np.concatenate([before, before[-1] + before[1:]])  # the turns are repeated
    number = np.arange(len(twice))[:, None]
    off = twice - number * before[-1] / len(whose)
    assert np.abs(off).max() < 1
    assert (off.max(0) - off.min(0)).max() < 2  # of any stretch
    assert np.abs(before[-1] / len(whose) - share).max() <= 1 / PERIOD
