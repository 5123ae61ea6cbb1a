"""A step is that of a plain loop, and a step that waits for nothing (faults and signals: tests/promises/test_faults.py)."""

import contextlib
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from shared.config.options import OptimConfig
from shared.data.loader import MicroBatches, Window
from shared.extras.rehearsal import find_batch_size
from shared.parallel.strategy import Strategy
from shared.run import guard, launch
from shared.run import run as runs
from shared.run.guard import Guard
from shared.run.rehearsal import Rehearsal
from shared.run.state import TrainState
from shared.training import optim
from shared.training import step as steps
from shared.training.step import Step
from tests.conftest import learn_here, run_here

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")


def step_of(model, batches, targets=5, verdict=None, accelerator=None):
    indices = np.arange(2 * len(batches)).reshape(-1, 2)
    window = Window(MicroBatches(iter(batches)), targets, 4, epoch=0, epoch_samples=4, indices=indices)
    strategy = Strategy(accelerator or launch.start(0))
    return Step(strategy, [model], window, number=1, rate=0.1, verdict=verdict or (lambda *_: torch.tensor(True)))


def test_a_step_is_that_of_a_plain_loop(monkeypatch):
    """On one of three processes that read different data, whose mean is taken."""
    accelerator, model = launch.start(0), nn.Linear(2, 1)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(steps, "time", SimpleNamespace(perf_counter=itertools.count().__next__))  # a second a look
    batches = [{"x": torch.randn(2, 2), "labels": torch.zeros(2, 3, dtype=torch.long)} for _ in range(2)]
    seen, is_last, finite = [], [], [torch.tensor(True), torch.tensor(False), torch.tensor(True)]

    def verdict(*seen_by_it):
        seen.append(seen_by_it)
        return finite[len(seen) - 1]

    step, losses = step_of(model, batches, 5, verdict, accelerator), []
    assert (step.grad_norm, step.finite, step.scale) == (None, None, 3 / 5)
    for batch in step.micro_batches():
        is_last.append(accelerator.sync_gradients)
        losses.append(model(batch["x"]).sum())
        step.backward(losses[-1])
        step.log(twice=2 * losses[-1])
    step.log_means(reward=1.0)
    step.log_means(reward=2.0, length=3.0)
    assert is_last == [False, True] and step.means == {"reward": 2.0, "length": 3.0}
    assert step.sums == {"loss": losses, "twice": [2 * loss for loss in losses]}
    assert (step.positions, step.waited) == (12, 2)
    gradient = sum(batch["x"].sum(0) for batch in batches) * 3 / 5
    torch.testing.assert_close(model.weight.grad[0], gradient)
    norm = (gradient.square().sum() + (4 * 3 / 5) ** 2).sqrt()
    torch.testing.assert_close(step.clip_gradients(0.5), norm)
    torch.testing.assert_close(model.weight.grad[0], gradient * 0.5 / norm)
    before, optimizer = model.weight.detach().clone(), torch.optim.SGD(model.parameters(), lr=1.0)
    step.update([optimizer])
    torch.testing.assert_close(before - model.weight.detach(), (gradient * 0.5 / norm)[None])
    torch.testing.assert_close(seen[0], (losses, norm, [[0, 1], [2, 3]]))
    assert step.finite is finite[0]
    for moves in (False, True):  # once more, not clipped
        model(batches[0]["x"]).sum().backward()
        before = model.weight.detach().clone()
        step.update([optimizer])
        torch.testing.assert_close(before - model.weight.detach(), batches[0]["x"].sum(0)[None] * moves)
        assert seen[-1][1] == step.grad_norm > 1 and not step.finite
    assert step_of(model, batches, 0, accelerator=accelerator).scale == 3  # no target


def test_micro_batches_are_counted_by_their_targets_and_can_be_kept_or_replaced():
    """A number, or a yes or no for each class, is one target a row."""
    model, classes = nn.Linear(2, 1), torch.zeros(2, 3, dtype=torch.long)
    batches = [{"labels": classes}, {"labels": classes.float()}, {"labels": classes, "row_labels": classes[:, 0]}]
    step = step_of(model, batches)
    assert step.batches == batches == step.batches == list(step.micro_batches()) and step.positions == 6 + 2 + 2
    step = step_of(model, batches)
    step.use(batches[:1] * 2, 7, [[4], [5]])
    assert (step.positions, step.num_targets, step.indices) == (12, 7, [[4], [5]])
    assert [batch is batches[0] for batch in step.micro_batches()] == [True, True]
    assert step.strategy.accelerator.sync_gradients


def test_gradients_are_reduced_in_the_last_micro_batch_alone(monkeypatch):
    class Sharded(nn.Linear):
        def set_requires_all_reduce(self, value):
            reduced.append((self, value))

    reduced, accelerator = [], launch.start(0)
    plain, sharded = nn.Linear(1, 1), Sharded(1, 1)
    monkeypatch.setattr(steps, "FSDPModule", Sharded)
    monkeypatch.setattr(accelerator, "no_sync", lambda model: reduced.append((model, False)) or contextlib.nullcontext())
    for last in (False, True):
        with steps.reduced(accelerator, [plain, sharded], last=last):
            assert accelerator.sync_gradients is last
    assert reduced == [(plain, False), (sharded, False), (sharded, True)]


@pytest.mark.parametrize(("scale", "counts"), [(None, True), (0.5, True), (2.0, False)])
def test_an_infinite_gradient_counts_unless_the_scale_of_fp16_can_still_fall(scale, counts, monkeypatch):
    accelerator = launch.start(0)
    monkeypatch.setattr(guard.signal, "signal", lambda *_: None)
    if scale is not None:
        monkeypatch.setattr(accelerator, "scaler", torch.amp.GradScaler("cpu", init_scale=scale))
        accelerator.scaler.scale(torch.tensor(1.0))  # which makes its scale
    made = Guard(Strategy(accelerator), [nn.Linear(1, 1)], TrainState(), max_skipped=1)
    assert made.finite([torch.tensor(1.0)], torch.tensor(torch.inf), np.zeros((1, 1), np.int64)) == (not counts)


def test_skipped_updates_are_read_every_100_steps(monkeypatch, capsys):
    monkeypatch.setattr(guard.signal, "signal", lambda *_: None)
    state = TrainState()
    made = Guard(Strategy(launch.start(0)), [nn.Linear(1, 1)], state, max_skipped=2)
    read = []

    def train(steps, bad=()):
        for _ in range(steps):
            state.step += 1
            loss = torch.tensor(torch.nan if state.step in bad else 1.0)
            made.finite([loss, loss], torch.tensor(1.0), np.array([[7], [-1]]))
            made.stop_if_asked()
            if not made.unread:
                read.append(state.step)

    train(250, bad=(101, 150))
    assert read == [100, 200] and state.skipped == 2
    assert "warning: step 150: loss or gradient is not finite (gradient norm 1; samples of rank 0" in capsys.readouterr().err
    train(2, bad=(252,))
    with pytest.raises(guard.NonFiniteError, match=r"step 252: .* No weight was changed, and 2 steps had been skipped"):
        made.count_skipped()


def test_looking_for_a_size_leaves_running_statistics_as_they_are():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loader = SimpleNamespace(per_device=4, multiple=1, longest=lambda rows: {"inputs": torch.randn(rows, 8)})
    (optimizer,) = optimizers = optim.build(model, OptimConfig(learning_rate=3e-4))
    accelerator = launch.start(0)
    rehearsal = Rehearsal(Strategy(accelerator), [model], optimizers, loader, lambda b: model(b["inputs"]).sum())
    assert find_batch_size(rehearsal) == 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state


@pytest.mark.parametrize("template", ["pretrain", "lora_finetune", "image_classification"])
def test_nothing_in_a_step_waits_for_the_device(
    template, monkeypatch, tmp_path, text_file, chat_file, image_folder, tiny_model
):
    """From the seeds to the stop signal no value is read, but with a log line. Another process reads data."""
    given = {
        "pretrain": ("--model_name_or_path", tiny_model, "--train_file", text_file, "--seq_length", 16, "--eval_samples", 4),
        "lora_finetune": ("--model_name_or_path", tiny_model, "--train_file", chat_file, "--seq_length", 64, "--packing"),
        "image_classification": ("--train_dir", image_folder, "--image_size", 16),
    }[template] + (("--show_answers", 0) if template == "lora_finetune" else ())
    inside, found = [False], []

    def watched(original):
        def read(tensor, *args, **kwargs):
            frame = sys._getframe(1)
            if inside[0]:
                found.append(f"{original.__name__}: {frame.f_code.co_filename}:{frame.f_lineno}")
            return original(tensor, *args, **kwargs)

        return read

    def switching(function, on):
        def call(*args, **kwargs):
            inside[0] = on
            return function(*args, **kwargs)

        return call

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, watched(getattr(torch.Tensor, name)))
    monkeypatch.setattr(runs, "seed_all", switching(runs.seed_all, True))
    monkeypatch.setattr(Guard, "stop_if_asked", switching(Guard.stop_if_asked, False))
    rows = ("--global_batch_size", 8, "--per_device_train_batch_size", 4, "--dataloader_num_workers", 1)
    never = ("--max_steps", 4, "--logging_steps", 100, "--eval_steps", 100, "--save_steps", 100)
    run_here(template, *rows, *never, *given, "--output_dir", tmp_path / "run")
    logged = [line for line in found if "shared/run/metrics.py" in line]
    skips = [line for line in found if "shared/run/guard.py" in line]
    assert logged and len(skips) == 2  # the first and the last step are, so that the watch is seen to work
    assert sorted(found) == sorted(logged + skips)


def test_a_logged_loss_is_the_mean_of_the_steps_since_the_last(tmp_path, text_file, tiny_model):
    given = ("--train_file", text_file, "--model_name_or_path", tiny_model, "--seq_length", 16, "--global_batch_size", 8)
    given += ("--max_steps", 6, "--eval_steps", 100, "--save_steps", 100)
    first, *rest = learn_here("pretrain", tmp_path / "each", *given).losses.values()
    once = learn_here("pretrain", tmp_path / "once", *given, "--logging_steps", 6)
    assert once.losses == {1: first, 6: pytest.approx(sum(rest) / 5, rel=1e-6)}  # the first step has a line of its own
