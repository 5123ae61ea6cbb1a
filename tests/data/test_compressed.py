"""A compressed file gives what the file in it gives, and a damaged one is named."""

import bz2
import gzip

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from shared.data import store
from shared.data.records import open_sources, read_records
from shared.process.errors import ConfigError
from shared.text import corpus
from shared.text.options import CorpusConfig

PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
}
EACH = pytest.mark.parametrize("suffix", PACK)
LINES = b'{"text": "one"}\n\n{"text": "\xc3\xa9"}\n'


def read(path):
    return list(read_records([path]))


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@EACH
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b"\xef\xbb\xbf" + LINES),
        ("A.NDJSON", LINES * 5000),
        ("a.json", LINES),
        ("a.json", b'[{"a": 1},\n {"a": 2}]'),
        ("a.csv", b'q,a\n1,"x\ny"\n2,z\n'),
        ("a.tsv", b"q\ta\n1\tx\n"),
        ("a.txt", b"two\r\nlines " * 40_000),
        ("a", LINES),
    ],
)
def test_it_gives_the_records_and_places_of_the_plain_file(tmp_path, suffix, name, content):
    plain, packed = tmp_path / name, tmp_path / (name + suffix)
    plain.write_bytes(content)
    middle = len(content) // 2
    packed.write_bytes(PACK[suffix](content[:middle]) + PACK[suffix](content[middle:]))  # as `cat a.gz b.gz` leaves it
    assert read(packed) == [(where.replace(str(plain), str(packed)), record) for where, record in read(plain)]
    packed.rename(upper := packed.with_suffix(suffix.upper()))
    assert [record for _, record in read(upper)] == [record for _, record in read(plain)]


@EACH
@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.jsonl", LINES[:17] + b'{"text": \n', "not valid JSON (Expecting value"),
        ("a.csv", b"a,b\n1,2\n3\n", "not as many fields"),
        ("a.csv", b'a,b\n1,2\n"3\n,4\n', "not valid CSV (unexpected end of data)"),
    ],
)
def test_an_error_names_the_file_and_the_line(tmp_path, suffix, name, content, what):
    path = tmp_path / (name + suffix)
    path.write_bytes(PACK[suffix](content))
    assert refusal(path).startswith(f"{path}:3: {what}")


@EACH
def test_a_damaged_or_truncated_file_is_named(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    content = PACK[suffix](b"".join(b'{"n": %d}\n' % n for n in range(9000)))
    for damaged in (content[:-3], content[: len(content) // 2], content[:40] + b"\xff" * 9 + content[49:], LINES):
        path.write_bytes(damaged)
        assert refusal(path).startswith(f"{path}:")


def test_a_folder_may_hold_compressed_files_and_what_is_packed_twice_is_refused(tmp_path):
    for number, name in enumerate(("a.jsonl.gz", "b.jsonl", "c.jsonl.zst")):
        line = b'{"text": "%d"}\n' % number
        (tmp_path / name).write_bytes(PACK.get(name[name.rindex(".") :], bytes)(line))
    config = CorpusConfig(train_file=(str(tmp_path),), validation_file=(str(tmp_path / "c*"),))
    train, validation = open_sources(config, demo=corpus.DEMO)
    assert train.identity() == [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl"]
    assert [record["text"] for source in (train, validation) for _, record in source.read()] == ["0", "1", "2"]
    streamed, _ = open_sources(config, demo=corpus.DEMO, streaming=True)
    assert list(streamed.read()) == list(train.read())
    for name in ("a.tar.gz", "a.tgz", "a.zip", "a.jsonl.xz"):
        (tmp_path / name).write_bytes(b"x")
        assert refusal(tmp_path / name) == f"{tmp_path / name}: an archive: unpack it first, and name what was in it"


@pytest.mark.parametrize("workers", [1, 2])
def test_its_tokens_are_those_of_the_plain_file(text_file, tiny_model, tmp_path, monkeypatch, workers):
    monkeypatch.setattr(store, "BATCH", 500)
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path / "cache"))
    packed = tmp_path / "text.jsonl.zst"
    packed.write_bytes(PACK[".zst"](text_file.read_bytes()))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    configs = [CorpusConfig(train_file=(str(p),), preprocessing_num_workers=workers) for p in (text_file, packed)]
    encode = corpus.EncodeDocuments(tokenizer, "text")
    plain, unpacked = (store.prepare_sources(config, encode)[0][""] for config in configs)
    assert plain.folder != unpacked.folder and plain.identity == unpacked.identity
    assert plain["tokens"].tolist() == unpacked["tokens"].tolist()
