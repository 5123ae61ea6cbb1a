"""Conversations that are read and tokenised as training goes."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from torch import nn

from shared.data import prepared, records
from shared.data.order import IGNORED, Batch, Row
from shared.data.store import batches, prepare
from shared.extras.streaming.sources import Cursor, open_stream
from shared.extras.streaming.stream import BEGIN, InMemory, Streamed
from shared.parallel import sharding
from shared.process.errors import ConfigError
from shared.text import chat
from shared.text.images import see_images
from shared.text.loaders import ChatData, choose_packing, validation_loader
from shared.text.packing import collate_padded

BATCH = 16  # conversations of a step, unless --global_batch_size says


class StreamedConversations(chat.Conversations):
    """The conversations that are held out of a stream. They stand in for what is asked of all.

    Attributes:
        stream: makes the data of training: (batch config, share) -> `ChatStream`.
    """

    stream: Any
    why_not_packed = "a stream is not packed"


def read_stream(config: Any, tokenizer: Any) -> tuple[StreamedConversations, chat.Conversations]:
    """What stands in for the conversations of a stream, and those to validate on: the
    --validation_file, or the first --eval_samples records. Shows one. Every rank calls this.

    Args:
        config: a template's, with `data`.

    Raises:
        ConfigError: wrong input, with its place; or images.
    """
    options = config.data
    if see_images(options):
        raise ConfigError("--streaming does not work with images in conversations: drop it")
    encode = chat.ToSamples(tokenizer, options)
    source = open_stream(options, chat.DEMO)
    _, given = records.open_sources(options, demo=chat.DEMO)
    skip = 0 if given else options.eval_samples
    held = prepare(
        given or source,
        encode,
        limit=skip or None,
        processes=options.preprocessing_num_workers,
    )
    chat.check(held, options)
    end = chat.end_of(held.notes)
    validated_on = f"{len(held):,} of {held.source}" + f", its first {skip:,} records" * bool(skip)
    numbers = [np.arange(len(held))]
    train = StreamedConversations({"": held}, numbers, end, validated_on)
    train.stream = partial(ChatStream, source, encode, skip, options)
    chat.show_samples(train, tokenizer, options)
    return train, chat.Conversations({"": held}, numbers, end, validated_on)


def arrange_stream(
    setup: Any, model: nn.Module, train: StreamedConversations, held_out: chat.Conversations
) -> ChatData:
    """As `loaders.arrange`, of a stream."""
    choose_packing(setup, model, why_not=train.why_not_packed)
    config = setup.set_defaults("a stream", global_batch_size=BATCH)
    share = sharding.share(setup.accelerator)
    stream = train.stream(config.batch, share)
    about = f"{stream.source.name}, streamed; to validate on: {train.validated_on}"
    setup.about["data"] = about
    validation = validation_loader(held_out, config, share, 0)
    return ChatData(stream, validation, held_out, about, stream.identity())


class ChatStream(Streamed):
    """One conversation a row, padded.

    Args:
        source: to read.
        encode: makes samples of records.
        skip: the first so many records are held out.
        options: a `ChatConfig`.
    """

    def __init__(
        self, source: Any, encode: chat.ToSamples, skip: int, options: Any, batch: Any, share: Any
    ) -> None:
        super().__init__(source, options, batch, share, 1)
        self.encode = encode
        self.skip = skip
        self.seq_length = options.seq_length

    def identity(self) -> str:
        identities = [self.source.identity(), self.encode.identity(), self.skip]
        return prepared.fingerprint(stream=identities)

    def sequences(
        self, *, first: int = 0, mark: Cursor = BEGIN, marks: list[Cursor] | None = None
    ) -> Iterator[Row]:
        number = mark.tokens
        for begins, samples in self._tokenised(mark):
            if marks is not None and begins is not None:
                marks.append(replace(begins, tokens=number))
            for ids, learned in samples:
                if number >= first:
                    labels = np.where(learned[1:], ids[1:], IGNORED)
                    yield {"input_ids": ids[:-1].astype(np.int64), "labels": labels}
                number += 1

    def _chunks(self, mark: Cursor) -> Iterator[tuple[Cursor | None, list[Any]]]:
        source, cursor = self._reader(mark)

        def marked() -> Iterator[tuple[Cursor | None, Any]]:
            for number, item in enumerate(self.encode.items(source, self.notes), mark.document):
                can_begin = source.read_from is not None
                yield replace(cursor, document=number) if can_begin else None, item

        items = islice(marked(), max(0, self.skip - mark.document), None)
        for chunk in batches(items, lambda item: self.encode.size(item[1])):
            yield chunk[0][0], [item for _, item in chunk]

    def _work(self) -> Any:
        return partial(_chunk, self.encode)

    def longest(self, rows: int) -> Batch:
        """A micro-batch of rows of --seq_length, all of whose tokens are targets."""
        ids = np.zeros(self.seq_length, np.int64)
        return self.batch(InMemory({0: {"input_ids": ids, "labels": ids}}), [0] * rows)

    def collate(self, rows: list[Row]) -> Batch:
        return collate_padded(rows, multiple_of=16, at_most=self.seq_length)


def _chunk(
    encode: chat.ToSamples, chunk: tuple[Cursor | None, list[Any]]
) -> tuple[Cursor | None, list[tuple[np.ndarray, np.ndarray]]]:
    """(mark, (ids, which of them the loss counts) of each sample)."""
    mark, items = chunk
    encoded = encode(items, chat.Notes())
    parts = [np.split(encoded.values[name], encoded.ends)[:-1] for name in ("ids", "learned")]
    return mark, list(zip(*parts, strict=True))
