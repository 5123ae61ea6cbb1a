"""Evaluation of predicted numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from shared.data.report import Validated, gather_rows, line_of, write_report


@dataclass(frozen=True)
class RegressionPredictions:
    """As `report.Predictions`, for numbers. One entry a sample, in the order of the data set; all arrays [samples]."""

    labels: np.ndarray
    predicted: np.ndarray
    noun: str

    @staticmethod
    def of_batch(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """What the evaluation keeps of a batch: [batch, 2] fp32: label, prediction.

        Args:
            logits: [batch, 1].
            labels: [batch], -100 in rows that do not count.
        """
        return torch.cat([labels[:, None].float(), logits.float()], dim=1)

    @classmethod
    def gather(
        cls, accelerator: Accelerator, batches: list[torch.Tensor], num_samples: int, classes: tuple[str, ...], noun: str
    ) -> "RegressionPredictions":
        """See `report.Predictions.gather`; `batches` are of `of_batch`."""
        labels, predicted = gather_rows(accelerator, batches, num_samples).T
        return cls(labels, predicted, noun)

    def summary(self) -> dict[str, float]:
        """Mean squared error (eval_loss), mean absolute error, and the correlations; 0 where nothing defines them."""
        from scipy.stats import pearsonr, spearmanr

        rounding = 1e-6 * (np.abs(self.predicted).max() + np.ptp(self.labels))  # whose correlation would be noise
        varies = np.ptp(self.labels) > 0 and np.ptp(self.predicted) > rounding
        found = {
            f"eval_{name}": f(self.labels, self.predicted).statistic if varies else 0.0
            for name, f in (
                ("pearson", pearsonr),
                ("spearman", spearmanr),
            )
        }
        apart = self.labels - self.predicted
        found |= {"eval_loss": (apart**2).mean(), "eval_mae": np.abs(apart).mean()}
        return {name: float(found[name]) for name in ("eval_loss", "eval_mae", "eval_pearson", "eval_spearman")}

    def headline(self) -> str:
        values, labels, predicted = self.summary(), self.labels, self.predicted
        line = f"Pearson's correlation {values['eval_pearson']:.4f}, Spearman's {values['eval_spearman']:.4f} on "
        line += f"{len(labels):,} validation {self.noun}"
        if np.ptp(predicted) > 0.01 * np.ptp(labels):
            return line
        spans = [f"{some.min():.4g} to {some.max():.4g}" for some in (predicted, labels)]
        return f"{line}; predictions hardly vary ({spans[0]}, labels {spans[1]})"

    def for_config(self) -> dict[str, Any]:
        """What final/config.json says: pipelines then give the number as it is."""
        return {"problem_type": "regression"}

    def usage(self, load: str) -> str:
        return f"from transformers import pipeline\n\nclassify = {load}"

    def listed(self, samples: Validated) -> list[dict[str, Any]]:
        """The samples with the largest errors, in words; at most 1000."""
        apart = np.abs(self.labels - self.predicted)
        return [line_of(samples, int(i), self.told(int(i))) for i in np.argsort(-apart, kind="stable")[:1000]]

    def told(self, i: int) -> dict[str, Any]:
        """What predictions.csv says of the sample's prediction."""
        return {"label": float(f"{self.labels[i]:.7g}"), "predicted": float(f"{self.predicted[i]:.7g}")}  # digits of fp32

    def write(self, run_dir: Path, samples: Validated) -> list[Path]:
        """Write evaluation.json, predictions.csv and predictions.png into the run's folder. Call on one rank.

        Returns:
            The picture.
        """
        content = {key.removeprefix("eval_"): value for key, value in self.summary().items()}
        content |= {self.noun: len(self.labels), "mistakes": self.listed(samples)}  # type: ignore[dict-item]
        return write_report(run_dir, self, samples, content, {"predictions.png": self._draw})

    def _draw(self, file: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 5), layout="constrained")
        axes = figure.add_subplot(title=self.headline().replace(", ", "\n", 1), xlabel="label", ylabel="predicted")
        axes.scatter(self.labels, self.predicted, s=8, alpha=0.5)
        ends = [min(self.labels.min(), self.predicted.min()), max(self.labels.max(), self.predicted.max())]
        axes.plot(ends, ends, color="grey", linewidth=1)
        figure.savefig(file, dpi=110)
