"""Mixtures of sources: shares, the epochs of each source, and what each template makes of them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from shared.data.loader import Loader, Share
from shared.data.order import Mixed, permute, training_order
from shared.extras.mixture import PERIOD, Mixture, turns
from shared.text import chat, corpus, labelled
from shared.text.options import ChatConfig, CorpusConfig, LabelledTextConfig
from shared.text.packing import Packed, best_fit_decreasing
from tests.conftest import write_lines

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=7)


def mixture(sizes, weights, batch, seed=0, lengths=None) -> Mixture:
    sources = tuple((f"source {number}", size) for number, size in enumerate(sizes))
    return Mixture(sum(sizes), batch, seed, sources=sources, weights=tuple(weights), lengths=lengths)


@settings(deadline=None, max_examples=15)
@given(weights=WEIGHTS, data=st.data(), batch=st.integers(1, 17), seed=st.integers(0, 3))
def test_equals_a_table_of_the_whole_run(weights, data, batch, seed):
    """The reference goes through the run from its start: whose turn, then that source's next sample of its epoch."""
    sizes = data.draw(st.lists(st.integers(5, 60), min_size=len(weights), max_size=len(weights)))
    order = mixture(sizes, weights, batch, seed)
    steps, total = 20, sum(weights)
    whose, _ = turns(tuple(weights))
    drawn, table, shuffled = [0] * len(sizes), [], {}
    for number in range(steps * batch):
        source = int(whose[number % len(whose)])
        epoch, place = divmod(drawn[source], size := sizes[source])
        if place == 0:
            shuffled[source] = permute(np.arange(size), size, (seed, epoch, source)).tolist()
        table.append((sum(sizes[:source]) + shuffled[source][place], epoch))
        drawn[source] += 1
        for count, weight in zip(drawn, weights, strict=True):
            assert abs(count - weight / total * len(table)) < 1
    for step in np.random.default_rng(0).permutation(steps):  # any step, without those before
        keys = order.keys(int(step))
        assert sorted(map(tuple, keys.tolist())) == sorted(table[step * batch : (step + 1) * batch])
        assert order.indices(int(step)).tolist() == keys[:, 0].tolist()
    assert [count for _, count in order.used(steps).values()] == drawn


def test_rows_that_are_padded_are_sorted_within_their_batch():
    lengths = np.random.default_rng(0).integers(1, 100, 70)
    plain, grouped = (mixture((20, 50), (1, 1), 8, lengths=given) for given in (None, lengths))
    for step in range(20):
        assert sorted(grouped.indices(step)) == sorted(plain.indices(step))
        assert (np.diff(lengths[grouped.indices(step)]) <= 0).all()


def test_a_packed_row_is_of_one_source():
    samples = SimpleNamespace(sources={"a": 30, "b": 50}, num_targets=len)
    samples.lengths = np.random.default_rng(0).integers(1, 40, 80)
    packed = Packed(samples, 64)
    bins = [packed.bin(number).tolist() for number in range(len(packed))]
    assert sorted(index for row in bins for index in row) == list(range(80))
    alone = [best_fit_decreasing(part, 64) for part in (samples.lengths[:30], samples.lengths[30:])]
    assert bins == alone[0] + [[30 + index for index in row] for row in alone[1]]
    again = Packed(samples, 64)  # from the files
    assert [again.bin(number).tolist() for number in range(len(again))] == bins and again.sources == packed.sources
    assert packed.lengths.tolist() == [samples.lengths[row].sum() + 1 - 1 / len(row) for row in bins]
    assert packed.sources == {"a": len(alone[0]), "b": len(alone[1])}


class Numbers:
    """Rows that hold the number of their source and their own."""

    def __init__(self, source, size):
        self.source, self.size = source, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"labels": np.array([self.source, index])}

    def num_targets(self, indices):
        return len(indices) * (self.source + 1)


def test_a_loader_reads_the_same_from_any_step_on_any_number_of_processes():
    samples = Mixed({"a": Numbers(0, 5), "b": Numbers(1, 33)})
    order = training_order(samples, SimpleNamespace(size=8, seed=0), SimpleNamespace(order=None, mix_weights=(3, 1)))

    def draw(row):
        return {**row, "draw": torch.rand(1)}

    def rows(start, stop, rank=0, world=1, workers=0):
        share = Share(rank, world, torch.device("cpu"))
        loader = Loader(samples, default_collate, order, share, per_device=2, num_workers=workers, transform=draw)
        for window in loader.windows(start, stop):
            batches = list(window.micro_batches)
            found = torch.cat([torch.cat([batch["labels"].double(), batch["draw"].double()], 1) for batch in batches])
            yield window, sorted(map(tuple, found.tolist()))

    whole = [seen for _, seen in rows(0, 12)]
    for step, (window, seen) in enumerate(rows(0, 12)):
        assert [source for source, _, _ in seen] == [0] * 6 + [1] * 2 and window.num_targets == 6 + 2 * 2
        assert window.sources == {"a": (5, 6 * (step + 1)), "b": (33, 2 * (step + 1))}
    again = [seen for _, seen in rows(7, 12, workers=1)]
    halves = [list(rows(7, 12, rank, 2)) for rank in (0, 1)]
    assert again == whole[7:] == [sorted(a + b) for (_, a), (_, b) in zip(*halves, strict=True)]
    drawn = [row for seen in whole for row in seen if row[0] == 0]
    assert len({index for _, index, _ in drawn}) == 5
    assert len(set(drawn)) == len(drawn) == 72  # augmented anew each time, also within an epoch of the mixture
    both = [{source for source, *_ in seen} for _, seen in halves[0]]
    assert {0.0, 1.0} in both  # no rank reads one source alone


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


@pytest.mark.parametrize("kind", ["chat", "labelled", "corpus"])
def test_each_source_of_a_mixture_is_validated_on_its_own_split(kind, tokenizer, tmp_path, own_cache):
    """One that is named for all, --validation_split_name, is another in each data set."""
    words = {"a": "the model reads", "b": "a line of text"}
    for name, text in words.items():
        (tmp_path / name).mkdir()
        for split, count in (("train", 12), ("validation", 3)):
            rows = [{"text": f"{text} {number} " * 9, "label": number % 2} for number in range(count)]
            write_lines(tmp_path / name / f"{split}.jsonl", rows)
    named = {"dataset_name": tuple(str(tmp_path / name) for name in words), "mix_weights": (1.0, 1.0)}
    named |= {"validation_split_name": "validation", "preprocessing_num_workers": 1}
    if kind == "chat":
        _, validation = chat.open_samples(ChatConfig(**named, allow_unused_columns=("label",)), tokenizer)
    elif kind == "labelled":
        validation = labelled.open_texts(LabelledTextConfig(**named), tokenizer).validation
    else:
        validation = corpus.open_corpus(CorpusConfig(**named), tokenizer, 16).validation
    texts = [tokenizer.decode(validation[number]["input_ids"]) for number in range(len(validation))]
    assert all(any(text in found for found in texts) for text in words.values())
    assert len(texts) == 6 or kind == "corpus"
