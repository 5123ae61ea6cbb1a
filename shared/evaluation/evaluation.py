"""What a classifier says of its validation samples: figures, files and pictures."""

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch.nn import functional as F

from shared.data.order import IGNORED
from shared.evaluation.pictures import draw_confusion_matrix, picture_names
from shared.process import ranks
from shared.process.errors import first_line
from shared.process.printing import print_main

SHOWN = 32  # mistakes in the picture, and in the tracker's table, at most
LISTED = 1000  # mistakes in evaluation.json, at most


@dataclass
class Evaluation:
    """The result. kinds.py makes it, for each kind of label.

    Attributes:
        noun: what the samples are.
        classes: names by class number.
        labels, predicted: one entry a sample, in the order of the data set; or a word.
        summary: the figures, under names that begin with `eval_`.
        headline: the result in a sentence.
        columns: what predictions.csv and evaluation.json say of each sample.
        worst: the numbers of mistaken samples, the worst first.
        scores: more columns of predictions.csv.
        by_class: figures of each class, [classes].
        figures: more of them for evaluation.json, by name.
        thresholds: with several labels a sample, from which probability each class is a yes.
    """

    noun: str
    classes: tuple[str, ...]
    labels: np.ndarray
    predicted: np.ndarray
    summary: dict[str, float]
    headline: str
    columns: dict[str, Any]
    worst: np.ndarray
    scores: dict[str, Any] = field(default_factory=dict)
    by_class: dict[str, np.ndarray] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    thresholds: dict[str, float] | None = None

    def mistakes(self, samples: Any, most: int = LISTED) -> list[dict[str, Any]]:
        """The worst mistakes with the records of their samples."""
        return [
            samples.shown(number) | row_of(self.columns, number) for number in self.worst[:most]
        ]

    def write(self, folder: Path, samples: Any) -> list[Path]:
        """Write evaluation.json, predictions.csv and pictures into a folder. Call on one rank.

        Args:
            samples: the validation samples. By number, `shown` gives where one is from and its
                record, `position` its place in the data; `draw(file, title, [(number, text)])`
                draws some if they can be drawn.

        Returns:
            The pictures that were drawn.
        """
        report: dict[str, Any] = {name.removeprefix("eval_"): x for name, x in self.summary.items()}
        count = len(self.columns["label"])
        report |= self.figures | {self.noun: count}
        if self.by_class:
            report["classes"] = {
                name: row_of(self.by_class, number) for number, name in enumerate(self.classes)
            }
            report["num_mistakes"] = int((self.labels != self.predicted).sum())
        report["mistakes"] = self.mistakes(samples)
        text = json.dumps(report, indent=1, ensure_ascii=False, default=int)  # int: of NumPy
        # Names of files may be no text: backslashreplace.
        (folder / "evaluation.json").write_text(text, "utf-8", "backslashreplace")

        order = sorted(range(count), key=samples.position)
        columns = self.columns | self.scores
        lines = [samples.shown(number) | row_of(columns, number) for number in order]
        names = dict.fromkeys(name for line in lines for name in line)
        table = folder / "predictions.csv"
        with table.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(lines)
        try:
            return self._draw(folder, samples)
        except Exception as error:  # a font, or an image that is gone: no reason to fail so late
            print_main(f"warning: the evaluation's pictures cannot be drawn ({first_line(error)})")
            return []

    def _draw(self, folder: Path, samples: Any) -> list[Path]:
        """Draw confusion_matrix.png, with one label a sample, and mistakes.png."""
        pictures = []
        shown = picture_names(self.classes)
        if "eval_accuracy" in self.summary:
            pictures.append(folder / "confusion_matrix.png")
            names = list(shown.values())
            draw_confusion_matrix(pictures[0], self.headline, names, self.labels, self.predicted)
        tiles = []
        for number in self.worst[:SHOWN]:
            texts = row_of(self.columns, number).values()
            tiles.append((number, "\n".join(str(shown.get(text, text)) for text in texts)))
        if tiles:
            pictures.append(folder / "mistakes.png")
            samples.draw(pictures[-1], f"the worst mistakes: {', '.join(self.columns)}", tiles)
        return [file for file in pictures if file.exists()]

    def update(self, config: Any) -> None:
        """Put the thresholds into a model's config, in place of those of an earlier training."""
        config.__dict__.pop("thresholds", None)
        if self.thresholds:
            config.thresholds = self.thresholds
            config.problem_type = "multi_label_classification"  # a probability for each class

    def usage(self, load: str) -> str:
        """The lines of the model card that use the pipeline which `load` makes."""
        lines = f"from transformers import pipeline\n\nclassify = {load}"
        if not self.thresholds:
            return lines
        example = "image.jpg" if self.noun == "images" else "a text"
        return (
            f"{lines}\n"
            "thresholds = classify.model.config.thresholds"
            f"  # of each class: best F1 on the validation {self.noun}\n"
            f'answers = classify("{example}", top_k=len(thresholds))\n'
            'labels = [a["label"] for a in answers if a["score"] >= thresholds[a["label"]]]'
        )


def row_of(columns: dict[str, Any], number: int) -> dict[str, Any]:
    """One entry of each column."""
    return {name: column[number] for name, column in columns.items()}


def of_batch(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What an evaluation keeps of a batch, [batch, values] fp32.

    One label a sample: label, predicted class, its probability, loss, classes that scored above
    the true one. (Not all scores: there may be thousands of classes.)
    Several labels, or a number: labels, logits.

    Args:
        logits: [batch, classes].
        labels: [batch] class numbers; [batch, classes] fp32; or [batch] fp32. -100 in rows that
            do not count.
    """
    logits = logits.float()
    if labels.is_floating_point():
        return torch.cat([labels.float().view(len(labels), -1), logits], dim=1)
    valid = labels.clamp(min=0)
    confidence, predicted = logits.softmax(1).max(1)
    loss = F.cross_entropy(logits, valid, reduction="none")
    above = (logits > logits.gather(1, valid[:, None])).sum(1)
    return torch.stack([labels.float(), predicted.float(), confidence, loss, above.float()], dim=1)


def gather_rows(
    accelerator: Accelerator,
    batches: list[torch.Tensor],
    num_samples: int,
) -> np.ndarray:
    """What all ranks keep, each sample once, in their order: [num_samples, values] fp64.

    Every rank calls this.

    Args:
        batches: this rank's, of each window in order, [per device, values]; all ranks have
            equally many. The first value is -100 in rows that do not count.
        num_samples: size of the data set; the rest fills the last window.
    """
    mine = torch.stack(batches)  # [windows, per device, values]
    everything = accelerator.gather(mine).view(accelerator.num_processes, *mine.shape)
    sharing = accelerator.num_processes // ranks.data_parallel_size()  # neighbours read the same
    everything = everything[::sharing]
    rows = everything.transpose(0, 1).flatten(0, 2).double().cpu().numpy()
    rows = rows[rows[:, 0] != IGNORED]
    assert len(rows) == num_samples
    return rows
