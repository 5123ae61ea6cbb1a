"""Labels of classes as people write them, and which samples to validate on by them."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from shared.data import records
from shared.data.order import permute
from shared.process.errors import ConfigError
from shared.process.printing import note


def in_order(classes: Iterable[str]) -> list[str]:
    """The names of classes, numbers first and by value."""
    return sorted(classes, key=lambda name: (0, int(name), name) if name.isdecimal() else (1, 0, name))


def balanced_weights(
    labels: np.ndarray, classes: int, sources: dict[str, int], mix_weights: tuple[float, ...]
) -> np.ndarray:
    """[classes] fp32, inversely proportional to the class frequency; their mean over the samples is 1.

    With several labels a sample, they are those of the samples that have the class: as if as many had it as had not. In a
    mixture, a sample counts as often as it is drawn.

    Args:
        labels: [n] class numbers, or [n, classes] with 1 for each class that a sample has.
        sources: samples of each source of a mixture, in this order; `mix_weights`: their shares, or none.
    """
    often = np.ones(len(labels))
    if mix_weights:
        sizes = np.array([*sources.values()])
        often = np.repeat(np.array(mix_weights) / sum(mix_weights) * len(labels) / sizes, sizes)
    if labels.ndim == 2:
        counts = often @ labels
        return (np.maximum(len(labels) - counts, 1) / counts).astype(np.float32)
    return (len(labels) / (classes * np.bincount(labels, often, classes))).astype(np.float32)


def label_of(value: Any, problem_type: str | None, where: str, name_of: Callable[[Any], str] = str) -> str | tuple[str, ...]:
    """The name of a sample's class; of multi_label data the names of its classes, sorted, perhaps none.

    Args:
        problem_type: None: single_label, unless the label looks like several.

    Raises:
        ConfigError: it is none.
    """
    expected = "expected a name or a number"
    value = value.strip() if isinstance(value, str) else value  # CSV keeps the space after a comma
    if problem_type == "multi_label":
        if isinstance(value, str) and set(",;") & set(value) and "|" not in value:
            raise ConfigError(
                f"{where}: the label is {value!r}: write name|name for several, and a list for one with a comma"
            )
        names = value.split("|") if isinstance(value, str) and value else [] if value == "" else value
        names = [names] if isinstance(names, int) else names
        if not isinstance(names, list):
            raise ConfigError(f"{where}: the label is {records.kind(value)}, expected a list of names, or text: name|name")
        names = [name.strip() if isinstance(name, str) else name for name in names]
        for name in names:
            if not isinstance(name, str | int) or name == "":
                raise ConfigError(f"{where}: one of the labels is {records.kind(name)}, {expected}")
        return tuple(sorted({str(name_of(name)) for name in names}))
    if isinstance(value, list):
        raise ConfigError(f"{where}: the label is a list, {expected}; --problem_type multi_label takes lists")
    if not isinstance(value, str | int) or value == "":
        several = "; samples with several labels, or none: --problem_type multi_label" * (
            value == "" and problem_type is None
        )
        raise ConfigError(f"{where}: the label is {records.kind(value)}, {expected}{several}")
    if isinstance(value, str) and "|" in value and problem_type is None:
        raise ConfigError(
            f"{where}: the label is {value!r}: for several labels add --problem_type multi_label, for one of this name "
            "--problem_type single_label"
        )
    return str(name_of(value))


def warn_of_joined(classes: Collection[str], problem_type: str) -> None:
    """Note classes whose names are those of other classes, joined: several labels of a sample that were not told apart."""
    for separator in (" ", ",", ";", "/", "+", "&"):
        parts = {name: [part.strip() for part in name.split(separator)] for name in classes if separator in name}
        joined = [name for name, some in parts.items() if all(part in classes for part in some)]
        if len(joined) > 1:
            add = "" if problem_type == "multi_label" else " and add --problem_type multi_label"
            note(
                f"warning: {len(joined)} classes, such as {joined[0]!r}, look like several labels that are joined: write "
                f"{'|'.join(parts[joined[0]])}{add}"
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


def hold_out(labels: np.ndarray, percent: float) -> np.ndarray:
    """Which samples to validate on: the same share of every class, at least one sample, and never all samples of a class.

    The choice depends only on the labels and their order, not on a seed.

    Args:
        labels: [n] int64, class numbers.
        percent: per cent of each class.

    Returns:
        [n] bool.
    """
    held_out = np.zeros(len(labels), dtype=bool)
    order = np.argsort(labels, kind="stable")
    classes, starts = np.unique(labels[order], return_index=True)
    for label, members in zip(classes, np.split(order, starts[1:]), strict=True):
        count = min(max(1, round(len(members) * percent / 100)), len(members) - 1)
        chosen = permute(np.arange(count), len(members), (int(label),)) if count else np.zeros(0, dtype=np.int64)
        held_out[members[chosen]] = True
    return held_out
