"""Scores of evaluations: any logged value, in its better direction."""

import math
from types import SimpleNamespace

import pytest

from shared.config.options import EvaluationConfig
from shared.process.errors import ConfigError
from shared.run.state import TrainState, better, score_of


def test_the_better_direction_follows_from_the_words_of_a_name():
    lower = "loss perplexity bits_per_byte mae ordinal_error unit_errors edit_distance WER val/loss top1-error"
    assert {better(name) for name in lower.split()} == {"lower"}
    higher = "accuracy map macro_f1 exact_match token_f1 kappa glossary_f1 margin matthews terror_f1"
    assert {better(name) for name in higher.split()} == {"higher"}


@pytest.mark.parametrize(("metric", "best"), [("kappa", 4), ("my_error", 4), ("loss", 1), ("none", 0)])
def test_the_best_is_that_of_the_metric_and_of_equal_ones_that_of_the_lower_loss(metric, best):
    state = TrainState()
    assert (state.step, state.targets, state.skipped, state.evaluated, state.best_step) == (0, 0, 0, -1, 0)
    rows = [(9.0, 0.9, 0.0), (1.0, 0.1, 0.8), (2.0, 0.5, 0.9), (1.5, math.nan, 0.2), (1.2, 0.5, 0.2)]
    rows += rows[1::3]  # the first of those that are quite the same
    for state.step, (loss, kappa, error) in enumerate(rows):
        state.score({"eval_loss": loss, "eval_kappa": kappa, "eval_my_error": error}, metric)
    assert state.best_step == best
    assert state.results["eval_loss"] == rows[best or -1][0] and state.before["eval_loss"] == rows[0][0]


def test_a_metric_has_its_name_with_and_without_eval_and_one_that_is_not_measured_is_refused():
    for name in ("eval_loss", "loss"):
        assert EvaluationConfig(metric_for_best_model=name).metric_for_best_model == "loss"
    message = "--metric_for_best_model kapa: an evaluation of this run measures loss, kappa"
    with pytest.raises(ConfigError, match=message):
        score_of({"eval_loss": 1.0, "eval_kappa": 0.5}, "kapa")


def test_scores_of_other_data_are_forgotten_in_words_and_measured_again(capsys):
    state = TrainState(step=4)
    state.advance(SimpleNamespace(place={"row": 7}))
    assert (state.step, state.place) == (5, {"row": 7})
    for _ in range(2):  # again after a resume
        state.begin_scoring("loss", "data")
        state.score({"eval_loss": 1.0}, "loss")
    assert (state.best_step, state.evaluated, capsys.readouterr().err) == (5, 5, "")
    state.begin_scoring("loss", "other data")
    assert (state.best_step, state.best_score, state.results, state.evaluated) == (0, [], {}, 4)
    assert "the best score, of step 5, came from another metric, other data" in capsys.readouterr().err
    state.begin_scoring("loss", "third data")
    assert capsys.readouterr().err == ""  # there was none
