"""Text to tokens for pretraining: a tokenizer, memory-mapped files, and sequences cut from them
without padding.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shared import demo
from shared.data import prepared, records
from shared.data.notes import Notes, text_hash
from shared.data.order import Mixed, Row, is_validation, near_share
from shared.data.records import Source
from shared.data.store import Encoded, Store, prepare_sources
from shared.demo import DEFAULT_TEMPLATE
from shared.models.tokenizers import (
    end_of_text,
    identity_of,
    leading_bos,
    load_tokenizer,
    serialised,
    vocabulary_size,
)
from shared.process.collectives import on_main
from shared.process.errors import ConfigError
from shared.process.files import cache_dir
from shared.text.options import CorpusConfig
from shared.text.special import Special

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


END_OF_TEXT = "<|endoftext|>"
DEMO = Source(
    "the Python standard library", lambda: [sys.version, demo.python_files()], demo.sources
)


# A document, or a part of one that is longer than `records.PIECE`, since no text may be too long
# for the tokenizer: its text, the document's number in the source, whether it is the document's
# last, and bytes of the document before it. No class of its own: it goes to another process, which
# takes six times as long for a named tuple.
Piece = tuple[str, int, bool, int]


def pieces(source: Source, column: str, notes: Notes, document: int = 0) -> Iterator[Piece]:
    """Each document in pieces, in order, without empty ones.

    Args:
        notes: gets `unused NAME` for other columns.
        document: number of the first document.

    Raises:
        ConfigError: a record without text.
    """
    before = 0
    for where, record in source.read():
        if column not in record:
            columns = ", ".join(map(str, record)) or "none"
            raise ConfigError(
                f"{where}: no column {column!r} (has: {columns}); name it with --text_column"
            )
        for name in records.unused(record, (column,)):
            notes.add(f"unused {name}")
        text = record[column]
        if not isinstance(text, str):
            raise ConfigError(f"{where}: {column!r} is {records.kind(text)}, expected text")
        blocks = (text[i : i + records.PIECE] for i in range(0, len(text), records.PIECE))
        for piece, continues in records.split_text(blocks):
            is_last = not (continues or records.CONTINUES in record)
            if piece:
                yield piece, document, is_last, before
                document += is_last
                before = 0 if is_last else before + len(piece.encode())


class Corpus(NamedTuple):
    """Sequences to train and to validate on."""

    train: Mixed  # of `Tokens`
    validation: Mixed
    tokenizer: PreTrainedTokenizerBase
    about: str  # a line for people
    fingerprint: str  # changes when the samples do
    bytes_per_token: float  # of the validation text


def open_corpus(
    config: CorpusConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    seq_length: int,
    *,
    isolate: bool = False,
) -> Corpus:
    """Prepare the text, or each source of a mixture, and open it. Every rank calls this.

    Args:
        tokenizer: to use; None trains a byte-level BPE on the text of all sources.
        isolate: see `Tokens`.

    Raises:
        ConfigError: as of `prepare` and `open_splits`.
    """
    if tokenizer is None:
        tokenizer = load_tokenizer(_prepare_tokenizer(config) / "tokenizer")
    encode = EncodeDocuments(tokenizer, config.text_column)
    stores, given = prepare_sources(config, encode)
    shared = next(iter(given.values()), None)
    splits = {
        name: open_splits(
            store,
            given.get(name, shared),
            seq_length,
            config.validation_split_percentage,
            config.eval_samples,
            isolate=isolate,
        )
        for name, store in stores.items()
    }
    trained = {name: split.train for name, split in splits.items()}
    # one --validation_file is that of all sources
    validated = {name: splits[name].validation for name in given or splits}
    about = [
        f"{split.train.store.source}: {split.train.num_tokens:,} tokens to train on; "
        f"validation: {split.about}"
        for split in splits.values()
    ]
    parts = [*validated.values()]
    fingerprints = [part.fingerprint for part in (*trained.values(), *parts)]
    per_token = [part.bytes_per_token(tokenizer) for part in parts]
    return Corpus(
        Mixed(trained),
        Mixed(validated),
        tokenizer,
        "; ".join(about),
        prepared.fingerprint(parts=fingerprints),
        float(np.average(per_token, weights=[part.num_tokens for part in parts])),
    )


def _prepare_tokenizer(config: CorpusConfig) -> Path:
    """The folder of a byte-level BPE that is trained on the text of all sources, a piece of each in
    turn.
    """
    opened = [records.open_sources(source, demo=DEMO)[0] for source in config.sources().values()]
    key = on_main(
        lambda: prepared.fingerprint(
            sources=[source.identity() for source in opened],
            code=prepared.source_of("text/corpus.py"),
            size=config.vocab_size,
            column=config.text_column,
        )
    )

    def build(folder: Path) -> None:
        rows = zip_longest(*(pieces(source, config.text_column, Notes()) for source in opened))
        train_tokenizer(
            (p[0] for row in rows for p in row if p), config.vocab_size
        ).save_pretrained(folder / "tokenizer")

    return prepared.build_once(cache_dir() / "tokenizers" / key, build)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, *, max_characters: int = 2**30
) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer (GPT-2's pre-tokenisation, digits apart) on `texts`, up to
    `max_characters`.

    Its special tokens are END_OF_TEXT, which ends a document, and a padding token of its own.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def limited() -> Iterator[str]:
        left = max_characters
        for text in texts:
            yield text[:left]
            left -= len(text)
            if left <= 0:
                return

    tokenizer.train_from_iterator(limited(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token="<|pad|>",
        chat_template=DEFAULT_TEMPLATE,
    )


class EncodeDocuments:
    """Documents to tokens, see `store.Encode`: `tokens` of all, and in the table the `bytes` of
    each document's text, and its `text_hash`.

    A document begins with what the tokenizer puts before texts and ends with the end-of-text token.
    Nothing in its text is a special token: see `special`.
    """

    kind = "corpus"
    demo = DEMO

    def __init__(self, tokenizer: PreTrainedTokenizerBase, column: str) -> None:
        from tokenizers import Tokenizer

        self.column = column
        self.tokenizer = Tokenizer.from_str(serialised(tokenizer))
        self.tokenizer.no_truncation()  # a fine-tune may have left it in the tokenizer's file
        self.tokenizer.no_padding()
        self.dtype = np.dtype(np.uint16 if vocabulary_size(tokenizer) <= 2**16 else np.uint32)
        self.bos = leading_bos(tokenizer)
        self.eos = [end_of_text(tokenizer)]
        self.special = Special(tokenizer)
        self._identity = identity_of(tokenizer)

    def identity(self) -> Any:
        return {
            "code": prepared.source_of("text/corpus.py", "text/special.py"),
            "tokenizer": self._identity,
            "column": self.column,
        }

    def items(self, source: Source, notes: Notes) -> Iterator[Piece]:
        piece = None
        for piece in pieces(source, self.column, notes):
            yield piece
        if piece is None:
            raise ConfigError(f"{source.name}: no text in it")

    def size(self, item: Piece) -> int:
        return len(item[0])

    def where(self, item: Piece) -> str:
        return f"document {item[1] + 1}"

    def __call__(self, items: list[Piece], notes: Notes) -> Encoded:
        tokens, lengths = self.tokenise(items)
        last = np.array([is_last for _, _, is_last, _ in items])
        sizes = np.array([before + len(text.encode()) for text, _, _, before in items])
        # of a long document's last piece and its place
        hashes = np.array([text_hash(text) ^ before for text, _, _, before in items], np.int64)
        table = {"bytes": sizes[last], "text_hash": hashes[last]}
        return Encoded({"tokens": tokens}, np.cumsum(lengths)[last], table)

    def tokenise(self, pieces: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
        """([tokens] of `dtype`, [pieces] how many of them are of each piece)."""
        texts, _, last, before = zip(*pieces, strict=True)
        first = np.array(before) == 0
        # as text; does not go to another process with the tokenizer
        self.tokenizer.encode_special_tokens = True
        encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        tokens: list[int] = []
        ends = [0]
        for one, is_first, is_last in zip(encoded, first.tolist(), last, strict=True):
            tokens += self.bos * is_first
            tokens += one.ids
            tokens += self.eos * is_last
            ends.append(len(tokens))
        added = np.zeros(len(tokens), bool)
        if self.bos:
            added[np.array(ends[:-1])[first]] = True
        added[np.array(ends[1:])[np.array(last)] - 1] = True
        ids = self.special.to_unknown(np.array(tokens, dtype=self.dtype), added)
        return ids, np.diff(ends)


class Tokens:
    """Tokens of a split, memory-mapped, as sequences of `seq_length` inputs and their next tokens.

    Args:
        store: of the source.
        seq_length: tokens of one sequence.
        spans: [spans, 2], the first and the last + 1 token of each part of the source to use, in
            order.
        num_bytes: bytes of text of these parts, if that is known.
        isolate: also give `position_ids`, which restart with each document.
    """

    def __init__(
        self,
        store: Store,
        seq_length: int,
        spans: np.ndarray,
        num_bytes: int | None = None,
        *,
        isolate: bool = False,
    ) -> None:
        self.store = store
        self.seq_length = seq_length
        self.spans = spans
        self.num_bytes = num_bytes
        self.isolate = isolate
        self._starts = np.cumsum([0, *np.diff(spans)[:, 0]])  # of each span, here

    @property
    def num_tokens(self) -> int:
        return int(self._starts[-1])

    def __len__(self) -> int:
        return max(0, (self.num_tokens - 1) // self.seq_length)

    def __getitem__(self, index: int) -> Row:
        start = index * self.seq_length
        tokens = self._read(start, start + self.seq_length + 1)
        row = {"input_ids": tokens[:-1], "labels": tokens[1:]}
        if self.isolate:
            ends = self._ends(start, start + self.seq_length)
            bounds = np.concatenate([[0], ends, [self.seq_length]])
            row["position_ids"] = np.arange(self.seq_length) - np.repeat(
                bounds[:-1], np.diff(bounds)
            )
        return row

    def _places(self, start: int, stop: int) -> np.ndarray:
        """Where the tokens [start, stop) of this split are in the source."""
        here = np.arange(start, stop)
        span = np.searchsorted(self._starts, here, side="right") - 1
        return self.spans[span, 0] + here - self._starts[span]

    def _read(self, start: int, stop: int) -> np.ndarray:
        return self.store["tokens"][self._places(start, stop)].astype(np.int64)

    def _ends(self, start: int, stop: int) -> np.ndarray:
        """Where documents end within (start, stop), from `start` on."""
        document = np.searchsorted(self.store["ends"], self._places(start, stop), side="right")
        return np.flatnonzero(np.diff(document)) + 1

    def num_targets(self, indices: np.ndarray) -> int:
        return len(indices) * self.seq_length

    @property
    def fingerprint(self) -> str:
        """Changes when the tokens do."""
        spans = hashlib.sha256(self.spans.tobytes()).hexdigest()
        return prepared.fingerprint(tokens=self.store.identity, spans=spans)

    def bytes_per_token(self, tokenizer: PreTrainedTokenizerBase) -> float:
        """Bytes of source text a token. Where their number is not known, that of the first million
        tokens.
        """
        if self.num_bytes is not None:
            return self.num_bytes / self.num_tokens
        ids = self._read(0, min(self.num_tokens, 2**20)).tolist()
        text = str(
            tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
        return len(text.encode()) / len(ids)


class Splits(NamedTuple):
    train: Tokens
    validation: Tokens
    about: str  # how the validation split was chosen, and unused columns, for people


def open_splits(
    store: Store,
    given: Store | None,
    seq_length: int,
    validation_percent: float,
    eval_samples: int | None = None,
    *,
    isolate: bool = False,
) -> Splits:
    """Tokens to train and to validate on.

    Unless data to validate on is `given`, a hash of their numbers decides which documents are held
    out: no more than about a hundred, or twice `eval_samples` sequences, if these are fewer than
    `validation_percent`. If they are far from that share of the tokens (few documents, some very
    long), the end of the text is the validation split.

    Args:
        isolate: see `Tokens`.

    Raises:
        ConfigError: too little text for one sequence in each split.
    """
    train_spans = np.array([[0, len(store["tokens"])]])
    validated = store
    if given is not None:
        validated = given
        spans = np.array([[0, len(given["tokens"])]])
        num_bytes: int | None = int(given["bytes"].sum())
        about = f"{len(given):,} document(s) of {given.source}"
    else:
        spans, num_bytes, about = _hold_out(store, seq_length, validation_percent, eval_samples)
        train_spans = np.array([0, *spans.flat, train_spans[0, 1]]).reshape(-1, 2)
        train_spans = train_spans[train_spans[:, 0] < train_spans[:, 1]]
    train = Tokens(store, seq_length, train_spans, isolate=isolate)
    validation = Tokens(validated, seq_length, spans, num_bytes, isolate=isolate)
    notes = Notes()
    for name, split in (("training", train), ("validation", validation)):
        if not len(split):
            raise ConfigError(
                f"{split.store.source}: the {name} split has {split.num_tokens} tokens, fewer than "
                f"one sequence (--seq_length {seq_length})"
            )
    notes.update(store.notes)
    if given is not None:
        notes.update(given.notes)
    about += records.not_used(notes.named("unused "))
    return Splits(train, validation, about)


def _hold_out(
    store: Store, seq_length: int, percent: float, eval_samples: int | None
) -> tuple[np.ndarray, int | None, str]:
    """(spans to validate on, see `Tokens`; their bytes of text, if known; how they were chosen)."""
    total = len(store["tokens"])
    wanted = share = total * percent / 100
    if eval_samples is not None:
        wanted = min(share, max(2 * eval_samples * (seq_length + 1), 100 * total / len(store)))
    numbers = np.flatnonzero(is_validation(np.arange(len(store)), percent, wanted / share))
    lengths = store.lengths[numbers]
    size = int(lengths.sum())
    if size > seq_length and near_share(size, wanted):
        ends = store["ends"][numbers]
        spans = np.stack([ends - lengths, ends], axis=1)
        about = f"{len(numbers):,} of {len(store):,} documents"
        return spans, int(store["bytes"][numbers].sum()), about
    about = (
        f"the last {100 * wanted / total:.2g} % of the text (whole documents would be too much or "
        "too little)"
    )
    return np.array([[math.ceil(total - wanted), total]]), None, about
