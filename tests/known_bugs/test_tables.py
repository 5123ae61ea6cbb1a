"""Tables give the records that were written, whatever wrote them: or the run says what they cannot tell."""

import json
from datetime import date
from decimal import Decimal
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shared.data.records import load_hub, read_records
from shared.extras.streaming.sources import Cursor, read_hub
from shared.process.errors import ConfigError
from shared.text import chat, preferences
from shared.text.options import ChatConfig, PreferenceConfig
from tests.conftest import write_lines

LOADERS = (load_hub, lambda *of: read_hub(*of, Cursor()))


def read(path: Path) -> list:
    return [record for _, record in read_records([path])]


def test_json_in_parquet_is_read_as_json_lines_are(tmp_path):
    """datasets 5 (2026, https://huggingface.co/docs/datasets) stores objects that differ from row to row as arrow.json.

    They were read as text, and lost the nulls that a schema or a call has.
    """
    records = []
    for i in range(12):
        properties = {"city": {"type": "string", "default": None}} if i % 2 else {"zip": {"enum": [1, None]}}
        call = {"name": "look", "arguments": {"zip": None} if i % 2 else {"city": {"name": f"é{i}"}}}
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        tool = {"name": "look", "parameters": {"type": "object", "properties": properties}}
        records.append({"messages": turns, "tools": [tool]})
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    source = write_lines(tmp_path / "a/t.jsonl", records)
    made = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=str(tmp_path / "cache"))
    made.to_parquet(tmp_path / "b/t.parquet")
    assert "arrow.json" in str(pq.read_schema(tmp_path / "b/t.parquet"))
    assert read(source) == read(tmp_path / "b/t.parquet") == records
    for folder in ("a", "b"):
        for load in LOADERS:
            assert [record for _, record in load(str(tmp_path / folder), None, "train")] == records
    json_text = pa.array(["[1", None], pa.string()).cast(pa.json_())
    pq.write_table(pa.table({"t": json_text}), tmp_path / "bad.parquet")
    with pytest.raises(ConfigError, match=r"bad.parquet: row 1: 't' is not valid JSON \(Expecting ',' delimiter"):
        read(tmp_path / "bad.parquet")


def test_typed_values_of_parquet_are_those_that_json_lines_hold(tmp_path):
    """MAP columns (2023, https://github.com/apache/arrow/issues/39010) came as pairs, wherever they stand.

    A tool call was learned as `[["city", "Rome"]]`, and a date in it as `"<date>"`. Decimals of a data base were no labels.
    """
    text = pa.string()
    arguments = pa.map_(text, text)
    call = pa.struct({"name": text, "arguments": arguments, "other": text})
    deep = pa.map_(pa.int8(), pa.list_(pa.map_(text, call)))
    columns = {
        "top": pa.array([[("city", "Rome"), ("unit", None)]], arguments),
        "calls": pa.array([[None, {"name": "w", "arguments": [("city", "Rome")]}, {"name": "v"}]], pa.list_(call)),
        "deep": pa.array([[(1, [[("a", {"name": "w", "arguments": []})]])]], deep),
        "empty": pa.array([[]], pa.list_(call)),
        "when": pa.array([{"day": date(2026, 11, 29), "sum": Decimal("1.50")}]),
        "label": pa.array([Decimal("2.00")]),
        "large": pa.array([Decimal("9" * 38)]),
        "numbers": pa.array([[1, 2]]),
        "bytes": pa.array([b"PNG"]),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert read(tmp_path / "t.parquet") == [
        {
            "top": {"city": "Rome", "unit": None},
            "calls": [None, {"name": "w", "arguments": {"city": "Rome"}}, {"name": "v"}],
            "deep": {"1": [{"a": {"name": "w", "arguments": {}}}]},
            "empty": [],
            "when": {"day": "2026-11-29", "sum": 1.5},
            "label": 2,
            "large": int("9" * 38),
            "numbers": [1, 2],
            "bytes": b"PNG",
        }
    ]
    twice = pa.array([[("city", "Rome"), ("city", "Oslo")]], arguments)
    pq.write_table(pa.table({"a": twice}), tmp_path / "twice.parquet")
    with pytest.raises(ConfigError, match=r"row 1: 'a' is not valid JSON \(a key is there twice: city, city\)"):
        read(tmp_path / "twice.parquet")
    for load in LOADERS:
        with pytest.raises(ConfigError, match=r"Arrow type map<.* does not have a datasets dtype"):
            list(load(str(tmp_path), None, "train"))


def test_two_columns_or_keys_of_one_name_are_refused(tmp_path):
    """An ordinary join writes them (2026, https://github.com/apache/datafusion/issues/24381): the last was learned."""
    left = pa.table({"text": ["good"], "label": ["pos"]})
    pq.write_table(left.append_column("label", pa.array(["a"])), tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text('{"text": "b"}\n{"text": "good", "label": {"a": 1, "b": 2, "a": 1}}\n')
    (tmp_path / "t.json").write_text('[{"text": "good",\n"text": "bad"}]')
    messages = {"parquet": "twice (text, label, label)", "jsonl": "2: not valid JSON (a key is there twice: a, b, a)"}
    for kind, message in (messages | {"json": "1: not valid JSON (a key is there twice: text, text)"}).items():
        with pytest.raises(ConfigError) as error:
            read(tmp_path / f"t.{kind}")
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('fine\t1\n"foo\t1\nbar\t0\nbaz"\t1\nend\t0\n', [("fine", "1"), ('"foo', "1"), ("bar", "0")]),
        ('"He" said " x\t1\nb\t0\n', [('"He" said " x', "1"), ("b", "0")]),
        ('"open\t1\nb\t0\n', [('"open', "1"), ("b", "0")]),
        ('"a\nb"\t1\n"c\td"\t0\n', [("a\nb", "1"), ("c\td", "0")]),  # quoted, as RFC 4180 says
    ],
)
def test_lines_between_tabs_stay_lines(tmp_path, capsys, text, expected):
    """GLUE's TSV files (2018, https://gluebenchmark.com/tasks) have no quoting: a quote that opened a cell took in lines."""
    file = tmp_path / "a.tsv"
    file.write_text("text\tlabel\n" + text)
    assert [(record["text"], record["label"]) for record in read(file)][: len(expected)] == expected
    is_plain = expected[0] == ("a\nb", "1")
    assert ("quotes are part of the text, since each line is a record" in capsys.readouterr().err) is not is_plain


@pytest.mark.parametrize("columns", [("prompt", "completion"), ("prompt", "chosen", "rejected"), ("chosen", "rejected")])
def test_messages_as_json_text_are_messages(tmp_path, own_cache, tokenizer, columns):
    """TRL's conversational data (https://huggingface.co/docs/trl/dataset_formats, 2025) in CSV are JSON in cells.

    These were learned as literal text.
    """
    config, work = (PreferenceConfig, preferences.ToPairs) if "chosen" in columns else (ChatConfig, chat.ToSamples)
    records = []
    for i in range(6):
        asked = [{"role": "user", "content": f"a line {i}"}] * (columns[0] == "chosen")
        answers = {c: [*asked, {"role": "assistant", "content": f"it says {c} {i}"}] for c in columns if c != "prompt"}
        records.append(({"prompt": [{"role": "user", "content": f"a {i}"}]} if "prompt" in columns else {}) | answers)
    cells = [{column: json.dumps(value) for column, value in record.items()} for record in records]
    pq.write_table(pa.Table.from_pylist(cells), tmp_path / "b.parquet")
    files = [write_lines(tmp_path / "a.jsonl", records), tmp_path / "b.parquet"]
    plain, text = [chat.open_samples(config(train_file=(str(file),)), tokenizer, work)[0] for file in files]
    assert plain.stores[0].folder != text.stores[0].folder
    assert plain.stores[0]["ids"].tolist() == text.stores[0]["ids"].tolist() != []
    python = write_lines(tmp_path / "d.jsonl", [{column: str(value) for column, value in records[0].items()}])
    with pytest.raises(ConfigError, match=r"d.jsonl:1: .* is Python's text of messages: write it with json.dumps"):
        chat.open_samples(config(train_file=(str(python),)), tokenizer, work)
