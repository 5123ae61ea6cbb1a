"""Pretraining text that is read and tokenised as training goes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from shared.config.options import BatchConfig
from shared.data import prepared
from shared.data.loader import Share, Window, parallel_map
from shared.data.order import IGNORED, Batch, Row, is_validation, micro_batches, permute
from shared.data.records import Cursor, Source
from shared.data.store import Notes, batches
from shared.models.tokenizers import identity_of
from shared.process.errors import CleanExit, ConfigError
from shared.process.printing import print_main
from shared.process.ranks import cores
from shared.text.corpus import Piece, Tokenise, pieces, size_of
from shared.text.options import CorpusConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Mark(NamedTuple):
    """A place of the source at which reading can begin: the first record of a document."""

    file: int = 0  # see `records.Cursor`
    number: int = 0
    offset: int = 0
    document: int = 0  # documents before it
    tokens: int = 0  # tokens to train on before it
    state: Any = None  # see `records.Cursor`


BEGIN = Mark()


class Stream:
    """Sequences of a source that is read during training, for a corpus too large for the disk.

    Every rank reads the same stream and keeps its own rows of each global batch, so the samples of
    a step are the same on any number of processes. The ranks of a machine share the work to
    tokenise it, in processes that run ahead. The order is that of the source, shuffled within
    windows. Has the interface of `loader.Loader`. No tokens are kept. Each step's place in the
    source goes into the checkpoints, so that resuming is a jump where the source can be read from
    any record on.

    Attributes:
        place: of the checkpoint that the run continues from, as `Window.place` gave it: see
            `resume`.
        held_out_before: number of the first document after which none is held out. `held_out` finds
            it.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: PreTrainedTokenizerBase,
        seq_length: int,
        options: CorpusConfig,
        batch: BatchConfig,
        share: Share,
    ) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.seq_length = seq_length
        self.column = options.text_column
        self.validation_percent = options.validation_split_percentage
        self.shuffle_window = max(1, options.shuffle_window)
        self.global_batch_size = batch.global_batch_size
        self.per_device = batch.micro_batch()[0]
        self.seed = batch.seed
        self.share = share
        of_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.processes = options.preprocessing_num_workers or max(1, cores() // of_machine)
        # its ranks; of their own, since replicas that train apart send other things meanwhile
        self._machine = None
        if of_machine > 1 and dist.is_initialized() and dist.get_world_size() % of_machine == 0:
            self._machine = dist.new_subgroups(of_machine, backend="gloo")[0]
        self.notes = Notes()  # of the records that were read so far
        self.place: dict[str, Any] | None = None
        self.held_out_before: int | None = None

    steps_per_epoch: int | None = None

    def resume(self, place: dict[str, Any]) -> None:
        """Go on from a checkpoint's `Window.place`."""
        self.place = place

    def sequences(
        self,
        *,
        validation: bool,
        first: int = 0,
        mark: Mark = BEGIN,
        marks: list[Mark] | None = None,
    ) -> Iterator[np.ndarray]:
        """[seq_length + 1] int64 token windows of one split; consecutive ones share a token.

        Args:
            validation: which split.
            first: number of the first sequence.
            mark: where to begin to read, before that sequence.
            marks: later marks are added to it, when their tokens are read.
        """
        held = np.zeros(0, np.int64)
        place = mark.tokens
        skip = first * self.seq_length - place
        for begins, (tokens, lengths, _, documents, _) in self._tokenised(mark):
            if marks is not None and begins is not None:
                marks.append(begins._replace(tokens=place))
            chosen = self._is_held_out(documents) == validation
            kept = tokens[np.repeat(chosen, lengths)].astype(np.int64)
            place += len(kept)
            held = np.concatenate([held, kept[skip:]])
            skip = max(0, skip - len(kept))
            count = (len(held) - 1) // self.seq_length
            for i in range(count):
                yield held[i * self.seq_length : (i + 1) * self.seq_length + 1]
            held = held[max(0, count) * self.seq_length :]

    def _is_held_out(self, documents: np.ndarray) -> np.ndarray:
        chosen = is_validation(documents, self.validation_percent)
        return (
            chosen if self.held_out_before is None else chosen & (documents < self.held_out_before)
        )

    def _tokenised(self, mark: Mark) -> Iterator[tuple[Mark | None, tuple[np.ndarray, ...]]]:
        """`_chunks`, tokenised: of each round of chunks, each rank of this machine does one and
        gives it to the others.

        Raises:
            CleanExit: one of these ranks cannot read on.
        """
        size, rank = (self._machine.size(), self._machine.rank()) if self._machine else (1, 0)
        chunks = islice(self._chunks(mark), rank, None, size)
        own = parallel_map(_Marked(Tokenise(self.tokenizer)), chunks, self.processes)
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

    def _chunks(self, mark: Mark) -> Iterator[tuple[Mark | None, list[Piece]]]:
        """Batches of pieces from a mark on, and a mark if a record begins a document there."""
        source = self.source
        cursor = Cursor(mark.file, mark.number, mark.offset, mark.state)
        if (read_from := source.read_from) is not None:
            source = replace(source, read=lambda: read_from(cursor))
        begins: list[Mark | None] = []

        def noted() -> Iterator[Piece]:
            for piece in pieces(source, self.column, self.notes, mark.document):
                _, document, is_first, _, _ = piece
                can_begin = is_first and read_from is not None
                place = Mark(
                    cursor.file, cursor.number, cursor.offset, document, state=cursor.state
                )
                begins.append(place if can_begin else None)
                yield piece

        for chunk in batches(noted(), size_of):
            yield begins[0], chunk
            begins.clear()

    def _shuffled(
        self, sequences: Iterator[np.ndarray], epoch: int, first: int
    ) -> Iterator[tuple[int, np.ndarray]]:
        """(number, sequence), shuffled within each window of `shuffle_window`. The first one is
        number `first`.
        """
        while window := list(islice(sequences, self.shuffle_window)):
            key = (self.seed, epoch, first // self.shuffle_window)
            for i in permute(np.arange(len(window)), len(window), key).tolist():
                yield first + i, window[i]
            first += len(window)

    def identity(self) -> str:
        """Changes when the samples do."""
        return prepared.fingerprint(
            source=self.source.identity(),
            tokenizer=identity_of(self.tokenizer),
            column=self.column,
            percent=self.validation_percent,
            length=self.seq_length,
            before=self.held_out_before,
        )

    def held_out(self, count: int) -> list[Row]:
        """The first `count` validation sequences. No document after the last one that they need is
        held out.

        Raises:
            ConfigError: there is not one sequence.
        """
        self.held_out_before = None
        wanted = count * self.seq_length + 1
        tokens = np.zeros(0, np.int64)
        for _, (some, lengths, _, documents, _) in self._tokenised(BEGIN):
            chosen = self._is_held_out(documents)
            ends = len(tokens) + np.cumsum(lengths * chosen)
            tokens = np.concatenate([tokens, some[np.repeat(chosen, lengths)].astype(np.int64)])
            if len(tokens) >= wanted:
                self.held_out_before = int(documents[np.searchsorted(ends, wanted)]) + 1
                break
        starts = range(0, min(len(tokens), wanted) - self.seq_length, self.seq_length)
        rows = [tokens[start : start + self.seq_length + 1] for start in starts]
        if not rows:
            raise ConfigError(
                f"{self.source.name}: a stream is validated on whole documents, and "
                f"{self.validation_percent:g} % of them "
                "make no sequence: raise --validation_split_percentage, or drop --streaming"
            )
        return [{"input_ids": row[:-1], "labels": row[1:]} for row in rows]

    def longest(self, rows: int) -> Batch:
        """A micro-batch of `rows` copies of the first sequence, on the device: all are equally
        long.
        """
        tokens = torch.from_numpy(np.stack([next(self.sequences(validation=False))] * rows)).to(
            self.share.device
        )
        return self.share.cut({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})

    def windows(self, start: int, stop: int) -> Iterator[Window]:
        """Yield one window for each optimizer step in range(start, stop), over as many epochs as it
        takes.

        Raises:
            ConfigError: the stream holds less than one global batch.
        """
        from tqdm import tqdm

        step = 0
        epoch = 0
        first = 0
        mark = BEGIN  # `first`: of the epoch's sequences, the next batch's first
        stream = [self.identity(), self.shuffle_window]
        if start and self.place and self.place["stream"] == stream:
            step = start
            epoch = self.place["epoch"]
            first = self.place["first"]
            mark = Mark(*self.place["mark"])
        if start:
            where = f"document {mark.document:,}" if mark.document else "its start"
            print_main(
                f"{self.source.name}: read from {where} on to step "
                f"{start:,}, where the run continues"
            )
        quiet = None if start and self.share.rank == 0 else True  # None: only on a terminal
        forward = tqdm(
            total=start,
            initial=step,
            desc="reading to the step to resume",
            unit=" steps",
            leave=False,
            disable=quiet,
        )
        while step < stop:
            begins_epoch = first == 0
            marks = [mark]
            window = first - first % self.shuffle_window
            sequences = self.sequences(validation=False, first=window, mark=mark, marks=marks)
            batch: list[tuple[int, np.ndarray]] = []
            for sequence in islice(self._shuffled(sequences, epoch, window), first - window, None):
                batch.append(sequence)
                if len(batch) < self.global_batch_size:
                    continue
                step = step + 1
                first = first + self.global_batch_size
                if step > start:
                    forward.close()
                    window = first - first % self.shuffle_window
                    while len(marks) > 1 and marks[1].tokens <= window * self.seq_length:
                        del marks[0]
                    place = {
                        "stream": stream,
                        "epoch": epoch,
                        "first": first,
                        "mark": list(marks[0]),
                    }
                    yield self._window(batch, epoch, place)
                else:
                    forward.update()
                batch = []
                if step == stop:
                    return
            if begins_epoch and first == 0:
                raise ConfigError(
                    f"{self.source.name}: less than one global batch of "
                    f"{self.global_batch_size} sequences"
                )
            epoch = epoch + 1
            first = 0
            mark = BEGIN

    def _window(
        self, sequences: list[tuple[int, np.ndarray]], epoch: int, place: dict[str, Any] | None
    ) -> Window:
        split = micro_batches(
            np.arange(len(sequences)), self.share.rank, self.share.world_size, self.per_device
        )
        rows = [torch.from_numpy(np.stack([sequences[i][1] for i in indices])) for indices in split]
        if self.share.device.type == "cuda":
            rows = [tokens.pin_memory() for tokens in rows]
        on_device = [tokens.to(self.share.device, non_blocking=True) for tokens in rows]
        batches = [
            self.share.cut({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
            for tokens in on_device
        ]
        numbers = np.array([number for number, _ in sequences])[split]
        return Window(
            batches,
            len(sequences) * self.seq_length,
            len(sequences),
            epoch,
            None,
            numbers,
            place=place,
        )


class _Marked:
    """Tokenises a chunk that comes with a mark."""

    def __init__(self, tokenise: Tokenise) -> None:
        self.tokenise = tokenise

    def __call__(
        self, item: tuple[Mark | None, list[Piece]]
    ) -> tuple[Mark | None, tuple[np.ndarray, ...]]:
        return item[0], self.tokenise(item[1])


class Rows(list[Row]):
    """Sequences in memory, as `data.Samples`."""

    def num_targets(self, indices: np.ndarray) -> int:
        return sum(int((self[int(i)]["labels"] != IGNORED).sum()) for i in indices)
