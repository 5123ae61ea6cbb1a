"""Text to tokens: what is stored is what was written, and sequences tile it."""

import gzip
import io
import json
import random
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import ByT5Tokenizer

from shared.config.options import BatchConfig
from shared.data import records, store
from shared.data.loader import Share
from shared.data.order import IGNORED, is_validation, permute
from shared.data.store import prepare_sources
from shared.extras.streaming import sources
from shared.extras.streaming.sources import open_stream
from shared.extras.streaming.stream import Stream
from shared.process.errors import ConfigError
from shared.text import corpus
from shared.text.options import CorpusConfig
from tests.conftest import put_a_token_before_texts, sentence, write_lines


@pytest.fixture
def documents(text_file):
    return [json.loads(line)["text"] for line in text_file.read_text().splitlines()]


def prepared(text_file, tokenizer, folder, monkeypatch, **options):
    monkeypatch.setenv("TEMPLATES_CACHE", str(folder))
    config = CorpusConfig(train_file=(str(text_file),), **{"preprocessing_num_workers": 1} | options)
    train, given = prepare_sources(config, corpus.EncodeDocuments(tokenizer, config.text_column))
    return train[""], given.get("")


def stored(prepared):
    """All tokens of a source, where its documents end, and their bytes in all."""
    source, _ = prepared
    return source["tokens"], source["ends"].tolist(), int(source["bytes"].sum())


def read(tokens):
    return tokens._read(0, tokens.num_tokens).tolist()


@pytest.mark.parametrize(
    ("piece", "plain", "begun", "processes"), [(2**18, False, False, 2), (40, True, True, 1), (40, False, False, 1)]
)
def test_files_hold_the_documents_each_ended(
    text_file, documents, tokenizer, tmp_path, monkeypatch, piece, plain, begun, processes
):
    """Also those that are read in several pieces. A stream has the same windows."""
    start = [put_a_token_before_texts(tokenizer).bos_token_id] if begun else []
    monkeypatch.setattr(records, "PIECE", piece)
    monkeypatch.setattr(store, "BATCH", 150)  # documents reach over what is tokenised at a time
    path = text_file
    if plain:
        path = tmp_path / "texts"
        path.mkdir()
        for number, text in enumerate(documents):
            (path / f"{number:03d}.txt").write_text(text)
    folder = prepared(path, tokenizer, tmp_path / "cache", monkeypatch, preprocessing_num_workers=processes)
    cut = [[part for part, _ in records.split_text([text])] for text in documents]
    assert (max(map(len, cut)) > 5) == (piece == 40)
    encoded = [[tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts] for parts in cut]
    whole = [[*start, *(token for ids in parts for token in ids), tokenizer.eos_token_id] for parts in encoded]
    tokens, ends, num_bytes = stored(folder)
    assert ends == np.cumsum([len(document) for document in whole]).tolist() and tokens.dtype == np.uint16
    assert num_bytes == sum(len(text.encode()) for text in documents)
    held_out, stream = is_validation(np.arange(len(documents)), 5.0), make_stream(path, tokenizer)
    assert 0 < held_out.sum() < 15
    for split, chosen in zip(corpus.open_splits(*folder, 16, 5)[:2], (~held_out, held_out), strict=True):
        kept = np.flatnonzero(chosen)
        tokens = read(split)
        assert tokens == [token for number in kept for token in whole[number]]
        assert [*split._ends(0, len(tokens))] == np.cumsum([len(whole[number]) for number in kept])[:-1].tolist()
        if chosen is held_out:
            size = sum(len(documents[number].encode()) for number in kept)
            assert (split.num_bytes, split.bytes_per_token(tokenizer)) == (size, size / len(tokens))
        windows = list(stream.sequences(validation=chosen is held_out))
        assert len(windows) == len(split) == (len(tokens) - 1) // 16
        for number, window in enumerate(windows):
            expected = tokens[number * 16 : number * 16 + 17]
            for row in (window, split[number]):
                assert row["input_ids"].tolist() == expected[:-1] and row["labels"].tolist() == expected[1:]


def test_truncation_and_padding_of_a_tokenizer_file_do_not_reach_the_corpus(text_file, tokenizer, tmp_path, monkeypatch):
    plain, *_ = stored(prepared(text_file, tokenizer, tmp_path / "plain", monkeypatch))
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding()
    tokens, *_ = stored(prepared(text_file, tokenizer, tmp_path / "cut", monkeypatch))
    assert tokens.tolist() == plain.tolist()


def test_a_document_that_is_most_of_the_text_is_not_held_out(tokenizer, tmp_path, monkeypatch):
    """A hash of their numbers would hold out the 13th of these, nine tenths of all tokens."""
    assert is_validation(np.arange(16), 5).nonzero()[0].tolist() == [12]
    texts = [f"the model reads line {number} " * (400 if number == 12 else 3) for number in range(16)]
    path = write_lines(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    folder = prepared(path, tokenizer, tmp_path / "cache", monkeypatch)
    train, validation, stated = corpus.open_splits(*folder, 16, 5)
    whole, *_ = stored(folder)
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    assert [*read(train), *read(validation)] == whole.tolist() == [token for document in ids for token in document]
    assert validation.num_tokens == pytest.approx(0.05 * len(whole), abs=1) and stated.startswith("the last 5 % of the text")


def test_one_document_is_split_by_its_tail_whose_bytes_are_its_own(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "book.txt"
    path.write_text("the model reads a line of text " * 300 + "モデルが文を読む" * 20)
    folder = prepared(path, tokenizer, tmp_path / "cache", monkeypatch, validation_split_percentage=8)
    train, validation, stated = corpus.open_splits(*folder, 16, 8)
    whole, _, num_bytes = stored(folder)
    assert train.num_tokens + validation.num_tokens == len(whole) and "the last 8 % of the text" in stated
    assert validation.num_tokens == pytest.approx(0.08 * len(whole), abs=1)
    tail = whole[train.num_tokens :]
    assert validation[0]["input_ids"].tolist() == tail[:16].tolist()
    text = tokenizer.decode(tail, skip_special_tokens=True)
    rate = validation.bytes_per_token(tokenizer)
    assert "モデル" in text and rate == pytest.approx(len(text.encode()) / validation.num_tokens)
    assert abs(rate / (num_bytes / len(whole)) - 1) > 0.2
    with pytest.raises(ConfigError, match=r"whole documents.*raise --validation_split_percentage, or drop --streaming"):
        make_stream(path, tokenizer).held_out(1)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_that_are_not_read_are_said(tokenizer, tmp_path, monkeypatch, suffix):
    rows = [{"text": f"the model reads line {number} " * 9, "label": number % 2, "url": None} for number in range(40)]
    rows[7]["source"] = "a"
    path = tmp_path / f"text.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([{"source": None, **row} for row in rows]), path)
    else:
        write_lines(path, rows)
    folder = prepared(path, tokenizer, tmp_path / "cache", monkeypatch)
    assert corpus.open_splits(*folder, 16, 5)[2].endswith(" documents; not used: label, source")
    streamed = make_stream(path, tokenizer)
    streamed.held_out(1)
    assert records.not_used(streamed.notes.named("unused ")) == "; not used: label, source"


def test_too_short_a_validation_file_is_no_reason_to_validate_on_training_text(text_file, tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "val.txt"
    path.write_text("the model reads")
    short = prepared(text_file, tokenizer, tmp_path / "cache", monkeypatch, validation_file=(str(path),))
    with pytest.raises(ConfigError, match=r"val\.txt: the validation split has \d+ tokens, fewer than one sequence"):
        corpus.open_splits(*short, 64, 5)
    path.write_text("the model reads a line of text " * 20)
    enough = prepared(text_file, tokenizer, tmp_path / "cache", monkeypatch, validation_file=(str(path),))
    train, validation, stated = corpus.open_splits(*enough, 64, 5)
    assert (len(train.store), validation.store.source) == (57, str(path))
    assert stated == f"1 document(s) of {path}"


def test_a_slow_tokenizer_is_refused(text_file, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="the tokenizer is a slow one"):
        prepared(text_file, ByT5Tokenizer(), tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="the tokenizer is a slow one"):
        make_stream(text_file, ByT5Tokenizer()).held_out(1)


def test_prepared_again_only_when_something_changed(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "the model reads", "body": "a line of text"}\n' * 9)

    def folder(**options):
        return prepared(path, tokenizer, tmp_path / "cache", monkeypatch, **options)[0].folder

    first = folder()
    assert folder() == folder(validation_split_percentage=9) == first
    others = [folder(text_column="body")]
    tokenizer.add_tokens(["reads"])
    others.append(folder())
    with path.open("a") as file:
        file.write('{"text": "one more"}\n')
    others.append(folder())
    assert len({first, *others}) == 4 and not list((tmp_path / "cache/corpus").glob(".*"))


def test_a_trained_tokenizer_has_its_own_end_and_padding_and_has_seen_as_much_of_one_long_text_as_is_wanted(documents):
    tokenizer = corpus.train_tokenizer(documents, 320)
    assert len(tokenizer) <= 320
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    text = "a line, with é, 🙂 and\ttabs\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    text = " ".join(documents)
    wanted = corpus.train_tokenizer([text[:5000]], 300)
    assert len(wanted) == 300
    assert corpus.train_tokenizer([text], 300, max_characters=5000).get_vocab() == wanted.get_vocab()
    at = text.index(" ", 3000)
    assert corpus.train_tokenizer([text[:at], text[at:]], 300, max_characters=5000).get_vocab() == wanted.get_vocab()


def make_stream(path, tokenizer, rank=0, world=1, *, length=16, seed=0, hub=False, **options):
    source = open_stream(CorpusConfig(**{"dataset_name" if hub else "train_file": (str(path),)}), corpus.DEMO)
    usual = {"validation_split_percentage": 5, "preprocessing_num_workers": 1, "streaming": True}
    options = CorpusConfig(**usual | options)
    batch = BatchConfig(global_batch_size=4, per_device_train_batch_size=2, seed=seed)
    return Stream(source, tokenizer, length, options, batch, Share(rank, world, torch.device("cpu")))


def test_rows_of_a_stream_are_transformed_by_seed_epoch_and_number(text_file, tokenizer):
    def noisy(row):
        return {**row, "input_ids": row["input_ids"] + np.random.randint(100, size=16)}

    def read(rank, world, start, stop):
        stream = make_stream(text_file, tokenizer, rank, world)
        stream.transform = noisy
        found = {}
        for step, window in enumerate(stream.windows(start, stop), start):
            for batch, numbers in zip(window.micro_batches, window.indices.tolist(), strict=True):
                found |= {(step, number): ids for number, ids in zip(numbers, batch["input_ids"].tolist(), strict=True)}
        return found

    each = sum(1 for _ in make_stream(text_file, tokenizer).sequences()) // 4
    one = read(0, 1, 0, each + 3)
    assert one == read(0, 2, 0, each + 3) | read(1, 2, 0, each + 3)
    assert {key: ids for key, ids in one.items() if key[0] >= each} == read(0, 1, each, each + 3)
    assert all(one[0, number] != one[each, number] for number in range(4))


def test_the_longest_rows_of_a_stream_are_viewed_and_transformed_too(text_file, tokenizer):
    """Which three ranks of DDP, and rehearsals, try first."""

    class Fewer:
        def __init__(self, rows):
            self.rows = rows

        def __getitem__(self, index):
            return {**self.rows[index], "labels": np.where(np.arange(16) < 3, 1, IGNORED)}

    stream = make_stream(text_file, tokenizer)
    stream.view, stream.transform = Fewer, lambda row: {**row, "input_ids": row["input_ids"] * 0}
    batch = stream.longest(2)
    assert (batch["labels"] != IGNORED).sum() == 6 and not batch["input_ids"].any()


def test_a_stream_s_identity_changes_with_its_samples(text_file, tokenizer):
    kinds = ({}, {"length": 32}, {"text_column": "body"}, {"validation_split_percentage": 9})
    assert len({make_stream(text_file, tokenizer, **kind).identity() for kind in kinds}) == 4


def test_what_is_wrong_is_said_with_its_place(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "text.jsonl"
    for content, message in {
        '{"text": null}\n': "text.jsonl:1: 'text' is null",
        '{"body": "x"}\n': "no column 'text'",
        '{"text": ""}\n': "no text",
    }.items():
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            prepared(path, tokenizer, tmp_path / "cache", monkeypatch)
    assert {path.suffix for path in (tmp_path / "cache/corpus").iterdir()} == {".lock"}


def test_no_more_is_held_out_than_evaluation_uses(tokenizer, tmp_path, monkeypatch):
    path = write_lines(tmp_path / "text.jsonl", ({"text": f"the model reads line {n} "} for n in range(10_000)))
    folder = prepared(path, tokenizer, tmp_path / "cache", monkeypatch)
    total = len(stored(folder)[0])
    sizes = {rows: corpus.open_splits(*folder, 16, 5, rows)[1].num_tokens for rows in (None, 10_000, 64, 1)}
    assert sizes[10_000] == sizes[None] == pytest.approx(0.05 * total, rel=0.1)
    assert sizes[64] == pytest.approx(2 * 64 * 17, rel=0.3) and sizes[1] == pytest.approx(100 * total / 10_000, rel=0.3)
    fewer, most = (corpus.open_splits(*folder, 16, 5, rows)[0] for rows in (None, 64))
    assert most.num_tokens + sizes[64] == total and most.fingerprint != fewer.fingerprint
    some, every = ({*map(tuple, corpus._hold_out(folder[0], 16, 5, rows)[0])} for rows in (64, None))
    assert some < every
    stream = make_stream(path, tokenizer)
    first = np.concatenate([row["input_ids"] for row in stream.held_out(20).values()])
    numbers, ends = np.flatnonzero(is_validation(np.arange(10_000), 5)), folder[0]["ends"]
    tokens, number = stored(folder)[0], np.searchsorted(np.cumsum(np.diff(ends, prepend=0)[numbers]), 20 * 16 + 1)
    each = np.split(tokens.astype(np.int64), ends[:-1])
    assert stream.held_out_before == numbers[number] + 1 < 1000
    assert np.concatenate([each[n] for n in numbers])[: 20 * 16].tolist() == first.tolist()
    trained = np.concatenate([row["input_ids"] for row in stream.sequences(validation=False)])
    left = np.concatenate([some for n, some in enumerate(each) if n not in numbers[: number + 1]])
    assert trained.tolist() == left[: len(trained)].tolist() and len(left) - len(trained) <= 16


def write_documents(folder, form, texts):
    """`texts` in two files of a form, with blank lines and line ends of all kinds in JSON lines."""
    folder.mkdir()
    for part, some in enumerate((texts[:70], texts[70:])):
        path = folder / f"{part}.{form}"
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in some]
        if form == "parquet":
            pq.write_table(pa.table({"text": some}), path, row_group_size=10)
        elif form == "json":
            path.write_text(f"[{','.join(lines)}]")
        elif form == "csv":
            path.write_text("text\n" + "".join(f'"{text}"\n' for text in some))
        elif form == "txt":
            for number, text in enumerate(some):
                (folder / f"{part}-{number:03d}.txt").write_text(text)
        else:
            content = "\ufeff" + "".join(line + ("\n", "\r\n", "\n \n")[n % 3] for n, line in enumerate(lines))
            path.write_bytes(gzip.compress(content.encode()) if form.endswith("gz") else content.encode())
    return folder


def plain(windows):
    return [[batch["input_ids"].tolist() for batch in window.micro_batches] for window in windows]


FORMS = {"jsonl": (0, 8, 30), "parquet": (0, 8), "jsonl.gz": (30,), "csv": (0,), "json": (8,), "txt": (30,)}
FORMS |= {"hub parquet": (0, 8), "hub json": (30,)}


@pytest.mark.parametrize(("form", "window"), [(form, window) for form, windows in FORMS.items() for window in windows])
def test_a_resumed_stream_reads_on_from_its_place(tokenizer, tmp_path, monkeypatch, capsys, form, window):
    """Killed after any step, with the place through JSON as checkpoints do: the same samples, and little is read again."""
    monkeypatch.setattr(store, "BATCH", 2000)
    rng = random.Random(0)
    texts = [("é " if n % 5 == 0 else "") + sentence(rng, rng.randint(1, 90)) for n in range(140)]
    texts[3] = texts[75] = ""
    monkeypatch.setattr(sources, "STATES", 16)
    *hub, form = form.split()
    folder = write_documents(tmp_path / "data", form, texts)
    make = partial(make_stream, folder, tokenizer, shuffle_window=window, hub=bool(hub))
    whole = list(make().windows(0, 150))
    assert [w.epoch for w in whole][-1] == 1
    read = []
    split = records.split_text
    monkeypatch.setattr(corpus.records, "split_text", lambda blocks: read.append(1) or split(blocks))
    for step in (1, 7, 50, *range(90, 104), 120, 149):
        stream = make()
        stream.place = json.loads(json.dumps(whole[step - 1].place))
        capsys.readouterr()
        read.clear()
        windows = stream.windows(step, step + 1)
        assert plain(windows) == plain(whole[step : step + 1])
        said = capsys.readouterr().err
        assert f"on to step {step}, where the run continues\n" in said
        unindexed = not hub and form in ("jsonl.gz", "csv", "json") and stream.place["mark"][1] > 0
        assert ("has no index, so it is read from its start to record" in said) == unindexed
        assert len(read) < (40, 80)[form == "txt"]  # documents
    later = make()
    later.place = whole[99].place
    again = list(later.windows(100, 150))
    assert plain(again) == plain(whole[100:]) and [w.place for w in again] == [w.place for w in whole[100:]]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_what_is_read_to_resume_does_not_grow_with_the_step(tokenizer, tmp_path, monkeypatch, form):
    rng = random.Random(0)
    path = tmp_path / f"text.{form}"
    rows = [{"text": sentence(rng, 60)} for _ in range(2000)]
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=60, use_dictionary=False)
    else:
        write_lines(path, rows)
    monkeypatch.setattr(store, "BATCH", 2**12)
    size, read = len(rows) if form == "parquet" else path.stat().st_size, []

    class Counted(io.FileIO):
        def readinto(self, buffer):
            read.append(super().readinto(buffer))
            return read[-1]

    monkeypatch.setattr(sources, "open_bytes", lambda path: io.BufferedReader(Counted(path)))
    batches = pq.ParquetFile.iter_batches

    def counted(self, **options):
        return (read.append(len(batch)) or batch for batch in batches(self, **options))

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    (*_, last) = make_stream(path, tokenizer, length=64).windows(0, 250)
    assert sum(read) > size / 2
    read.clear()
    stream = make_stream(path, tokenizer, length=64)
    stream.place = last.place
    jumped = plain(stream.windows(250, 251))
    assert 0 < sum(read) < size / 7
    read.clear()
    stream.place = None
    assert plain(stream.windows(250, 251)) == jumped and sum(read) > size / 2


def test_the_samples_of_a_stream_are_a_function_of_seed_and_epoch(text_file, tokenizer, monkeypatch):
    """On any world size and from any step, beside a plain reference: the sequences, cut into windows, each permuted."""
    source = [
        [*row["input_ids"].tolist(), row["labels"].tolist()[-1]]
        for row in make_stream(text_file, tokenizer).sequences(validation=False)
    ]
    each = len(source) // 4

    def rows(seed, window, rank=0, world=1, start=0, **options):
        stream = make_stream(text_file, tokenizer, rank, world, shuffle_window=window, seed=seed, **options)
        windows = list(stream.windows(start, 2 * each))
        assert [w.epoch for w in windows] == ([0] * each + [1] * each)[start:]
        return [[row for batch in plain([w])[0] for row in batch] for w in windows], windows

    for seed, window in ((0, 0), (0, 10), (1, 10), (0, 1000)):
        steps, windows = rows(seed, window)
        for epoch in (0, 1):
            order = []
            for number, first in enumerate(range(0, len(source), window or 1)):
                size = len(source[first : first + (window or 1)])
                order += [first + i for i in permute(np.arange(size), size, (seed, epoch, number))]
            flat = [row for step in steps[epoch * each : (epoch + 1) * each] for row in step]
            assert flat == [source[i][:-1] for i in order[: len(flat)]]
            assert (flat == [tokens[:-1] for tokens in source[: len(flat)]]) is (window == 0)
            assert sorted(order) == list(range(len(source)))
            used = [int(i) for w in windows[epoch * each : (epoch + 1) * each] for i in w.indices.flat]
            assert used == order[: len(used)]
        halves = [rows(seed, window, rank, 2)[0] for rank in (0, 1)]
        for one, first, second in zip(steps, *halves, strict=True):
            assert sorted(one) == sorted(first + second)
        assert rows(seed, window, start=each + 3)[0] == steps[each + 3 :]
    assert rows(0, 10)[0] != rows(1, 10)[0]
    steps = rows(0, 0)[0]
    held_out = [row["input_ids"].tolist() for row in make_stream(text_file, tokenizer).held_out(5).values()]
    assert len(held_out) == 5 and not [row for step in steps for row in step if row in held_out]
    monkeypatch.setattr(store, "BATCH", 500)
    assert rows(0, 0, preprocessing_num_workers=2)[0] == steps
    with pytest.raises(ConfigError, match="--shuffle_window is for --streaming"):
        CorpusConfig(shuffle_window=10)


def test_a_place_of_another_stream_is_not_taken(text_file, tokenizer, tmp_path):
    """Of other data, or of other settings that --allow_changed lets pass: it reads from the start, and is right."""
    (*_, last) = make_stream(text_file, tokenizer).windows(0, 20)
    other = tmp_path / "text.jsonl"
    other.write_text("".join(reversed(text_file.read_text().splitlines(keepends=True))) + '{"text": "one more"}\n')
    for path, options in ((other, {}), (text_file, {"shuffle_window": 5}), (text_file, {"validation_split_percentage": 9})):
        stream = make_stream(path, tokenizer, **options)
        expected = plain(make_stream(path, tokenizer, **options).windows(0, 25))[20:]
        stream.place = last.place
        assert plain(stream.windows(20, 25)) == expected
