"""Pretraining text that is read and tokenised as training goes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from shared.data import prepared
from shared.data.loader import ToDevice, Window
from shared.data.order import IGNORED, Batch, Row, is_validation, micro_batches
from shared.data.records import Source
from shared.process.errors import ConfigError
from shared.text.corpus import Tokenise, chunked, pieces, serialise

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Stream:
    """Sequences of a source that is read during training, for a corpus too large for the disk.

    Every rank reads and tokenises the same stream and keeps its own rows of each global batch, so the samples of a step
    are the same on any number of processes. The order is the source's own. Has the interface of `loader.Loader`. No
    tokens are kept, so resuming reads forward from the start.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: PreTrainedTokenizerBase,
        seq_length: int,
        *,
        column: str,
        global_batch_size: int,
        per_device: int,
        rank: int,
        world_size: int,
        device: torch.device,
        validation_percent: float,
    ) -> None:
        self.source, self.tokenizer, self.seq_length = source, tokenizer, seq_length
        self.global_batch_size, self.per_device = global_batch_size, per_device
        self.rank, self.world_size, self.device = rank, world_size, device
        self._to_device = ToDevice(device)
        self.column, self.validation_percent = column, validation_percent
        self.unused: set[str] = set()  # columns of the records read so far

    steps_per_epoch: int | None = None

    def sequences(self, *, validation: bool) -> Iterator[np.ndarray]:
        """[seq_length + 1] int64 token windows of one split; consecutive ones share a token."""
        held = np.zeros(0, np.int64)
        chunks = chunked(pieces(self.source, self.column, self.unused))
        for tokens, lengths, _, documents, _ in map(Tokenise(self.tokenizer), chunks):
            chosen = is_validation(documents, self.validation_percent) == validation
            held = np.concatenate([held, tokens[np.repeat(chosen, lengths)].astype(np.int64)])
            count = (len(held) - 1) // self.seq_length
            for i in range(count):
                yield held[i * self.seq_length : (i + 1) * self.seq_length + 1]
            held = held[max(0, count) * self.seq_length :]

    def identity(self) -> str:
        """Changes when the samples do."""
        tokens = hashlib.sha256(serialise(self.tokenizer).encode()).hexdigest()
        how = {"column": self.column, "percent": self.validation_percent, "length": self.seq_length}
        return prepared.fingerprint(source=self.source.identity(), tokenizer=tokens, **how)

    def held_out(self, count: int) -> list[Row]:
        """The first `count` validation sequences. Raises ConfigError when there is not one."""
        rows: list[Row] = []
        for tokens in self.sequences(validation=True):
            rows.append({"input_ids": tokens[:-1], "labels": tokens[1:]})
            if len(rows) == count:
                break
        if not rows:
            raise ConfigError(
                f"{self.source.name}: a stream is validated on whole documents, and {self.validation_percent:g} % of them "
                "make no sequence: raise --validation_split_percentage, or drop --streaming"
            )
        return rows

    def longest(self, rows: int) -> Batch:
        """A micro-batch of `rows` copies of the first sequence, on the device: all are equally long."""
        tokens = torch.from_numpy(np.stack([next(self.sequences(validation=False))] * rows)).to(self.device)
        return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}

    def windows(self, start: int, stop: int) -> Iterator[Window]:
        """Yield one window for each optimizer step in range(start, stop), over as many epochs as it takes.

        Raises:
            ConfigError: the stream holds less than one global batch.
        """
        from tqdm import tqdm

        step = epoch = 0
        quiet = None if start and self.rank == 0 else True  # None: only on a terminal
        forward = tqdm(total=start, desc="reading to the step to resume", unit=" steps", leave=False, disable=quiet)
        while step < stop:
            batch: list[np.ndarray] = []
            first_step_of_epoch = step
            for tokens in self.sequences(validation=False):
                batch.append(tokens)
                if len(batch) == self.global_batch_size:
                    if step < start:
                        forward.update()
                    else:
                        forward.close()
                        yield self._window(batch, epoch, (step - first_step_of_epoch) * self.global_batch_size)
                    step, batch = step + 1, []
                    if step == stop:
                        return
            if step == first_step_of_epoch:
                raise ConfigError(f"{self.source.name}: less than one global batch of {self.global_batch_size} sequences")
            epoch += 1

    def _window(self, sequences: list[np.ndarray], epoch: int, first: int) -> Window:
        split = micro_batches(np.arange(len(sequences)), self.rank, self.world_size, self.per_device)
        rows = [torch.from_numpy(np.stack([sequences[i] for i in indices])) for indices in split]
        if self.device.type == "cuda":
            rows = [tokens.pin_memory() for tokens in rows]
        on_device = [batch["tokens"] for batch in self._to_device([{"tokens": tokens} for tokens in rows])]
        batches = [{"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]} for tokens in on_device]
        return Window(batches, len(sequences) * self.seq_length, len(sequences), epoch, None, split + first)


class Rows(list[Row]):
    """Sequences in memory, as `data.Samples`."""

    def num_targets(self, indices: np.ndarray) -> int:
        return sum(int((self[int(i)]["labels"] != IGNORED).sum()) for i in indices)
