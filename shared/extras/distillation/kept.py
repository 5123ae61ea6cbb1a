"""A teacher's predictions on disk: for each target of each sample, its most likely tokens, their
log-probabilities, and its cross-entropy.
"""

from __future__ import annotations

from functools import partial
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
from shared.extras.distillation.compared import Compared, at_head, chunk_size, targets_of
from shared.parallel import sharding
from shared.process.collectives import on_main
from shared.process.errors import ConfigError

PART = 1024  # samples of a file
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
            keep(setup, self.teacher, samples)
            loader.samples = Taught(loader.samples, numbers, samples, setup.config)
            loader.collate = partial(_collate, loader.collate)
        self.teacher = None
        return self

    def answer(self, *_: Any) -> None:
        """It cannot."""

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
        config: the template's.
    """

    def __init__(self, rows: Any, numbers_of: Any, samples: Any, config: Any) -> None:
        self.rows = rows
        self.numbers_of = numbers_of
        self.parts = [np.load(part / FILE, mmap_mode="r") for part in parts_of(config, samples)]
        self.ends = np.cumsum(samples.targets)
        self.lengths = getattr(rows, "lengths", None)

    def __len__(self) -> int:
        return len(self.rows)

    def num_targets(self, indices: np.ndarray) -> int:
        return int(self.rows.num_targets(indices))

    def _values(self, number: int) -> np.ndarray:
        part = number // PART
        before = np.append(0, self.ends)[[part * PART, number, number + 1]]
        return self.parts[part][before[1] - before[0] : before[2] - before[0]]

    def __getitem__(self, index: int) -> Row:
        values = [self._values(int(number)) for number in self.numbers_of(index)]
        return {**self.rows[index], "taught": np.concatenate(values)}


def parts_of(config: Any, samples: Any) -> list[Path]:
    """The folders of what is kept for some samples."""
    of = {name: getattr(config, name) for name in ("top_k", "temperature")}
    folder = Path(config.teacher_logits) / prepared.fingerprint(data=samples.fingerprint, **of)
    return [folder / f"{number:06}" for number in range(0, len(samples), PART)]


def all_kept(config: Any, *split: Any) -> bool:
    """Whether nothing is missing or damaged. Every rank calls this."""
    parts = [part for samples in split for part in parts_of(config, samples)]
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


def keep(setup: Any, teacher: Any, samples: Any) -> None:
    """Write what a teacher predicts for all samples, part by part. Parts that are there whole, by
    their hashes, stay. Every rank calls this.
    """
    for place, part in enumerate(tqdm(parts_of(setup.config, samples), "teacher", disable=None)):
        if teacher is not None and not on_main(partial(prepared.usable, part)):
            chosen = np.arange(len(samples))[place * PART :][:PART]
            values = np.concatenate(_predictions(setup, teacher, samples, chosen))
            prepared.build_once(part, partial(_write, values))


def _write(values: np.ndarray, folder: Path) -> None:
    np.save(folder / FILE, values)


def _predictions(setup: Any, teacher: Any, samples: Any, chosen: np.ndarray) -> list[np.ndarray]:
    """For each chosen sample, [targets, 2 k + 1]. Ranks share the work."""
    config = setup.config

    def top(states: torch.Tensor, logits_of: Any) -> torch.Tensor:
        made = []
        size = chunk_size(teacher.model)
        for part, label in zip(states.split(size), labels.split(size), strict=True):
            logits = logits_of(part)
            best = (logits / config.temperature).log_softmax(-1).topk(config.top_k)
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
