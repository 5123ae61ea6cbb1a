"""The evaluation of predicted numbers."""

from typing import Any

import numpy as np
import torch

from shared.evaluation.evaluation import LISTED, Evaluation


class Numbers(Evaluation):
    """`labels` and `predicted` are numbers, [samples]; losses are squared errors."""

    PICTURE = "predictions.png"

    def __init__(self, rows: np.ndarray, classes: tuple[str, ...], noun: str) -> None:
        super().__init__(rows, classes, noun)
        self.labels, self.predicted = rows.T
        self.losses = (self.labels - self.predicted) ** 2

    @staticmethod
    def of_batch(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[batch, 2] fp32: label, prediction.

        Args:
            logits: [batch, 1].
            labels: [batch], -100 in rows that do not count.
        """
        return torch.cat([labels[:, None].float(), logits.float()], dim=1)

    def summary(self) -> dict[str, float]:
        """Mean squared and mean absolute error, and the correlations; 0 where nothing defines them."""
        from scipy.stats import pearsonr, spearmanr

        rounding = 1e-6 * (np.abs(self.predicted).max() + np.ptp(self.labels))  # whose correlation would be noise
        varies = np.ptp(self.labels) > 0 and np.ptp(self.predicted) > rounding
        pearson, spearman = (f(self.labels, self.predicted).statistic if varies else 0.0 for f in (pearsonr, spearmanr))
        return {
            "eval_loss": float(self.losses.mean()),
            "eval_mae": float(np.abs(self.labels - self.predicted).mean()),
            "eval_pearson": float(pearson),
            "eval_spearman": float(spearman),
        }

    def headline(self) -> str:
        values = self.summary()
        line = f"Pearson's correlation {values['eval_pearson']:.4f}, Spearman's {values['eval_spearman']:.4f} on "
        line += f"{len(self.labels):,} validation {self.noun}"
        if np.ptp(self.predicted) > 0.01 * np.ptp(self.labels):
            return line
        spans = [f"{some.min():.4g} to {some.max():.4g}" for some in (self.predicted, self.labels)]
        return f"{line}; predictions hardly vary ({spans[0]}, labels {spans[1]})"

    def for_config(self) -> dict[str, Any]:
        """Pipelines then give the number as it is."""
        return {"problem_type": "regression"}

    def line(self, sample: int) -> dict[str, Any]:
        label, predicted = (float(f"{values[sample]:.7g}") for values in (self.labels, self.predicted))  # digits of fp32
        return {"label": label, "predicted": predicted}

    def mistakes(self) -> list[tuple[int, dict[str, Any]]]:
        """The samples with the largest errors."""
        return [(int(sample), self.line(sample)) for sample in np.argsort(-self.losses, kind="stable")[:LISTED]]

    def figure(self) -> Any:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 5), layout="constrained")
        axes = figure.add_subplot(title=self.headline().replace(", ", "\n", 1), xlabel="label", ylabel="predicted")
        axes.scatter(self.labels, self.predicted, s=8, alpha=0.5)
        ends = [min(self.labels.min(), self.predicted.min()), max(self.labels.max(), self.predicted.max())]
        axes.plot(ends, ends, color="grey", linewidth=1)
        return figure
