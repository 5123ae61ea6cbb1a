"""A store holds what an encoder made of a source, whoever prepared it, and however often that was interrupted."""

import gzip
import json
import os
import pickle
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from transformers import AutoTokenizer

from shared import demo
from shared.data import prepared, store
from shared.data.records import Source
from shared.data.store import Encoded, Split
from shared.process.errors import ConfigError
from shared.text import chat, corpus, labelled, preferences
from shared.text.options import ChatConfig, CorpusConfig, LabelledTextConfig, PreferenceConfig
from tests.conftest import LAUNCHER, launch_environment, sentence, slow
from tests.security.conftest import flip

RECORDS = {  # kind: (record of two texts and a number)
    "corpus": lambda a, b, n: {"text": a + b},
    "chat": lambda a, b, n: {"prompt": a, "completion": b},
    "preferences": lambda a, b, n: {"prompt": a, "chosen": b, "rejected": "no, " + b},
    "labelled": lambda a, b, n: {"text": a + b, "label": n % 3},
}


def prepare(kind, path, processes):
    """The store of a file, in batches of 2,000 characters, each of which is saved."""
    store.BATCH, store.SAVE_EVERY = 2000, 0.0
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    options = {"train_file": (str(path),), "preprocessing_num_workers": processes}
    if kind == "corpus":
        encode = corpus.EncodeDocuments(tokenizer, "text")
        return store.prepare_sources(CorpusConfig(**options), encode)[0][""]
    if kind == "labelled":
        return labelled.open_texts(LabelledTextConfig(**options), tokenizer).train.stores[0]
    if kind == "preferences":
        return chat.open_samples(PreferenceConfig(**options), tokenizer, preferences.ToPairs)[0].stores[0]
    return chat.open_samples(ChatConfig(**options), tokenizer)[0].stores[0]


def content(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != prepared.VERIFIED}


def spy_on_batches(monkeypatch):
    """How many items each batch has that is encoded from now on."""
    sizes, encode_batch = [], store._encode_batch
    monkeypatch.setattr(store, "_encode_batch", lambda *of: sizes.append(len(of[1])) or encode_batch(*of))
    return sizes


@pytest.mark.parametrize(("kind", "processes"), [("corpus", 1), ("chat", 2), slow("preferences", 1), slow("labelled", 1)])
def test_a_killed_preparation_goes_on_where_it_stood(kind, processes, tmp_path, monkeypatch, capfd):
    """With the same bits as one that was not killed, in the same places, also if a file lost what was written last."""
    for name in ("BATCH", "SAVE_EVERY"):
        monkeypatch.setattr(store, name, getattr(store, name))
    rng, path, cache = random.Random(0), tmp_path / "data.jsonl", tmp_path / "cache"
    records = [RECORDS[kind](sentence(rng, rng.randint(5, 60)), sentence(rng, 9), n) for n in range(150)]
    if marked := {"chat": "completion", "preferences": "prompt"}.get(kind):
        records[70][marked] += " <image>"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path / "whole"))
    whole = prepare(kind, path, 1)

    monkeypatch.setenv("TEMPLATES_CACHE", str(cache))
    script = tmp_path / "prepare.py"
    script.write_text(f"from tests.data.test_store import prepare\nprepare({kind!r}, {str(path)!r}, {processes})\n")
    for fault in ("prepare:kill@3", "prepare:kill@2"):
        killed, output = LAUNCHER.run([str(script)], launch_environment({"TEMPLATES_FAULT": fault}))
        assert killed, output
        (partial,) = cache.glob(f"{kind}/.*.new")
        done = json.loads((partial / "state.json").read_text())["items"]
    assert 10 < done < 140

    encoded = spy_on_batches(monkeypatch)
    capfd.readouterr()
    again = prepare(kind, path, 1)
    assert sum(encoded) == 150 - done
    assert again.folder.name == whole.folder.name and content(again.folder) == content(whole.folder)
    assert not list(cache.glob("*/.*"))
    if marked:
        assert f"{path}:71: <image>" in capfd.readouterr().err

    flip(again.folder / "ends.bin", 200)
    assert content(prepare(kind, path, 1).folder) == content(whole.folder)
    assert "prepared data is damaged" in capfd.readouterr().err


class Letters:
    """A sample of each record's text: its letters as numbers, its length, and the text as a line."""

    kind = "letters"

    def identity(self):
        return "letters"

    def items(self, source, notes):
        for place, record in source.read():
            notes.add("read")
            yield place, record["text"]

    def size(self, item):
        return len(item[1])

    def __call__(self, items, notes):
        for place, text in items:
            if "z" in text:
                notes.add("with z", place)
                notes.add("with z", place)
        texts = [text for _, text in items]
        letters = np.array([ord(letter) for letter in "".join(texts)], np.uint8)
        sizes = np.array([[len(text), 1] for text in texts])
        return Encoded({"letters": letters}, np.cumsum(sizes[:, 0]), {"sizes": sizes}, {"text": texts})


TEXTS = ["ab", "", "z z", "c" * 50, "zebra"]


def source_of(texts, wait=0.0):
    def read():
        for number, text in enumerate(texts):
            time.sleep(wait)
            yield f"here:{number}", {"text": text}

    return Source("here", lambda: texts, read)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("batch", [1, 10, 1000])
def test_samples_are_read_as_they_were_written(cache, monkeypatch, batch):
    monkeypatch.setattr(store, "BATCH", batch)
    opened = store.prepare(source_of(TEXTS), Letters(), processes=1)
    for kept in (opened, pickle.loads(pickle.dumps(opened))):
        found = ["".join(map(chr, kept["letters"][kept.span(number)])) for number in range(len(kept))]
        assert found == TEXTS == kept.lines("text") == [kept.line("text", number) for number in range(5)]
        assert kept["sizes"].tolist() == [[len(text), 1] for text in TEXTS] and "sizes" in kept
        assert kept.notes.counts == {"read": 5, "with z": 2} and kept.notes.first == {"with z": ["here:2", "here:4"]}
    assert len(pickle.dumps(opened)) < 500  # no array travels to a worker
    limited = store.prepare(source_of(TEXTS), Letters(), limit=2, processes=1)
    assert len(limited) == 2 and limited.identity != opened.identity
    mixed = Split({"a": opened, "b": limited}, [np.array([4, 0]), np.array([1])])
    assert [bytes(mixed.values(index, "letters")[0]).decode() for index in range(3)] == ["zebra", "ab", ""]
    assert mixed.sources == {"a": 2, "b": 1} and mixed.column("sizes")[:, 0].tolist() == mixed.lengths.tolist() == [5, 2, 0]


@pytest.mark.parametrize("workers", [1, 2])
def test_tokens_of_a_compressed_file_are_those_of_the_plain_one(cache, text_file, tiny_model, monkeypatch, workers):
    monkeypatch.setattr(store, "BATCH", 500)
    packed = cache / "text.jsonl.gz"
    packed.write_bytes(gzip.compress(text_file.read_bytes()))
    configs = [CorpusConfig(train_file=(str(p),), preprocessing_num_workers=workers) for p in (text_file, packed)]
    encode = corpus.EncodeDocuments(AutoTokenizer.from_pretrained(tiny_model), "text")
    plain, unpacked = (store.prepare_sources(config, encode)[0][""] for config in configs)
    assert plain.folder != unpacked.folder and plain.identity == unpacked.identity
    assert plain["tokens"].tolist() == unpacked["tokens"].tolist()


def test_nothing_at_all_and_an_error_leave_nothing_behind(cache):
    with pytest.raises(ConfigError, match=r"^here: no records in it$"):
        store.prepare(source_of([]), Letters(), processes=1)
    with pytest.raises(KeyError):
        store.prepare(Source("here", lambda: 0, lambda: iter([("here:0", {})])), Letters(), processes=1)
    assert {path.suffix for path in cache.glob("letters/*")} == {".lock"}


def test_a_second_run_waits_for_the_first_and_takes_what_it_made(cache, monkeypatch):
    made = spy_on_batches(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        for run in [pool.submit(store.prepare, source_of(TEXTS, 0.1), Letters(), processes=1) for _ in range(2)]:
            run.result(30)
    assert len(made) == 1 and len(list(cache.glob("letters/*"))) == 1 and not list(cache.glob("letters/.*"))


def test_a_state_that_says_more_than_the_files_hold_is_not_believed(cache):
    """After a loss of power, say."""
    whole = store.prepare(source_of(TEXTS), Letters(), processes=1)
    expected = content(whole.folder)
    partial = whole.folder.rename(whole.folder.with_name(f".{whole.folder.name}.new"))
    for name in (prepared.CHECKSUMS, prepared.VERIFIED):
        (partial / name).unlink()
    os.truncate(partial / "ends.bin", 8)
    assert content(store.prepare(source_of(TEXTS), Letters(), processes=1).folder) == expected


def test_validation_data_that_are_trained_on_are_told(tmp_path, text_file, tiny_model, capsys):
    """A file named for both, a copy of it, and a split named for both."""
    encode = corpus.EncodeDocuments(AutoTokenizer.from_pretrained(tiny_model), "text")
    (tmp_path / "copy.jsonl").write_bytes(text_file.read_bytes())
    (tmp_path / "other.jsonl").write_text('{"text": "the model reads"}\n')
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_bytes(text_file.read_bytes())
    hub = {"dataset_name": (str(tmp_path / "set"),)}
    for flags, is_told in (
        ({"train_file": (text_file,), "validation_file": (text_file,)}, True),
        ({"train_file": (text_file,), "validation_file": (tmp_path / "copy.jsonl",)}, True),
        (hub | {"validation_split_name": "train"}, True),
        ({"train_file": (text_file,), "validation_file": (tmp_path / "other.jsonl",)}, False),
        ({"train_file": (text_file,)}, False),
    ):
        named = {key: tuple(map(str, value)) if "file" in key else value for key, value in flags.items()}
        store.prepare_sources(CorpusConfig(**named, preprocessing_num_workers=1), encode)
        assert ("warning: the validation data are trained on" in capsys.readouterr().err) is is_told
