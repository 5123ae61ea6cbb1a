"""What is logged is what happened (curves: test_report.py; peaks of devices: test_profiling.py)."""

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from shared.config.options import LogConfig
from shared.data.order import IGNORED
from shared.run import metrics
from shared.run.checkpoint import TrainState

QUIET = LogConfig(report_to="none", logging_steps=2)


def test_rates_count_every_position_and_the_time_of_training_alone(monkeypatch, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(metrics, "peak_flops", lambda _: 100.0)
    monkeypatch.setattr(metrics, "total", lambda _, own: 2 * own)  # a second rank's are the same
    two = SimpleNamespace(num_processes=2, is_main_process=True, device=torch.device("cpu"), log=lambda *_, **__: None)
    state = TrainState()
    logger = metrics.Logger(two, QUIET, tmp_path, state, 4, {}, template="x", flops=3.0)
    batch = {"labels": torch.tensor([[1, 2, IGNORED]])}
    window = SimpleNamespace(micro_batches=[batch, batch], num_targets=8, num_samples=4)

    def windows():
        for _ in range(4):
            clock[0] += 1
            yield window

    for one in logger.waiting(windows()):
        clock[0] += 2
        state.advance(one)
        losses = [torch.tensor(4.0), torch.tensor(8.0)]
        logger.step(losses, torch.tensor(True), one, grad_norm=torch.tensor(0.5), learning_rate=0.1)
        with logger.pause():
            clock[0] += 100
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:  # 2 steps of 1 + 2 seconds, with 8 targets and 2 x 6 positions in each
        assert row["loss"] == pytest.approx(2 * 12 / 8)
        assert row["trained_tokens_per_second"] == pytest.approx(16 / 6)
        assert row["processed_tokens_per_second"] == pytest.approx(24 / 6)
        assert row["data_wait_share"] == pytest.approx(2 / 6)
        assert row["mfu"] == pytest.approx(3.0 * 4 / 2 / 100)


def test_a_loss_far_above_the_recent_ones_is_told(capsys, tmp_path):
    logger = metrics.Logger(Accelerator(cpu=True), QUIET, tmp_path, TrainState(), 9, {}, template="x")
    for loss in (2.0, 2.1, 1.9, 2.0, 2.05, 2.2):
        logger._warn_of_a_spike(loss)
    assert "warning" not in capsys.readouterr().err
    logger._warn_of_a_spike(4.0)
    assert "the loss is 4, after a median of 2" in capsys.readouterr().err


def test_a_resumed_run_keeps_the_lines_up_to_its_checkpoint(tmp_path):
    """An evaluation of the checkpoint's own step that was not yet made when it was saved is made again."""
    rows = [{"step": 2, "loss": 1.0}, {"step": 2, "eval_loss": 1.0}, {"step": 4, "loss": 1.0}, {"step": 4, "eval_loss": 1.0}]
    lines = [json.dumps(row) + "\n" for row in [*rows, {"step": 5, "loss": 1.0}]]
    for evaluated, kept in ((2, rows[:3]), (4, rows)):
        (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 6, "lo')
        metrics.Logger(Accelerator(cpu=True), QUIET, tmp_path, TrainState(step=4, evaluated=evaluated), 9, {}, template="x")
        assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == kept
