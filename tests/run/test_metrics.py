"""What is logged is what happened (curves: tests/evaluation; the profile: test_profiling.py)."""

import json
from types import SimpleNamespace

import pytest
import torch

from shared.config.options import LogConfig
from shared.data.order import IGNORED
from shared.models.counts import PEAK_FLOPS
from shared.run import metrics
from shared.run.state import TrainState
from shared.training import step
from shared.training.step import Step

QUIET = LogConfig(report_to="none", logging_steps=2)


def test_rates_count_every_position_and_the_time_of_training_alone(monkeypatch, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(metrics, "peak_flops", lambda _: PEAK_FLOPS["H100"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(metrics, "total", lambda _, own: 2 * own)  # a second rank's are the same
    two = SimpleNamespace(num_processes=2, is_main_process=True, device=torch.device("cpu"), log=lambda *_, **__: None)
    state = TrainState()
    logger = metrics.Logger(two, QUIET, tmp_path, state, 4, {}, template="x", flops=3.0)
    batch = {"labels": torch.tensor([[1, 2, IGNORED]])}
    window = SimpleNamespace(micro_batches=[batch, batch], num_targets=8, num_samples=4, sources={}, place=None)
    window.indices = [[0], [1]]
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
        made = Step(two, [], one, number=1, rate=0.1, verdict=lambda *_: torch.tensor(True))
        for loss, _ in zip((4.0, 8.0), made.micro_batches(), strict=False):
            made.record(torch.tensor(loss))
            made.log(entropy=torch.tensor(2 * loss))
        made.finite, made.grad_norm = torch.tensor(True), torch.tensor(0.5)
        clock[0] += 2
        state.advance(one)
        logger.step(made, due=state.step % 2 == 0)
        with logger.pause():
            clock[0] += 100
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:  # 2 steps of 1 + 2 seconds, with 8 targets and 2 x 6 positions in each
        assert row["loss"] == pytest.approx(2 * 12 / 8) and row["entropy"] == pytest.approx(2 * 24 / 8)
        assert row["trained_tokens_per_second"] == pytest.approx(16 / 6)
        assert row["processed_tokens_per_second"] == pytest.approx(24 / 6)
        assert row["data_wait_share"] == pytest.approx(2 / 6)
        assert row["mfu"] == pytest.approx(3.0 * 4 / 2 / 989.4e12)  # FLOPs a token, tokens a second and device, peak
