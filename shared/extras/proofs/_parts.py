"""A micro-batch as its samples: which labels are whose, and the batch with the labels of some."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from shared.data.order import IGNORED, Batch


@dataclass
class Part:
    """A sample in a micro-batch.

    Args:
        sample: its index.
        name: for people: the index, and the number of its answer if it has several.
        keep: bool as `owners` of the batch: what is this sample's.
        targets: that the loss counts.
    """

    sample: int
    name: str
    keep: torch.Tensor
    targets: int


def split(batch: Batch, indices: Sequence[int], samples: Any) -> list[Part]:
    """The samples of a micro-batch that have targets.

    Args:
        indices: of its rows, as `Step.indices` has them.
        samples: of the loader; `packing.Packed` if rows hold several.
    """
    owners, names = _owners(batch, indices, samples)
    counted = _counted(batch["labels"], owners)
    parts = []
    for owner in owners[counted].unique().tolist():
        keep = owners == owner
        if owner >= 0:
            sample, name = names.get(owner, (owner, str(owner)))
            targets = 1 if "lengths" in batch else int((keep & counted).sum())
            parts.append(Part(sample, name, keep, targets))
    return parts


def _owners(
    batch: Batch, indices: Sequence[int], samples: Any
) -> tuple[torch.Tensor, dict[int, tuple[int, str]]]:
    """(whose each label is, -1 for none: [rows, seq] where rows are tokens, else [rows]; sample
    and name of owners that are no samples).
    """
    labels = batch["labels"]
    is_text = labels.shape == batch.get("input_ids", labels[:0]).shape
    device = labels.device
    numbers = torch.tensor([*indices], device=device)
    if "answers" in batch:  # of pairs: both answers
        return numbers[batch["answers"] // 2], {}
    if "rows" in batch:  # of rollouts: a row an answer, by its number in the global batch
        rows = batch["rows"].unique_consecutive().tolist()
        owners = torch.full_like(labels, -1)
        for place, row in enumerate(rows):
            owners[place] = row
        pairs = zip(rows, indices, strict=False)
        return owners, {row: (index, f"{index}, answer in row {row}") for row, index in pairs}
    if not is_text:
        return numbers, {}
    if not hasattr(samples, "bin"):
        return numbers[:, None].expand_as(labels), {}
    position_ids = batch.get("position_ids")
    starts = torch.zeros_like(labels)
    if position_ids is not None:
        starts[:, 1:] = position_ids[:, 1:] == 0
    owners = torch.full_like(labels, -1)
    for row, index in enumerate(indices):
        inside = samples.bin(index).tolist() if index >= 0 else []
        of_document = torch.tensor([*inside, -1], device=device)  # then comes padding
        owners[row] = of_document[starts[row].cumsum(0).clamp(max=len(inside))]
    return owners, {}


def nothing(batch: Batch) -> torch.Tensor:
    """What keeps no label of a batch: see `Part.keep`."""
    labels = batch["labels"]
    is_text = labels.shape == batch.get("input_ids", labels[:0]).shape
    return torch.zeros_like(labels if is_text else labels.view(len(labels), -1)[:, 0]).bool()


def _counted(labels: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    """Which labels count, as `owners`: rows of several classes are one."""
    return (labels != IGNORED).view(*owners.shape, -1).any(-1)


def only(batch: Batch, keep: torch.Tensor) -> Batch:
    """The batch with these labels alone; the others count for nothing, as those of padding.

    Args:
        keep: see `Part`.
    """
    labels = batch["labels"]
    mask = keep if keep.shape == labels.shape else keep.view(-1, *[1] * (labels.ndim - 1))
    changed = {"labels": labels.masked_fill(~mask, IGNORED)}
    if "lengths" in batch:  # of pairs
        count = len(batch["lengths"])
        pairs = torch.zeros(count, dtype=torch.bool, device=labels.device)
        pairs[(batch["answers"] // 2)[keep].unique()] = True
        changed["lengths"] = batch["lengths"] * pairs[:, None]
    if "weights" in batch:  # of rollouts, by target
        changed["weights"] = batch["weights"] * keep.flatten()[batch["targets"]]
    return {**batch, **changed}


def without(
    batch: Batch, indices: Sequence[int], samples: Any, left_out: Collection[int]
) -> tuple[Batch, int]:
    """(the batch without the labels of these samples, how many targets they had)."""
    parts = [part for part in split(batch, indices, samples) if part.sample in left_out]
    if not parts:
        return batch, 0
    drop = torch.stack([part.keep for part in parts]).any(0)
    return only(batch, ~drop), sum(part.targets for part in parts)


def texts(batch: Batch, part: Part, tokenizer: Any) -> Iterator[str]:
    """A sample's rows as text, with the tokens that the loss counts between ⟦ and ⟧."""
    for row in range(len(batch["labels"])):
        places = part.keep[row] if part.keep.ndim > 1 else torch.ones_like(batch["input_ids"][row])
        if part.keep.ndim == 1 and not part.keep[row]:
            continue
        if not places.any():
            continue
        ids = batch["input_ids"][row][places.bool()].tolist()
        if part.keep.ndim == 1:
            yield str(tokenizer.decode(ids, skip_special_tokens=True))
            continue
        labels = batch["labels"][row][places.bool()].tolist()
        # each position's label is the token after it
        tokens = [*zip(ids, [False, *(label >= 0 for label in labels[:-1])], strict=True)]
        tokens += [(label, True) for label in labels[-1:] if label >= 0]
        while tokens and not tokens[-1][1]:  # padding
            tokens.pop()
        yield "".join(
            f"⟦{text}⟧" if is_learned else text
            for is_learned, group in groupby(tokens, itemgetter(1))
            for text in [str(tokenizer.decode([token for token, _ in group]))]
        )
