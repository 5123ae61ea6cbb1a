"""Pretraining text that is read and tokenised as training goes."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import default_collate

from shared.config.options import BatchConfig
from shared.data import prepared
from shared.data.loader import Rows, Share, Window, parallel_map, to_device
from shared.data.notes import Notes
from shared.data.order import (
    IGNORED,
    Batch,
    Row,
    Samples,
    is_validation,
    micro_batches,
    permute,
)
from shared.data.store import batches
from shared.extras.streaming.sources import Cursor, StreamSource
from shared.models.tokenizers import identity_of
from shared.process.errors import CleanExit, ConfigError
from shared.process.printing import print_main
from shared.process.ranks import cores
from shared.text.corpus import EncodeDocuments, Piece, pieces
from shared.text.options import CorpusConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# A mark is a cursor at the first record of a document: reading can begin there
BEGIN = Cursor()


class Streamed(ABC):
    """Samples of a source that is read during training. Has the interface of `loader.Loader`.

    Every rank reads the same stream and keeps its own rows of each global batch, so the samples of
    a step are the same on any number of processes. The ranks of a machine share the work to
    tokenise it, in processes that run ahead. The order is that of the source, shuffled within
    windows. Nothing is kept. Each step's place in the source goes into the checkpoints, so that
    resuming is a jump where the source can be read from any record on.

    Args:
        source: to read.
        options: a `StreamConfig`.
        batch: sizes and seed.
        share: of this process.
        unit: what a mark's tokens count for a sample.

    Attributes:
        place: of the checkpoint that the run continues from, as `Window.place` gave it.
        transform: as of a `Loader`. Seeded by (seed, epoch, number in the stream).
        view: what the samples of a step are made of before that, by their number: `InMemory`.
    """

    transform: Callable[[Row], Row] | None = None
    view: Callable[[Any], Samples] | None = None

    def __init__(
        self, source: StreamSource, options: Any, batch: BatchConfig, share: Share, unit: int
    ) -> None:
        self.source = source
        self.shuffle_window = max(1, options.shuffle_window)
        self.global_batch_size = batch.size
        self.per_device = batch.micro_batch()[0]
        self.seed = batch.seed
        self.share = share
        self.unit = unit
        of_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.processes = options.preprocessing_num_workers or max(1, cores() // of_machine)
        # its ranks; of their own, since replicas that train apart send other things meanwhile
        self._machine: Any = None
        if of_machine > 1 and dist.is_initialized() and dist.get_world_size() % of_machine == 0:
            self._machine = dist.new_subgroups(of_machine, backend="gloo")[0]
        self.notes = Notes()  # of the records that were read so far
        self.place: dict[str, Any] | None = None

    steps_per_epoch: int | None = None
    one_shape = False
    multiple = 1

    @abstractmethod
    def identity(self) -> str:
        """Changes when the samples do."""

    @abstractmethod
    def sequences(
        self, *, first: int = 0, mark: Cursor = BEGIN, marks: list[Cursor] | None = None
    ) -> Iterator[Row]:
        """Samples to train on.

        Args:
            first: number of the first one.
            mark: where to begin to read, before it.
            marks: later marks are added to it, when what follows them is read.
        """

    @abstractmethod
    def _chunks(self, mark: Cursor) -> Iterator[tuple[Cursor | None, list[Any]]]:
        """Batches of what is to be tokenised from a mark on, and a mark if reading can begin
        there.
        """

    @abstractmethod
    def _work(self) -> Any:
        """What tokenises a chunk, in another process."""

    def collate(self, rows: list[Row]) -> Batch:
        return default_collate(rows)

    def batch(self, samples: Samples, numbers: list[int], epoch: int = 0) -> Batch:
        """These samples on the device."""
        rows = Rows(samples, self.collate, self.transform, self.seed, self.share.cut)
        batch = rows([[number, epoch] for number in numbers])
        if self.share.device.type == "cuda":
            batch = {key: row.pin_memory() for key, row in batch.items()}
        return to_device(batch, self.share.device)

    def _reader(self, mark: Cursor) -> tuple[StreamSource, Cursor]:
        """(the source from a mark on, a cursor that moves with it)."""
        cursor = replace(mark)
        if (read_from := self.source.read_from) is None:
            return self.source, cursor
        return replace(self.source, read=lambda: read_from(cursor)), cursor

    def _tokenised(self, mark: Cursor) -> Iterator[tuple[Any, ...]]:
        """`_chunks`, tokenised: of each round of chunks, each rank of this machine does one and
        gives it to the others.

        Raises:
            CleanExit: one of these ranks cannot read on.
        """
        size, rank = (self._machine.size(), self._machine.rank()) if self._machine else (1, 0)
        chunks = islice(self._chunks(mark), rank, None, size)
        own = parallel_map(self._work(), chunks, self.processes)
        while True:
            found: list[Any] = [None] * size
            try:
                found[rank] = next(own, None)
            except CleanExit as error:
                found[rank] = error
            if self._machine:
                dist.all_gather_object(found, found[rank], group=self._machine)
            for each in found:
                if each is None:
                    return
                if isinstance(each, CleanExit):
                    raise each
                yield each

    def _shuffled(
        self, sequences: Iterator[Row], epoch: int, first: int
    ) -> Iterator[tuple[int, Row]]:
        """(number, sequence), shuffled within each window of `shuffle_window`. The first one is
        number `first`.
        """
        while window := list(islice(sequences, self.shuffle_window)):
            key = (self.seed, epoch, first // self.shuffle_window)
            for i in permute(np.arange(len(window)), len(window), key).tolist():
                yield first + i, window[i]
            first += len(window)

    def windows(self, start: int, stop: int) -> Iterator[Window]:
        """Yield one window for each optimizer step in range(start, stop), over as many epochs as it
        takes.

        Raises:
            ConfigError: the stream holds less than one global batch.
        """
        step = epoch = first = 0
        mark = BEGIN
        stream = [self.identity(), self.shuffle_window]
        if start and self.place and self.place["stream"] == stream:
            step = start
            epoch = self.place["epoch"]
            first = self.place["first"]
            mark = Cursor(*self.place["mark"])
        if start:
            where = f"document {mark.document:,}" if mark.document else "its start"
            print_main(
                f"{self.source.name}: read from {where} on to step "
                f"{start:,}, where the run continues"
            )
        found = islice(self._batches(epoch, first, mark), start - step, stop - step)
        for sequences, place in found:
            yield self._window(sequences, place | {"stream": stream})

    def _batches(
        self, epoch: int, first: int, mark: Cursor
    ) -> Iterator[tuple[list[tuple[int, Row]], dict[str, Any]]]:
        """Global batches from the sequence `first` of an epoch on, as (number, sequence), and where
        each ends. Epoch after epoch.

        Args:
            mark: where to begin to read, before the window of that sequence.
        """
        while True:
            begins_epoch = first == 0
            marks = [mark]
            window = first - first % self.shuffle_window
            read = self.sequences(first=window, mark=mark, marks=marks)
            shuffled = islice(self._shuffled(read, epoch, window), first - window, None)
            while len(batch := list(islice(shuffled, self.global_batch_size))) == (
                self.global_batch_size
            ):
                first = first + self.global_batch_size
                window = first - first % self.shuffle_window
                while len(marks) > 1 and marks[1].tokens <= window * self.unit:
                    del marks[0]
                yield batch, {"epoch": epoch, "first": first, "mark": [*vars(marks[0]).values()]}
            if begins_epoch and first == 0:
                raise ConfigError(
                    f"{self.source.name}: less than one global batch of "
                    f"{self.global_batch_size} sequences"
                )
            epoch = epoch + 1
            first = 0
            mark = BEGIN

    def _window(self, sequences: list[tuple[int, Row]], place: dict[str, Any]) -> Window:
        share = self.share
        samples: Any = InMemory(sequences)
        numbers = np.array([*samples])
        if self.view:
            samples = self.view(samples)
        split = micro_batches(numbers, share.rank, share.world_size, self.per_device)
        return Window(
            [self.batch(samples, indices, place["epoch"]) for indices in split.tolist()],
            samples.num_targets(numbers),
            len(sequences),
            place["epoch"],
            None,
            split,
            place=place,
        )


class Stream(Streamed):
    """Sequences of tokens for pretraining, of a corpus too large for the disk.

    Attributes:
        held_out_before: number of the first document after which none is held out. `held_out` finds
            it.
    """

    def __init__(
        self,
        source: StreamSource,
        tokenizer: PreTrainedTokenizerBase,
        seq_length: int,
        options: CorpusConfig,
        batch: BatchConfig,
        share: Share,
    ) -> None:
        super().__init__(source, options, batch, share, seq_length)
        self.tokenizer = tokenizer
        self.seq_length = seq_length
        self.column = options.text_column
        self.validation_percent = options.validation_split_percentage
        self.held_out_before: int | None = None

    one_shape = True

    def _work(self) -> Any:
        return partial(_chunk, EncodeDocuments(self.tokenizer, self.column))

    def sequences(
        self,
        *,
        validation: bool = False,
        first: int = 0,
        mark: Cursor = BEGIN,
        marks: list[Cursor] | None = None,
    ) -> Iterator[Row]:
        """Sequences of one split, each with the next tokens as labels: [seq_length] int64.

        Args:
            validation: which split.
            first: number of the first sequence.
            mark: where to begin to read, before that sequence.
            marks: later marks are added to it, when their tokens are read.
        """
        held = np.zeros(0, np.int64)
        place = mark.tokens
        skip = first * self.seq_length - place
        for begins, kept, _ in self._of_split(mark, validation=validation):
            if marks is not None and begins is not None:
                marks.append(replace(begins, tokens=place))
            place += len(kept)
            held = np.concatenate([held, kept[skip:]])
            skip = max(0, skip - len(kept))
            stops = range(self.seq_length, len(held), self.seq_length)
            for stop in stops:
                yield _row(held[stop - self.seq_length : stop + 1])
            held = held[len(stops) * self.seq_length :]

    def _of_split(
        self, mark: Cursor, *, validation: bool
    ) -> Iterator[tuple[Cursor | None, np.ndarray, np.ndarray]]:
        """The mark of a chunk, [tokens] int64 of a split in it, and the document of each token."""
        for begins, tokens, lengths, documents in self._tokenised(mark):
            is_held_out = is_validation(documents, self.validation_percent)
            if self.held_out_before is not None:
                is_held_out &= documents < self.held_out_before
            chosen = np.repeat(is_held_out == validation, lengths)
            yield begins, tokens[chosen].astype(np.int64), np.repeat(documents, lengths)[chosen]

    def _chunks(self, mark: Cursor) -> Iterator[tuple[Cursor | None, list[Piece]]]:
        source, cursor = self._reader(mark)

        def marked() -> Iterator[tuple[Cursor | None, Piece]]:
            for piece in pieces(source, self.column, self.notes, mark.document):
                _, document, _, before = piece
                begins = source.read_from is not None and not before
                yield replace(cursor, document=document) if begins else None, piece

        for chunk in batches(marked(), lambda item: len(item[1][0])):
            yield chunk[0][0], [piece for _, piece in chunk]

    def identity(self) -> str:
        return prepared.fingerprint(
            source=self.source.identity(),
            tokenizer=identity_of(self.tokenizer),
            column=self.column,
            percent=self.validation_percent,
            length=self.seq_length,
            before=self.held_out_before,
        )

    def held_out(self, count: int) -> InMemory:
        """The first `count` validation sequences. No document after the last one that they need is
        held out.

        Raises:
            ConfigError: there is not one sequence.
        """
        self.held_out_before = None
        wanted = count * self.seq_length + 1
        tokens = np.zeros(0, np.int64)
        for _, kept, documents in self._of_split(BEGIN, validation=True):
            missing = wanted - len(tokens)
            tokens = np.concatenate([tokens, kept])
            if len(kept) >= missing:
                self.held_out_before = int(documents[missing - 1]) + 1
                break
        starts = range(0, min(len(tokens), wanted) - self.seq_length, self.seq_length)
        rows = [tokens[start : start + self.seq_length + 1] for start in starts]
        if not rows:
            raise ConfigError(
                f"{self.source.name}: a stream is validated on whole documents, and "
                f"{self.validation_percent:g} % of them "
                "make no sequence: raise --validation_split_percentage, or drop --streaming"
            )
        return InMemory(enumerate(map(_row, rows)))

    def longest(self, rows: int) -> Batch:
        """A micro-batch of `rows` copies of the first sequence, on the device: all are equally
        long.
        """
        samples: Any = InMemory({0: next(self.sequences())})
        return self.batch(self.view(samples) if self.view else samples, [0] * rows)


def _row(tokens: np.ndarray) -> Row:
    return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def _chunk(
    encode: EncodeDocuments, chunk: tuple[Cursor | None, list[Piece]]
) -> tuple[Cursor | None, np.ndarray, np.ndarray, np.ndarray]:
    """(mark, tokens, [pieces] how many are of each, [pieces] the number of its document)."""
    mark, of_chunk = chunk
    tokens, lengths = encode.tokenise(of_chunk)
    return mark, tokens, lengths, np.array([piece[1] for piece in of_chunk])


class InMemory(dict[int, Row]):
    """Samples by their numbers, as `order.Samples`."""

    def num_targets(self, indices: np.ndarray) -> int:
        return sum(int((self[int(i)]["labels"] != IGNORED).sum()) for i in indices)
