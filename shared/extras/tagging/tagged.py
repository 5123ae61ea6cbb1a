"""Texts with a tag for each word: prepared once, in windows of tokens, and read as samples."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shared.data import prepared
from shared.data.labels import LabelledData, Labels
from shared.data.notes import Notes, text_hash
from shared.data.order import IGNORED, Batch, Row
from shared.data.records import Records, Source
from shared.data.store import Encoded, Split, Store, prepare_sources
from shared.extras.tagging import records
from shared.extras.tagging.options import TaggedTextConfig
from shared.extras.tagging.records import Tagged
from shared.extras.tagging.spans import OUTSIDE, as_iob2, classes_of, inside_of, marks_spans
from shared.models.tokenizers import identity_of
from shared.process.errors import ConfigError
from shared.process.printing import note
from shared.text.special import Special

Item = tuple[str, dict[str, Any]]  # the place and the record of a text


def windows(words: np.ndarray, room: int, overlap: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut a text's tokens into windows of at most `room`, which begin and end with words.

    Args:
        words: [tokens], the word of each; none has more than (room - overlap) / 4 tokens.
        overlap: tokens that a window shares with the next one, or a word more.

    Yields:
        The first token and the one after the last; and of the window's own tokens the same. Each
        token is of the window that has most around it.
    """
    starts = np.flatnonzero(np.diff(words, prepend=-1))

    def start_until(token: int) -> int:
        return int(starts[np.searchsorted(starts, token, side="right") - 1])

    first = own = 0
    while first + room < len(words):
        end = start_until(first + room)
        following = start_until(end - overlap)
        middle = start_until((following + end) // 2)
        yield first, end, own, middle
        first, own = following, middle
    yield first, len(words), own, len(words)


class EncodeTagged:
    """Texts to windows of tokens, see `store.Encode`: `input_ids`, and `words`: which of the
    window's own words each token is of, or -1.

    A text is tokenised as it stands, as a pipeline does. A token of two words counts for the first.
    Of each window it keeps the `place`, its own `words`, and their `tags` as IOB2.
    """

    kind = "tagged"
    demo = Source("functions of the standard library", records.code_identity, records.code)

    def __init__(self, options: TaggedTextConfig, tokenizer: Any) -> None:
        self.options = options
        self.tokenizer = tokenizer
        self.special = Special(tokenizer)
        sample = tokenizer("a", return_special_tokens_mask=True)
        ids, is_added = (np.array(sample[k]) for k in ("input_ids", "special_tokens_mask"))
        inside = np.flatnonzero(is_added == 0)
        self.around = ids[: inside[0]], ids[inside[-1] + 1 :]
        self.room = options.seq_length - sum(map(len, self.around))
        self.overlap = int(self.room * options.window_overlap)
        self.longest = max(1, (self.room - self.overlap) // 4)  # tokens of a word; others are cut

    def identity(self) -> Any:
        options = self.options
        files = ("tagged", "records", "spans")
        return {
            "code": prepared.source_of(*(f"extras/tagging/{name}.py" for name in files)),
            "tokenizer": identity_of(self.tokenizer),
            "windows": [options.seq_length, options.window_overlap],
            "columns": [options.tokens_column, options.tags_column, *options.tag_names],
        }

    def items(self, source: Source, notes: Notes) -> Records:
        return records.read(source, self.options)

    def size(self, item: Item) -> int:
        return len(str(item[1]))

    def where(self, item: Item) -> str:
        return item[0]

    def __call__(self, items: list[Item], notes: Notes) -> Encoded:
        read = [records.tagged(*item, self.options) for item in items]
        encoded = self.tokenizer(
            [item.text for item in read],
            add_special_tokens=False,
            split_special_tokens=True,
            return_offsets_mapping=True,
            return_attention_mask=False,
        )
        ids: list[np.ndarray] = []
        words: list[np.ndarray] = []
        table: list[list[int]] = []
        lines: dict[str, list[Any]] = {"place": [], "words": [], "tags": []}
        each = zip(read, encoded["input_ids"], encoded["offset_mapping"], strict=True)
        for item, tokens, offsets in each:
            of_word = words_of(item, offsets)
            near = np.maximum.accumulate(of_word)  # white space goes with the word before it
            in_word = np.arange(len(near)) - np.searchsorted(near, near)
            kept = (near >= 0) & (in_word < self.longest)
            if not kept.any():
                raise ConfigError(f"{item.where}: the tokenizer makes no token of this text")
            numbers, near = np.unique(near[kept], return_inverse=True)
            lost = {*range(len(item.tags))} - {*numbers.tolist()}
            notes.counts["words"] += len(lost)
            if any(item.tags[word] != OUTSIDE for word in lost):
                notes.add("untold", item.where)
            texts = [item.text[slice(*item.bounds[word])] for word in numbers]
            tags = [item.tags[word] for word in numbers]
            notes.add(f"scheme {scheme_of(tags)}")
            tags = as_iob2(tags)
            of_word = np.where(of_word[kept] >= 0, near, -1)
            tokens = self.special.to_unknown(np.array(tokens)[kept], np.zeros(len(near), bool))
            parts = windows(near, self.room, self.overlap)
            for number, (first, end, own, own_end) in enumerate(parts):
                start, stop = int(near[own]), int(near[own_end - 1]) + 1
                mine = np.where(of_word >= 0, of_word - start, -1)
                mine[:own] = mine[own_end:] = -1
                margins = [*map(len, self.around)]
                words.append(np.pad(mine[first:end], margins, constant_values=-1))
                ids.append(np.concatenate([self.around[0], tokens[first:end], self.around[1]]))
                lines["place"].append(item.where + f", from word {start + 1}" * bool(number))
                lines["words"].append(texts[start:stop])
                lines["tags"].append(tags[start:stop])
                hashed = text_hash([item.text, number])
                table.append([number, stop - start, int((mine >= 0).sum()), hashed])
        columns = zip(*table, strict=True)
        names = ("window", "num_words", "num_tokens", "text_hash")
        values = {"input_ids": np.concatenate(ids), "words": np.concatenate(words)}
        return Encoded(
            {name: array.astype(np.int32) for name, array in values.items()},
            np.cumsum([*map(len, words)]),
            {n: np.array(column, np.int64) for n, column in zip(names, columns, strict=True)},
            lines,
        )


def scheme_of(tags: Sequence[str]) -> str:
    """What a text's tags are written in, if they mark spans; for people."""
    if {tag[:2] for tag in tags} & {"E-", "S-", "L-", "U-"}:
        return "BIOES"
    return "IOB2" if as_iob2(tags) == [*tags] else "IOB1"


def words_of(item: Tagged, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """The word that each token begins in, or that white space before it leads to: [tokens], -1 for
    none.
    """
    starts, ends = np.array(item.bounds).T
    begins, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    word = np.searchsorted(ends, begins, side="right")
    return np.where(np.append(starts, sys.maxsize)[word] <= stops, word, -1)


class TaggedTexts(Split):
    """Windows of texts: `order.Samples`, and what an evaluation asks for.

    Each row has `input_ids` and `labels`, [tokens] int64: the class of the token's word, or
    IGNORED.

    Args:
        stores, numbers: see `Split`.
        labels: of all words, window after window.
        tokenizer: that encoded them.

    Attributes:
        every: all tokens of a word count, not only the first.
    """

    every = False

    def __init__(
        self,
        stores: Mapping[str, Store],
        numbers: Sequence[np.ndarray],
        labels: Labels,
        tokenizer: Any,
    ) -> None:
        super().__init__(stores, numbers)
        self.labels = labels
        self.tokenizer = tokenizer
        self.first_words = np.append(0, np.cumsum(self.column("num_words")))

    def tags(self, index: int) -> np.ndarray:
        """The classes of a window's own words."""
        return self.labels.values[self.first_words[index] : self.first_words[index + 1]]

    def __getitem__(self, index: int) -> Row:
        ids, words = self.values(index, "input_ids", "words")
        tags = self.tags(index)
        labels = np.full(len(ids), IGNORED)
        if self.every:
            labels = np.where(words >= 0, inside_of(self.labels.classes)[tags][words], IGNORED)
        labels[self.read_at(index)] = tags
        return {"input_ids": ids.astype(np.int64), "labels": labels}

    def num_targets(self, indices: np.ndarray) -> int:
        column = self.column("num_tokens" if self.every else "num_words")
        return int(column[indices].sum())

    def read_at(self, index: int) -> np.ndarray:
        """The tokens at which a window's own words are read: the first of each."""
        (words,) = self.values(index, "words")
        numbers, firsts = np.unique(words, return_index=True)
        return firsts[numbers >= 0]

    def texts(self) -> list[np.ndarray]:
        """The windows of each text, as the data have them."""
        each = zip(self.starts, self.numbers, strict=False)
        order = np.concatenate([start + np.argsort(numbers) for start, numbers in each])
        begins = np.flatnonzero(self.column("window")[order] == 0)
        return np.split(order, begins[1:])

    def shown(self, number: int) -> dict[str, Any]:
        """An evaluation has it all."""
        return {}

    def position(self, number: int) -> int:
        """`texts` has them as the data do."""
        return number

    def draw(self, *_: Any) -> None:
        """Texts are read in evaluation.json."""

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, which are of a span) for the report."""
        ids, words = self.values(index, "input_ids", "words")
        names = np.array(self.labels.classes)[self.tags(index)]
        return ids, (words >= 0) & (names[words] != OUTSIDE)


@dataclass(frozen=True)
class TaggedData(LabelledData):
    """Training and validation texts of a config."""

    def class_weights(self, mix_weights: tuple[float, ...]) -> torch.Tensor:
        """[classes] fp32: see `Labels.class_weights`; samples are words here."""
        firsts = self.train.first_words[self.train.starts]
        words = dict(zip(self.train.sources, np.diff(firsts).tolist(), strict=True))
        with np.errstate(divide="ignore"):  # of an I- that no text has
            weights = self.train.labels.class_weights(words, mix_weights)
        return weights.nan_to_num(posinf=0.0)

    def count(self, pieces: str | None, model: Any) -> str:
        """Choose which tokens of a word count, and say so: if not given, all of decoders."""
        is_decoder = any(getattr(part, "is_causal", False) for part in model.modules())
        pieces = pieces or ("all" if is_decoder else "first")
        self.train.every = self.validation.every = pieces == "all"
        return "all tokens" if self.train.every else "the first token"


def open_texts(options: TaggedTextConfig, tokenizer: Any) -> TaggedData:
    """Prepare the data, or each source of a mixture, and split them by texts. Every rank calls
    this.

    Args:
        tokenizer: pads on the right from now on, with its end-of-text token if it has no other.

    Raises:
        ConfigError: wrong input, with its place.
    """
    if not tokenizer.is_fast:
        raise ConfigError("this tokenizer does not tell where its tokens are in a text")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    trained, given = prepare_sources(options, EncodeTagged(options, tokenizer))
    train_numbers, held_out = [], []
    for store in trained.values():
        of_text = np.cumsum(store["window"] == 0) - 1
        # texts alike, as without classes
        texts = Labels("regression", (), np.zeros(int(of_text[-1]) + 1))
        held = texts.hold_out(options.validation_split_percentage)[of_text] & (not given)
        train_numbers.append(np.flatnonzero(~held))
        held_out.append(np.flatnonzero(held))
    if given:
        held_out = [np.arange(len(store)) for store in given.values()]
    validated = given or trained
    tags = {store.folder: store.lines("tags") for store in (*trained.values(), *given.values())}
    each = zip(trained.values(), train_numbers, strict=True)
    known = {tag for store, chosen in each for n in chosen for tag in tags[store.folder][n]}
    classes = classes_of({*known, *options.tag_names})
    source = ", ".join(store.source for store in trained.values())
    if not any(map(len, held_out)):
        raise ConfigError(f"{source}: no text to validate on")
    if len(classes) < 2:
        raise ConfigError(f"{source}: only one tag to train on, {classes[0]!r}")
    number_of = {name: number for number, name in enumerate(classes)}

    def split(of: Mapping[str, Store], numbers: Sequence[np.ndarray]) -> TaggedTexts:
        values = []
        for store, chosen in zip(of.values(), numbers, strict=True):
            for n in chosen.tolist():
                for tag in tags[store.folder][n]:
                    if tag not in number_of:
                        raise ConfigError(
                            f"{store.line('place', n)}: the tag {tag!r} is none of the training "
                            f"data ({', '.join(classes[:10])}{', ...' * (len(classes) > 10)})"
                        )
                    values.append(number_of[tag])
        return TaggedTexts(
            of, numbers, Labels("single_label", classes, np.array(values)), tokenizer
        )

    train = split(trained, train_numbers)
    # batches of similar lengths
    by_length = [
        chosen[np.argsort(-store.lengths[chosen], kind="stable")]
        for store, chosen in zip(validated.values(), held_out, strict=True)
    ]
    validation = split(validated, by_length)
    notes = Notes()
    for store in (*trained.values(), *given.values()):
        notes.update(store.notes)
    scheme = "tags of single words"
    if marks_spans(classes):
        scheme = max(notes.named("scheme "), key=("IOB2", "IOB1", "BIOES").index)
    if all(map(str.isdecimal, classes)):
        note("warning: the tags are numbers: --tag_names names them, and spans are found")
    lost = notes.counts["words"]
    if untold := notes.counts["untold"]:
        note(
            f"warning: {untold:,} texts have a tagged word without a token of its own: neither "
            f"learned nor scored; the first: {notes.first['untold'][0]}"
        )
    about = (
        f"{source}: {scheme}; {len(train.labels):,} words of {len(train):,} windows to train on, "
        f"{len(validation.labels):,} of {len(validation):,} to validate on"
        + f"; {lost:,} words have no token of their own, and are left out"
        * bool(lost)
    )
    identity = prepared.fingerprint(
        train=train.fingerprint,
        validation=validation.fingerprint,
        classes=classes,
        labels=hashlib.sha256(train.labels.values.tobytes()).hexdigest(),
    )
    return TaggedData(train, validation, identity, about)


def collate(rows: list[Row], *, pad_token_id: int, at_most: int) -> Batch:
    """Rows of `TaggedTexts` -> {"input_ids", "labels"}: [batch, longest] int64, padded to a
    multiple of 8; and "attention_mask", if a row is shorter.

    Args:
        at_most: no row is longer, nor padded to more.
    """
    lengths = np.array([len(row["input_ids"]) for row in rows])
    longest = min(int(lengths.max()) + -int(lengths.max()) % 8, at_most)
    is_text = np.arange(longest) < lengths[:, None]
    batch = {}
    for name, filler in (("input_ids", pad_token_id), ("labels", IGNORED)):
        batch[name] = np.full((len(rows), longest), filler)
        batch[name][is_text] = np.concatenate([row[name] for row in rows])
    if lengths.min() < longest:
        batch["attention_mask"] = is_text.astype(np.int64)
    return {name: torch.from_numpy(array) for name, array in batch.items()}
