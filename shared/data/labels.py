"""Labels as people write them: classes, several classes a sample, or numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from shared.data import records
from shared.data.order import IGNORED, permute
from shared.process.errors import ConfigError

EXPECTED = "expected a name or a number; --problem_type multi_label takes lists and name|name"


@dataclass(frozen=True)
class Labels:
    """The labels of some samples.

    Args:
        problem_type: single_label, multi_label or regression.
        classes: names, by class number; a regression has one.
        values: [n] int64 class numbers; [n, classes] uint8 with 1 for each class of a sample; or
            [n] fp32 numbers.
    """

    problem_type: str
    classes: tuple[str, ...]
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int) -> np.ndarray:
        """What the row of a sample holds: a class number, a number, or [classes] fp32."""
        label = np.array(self.values[number])
        return label.astype(np.float32) if self.problem_type == "multi_label" else label

    def take(self, numbers: np.ndarray) -> Labels:
        """The labels of these samples."""
        return replace(self, values=self.values[numbers])

    def counts(self) -> np.ndarray:
        """How many samples have each class, [classes]; of a regression [0]."""
        if self.problem_type == "single_label":
            return np.bincount(self.values, minlength=len(self.classes))
        return (
            self.values.sum(axis=0, dtype=np.int64)
            if self.values.ndim == 2
            else np.zeros(0, np.int64)
        )

    def require_trained(self, name: str, noun: str) -> None:
        """Refuse to train on these samples if a class has none, or if there is only one class.

        Args:
            name: of the data; `noun`: of a sample.
        """
        counts = self.counts()
        if not counts.all():
            missing = self.classes[int(counts.argmin())]
            raise ConfigError(
                f"{name}: the class {missing!r} has no {noun} to train on, only to validate on"
            )
        if len(self.classes) < 2 and self.problem_type != "regression":
            raise ConfigError(
                f"{name}: {f'only one class, {self.classes[0]!r}' if self.classes else 'no label'}"
            )

    def hold_out(self, percent: float) -> np.ndarray:
        """Which samples to validate on, [n] bool: of every class the same share, at least one
        sample, and never all.

        A sample with several labels counts for its rarest. The choice depends only on the labels
        and their order, not on a seed.
        """
        labels = self.values
        if self.problem_type == "multi_label":
            labels = rarest(labels)
        elif self.problem_type == "regression":
            labels = np.zeros(len(labels), np.int64)
        held_out = np.zeros(len(labels), dtype=bool)
        order = np.argsort(labels, kind="stable")
        classes, starts = np.unique(labels[order], return_index=True)
        for label, members in zip(classes, np.split(order, starts[1:]), strict=True):
            count = min(max(1, round(len(members) * percent / 100)), len(members) - 1)
            if count:
                held_out[members[permute(np.arange(count), len(members), (int(label),))]] = True
        return held_out

    def class_weights(
        self, sources: dict[str, int], mix_weights: tuple[float, ...]
    ) -> torch.Tensor:
        """[classes] fp32, inversely proportional to the class frequency; their mean over the
        samples is 1.

        With several labels a sample, they are those of the samples that have the class: as if as
        many had it as had not. In a mixture, a sample counts as often as it is drawn.

        Args:
            sources: samples of each source of a mixture, in this order; `mix_weights`: their
                shares, or none.
        """
        often = np.ones(len(self))
        if mix_weights:
            sizes = np.array([*sources.values()])
            often = np.repeat(np.array(mix_weights) / sum(mix_weights) * len(self) / sizes, sizes)
        if self.problem_type == "multi_label":
            counts = often @ self.values
            weights = np.maximum(len(self) - counts, 1) / counts
        else:
            classes = len(self.classes)
            weights = len(self) / (classes * np.bincount(self.values, often, classes))
        return torch.from_numpy(weights.astype(np.float32))

    def numbered_as(self, classes: tuple[str, ...]) -> Labels:
        """The same labels with class numbers by the order of `classes`: the same names, and perhaps
        more.
        """
        if self.problem_type == "regression":
            return self
        number = np.array([classes.index(name) for name in self.classes])
        if self.problem_type == "single_label":
            return replace(self, classes=classes, values=number[self.values])
        values = np.zeros((len(self), len(classes)), np.uint8)
        values[:, number] = self.values
        return replace(self, classes=classes, values=values)


@dataclass(frozen=True)
class LabelledData:
    """Training and validation samples of a config.

    Both have `labels`, and `sources`: how many samples are of each source of a mixture.
    """

    train: Any
    validation: Any
    identity: str  # changes if the samples or their labels change
    about: str  # a description in one line

    @property
    def classes(self) -> tuple[str, ...]:
        """Names, by class number; of a regression one."""
        return self.train.labels.classes

    @property
    def problem_type(self) -> str:
        """single_label, multi_label or regression."""
        return self.train.labels.problem_type

    def class_weights(self, mix_weights: tuple[float, ...]) -> torch.Tensor:
        """[classes] fp32: see `Labels.class_weights`."""
        return self.train.labels.class_weights(self.train.sources, mix_weights)

    def numbered_as(self, classes: tuple[str, ...]) -> Self:
        """The same data with class numbers by the order of `classes`: the same names in another
        order.
        """
        train = copy.copy(self.train)
        validation = copy.copy(self.validation)
        train.labels = self.train.labels.numbered_as(classes)
        validation.labels = self.validation.labels.numbered_as(classes)
        return replace(self, train=train, validation=validation)


def read_labels(
    raw: Sequence[Any],
    problem_type: str | None,
    where: Callable[[int], str],
    trained: int | None = None,
) -> Labels:
    """What the data say of each sample, as labels.

    Args:
        raw: a name, a number or a list of such for each sample.
        problem_type: None: single_label, and a label that looks like several is refused.
        where: gives the place of a sample, for messages.
        trained: the first so many samples are trained on, and labels of the others must be among
            theirs. None: all samples make the classes.

    Raises:
        ConfigError: a label that is none, with its place.
    """

    labels: list[Any] = []
    for number, label in enumerate(raw):
        try:
            is_number = problem_type == "regression"
            labels.append(_number(label) if is_number else _names(label, problem_type))
        except ValueError as error:
            raise ConfigError(f"{where(number)}: {error}") from None
    if problem_type == "regression":
        return Labels(problem_type, ("LABEL_0",), np.array(labels, np.float32))
    names: list[tuple[str, ...]] = labels
    classes = in_order({name for of_one in names[:trained] for name in of_one})
    number_of = {name: number for number, name in enumerate(classes)}
    for number in range(len(names) if trained is None else trained, len(names)):
        if unknown := [name for name in names[number] if name not in number_of]:
            known = ", ".join(classes[:10]) + ", ..." * (len(classes) > 10)
            raise ConfigError(
                f"{where(number)}: the label {unknown[0]!r} is none of the training data ({known})"
            )
    if problem_type == "multi_label":
        values = np.zeros((len(names), len(classes)), np.uint8)
        for row, of_one in zip(values, names, strict=True):
            row[[number_of[name] for name in of_one]] = 1
    else:
        values = np.array([number_of[name] for (name,) in names], np.int64)
    return Labels(problem_type or "single_label", tuple(classes), values)


def _names(label: Any, problem_type: str | None) -> tuple[str, ...]:
    """The names of a sample's classes, sorted; one unless `problem_type` is multi_label.

    Raises:
        ValueError: it is no label.
    """
    label = label.strip() if isinstance(label, str) else label  # CSV keeps the space after a comma
    names = [label]
    if problem_type == "multi_label":
        if isinstance(label, str):
            if set(",;") & set(label) and "|" not in label:
                raise ValueError(
                    f"the label is {label!r}: write name|name for several, and a list "
                    "for one with a comma"
                )
            label = label.split("|") if label else []
        names = label if isinstance(label, list) else [label]
        names = [name.strip() if isinstance(name, str) else name for name in names]
    elif problem_type is None and isinstance(label, str) and "|" in label:
        raise ValueError(
            f"the label is {label!r}: for several labels add --problem_type "
            "multi_label, for one of this name --problem_type single_label"
        )
    for name in names:
        if not isinstance(name, str | int) or name == "":
            raise ValueError(f"the label is {records.kind(name)}, {EXPECTED}")
    return tuple(sorted({str(name) for name in names}))


def _number(label: Any) -> float:
    """The label of a regression.

    Raises:
        ValueError: it is no number, or one that marks rows without a label.
    """
    number = _as_number(label)
    if number is None or not math.isfinite(number) or number == IGNORED:
        raise ValueError(
            f"the label is {label!r}, expected a number, not {IGNORED}: it marks rows without one"
        )
    return number


def _as_number(label: Any) -> float | None:
    try:
        return None if isinstance(label, bool) else float(label)
    except (TypeError, ValueError):
        return None


def problem_type_of(raw: Sequence[Any]) -> str | None:
    """What labels look like: multi_label for lists, regression for numbers with fractions, else
    None.
    """
    if any(isinstance(label, list) for label in raw):
        return "multi_label"
    numbers: list[Any] = [_as_number(label) for label in raw]
    if None not in numbers and any(number % 1 > 0 for number in numbers):
        return "regression"
    return None


def in_order(classes: Iterable[str]) -> list[str]:
    """The names of classes, numbers first and by value."""
    return sorted(
        classes, key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name)
    )


def rarest(hot: np.ndarray) -> np.ndarray:
    """The rarest class of each sample, by which samples with several labels are held out.

    Args:
        hot: [n, classes], 1 for each class that a sample has.

    Returns:
        [n] int64; the number of classes for samples without a label.
    """
    order = np.argsort(hot.sum(axis=0), kind="stable")
    return np.where(hot.any(axis=1), order[hot[:, order].argmax(axis=1)], hot.shape[1])
