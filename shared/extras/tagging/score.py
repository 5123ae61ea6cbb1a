"""What a model says of the words of its validation texts: figures, files and a picture."""

import csv
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from shared.data.labels import in_order
from shared.data.loader import Loader
from shared.data.order import IGNORED, Batch
from shared.evaluation.evaluation import LISTED, gather_rows, row_of
from shared.evaluation.kinds import figures_by_class
from shared.evaluation.pictures import draw_confusion_matrix, picture_names
from shared.extras.tagging.spans import Span, marks_spans, spans_of
from shared.extras.tagging.tagged import TaggedData, TaggedTexts
from shared.process.errors import first_line
from shared.process.printing import print_main
from shared.run.run import Run


@dataclass
class TaggedText:
    """A validation text.

    Attributes:
        where: it is.
        words: its own.
        labels, predicted: the class of each.
        loss: summed over its tokens that count.
        spans, found: those that are marked, and those that the model marks.
    """

    where: str
    words: list[str]
    labels: np.ndarray
    predicted: np.ndarray
    loss: float
    spans: set[Span]
    found: set[Span]

    def shown(self) -> dict[str, str]:
        def said(spans: set[Span]) -> str:
            return " | ".join(f"{k}: {' '.join(self.words[a:b])}" for a, b, k in sorted(spans))

        text = " ".join(self.words)
        return {
            "where": self.where,
            "text": text,
            "label": said(self.spans),
            "predicted": said(self.found),
        }


@dataclass
class Tagging:
    """The result. `figures` has those of each kind of span and of each tag, by file name."""

    classes: tuple[str, ...]
    texts: list[TaggedText]
    summary: dict[str, float]
    headline: str
    figures: dict[str, dict[str, Any]]

    def mistakes(self, _: Any, most: int = LISTED) -> list[dict[str, Any]]:
        """The worst texts: those that lose most of the ones with wrong spans."""
        wrong = [text for text in self.texts if text.spans != text.found]
        return [text.shown() for text in sorted(wrong, key=lambda text: -text.loss)[:most]]

    def write(self, folder: Path, samples: Any) -> list[Path]:
        """Write evaluation.json, predictions.csv and confusion_matrix.png. Call on one rank."""
        report = {name.removeprefix("eval_"): value for name, value in self.summary.items()}
        mistakes = {"texts": len(self.texts), "mistakes": self.mistakes(samples)}
        text = json.dumps(report | self.figures | mistakes, indent=1, ensure_ascii=False)
        (folder / "evaluation.json").write_text(text, "utf-8", "backslashreplace")
        lines = [text.shown() for text in self.texts]
        table = folder / "predictions.csv"
        with table.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            writer = csv.DictWriter(file, lines[0])
            writer.writeheader()
            writer.writerows(lines)
        picture = folder / "confusion_matrix.png"
        labels, predicted = (
            np.concatenate([getattr(text, name) for text in self.texts])
            for name in ("labels", "predicted")
        )
        try:
            names = [*picture_names(self.classes).values()]
            draw_confusion_matrix(picture, self.headline, names, labels, predicted)
        except Exception as error:  # a font: no reason to fail so late
            print_main(f"warning: the evaluation's picture cannot be drawn ({first_line(error)})")
            return []
        return [picture]


def evaluate(
    run: Run,
    model: nn.Module,
    loader: Loader,
    data: TaggedData,
    logits_of: Callable[[Batch], torch.Tensor],
) -> Tagging:
    """What the model says of the validation texts, each word counted once on any world size. Every
    rank calls this.

    Args:
        model: prepared.
        loader: of the validation windows.
        logits_of: batch -> [rows, tokens, classes].
    """
    width = int(data.validation.lengths.max())
    batches = []
    with run.evaluating(model):
        for window in run.read(loader):
            (batch,) = window.micro_batches
            batches.append(of_batch(logits_of(batch), batch["labels"], width))
    return tagging_of(gather_rows(run.accelerator, batches, len(data.validation)), data.validation)


def of_batch(logits: torch.Tensor, labels: torch.Tensor, width: int) -> torch.Tensor:
    """What an evaluation keeps of a batch: [rows, 1 + 2 * width] fp32. IGNORED first in rows that
    do not count; then of each token, padded, the predicted class and the loss.
    """
    losses = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
    values = torch.stack([logits.argmax(-1).float(), losses], 1)[..., :width]
    values = F.pad(values, (0, width - values.shape[-1])).flatten(1)
    counts = (labels != IGNORED).any(1)
    return torch.cat([torch.where(counts, 0.0, float(IGNORED))[:, None], values], 1)


def tagging_of(rows: np.ndarray, samples: TaggedTexts) -> Tagging:
    """The figures of all validation texts. Spans are right if their bounds and kind are.

    Args:
        rows: [windows, 1 + 2 * width], see `of_batch`.
    """
    from sklearn.metrics import precision_recall_fscore_support

    classes = samples.labels.classes
    marked = marks_spans(classes)
    predicted, losses = rows[:, 1:].reshape(len(rows), 2, -1).transpose(1, 0, 2)
    texts = []
    for windows in samples.texts():
        places = [(index, samples.read_at(index)) for index in windows]
        labels = np.concatenate([samples.tags(index) for index in windows])
        said = np.concatenate([predicted[index, at] for index, at in places]).astype(np.int64)
        words = [word for index in windows for word in samples.line("words", index)]
        spans, found = (
            spans_of([classes[number] for number in numbers], marked=marked)
            for numbers in (labels, said)
        )
        where = samples.line("place", windows[0])
        loss = float(losses[windows].sum())
        texts.append(TaggedText(where, words, labels, said, loss, spans, found))

    # each span that is marked or found: its kind on either side, or none
    kinds = in_order({span[2] for text in texts for span in text.spans | text.found})
    number = {kind: n for n, kind in enumerate(kinds)}
    pairs = [
        [number[span[2]] if span in side else len(kinds) for side in (text.spans, text.found)]
        for text in texts
        for span in text.spans | text.found
    ]
    of_spans = np.array(pairs, np.int64).reshape(-1, 2).T
    by_kind = figures_by_class(of_spans[0], of_spans[1], len(kinds)) if kinds else {}
    values = (0.0, 0.0, 0.0)
    if kinds:
        values = precision_recall_fscore_support(
            *of_spans, labels=range(len(kinds)), average="micro", zero_division=0.0
        )[:3]
    summary = {"eval_loss": losses.sum() / samples.num_targets(np.arange(len(samples)))}
    names = ("eval_precision", "eval_recall", "eval_f1")
    summary |= zip(names, values, strict=True)
    summary["eval_macro_f1"] = by_kind["f1"].mean() if kinds else 0.0
    labels, said = (
        np.concatenate([getattr(text, name) for text in texts]) for name in ("labels", "predicted")
    )
    by_tag = figures_by_class(labels, said, len(classes))
    summary["eval_accuracy"] = (labels == said).mean()
    summary["eval_tag_macro_f1"] = by_tag["f1"][by_tag["support"] > 0].mean()
    summary = {name: float(value) for name, value in summary.items()}
    figures = {
        title: {name: {k: float(v) for k, v in row_of(of, n).items()} for n, name in enumerate(all)}
        for title, of, all in (("spans", by_kind, kinds), ("tags", by_tag, classes))
    }
    headline = f"F1 of spans {summary['eval_f1']:.4f}, {summary['eval_accuracy']:.2%} of "
    headline += f"{len(labels):,} validation words are right"
    return Tagging(classes, texts, summary, headline, figures)
