"""Text to tokens for pretraining: a tokenizer, memory-mapped files, and sequences cut from them without padding."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from shared import demo
from shared.config.parse import cache_dir
from shared.data import prepared, records
from shared.data.chunks import Joined, chunked, keep_all
from shared.data.mixture import Mixed
from shared.data.order import Batch, Row, is_validation, near_share
from shared.data.records import Source
from shared.demo import DEFAULT_TEMPLATE
from shared.process.collectives import on_main
from shared.process.errors import ConfigError
from shared.text.options import CorpusConfig
from shared.text.special import Special, read_as_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


END_OF_TEXT = "<|endoftext|>"
DOCUMENTS = 2**20  # that are looked at at a time
DEMO = Source("the Python standard library", lambda: [sys.version, demo.python_files()], demo.sources)


# A document, or a part of one that is longer than `records.PIECE`, since no text may be too long for the tokenizer: its
# text, the document's number in the source, whether it is the document's first, and its last. No class of its own: it
# goes to another process, which takes six times as long for a named tuple.
Piece = tuple[str, int, bool, bool]


def content(piece: Piece) -> bytes:
    """All that the tokens of a piece depend on."""
    text, _, is_first, is_last = piece
    return f"{is_first:d}{is_last:d}{text}".encode()


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
        blocks = (text[i : i + records.PIECE] for i in range(0, len(text), records.PIECE))
        for piece, continues in records.split_text(blocks) if len(text) > records.PIECE else ((text, False),):
            is_last = not (continues or records.CONTINUES in record)
            if piece:
                yield piece, document, is_first, is_last
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
        tokenizer: to use; None trains a byte-level BPE on the text of all sources.
        isolate: see `Tokens`.

    Raises:
        ConfigError: as of `prepare` and `open_splits`.
    """
    sources = config.sources()
    if tokenizer is None:
        tokenizer = load_tokenizer(_prepare_tokenizer(config, [*sources.values()]))
    found: dict[str, Corpus] = {}
    for name, source in sources.items():
        folder = prepare(source, tokenizer)
        train, held_out, split = open_splits(
            folder, seq_length, config.validation_split_percentage, config.eval_samples, isolate=isolate
        )
        about = f"{train.meta['source']}: {train.num_tokens:,} tokens to train on; validation: {split}"
        found[name] = Corpus(train, held_out, tokenizer, about, train.fingerprint, held_out.bytes_per_token)
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
        train_tokenizer((p[0] for row in rows for p in row if p), config.vocab_size).save_pretrained(folder / "tokenizer")

    return prepared.build_once(cache_dir() / "tokenizers" / key, build)


def prepare(config: CorpusConfig, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Tokenise the corpus once. With the same files, tokenizer and settings it is there already.

    Each chunk of text is kept as soon as it is tokenised: see `chunks`. Every rank calls this; the main one works, the
    others wait.

    Returns:
        The folder with the tokens, `meta.json` and `tokenizer/`.

    Raises:
        ConfigError: no text, unreadable text, or a tokenizer that is slow or without an end-of-text token.
    """
    how = {
        "tokenizer": hashlib.sha256(serialise(tokenizer).encode()).hexdigest(),
        "ends": [prepared.leading_bos(tokenizer), tokenizer.eos_token_id],
    }
    train, validation = records.open_sources(config, demo=DEMO)
    key = on_main(  # machines may see other file times, and the Hub may answer one of them only
        lambda: prepared.fingerprint(
            code=prepared.source_of("data", "text"),
            train=train.identity(),
            validation=validation and validation.identity(),
            column=config.text_column,
            **how,
        )
    )

    def build(folder: Path) -> None:
        tokenizer.save_pretrained(folder / "tokenizer")
        write_tokens(folder, train, validation, Tokenise(tokenizer), config, how)

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


class Tokenise:
    """Pieces to tokens. A document begins with what the tokenizer puts before texts and ends with the end-of-text token.

    Nothing in its text is a special token: see `special`.

    Gives ([tokens] of `dtype`, [pieces] tokens, [pieces] bytes, [pieces] document numbers, [pieces] bool, the last ones).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_str(serialise(tokenizer))
        self.dtype = np.dtype(np.uint16 if prepared.vocabulary_size(tokenizer) <= 2**16 else np.uint32)
        self.bos, self.eos = prepared.leading_bos(tokenizer), [tokenizer.eos_token_id]
        self.special = Special(tokenizer)
        self.tokenizer.no_truncation()  # a fine-tune may have left it in the tokenizer's file
        self.tokenizer.no_padding()

    def __call__(self, pieces: list[Piece]) -> tuple[np.ndarray, ...]:
        texts, documents, first, last = zip(*pieces, strict=True)
        self.tokenizer.encode_special_tokens = True  # as text; does not go to another process with the tokenizer
        encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        tokens: list[int] = []
        ends = [0]
        for one, is_first, is_last in zip(encoded, first, last, strict=True):
            tokens += self.bos * is_first
            tokens += one.ids
            tokens += self.eos * is_last
            ends.append(len(tokens))
        sizes = np.array([len(text.encode()) for text in texts])
        added = np.zeros(len(tokens), bool)
        if self.bos:
            added[np.array(ends[:-1])[np.array(first)]] = True
        added[np.array(ends[1:])[np.array(last)] - 1] = True
        ids = self.special.to_unknown(np.array(tokens, dtype=self.dtype), added)
        return ids, np.diff(ends), sizes, np.array(documents), np.array(last)


class KeptTokens:
    """A chunk of pieces to `tokens`, and `documents` that end in it, [documents, 2] int64: tokens and bytes up to an end."""

    def __init__(self, tokenise: Tokenise) -> None:
        self.tokenise = tokenise

    def __call__(self, chunk: list[Piece]) -> tuple[dict[str, np.ndarray], dict[str, int]]:
        parts = map(self.tokenise, chunked(chunk, lambda piece: piece[0].encode()))  # all encodings at once fill memory
        tokens, lengths, sizes, _, last = (np.concatenate(some) for some in zip(*parts, strict=True))
        documents = np.stack([np.cumsum(lengths)[last], np.cumsum(sizes)[last]], axis=1)
        facts = {"tokens": len(tokens), "bytes": int(sizes.sum()), "documents": int(last.sum())}
        facts["special"] = self.tokenise.special.count([piece[0] for piece in chunk])
        return {"tokens": tokens, "documents": documents}, facts


def write_tokens(
    folder: Path,
    train: Source,
    validation: Source | None,
    tokenise: Tokenise,
    config: CorpusConfig,
    how: dict[str, Any],
) -> None:
    """Tokenise everything into `folder`: chunk after chunk of each source, and `meta.json`. Call on one rank.

    Raises:
        ConfigError: no text, or a record that is not text.
    """
    from tqdm import tqdm

    unused: set[str] = set()
    meta: dict[str, Any] = {"dtype": tokenise.dtype.name, "source": train.name}
    meta |= {"validation_source": validation and validation.name}  # None: a part of the training source
    progress = tqdm(desc=f"tokenising {train.name}", unit="B", unit_scale=True, leave=False, disable=None)
    for split, source in (("train", train), ("validation", validation)):
        items = pieces(source, config.text_column, unused) if source else iter(())
        found = keep_all(
            items,
            content,
            KeptTokens(tokenise),
            folder / split,
            ["tokens"],
            processes=config.preprocessing_num_workers,
            **how,
        )
        done, digest, sizes = Counter[str](tokens=0, bytes=0, documents=0, special=0), hashlib.sha256(), []
        with open(folder / f"{split}-documents.bin", "wb") as documents:
            for kept, facts in found:
                ends = np.load(kept / "documents.npy") + np.array([done["tokens"], done["bytes"]])
                documents.write(ends.data)
                digest.update(np.load(kept / "tokens.npy").data)
                sizes.append(facts["tokens"])
                done.update(facts)
                progress.update(facts["bytes"])
        meta[split] = {**done, "sha256": digest.hexdigest(), "chunks": sizes}
    progress.close()
    if not meta["train"]["tokens"]:
        raise ConfigError(f"{train.name}: no text in it")
    (folder / "meta.json").write_text(json.dumps(meta | {"unused": sorted(unused)}, indent=1))


class Tokens:
    """Tokens of a split, memory-mapped, as sequences of `seq_length` inputs and their next tokens.

    Args:
        folder: what `write_tokens` filled.
        split: train or validation: a source.
        seq_length: tokens of one sequence.
        spans: [spans, 2], the first and the last + 1 token of each part of the source to use, in order; None: all.
        num_bytes: bytes of text of these parts, if that is known.
        isolate: also give `position_ids`, which restart with each document.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        seq_length: int,
        spans: np.ndarray | None = None,
        num_bytes: int | None = None,
        *,
        isolate: bool = False,
    ) -> None:
        self.folder, self.split, self.seq_length, self.isolate = folder, split, seq_length, isolate
        self.meta = json.loads((folder / "meta.json").read_text())
        facts = self.meta[split]
        self.spans = np.array([[0, facts["tokens"]]]) if spans is None else spans
        self.num_bytes: int | None = facts["bytes"] if spans is None else num_bytes
        self._tokens = Joined(folder / split, "tokens", facts["chunks"])
        self._starts = np.cumsum([0, *np.diff(self.spans)[:, 0]])  # of each span, here

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
            bounds = np.array([0, *self._ends(start, start + self.seq_length), self.seq_length])
            row["position_ids"] = np.arange(self.seq_length) - np.repeat(bounds[:-1], np.diff(bounds))
        return row

    def _stretches(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(first and last + 1 token in the source, tokens before it) of what lies in [start, stop)."""
        number, done = int(np.searchsorted(self._starts, start, side="right")) - 1, 0
        while start + done < stop:
            first = int(self.spans[number, 0] + start + done - self._starts[number])
            last = min(int(self.spans[number, 1]), first + stop - start - done)
            yield first, last, done
            done, number = done + last - first, number + 1

    def _read(self, start: int, stop: int) -> np.ndarray:
        return np.concatenate([self._tokens[first:last] for first, last, _ in self._stretches(start, stop)]).astype(np.int64)

    def _ends(self, start: int, stop: int) -> Iterator[int]:
        """Where documents end within (start, stop), from `start` on."""
        ends = documents(self.folder, self.split)[:, 0]
        for first, last, done in self._stretches(start, stop):
            inside = ends[slice(*np.searchsorted(ends, [first + 1, last + 1]))] - first + done
            yield from (int(end) for end in inside if end < stop - start)

    def num_targets(self, indices: np.ndarray) -> int:
        return len(indices) * self.seq_length

    @property
    def fingerprint(self) -> str:
        """Changes when the tokens do."""
        spans = hashlib.sha256(self.spans.tobytes()).hexdigest()
        return prepared.fingerprint(tokens=self.meta[self.split]["sha256"], spans=spans)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of source text a token. Where their number is not known, up to 16 stretches are measured."""
        if self.num_bytes is not None:
            return self.num_bytes / self.num_tokens
        tokenizer, size = load_tokenizer(self.folder), min(self.num_tokens, 2**16)
        starts = np.linspace(0, self.num_tokens - size, min(16, self.num_tokens // size)).astype(int).tolist()
        blocks = (self._read(start, start + size).tolist() for start in starts)
        texts = (str(tokenizer.decode(b, skip_special_tokens=True, clean_up_tokenization_spaces=False)) for b in blocks)
        return sum(len(text.encode()) for text in texts) / (size * len(starts))


def documents(folder: Path, split: str) -> np.ndarray:
    """[documents, 2] int64, memory-mapped: tokens, and bytes of text, of the source up to the end of each."""
    return np.memmap(folder / f"{split}-documents.bin", np.int64, "r").reshape(-1, 2)


def held_out(folder: Path, percent: float, part: float) -> tuple[np.ndarray, int]:
    """([documents, 2] first and last + 1 token of each document that `order.is_validation` names, their bytes in all)."""
    ends, before, found = documents(folder, "train"), np.zeros((1, 2), np.int64), [np.zeros((0, 2, 2), np.int64)]
    for first in range(0, len(ends), DOCUMENTS):
        some = ends[first : first + DOCUMENTS]
        chosen = is_validation(np.arange(first, first + len(some)), percent, part)
        found.append(np.stack([np.concatenate([before, some[:-1]])[chosen], some[chosen]], axis=1))
        before = some[-1:]
    spans = np.concatenate(found)
    return spans[:, :, 0], int((spans[:, 1, 1] - spans[:, 0, 1]).sum())


def open_splits(
    folder: Path, seq_length: int, validation_percent: float, eval_samples: int | None = None, *, isolate: bool = False
) -> tuple[Tokens, Tokens, str]:
    """(train, validation, a description of the split and of unused columns) of prepared tokens. `isolate`: see `Tokens`.

    Unless files to validate on were given, a hash of their numbers decides which documents are held out: no more than about
    a hundred, or twice `eval_samples` sequences, if these are fewer than `validation_percent`. If they are far from that
    share of the tokens (few documents, some very long), the end of the text is the validation split.

    Raises:
        ConfigError: too little text for one sequence in each split.
    """
    part = partial(Tokens, folder, seq_length=seq_length, isolate=isolate)
    train = part("train")
    source, given, facts = train.meta["source"], train.meta["validation_source"], train.meta["train"]
    if given:
        validation = part("validation")
        stated = f"{validation.meta['validation']['documents']:,} document(s) of {given}"
    else:
        total, documents = facts["tokens"], facts["documents"]
        wanted = share = total * validation_percent / 100
        if eval_samples is not None:
            wanted = min(share, max(2 * eval_samples * (seq_length + 1), 100 * total / documents))
        num_bytes: int | None
        spans, num_bytes = held_out(folder, validation_percent, wanted / share)
        size = int(np.diff(spans).sum())
        stated = f"{len(spans):,} of {documents:,} documents"
        if size <= seq_length or not near_share(size, wanted):
            spans, num_bytes = np.array([[math.ceil(total - wanted), total]]), None
            stated = f"the last {100 * wanted / total:.2g} % of the text (whole documents would be too much or too little)"
        others = np.stack([np.append(0, spans[:, 1]), np.append(spans[:, 0], total)], axis=1)
        train = part("train", spans=others[others[:, 0] < others[:, 1]])
        validation = part("train", spans=spans, num_bytes=num_bytes)
    for name, split, its_source in (("training", train, source), ("validation", validation, given or source)):
        if not len(split):
            raise ConfigError(
                f"{its_source}: the {name} split has {split.num_tokens} tokens, fewer than one sequence "
                f"(--seq_length {seq_length})"
            )
    special = sum(train.meta[split]["special"] for split in ("train", "validation"))
    return train, validation, stated + read_as_text(special) + records.not_used(train.meta["unused"])


def collate(rows: list[Row]) -> Batch:
    """Rows of equal length -> {"input_ids", "labels"}: [batch, seq] int64; labels are the next tokens."""
    return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in ("input_ids", "labels")}
