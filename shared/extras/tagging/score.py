"""What a model says of the words of its validation texts."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from shared.data.labels import in_order
from shared.data.loader import Loader
from shared.data.order import IGNORED, Batch
from shared.evaluation.evaluation import Evaluation, gather_rows, row_of
from shared.evaluation.kinds import figures_by_class
from shared.extras.tagging.spans import marks_spans, spans_of
from shared.extras.tagging.tagged import TaggedData, TaggedTexts
from shared.run.run import Run


def evaluate(
    run: Run,
    model: nn.Module,
    loader: Loader,
    data: TaggedData,
    logits_of: Callable[[Batch], torch.Tensor],
) -> Evaluation:
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
    rows = gather_rows(run.accelerator, batches, len(data.validation))
    return evaluation_of(rows, data.validation)


def of_batch(logits: torch.Tensor, labels: torch.Tensor, width: int) -> torch.Tensor:
    """What an evaluation keeps of a batch: [rows, 1 + 2 * width] fp32. IGNORED first in rows that
    do not count; then of each token, padded, the predicted class and the loss.
    """
    losses = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
    values = torch.stack([logits.argmax(-1).float(), losses], 1)[..., :width]
    values = F.pad(values, (0, width - values.shape[-1])).flatten(1)
    counts = (labels != IGNORED).any(1)
    return torch.cat([torch.where(counts, 0.0, float(IGNORED))[:, None], values], 1)


def evaluation_of(rows: np.ndarray, samples: TaggedTexts) -> Evaluation:
    """The figures of all validation texts. Spans are right if their bounds and kind are.

    Args:
        rows: [windows, 1 + 2 * width], see `of_batch`.
    """
    classes = samples.labels.classes
    marked = marks_spans(classes)
    predicted, losses = rows[:, 1:].reshape(len(rows), 2, -1).transpose(1, 0, 2)
    labels, said, wrong = [], [], {}
    columns: dict[str, list[str]] = {"where": [], "text": [], "label": [], "predicted": []}
    right, real, found = Counter[str](), Counter[str](), Counter[str]()  # spans of each kind
    for number, windows in enumerate(samples.texts()):
        at = [(index, samples.read_at(index)) for index in windows]
        labels.append(np.concatenate([samples.tags(index) for index in windows]))
        said.append(np.concatenate([predicted[place] for place in at]).astype(np.int64))
        words = [word for index in windows for word in samples.line("words", index)]
        sides = []
        for numbers, name, kinds in ((labels, "label", real), (said, "predicted", found)):
            sides.append(spans_of([classes[n] for n in numbers[-1]], marked=marked))
            spans = sorted(sides[-1])
            kinds.update(kind for _, _, kind in spans)
            columns[name].append(" | ".join(f"{k}: {' '.join(words[a:b])}" for a, b, k in spans))
        columns["where"].append(samples.line("place", windows[0]))
        columns["text"].append(" ".join(words))
        right.update(kind for _, _, kind in sides[0] & sides[1])
        if sides[0] != sides[1]:
            wrong[number] = losses[windows].sum()

    names = in_order(real | found)
    by_kind = {kind: _figures(right[kind], found[kind], real[kind]) for kind in names}
    whole = _figures(right.total(), found.total(), real.total())
    of_words, of_said = np.concatenate(labels), np.concatenate(said)
    by_tag = figures_by_class(of_words, of_said, len(classes))
    summary = {
        "loss": losses.sum() / samples.num_targets(np.arange(len(samples))),
        **{name: whole[name] for name in ("precision", "recall", "f1")},
        "macro_f1": sum(of["f1"] for of in by_kind.values()) / max(len(names), 1),
        "accuracy": (of_words == of_said).mean(),
        "tag_macro_f1": by_tag["f1"][by_tag["support"] > 0].mean(),
    }
    headline = f"F1 of spans {summary['f1']:.4f}, {summary['accuracy']:.2%} of "
    return Evaluation(
        noun="texts",
        classes=classes,
        labels=of_words,
        predicted=of_said,
        summary={f"eval_{name}": float(value) for name, value in summary.items()},
        headline=f"{headline}{len(of_words):,} validation words are right",
        columns=columns,
        worst=np.array(sorted(wrong, key=wrong.__getitem__, reverse=True), np.int64),
        figures={
            "spans": by_kind,
            "tags": {name: row_of(by_tag, number) for number, name in enumerate(classes)},
        },
    )


def _figures(right: int, found: int, real: int) -> dict[str, Any]:
    return {
        "precision": right / max(found, 1),
        "recall": right / max(real, 1),
        "f1": 2 * right / max(found + real, 1),
        "support": real,
    }
