"""Samples with several labels each, or none: the loss, and the evaluation."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional as F

from shared.data.report import (
    MATRIX_CLASSES,
    MISTAKES,
    Validated,
    gather_rows,
    line_of,
    picture_names,
    scores_by_class,
    write_report,
)

LISTED = 1000  # mistakes in evaluation.json, at most


def binary_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    reduction: Literal["none"] = "none",
) -> torch.Tensor:
    """A yes or no for each class, called as `F.cross_entropy` is. A sample's loss is the mean over the classes.

    Args:
        logits: [batch, classes].
        targets: [batch, classes], from 0 to 1.
        weight: [classes], of the yes of each class.
        label_smoothing: targets move by this share towards 1/2.

    Returns:
        [batch, classes]: what each class adds to its sample's loss.
    """
    targets = targets * (1 - label_smoothing) + label_smoothing / 2
    losses = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weight, reduction=reduction)
    return losses / logits.shape[1]


def best_threshold(labels: np.ndarray, scores: np.ndarray) -> float:
    """The threshold of one class with the best F1, if a sample with a score of at least the threshold gets the label.

    It lies in the middle between the lowest score that gets the label and the next lower one (0, if there is none). Of
    thresholds with the same F1 it is the highest. A class that no sample has gets 0.5.

    Args:
        labels: [samples] bool.
        scores: [samples], from 0 to 1.
    """
    from sklearn.metrics import precision_recall_curve

    if not labels.any():
        return 0.5
    precision, recall, cuts = precision_recall_curve(labels, scores)  # cuts: the distinct scores, from the lowest
    f1 = (2 * precision * recall / np.maximum(precision + recall, 1e-9))[:-1].round(9)  # the same F1 is the same number
    best = np.flatnonzero(f1 == f1.max())[-1]
    return float(cuts[best] + (cuts[best - 1] if best else 0)) / 2


@dataclass(frozen=True)
class MultiLabelPredictions:
    """As `report.Predictions`. One entry a sample, in the order of the data set."""

    labels: np.ndarray  # [samples, classes] bool
    scores: np.ndarray  # [samples, classes] fp64, probabilities
    losses: np.ndarray  # [samples], without weights and smoothing
    classes: tuple[str, ...]
    noun: str = "images"  # what the samples are
    kept: tuple[float, ...] = ()  # thresholds of the model, see `keep_thresholds`

    @staticmethod
    def of_batch(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """What the evaluation keeps of a batch: [batch, 2 * classes + 1] fp32: labels, logits, loss.

        Args:
            logits, labels: [batch, classes]; labels are -100 in rows that do not count.
        """
        logits = logits.float()
        losses = binary_cross_entropy(logits, labels.clamp(min=0)).sum(1, keepdim=True)
        return torch.cat([labels.float(), logits, losses], dim=1)

    @classmethod
    def gather(
        cls,
        accelerator: Accelerator,
        batches: list[torch.Tensor],
        num_samples: int,
        classes: tuple[str, ...],
        noun: str = "images",
    ) -> "MultiLabelPredictions":
        """See `report.Predictions.gather`; `batches` are of `of_batch`."""
        labels, logits, losses = np.split(
            gather_rows(accelerator, batches, num_samples), [len(classes), 2 * len(classes)], axis=1
        )
        return cls(labels > 0, torch.sigmoid(torch.from_numpy(logits)).numpy(), losses[:, 0], classes, noun)

    @cached_property
    def thresholds(self) -> np.ndarray:
        """[classes], those of the model or see `best_threshold`."""
        if self.kept:
            return np.array(self.kept)
        return np.array([best_threshold(*pair) for pair in zip(self.labels.T, self.scores.T, strict=True)])

    @cached_property
    def predicted(self) -> np.ndarray:
        """[samples, classes] bool, by the thresholds."""
        return self.scores >= self.thresholds

    def per_class(self) -> dict[str, np.ndarray]:
        """average_precision, threshold, and by it precision, recall, f1 and support (samples), [classes] each; else 0."""
        from sklearn.metrics import average_precision_score, precision_recall_fscore_support

        found = self.labels.any(axis=0)
        average = np.zeros(len(self.classes))
        average[found] = average_precision_score(self.labels[:, found], self.scores[:, found], average=None)
        values = precision_recall_fscore_support(self.labels, self.predicted, average=None, zero_division=0.0)
        names = ("precision", "recall", "f1", "support")
        return {"average_precision": average, "threshold": self.thresholds} | dict(zip(names, values, strict=True))

    def summary(self) -> dict[str, float]:
        """The figures of an evaluation; means over classes are over those that occur. F1 is that of the thresholds."""
        by_class = self.per_class()
        occurs = by_class["support"] > 0
        values = {"eval_map": by_class["average_precision"][occurs].mean(), "eval_macro_f1": by_class["f1"][occurs].mean()}
        return {"eval_loss": float(self.losses.mean())} | {name: float(value) for name, value in values.items()}

    def headline(self) -> str:
        return f"mean average precision {self.summary()['eval_map']:.4f} on {len(self.labels):,} validation {self.noun}"

    def for_config(self) -> dict[str, Any]:
        """What final/config.json says: pipelines take a probability for each class, and the thresholds."""
        thresholds = dict(zip(self.classes, self.thresholds.tolist(), strict=True))
        return {"problem_type": "multi_label_classification", "thresholds": thresholds}

    def usage(self, load: str) -> str:
        """The lines of the model card that use the pipeline which `load` makes."""
        example = "image.jpg" if self.noun == "images" else "a text"
        return (
            f"from transformers import pipeline\n\nclassify = {load}\n"
            f"thresholds = classify.model.config.thresholds  # of each class: best F1 on the validation {self.noun}\n"
            f'answers = classify("{example}", top_k=len(thresholds))\n'
            'labels = [a["label"] for a in answers if a["score"] >= thresholds[a["label"]]]'
        )

    def mistakes(self) -> np.ndarray:
        """[mistakes, 2] sample and class where the prediction is wrong, the most confident mistake first."""
        apart = np.abs(self.labels - self.scores)
        wrong = np.argwhere(self.predicted != self.labels)
        return wrong[np.argsort(-apart[tuple(wrong.T)], kind="stable")]

    def told(self, i: int) -> dict[str, Any]:
        """What predictions.csv says of the sample's prediction."""
        names = {
            name: "|".join(self.classes[number] for number in np.flatnonzero(rows[i]))
            for name, rows in (("label", self.labels), ("predicted", self.predicted))
        }
        return names | {f"score of {c}": round(float(v), 6) for c, v in zip(self.classes, self.scores[i], strict=True)}

    def listed(self, samples: Validated) -> list[dict[str, Any]]:
        """The most confident mistakes in words."""
        return [
            line_of(
                samples,
                int(i),
                {
                    "label": self.classes[number],
                    "is_there": bool(self.labels[i, number]),
                    "score": round(float(self.scores[i, number]), 4),
                },
            )
            for i, number in self.mistakes()[:LISTED]
        ]

    def write(self, run_dir: Path, samples: Validated) -> list[Path]:
        """Write evaluation.json, predictions.csv, average_precision.png and mistakes.png into the run's folder.

        Call on one rank.

        Returns:
            The pictures.
        """
        content = scores_by_class(self) | {"num_mistakes": len(self.mistakes()), "mistakes": self.listed(samples)}
        draw: Any = {
            "average_precision.png": self._draw_classes,
            "mistakes.png": partial(self._draw_mistakes, samples=samples),
        }
        return write_report(run_dir, self, samples, content, draw)

    def _draw_classes(self, file: Path) -> None:
        from matplotlib.figure import Figure

        by_class = self.per_class()
        occurs = np.flatnonzero(by_class["support"])
        shown = occurs[np.argsort(by_class["average_precision"][occurs], kind="stable")[:MATRIX_CLASSES]]
        title = self.headline()
        if len(shown) < len(self.classes):
            title += f"\nthe {len(shown)} of {len(self.classes)} classes with the lowest"
        figure = Figure(figsize=(7, 1.6 + 0.25 * len(shown)), layout="constrained")
        axes = figure.add_subplot(title=title, xlim=(0, 1.02))
        names = picture_names(self.classes)
        ticks = [f"{names[i]} ({by_class['support'][i]:,})" for i in shown]
        axes.barh(range(len(shown)), by_class["average_precision"][shown], tick_label=ticks, label="average precision")
        axes.plot(by_class["f1"][shown], range(len(shown)), "k|", markersize=9, label="F1 at the threshold")
        figure.legend(loc="outside lower center", ncols=2)
        figure.savefig(file, dpi=110)

    def _draw_mistakes(self, file: Path, samples: Validated) -> None:
        mistakes, names = self.mistakes(), picture_names(self.classes)
        tiles = [
            (int(i), f"{names[c]}: {self.scores[i, c]:.0%}\nis {'there' if self.labels[i, c] else 'not there'}")
            for i, c in mistakes[:MISTAKES]
        ]
        samples.draw(file, f"the most confident of {len(mistakes):,} mistakes", tiles)


def keep_thresholds(predictions: Any, run: Any, model: Any) -> Any:
    """Predictions by the thresholds that the model was saved with, where it is not trained: a test must not choose them."""
    config = run.unwrap(model).config
    if not isinstance(predictions, MultiLabelPredictions):
        config.__dict__.pop("thresholds", None)  # of the several labels that it was trained for before
        return predictions
    kept = getattr(config, "thresholds", None)
    if run.total_steps or not kept:
        return predictions
    return dataclasses.replace(predictions, kept=tuple(kept[name] for name in predictions.classes))
