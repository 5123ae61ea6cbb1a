"""What is logged is what happened (curves: tests/evaluation; the profile: test_profiling.py)."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shared.config.options import EvaluationConfig, LogConfig
from shared.data.order import IGNORED
from shared.models.counts import PEAK_FLOPS
from shared.parallel.strategy import Strategy
from shared.process.errors import ConfigError
from shared.run import metrics
from shared.run.state import TrainState
from shared.run.tracking import Tracker
from shared.training import step
from shared.training.step import Step

CONFIG = SimpleNamespace(log=LogConfig(report_to="none", logging_steps=2), evaluation=EvaluationConfig())


class Ranks(SimpleNamespace):
    """As many processes as it says, of which this is the first."""

    is_main_process, process_index, device = True, 0, torch.device("cpu")

    def log(self, *_, **__):
        pass


def setup_of(accelerator, folder):
    return SimpleNamespace(accelerator=accelerator, config=CONFIG, dir=folder, name="x", unit="tokens", is_main=True)


def a_step(accelerator, state, loss, finite=True):
    """A step of 2 targets among 3 positions, done."""
    state.step += 1
    batch = {"labels": torch.tensor([[1, 2, IGNORED]])}
    window = SimpleNamespace(micro_batches=[batch], num_targets=2, indices=np.array([[0]]), sources={})
    made = Step(Strategy(accelerator), [], window, number=state.step, rate=0.1, verdict=None)
    for _ in made.micro_batches():
        made.record(torch.tensor(loss))
    made.finite, made.grad_norm = torch.tensor(finite), torch.tensor(0.5)
    return made


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_skipped_step_counts_by_its_positions_alone(monkeypatch, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(metrics, "total", lambda _, own: own)
    one, state = Ranks(num_processes=1), TrainState()
    logger = metrics.Logger(setup_of(one, tmp_path), state, 9, None)
    for loss, finite in ((4.0, True), (math.nan, False), (8.0, True)):
        clock[0] += 2
        logger.step(a_step(one, state, loss, finite), due=state.step == 3)
    clock[0] += 2
    logger.step(a_step(one, state, math.inf, False), due=True)
    first, second = rows_of(tmp_path)
    assert first["loss"] == (4 + 8) / 2 / 2 and first["processed_tokens_per_second"] == 3 * 3 / 6
    assert second["loss"] is None  # nothing was learned


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_resumed_run_logs_the_whole_interval_on_any_number_of_processes(processes, monkeypatch, tmp_path):
    """Two processes save after two steps of losses 1 and 3, of which the second was skipped on the other one alone."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setattr(metrics, "total", lambda _, own: processes * own)
    each = [{metrics.STEPS: 2.0, "loss": 4.0}, {metrics.STEPS: 1.0, "loss": 1.0}]
    state, ranks = TrainState(step=2, interval=json.loads(json.dumps(each))), Ranks(num_processes=processes)
    logger = metrics.Logger(setup_of(ranks, tmp_path), state, 9, None)
    monkeypatch.setattr(metrics, "gather_object", lambda own: own)
    logger.note_interval()
    kept = {metrics.STEPS: 1.5, "loss": 2.5} if processes != 2 else each[0]
    assert state.interval == [kept]
    logger.step(a_step(ranks, state, 5.0 * 2 / processes), due=True)  # the mean of a target is 5
    (row,) = rows_of(tmp_path)
    assert row["loss"] == (kept["loss"] + 5) / (kept[metrics.STEPS] + 1)


def test_rates_count_every_position_and_the_time_of_training_alone(monkeypatch, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(metrics, "peak_flops", lambda _: PEAK_FLOPS["H100"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(metrics, "total", lambda _, own: 2 * own)  # a second rank's are the same
    two = Ranks(num_processes=2)
    state = TrainState()
    logger = metrics.Logger(setup_of(two, tmp_path), state, 4, 3.0)
    batch = {"labels": torch.tensor([[1, 2, IGNORED]])}
    window = SimpleNamespace(micro_batches=[batch, batch], num_targets=8, num_samples=4, sources={}, place=None)
    window.indices = np.array([[0], [1]])
    monkeypatch.setattr(step, "time", metrics.time)

    def batches():
        for _ in range(2):
            clock[0] += 0.5
            yield batch

    def windows():
        for _ in range(4):
            window.micro_batches = batches()
            yield window

    for one in logger.waiting(windows()):
        made = Step(Strategy(two), [], one, number=1, rate=0.1, verdict=lambda *_: torch.tensor(True))
        for loss, _ in zip((4.0, 8.0), made.micro_batches(), strict=False):
            made.record(torch.tensor(loss))
            made.log(entropy=torch.tensor(2 * loss))
        made.finite, made.grad_norm = torch.tensor(True), torch.tensor(0.5)
        clock[0] += 2
        state.advance(one)
        logger.step(made, due=state.step % 2 == 0)
        with logger.pause():
            clock[0] += 100
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:  # 2 steps of 1 + 2 seconds, with 8 targets and 2 x 6 positions in each
        assert row["loss"] == pytest.approx(2 * 12 / 8) and row["entropy"] == pytest.approx(2 * 24 / 8)
        assert row["trained_tokens_per_second"] == pytest.approx(16 / 6)
        assert row["processed_tokens_per_second"] == pytest.approx(24 / 6)
        assert row["data_wait_share"] == pytest.approx(2 / 6)
        assert row["mfu"] == pytest.approx(3.0 * 4 / 2 / 989.4e12)  # FLOPs a token, tokens a second and device, peak


def test_what_wandb_refuses_also_offline_is_one_line(monkeypatch, tmp_path):
    import wandb

    def refuse(*_):
        raise wandb.errors.UsageError("Invalid project name 'a/b'\nmore")

    tracker = object.__new__(Tracker)
    tracker.accelerator = SimpleNamespace(init_trackers=refuse, trackers=[])
    tracker.run_dir, tracker.state = tmp_path, TrainState()
    monkeypatch.setattr(wandb, "teardown", lambda: None)
    with pytest.raises(ConfigError, match=r"^W&B refuses this run \(Invalid project name 'a/b'\)$"):
        tracker._start_wandb("a/b", "run", {})
