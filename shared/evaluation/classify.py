"""An evaluation of a classifier in training, and what it leaves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared.data.labels import LabelledData
from shared.data.loader import Loader
from shared.data.order import Batch
from shared.evaluation.evaluation import SHOWN, Evaluation, of_batch
from shared.evaluation.kinds import evaluation_of
from shared.run.run import Run


def evaluate(
    run: Run,
    model: nn.Module,
    loader: Loader,
    data: LabelledData,
    logits_of: Callable[[Batch], torch.Tensor],
) -> Evaluation:
    """What the model says of the validation samples, each counted once on any world size. Every
    rank calls this.

    Args:
        model: prepared.
        loader: of the validation samples, one micro-batch a window.
        logits_of: batch -> [rows, classes].
    """
    batches = []
    with run.evaluating(model):
        for window in run.read(loader):
            (batch,) = window.micro_batches
            batches.append(of_batch(logits_of(batch), batch["labels"]))
    kept = getattr(run.unwrap(model).config, "thresholds", None)
    if run.total_steps:  # only a test, which must not choose them, keeps them
        kept = None
    return evaluation_of(run.accelerator, batches, data, run.unit, kept)


def report(run: Run, evaluation: Evaluation, samples: Any, *, as_table: bool = False) -> None:
    """Write evaluation.json, predictions.csv and pictures, and give the tracker the pictures. Main
    rank.

    Args:
        samples: the validation samples, see `Evaluation.write`.
        as_table: give the tracker a table of the worst mistakes, too.
    """
    for picture in evaluation.write(run.dir, samples):
        run.logger.tracker.log_picture(picture.stem, picture)
    if as_table:
        mistakes = evaluation.mistakes(samples, SHOWN)
        names = [*mistakes[0]] if mistakes else []
        rows = [[*map(str, row.values())] for row in mistakes]
        run.logger.tracker.log_table("mistakes", names, rows)
