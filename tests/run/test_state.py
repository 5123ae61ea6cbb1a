"""Scores of evaluations: any logged value, in its better direction."""

import math

import pytest

from shared.process.errors import ConfigError
from shared.run.state import TrainState, better, score_of


def test_the_better_direction_follows_from_the_words_of_a_name():
    lower = (
        "loss",
        "perplexity",
        "bits_per_byte",
        "mae",
        "ordinal_error",
        "unit_errors",
        "edit_distance",
        "WER",
        "val/loss",
        "top1-error",
    )
    lower += ("unit_errors", "edit_distance")
    assert {better(name) for name in lower} == {"lower"}
    higher = (
        "accuracy",
        "map",
        "macro_f1",
        "exact_match",
        "token_f1",
        "kappa",
        "glossary_f1",
        "margin",
        "matthews",
        "terror_f1",
    )
    assert {better(name) for name in higher} == {"higher"}


@pytest.mark.parametrize(("metric", "best"), [("kappa", 4), ("my_error", 4), ("loss", 1), ("none", 0)])
def test_the_best_is_that_of_the_metric_and_of_equal_ones_that_of_the_lower_loss(metric, best):
    state = TrainState()
    rows = [(9.0, 0.9, 0.0), (1.0, 0.1, 0.8), (2.0, 0.5, 0.9), (1.5, math.nan, 0.2), (1.2, 0.5, 0.2)]
    for state.step, (loss, kappa, error) in enumerate(rows):
        state.score({"eval_loss": loss, "eval_kappa": kappa, "eval_my_error": error}, metric)
    assert state.best_step == best
    assert state.results["eval_loss"] == rows[best or -1][0]


def test_a_metric_that_is_not_measured_is_refused_with_those_that_are():
    message = "--metric_for_best_model kapa: an evaluation of this run measures loss, kappa"
    with pytest.raises(ConfigError, match=message):
        score_of({"eval_loss": 1.0, "eval_kappa": 0.5}, "kapa")
