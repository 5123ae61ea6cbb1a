"""What is prepared in chunks: of a killed preparation and of changed data, finished chunks are taken as they are."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
from transformers import AutoTokenizer

from shared import demo
from shared.data import chunks, prepared
from shared.text import chat, corpus, labelled, preferences
from shared.text.options import ChatConfig, CorpusConfig, LabelledTextConfig, PreferenceConfig
from tests.conftest import ROOT, sentence, slow
from tests.security.conftest import flip

RECORDS = {  # kind: (record of two texts and a number)
    "text": lambda a, b, n: {"text": a + b},
    "chats": lambda a, b, n: {"prompt": a, "completion": b},
    "pairs": lambda a, b, n: {"prompt": a, "chosen": b, "rejected": "no, " + b},
    "labelled": lambda a, b, n: {"text": a + b, "label": n % 3},
}


def prepare(kind, path, processes):
    """The folder of the prepared data."""
    chunks.SIZE = 2000
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    options = {"train_file": (str(path),), "preprocessing_num_workers": processes}
    if kind == "text":
        return corpus.prepare(CorpusConfig(**options), tokenizer)
    if kind == "labelled":
        return labelled.prepare(LabelledTextConfig(**options), tokenizer).train.folder
    if kind == "pairs":
        return chat.prepare(PreferenceConfig(**options), tokenizer, preferences._ToPairs)
    return chat.prepare(ChatConfig(**options), tokenizer)


def content(folder):
    return {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != prepared.VERIFIED}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.mark.parametrize(
    ("kind", "processes"), [slow("text", 2), ("text", 1), ("chats", 2), slow("pairs", 1), slow("labelled", 1)]
)
def test_a_killed_preparation_goes_on_and_changed_data_take_what_they_share(kind, processes, tmp_path, monkeypatch, capfd):
    """With the same bits as one that was not killed. Places are those of now."""
    monkeypatch.setattr(chunks, "SIZE", chunks.SIZE)
    rng, path, cache = random.Random(0), tmp_path / "data.jsonl", tmp_path / "cache"
    records = [RECORDS[kind](sentence(rng, rng.randint(5, 60)), sentence(rng, 9), n) for n in range(150)]
    marked = {"chats": "completion", "pairs": "prompt"}.get(kind)
    if marked:
        records[70][marked] += " <image>"
    write(path, records)
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path / "whole"))
    whole = prepare(kind, path, 1)
    number = len(list((tmp_path / "whole/pieces").glob("*/*")))

    code = f"from tests.shared.test_chunks import prepare; prepare({kind!r}, {str(path)!r}, {processes})"
    fault = {"TEMPLATES_FAULT": "prepare:kill@6", "TEMPLATES_CACHE": str(cache)}
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | fault, capture_output=True, text=True)
    assert killed.returncode != 0

    def kept():
        return {path: path.stat().st_mtime_ns for path in cache.glob("pieces/*/[!.]*/facts.json")}

    monkeypatch.setenv("TEMPLATES_CACHE", str(cache))
    done = kept()
    assert 4 <= len(done) < number - 4
    again = prepare(kind, path, 1)
    assert again.name == whole.name and content(again) == content(whole)
    assert len(kept()) == number and done.items() <= kept().items()
    assert not list(cache.glob("*/.*")) + list(cache.glob("pieces/*/.*"))

    os.utime(path)
    done = kept()
    touched = prepare(kind, path, 1)
    assert kept() == done and content(touched) == content(whole)
    write(path, [records[1], *records[:70], RECORDS[kind]("one ", "more", 1), *records[70:]])
    capfd.readouterr()
    changed = prepare(kind, path, 1)
    assert 2 <= len(kept()) - len(done) <= 5 < number / 3
    if marked:
        assert f"{path}:73: <image>" in capfd.readouterr().err

    facts = content(changed)
    flip(next(changed.glob("*-00003-*.npy")), 200)  # the file is also the chunk's
    done = kept()
    assert prepare(kind, path, 1) == changed and content(changed) == facts
    assert len(done.items() - kept().items()) == 1


def test_an_array_of_many_files_is_read_as_one(tmp_path, monkeypatch):
    """With no more files open than OPEN."""
    monkeypatch.setattr(chunks, "OPEN", 8)
    sizes = [3, 0, 4, *[1] * 60, 0]
    parts = [np.random.default_rng(n).integers(0, 99, size) for n, size in enumerate(sizes)]
    for number, part in enumerate(parts):
        np.save(tmp_path / f"all-{number:05d}-ids.npy", part)
    joined, whole = chunks.Joined(tmp_path / "all", "ids", sizes), np.concatenate(parts)
    before = len(os.listdir("/proc/self/fd"))
    for first in range(len(whole)):
        assert joined[first : first + 9].tolist() == whole[first : first + 9].tolist()
    assert len(os.listdir("/proc/self/fd")) <= before + 8
    assert joined[:].tolist() == whole.tolist() and isinstance(joined[0:3], np.memmap)
