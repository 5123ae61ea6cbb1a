"""A teacher's predictions on disk: for each target of each sample, its most likely tokens, their
log-probabilities, and its cross-entropy.
"""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch.nn import functional as F
from tqdm import tqdm

from shared.answers.answers import batches
from shared.data import prepared
from shared.data.loader import to_device
from shared.data.order import IGNORED, Batch, Row
from shared.extras.distillation.compared import (
    Compared,
    at_head,
    chunk_size,
    targets_of,
    width_of,
)
from shared.parallel import sharding
from shared.process.collectives import on_main
from shared.process.errors import ConfigError

PART = 256  # samples of a file: as many are in memory at once
FILE = "values.npy"  # [targets, k numbers of tokens, k log-probabilities, cross-entropy] fp32


class Kept:
    """In place of a `teacher.Live`: what it predicted comes with the batch.

    Args:
        identity: of its weights.
        teacher: a `Live` that predicts what is not there yet.
    """

    def __init__(self, identity: str, teacher: Any = None) -> None:
        self.identity = identity
        self.teacher = teacher

    def begin(self, setup: Any, model: Any, data: Any) -> Kept:
        """Let the rows of `data`, a `loaders.ChatData`, have what is kept, or is from now on."""
        rows = data.train.samples
        chosen = data.validation.samples.indices
        train = getattr(rows, "samples", rows)
        numbers_of = getattr(rows, "bin", lambda row: [row])
        for loader, samples, numbers in (
            (data.train, train, numbers_of),
            (data.validation, data.held_out, lambda row: [chosen[row]]),
        ):
            parts = parts_of(setup.config, width_of(model), samples)
            keep(setup, self.teacher, samples, parts, width_of(model))
            loader.samples = Taught(loader.samples, numbers, samples, parts)
            loader.collate = partial(_collate, loader.collate)
        self.teacher = None
        return self

    def answer(self, *_: Any) -> dict[str, float]:
        """It cannot."""
        return {}

    def __call__(self, batch: Batch) -> tuple[list[torch.Tensor], Any]:
        return [batch["taught"]], _predict


def _predict(
    logits: torch.Tensor, labels: torch.Tensor, kept: list[torch.Tensor], temperature: float
) -> Compared:
    k = kept[0].shape[1] // 2
    ids, log_probs, loss = kept[0].split([k, k, 1], 1)
    student = (logits / temperature).log_softmax(-1).gather(-1, ids.long())
    return Compared(
        with_rest(student),
        with_rest(log_probs),
        F.cross_entropy(logits, labels, reduction="none"),
        loss.squeeze(-1),
        logits.argmax(-1) == ids[:, 0],
    )


def with_rest(log_probs: torch.Tensor) -> torch.Tensor:
    """[tokens, k] -> [tokens, k + 1]: also the log-probability of all other tokens together."""
    rest = torch.log1p(-log_probs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    return torch.cat([log_probs, rest], -1)


class Taught:
    """`order.Samples`: rows with what is kept for their targets, `taught`.

    Args:
        rows: of samples.
        numbers_of: number of a row -> those of its samples.
        samples: `chat.Conversations`.
        parts: see `parts_of`.
    """

    def __init__(self, rows: Any, numbers_of: Any, samples: Any, parts: list[Path]) -> None:
        self.rows = rows
        self.numbers_of = numbers_of
        self.parts = parts
        self.ends = np.append(0, np.cumsum(samples.targets))
        self.lengths = getattr(rows, "lengths", None)

    def __len__(self) -> int:
        return len(self.rows)

    def num_targets(self, indices: np.ndarray) -> int:
        return int(self.rows.num_targets(indices))

    def _values(self, number: int) -> np.ndarray:
        part = number // PART
        first, begin, end = self.ends[[part * PART, number, number + 1]]
        return opened(self.parts[part])[begin - first : end - first]

    def __getitem__(self, index: int) -> Row:
        values = [self._values(int(number)) for number in self.numbers_of(index)]
        return {**self.rows[index], "taught": np.concatenate(values)}


@lru_cache(maxsize=64)  # open files
def opened(part: Path) -> np.ndarray:
    values: np.ndarray = np.load(part / FILE, mmap_mode="r")
    return values


def parts_of(config: Any, width: int, samples: Any) -> list[Path]:
    """The folders of what is kept for some samples, of the first `width` tokens."""
    of = {name: getattr(config, name) for name in ("top_k", "temperature")}
    key = prepared.fingerprint(data=samples.fingerprint, width=width, **of)
    numbers = range(0, len(samples), PART)
    return [Path(config.teacher_logits) / f"{key}-{number:09}" for number in numbers]


def all_kept(config: Any, width: int, *split: Any) -> bool:
    """Whether nothing is missing or damaged. Every rank calls this."""
    parts = [part for samples in split for part in parts_of(config, width, samples)]
    return on_main(lambda: all(map(prepared.usable, parts)))


def _collate(collate: Any, rows: list[Row]) -> Batch:
    batch: Batch = collate(rows)
    # a row that only fills a batch has no targets
    kept = [row["taught"][: np.count_nonzero(row["labels"] != IGNORED)] for row in rows]
    return {**batch, "taught": torch.from_numpy(np.concatenate(kept))}


def claimed(config: Any, identity: str | None) -> str:
    """The identity of the teacher that a folder is of: the first one. Every rank calls this.

    Raises:
        ConfigError: it is another one's.
    """
    file = Path(config.teacher_logits) / "teacher.txt"

    def on_disk() -> str:
        if identity and not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(identity)
        if identity not in (None, kept := file.read_text()):
            raise ConfigError(f"{file.parent}: of another teacher: name another --teacher_logits")
        return kept

    return on_main(on_disk)


def keep(setup: Any, teacher: Any, samples: Any, parts: list[Path], width: int) -> None:
    """Write what a teacher predicts for all samples, part by part. Parts that are there whole, by
    their hashes, stay. Every rank calls this.
    """
    for place, part in enumerate(tqdm(parts, "teacher", disable=None)):
        if teacher is not None and not on_main(partial(prepared.usable, part)):
            chosen = np.arange(len(samples))[place * PART :][:PART]
            values = np.concatenate(_predictions(setup, teacher, samples, chosen, width))
            prepared.build_once(part, partial(_write, values))


def _write(values: np.ndarray, folder: Path) -> None:
    np.save(folder / FILE, values)


def _predictions(
    setup: Any, teacher: Any, samples: Any, chosen: np.ndarray, width: int
) -> list[np.ndarray]:
    """For each chosen sample, [targets, 2 k + 1]. Ranks share the work."""
    config = setup.config

    def top(states: torch.Tensor, logits_of: Any) -> torch.Tensor:
        made = []
        size = chunk_size(teacher.model)
        for part, label in zip(states.split(size), labels.split(size), strict=True):
            logits = logits_of(part)[:, :width]  # the teacher may have rows that no token uses
            best = (logits / config.temperature).log_softmax(-1).topk(min(config.top_k, width))
            loss = F.cross_entropy(logits, label, reduction="none")
            made.append(torch.cat([best.indices, best.values, loss[:, None]], 1))
        return torch.cat(made)

    mine: list[tuple[int, np.ndarray]] = []
    at_once = config.batch.per_device_eval_batch_size
    for places in batches(samples.lengths[chosen], at_once, sharding.share(setup.accelerator)):
        numbers = chosen[places[places >= 0]] if (places >= 0).any() else chosen[:1]
        rows = [samples[int(number)] for number in numbers]
        batch = to_device(samples.collate(rows, multiple_of=16), setup.device)
        labels = batch["labels"].flatten()[targets_of(batch)]
        with torch.no_grad(), teacher.teaching():
            values = at_head(teacher.model, batch, top).cpu().numpy()
        ends = np.cumsum(samples.targets[numbers])[:-1]
        mine += zip(numbers.tolist(), np.split(values, ends), strict=True)
    return [values for _, values in sorted(dict(gather_object(mine)).items())]
