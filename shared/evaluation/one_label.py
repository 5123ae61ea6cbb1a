"""The evaluation of samples with one class each."""

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from shared.evaluation.evaluation import LISTED, Evaluation
from shared.evaluation.pictures import MOST, picture_names


class OneLabel(Evaluation):
    """`labels` and `predicted` are class numbers, [samples].

    Attributes:
        confidence: [samples], the probability of the predicted class.
        above: [samples], classes that scored above the true one.
    """

    PICTURE = "confusion_matrix.png"

    def __init__(self, rows: np.ndarray, classes: tuple[str, ...], noun: str = "images") -> None:
        super().__init__(rows, classes, noun)
        self.labels, self.predicted, self.above = rows[:, [0, 1, 4]].astype(np.int64).T
        self.confidence, self.losses = rows[:, 2], rows[:, 3]

    @staticmethod
    def of_batch(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[batch, 5] fp32: label, predicted class, its probability, loss, classes that scored above the true one.

        Args:
            logits: [batch, classes].
            labels: [batch], -100 for rows that do not count.
        """
        logits = logits.float()
        valid = labels.clamp(min=0)
        confidence, predicted = logits.softmax(1).max(1)
        loss = F.cross_entropy(logits, valid, reduction="none")
        above = (logits > logits.gather(1, valid[:, None])).sum(1)
        return torch.stack([labels.float(), predicted.float(), confidence, loss, above.float()], dim=1)

    def per_class(self) -> dict[str, np.ndarray]:
        """precision, recall, f1 and support (samples) of each class, [classes]; 0 where nothing defines them."""
        from sklearn.metrics import precision_recall_fscore_support

        numbers = range(len(self.classes))
        values = precision_recall_fscore_support(self.labels, self.predicted, labels=numbers, zero_division=0.0)
        return dict(zip(("precision", "recall", "f1", "support"), values, strict=True))

    def summary(self) -> dict[str, float]:
        """As scikit-learn has them: a class without samples counts once it is predicted."""
        from sklearn.metrics import f1_score, matthews_corrcoef

        by_class = self.per_class()
        values = {"eval_loss": self.losses.mean(), "eval_accuracy": (self.labels == self.predicted).mean()}
        if len(self.classes) > 5:
            values["eval_top5_accuracy"] = (self.above < 5).mean()
        values["eval_macro_f1"] = f1_score(self.labels, self.predicted, average="macro", zero_division=0.0)
        values["eval_balanced_accuracy"] = by_class["recall"][by_class["support"] > 0].mean()
        values["eval_matthews"] = matthews_corrcoef(self.labels, self.predicted)
        return {name: float(value) for name, value in values.items()}

    def headline(self) -> str:
        accuracy = (self.labels == self.predicted).mean()
        right = f"{accuracy:.2%} of {len(self.labels):,} validation {self.noun} are right"
        said = np.unique(self.predicted)
        return right if len(said) > 1 else f"{right}; the model calls all of them {self.classes[said[0]]!r}"

    def line(self, sample: int) -> dict[str, Any]:
        names = {"label": self.classes[self.labels[sample]], "predicted": self.classes[self.predicted[sample]]}
        return names | {"confidence": round(float(self.confidence[sample]), 6)}

    def mistakes(self) -> list[tuple[int, dict[str, Any]]]:
        wrong = np.flatnonzero(self.labels != self.predicted)
        worst = wrong[np.argsort(-self.confidence[wrong], kind="stable")][:LISTED]
        return [(int(sample), self.line(sample)) for sample in worst]

    def caption(self, mistake: dict[str, Any], names: dict[str, str]) -> str:
        return f"pred {names[mistake['predicted']]} {mistake['confidence']:.0%}\ntrue {names[mistake['label']]}"

    def figure(self) -> Any:
        """The confusion matrix of the classes with the most mistakes."""
        from matplotlib.figure import Figure
        from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix

        wrong = self.labels != self.predicted
        count = sum(np.bincount(v[wrong], minlength=len(self.classes)) for v in (self.labels, self.predicted))
        shown = np.sort(np.argsort(-count, kind="stable")[:MOST])
        title = f"{len(self.labels):,} validation {self.noun}, {1 - wrong.mean():.2%} right\ncolour: share of the true class"
        if len(shown) < len(self.classes):
            title += f"\nthe {len(shown)} of {len(self.classes)} classes with the most mistakes"
        side = 2.5 + 0.45 * len(shown)
        figure = Figure(figsize=(side, side), layout="constrained")
        axes = figure.add_subplot(title=title)
        matrix = confusion_matrix(self.labels, self.predicted, labels=shown)
        names = picture_names(self.classes)
        share = matrix / matrix.sum(1, keepdims=True).clip(1)  # so that rare classes have colour, too
        display = ConfusionMatrixDisplay(share, display_labels=[names[i] for i in shown])
        display.plot(ax=axes, cmap="Blues", xticks_rotation="vertical", colorbar=False, text_kw={"fontsize": 8})
        for cell, text in zip(matrix.flat, display.text_.flat, strict=True):
            text.set_text(str(cell))
        return figure
