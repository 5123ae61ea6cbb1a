"""What is logged is what happened (curves: tests/evaluation; the profile: test_run.py)."""

import json
import math
from types import SimpleNamespace
from unittest.mock import Mock

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
from tests.conftest import Run

CONFIG = SimpleNamespace(log=LogConfig(report_to="none", logging_steps=2), evaluation=EvaluationConfig())


class Ranks(SimpleNamespace):
    """As many processes as it says, of which this is the first."""

    is_main_process, process_index, device = True, 0, torch.device("cpu")

    def log(self, *_, **__):
        pass

    wait_for_everyone = end_training = log


def setup_of(accelerator, folder, unit="tokens", config=CONFIG, flops=None):
    facts = {"dir": folder, "name": "x", "unit": unit, "is_main": True, "flops": flops}
    return SimpleNamespace(accelerator=accelerator, config=config, **facts)


@pytest.fixture
def clock(monkeypatch):
    """[what time it is]."""
    now = [0.0]
    for module in (metrics, step):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


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


def test_a_skipped_step_counts_by_its_positions_alone(monkeypatch, clock, tmp_path, capsys):
    monkeypatch.setattr(metrics, "total", lambda _, own: own)
    one, state = Ranks(num_processes=1), TrainState()
    logger = metrics.Logger(setup_of(one, tmp_path), state, 9)
    for loss, finite in ((4.0, True), (math.nan, False), (8.0, True)):
        clock[0] += 2
        logger.step(a_step(one, state, loss, finite), due=state.step == 3)
    clock[0] += 2
    logger.step(a_step(one, state, math.inf, False), due=True)
    first, second = Run(tmp_path, 0, "").rows
    assert first["loss"] == (4 + 8) / 2 / 2 and first["processed_tokens_per_second"] == 3 * 3 / 6
    assert second["loss"] is None  # nothing was learned
    lines = ["step 1/9", "step 3/9: loss 3.000, 1.50 tokens/s, 00:12 left", "step 4/9: loss nan, 1.50 tokens/s, 00:10 left"]
    assert capsys.readouterr().err.splitlines() == lines and not (tmp_path / "audit").exists()


def test_values_of_some_steps_alone_are_means_over_these_and_figures_are_rounded(monkeypatch, clock, tmp_path, capsys):
    """Also: pairs, of which tokens pass through the model; sums in fp64; a reward in place of the loss."""
    monkeypatch.setattr(metrics, "total", lambda _, own: own)
    monkeypatch.setattr(metrics.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=2_000_000))
    one, state = Ranks(num_processes=1), TrainState(step=6, targets=40, skipped=2)
    logger = metrics.Logger(setup_of(one, tmp_path, "pairs", flops=3.0), state, 9)
    for loss, seconds, values in ((2.0**25, 0.1, {"reward": 3.0}), (2.0, 0.2, {}), (1.0, 0.33, {"reward": 1.0})):
        clock[0] += seconds
        made = a_step(one, state, loss)
        made.window.sources = {"a": (8, 2)}
        made.log_means(**values)
        logger.step(made, due=state.step > 7)
    first, second = Run(tmp_path, 0, "").rows
    expected = {"step": 8, "loss": 8388608.5, "reward": 3.0, "learning_rate": 0.1, "grad_norm": 0.5, "pairs": 40}
    expected |= {"skipped_steps": 2, "epochs/a": 0.25, "peak_memory_gb": 2.048, "data_wait_share": 0.0}
    assert {name: first[name] for name in first if "per_second" not in name} == expected
    assert first["trained_pairs_per_second"] == pytest.approx(4 / 0.3) and "processed_tokens_per_second" in first
    assert second["reward"] == 1.0 and second["loss"] == 0.5
    rewards = "reward 3.000, 20 tokens/s", "reward 1.000, 9.09 tokens/s"
    lines = [f"step {8 + place}/9: {reward}, epochs/a 0.25, 00:00 left" for place, reward in enumerate(rewards)]
    assert capsys.readouterr().err.splitlines() == ["step 7/9", *lines]


def test_a_loss_far_above_the_recent_ones_is_said(tmp_path, capsys):
    def warns(recent, loss):
        logger = metrics.Logger(setup_of(Ranks(num_processes=1), tmp_path), TrainState(), 9)
        for value in (*recent, loss):
            logger._warn_of_a_spike(value)
        return "warning: step 0: the loss is" in capsys.readouterr().err

    assert warns([2.0] * 5, 2.51) and not warns([2.0] * 5, 2.5) and not warns([2.0] * 4, 9.0)
    assert warns(range(5), 10.5) and not warns(range(5), 10.0) and not warns([2.0] * 4 + [math.nan], 9.0)


def test_a_log_file_gets_a_line_a_minute_and_a_terminal_a_bar(monkeypatch, clock, tmp_path, capsys):
    drawn = []
    monkeypatch.setattr(metrics, "draw_curves", lambda *_: drawn.append(clock[0]))
    monkeypatch.setattr(metrics, "start_profile", lambda _, steps: SimpleNamespace(stop=lambda: drawn.append(steps)))
    config = SimpleNamespace(log=LogConfig(report_to="none", profile=True), evaluation=EvaluationConfig())
    logger = metrics.Logger(setup_of(Ranks(num_processes=1), tmp_path, config=config), TrainState(step=3), 9)
    for clock[0], line in ((60.0, "no"), (60.5, "yes"), (120.5, "no"), (121.0, "yes")):
        logger.print_each_minute(line)
        logger.draw()
    assert capsys.readouterr().err == "yes\nyes\n" and drawn == [60.5, 121.0]
    logger.close()
    assert drawn[2:] == [6, 121.0]
    monkeypatch.setattr(metrics.sys.stderr, "isatty", lambda: True)
    for is_main in (True, False):
        monkeypatch.setattr(Ranks, "is_main_process", is_main)
        logger = metrics.Logger(setup_of(Ranks(num_processes=1), tmp_path), TrainState(), 9)
        assert logger.bar.disable is not is_main and logger.profile is None
        logger.draw(now=True)
        logger.bar.close()
    assert len(drawn) == 5


@pytest.mark.parametrize(("row", "is_kept"), [
    ({"step": 3, "loss": 1.0}, True), ({"step": 4, "loss": 1.0}, False), ({"loss": 1.0}, False),
    ({"step": 2, "eval_loss": 1.0}, True), ({"step": 3, "eval_loss": 1.0}, False),
])  # fmt: skip
def test_a_resumed_run_keeps_the_rows_up_to_its_step_and_its_evaluation(row, is_kept):
    assert metrics._is_of(TrainState(step=3, evaluated=2), row) is is_kept


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_resumed_run_logs_the_whole_interval_on_any_number_of_processes(processes, monkeypatch, tmp_path):
    """Two processes save after two steps of losses 1 and 3, of which the second was skipped on the other one alone."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setattr(metrics, "total", lambda _, own: processes * own)
    each = [{metrics.STEPS: 2.0, "loss": 4.0}, {metrics.STEPS: 1.0, "loss": 1.0}]
    state, ranks = TrainState(step=2, interval=json.loads(json.dumps(each))), Ranks(num_processes=processes)
    logger = metrics.Logger(setup_of(ranks, tmp_path), state, 9)
    monkeypatch.setattr(metrics, "gather_object", lambda own: own)
    logger.note_interval()
    kept = {metrics.STEPS: 1.5, "loss": 2.5} if processes != 2 else each[0]
    assert state.interval == [kept]
    logger.step(a_step(ranks, state, 5.0 * 2 / processes), due=True)  # the mean of a target is 5
    (row,) = Run(tmp_path, 0, "").rows
    assert row["loss"] == (kept["loss"] + 5) / (kept[metrics.STEPS] + 1)


def test_rates_count_every_position_and_the_time_of_training_alone(monkeypatch, clock, tmp_path):
    monkeypatch.setattr(metrics, "peak_flops", lambda _: PEAK_FLOPS["H100"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(metrics, "total", lambda _, own: 2 * own)  # a second rank's are the same
    two = Ranks(num_processes=2)
    state = TrainState()
    logger = metrics.Logger(setup_of(two, tmp_path, flops=3.0), state, 4)
    batch = {"labels": torch.tensor([[1, 2, IGNORED]])}
    window = SimpleNamespace(micro_batches=[batch, batch], num_targets=8, num_samples=4, sources={}, place=None)
    window.indices = np.array([[0], [1]])

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
    rows = Run(tmp_path, 0, "").rows
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:  # 2 steps of 1 + 2 seconds, with 8 targets and 2 x 6 positions in each
        assert row["loss"] == pytest.approx(2 * 12 / 8) and row["entropy"] == pytest.approx(2 * 24 / 8)
        assert row["trained_tokens_per_second"] == pytest.approx(16 / 6)
        assert row["processed_tokens_per_second"] == pytest.approx(24 / 6)
        assert row["data_wait_share"] == pytest.approx(2 / 6)
        assert row["mfu"] * 989.4e12 == pytest.approx(3.0 * 4 / 2)  # FLOPs a token, tokens a second and device, peak


def test_what_wandb_refuses_also_offline_is_one_line(monkeypatch, tmp_path):
    import wandb

    tracker = object.__new__(Tracker)
    refuse = Mock(side_effect=wandb.errors.UsageError("Invalid project name 'a/b'\nmore"))
    tracker.accelerator = SimpleNamespace(init_trackers=refuse, trackers=[])
    tracker.run_dir, tracker.state = tmp_path, TrainState()
    monkeypatch.setattr(wandb, "teardown", lambda: None)
    with pytest.raises(ConfigError, match=r"^W&B refuses this run \(Invalid project name 'a/b'\)$"):
        tracker._start_wandb("a/b", "run", {})
