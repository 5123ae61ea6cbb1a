"""What a run is besides tensors: counts, scores, what it has to remember. Goes into each checkpoint
as JSON.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from shared.data.loader import Window
from shared.process.errors import ConfigError
from shared.process.printing import print_main

LOWER_IS_BETTER = (
    r"\b(loss|perplexity|ppl|entropy|errors?|distance|bits|nll|mae|mse|rmse|wer|cer|brier|ece)\b"
)


def better(metric: str) -> str:
    """The better direction of a metric, by the words of its name: lower or higher."""
    words = metric.lower().replace("_", " ")
    return "lower" if re.search(LOWER_IS_BETTER, words) else "higher"


def score_of(values: dict[str, float], metric: str) -> list[float]:
    """[the metric, minus the loss] of an evaluation's `eval_*` values, the larger the better. Empty
    without a metric.

    Raises:
        ConfigError: the evaluation has no such value.
    """
    if metric == "none":
        return []
    if f"eval_{metric}" not in values:
        known = ", ".join(name.removeprefix("eval_") for name in values)
        raise ConfigError(
            f"--metric_for_best_model {metric}: an evaluation of this run measures {known}"
        )
    value = values[f"eval_{metric}"]
    score = [value if better(metric) == "higher" else -value, -values.get("eval_loss", 0.0)]
    return [-math.inf if math.isnan(part) else float(part) for part in score]


@dataclass
class TrainState:
    """Counts and scores of a run."""

    step: int = 0  # optimizer steps begun; outside of a step: done
    targets: int = 0  # target tokens (or images) trained on
    skipped: int = 0  # steps whose update was skipped
    evaluated: int = -1  # step of the latest evaluation
    # values of the evaluation before training
    before: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)  # values of the latest evaluation
    # values of the best evaluation; without a metric: the latest
    results: dict[str, float] = field(default_factory=dict)
    best_step: int = 0  # step of the best evaluation, 0: none yet
    # see score_of
    best_score: list[float] = field(default_factory=list)
    # metric, data, settings: other scores cannot be compared
    scored_by: list[str] = field(default_factory=list)
    # [budget in steps, patience] that ended the run
    stopped_early: list[int] = field(default_factory=list)
    tracker_run_id: str = ""  # so that a resumed run is the same run in W&B
    # what the next log line is made of so far: each rank's sums by name
    interval: list[dict[str, float]] = field(default_factory=list)
    place: dict[str, Any] | None = None  # where the data go on
    next_rate: float | None = None  # learning rate that the next step was to have
    notes: dict[str, Any] = field(default_factory=dict)  # the template's own, JSON

    def advance(self, window: Window) -> None:
        """Count an optimizer step."""
        self.step += 1
        self.place = window.place

    def forget_scores(self) -> None:
        """Let the next evaluation be the best."""
        self.best_step = 0
        self.best_score = []
        self.results = {}

    def begin_scoring(self, *by: str) -> None:
        """Forget scores of another metric, other data or settings; the present step is then to be
        evaluated again.

        Args:
            by: metric, data, and `resumable.measured_by`.
        """
        if self.scored_by and self.scored_by != [*by]:
            if self.best_step:
                print_main(
                    f"the best score, of step {self.best_step}, came from another metric, other "
                    "data or settings, and no longer counts"
                )
            self.forget_scores()
            self.evaluated = min(self.evaluated, self.step - 1)
        self.scored_by = [*by]

    def score(self, values: dict[str, float], metric: str) -> None:
        """Note an evaluation's `eval_*` values, and whether it is the best. One before training is
        never the best.
        """
        self.evaluated = self.step
        self.latest = values
        if self.step == 0:
            self.before = values
        score = score_of(values, metric)
        if not score or self.step == 0:
            self.results = values
        elif not self.best_score or score > self.best_score:
            self.best_score = score
            self.best_step = self.step
            self.results = values
