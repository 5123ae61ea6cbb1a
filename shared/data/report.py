"""Evaluation of a classifier: figures by class, a confusion matrix, a page of its most confident mistakes."""

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional as F

from shared.data.order import IGNORED
from shared.process import ranks
from shared.process.errors import first_line
from shared.process.printing import print_main

MATRIX_CLASSES = 40  # in the picture, at most: those with the most mistakes
MISTAKES = 32  # on the page, at most


class Validated(Protocol):
    """The samples that were validated on."""

    def shown(self, number: int) -> dict[str, Any]:
        """What evaluation.json and predictions.csv say of a sample: where it is from."""

    def position(self, number: int) -> int:
        """What orders the samples as the data has them; here they may be sorted by length."""

    def draw(self, file: Path, title: str, tiles: list[tuple[int, str]]) -> None:
        """Draw samples, each with its text, if they can be drawn."""


def scores(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What the evaluation keeps of a batch.

    Args:
        logits: [batch, classes].
        labels: [batch], -100 for rows that do not count.

    Returns:
        [batch, 5] fp32: label, predicted class, its probability, loss, classes scored above the true one.
    """
    logits = logits.float()
    valid = labels.clamp(min=0)
    confidence, predicted = logits.softmax(1).max(1)
    loss = F.cross_entropy(logits, valid, reduction="none")
    above = (logits > logits.gather(1, valid[:, None])).sum(1)
    return torch.stack([labels.float(), predicted.float(), confidence, loss, above.float()], dim=1)


def gather_rows(accelerator: Accelerator, batches: list[torch.Tensor], num_samples: int) -> np.ndarray:
    """What all ranks keep, each sample once, in their order: [num_samples, values] fp64. Every rank calls this.

    Args:
        batches: this rank's, of each window in order, [per device, values]; all ranks have equally many. The first value is
            -100 in rows that do not count.
        num_samples: size of the data set; the rest fills the last window.
    """
    mine = torch.stack(batches)  # [windows, per device, values]
    everything = accelerator.gather(mine).view(accelerator.num_processes, *mine.shape)
    everything = everything[:: accelerator.num_processes // ranks.data_parallel_size()]  # some read the same, in a row
    rows = everything.transpose(0, 1).flatten(0, 2).double().cpu().numpy()
    rows = rows[rows[:, 0] != IGNORED]
    assert len(rows) == num_samples
    return rows


def scores_by_class(predictions: Any) -> dict[str, Any]:
    """What evaluation.json says of an evaluation by classes: its figures, the number of samples, each class's figures."""
    by_class = {name: values.tolist() for name, values in predictions.per_class().items()}
    return {
        **{key.removeprefix("eval_"): value for key, value in predictions.summary().items()},
        predictions.noun: len(predictions.labels),
        "classes": {name: {key: by_class[key][i] for key in by_class} for i, name in enumerate(predictions.classes)},
    }


def line_of(samples: Validated, i: int, told: dict[str, Any]) -> dict[str, Any]:
    """A sample's record, and what is `told` of its prediction. A column of a name that this uses, too, is renamed."""
    return {f"{name} (data)" if name in told else name: value for name, value in samples.shown(i).items()} | told


def write_report(
    run_dir: Path,
    predictions: Any,
    samples: Validated,
    content: dict[str, Any],
    pictures: dict[str, Callable[[Path], None]],
) -> list[Path]:
    """Write evaluation.json, predictions.csv and the pictures of an evaluation into the run's folder. Call on one rank.

    Args:
        content: of evaluation.json.
        pictures: by file name, a function that draws into the file, or draws nothing.

    Returns:
        The pictures that were drawn.
    """
    written: Any = {"encoding": "utf-8", "errors": "backslashreplace"}  # names of files may be no text
    (run_dir / "evaluation.json").write_text(json.dumps(content, indent=1, ensure_ascii=False), **written)
    with (run_dir / "predictions.csv").open("w", newline="", **written) as file:
        in_order = sorted(range(len(predictions.labels)), key=samples.position)
        lines = [line_of(samples, i, predictions.told(i)) for i in in_order]
        writer = csv.DictWriter(file, list(dict.fromkeys(name for line in lines for name in line)))
        writer.writeheader()
        writer.writerows(lines)
    for name, draw in pictures.items():
        (run_dir / name).unlink(missing_ok=True)  # of an evaluation before
        try:
            draw(run_dir / name)
        except Exception as error:  # a font or an image must not cost the model
            print_main(f"warning: a picture of the evaluation cannot be drawn ({first_line(error)})")
    return [run_dir / name for name in pictures if (run_dir / name).exists()]


@dataclass(frozen=True)
class Predictions:
    """One entry a sample, in the order of the data set; all arrays [samples]."""

    labels: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    losses: np.ndarray
    above: np.ndarray  # classes that were scored above the true one
    classes: tuple[str, ...]
    noun: str = "images"  # what the samples are

    of_batch = staticmethod(scores)

    @classmethod
    def gather(
        cls,
        accelerator: Accelerator,
        batches: list[torch.Tensor],
        num_samples: int,
        classes: tuple[str, ...],
        noun: str = "images",
    ) -> "Predictions":
        """The predictions of all ranks, each sample once. Every rank calls this and gets all.

        Args:
            batches, num_samples: see `gather_rows`; what `scores` gave.
        """
        rows = gather_rows(accelerator, batches, num_samples)
        integers = rows[:, [0, 1, 4]].astype(np.int64).T
        return cls(integers[0], integers[1], rows[:, 2], rows[:, 3], integers[2], classes, noun)

    def per_class(self) -> dict[str, np.ndarray]:
        """precision, recall, f1 and support (samples) of each class, [classes]; 0 where nothing defines them."""
        from sklearn.metrics import precision_recall_fscore_support

        numbers = range(len(self.classes))
        values = precision_recall_fscore_support(self.labels, self.predicted, labels=numbers, zero_division=0.0)
        return dict(zip(("precision", "recall", "f1", "support"), values, strict=True))

    def summary(self) -> dict[str, float]:
        """The figures of an evaluation, as scikit-learn has them: a class without samples counts once it is predicted."""
        from sklearn.metrics import f1_score, matthews_corrcoef

        by_class = self.per_class()
        values = {"eval_loss": self.losses.mean(), "eval_accuracy": (self.labels == self.predicted).mean()}
        if len(self.classes) > 5:
            values["eval_top5_accuracy"] = (self.above < 5).mean()
        occurs = by_class["support"] > 0
        values["eval_macro_f1"] = f1_score(self.labels, self.predicted, average="macro", zero_division=0.0)
        values["eval_balanced_accuracy"] = by_class["recall"][occurs].mean()
        values["eval_matthews"] = matthews_corrcoef(self.labels, self.predicted)
        return {name: float(value) for name, value in values.items()}

    def headline(self) -> str:
        right = f"{self.summary()['eval_accuracy']:.2%} of {len(self.labels):,} validation {self.noun} are right"
        said = np.unique(self.predicted)
        return right if len(said) > 1 else f"{right}; the model calls all of them {self.classes[said[0]]!r}"

    def for_config(self) -> dict[str, Any]:
        """What final/config.json says besides the names of the classes."""
        return {}

    def usage(self, load: str) -> str:
        """The lines of the model card that use the pipeline which `load` makes."""
        return f"from transformers import pipeline\n\nclassify = {load}"

    def mistakes(self) -> np.ndarray:
        """The samples that were classified wrongly, the most confident mistake first."""
        wrong = np.flatnonzero(self.labels != self.predicted)
        return wrong[np.argsort(-self.confidence[wrong], kind="stable")]

    def told(self, i: int) -> dict[str, Any]:
        """What predictions.csv says of the sample's prediction."""
        names = {"label": self.classes[self.labels[i]], "predicted": self.classes[self.predicted[i]]}
        return names | {"confidence": round(float(self.confidence[i]), 6)}

    def listed(self, samples: Validated) -> list[dict[str, Any]]:
        """The mistakes in words, in their order."""
        return [line_of(samples, int(i), self.told(int(i))) for i in self.mistakes()]

    def write(self, run_dir: Path, samples: Validated) -> list[Path]:
        """Write evaluation.json, predictions.csv, confusion_matrix.png and mistakes.png into the run's folder.

        Call on one rank.

        Returns:
            The pictures.
        """
        content = scores_by_class(self) | {"mistakes": self.listed(samples)}
        draw: Any = {
            "confusion_matrix.png": self._draw_confusion,
            "mistakes.png": partial(self._draw_mistakes, samples=samples),
        }
        return write_report(run_dir, self, samples, content, draw)

    def _draw_confusion(self, file: Path) -> None:
        from matplotlib.figure import Figure
        from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix

        mistakes = self.mistakes()
        wrong = sum(np.bincount(v[mistakes], minlength=len(self.classes)) for v in (self.labels, self.predicted))
        shown = np.sort(np.argsort(-wrong, kind="stable")[:MATRIX_CLASSES])
        title = f"{len(self.labels):,} validation {self.noun}, {(self.labels == self.predicted).mean():.2%} right"
        title += "\ncolour: share of the true class"
        if len(shown) < len(self.classes):
            title += f"\nthe {len(shown)} of {len(self.classes)} classes with the most mistakes"
        side = 2.5 + 0.45 * len(shown)
        figure = Figure(figsize=(side, side), layout="constrained")
        axes = figure.add_subplot(title=title)
        matrix = confusion_matrix(self.labels, self.predicted, labels=shown)
        names = picture_names(self.classes)
        share = matrix / matrix.sum(1, keepdims=True).clip(1)  # of its class, which may be rare, gives a cell its colour
        display = ConfusionMatrixDisplay(share, display_labels=[names[i] for i in shown])
        display.plot(ax=axes, cmap="Blues", xticks_rotation="vertical", colorbar=False, text_kw={"fontsize": 8})
        for count, text in zip(matrix.flat, display.text_.flat, strict=True):
            text.set_text(str(count))
        figure.savefig(file, dpi=110)

    def _draw_mistakes(self, file: Path, samples: Validated) -> None:
        tiles, names = [], picture_names(self.classes)
        for i in self.mistakes()[:MISTAKES]:
            true, predicted = names[self.labels[i]], names[self.predicted[i]]
            tiles.append((int(i), f"pred {predicted} {self.confidence[i]:.0%}\ntrue {true}"))
        samples.draw(file, f"the most confident of {len(self.mistakes()):,} mistakes", tiles)


@cache
def picture_names(classes: tuple[str, ...]) -> list[str]:
    """Names of classes for a picture, and the fonts to draw them; "class 3" where no font here has the characters."""
    from matplotlib import font_manager, rcParams

    names = [_short(name) for name in classes]
    missing = {character for name in names for character in name if not character.isascii()}
    fonts = ["DejaVu Sans"]  # matplotlib's own, which is in each installation
    installed = (font for font in font_manager.fontManager.ttflist if "Last Resort" not in font.name)  # it has boxes only
    for font in sorted(installed, key=lambda font: font.name not in fonts):
        if not missing:
            break
        has = missing & set(map(chr, font_manager.get_font(font.fname).get_charmap()))
        fonts += [font.name] * bool(has)
        missing -= has
    rcParams["font.family"] = fonts
    if missing:
        hidden = [f"{number} = {name}" for number, name in enumerate(names) if missing & set(name)]
        shown = ", ".join(hidden[:20]) + ", ..." * (len(hidden) > 20)
        print_main(f"no font here can write some classes (fonts-noto-cjk may); pictures number them: {shown}")
    return [f"class {number}" if missing & set(name) else name for number, name in enumerate(names)]


def _short(name: str) -> str:
    """At most 18 characters, without $ (it starts a formula in matplotlib) and without bytes that are not Unicode."""
    name = name.encode("utf-8", "backslashreplace").decode()
    return (name if len(name) <= 18 else name[:17] + "…").replace("$", r"\$")
