"""Samples with several labels each, or none: the loss, and the evaluation."""

from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import torch
from torch.nn import functional as F

from shared.evaluation.evaluation import LISTED, Evaluation
from shared.evaluation.pictures import MOST, picture_names


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


class SeveralLabels(Evaluation):
    """`labels` and `predicted` are [samples, classes] bool; losses are without weights and smoothing.

    Attributes:
        scores: [samples, classes] fp64, probabilities.
        thresholds: [classes], above which a score is a yes: see `best_threshold`.
    """

    PICTURE = "average_precision.png"

    def __init__(self, rows: np.ndarray, classes: tuple[str, ...], noun: str = "images") -> None:
        super().__init__(rows, classes, noun)
        labels, logits, losses = np.split(rows, [len(classes), 2 * len(classes)], axis=1)
        self.labels, self.losses = labels > 0, losses[:, 0]
        self.scores = torch.sigmoid(torch.from_numpy(logits)).numpy()

    @staticmethod
    def of_batch(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[batch, 2 * classes + 1] fp32: labels, logits, loss.

        Args:
            logits, labels: [batch, classes]; labels are -100 in rows that do not count.
        """
        logits = logits.float()
        losses = binary_cross_entropy(logits, labels.clamp(min=0)).sum(1, keepdim=True)
        return torch.cat([labels.float(), logits, losses], dim=1)

    @cached_property
    def thresholds(self) -> np.ndarray:
        return np.array([best_threshold(*pair) for pair in zip(self.labels.T, self.scores.T, strict=True)])

    @cached_property
    def predicted(self) -> np.ndarray:  # type: ignore[override]
        return self.scores >= self.thresholds

    def for_model(self, config: Any, *, trained: bool) -> Self:
        kept = getattr(config, "thresholds", None)
        if kept and not trained:  # a test must not choose them
            self.thresholds = np.array([kept[name] for name in self.classes])
        return self

    def per_class(self) -> dict[str, np.ndarray]:
        """average_precision, threshold, and by it precision, recall, f1 and support (samples), [classes] each; else 0."""
        from sklearn.metrics import average_precision_score, precision_recall_fscore_support

        occurs = self.labels.any(axis=0)
        average = np.zeros(len(self.classes))
        average[occurs] = average_precision_score(self.labels[:, occurs], self.scores[:, occurs], average=None)
        values = precision_recall_fscore_support(self.labels, self.predicted, average=None, zero_division=0.0)
        names = ("precision", "recall", "f1", "support")
        return {"average_precision": average, "threshold": self.thresholds} | dict(zip(names, values, strict=True))

    def summary(self) -> dict[str, float]:
        """Means over classes are over those that occur. F1 is that of the thresholds."""
        by_class = self.per_class()
        occurs = by_class["support"] > 0
        return {
            "eval_loss": float(self.losses.mean()),
            "eval_map": float(by_class["average_precision"][occurs].mean()),
            "eval_macro_f1": float(by_class["f1"][occurs].mean()),
        }

    def headline(self) -> str:
        return f"mean average precision {self.summary()['eval_map']:.4f} on {len(self.labels):,} validation {self.noun}"

    def for_config(self) -> dict[str, Any]:
        """Pipelines then take a probability for each class; the thresholds."""
        thresholds = dict(zip(self.classes, self.thresholds.tolist(), strict=True))
        return {"problem_type": "multi_label_classification", "thresholds": thresholds}

    def usage(self, load: str) -> str:
        example = "image.jpg" if self.noun == "images" else "a text"
        return (
            f"{super().usage(load)}\n"
            f"thresholds = classify.model.config.thresholds  # of each class: best F1 on the validation {self.noun}\n"
            f'answers = classify("{example}", top_k=len(thresholds))\n'
            'labels = [a["label"] for a in answers if a["score"] >= thresholds[a["label"]]]'
        )

    def line(self, sample: int) -> dict[str, Any]:
        names = {
            name: "|".join(self.classes[number] for number in np.flatnonzero(rows[sample]))
            for name, rows in (("label", self.labels), ("predicted", self.predicted))
        }
        scores = zip(self.classes, self.scores[sample], strict=True)
        return names | {f"score of {name}": round(float(score), 6) for name, score in scores}

    def mistakes(self) -> list[tuple[int, dict[str, Any]]]:
        """Of each wrong yes or no, the most confident first."""
        wrong = np.argwhere(self.predicted != self.labels)
        apart = np.abs(self.labels - self.scores)[tuple(wrong.T)]
        return [
            (
                int(sample),
                {
                    "label": self.classes[number],
                    "is_there": bool(self.labels[sample, number]),
                    "score": round(float(self.scores[sample, number]), 4),
                },
            )
            for sample, number in wrong[np.argsort(-apart, kind="stable")][:LISTED]
        ]

    def caption(self, mistake: dict[str, Any], names: dict[str, str]) -> str:
        there = "there" if mistake["is_there"] else "not there"
        return f"{names[mistake['label']]}: {mistake['score']:.0%}\nis {there}"

    def figure(self) -> Any:
        """Average precision and F1 of the classes with the lowest average precision."""
        from matplotlib.figure import Figure

        by_class = self.per_class()
        occurs = np.flatnonzero(by_class["support"])
        shown = occurs[np.argsort(by_class["average_precision"][occurs], kind="stable")[:MOST]]
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
        return figure
