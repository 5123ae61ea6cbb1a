"""The figures of each kind of label: one class a sample, several classes, a number.

`rows`, [samples, values] fp64, are what `gather_rows` gives: see `of_batch` for the values.
"""

from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional as F

from shared.data.labels import LabelledData
from shared.evaluation.evaluation import Evaluation, gather_rows
from shared.process.errors import ConfigError


def evaluation_of(
    accelerator: Accelerator,
    batches: list[torch.Tensor],
    data: LabelledData,
    noun: str,
    thresholds: dict[str, float] | None = None,
) -> Evaluation:
    """The evaluation of all validation samples. Every rank calls this.

    Args:
        batches: this rank's, see `gather_rows`.
        noun: what the samples are.
        thresholds: see `of_several_labels`.
    """
    rows = gather_rows(accelerator, batches, len(data.validation))
    if data.problem_type == "regression":
        return of_numbers(rows, noun)
    if data.problem_type == "multi_label":
        return of_several_labels(rows, data.classes, noun, thresholds)
    return of_one_label(rows, data.classes, noun)


def of_one_label(rows: np.ndarray, classes: tuple[str, ...], noun: str) -> Evaluation:
    """Figures as scikit-learn has them: a class without samples counts once it is predicted."""
    from sklearn.metrics import f1_score, matthews_corrcoef

    labels, predicted, above = rows[:, [0, 1, 4]].astype(np.int64).T
    confidence = rows[:, 2]
    losses = rows[:, 3]
    by_class = figures_by_class(labels, predicted, len(classes))
    accuracy = (labels == predicted).mean()
    summary = {"eval_loss": losses.mean(), "eval_accuracy": accuracy}
    if len(classes) > 5:
        summary["eval_top5_accuracy"] = (above < 5).mean()
    summary["eval_macro_f1"] = f1_score(labels, predicted, average="macro", zero_division=0.0)
    summary["eval_balanced_accuracy"] = by_class["recall"][by_class["support"] > 0].mean()
    summary["eval_matthews"] = matthews_corrcoef(labels, predicted)
    headline = f"{accuracy:.2%} of {len(labels):,} validation {noun} are right"
    if len(set(predicted)) == 1:
        headline += f"; the model calls all of them {classes[predicted[0]]!r}"
    names = np.array(classes, dtype=object)
    columns = {
        "label": names[labels],
        "predicted": names[predicted],
        "confidence": confidence.round(6),
    }
    wrong = np.flatnonzero(labels != predicted)
    return Evaluation(
        noun=noun,
        classes=classes,
        labels=labels,
        predicted=predicted,
        summary={name: float(value) for name, value in summary.items()},
        headline=headline,
        columns=columns,
        worst=wrong[np.argsort(-confidence[wrong], kind="stable")],
        by_class=by_class,
    )


def of_several_labels(
    rows: np.ndarray,
    classes: tuple[str, ...],
    noun: str,
    thresholds: dict[str, float] | None = None,
) -> Evaluation:
    """`labels` and `predicted` are [samples, classes] bool. Means are over classes that occur.

    Args:
        thresholds: of each class, from which probability it is a yes; None: see `best_threshold`.
    """
    from sklearn.metrics import average_precision_score

    targets, logits = torch.from_numpy(rows).chunk(2, dim=1)
    labels = targets.numpy() > 0
    scores = logits.sigmoid().numpy()
    losses = binary_cross_entropy(logits.float(), targets.float()).sum(1)
    if thresholds is None:
        best = [best_threshold(*pair) for pair in zip(labels.T, scores.T, strict=True)]
        thresholds = dict(zip(classes, best, strict=True))
    cuts = np.array([thresholds[name] for name in classes])
    predicted = scores >= cuts
    occurs = labels.any(axis=0)
    average = np.zeros(len(classes))
    average[occurs] = average_precision_score(labels[:, occurs], scores[:, occurs], average=None)
    by_class = {"average_precision": average, "threshold": cuts}
    by_class |= figures_by_class(labels, predicted, len(classes))
    summary = {
        "eval_loss": float(losses.double().mean()),
        "eval_map": float(average[occurs].mean()),
        "eval_macro_f1": float(by_class["f1"][occurs].mean()),
    }
    headline = f"mean average precision {summary['eval_map']:.4f}"
    headline += f" on {len(labels):,} validation {noun}"
    names = np.array(classes, dtype=object)
    columns = {
        "label": ["|".join(names[row]) for row in labels],
        "predicted": ["|".join(names[row]) for row in predicted],
    }
    apart = np.where(predicted != labels, np.abs(labels - scores), 0.0).max(1)
    wrong = np.flatnonzero(apart)
    return Evaluation(
        noun=noun,
        classes=classes,
        labels=labels,
        predicted=predicted,
        summary=summary,
        headline=headline,
        columns=columns,
        worst=wrong[np.argsort(-apart[wrong], kind="stable")],
        scores={f"score of {name}": x for name, x in zip(classes, scores.round(6).T, strict=True)},
        by_class=by_class,
        thresholds=thresholds,
    )


def of_numbers(rows: np.ndarray, noun: str) -> Evaluation:
    """Mean squared and mean absolute error, and the correlations; 0 where nothing defines them."""
    from scipy.stats import pearsonr, spearmanr

    labels, predicted = rows.T
    errors = np.abs(labels - predicted)
    varies = np.ptp(labels) > 0 and np.ptp(predicted) > 0
    summary = {
        "eval_loss": float((errors**2).mean()),
        "eval_mae": float(errors.mean()),
        "eval_pearson": float(pearsonr(labels, predicted).statistic) if varies else 0.0,
        "eval_spearman": float(spearmanr(labels, predicted).statistic) if varies else 0.0,
    }
    headline = f"Pearson's correlation {summary['eval_pearson']:.4f}"
    headline += f", Spearman's {summary['eval_spearman']:.4f} on {len(labels):,} validation {noun}"
    columns = {"label": labels, "predicted": predicted}
    return Evaluation(
        noun=noun,
        classes=(),
        labels=labels,
        predicted=predicted,
        summary=summary,
        headline=headline,
        columns=columns,
        worst=np.argsort(-errors, kind="stable"),
    )


def figures_by_class(
    labels: np.ndarray,
    predicted: np.ndarray,
    num_classes: int,
) -> dict[str, np.ndarray]:
    """precision, recall, f1 and support (samples), [classes]; 0 where nothing defines them."""
    from sklearn.metrics import precision_recall_fscore_support

    names = ("precision", "recall", "f1", "support")
    numbers = range(num_classes)
    values = precision_recall_fscore_support(labels, predicted, labels=numbers, zero_division=0.0)
    return dict(zip(names, values, strict=True))


class SampleLosses:
    """What each sample of a micro-batch loses: `cross_entropy` for one class,
    `binary_cross_entropy` for several, the squared error for a number.

    Args:
        setup: a `run.setup.Setup`.
        options: have `class_weights` (none or balanced) and `label_smoothing`.

    Raises:
        ConfigError: what is for classes is asked for numbers.
    """

    def __init__(self, setup: Any, data: LabelledData, options: Any) -> None:
        balanced = options.class_weights == "balanced"
        if data.problem_type == "regression" and (options.label_smoothing or balanced):
            raise ConfigError(
                "--label_smoothing and --class_weights are for classes, not for numbers"
            )
        self.kind = data.problem_type
        self.num_classes = len(data.classes)
        self.label_smoothing = options.label_smoothing
        self.weight: torch.Tensor | None = None  # [classes]
        if balanced:
            weights = data.class_weights(setup.config.data.mix_weights)
            self.weight = weights.to(setup.device)

    def __call__(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Losses, [rows] or [rows, classes], whose sum is the micro-batch's.

        Args:
            logits: [rows, classes].
            targets: [rows] class numbers or numbers; [rows, classes] shares, or a yes or no each.
        """
        logits = logits.float()
        if self.kind == "regression":
            return (logits[:, 0] - targets) ** 2
        of_classes = binary_cross_entropy if self.kind == "multi_label" else cross_entropy
        return of_classes(logits, targets, weight=self.weight, label_smoothing=self.label_smoothing)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """One class a sample, or shares of several. The weight of its class counts for all of a
    sample's smoothed loss.

    `F.cross_entropy` weighs what smoothing gives to a class by the weight of that one. If a class
    is rare enough, calling all samples by its name then has the least loss.

    Args:
        logits: [batch, classes].
        targets: [batch] class numbers, those of rows that do not count negative; or
            [batch, classes] shares.
        weight: [classes].
        label_smoothing: this share of a target is spread over all classes.

    Returns:
        [batch].
    """
    if weight is not None and targets.ndim == 2:
        shares = weight * targets
        shares = shares.lerp(shares.mean(1, keepdim=True), label_smoothing)
        return F.cross_entropy(logits, shares, reduction="none")
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)
    return losses if weight is None else losses * weight[targets.clamp(min=0)]


def binary_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """A yes or no for each class. A sample's loss is their mean.

    Args:
        logits: [batch, classes].
        targets: [batch, classes], from 0 to 1.
        weight: [classes], of all the smoothed loss of a yes; a no has 1.
        label_smoothing: targets move by this share towards 1/2.

    Returns:
        [batch, classes]: what each class adds to its sample's loss.
    """
    if weight is None:
        targets = targets * (1 - label_smoothing) + label_smoothing / 2
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    else:
        shares = torch.stack([weight * targets, 1 - targets])
        shares = shares.lerp(shares.mean(0), label_smoothing)
        losses = -(shares * F.logsigmoid(torch.stack([logits, -logits]))).sum(0)
    return losses / logits.shape[1]


def best_threshold(labels: np.ndarray, scores: np.ndarray) -> float:
    """The threshold of one class with the best F1: scores of at least that get the label.

    It lies in the middle between the lowest score that gets the label and the next lower one (0,
    if there is none). Of thresholds with the same F1 it is the highest. A class that no sample has
    gets 0.5.

    Args:
        labels: [samples] bool.
        scores: [samples], from 0 to 1.
    """
    from sklearn.metrics import precision_recall_curve

    if not labels.any():
        return 0.5
    # `cuts` are the distinct scores, from the lowest.
    precision, recall, cuts = precision_recall_curve(labels, scores)
    f1 = (2 * precision * recall / np.maximum(precision + recall, 1e-9))[:-1]
    f1 = f1.round(9)  # the same F1 is the same number
    best = np.flatnonzero(f1 == f1.max())[-1]
    return float(cuts[best] + (cuts[best - 1] if best else 0)) / 2
