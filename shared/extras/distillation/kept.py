"""A teacher's predictions on disk: for each target of each sample, its most likely tokens, their
log-probabilities, and its cross-entropy.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from tqdm import tqdm

from shared.data import prepared
from shared.data.loader import Loader
from shared.data.order import IGNORED, Batch, EvenSubset, Order, Row
from shared.extras.distillation.compared import Compared, chunk_size, scored, width_of
from shared.parallel import sharding
from shared.process.collectives import on_main
from shared.process.errors import ConfigError
from shared.text.chat import Conversations

PART = 256  # samples of a file: as many are in memory at once
FILE = "values.npy"  # [targets, k numbers of tokens, k log-probabilities, cross-entropy] fp32


class Values:
    """What is kept for some samples, in parts: the longest samples first."""

    def __init__(self, config: Any, width: int, samples: Conversations) -> None:
        self.config = config
        self.width = width  # only the first tokens of the teacher
        self.samples = samples
        self.rows = EvenSubset(samples, len(samples))
        self.rows.indices = np.argsort(-samples.lengths, kind="stable")
        self.places = np.argsort(self.rows.indices)
        self.ends = np.append(0, np.cumsum(samples.targets[self.rows.indices]))
        of = {name: getattr(config, name) for name in ("top_k", "temperature")}
        key = prepared.fingerprint(data=samples.fingerprint, width=width, order="longest", **of)
        numbers = range(0, len(samples), PART)
        self.parts = [Path(config.teacher_logits) / f"{key}-{number:09}" for number in numbers]

    def __getitem__(self, sample: int) -> np.ndarray:
        place = self.places[sample]
        part = place // PART
        first, begin, end = self.ends[[part * PART, place, place + 1]]
        return np.load(self.parts[part] / FILE, mmap_mode="r")[begin - first : end - first]

    def keep(self, setup: Any, teacher: Any) -> None:
        """Write what a teacher predicts, part by part. Parts that are there whole, by their hashes,
        stay. Every rank calls this.
        """
        share = sharding.share(setup.accelerator)
        order = Order(len(self.rows), PART, 0, shuffle=False)
        collate = partial(self.samples.collate, multiple_of=16)
        per_device = self.config.batch.per_device_eval_batch_size
        loader = Loader(self.rows, collate, order, share, per_device=per_device)
        top = partial(self._top, chunk_size(teacher.model))
        for number, part in enumerate(tqdm(self.parts, "teacher", disable=None)):
            if on_main(partial(prepared.usable, part)):
                continue
            (made,) = (
                [teacher.at_head(batch, top).cpu().numpy() for batch in window.micro_batches]
                for window in loader.windows(number, number + 1)
            )
            found = gather_object([np.concatenate(made)])
            # once where ranks share a model's pieces
            values = np.concatenate(found[:: len(found) // share.world_size])
            prepared.build_once(part, partial(_write, values))

    def _top(
        self, size: int, states: torch.Tensor, labels: torch.Tensor, logits_of: Any
    ) -> torch.Tensor:
        """[targets, 2 k + 1]."""
        made = []
        for part, label in zip(states.split(size), labels.split(size), strict=True):
            logits = logits_of(part)[:, : self.width]  # it may have rows that no token uses
            log_probs, loss = scored(logits, label, self.config.temperature)
            best = log_probs.topk(min(self.config.top_k, self.width))
            made.append(torch.cat([best.indices, best.values, loss[:, None]], 1))
        return torch.cat(made)


def _write(values: np.ndarray, folder: Path) -> None:
    np.save(folder / FILE, values)


class Taught(Conversations):
    """Conversations with what is kept for their targets."""

    kept: Values

    def __getitem__(self, index: int) -> Row:
        return {**super().__getitem__(index), "taught": self.kept[index]}


class Kept:
    """In place of a `teacher.Live`: what it predicted comes with the batch.

    Args:
        split: `chat.Conversations`, to train and to validate on.

    Attributes:
        teacher: a `Live` that predicts what is not there yet.
        identity: of its weights.
    """

    teacher: Any = None
    identity = ""

    def __init__(self, config: Any, student: Any, *split: Conversations) -> None:
        self.values = [Values(config, width_of(student), samples) for samples in split]

    def is_whole(self) -> bool:
        """Whether nothing is missing or damaged. Every rank calls this."""
        parts = [part for values in self.values for part in values.parts]
        return on_main(lambda: all(map(prepared.usable, parts)))

    def begin(self, setup: Any, model: Any, data: Any) -> None:
        """Let the rows of `data`, a `loaders.ChatData`, have what is kept, or is from now on."""
        for values, loader in zip(self.values, (data.train, data.validation), strict=True):
            if self.teacher is not None:
                self.teacher.begin(setup, model, data)
                values.keep(setup, self.teacher)
            taught: Any = values.samples
            taught.__class__ = Taught  # wherever they are packed or chosen from
            taught.kept = values
            loader.collate = partial(_collate, loader.collate)
        self.teacher = None

    def answer(self, *_: Any) -> dict[str, float]:
        """It cannot."""
        return {}

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, Any]:
        return batch["taught"], _predict


def _predict(
    kept: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, temperature: float
) -> Compared:
    k = kept.shape[1] // 2
    ids, log_probs, loss = kept.split([k, k, 1], 1)
    student, own_loss = scored(logits, labels, temperature)
    agreement = student.argmax(-1) == ids[:, 0]
    student = with_rest(student.gather(-1, ids.long()))
    return Compared(student, with_rest(log_probs), own_loss, loss[:, 0], agreement)


def with_rest(log_probs: torch.Tensor) -> torch.Tensor:
    """[tokens, k] -> [tokens, k + 1]: also the log-probability of all other tokens together."""
    rest = torch.log1p(-log_probs.exp().sum(-1, keepdim=True).clamp(max=1 - 1e-6))
    return torch.cat([log_probs, rest], -1)


def _collate(collate: Any, rows: list[Row]) -> Batch:
    # a row that only fills a batch has no targets
    kept = [row["taught"][: np.count_nonzero(row["labels"] != IGNORED)] for row in rows]
    return {**collate(rows), "taught": torch.from_numpy(np.concatenate(kept))}


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
        return file.read_text()

    if identity not in (None, kept := on_main(on_disk)):
        raise ConfigError(f"{file.parent}: of another teacher: name another --teacher_logits")
    return kept
