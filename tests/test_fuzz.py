"""Whatever stands in a file or on a command line: a value, or one line that says what is wrong.

FUZZ_EXAMPLES=5000 pytest tests/test_fuzz.py looks longer.
"""

import contextlib
import csv
import io
import json
import os
from functools import cache

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from shared.config import parse as configs
from shared.data import records
from shared.data.notes import Notes
from shared.data.records import Source
from shared.process import ranks
from shared.process.errors import CleanExit, ConfigError
from shared.process.redaction import redact
from shared.text import corpus
from shared.text.encoder import Encoder
from shared.text.forms import read_example, recognise
from tests.conftest import load_template

pytestmark = pytest.mark.slow
FUZZ = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", 120)),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def in_utf_8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def one_line(error: CleanExit) -> None:
    assert str(error) and not set("\n\r") & set(str(error))


# Any character, those of no encoding too, and those that end a line somewhere.
CHARACTERS = st.characters(exclude_categories=()) | st.sampled_from("\n\r\0\u2028\x85\ufeff\ud800{}[]\",:'\\\t;|")
TEXT = st.text(CHARACTERS, max_size=20)
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -0.0, 2**63])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def either(usual: list, strange: st.SearchStrategy = JSON) -> st.SearchStrategy:
    return st.sampled_from(usual) | strange


# Records -------------------------------------------------------------------------------------------------------------


def delimited(rows: list[list[str]]) -> str:
    file = io.StringIO()
    with contextlib.suppress(csv.Error):
        csv.writer(file).writerows(rows)
    return file.getvalue()


RECORDS = st.lists(st.dictionaries(either(["text", "prompt", "image"], TEXT), JSON, max_size=4), max_size=4)
PIECES = st.lists(
    st.sampled_from(['{"text":', '"a"', "}", "{", "[", "]", ",", "\n", "\\ud83d", '"', "null", "\ufeff", "1e999", "NaN"])
)
AS_THEY_ARE = json.JSONEncoder(ensure_ascii=False).encode
CONTENT = st.binary(max_size=80) | st.one_of(
    TEXT,
    PIECES.map("".join),
    RECORDS.map(lambda rows: "\n".join(map(AS_THEY_ARE, rows))),
    RECORDS.map(lambda rows: "\n".join(map(json.dumps, rows))),
    RECORDS.map(AS_THEY_ARE),
    st.lists(st.lists(TEXT, max_size=4), max_size=4).map(delimited),
).map(in_utf_8)


@FUZZ
@example(content=b'{"\\n": null}', suffix=".jsonl")
@given(content=CONTENT, suffix=st.sampled_from([".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ""]))
def test_any_file_gives_records_that_can_be_written_or_one_line(tmp_path, content, suffix):
    path = tmp_path / f"data{suffix}"
    path.write_bytes(content)
    source = Source("data", lambda: [path], lambda: records.read_records([path]))
    try:
        for where, record in source.read():
            assert where.startswith(str(path)) and isinstance(record, dict)
            json.dumps(record, ensure_ascii=False, default=str).encode()
        for _ in corpus.pieces(source, "text", Notes()):
            pass
    except ConfigError as error:
        one_line(error)
        assert str(path) in str(error)


# Conversations -------------------------------------------------------------------------------------------------------

ROLES = ["user", "assistant", "system", "tool", "human", "gpt"]
USUAL = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"from": "gpt", "value": "c"}]
KEYS = either(["role", "content", "from", "value", "tool_calls", "tools", "name"], TEXT)
MESSAGES = st.lists(either(USUAL) | st.dictionaries(KEYS, either(ROLES), max_size=5), max_size=4)
COLUMNS = ["messages", "conversations", "prompt", "completion", "instruction", "input", "output", "text", "tools"]
CHATS = st.dictionaries(either(COLUMNS, TEXT), MESSAGES | MESSAGES.map(json.dumps) | JSON, max_size=5)
# As models' own templates are: with a turn of tools, a demand on the order of roles, and methods of text.
STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] | trim }}{% endif %}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must\n alternate') }}{% endif %}"
    "<|{{ m.role.upper() }}|>{{ m.content.strip() + eos_token }}{% for call in m.tool_calls %}"
    "{{ call.function.name + (call.function.arguments | tojson) }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module", params=["default", "strict"])
def encoder(request, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    if request.param == "strict":
        tokenizer.chat_template = STRICT
    return Encoder(tokenizer, "assistant")


@FUZZ
@given(record=CHATS)
def test_any_conversation_gives_tokens_or_one_line(tmp_path, encoder, record):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(json.dumps(record).encode())
    try:
        for where, read in records.read_records([path]):
            form = recognise(read, where)
            ids, learned = encoder(read_example(read, form, where), where)
            assert len(ids) == len(learned) and all(0 <= token < len(encoder.tokenizer) for token in ids)
            assert not learned.any() or ids[max(learned.nonzero()[0])] in encoder.special
    except ConfigError as error:
        one_line(error)
        assert str(error).startswith(f"{path}:1: ")


# Settings ------------------------------------------------------------------------------------------------------------

TEMPLATES = ["pretrain", "lora_finetune", "image_classification", "pretrain_pipeline"]


@cache
def config_class(template: str) -> type:
    return load_template(template).Config


def parses(template: str, argv: list[str]) -> None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            config = configs.parse(config_class(template), argv)
        yaml.safe_load(yaml.safe_dump(redact(configs.flatten(config))))
    except ConfigError as error:
        one_line(error)
    except SystemExit as end:
        assert end.code in (0, None) and {"--help", "-h"} & {token.split("=")[0] for token in argv}
    finally:
        ranks.set_pipeline_ranks(1)  # which the template of pipelines has told the whole process


@st.deferred  # so that no template is loaded before a test of this file runs
def FLAGS() -> st.SearchStrategy[str]:
    names = {name for template in TEMPLATES for name in configs.flags(config_class(template))}
    return st.sampled_from(sorted(names | {"config", "help"}))


SPELLINGS = ["--{}", "--no_{}", "--no-{}", "-{}", "{}"]
SPELLINGS += [f"--{{}}={value}" for value in ("", 1, "true", -1, "nan", "1e400", [1])]
VALUES = ["1", "0", "-1", "1e-4", "true", "False", "none", "None", "--", "-", "", "=", "--=", "-h", "inf", "[]", "*"]
TOKENS = (
    st.builds(lambda flag, spelling: spelling.format(flag), FLAGS, st.sampled_from(SPELLINGS))
    | st.builds(lambda flag, value: f"--{flag}={value}", FLAGS, TEXT)
    | either(VALUES, TEXT)
)


YAML_VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT | st.dates() | st.datetimes() | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.integers() | st.none(), inner, max_size=3),
    max_leaves=6,
)
LINES = st.builds("{}: {}".format, FLAGS, either(["&a [*a]", "*a", "!!set {}", "!!python/name:os.x", "<<", "|"], TEXT))
CONTENTS = st.dictionaries(FLAGS | TEXT, YAML_VALUES, max_size=4)
YAML = st.binary(max_size=60) | st.one_of(
    TEXT,
    st.lists(LINES, max_size=4).map("\n".join),
    CONTENTS.map(lambda content: yaml.safe_dump(content, allow_unicode=True)),
).map(in_utf_8)


@FUZZ
@given(template=st.sampled_from(TEMPLATES), content=st.none() | YAML, argv=st.lists(TOKENS, max_size=6))
def test_any_command_line_and_any_yaml_give_a_config_or_one_line(tmp_path, template, content, argv):
    path = tmp_path / "run.yaml"
    path.write_bytes(content or b"")
    parses(template, [*([] if content is None else ["--config", str(path)]), *argv])
