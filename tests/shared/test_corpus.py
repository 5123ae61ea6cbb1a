"""Text to tokens: what is stored is what was written, and sequences tile it."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer, ByT5Tokenizer

from shared.data import records
from shared.data.order import is_validation
from shared.process.errors import ConfigError
from shared.text import corpus
from shared.text.options import CorpusConfig
from shared.text.stream import Stream
from tests.conftest import put_a_token_before_texts


@pytest.fixture
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def documents(text_file):
    return [json.loads(line)["text"] for line in text_file.read_text().splitlines()]


def prepared(text_file, tokenizer, folder, monkeypatch, **options):
    monkeypatch.setenv("TEMPLATES_CACHE", str(folder))
    return corpus.prepare(CorpusConfig(train_file=(str(text_file),), **options), tokenizer)


def stream(folder, split):
    meta = json.loads((folder / "meta.json").read_text())
    return np.fromfile(folder / f"{split}.bin", dtype=meta["dtype"]), meta[split]


@pytest.mark.parametrize("num_proc", [1, 2])
def test_files_hold_the_documents_each_ended(text_file, documents, tokenizer, tmp_path, monkeypatch, num_proc):
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 500)
    folder = prepared(text_file, tokenizer, tmp_path, monkeypatch, preprocessing_num_workers=num_proc)
    held_out = is_validation(np.arange(len(documents)), 5.0)
    assert 0 < held_out.sum() < 15
    for split, chosen in (("train", ~held_out), ("validation", held_out)):
        expected = [
            [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
            for text, keep in zip(documents, chosen, strict=True)
            if keep
        ]
        tokens, facts = stream(folder, split)
        assert tokens.dtype == np.uint16
        assert tokens.tolist() == [token for document in expected for token in document]
        assert np.load(folder / f"{split}-ends.npy").tolist() == np.cumsum([len(d) for d in expected]).tolist()
        assert facts["bytes"] == sum(len(t.encode()) for t, keep in zip(documents, chosen, strict=True) if keep)
        windows = corpus.Tokens(folder, split, 16)
        for index in (0, len(windows) - 1):
            row = windows[index]
            assert row["input_ids"].tolist() == tokens[index * 16 : index * 16 + 16].tolist()
            assert row["labels"].tolist() == tokens[index * 16 + 1 : index * 16 + 17].tolist()
        assert len(windows) == (len(tokens) - 1) // 16


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("begun", [False, True])
def test_a_document_of_several_pieces_is_one(text_file, documents, tokenizer, tmp_path, monkeypatch, plain, begun):
    start = [put_a_token_before_texts(tokenizer).bos_token_id] if begun else []
    monkeypatch.setattr(records, "PIECE", 40)
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 150)  # documents reach over what is tokenised at a time
    path = text_file
    if plain:
        path = tmp_path / "texts"
        path.mkdir()
        for number, text in enumerate(documents):
            (path / f"{number:03d}.txt").write_text(text)
    folder = prepared(path, tokenizer, tmp_path / "cache", monkeypatch)
    held_out = is_validation(np.arange(len(documents)), 5.0)
    whole, end = make_stream(path, tokenizer, 0, 1), tokenizer.eos_token_id
    for split, chosen in (("train", ~held_out), ("validation", held_out)):
        kept = [text for text, keep in zip(documents, chosen, strict=True) if keep]
        cut = [[piece for piece, _ in records.split_text([text])] for text in kept]
        assert max(map(len, cut)) > 5
        encoded = [[tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces] for pieces in cut]
        expected = [[*start, *(t for ids in pieces for t in ids), end] for pieces in encoded]
        tokens, facts = stream(folder, split)
        assert tokens.tolist() == [token for document in expected for token in document]
        assert facts["documents"] == len(expected) == chosen.sum()
        assert np.load(folder / f"{split}-ends.npy").tolist() == np.cumsum([len(d) for d in expected]).tolist()
        assert facts["bytes"] == sum(len(text.encode()) for text in kept)
        windows = list(whole.sequences(validation=split == "validation"))
        assert len(windows) == (len(tokens) - 1) // 16
        for number, window in enumerate(windows):
            assert window.tolist() == tokens[number * 16 : number * 16 + 17].tolist()


def test_truncation_and_padding_of_a_tokenizer_file_do_not_reach_the_corpus(text_file, tokenizer, tmp_path, monkeypatch):
    plain, _ = stream(prepared(text_file, tokenizer, tmp_path / "plain", monkeypatch), "train")
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding()
    tokens, _ = stream(prepared(text_file, tokenizer, tmp_path / "cut", monkeypatch), "train")
    assert tokens.tolist() == plain.tolist()


def test_a_document_that_is_most_of_the_text_is_not_held_out(tokenizer, tmp_path, monkeypatch):
    """A hash of their numbers would hold out the 13th of these, nine tenths of all tokens."""
    assert is_validation(np.arange(16), 5).nonzero()[0].tolist() == [12]
    texts = [f"the model reads line {number} " * (400 if number == 12 else 3) for number in range(16)]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    folder = prepared(path, tokenizer, tmp_path / "cache", monkeypatch)
    _train, validation, stated = corpus.open_splits(folder, 16, 5)
    whole, facts = stream(folder, "train")
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in [*texts[:12], *texts[13:], texts[12]]]
    assert whole.tolist() == [token for document in ids for token in document]
    assert np.load(folder / "train-ends.npy").tolist() == np.cumsum([len(document) for document in ids]).tolist()
    assert facts["documents"] == 16 and facts["bytes"] == sum(len(text.encode()) for text in texts)
    assert validation.num_tokens == pytest.approx(0.05 * len(whole), abs=1) and stated.startswith("the last 5 % of the text")
    assert (folder / "validation.bin").stat().st_size == 0


def test_the_bytes_of_a_tail_are_its_own(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "book.txt"
    path.write_text("the model reads a line of text " * 300 + "モデルが文を読む" * 20)
    folder = prepared(path, tokenizer, tmp_path / "cache", monkeypatch)
    _, validation, _ = corpus.open_splits(folder, 16, 5)
    whole, facts = stream(folder, "train")
    text = tokenizer.decode(whole[-validation.num_tokens :], skip_special_tokens=True)
    assert "モデル" in text and validation.bytes_per_token == pytest.approx(len(text.encode()) / validation.num_tokens)
    assert abs(validation.bytes_per_token / (facts["bytes"] / facts["tokens"]) - 1) > 0.2


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_columns_that_are_not_read_are_said(tokenizer, tmp_path, monkeypatch, suffix):
    rows = [{"text": f"the model reads line {number} " * 9, "label": number % 2, "url": None} for number in range(40)]
    rows[7]["source"] = "a"
    path = tmp_path / f"text.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([{"source": None, **row} for row in rows]), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = prepared(path, tokenizer, tmp_path / "cache", monkeypatch)
    assert corpus.open_splits(folder, 16, 5)[2].endswith(" documents; not used: label, source")
    streamed = make_stream(path, tokenizer, 0, 1)
    streamed.held_out(1)
    assert records.not_used(streamed.unused) == "; not used: label, source"


def test_one_document_is_split_by_its_tail(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "book.txt"
    path.write_text("the model reads a line of text " * 200)
    folder = prepared(path, tokenizer, tmp_path / "cache", monkeypatch, validation_split_percentage=10)
    train, validation, stated = corpus.open_splits(folder, 16, 10)
    whole, _ = stream(folder, "train")
    assert train.num_tokens + validation.num_tokens == len(whole)
    assert validation.num_tokens == pytest.approx(0.1 * len(whole), abs=1)
    assert validation[0]["input_ids"].tolist() == whole[train.num_tokens :][:16].tolist()
    assert "the last 10 % of the text" in stated


def test_too_short_a_validation_file_is_no_reason_to_validate_on_training_text(text_file, tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "val.txt"
    path.write_text("the model reads")
    short = prepared(text_file, tokenizer, tmp_path / "cache", monkeypatch, validation_file=(str(path),))
    with pytest.raises(ConfigError, match=r"val\.txt: the validation split has \d+ tokens, fewer than one sequence"):
        corpus.open_splits(short, 64, 5)
    path.write_text("the model reads a line of text " * 20)
    enough = prepared(text_file, tokenizer, tmp_path / "cache", monkeypatch, validation_file=(str(path),))
    train, validation, stated = corpus.open_splits(enough, 64, 5)
    assert (train.meta["train"]["documents"], validation.split) == (57, "validation")
    assert stated == f"1 document(s) of {path}"


def test_a_slow_tokenizer_is_refused(text_file, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="the tokenizer is a slow one"):
        prepared(text_file, ByT5Tokenizer(), tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match="the tokenizer is a slow one"):
        make_stream(text_file, ByT5Tokenizer(), 0, 1).held_out(1)


def test_prepared_again_only_when_something_changed(text_file, tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "text.jsonl"
    path.write_text(text_file.read_text())
    first = prepared(path, tokenizer, tmp_path / "cache", monkeypatch)
    assert prepared(path, tokenizer, tmp_path / "cache", monkeypatch) == first
    assert prepared(path, tokenizer, tmp_path / "cache", monkeypatch, validation_split_percentage=9) != first
    with path.open("a") as file:
        file.write('{"text": "one more"}\n')
    assert prepared(path, tokenizer, tmp_path / "cache", monkeypatch) != first
    assert not list((tmp_path / "cache/corpus").glob(".*"))


def test_a_trained_tokenizer_has_an_end_and_a_padding_of_its_own(documents):
    tokenizer = corpus.train_tokenizer(documents, 320)
    assert len(tokenizer) <= 320
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    text = "a line, with é, 🙂 and\ttabs\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_tokenizer_is_trained_on_as_much_of_a_single_long_text_as_is_wanted(documents):
    text = " ".join(documents)
    wanted = corpus.train_tokenizer([text[:5000]], 300)
    assert len(wanted) == 300
    assert corpus.train_tokenizer([text], 300, max_characters=5000).get_vocab() == wanted.get_vocab()
    at = text.index(" ", 3000)
    assert corpus.train_tokenizer([text[:at], text[at:]], 300, max_characters=5000).get_vocab() == wanted.get_vocab()


def test_another_column_or_tokenizer_is_prepared_anew(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "the model reads", "body": "a line of text"}\n' * 3)
    first = prepared(path, tokenizer, tmp_path / "cache", monkeypatch)
    assert prepared(path, tokenizer, tmp_path / "cache", monkeypatch) == first
    assert prepared(path, tokenizer, tmp_path / "cache", monkeypatch, text_column="body") != first
    tokenizer.add_tokens(["reads"])
    assert prepared(path, tokenizer, tmp_path / "cache", monkeypatch) != first


def test_a_vocabulary_above_16_bits_keeps_its_numbers(tokenizer, tmp_path, monkeypatch):
    tokenizer.add_tokens([f"<{number}>" for number in range(2**16)])
    path = tmp_path / "text.txt"
    path.write_text("<0><65535>" * 20)
    folder = prepared(path, tokenizer, tmp_path / "cache", monkeypatch)
    row = corpus.Tokens(folder, "train", 16)[0]
    assert tokenizer.decode(row["input_ids"]) == "<0><65535>" * 8


def make_stream(text_file, tokenizer, rank, world, *, length=16, column="text", percent=5):
    source, _ = records.open_sources(CorpusConfig(train_file=(str(text_file),)), demo=corpus.DEMO, streaming=True)
    loading = {"rank": rank, "world_size": world, "per_device": 2, "device": torch.device("cpu")}
    batch = {"global_batch_size": 4, "validation_percent": percent}
    return Stream(source, tokenizer, length, column=column, **batch, **loading)


def test_a_stream_of_one_text_cannot_be_validated(tokenizer, tmp_path):
    (tmp_path / "one.txt").write_text("the model reads a line of text " * 200)
    with pytest.raises(ConfigError, match=r"whole documents.*raise --validation_split_percentage, or drop --streaming"):
        make_stream(tmp_path / "one.txt", tokenizer, 0, 1).held_out(1)


def test_a_stream_is_the_same_on_any_world_size_and_from_any_step(text_file, tokenizer):
    def rows(window):
        return [tuple(r.tolist()) for batch in window.micro_batches for r in batch["input_ids"]]

    whole = [rows(w) for w in make_stream(text_file, tokenizer, 0, 1).windows(0, 40)]
    halves = [make_stream(text_file, tokenizer, rank, 2).windows(0, 40) for rank in (0, 1)]
    for one, first, second in zip(whole, *halves, strict=True):
        assert sorted(one) == sorted(rows(first) + rows(second))
    later = [rows(w) for w in make_stream(text_file, tokenizer, 0, 1).windows(30, 40)]
    assert later == whole[30:]
    kept = make_stream(text_file, tokenizer, 0, 1).held_out(5)
    assert len(kept) == 5
    held_out = {tuple(row["input_ids"].tolist()) for row in kept}
    assert not held_out & {row for window in whole for row in window}


def test_a_stream_that_ends_begins_anew(text_file, tokenizer):
    stream = make_stream(text_file, tokenizer, 0, 1)
    each = sum(1 for _ in stream.sequences(validation=False)) // 4  # steps
    windows = list(stream.windows(0, each + 2))
    assert [window.epoch for window in windows] == [0] * each + [1] * 2
    assert torch.equal(windows[each + 1].micro_batches[0]["labels"], windows[1].micro_batches[0]["labels"])
    samples = [int(i) for window in windows for i in window.indices.flatten()]
    assert samples == [*range(4 * each), *range(8)]  # which an audit compares


def test_a_stream_s_identity_changes_with_its_samples(text_file, tokenizer):
    kinds = ({}, {"length": 32}, {"column": "body"}, {"percent": 9})
    assert len({make_stream(text_file, tokenizer, 0, 1, **kind).identity() for kind in kinds}) == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": null}\n', "text.jsonl:1: 'text' is null"),
        ('{"body": "x"}\n', "no column 'text'"),
        ('{"text": ""}\n', "no text"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tokenizer, tmp_path, monkeypatch, content, message):
    path = tmp_path / "text.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        prepared(path, tokenizer, tmp_path / "cache", monkeypatch)
    assert not list((tmp_path / "cache/corpus").iterdir())
