"""A second set of weights follows, and is swapped in and out."""

from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from shared.extras.averages import MovingAverage
from shared.models.weights import WeightCopy, average_buffers, evaluation_weights, gather_weights, persistent_buffers
from shared.run.setup import Setup
from shared.run.state import TrainState
from shared.run.tensors import saved_tensors
from tests.run.test_checkpoint import make


class Subject(nn.Module):
    """Trained, frozen and tied weights, buffers of numbers and of integers, and one that is no part of the state."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("seen", torch.tensor([1, 2]))
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.seen += 1
        return self.frozen(self.layers(x))


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture
def model(accelerator):
    torch.manual_seed(0)
    return accelerator.prepare(Subject())


TRAINED = {f"layers.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias")}
BUFFERS = {"layers.1.running_mean", "layers.1.running_var", "layers.1.num_batches_tracked", "seen"}


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


@torch.no_grad()
def change(model, step):
    """What an optimizer step does: other weights, other statistics."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += torch.randn(parameter.shape, generator=generator)
    model(torch.randn(8, 4, generator=generator))


def test_gathered_weights_are_copies_of_all_or_of_the_trained_and_a_copy_holds_these_and_the_buffers(accelerator, model):
    weights, copy = gather_weights(accelerator, model), WeightCopy(accelerator, model)
    assert copy.copies.keys() == TRAINED | BUFFERS and copy.buffers.keys() == BUFFERS
    assert all(copy.buffers[name] is copy.copies[name] for name in BUFFERS)
    before = state(model)
    assert_equal(weights, before)
    change(model, 0)
    assert_equal(weights, before)  # what is gathered stays
    assert_equal(copy.copies, {name: before[name] for name in copy.copies})
    trained = gather_weights(accelerator, model, trainable_only=True, dtype=torch.bfloat16)
    assert trained.keys() == TRAINED | BUFFERS
    assert trained["seen"].dtype == torch.int64
    assert {value.dtype for name, value in trained.items() if name in TRAINED} == {torch.bfloat16}


@pytest.mark.parametrize("decays", [[0.1, 0.5, 0.75, 0.99, 0.999], [1.0]])
def test_the_average_is_that_of_a_loop(accelerator, model, decays):
    copy = MovingAverage(accelerator, model, 1.0)
    expected = {name: value.double() for name, value in copy.copies.items()}
    for step, decay in enumerate(decays):
        change(model, step)
        now = state(model)
        copy.average_in(decay)
        for name in expected:
            whole = not now[name].is_floating_point()
            expected[name] = now[name] if whole else decay * expected[name] + (1 - decay) * now[name].double()
    for name, value in copy.copies.items():
        assert value.dtype == now[name].dtype
        torch.testing.assert_close(value.double(), expected[name].double(), atol=1e-6, rtol=1e-6)
    assert copy.copies["seen"].tolist() == [1 + len(decays), 2 + len(decays)]
    assert copy.copies["layers.1.num_batches_tracked"] == len(decays)
    assert_equal(state(model), now)  # the model is not touched


@pytest.mark.parametrize("fails", [False, True])
def test_swapped_in_weights_are_those_of_the_copy_until_the_block_ends(accelerator, model, fails):
    copy = WeightCopy(accelerator, model)
    old = state(model)
    change(model, 0)
    new = state(model)
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    x = torch.randn(3, 4)
    model.eval()
    for _ in range(2):
        with suppress(InterruptedError), evaluation_weights(accelerator, model, copy):
            assert_equal(state(model), old)
            assert_equal(copy.copies, {name: new[name] for name in copy.copies})
            if fails:
                raise InterruptedError
        assert_equal(state(model), new)
        assert_equal(copy.copies, {name: old[name] for name in copy.copies})
    assert places == {name: p.data_ptr() for name, p in model.named_parameters()}  # an optimizer still knows them
    model(x)


def test_averaged_buffers_are_the_mean_over_ranks_and_integers_stay(model):
    """Over two ranks, of which the other's buffers are all 3."""

    def reduce(value, how):
        assert how == "mean"
        return (value + 3) / 2

    change(model, 0)
    copy = persistent_buffers(model)
    before = state(model)
    average_buffers(SimpleNamespace(num_processes=2, reduce=reduce), {"a": copy["seen"]} | copy)
    for name in ("layers.1.running_mean", "layers.1.running_var"):
        torch.testing.assert_close(model.state_dict()[name], (before[name] + 3) / 2)
    assert model.seen.tolist() == before["seen"].tolist()


def test_tensors_that_are_kept_in_two_calls_are_all_saved_and_loaded(tmp_path):

    _, _, saver = make(tmp_path / "run")
    first, second = torch.ones(2), torch.arange(3.0)
    own = SimpleNamespace(strategy=saver.strategy, kept=saver.kept, _extra={}, _started=False)
    Setup.keep(own, "seen", {"a": first})
    Setup.keep(own, "seen", {"b": second})
    saver.save(TrainState(step=1))
    names = saved_tensors(saver.run_dir / "checkpoint-000001")
    assert {name for name in names if "extra" in name} == {"extra.seen.a", "extra.seen.b"}
    first.zero_(), second.zero_()
    saver.resume()
    assert first.tolist() == [1, 1] and second.tolist() == [0, 1, 2]


def test_what_a_model_always_keeps_in_fp32_is_written_so(accelerator, model):
    """A router's bias in bf16 chooses other experts."""
    model._keep_in_fp32_modules_strict = ["layers.1.*_mean", "2.weight"]
    written = gather_weights(accelerator, model, dtype=torch.bfloat16)
    in_fp32 = {name for name, value in written.items() if value.dtype == torch.float32}
    assert in_fp32 == {"layers.1.running_mean", "layers.2.weight"} and written["layers.0.weight"].dtype == torch.bfloat16
