"""Text to tokens for pretraining: a tokenizer, memory-mapped files, and sequences cut from them without padding."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shared import demo
from shared.config.parse import cache_dir
from shared.data import prepared, records
from shared.data.loader import parallel_map
from shared.data.mixture import Mixed
from shared.data.order import Batch, Row, is_validation, near_share
from shared.data.records import Source
from shared.demo import DEFAULT_TEMPLATE
from shared.process.collectives import on_main
from shared.process.errors import ConfigError
from shared.text.options import CorpusConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


END_OF_TEXT = "<|endoftext|>"
CHUNK_CHARACTERS = 2**20  # text that a process gets at a time
DEMO = Source("the Python standard library", lambda: [sys.version, demo.python_files()], demo.sources)


class Piece(NamedTuple):
    """A document, or a part of one that is longer than `records.PIECE`: no text is too long for the tokenizer."""

    text: str
    document: int  # its number in the source
    is_first: bool  # of its document
    is_last: bool


def pieces(source: Source, column: str, unused: set[str] | None = None, document: int = 0) -> Iterator[Piece]:
    """Each document in pieces, in order, without empty ones. Adds the names of other columns to `unused`.

    Args:
        document: number of the first document.

    Raises:
        ConfigError: a record without text.
    """
    is_first = True
    for where, record in source.read():
        if column not in record:
            columns = ", ".join(map(str, record)) or "none"
            raise ConfigError(f"{where}: no column {column!r} (has: {columns}); name it with --text_column")
        if unused is not None:
            unused.update(records.unused(record, (column,)))
        text = record[column]
        if not isinstance(text, str):
            raise ConfigError(f"{where}: {column!r} is {records.kind(text)}, expected text")
        for piece, continues in records.split_text(text[i : i + records.PIECE] for i in range(0, len(text), records.PIECE)):
            is_last = not (continues or records.CONTINUES in record)
            if piece:
                yield Piece(piece, document, is_first, is_last)
                document, is_first = document + is_last, is_last


class Corpus(NamedTuple):
    """Sequences to train and to validate on."""

    train: Any  # `Tokens`, or those of several sources
    validation: Any
    tokenizer: PreTrainedTokenizerBase
    about: str  # a line for people
    fingerprint: str  # changes when the samples do
    bytes_per_token: float  # of the validation text


def open_corpus(
    config: CorpusConfig, tokenizer: PreTrainedTokenizerBase | None, seq_length: int, *, isolate: bool = False
) -> Corpus:
    """Prepare the text, or each source of a mixture, and open it. Every rank calls this.

    Args:
        tokenizer: to use; None trains one on the text of all sources.
        isolate: see `Tokens`.

    Raises:
        ConfigError: as of `prepare` and `open_splits`.
    """
    sources = config.sources()
    if tokenizer is None and config.mix_weights:
        tokenizer = load_tokenizer(_prepare_tokenizer(config, [*sources.values()]))
    found: dict[str, Corpus] = {}
    for name, source in sources.items():
        folder = prepare(source, tokenizer)
        tokenizer = tokenizer or load_tokenizer(folder)
        train, held_out, split = open_splits(folder, seq_length, config.validation_split_percentage, isolate=isolate)
        about = f"{train.meta['source']}: {train.num_tokens:,} tokens to train on; validation: {split}"
        digest = train.meta["train"]["sha256"]
        found[name] = Corpus(train, held_out, tokenizer, about, digest, held_out.bytes_per_token)
    parts = [*found.values()]
    if not config.mix_weights:
        return parts[0]
    validated = parts[:1] if config.validation_file else parts  # the file is the same for all
    sizes = np.array([part.validation.num_tokens for part in validated])
    return Corpus(
        Mixed({name: part.train for name, part in found.items()}),
        Mixed({name: part.validation for name, part in [*found.items()][: len(validated)]}),
        parts[0].tokenizer,
        "; ".join(part.about for part in parts),
        prepared.fingerprint(sources=[part.fingerprint for part in parts]),
        float(np.average([part.bytes_per_token for part in validated], weights=sizes)),
    )


def _prepare_tokenizer(config: CorpusConfig, sources: list[CorpusConfig]) -> Path:
    """The folder of a byte-level BPE that is trained on the text of all sources, a piece of each in turn."""
    opened = [records.open_sources(source, demo=DEMO)[0] for source in sources]
    parts = {"code": prepared.source_of("data", "text"), "size": config.vocab_size, "column": config.text_column}
    key = on_main(lambda: prepared.fingerprint(sources=[source.identity() for source in opened], **parts))

    def build(folder: Path) -> None:
        rows = zip_longest(*(pieces(source, config.text_column) for source in opened))
        train_tokenizer((p.text for row in rows for p in row if p), config.vocab_size).save_pretrained(folder / "tokenizer")

    return prepared.build_once(cache_dir() / "tokenizers" / key, build)


def prepare(config: CorpusConfig, tokenizer: PreTrainedTokenizerBase | None) -> Path:
    """Tokenise the corpus once. With the same files, tokenizer and settings it is there already.

    Every rank calls this; the main one works, the others wait.

    Args:
        config: the text.
        tokenizer: to use; None trains a byte-level BPE on the text.

    Returns:
        The folder with the tokens, `meta.json` and `tokenizer/`.

    Raises:
        ConfigError: no text, unreadable text, or a tokenizer that is slow or without an end-of-text token.
    """
    serialised = tokenizer and serialise(tokenizer)
    train, validation = records.open_sources(config, demo=DEMO)
    key = on_main(  # machines may see other file times, and the Hub may answer one of them only
        lambda: prepared.fingerprint(
            code=prepared.source_of("data", "text"),
            train=train.identity(),
            validation=validation and validation.identity(),
            column=config.text_column,
            percent=config.validation_split_percentage,
            tokenizer=hashlib.sha256(serialised.encode()).hexdigest() if serialised else config.vocab_size,
            ends=tokenizer and [prepared.leading_bos(tokenizer), tokenizer.eos_token_id],
        )
    )

    def build(folder: Path) -> None:
        texts = (piece.text for piece in pieces(train, config.text_column))
        used = tokenizer or train_tokenizer(texts, config.vocab_size)
        used.save_pretrained(folder / "tokenizer")
        write_tokens(folder, train, validation, used, config)

    return prepared.build_once(cache_dir() / "corpus" / key, build)


def serialise(tokenizer: PreTrainedTokenizerBase) -> str:
    """All that a tokenizer does, as text. Raises ConfigError for one that pretraining cannot use."""
    if not tokenizer.is_fast:
        raise ConfigError("the tokenizer is a slow one (Python alone), too slow for a corpus: give another --tokenizer_name")
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no end-of-text token to put between documents")
    return tokenizer.backend_tokenizer.to_str()  # type: ignore[attr-defined]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that `prepare` left in its folder."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, max_characters: int = 2**30) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer (GPT-2's pre-tokenisation, digits apart) on `texts`, up to `max_characters`.

    Its special tokens are END_OF_TEXT, which ends a document, and a padding token of its own.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
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


class _Writer:
    """Appends a split's tokens to `<split>.bin`, and keeps where each document ends."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype) -> None:
        self.folder, self.split, self.dtype = folder, split, dtype
        self.file = (folder / f"{split}.bin").open("wb")
        self.ends = [np.zeros(0, np.int64)]  # of documents
        self.tokens = self.bytes = 0
        self.hash = hashlib.sha256()

    def append(self, tokens: np.ndarray, ends: np.ndarray, num_bytes: int) -> None:
        self.ends.append(self.tokens + ends)
        self.tokens += len(tokens)
        self.bytes += num_bytes
        content = tokens.astype(self.dtype, copy=False).data
        self.hash.update(content)
        self.file.write(content)

    def finish(self) -> dict[str, Any]:
        self.file.close()
        ends = np.concatenate(self.ends)
        np.save(self.folder / f"{self.split}-ends.npy", ends)
        facts = {"tokens": self.tokens, "bytes": self.bytes, "documents": len(ends)}
        return {**facts, "sha256": self.hash.hexdigest()}


class Tokenise:
    """Pieces to tokens. A document begins with what the tokenizer puts before texts and ends with the end-of-text token.

    Gives ([tokens] uint32, [pieces] tokens, [pieces] bytes, [pieces] document numbers, [pieces] bool, the last ones).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(serialise(tokenizer))
        self.bos, self.eos = prepared.leading_bos(tokenizer), [tokenizer.eos_token_id]
        self.tokenizer.no_truncation()  # a fine-tune may have left it in the tokenizer's file
        self.tokenizer.no_padding()

    def __call__(self, pieces: list[Piece]) -> tuple[np.ndarray, ...]:
        texts, documents, first, last = zip(*pieces, strict=True)
        encoded = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ids = [
            np.asarray(self.bos * begins + e.ids + self.eos * ends, dtype=np.uint32)
            for e, begins, ends in zip(encoded, first, last, strict=True)
        ]
        lengths, sizes = np.array([len(i) for i in ids]), np.array([len(t.encode()) for t in texts])
        return np.concatenate(ids), lengths, sizes, np.array(documents), np.array(last)


def chunked(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Lists of pieces, of about CHUNK_CHARACTERS each."""
    chunk: list[Piece] = []
    size = 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece.text)
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def write_tokens(
    folder: Path, train: Source, validation: Source | None, tokenizer: PreTrainedTokenizerBase, config: CorpusConfig
) -> None:
    """Tokenise everything into `folder`: tokens, document ends, `meta.json`. Call on one rank.

    A hash of their numbers decides which documents are held out. If that is far from the share that was asked for (few
    documents, some very long), none is, and `open_splits` takes the end of the text.

    Raises:
        ConfigError: no text, or a record that is not text.
    """
    from tqdm import tqdm

    percent = config.validation_split_percentage
    dtype = np.dtype(np.uint16 if prepared.vocabulary_size(tokenizer) <= 2**16 else np.uint32)
    writers = {split: _Writer(folder, split, dtype) for split in ("train", "validation")}
    unused: set[str] = set()
    progress = tqdm(desc=f"tokenising {train.name}", unit="B", unit_scale=True, leave=False, disable=None)
    for source in filter(None, (train, validation)):
        chunks = chunked(pieces(source, config.text_column, unused))
        results = parallel_map(Tokenise(tokenizer), chunks, config.preprocessing_num_workers)
        for tokens, lengths, sizes, documents, last in results:
            if validation is None:
                held_out = is_validation(documents, percent)
            else:
                held_out = np.full(len(lengths), source is validation)
            for split, chosen in (("train", ~held_out), ("validation", held_out)):
                if chosen.any():
                    kept = tokens[np.repeat(chosen, lengths)]
                    ends = np.cumsum(lengths[chosen])[last[chosen]]
                    writers[split].append(kept, ends, int(sizes[chosen].sum()))
            progress.update(int(sizes.sum()))
    progress.close()
    share, held = sum(w.tokens for w in writers.values()) * percent / 100, writers["validation"]
    if validation is None and held.tokens and not near_share(held.tokens, share):
        held.file.close()
        writers["train"].append(np.memmap(held.file.name, dtype, "r"), np.concatenate(held.ends), held.bytes)
        writers["validation"] = _Writer(folder, "validation", dtype)
    meta: dict[str, Any] = {"dtype": dtype.name, "source": train.name, "unused": sorted(unused)}
    meta |= {"validation_source": validation and validation.name}  # None: a part of the training source
    meta |= {split: writer.finish() for split, writer in writers.items()}
    if not any(writer.tokens for writer in writers.values()):
        raise ConfigError(f"{train.name}: no text in it")
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


class Tokens:
    """One split's tokens, memory-mapped, as sequences of `seq_length` inputs and their next tokens.

    Args:
        folder: what `write_tokens` filled.
        split: train or validation.
        seq_length: tokens of one sequence.
        first, last: the part of the split's tokens to use.
        isolate: also give `position_ids`, which restart with each document.
    """

    def __init__(
        self, folder: Path, split: str, seq_length: int, first: int = 0, last: int | None = None, *, isolate: bool = False
    ) -> None:
        self.folder, self.split, self.seq_length, self.first = folder, split, seq_length, first
        self.isolate = isolate
        self.meta = json.loads((folder / "meta.json").read_text())
        self.last = self.meta[split]["tokens"] if last is None else last

    @cached_property
    def _tokens(self) -> np.ndarray:
        return np.memmap(self.folder / f"{self.split}.bin", self.meta["dtype"], "r")

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.load(self.folder / f"{self.split}-ends.npy", mmap_mode="r")

    def __getstate__(self) -> dict[str, Any]:  # a spawned worker maps the files itself
        return {k: v for k, v in self.__dict__.items() if k not in ("_tokens", "_ends")}

    @property
    def num_tokens(self) -> int:
        return self.last - self.first

    def __len__(self) -> int:
        return max(0, (self.num_tokens - 1) // self.seq_length)

    def __getitem__(self, index: int) -> Row:
        start = self.first + index * self.seq_length
        tokens = self._read(start, start + self.seq_length + 1)
        row = {"input_ids": tokens[:-1], "labels": tokens[1:]}
        if self.isolate:
            inside = slice(*np.searchsorted(self._ends, [start + 1, start + self.seq_length]))
            bounds = np.array([0, *(self._ends[inside] - start), self.seq_length])
            row["position_ids"] = np.arange(self.seq_length) - np.repeat(bounds[:-1], np.diff(bounds))
        return row

    def _read(self, start: int, stop: int) -> np.ndarray:
        return self._tokens[start:stop].astype(np.int64)

    def num_targets(self, indices: np.ndarray) -> int:
        return len(indices) * self.seq_length

    @property
    def bytes_per_token(self) -> float:
        """Bytes of source text a token, in this part. Of a part of a split, up to 16 stretches are measured."""
        facts = self.meta[self.split]
        if self.num_tokens == facts["tokens"]:
            return facts["bytes"] / facts["tokens"]
        tokenizer, size = load_tokenizer(self.folder), min(self.num_tokens, 2**16)
        starts = np.linspace(self.first, self.last - size, min(16, self.num_tokens // size)).astype(int).tolist()
        blocks = (self._read(start, start + size).tolist() for start in starts)
        texts = (str(tokenizer.decode(b, skip_special_tokens=True, clean_up_tokenization_spaces=False)) for b in blocks)
        return sum(len(text.encode()) for text in texts) / (size * len(starts))


def open_splits(
    folder: Path, seq_length: int, validation_percent: float, *, isolate: bool = False
) -> tuple[Tokens, Tokens, str]:
    """(train, validation, a description of the split and of unused columns) of prepared tokens. `isolate`: see `Tokens`.

    If `write_tokens` held out less than a sequence, the last `validation_percent` of the tokens are the validation split,
    unless files to validate on were given.

    Raises:
        ConfigError: too little text for one sequence in each split.
    """
    part = partial(Tokens, folder, seq_length=seq_length, isolate=isolate)
    train, validation = part("train"), part("validation")
    documents, given = validation.meta["validation"]["documents"], validation.meta["validation_source"]
    stated = f"{documents:,} of {documents + train.meta['train']['documents']:,} documents"
    if given:
        stated = f"{documents:,} document(s) of {given}"
    elif not len(validation):
        cut = math.ceil(train.num_tokens * (1 - validation_percent / 100))
        validation, train = part("train", first=cut), part("train", last=cut)
        stated = f"the last {validation_percent:g} % of the text (whole documents would be too much or too little)"
    source = train.meta["source"]
    for name, split, its_source in (("training", train, source), ("validation", validation, given or source)):
        if not len(split):
            raise ConfigError(
                f"{its_source}: the {name} split has {split.num_tokens} tokens, fewer than one sequence "
                f"(--seq_length {seq_length})"
            )
    return train, validation, stated + records.not_used(train.meta["unused"])


def collate(rows: list[Row]) -> Batch:
    """Rows of equal length -> {"input_ids", "labels"}: [batch, seq] int64; labels are the next tokens."""
    return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in ("input_ids", "labels")}
