"""The order of samples is a function of (seed, epoch, step), whoever reads which slice of it."""

import hashlib
import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data._utils import signal_handling

from shared.data import order as orders
from shared.data.loader import Loader, Share, to_device
from shared.data.order import IGNORED, EvenSubset, Order, draws_kept, is_validation, micro_batches, permute, seed_all
from shared.extras.streaming.stream import InMemory
from shared.process.errors import CleanExit, ConfigError
from shared.run.checkpoint_files import CheckpointError
from tests.conftest import ROOT

CPU = torch.device("cpu")
KEYS = st.tuples(st.integers(0, 2**32), st.integers(0, 1000))


@pytest.fixture
def end_readers():
    """Ends the reading processes of a test whose exception keeps them: see the test of what they do to an exit."""
    yield
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


def test_permute_is_a_bijection_for_all_small_sizes_and_many_up_to_2000_and_never_changes():
    sizes = [*range(1, 300), *range(300, 1000, 11), *range(1020, 1030), *range(1030, 2001, 11), 2000]
    images = [permute(np.arange(size), size, (size, 7)) for size in sizes]
    for size, image in zip(sizes, images, strict=True):
        assert np.array_equal(np.sort(image), np.arange(size)), size
    # Written down, since a resumed run counts on it in every later version.
    assert hashlib.sha256(np.concatenate(images).astype("<i8").tobytes()).hexdigest()[:16] == "5f6549923f2a15f6"
    assert permute(np.arange(10), 10, (0, 0)).tolist() == [5, 7, 6, 3, 0, 4, 1, 9, 2, 8]
    assert permute(np.arange(3), 2**40 + 1, (3, 1)).tolist() == [923516021126, 746580753988, 991145269726]
    image = permute(np.arange(100_000), 100_000, (0, 0))
    assert hashlib.sha256(image.astype("<i8").tobytes()).hexdigest()[:16] == "2aaba3c05853b562"
    # which is no more ordered than chance
    assert (np.abs(np.diff(image)) <= 1).mean() < 1e-3 and abs(np.corrcoef(np.arange(100_000), image)[0, 1]) < 0.02


@settings(deadline=None, max_examples=100)
@given(data=st.data(), size=st.integers(1, 5000), key=KEYS)
def test_any_part_of_a_permutation_equals_that_part_of_the_whole(data, size, key):
    whole = permute(np.arange(size), size, key)
    index = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)), np.uint64)
    before = index.copy()
    assert np.array_equal(permute(index, size, key), whole[index])
    assert np.array_equal(index, before)


@pytest.mark.parametrize("size", [10**12, 2**40, 2**40 + 1, 2**62])
def test_a_huge_size_stays_in_range_and_does_not_collide(size):
    index = np.concatenate([np.arange(1000), np.arange(1000) + size - 1000])
    image = permute(index, size, (3, 1))
    assert image.dtype == np.int64
    assert image.min() >= 0 and image.max() < size
    assert len(set(image.tolist())) == 2000


# Global batches ------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 10), st.integers(0, 3), st.booleans(), st.booleans())
@example(10_000, 24, 1, 1, True, False)  # more than is drawn at once
def test_every_epoch_covers_every_sample_exactly_once(num_samples, size, seed, epoch, shuffle, drop_last):
    """But for those of a smaller last batch that is dropped, in the order of that epoch."""
    order = Order(num_samples, size, seed, shuffle=shuffle, drop_last=drop_last)
    whole, rest = divmod(num_samples, size)
    steps = [order.indices(epoch * order.steps_per_epoch + s) for s in range(order.steps_per_epoch)]
    assert [len(step) for step in steps] == [size] * whole + [rest] * (rest > 0 and not drop_last)
    expected = permute(np.arange(num_samples), num_samples, (seed, epoch)) if shuffle else np.arange(num_samples)
    assert [int(i) for step in steps for i in step] == expected[: order.samples_per_epoch].tolist()
    assert order.samples_per_epoch == num_samples - rest * drop_last


def test_seeds_and_epochs_give_different_orders():
    orders = {tuple(Order(50, 50, seed).indices(epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    with pytest.raises(ValueError, match="read-only"):  # others read it, too
        Order(50, 50, 0).indices(0)[0] = 1
    order = Order(10, 4, 0, drop_last=True)  # samples that are left out differ, too
    left_out = [set(range(10)) - {int(i) for s in (2 * e, 2 * e + 1) for i in order.indices(s)} for e in range(40)]
    assert {len(out) for out in left_out} == {2}
    assert set().union(*left_out) == set(range(10))


@settings(deadline=None, max_examples=100)
@given(num=st.integers(1, 70), world=st.integers(1, 6), per_device=st.integers(1, 6))
def test_over_all_ranks_each_index_is_computed_exactly_once(num, world, per_device):
    indices = np.random.default_rng(0).permutation(num)
    split = [micro_batches(indices, rank, world, per_device) for rank in range(world)]
    assert {part.shape for part in split} == {(math.ceil(num / (world * per_device)), per_device)}
    real = np.concatenate([part[part >= 0] for part in split])
    assert sorted(real.tolist()) == list(range(num))
    assert sum((part == -1).sum() for part in split) == split[0].size * world - num


# Loading -------------------------------------------------------------------------------------------------------------


@dataclass
class Numbers:
    """Sample i is the number i, three times, of which i % 4 are targets. Sample 5 may be an error."""

    count: int
    error: Exception | None = None
    read: list[int] = field(default_factory=list)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        assert 0 <= index < self.count
        if index == 5 and self.error:
            raise self.error
        self.read.append(index)
        labels = np.where(np.arange(3) < index % 4, index, IGNORED)
        return {"input_ids": np.full(3, index), "labels": labels}

    def num_targets(self, indices):
        return int((np.asarray(indices) % 4).sum())


def collate(rows):
    return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in ("input_ids", "labels")}


def loader(num=22, size=8, *, per_device=2, rank=0, world_size=1, num_workers=0):
    share = Share(rank, world_size, CPU)
    return Loader(Numbers(num), collate, Order(num, size, seed=5), share, per_device=per_device, num_workers=num_workers)


def plain(window):
    batches = [{key: value.tolist() for key, value in batch.items()} for batch in window.micro_batches]
    return batches, window.num_targets, window.num_samples


@pytest.mark.parametrize("num_workers", [0, 2])
def test_starting_at_a_later_step_gives_the_tail_of_the_same_windows(num_workers):
    """Micro-batches that nobody takes are skipped, and none comes twice."""
    whole = [plain(w) for w in loader().windows(0, 7)]
    assert len(whole) == 7
    for start in (0, 2, 3, 5, 7):
        assert [plain(w) for w in loader(num_workers=num_workers).windows(start, 7)] == whole[start:]
    assert [(w.epoch, w.epoch_samples) for w in loader().windows(1, 7)] == [(0, 22)] * 2 + [(1, 22)] * 3 + [(2, 22)]
    windows = loader(num_workers=num_workers).windows(0, 7)
    left = next(windows)
    next(iter(next(windows).micro_batches))
    third = next(windows)
    assert plain(third) == whole[2]
    for window in (left, third):
        with pytest.raises(RuntimeError, match=r"read once and not kept: use `step.batches`"):
            list(window.micro_batches)


def test_nothing_is_read_before_the_step_that_is_asked_for():
    subject = loader()
    window, read = next(subject.windows(4, 5)), subject.samples.read
    assert not read
    batches = iter(window.micro_batches)
    assert next(batches)["input_ids"][:, 0].tolist() == read  # and no micro-batch before it is asked for
    list(batches)
    assert sorted(read) == sorted(Order(22, 8, seed=5).indices(4).tolist())


@pytest.mark.parametrize(("world", "per_device"), [(1, 8), (1, 2), (2, 4), (2, 2), (4, 1), (8, 1)])
def test_over_all_ranks_a_window_holds_the_global_batch_once(world, per_device):
    ranks = [loader(per_device=per_device, rank=r, world_size=world).windows(0, 6) for r in range(world)]
    for step, windows in enumerate(zip(*ranks, strict=True)):
        read = [list(w.micro_batches) for w in windows]
        assert {len(batches) for batches in read} == {len(w.indices) for w in windows} and len(set(map(len, read))) == 1
        expected = Order(22, 8, seed=5).indices(step)
        batches = [batch for batches in read for batch in batches]
        labels = torch.cat([batch["labels"] for batch in batches])
        assert {w.num_targets for w in windows} == {int((labels != IGNORED).sum())}
        assert {w.num_samples for w in windows} == {len(expected)}
        seen = Counter(labels[labels != IGNORED].tolist())
        assert seen == Counter({int(i): int(i % 4) for i in expected if i % 4})


def test_a_row_that_fills_up_has_no_targets():
    assert torch.nn.CrossEntropyLoss().ignore_index == IGNORED
    rows = InMemory((n, {"input_ids": np.full(3, n), "labels": np.full(3, n)}) for n in range(5))
    order = Order(5, 4, 0, shuffle=False)
    subject = Loader(rows, default_collate, order, Share(0, 1, CPU), per_device=4)
    assert (subject.steps_per_epoch, subject.num_workers) == (2, 0)
    first, last = [list(window.micro_batches) for window in subject.windows(0, 2)]
    assert first[0]["labels"].tolist() == [[number] * 3 for number in range(4)]
    assert last[0]["labels"].tolist() == [[4] * 3, *[[IGNORED] * 3] * 3]


def test_readers_stay_for_all_passes_over_one_range():
    class Process(Numbers):
        def __getitem__(self, index):
            return {**super().__getitem__(index), "input_ids": np.full(3, os.getpid())}

    subject = loader(num=16, num_workers=1)
    subject.samples = Process(16)
    passes = [{int(b["input_ids"][0, 0]) for w in subject.windows(0, 2) for b in w.micro_batches} for _ in range(3)]
    assert passes[0] == passes[1] == passes[2] != {os.getpid()}
    assert len(passes[0]) == 1
    assert [plain(w) for w in subject.windows(0, 1)] != []
    assert list(subject._readers) == [(0, 1)]  # those of the range before are let go


def test_the_batch_that_takes_the_most_memory_has_the_longest_sample_and_no_count_of_targets():
    subject = loader()
    subject.collate = lambda rows: collate(rows) | {"targets": torch.zeros(1)}
    assert subject.longest(2)["input_ids"][:, 0].tolist() == [0, 0]  # all are as long
    subject.samples.lengths = np.array([3, 9, 1, 4])
    batch = subject.longest(3)
    assert batch["input_ids"][:, 0].tolist() == [1, 2, 2] and batch.keys() == {"input_ids", "labels"}


def test_a_batch_is_copied_to_a_gpu_while_it_computes_the_one_before(monkeypatch):
    """And the memory of the copy is not reused while the computation reads it."""
    gpu, seen = torch.device("cuda"), MagicMock()
    monkeypatch.setattr("shared.data.loader._copies", lambda device: seen.copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: seen.using)
    monkeypatch.setattr(torch.cuda, "stream", seen.stream)
    seen.tensor.to.return_value = seen.tensor
    assert to_device({"labels": seen.tensor}, gpu) == {"labels": seen.tensor}
    copied = [call.stream(seen.copies), call.stream().__enter__(), call.tensor.to(gpu, non_blocking=True)]
    copied += [call.stream().__exit__(None, None, None), call.using.wait_stream(seen.copies)]
    assert seen.mock_calls == [*copied, call.tensor.record_stream(seen.using)]
    subject = loader()
    assert not subject._reader(0, 1).pin_memory
    subject.share = Share(0, 1, torch.device("cuda"))
    assert subject._reader(0, 1).pin_memory


def test_an_evaluation_counts_the_targets_of_the_samples_that_it_uses():
    spread = EvenSubset(Numbers(22), 5)
    assert [int(spread[i]["input_ids"][0]) for i in range(len(spread))] == [0, 5, 10, 16, 21]
    assert spread.num_targets(np.array([1, 2])) == 5 % 4 + 10 % 4


# Transforms ----------------------------------------------------------------------------------------------------------


def draws():
    return torch.rand(1).item(), random.random(), np.random.rand()


def test_seeding_reaches_all_three_generators_and_depends_on_the_whole_key(monkeypatch):
    def draw(*key, **options):
        seed_all(*key, **options)
        return draws()

    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
    drawn = [draw(*key) for key in keys]
    assert all(len(set(values)) == len(keys) for values in zip(*drawn, strict=True))
    assert [draw(*key) for key in keys] == [draw(*key, devices=False) for key in keys] == drawn
    assert draw(0, 1)[1:] == (0.22569820684977038, 0.42649645071042297)  # in every later version
    seeds = []
    monkeypatch.setattr("shared.data.order._accelerator", lambda: SimpleNamespace(manual_seed=seeds.append))
    seed_all(1)
    seed_all(2, devices=False)
    assert len(seeds) == 1


def noisy(row):
    """A random transform: what it adds is drawn from each of the three generators."""
    return {**row, "noise": np.array(draws()), "index": np.array(row["input_ids"][0])}


def collate_noisy(rows):
    return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in ("labels", "noise", "index")}


def noisy_loader(order, rank=0, world_size=1, per_device=2, num_workers=0):
    options = {"per_device": per_device, "num_workers": num_workers}
    return Loader(Numbers(22), collate_noisy, order, Share(rank, world_size, CPU), transform=noisy, **options)


def noise_of(start, stop, *, world_size=1, seed=5, drop_last=False, **options):
    """{(step, sample): what was drawn} over all ranks; each sample is in a step once."""
    found, order = {}, Order(22, 8, seed, drop_last=drop_last)
    for rank in range(world_size):
        windows = noisy_loader(order, rank, world_size, **options).windows(start, stop)
        for step, window in zip(range(start, stop), windows, strict=True):
            for batch in window.micro_batches:
                for index, noise in zip(batch["index"].tolist(), batch["noise"].tolist(), strict=True):
                    known = found.setdefault((step, index), noise)
                    assert noise == known  # a row that fills up is sample 0's
    return {key: found[key] for key in found if key[1] in order.indices(key[0])}


def test_what_a_transform_draws_differs_between_samples_epochs_and_seeds(monkeypatch):
    monkeypatch.setattr("shared.data.order._accelerator", pytest.fail)  # augmentation leaves a GPU's generator alone
    found = noise_of(0, 6)  # two epochs of three steps
    assert len(found) == 44
    sample = int(Order(22, 8, 5).indices(4)[0])
    with draws_kept():
        seed_all(5, 1, sample, 1, devices=False)
        assert found[4, sample] == list(draws())
    for generator in range(3):
        assert len({noise[generator] for noise in found.values()}) == 44
    other = noise_of(0, 6, seed=6)
    assert not {tuple(noise) for noise in found.values()} & {tuple(noise) for noise in other.values()}


@pytest.mark.parametrize(("world_size", "per_device", "num_workers"), [(1, 8, 0), (2, 4, 0), (4, 1, 0), (2, 2, 2)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_what_a_transform_draws_does_not_depend_on_the_launch(world_size, per_device, num_workers, drop_last):
    """And not on the step of a resumption."""
    options = {"world_size": world_size, "per_device": per_device, "num_workers": num_workers}
    whole = noise_of(0, 6, drop_last=drop_last)
    for start in (0, 2, 5):
        part = noise_of(start, 6, drop_last=drop_last, **options)
        assert part == {key: noise for key, noise in whole.items() if key[0] >= start}


def test_draws_of_the_step_and_of_who_reads_do_not_disturb_each_other():
    """Micro-batches are read between the draws of the step: dropout must not depend on who reads them."""
    read, drawn = [], []
    for seed in (1, 2):
        seed_all(seed)
        batches = next(noisy_loader(Order(22, 8, 5)).windows(0, 1)).micro_batches
        read.append([(batch["noise"].tolist(), drawn.append(draws())) for batch in batches])
    assert read[0] == read[1] and len(drawn) == 8
    seed_all(1)
    assert [draws() for _ in range(4)] == drawn[:4] != drawn[4:]


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "error", [ConfigError("a.png: the file is empty"), CheckpointError("gone"), ZeroDivisionError("bug")]
)
def test_an_error_of_a_sample_or_a_transform_arrives_as_it_was_raised(num_workers, error, end_readers):
    order, options = Order(8, 2, 0, shuffle=False), {"per_device": 2, "num_workers": num_workers}
    windows = Loader(Numbers(8, error), collate, order, Share(0, 1, CPU), **options).windows(0, 4)
    assert [next(windows).num_samples for _ in range(2)] == [2, 2]
    fails = Loader(Numbers(8), collate, order, Share(0, 1, CPU), **options, transform=lambda _: Numbers(8, error)[5])
    for broken in (windows, fails.windows(0, 4)):
        with pytest.raises(type(error)) as raised:
            plain(next(broken))
        assert type(raised.value) is type(error)
        if isinstance(error, CleanExit):  # which a user can act on
            assert (str(raised.value), raised.value.exit_code) == (str(error), error.exit_code)


def test_a_transform_that_changes_what_is_counted_is_refused():
    """The loss of a step is divided by the targets that the samples say."""
    for changed, message in (
        ({"labels": np.full(3, IGNORED)}, r"sample \d+: the transform changed the number of targets from \d+ to 0: keep it"),
        ({"position_ids": np.array([0, 1, 0, 1, 3])}, r"sample \d+: the transform leaves gaps in position_ids"),
    ):
        subject = loader()
        subject.transform = lambda row, changed=changed: row | changed
        with pytest.raises(ConfigError, match=message):
            plain(next(subject.windows(0, 1)))
    subject = loader()
    subject.transform = lambda row: row | {"position_ids": np.array([0, 1, 2, 0, 1])}
    assert len(plain(next(subject.windows(0, 1)))[0]) == 4


ENDS = """
import gc
from tests.data.test_data import ConfigError, Numbers, loader, plain

def train():
    subject = loader(num=8, size=2, num_workers=1)
    subject.samples = Numbers(8, ConfigError("damaged"))
    try:
        [plain(window) for window in subject.windows(0, 4)]
    except ConfigError as error:
        kept = error  # a cycle: error, its traceback, this frame
        print(error, flush=True)

train()
gc.collect()
"""


@pytest.mark.slow
def test_a_program_that_caught_an_error_of_a_reading_process_can_end():
    process = subprocess.Popen([sys.executable, "-c", ENDS], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        output, _ = process.communicate(timeout=40)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()  # the reading process sees that and ends, within seconds
        pytest.fail("the program waits at its end for a reading process that nobody told to end")
    assert (output, process.returncode) == ("damaged\n", 0)


def test_a_stop_signal_does_not_end_a_reading_process_that_is_being_started(monkeypatch):
    original = signal_handling._set_worker_signal_handlers

    def start_and_be_signalled():
        original()  # PyTorch's handler, which ends a reading process
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(signal_handling, "_set_worker_signal_handlers", start_and_be_signalled)
    assert len([plain(window) for window in loader(num_workers=2).windows(0, 3)]) == 3


def test_the_validation_split_depends_on_the_number_alone_and_a_larger_one_contains_it():
    whole = is_validation(np.arange(50_000), 5.0)
    assert np.array_equal(is_validation(np.arange(1000, 2000), 5.0), whole[1000:2000])
    assert whole.mean() == pytest.approx(0.05, abs=0.005)
    assert not is_validation(np.arange(1000), 0.0).any()
    both = whole + 2 * is_validation(np.arange(50_000), 40.0, 0.3)  # the same documents in every later version
    assert hashlib.sha256(both.astype(np.uint8).tobytes()).hexdigest()[:16] == "fbd2d9d8c5ac32fa"
    assert both.mean() == pytest.approx(0.05 + 2 * 0.4 * 0.3, abs=0.01)
    assert [orders.near_share(share, 0.1) for share in (0.049, 0.05, 0.1, 0.2, 0.21)] == [False, True, True, True, False]
    assert (is_validation(np.arange(50_000), 10.0) | ~whole).all()
