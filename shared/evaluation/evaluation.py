"""What a classifier says of its validation samples: figures, files and pictures."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from accelerate import Accelerator

from shared.data.order import IGNORED
from shared.evaluation.pictures import picture_names
from shared.process import ranks
from shared.process.errors import first_line
from shared.process.printing import print_main

SHOWN = 32  # mistakes in the picture, and in the tracker's table, at most
LISTED = 1000  # mistakes in evaluation.json, at most


class Validated(Protocol):
    """The samples that were validated on."""

    def shown(self, number: int) -> dict[str, Any]:
        """Where a sample is from, and its record, for evaluation.json and predictions.csv."""

    def position(self, number: int) -> int:
        """The sample's place in the data, which may be sorted by length here."""

    def draw(self, file: Path, title: str, tiles: list[tuple[int, str]]) -> None:
        """Draw samples, each with its text, if they can be drawn."""


class Evaluation:
    """The base of `OneLabel`, `SeveralLabels` and `Numbers`, which add what their kind of label has.

    Attributes:
        labels, predicted: one entry a sample, in the order of the data set.
        losses: [samples].
        classes: names by class number.
        noun: what the samples are.
    """

    PICTURE: ClassVar[str]  # file of what `figure` draws
    labels: np.ndarray
    predicted: np.ndarray
    losses: np.ndarray

    def __init__(self, rows: np.ndarray, classes: tuple[str, ...], noun: str) -> None:
        """`rows` are what `gather_rows` gives, which each kind reads in its own way."""
        self.classes, self.noun = classes, noun

    @staticmethod
    def of_batch(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """What an evaluation keeps of a batch, [batch, values] fp32. The first value is -100 in rows that only fill it."""
        raise NotImplementedError

    @classmethod
    def gather(
        cls,
        accelerator: Accelerator,
        batches: list[torch.Tensor],
        num_samples: int,
        classes: tuple[str, ...],
        noun: str = "images",
    ) -> Self:
        """The evaluation of what all ranks kept. Every rank calls this and gets all; see `gather_rows`."""
        return cls(gather_rows(accelerator, batches, num_samples), classes, noun)

    def summary(self) -> dict[str, float]:
        """The figures, under names that begin with `eval_`."""
        raise NotImplementedError

    def headline(self) -> str:
        """The result in a sentence."""
        raise NotImplementedError

    def per_class(self) -> dict[str, np.ndarray]:
        """Figures of each class, [classes]; 0 where nothing defines them."""
        return {}

    def line(self, sample: int) -> dict[str, Any]:
        """The prediction of a sample, for predictions.csv."""
        raise NotImplementedError

    def mistakes(self) -> list[tuple[int, dict[str, Any]]]:
        """(sample, what evaluation.json says of it), the worst first, at most `LISTED`."""
        raise NotImplementedError

    def caption(self, mistake: dict[str, Any], names: dict[str, str]) -> str:
        """What a picture says of one of the `mistakes`; `names`: see `picture_names`."""
        return ""

    def figure(self) -> Any:
        """A matplotlib figure of all predictions."""
        raise NotImplementedError

    def for_config(self) -> dict[str, Any]:
        """What final/config.json needs besides the names of the classes."""
        return {}

    def usage(self, load: str) -> str:
        """The lines of the model card that use the pipeline which `load` makes."""
        return f"from transformers import pipeline\n\nclassify = {load}"

    def for_model(self, config: Any, *, trained: bool) -> Self:
        """This evaluation as the model's `config` wants it; a model that was not `trained` keeps its thresholds."""
        config.__dict__.pop("thresholds", None)  # of several labels that it was trained for before
        return self

    def records(self, samples: Validated) -> list[dict[str, Any]]:
        """The mistakes with the records of their samples."""
        return [record_of(samples, sample, mistake) for sample, mistake in self.mistakes()]

    def write(self, run_dir: Path, samples: Validated) -> list[Path]:
        """Write evaluation.json, predictions.csv and the pictures into the run's folder. Call on one rank.

        Returns:
            The pictures that were drawn.
        """
        content: dict[str, Any] = {key.removeprefix("eval_"): value for key, value in self.summary().items()}
        content[self.noun] = len(self.labels)
        if by_class := {name: values.tolist() for name, values in self.per_class().items()}:
            content["classes"] = {c: {key: by_class[key][i] for key in by_class} for i, c in enumerate(self.classes)}
            content["num_mistakes"] = self.num_mistakes()
        content["mistakes"] = self.records(samples)
        text = json.dumps(content, indent=1, ensure_ascii=False)  # file names may be no text
        (run_dir / "evaluation.json").write_text(text, encoding="utf-8", errors="backslashreplace")
        table = run_dir / "predictions.csv"
        with table.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            order = sorted(range(len(self.labels)), key=samples.position)
            lines = [record_of(samples, sample, self.line(sample)) for sample in order]
            writer = csv.DictWriter(file, list(dict.fromkeys(name for line in lines for name in line)))
            writer.writeheader()
            writer.writerows(lines)
        pictures: dict[Path, Callable[[Path], None]] = {
            run_dir / self.PICTURE: lambda file: self.figure().savefig(file, dpi=110),
            run_dir / "mistakes.png": lambda file: self._draw_mistakes(file, samples),
        }
        for path, draw in pictures.items():
            path.unlink(missing_ok=True)  # of an earlier evaluation
            try:
                draw(path)
            except Exception as error:  # a font or an image must not cost the model
                print_main(f"warning: a picture of the evaluation cannot be drawn ({first_line(error)})")
        return [path for path in pictures if path.exists()]

    def num_mistakes(self) -> int:
        return int((self.labels != self.predicted).sum())

    def _draw_mistakes(self, file: Path, samples: Validated) -> None:
        names = dict(zip(self.classes, picture_names(self.classes), strict=True))
        tiles = [(sample, self.caption(mistake, names)) for sample, mistake in self.mistakes()[:SHOWN]]
        samples.draw(file, f"the most confident of {self.num_mistakes():,} mistakes", tiles)


def gather_rows(accelerator: Accelerator, batches: list[torch.Tensor], num_samples: int) -> np.ndarray:
    """What all ranks keep, each sample once, in their order: [num_samples, values] fp64. Every rank calls this.

    Args:
        batches: this rank's, of each window in order, [per device, values]; all ranks have equally many. The first value is
            -100 in rows that do not count.
        num_samples: size of the data set; the rest fills the last window.
    """
    mine = torch.stack(batches)  # [windows, per device, values]
    everything = accelerator.gather(mine).view(accelerator.num_processes, *mine.shape)
    everything = everything[:: accelerator.num_processes // ranks.data_parallel_size()]  # neighbours read the same
    rows = everything.transpose(0, 1).flatten(0, 2).double().cpu().numpy()
    rows = rows[rows[:, 0] != IGNORED]
    assert len(rows) == num_samples
    return rows


def record_of(samples: Validated, number: int, prediction: dict[str, Any]) -> dict[str, Any]:
    """A sample's record, and its `prediction`. A column of the data with the same name gets another one."""
    record = samples.shown(number)
    return {f"{name} (data)" if name in prediction else name: value for name, value in record.items()} | prediction
