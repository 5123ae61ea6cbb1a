"""Every format gives records with their place, and what cannot be read is one ConfigError."""

import bz2
import gzip
import json
import os
import tracemalloc
from types import SimpleNamespace
from unittest import mock

import datasets
import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.data import records
from shared.data.files import find_files
from shared.data.options import DataConfig
from shared.data.records import Source, open_sources, read_records
from shared.extras.streaming.sources import open_stream
from shared.images import files as images
from shared.images.options import ImageConfig
from shared.models.hub import from_hub
from shared.process.errors import CleanExit, ConfigError
from shared.text.options import CorpusConfig

PACK = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
}


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path):
    return list(read_records([path]))


def find(*paths):
    return find_files([str(path) for path in paths], flag="train_file")


# Formats -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"n": 1}\n\n  \n{"l": [null, {"k": true}]}', [(":1", {"n": 1}), (":4", {"l": [None, {"k": True}]})]),
        ("A.NDJSON", '{"a": "1"}\n{"a": "2"}\n', [(":1", {"a": "1"}), (":2", {"a": "2"})]),
        ("a.jsonl", '{"a": "b\u2028c\x85d"}\n{"a": "e"}\n', [(":1", {"a": "b\u2028c\x85d"}), (":2", {"a": "e"})]),
        ("a.jsonl", '{"a": "\\ud83d\\ude42"}', [(":1", {"a": "🙂"})]),
        ("a.jsonl", '\ufeff{"a": "1"}', [(":1", {"a": "1"})]),
        ("a.json", '\ufeff [{"a": 1},\n {"a": "é"}]', [(": record 1", {"a": 1}), (": record 2", {"a": "é"})]),
        ("a.json", '{"a": 1}\n{"a": 2}\n', [(":1", {"a": 1}), (":2", {"a": 2})]),
        ("a.csv", '\ufeffq,a\n1,"x, ""y"""\n', [(":2", {"q": "1", "a": 'x, "y"'})]),
        ("a.csv", 'q,a\n1,2\n\n"two\nlines",é\n', [(":2", {"q": "1", "a": "2"}), (":4", {"q": "two\nlines", "a": "é"})]),
        ("a.csv", "a,b\n" + "x" * 200_000 + ",y\n", [(":2", {"a": "x" * 200_000, "b": "y"})]),
        ("a.tsv", 'q\ta\n1, 2\t"x\ty"\n', [(":2", {"q": "1, 2", "a": "x\ty"})]),
        ("a.txt", "\ufefftwo\nlines é", [("", {"text": "two\nlines é"})]),
        ("README", "two\nlines é", [("", {"text": "two\nlines é"})]),
    ],
)
def test_each_format_gives_values_and_places(tmp_path, name, content, expected):
    path = write(tmp_path, name, content)
    assert read(path) == [(f"{path}{place}", record) for place, record in expected]
    content, middle = path.read_bytes(), path.stat().st_size // 2
    for suffix, pack in PACK.items():  # in two parts, as `cat a.gz b.gz` leaves it
        packed = write(tmp_path, name + suffix.upper(), pack(content[:middle]) + pack(content[middle:]))
        assert read(packed) == [(f"{packed}{place}", record) for place, record in expected]


def test_parquet_gives_values_and_row_numbers_over_batches(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"text": f"é{i}", "turns": [{"role": "user"}] * (i % 3), "none": None} for i in range(1100)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    result = read(path)
    assert [record for _, record in result] == rows
    assert [result[i][0] for i in (0, 1024, 1099)] == [f"{path}: row {n}" for n in (1, 1025, 1100)]


def test_a_large_text_file_is_several_records_of_which_all_but_the_last_say_so(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "PIECE", 8)
    path = write(tmp_path, "a.txt", b"\xef\xbb\xbf" + "one\r\ntwo\rthree é four five🙂six seven eight nine".encode())
    texts = ["one\ntwo\n", "three é ", "four ", "five🙂six", " seven ", "eight ", "nine"]
    marked = [{"text": text, records.CONTINUES: True} for text in texts[:-1]]
    assert read(path) == [(str(path), record) for record in [*marked, {"text": texts[-1]}]]


@settings(deadline=None)
@given(text=st.text(alphabet="ab \n\té🙂", max_size=60), block=st.integers(1, 30))
def test_pieces_joined_are_the_text_and_end_with_a_line_or_a_word(text, block):
    with mock.patch.object(records, "PIECE", 8):
        found = list(records.split_text(text[i : i + block] for i in range(0, len(text), block)))
        assert found == list(records.split_text([text]))
    assert "".join(piece for piece, _ in found) == text
    assert [continues for _, continues in found] == [True] * (len(found) - 1) + [False]
    for piece, continues in found:
        assert len(piece) <= 8
        if continues and not piece.endswith("\n"):
            assert "\n" not in piece
            assert piece[-1].isspace() or (len(piece) == 8 and len(piece.split()) == 1 and not piece[0].isspace())


@pytest.mark.parametrize("name", ["a.txt", "a.json", "a.csv"])
def test_a_large_file_is_never_in_memory_as_a_whole(tmp_path, name):
    line = json.dumps({"a": "x" * 10_000}) if "json" in name else "x " * 5000
    path = write(tmp_path, name, f"{line}\n" * 2000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_records([path])) > 50
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 5
    finally:
        tracemalloc.stop()


# What cannot be read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "place", "what"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', ":2: ", r"not valid JSON \(Expecting value, column 6\)"),
        ("a.jsonl", '{"a": 1}\n\n[1]\n', ":3: ", "expected a JSON object, found a list"),
        ("a.jsonl", '{"a":' * 100_000, ":1: ", "not valid JSON"),
        ("a.jsonl", '{"a": ' + "9" * 5000 + "}", ":1: ", "not valid JSON"),
        ("a.json", '[{"a": 1},\n{"a": }]', ":2: ", "not valid JSON"),
        ("a.json", '[{"a": 1}, 2]', ": record 2 ", "expected an object"),
        ("a.csv", "a,b\n1,2\n3\n", ":3: ", "not as many fields as the header has"),
        ("a.csv", "a,b\n1,2,3\n", ":2: ", "not as many fields as the header has"),
        ("a.csv", 'a,b\n1,2\n"3,4\n5,6\n', ":3: ", r"not valid CSV \(unexpected end of data\)"),
        ("a.csv", 'a,b\n1,"2" 3\n5,6\n', ":2: ", "not valid CSV"),
        ("a.parquet", "PAR1 but not really", ": ", "not valid Parquet"),
        ("a.json", '{"a": 1}\n{"a": "\\uDC00"}', ":2: ", "not valid JSON .*surrogates not allowed"),
        ("a.tsv", "a\tb\tb\n1\t2\t3\n", ":1: ", "a column is there twice .a, b, b"),
        ("a.csv", "a\tb\n1\t2, 3\n", ":1: ", r"'\\t' is between the columns: CSV has commas, TSV tabs"),
        ("a.tsv", "a,b\n1,2\n", ":1: ", "',' is between the columns"),
        ("a.csv", "a;b\n1;2\n", ":1: ", "';' is between the columns: CSV has commas, TSV tabs"),
        ("a.txt", b"a\nb\xffcd", ":2: ", "not UTF-8 text; save it as UTF-8"),
        ("a.jsonl.gz", gzip.compress(b"{}\n{}\n" * 9 + b'{"a": "\xe9"}\n', mtime=0), ":19: ", "not UTF-8 text; save it"),
        ("a.csv", "a,b\n1,ä\n".encode("utf-16"), ":1: ", "not UTF-8 text; save it as UTF-8"),
    ],
)
def test_a_file_that_cannot_be_parsed_is_named_with_the_place(tmp_path, name, content, place, what):
    paths = [write(tmp_path, name, content)]
    if not name.endswith(("gz", "parquet")):
        paths += [write(tmp_path, name + suffix, pack(paths[0].read_bytes())) for suffix, pack in PACK.items()]
    for path in paths:
        with pytest.raises(ConfigError, match=what) as error:
            read(path)
        assert str(error.value).startswith(f"{path}{place}")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", PACK)
def test_a_damaged_or_truncated_compressed_file_is_named(tmp_path, suffix):
    name, lines = f"a.jsonl{suffix}", [{"n": number} for number in range(9000)]
    content = PACK[suffix](b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    assert [record for _, record in read(write(tmp_path, name, content))] == lines
    for damaged in (content[:-3], content[: len(content) // 2], content[:40] + b"\xff" * 9 + content[49:], b'{"n": 1}\n'):
        path = write(tmp_path, name, damaged)
        with pytest.raises(ConfigError) as error:
            read(path)
        assert str(error.value).startswith(f"{path}:") and "\n" not in str(error.value)


def test_records_before_a_malformed_line_are_given_and_a_file_that_has_gone_is_named(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"a": 1}\n{')
    stream = read_records([path])
    assert next(stream) == (f"{path}:1", {"a": 1})
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: not valid JSON"):
        next(stream)
    for name in ("gone.jsonl", "gone.parquet", "gone.txt"):
        with pytest.raises(ConfigError, match=f"{name}: "):
            read(tmp_path / name)


@settings(deadline=None, max_examples=40)
@given(flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=5))
def test_a_damaged_parquet_file_gives_records_or_a_config_error(tmp_path_factory, flips):
    path = tmp_path_factory.getbasetemp() / "damaged.parquet"
    pq.write_table(pa.table({"text": ["abc"] * 20, "n": list(range(20))}), path)
    content = bytearray(path.read_bytes())
    for place, value in flips:
        content[place % len(content)] = value
    path.write_bytes(bytes(content))
    try:
        assert all(where.startswith(str(path)) and isinstance(record, dict) for where, record in read_records([path]))
    except ConfigError as error:
        assert str(path) in str(error)


# Files ---------------------------------------------------------------------------------------------------------------


def test_folders_and_globs_stand_for_their_files_sorted_without_hidden_ones(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.txt", "d.csv", "a[1].txt", ".hidden", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path, name, "x")
    a, named_as_a_glob, b, d, c = (tmp_path / name for name in ("a.txt", "a[1].txt", "b.txt", "d.csv", "sub/c.txt"))
    assert find(tmp_path) == [a, named_as_a_glob, b, d, c]
    assert find(tmp_path / "?.txt") == [a, b] and find(named_as_a_glob) == [named_as_a_glob]
    assert c in find(tmp_path / "**" / "*.txt")


def test_linked_folders_are_followed_and_none_is_read_twice(tmp_path):
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data / "sub", elsewhere / "deep"):
        folder.mkdir(parents=True)
    for name in ("data/a.txt", "data/sub/b.txt", "elsewhere/c.txt", "elsewhere/deep/d.txt", "not_data.txt"):
        write(tmp_path, name, "x")
    for link, target in {"link": elsewhere, "same": elsewhere, "sub/up": data, "sub/out": tmp_path}.items():
        (data / link).symlink_to(target)
    (elsewhere / "back").symlink_to(data)
    assert find(data) == [data / "a.txt", data / "link/c.txt", data / "link/deep/d.txt", data / "sub/b.txt"]
    (tmp_path / "to_data").symlink_to(data)
    assert find(tmp_path / "to_data")[0] == tmp_path / "to_data" / "a.txt"


def test_what_is_missing_or_empty_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "to_nothing").symlink_to("nothing")
    for name, message in {
        "gone.jsonl": f"--train_file {tmp_path}/gone.jsonl: no such file",
        "*.csv": f"--train_file {tmp_path}/*.csv: no such file",
        "folder": f"--train_file {tmp_path}/folder: the folder holds no files",
        "links": f"--train_file {tmp_path}/links/to_nothing: not a regular file",
    }.items():
        with pytest.raises(ConfigError) as error:
            find(tmp_path / name)
        assert str(error.value) == message


def test_a_folder_may_hold_compressed_files_and_what_is_packed_twice_is_refused(tmp_path):
    for number, name in enumerate(("a.jsonl.gz", "b.jsonl", "c.jsonl.zst")):
        write(tmp_path, name, PACK.get(name[name.rindex(".") :], bytes)(b'{"text": "%d"}\n' % number))
    config = CorpusConfig(train_file=(str(tmp_path),), validation_file=(str(tmp_path / "c*"),))
    train, validation = open_sources(config, demo=DEMO)
    assert train.identity() == [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl"]
    assert [record["text"] for source in (train, validation) for _, record in source.read()] == ["0", "1", "2"]
    streamed = open_stream(config, DEMO)
    assert list(streamed.read()) == list(train.read())
    named = find(tmp_path / "c.jsonl.zst", tmp_path / "a.jsonl.gz")  # in the order in which they are named
    assert [record["text"] for _, record in read_records(named)] == ["2", "0"]
    for name in ("a.tar.gz", "a.tgz", "a.zip", "a.jsonl.xz"):
        path = write(tmp_path, name, b"x")
        with pytest.raises(ConfigError, match=f"^{path}: an archive: unpack it first, and name what was in it$"):
            read(path)


# Sources -------------------------------------------------------------------------------------------------------------

DEMO = Source("demo", list, lambda: iter([]))


def test_a_file_that_is_named_for_validation_is_not_trained_on(tmp_path, monkeypatch, capsys):
    assert open_sources(DataConfig(), demo=DEMO) == (DEMO, None)
    data = tmp_path / "data"
    data.mkdir()
    a, b, val = (write(data, f"{name}.jsonl", f'{{"n": "{name}"}}') for name in ("a", "b", "val"))
    (tmp_path / "linked.jsonl").symlink_to(val)
    monkeypatch.chdir(tmp_path)
    for named in ("data/val.jsonl", "linked.jsonl"):
        config = DataConfig(train_file=("data", str(data / "v*")), validation_file=(named,))
        train, validation = open_sources(config, demo=DEMO)
        assert [path.resolve() for path in train.identity()] == [a, b]
        assert (train.name, validation.name) == ("2 files or folders", named)
        for _ in range(2):  # it can be read again
            assert [record["n"] for _, record in train.read()] == ["a", "b"]
        assert [record["n"] for _, record in validation.read()] == ["val"]
        assert capsys.readouterr().err == "--validation_file names 2 of the 4 files of --train_file: left out\n"
    config = DataConfig(train_file=(str(a),), validation_file=(str(a),))  # is taken at its word
    train, validation = open_sources(config, demo=DEMO)
    assert [record["n"] for _, record in train.read()] == [record["n"] for _, record in validation.read()] == ["a"]
    assert capsys.readouterr().err == "--validation_file names 1 of the 1 files of --train_file\n"


def test_a_stream_is_the_same_after_its_files_were_copied(tmp_path):
    first, second = tmp_path / "here", tmp_path / "there"
    for folder in (first, second):
        folder.mkdir()
        file = write(folder, "a.jsonl", '{"text": "a"}\n')
        os.utime(file, (1, len(str(folder))))
    sources = [open_stream(CorpusConfig(train_file=(str(f),)), DEMO) for f in (first, second)]
    assert sources[0].identity() == sources[1].identity() == [["a.jsonl", 14]]


def status(code):
    return httpx.HTTPStatusError("x", request=httpx.Request("GET", "http://x"), response=httpx.Response(code))


SILENT = [ConnectionResetError("reset"), TimeoutError("slow"), httpx.ConnectTimeout("slow"), status(503), status(429)]
WRONG = [status(404), OfflineModeIsEnabled("offline"), FileNotFoundError("typed wrong"), ValueError("typed wrong")]


@pytest.mark.parametrize("error", [*SILENT, *WRONG], ids=repr)
def test_a_server_that_does_not_answer_is_nobodys_wrong_input(monkeypatch, error):
    def fail(*_args, **_options):
        outer = ConnectionError if isinstance(error, OfflineModeIsEnabled) else RuntimeError  # as `datasets` does
        raise outer("as a library wraps it") from error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    for load in (
        lambda: next(records.load_hub("org/name", None, "train")),
        lambda: from_hub(SimpleNamespace(__name__="AutoModel", from_pretrained=fail), "org/name"),
        lambda: images.prepare(ImageConfig(dataset_name=("org/name",))),
    ):
        with pytest.raises(CleanExit) as raised:
            load()
        assert raised.value.exit_code == (1 if error in SILENT else 2)


def test_splits_of_a_data_set_are_chosen_by_name(tmp_path):
    for split, texts in (("train_sft", "ab"), ("test_sft", "c")):
        write(tmp_path, f"{split}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train_sft", "test_sft"))
    write(tmp_path, "README.md", f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n")
    named = {"dataset_name": (str(tmp_path),), "train_split_name": "train_sft"}
    train, validation = open_sources(CorpusConfig(**named, validation_split_name="test_sft"), demo=DEMO)
    assert [[record["text"] for _, record in source.read()] for source in (train, validation)] == [["a", "b"], ["c"]]
    streamed = open_stream(CorpusConfig(**named), DEMO).read()
    assert [*streamed] == [(f"{tmp_path}:train_sft: row {row}", {"text": text}) for row, text in enumerate("ab")]
    assert train.identity() != validation.identity()
    assert open_sources(CorpusConfig(**named), demo=DEMO)[1] is None
    with pytest.raises(ConfigError, match=r': Unknown split "train"'):
        list(open_sources(CorpusConfig(dataset_name=(str(tmp_path),)), demo=DEMO)[0].read())
