"""Forms of data, which tokens are learned, packing and padding."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from shared import demo
from shared.data import records
from shared.data.loader import Loader, Share
from shared.data.notes import Notes
from shared.data.options import DataConfig
from shared.data.order import IGNORED, GroupedOrder, Order, permuted, training_order
from shared.data.records import read_records
from shared.models.tokenizers import load_tokenizer
from shared.process.errors import ConfigError
from shared.text import chat
from shared.text.encoder import Encoder
from shared.text.forms import Example, read_example, recognise, refuse_other_meanings, unused
from shared.text.options import ChatConfig
from shared.text.packing import Packed, best_fit_decreasing, collate_packed, collate_padded
from tests.chats import ASKED, CHATML, LEARNED, MARKED, TURNS, Learns, chat_tokenizer, headed, marked
from tests.conftest import put_a_token_before_texts, write_lines


@pytest.fixture
def chatml(tiny_model):
    return chat_tokenizer(tiny_model)


@pytest.fixture
def learns(tiny_model):
    return Learns(tiny_model)


SHAREGPT = [{"from": "human", "value": "a line"}, {"from": "gpt", "value": "says what"}]
PARTS_OF_TEXT = {"role": "user", "content": [{"type": "text", "text": "a "}, {"text": "line"}]}


@pytest.mark.parametrize(
    ("record", "form", "learned"),
    [
        ({"messages": TURNS[1:3]}, "chat messages", "says what"),
        ({"conversations": SHAREGPT}, "ShareGPT conversations", "says what"),
        ({"prompt": "a line ", "completion": "says what"}, "prompt and completion", "says what"),
        ({"prompt": TURNS[1:2], "completion": TURNS[2:3]}, "prompt and completion", "says what"),
        ({"instruction": "a line", "input": "", "output": "says what"}, "Alpaca instructions", "says what"),
        ({"instruction": "a", "input": "line", "output": "says what"}, "Alpaca instructions", "says what"),
        ({"text": "says what"}, "plain text", "says what"),
        ({"messages": json.dumps(TURNS[1:3])}, "chat messages", "says what"),
        ({"messages": [PARTS_OF_TEXT, TURNS[2]]}, "chat messages", "says what"),
        ({"prompt": TURNS[1:4], "completion": TURNS[4:]}, "prompt and completion", "it saw many"),
    ],
)
def test_each_form_is_recognised_and_learns_the_answer_and_its_end(learns, record, form, learned):
    assert recognise(record, "here") == form
    assert [run.strip() for run in learns(record, None)] == [learned + "<|endoftext|>"]


def test_what_the_system_says_is_read_from_each_form():
    for record in (
        {"system": "the model reads", "instruction": "a line", "output": "says what"},
        {"system": "the model reads", "conversations": SHAREGPT},
        {"messages": [{"role": "developer", "content": "the model reads"}, *TURNS[1:3]]},
        {"system": "the model reads", "messages": TURNS[1:3]},
    ):
        assert read_example(record, recognise(record, "here"), "here").messages == TURNS[:3]
    with pytest.raises(ConfigError, match="in the column 'system' and among the messages: keep one"):
        read_example({"system": "be brief", "messages": TURNS}, "chat messages", "here")
    joined = {"system": "the model reads", "prompt": "a line", "completion": "says what"}
    with pytest.raises(ConfigError, match=r"a system text, which only a chat template takes .*; .* --allow_unused_columns"):
        refuse_other_meanings(joined, "prompt and completion", "here")
    refuse_other_meanings(joined | {"system": ""}, "prompt and completion", "here")


THINKING = ASKED + headed(  # before the answer that is the last, as Qwen3's template has it
    "{% if m['role'] == 'assistant' and loop.index0 > ns.asked %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}"
)
# A thought is opened where an answer is to be generated, as DeepSeek-R1's and Qwen3.6's templates do.
OPENED = CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}")
# What ends the last turn, and what begins the next, begin with the same character, as in Phi-3's template.
ALIKE = CHATML.removesuffix("{% endif %}") + "{% else %}{{ '<|return|>' }}{% endif %}"
RETURNING = headed(  # another token ends the last answer, as in gpt-oss's template
    "{{ m['content'] }}{{ '<|return|>' if m['role'] == 'assistant' and loop.last else '<|im_end|>' }}"
)
MOVING = headed(  # what the system says stands before the last question
    "{% if (loop.last and m['role'] == 'user') or (loop.revindex == 2 and m['role'] == 'user') %}"
    "{{ messages[0]['content'] + '\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}"
).replace("in messages", "in messages[1:]")
STRICT = "{{ raise_exception('too short') if messages[-1].content | length < 4 }}" + MARKED  # refuses placeholders
ENDED = headed(marked("{{ m['content'] + '<|im_end|>\n' }}"))  # the end of a line is marked, too


@pytest.mark.parametrize(
    ("template", "loss_on", "unlike", "expected"),
    [
        *((template, "assistant", 0, LEARNED) for template in (CHATML, MARKED, STRICT, ENDED)),
        (CHATML, "completion", 0, LEARNED[1:]),
        (THINKING, "assistant", 0, [LEARNED[0], "<think>\n\n</think>\n\n" + LEARNED[1]]),
        (OPENED, "assistant", 2, LEARNED),
        (ALIKE, "assistant", 0, [LEARNED[0], LEARNED[1] + "\n<|return|>"]),
        (RETURNING, "assistant", 0, [LEARNED[0], "it saw many<|return|>"]),
        (MOVING, "assistant", 2, LEARNED),
        (MOVING, "completion", 0, LEARNED[1:]),
    ],
    ids=["chatml", "marked", "strict", "ended", "last", "thinking", "opened", "alike", "returning", "moving", "moving"],
)
def test_answers_are_found_in_what_a_template_writes(learns, template, loss_on, unlike, expected):
    """`unlike`: how many do not follow what the generation prompt would be."""
    assert [run.strip() for run in learns(TURNS, template, loss_on)] == expected
    assert len(learns.noted("unlike")) == unlike
    written = learns.tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert written.startswith(learns.text) and written[len(learns.text) :].strip() == ""


def test_turns_that_cannot_be_found_are_refused(learns):
    counted = "(m['content'] if loop.last or m['role'] != 'assistant' else m['content'] | length | string)"
    some = CHATML.replace("m['content']", counted)
    assert learns(TURNS, some, "completion") == LEARNED[1:]
    none = CHATML.replace("m['content']", "m['content'] | length | string + loop.revindex | string + m['content'][:1]")
    assert learns(TURNS, none, "all")[0].startswith("<|im_start|>system")
    assert learns(TURNS[:3], loss_on="completion") == LEARNED[:1]
    for template, turns in ((some, TURNS), (none, TURNS), (STRICT, [{**TURNS[2], "weight": 0}, *TURNS[3:]])):
        with pytest.raises(ConfigError, match=r"^here: what the assistant says cannot be found.*--loss_on completion"):
            learns(turns, template)
    with pytest.raises(ConfigError, match=r"^here: the chat template refuses this conversation \(too short\)"):
        learns([TURNS[1], {"role": "assistant", "content": "no"}], STRICT)
    learns(TURNS, OPENED, "all")
    assert learns.noted("unlike") == []
    for template in (CHATML, "{{ raise_exception('empty') if not messages }}" + CHATML):
        assert learns(TURNS[2:], template) == LEARNED  # which the assistant begins


def test_a_turn_of_weight_0_is_shown_and_not_learned(learns):
    for template in (CHATML, MARKED):
        for unlearned, expected in ((2, LEARNED[1:]), (4, LEARNED[:1])):
            turns = [{**turn, "weight": 0} if number == unlearned else turn for number, turn in enumerate(TURNS)]
            assert learns(turns, template) == expected
            assert learns.text.strip() == learns.tokenizer.apply_chat_template(TURNS, tokenize=False).strip()
        assert learns(turns, template, "completion") == []


@pytest.mark.parametrize(
    ("head", "written"),
    [
        ("\n{%- if strftime_now is defined %}{%- set d = strftime_now('%d %b %Y') %}{%- endif %}{{ d }}\n", "26 Jul 2024\n"),
        ("\n  {% macro now() %}{{- 'On ' + strftime_now('%Y-%m-%d') }}{% endmacro %}{{ now() }}", "\nOn 2024-07-26"),
        ("{{ strftime_now('%A %e %b %y %H:%M, %j') }}", "Friday 26 Jul 24 00:00, 208"),
    ],
)
def test_a_template_that_writes_the_date_makes_the_same_samples_on_any_day(learns, head, written):
    assert learns(TURNS, head + CHATML) == LEARNED
    assert learns.text.startswith(written + "<|im_start|>")


def test_tools_are_shown_to_the_model_or_refused(learns):
    record = {"messages": TURNS, "tools": [{"type": "function", "function": {"name": "look_up"}}]}
    showing = "{% if tools %}{{ tools[0]['function']['name'] + '\n' }}{% endif %}" + CHATML
    for tools in (record["tools"], json.dumps(record["tools"])):
        with pytest.raises(ConfigError, match=r"^here: has tools, but the chat template does not write them"):
            learns(record | {"tools": tools})
        assert learns(record | {"tools": tools}, showing) == LEARNED and learns.text.startswith("look_up")
    for nothing in (None, [], "[]", "null", ""):
        assert read_example(record | {"tools": nothing}, "chat messages", "here").tools is None


def test_keys_that_parquet_adds_are_left_out_and_nulls_that_somebody_wrote_are_not(tmp_path):
    def calling(**arguments):
        calls = [{"function": {"name": "f", "arguments": arguments}}]
        return {"messages": [{"role": "assistant", "tool_calls": calls}], "tools": [{"default": None}]}

    written = [calling(city=None), calling(text="a", city="b"), {"messages": TURNS, "tools": None}]
    write_lines(tmp_path / "a.jsonl", written)
    pq.write_table(pa.Table.from_pylist(written), tmp_path / "a.parquet")
    lines, table = (
        [read_example(record, "chat messages", "here") for _, record in read_records([tmp_path / name])]
        for name in ("a.jsonl", "a.parquet")
    )
    assert [example.messages for example in lines] == [record["messages"] for record in written]
    assert [example.tools for example in lines] == [[{"default": None}], [{"default": None}], None]
    nulls = [calling(), written[1], written[2]]
    assert [example.messages for example in table] == [record["messages"] for record in nulls]


CALLING = headed(
    "{{ m['content'] or '' }}{% for call in m['tool_calls'] or [] %}{{ CALL }}{% endfor %}{{ '<|im_end|>\n' }}",
    before="{{ tools[0]['function']['name'] + '\n' if tools }}",
)


@pytest.mark.parametrize(
    ("written", "given"),
    [
        ("call['function']['arguments'] | tojson", '{"city": "Köln"}'),
        ("'' + call['function']['arguments']", {"city": "Köln"}),
        ("call['function']['arguments']", {"city": "Köln"}),
    ],
    ids=["for objects", "refuses objects", "for strings"],
)
def test_arguments_of_calls_are_written_once(learns, written, given):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": given}}]}
    record = {"messages": [*TURNS[:2], call, {"role": "tool", "content": "sunny"}, TURNS[4]]}
    record["tools"] = [{"function": {"name": "weather"}}]
    assert learns(record, CALLING.replace("CALL", written)) == ['{"city": "Köln"}<|im_end|>', LEARNED[1]]


MANY, CALLS = TURNS[:1], [{"role": role, "content": f"a line {role}"} for role in ("system", "user")]
for number in range(60):
    MANY += [{"role": "user", "content": f"a line {number}"}, {"role": "assistant", "content": f"says what {number}"}]
    calls = [{"function": {"name": "f", "arguments": {}}}]
    CALLS += [{"role": "assistant", "content": f"says {number}", "tool_calls": calls}]
    CALLS += [{"role": "tool", "content": f"many {number} "}]
MANY[16]["weight"] = 0


@pytest.mark.parametrize("messages", [MANY, [*CALLS, TURNS[-1]]], ids=["questions", "tools"])
@pytest.mark.parametrize("template", [CHATML, THINKING, OPENED, ALIKE, RETURNING, MARKED])
def test_many_turns_are_found_in_a_few_renderings(learns, template, messages, monkeypatch):
    render, rendered = Encoder._render, []
    monkeypatch.setattr(Encoder, "_render", lambda *args, **o: rendered.append(t := render(*args, **o)) or t)
    said = [turn["content"] for turn in messages if turn["role"] == "assistant" and turn.get("weight", 1)]
    for run, text in zip(learns(messages, template), said, strict=True):
        head, text, end = run.partition(text)
        assert text and head in ("", "<think>\n\n</think>\n\n") and re.fullmatch(r"(\s*<\|(im_end|return)\|>)+", end)
    assert sum(map(len, rendered)) < 7 * len(learns.text)


PARTS = CHATML.replace("m['content'] + ", "m['content'][0]['text'] + ")
SWITCHED = ASKED + headed(  # thoughts are written in the last answer alone; without them the prompt closes them at once
    "{% if m['role'] == 'assistant' and loop.index0 > ns.asked %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}"
).replace(
    "assistant\n' }}{% endif %}",
    "assistant\n<think>\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}",
)


@pytest.mark.parametrize(
    ("template", "thinks"), [(PARTS, False), (CHATML, True), (SWITCHED, None), (SWITCHED, False), (SWITCHED, True)]
)
def test_an_answer_follows_the_generation_prompt_token_by_token(learns, template, thinks):
    turns = [*TURNS[:4], TURNS[4] | ({"reasoning_content": "it saw more"} if thinks else {})]
    given = {} if thinks is None else {"enable_thinking": thinks}
    answers = learns({"messages": turns, "chat_template_kwargs": given}, template)

    def render(count, **options):
        parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
        told = (parts if template == PARTS else turns)[:count]
        text = learns.tokenizer.apply_chat_template(told, tokenize=False, **options, **given)
        return learns.tokenizer(text, add_special_tokens=False)["input_ids"]

    ids, whole = learns.ids, render(5)
    assert ids == whole[: len(ids)] and learns.tokenizer.decode(whole[len(ids) :]).strip() == ""
    unlike = []
    for count, (first, _) in zip((2, 4), learns.runs, strict=True):
        prompt = render(count, add_generation_prompt=True)
        asked = Example(turns[:count], template_options=given)
        assert Encoder(learns.tokenizer, "assistant").prompt(asked, "here", Notes()) == prompt
        if ids[:first] != prompt:
            unlike.append(f"here, message {count + 1}")
    assert len(answers) == 2 and learns.noted("unlike") == unlike
    # without a switch, "\n\n" is one token here or not, as the tokenizer has it
    assert ("here, message 3" in unlike) == (template == SWITCHED) and (thinks is None or len(unlike) < 2)


def test_answers_that_do_not_follow_the_generation_prompt_are_counted(chatml, tmp_path, monkeypatch, capsys):
    closed = "{{ '<think></think>' if enable_thinking is defined and not enable_thinking else '<think>\n' }}"
    chatml.chat_template = CHATML.replace("m['content']", "'<think></think>' * (m['role'] == 'assistant') + m['content']")
    chatml.chat_template = chatml.chat_template.replace("assistant\n' }}", "assistant\n' }}" + closed)
    path = write_lines(tmp_path / "data.jsonl", [{"messages": TURNS[1:3]}] * 30)
    prepared(chatml, path, tmp_path, monkeypatch)
    said = " ".join(capsys.readouterr().err.split())
    assert "warning: 30 answers are learned after other tokens than the template's generation prompt gives" in said
    assert '"enable_thinking": false' in said and said.partition("the first is ")[2].startswith(f"{path}:1, message 2")
    write_lines(path, [{"messages": TURNS[1:3], "chat_template_kwargs": {"enable_thinking": False}}] * 30)
    prepared(chatml, path, tmp_path, monkeypatch)
    kept, line = capsys.readouterr().err.splitlines()  # the records are alike
    assert kept == "the chat template in final/ has the default of all records: enable_thinking = False"
    assert line.endswith("validation texts are in the training data, too, word for word")


def test_what_all_records_give_the_chat_template_is_its_default_after_training(chatml, tmp_path, monkeypatch):
    given = chatml.chat_template = "{{ thinks }} {{ level }} {{ other }}" + chatml.chat_template
    options = [{"thinks": False, "level": "high", "other": "a"}, {"level": "high", "thinks": False, "other": "b"}]
    rows = [{"messages": TURNS[1:3], "chat_template_kwargs": options[n % 2]} for n in range(30)]

    def asked(**values):
        return chatml.apply_chat_template(TURNS[1:2], tokenize=False, **values).split("<")[0]

    path = write_lines(tmp_path / "data.jsonl", rows)
    train, *_ = prepared(chatml, path, tmp_path, monkeypatch)
    assert chatml.convert_ids_to_tokens(train.end) == "<|im_end|>"
    assert asked() == "False high " and asked(thinks=True, level="low", other="c") == "True low c"
    kept = chatml.chat_template
    prepared(chatml, path, tmp_path, monkeypatch)
    assert chatml.chat_template == kept != given  # once
    chatml.chat_template = given
    prepared(chatml, write_lines(path, [*rows, {"messages": TURNS[1:3]}]), tmp_path, monkeypatch)
    assert chatml.chat_template == given


def test_files_of_different_forms_are_trained_on_together(chatml, tmp_path, monkeypatch):
    write_lines(tmp_path / "a.jsonl", [{"prompt": f"{i}?", "completion": "So."} for i in range(3)])
    talk = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
    (tmp_path / "b.json").write_text(json.dumps([talk] * 2))
    for name in ("README.md", "_SUCCESS"):
        (tmp_path / name).touch()
        with pytest.raises(ConfigError, match=f"{name}: is one text, beside files of records: to leave it out, name"):
            prepared(chatml, tmp_path / "[!t]*", tmp_path, monkeypatch)
        (tmp_path / name).unlink()
    train, _, _ = prepared(chatml, tmp_path / "*.json*", tmp_path, monkeypatch)
    assert train.stores[0].notes.named("form ") == {"prompt and completion": 3, "chat messages": 2}
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(json.dumps(talk))
    with pytest.raises(ConfigError, match=r"a.jsonl:4: 'prompt' is missing, but the first record of this file has it"):
        prepared(chatml, tmp_path / "*.json*", tmp_path, monkeypatch)


def test_empty_answers_and_what_is_on_both_sides_are_said(chatml, tmp_path, monkeypatch, capsys):
    alike = [{"instruction": "Why?", "output": "So."}] * 30
    empty = [{"instruction": f"{i}?", "output": " "} for i in range(3)]
    prepared(chatml, write_lines(tmp_path / "data.jsonl", alike + empty), tmp_path, monkeypatch)
    said = " ".join(capsys.readouterr().err.split())
    assert "warning: 3 records have an empty answer, from which the model learns to say nothing; the first is" in said
    assert "data.jsonl:31" in said
    assert "warning: 2 of the 2 validation texts are in the training data, too, word for word" in said
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    none = call | {"tool_calls": []}
    for turn, is_empty in ((call, False), (none, True), (none | {"weight": 0}, False)):
        example = read_example({"messages": [TURNS[1], turn, TURNS[2]]}, "chat messages", "here")
        assert example.has_empty_answer is is_empty


def test_options_of_the_template_that_it_does_not_read_are_named():
    record = {"messages": TURNS, "chat_template_kwargs": json.dumps({"enable_thinking": False})}
    example = read_example(record, "chat messages", "here")
    assert unused(record, "chat messages", example, CHATML) == ["enable_thinking (of chat_template_kwargs)"]
    assert unused(record, "chat messages", example, SWITCHED) == []
    with pytest.raises(ConfigError, match=r"^here: 'chat_template_kwargs' is a str, expected an object"):
        read_example(record | {"chat_template_kwargs": "yes"}, "chat messages", "here")


def test_the_template_of_a_processor_is_found(tokenizer, tmp_path):
    tokenizer.chat_template = None
    for name in (None, "chat_template.json", "processor_config.json", "chat_template.jinja"):
        tokenizer.save_pretrained(folder := tmp_path / str(name))
        if name:
            (folder / name).write_text(PARTS if name.endswith("jinja") else json.dumps({"chat_template": PARTS}))
        assert load_tokenizer(str(folder)).chat_template == (PARTS if name else None)


@pytest.mark.parametrize(
    "example",
    [Example(TURNS[1:3]), Example(prompt="a line ", completion="says what"), Example(completion="<s>says what")],
    ids=["messages", "completion", "rendered before"],
)
def test_what_begins_a_text_is_there_once(tokenizer, example):
    tokenizer.chat_template = None
    encoder = Encoder(put_a_token_before_texts(tokenizer), "assistant")
    ids, mask = encoder(example, "here")
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    prompt = encoder.prompt(Example(prompt="a line"), "here", Notes())
    assert prompt == [tokenizer.bos_token_id, *tokenizer("a line", add_special_tokens=False)["input_ids"]]
    assert encoder(Example(completion="a line<s>"), "here")[0][-1] == tokenizer.eos_token_id  # which ends no text
    assert not encoder.has_own_template and tokenizer.decode(np.array(ids)[mask]).endswith("says what<|endoftext|>")


def calling(arguments):
    return {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [{"role": "assistant", "content": None}]}, "content of message 1 is null"),
        ({"messages": [{"role": "assistant", "content": 3}]}, "content of message 1 is an int"),
        ({"messages": "x"}, "'messages' is a str, expected a list of objects"),
        ({"messages": [calling([["city", "Rome"]])]}, "message 1 calls a tool with a list of arguments"),
        ({"messages": [calling('[["city", "Rome"]]')]}, "message 1 calls a tool with a list of arguments"),
        ({"messages": [3]}, "'messages' is a list, expected a list of objects"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "turn 1 is from 'robot'"),
        ({"instruction": "x", "output": None}, "'output' is null"),
        ({"prompt": "x", "completion": 3}, "'completion' is an int"),
        ({"text": ["x"]}, "'text' is a list"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(record, message):
    with pytest.raises(ConfigError, match=f"^data.jsonl:7: .*{message}"):
        read_example(record, recognise(record, "data.jsonl:7"), "data.jsonl:7")


def prepared(tokenizer, path, tmp_path, monkeypatch, **options):
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path))
    config = ChatConfig(train_file=(str(path),), **{"seq_length": 96, "preprocessing_num_workers": 1} | options)
    return *chat.open_samples(config, tokenizer), config


def test_split_is_disjoint_and_whole_and_rows_are_shifted(tokenizer, chat_file, tmp_path, monkeypatch):
    train, validation, _ = prepared(tokenizer, chat_file, tmp_path, monkeypatch)
    assert len(train) + len(validation) == 23 and len(validation) == 1
    assert train.context == pytest.approx(np.mean([n for n in train.lengths for _ in range(n)]))
    row = train[0]
    kept = row["labels"] != IGNORED
    assert (row["labels"][:-1][kept[:-1]] == row["input_ids"][1:][kept[:-1]]).all()
    assert row["labels"][kept][-1] == tokenizer.eos_token_id
    targets = sum(int((train[i]["labels"] != IGNORED).sum()) for i in range(len(train)))
    assert train.num_targets(np.arange(len(train))) == targets
    options = {"validation_file": (str(chat_file),), "max_train_samples": 9}
    train, validation, _ = prepared(tokenizer, chat_file, tmp_path, monkeypatch, **options)
    assert (len(train), len(validation)) == (9, 23)  # a file is whole
    for index in range(9):
        assert all(np.array_equal(train[index][key], validation[index][key]) for key in ("input_ids", "labels"))


def test_a_run_is_resumed_on_data_that_were_prepared_anew(tmp_path, monkeypatch):
    """What is compared then stays what it was, whatever writes it."""
    rows = [{"prompt": f"line {n}\n", "completion": f"it is {n * n}"} for n in range(30)]
    file = write_lines(tmp_path / "data.jsonl", rows)
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    train, validation, _ = prepared(tokenizer, file, tmp_path, monkeypatch)
    assert (len(train), len(validation)) == (28, 2)
    assert train.fingerprint == "2fd8e10299f0d05a"


def test_rows_with_nothing_to_learn_are_counted_and_dropped(tokenizer, tmp_path, monkeypatch, capsys):
    rows = [{"prompt": "the line " * 100, "completion": "x"}, *[{"prompt": "a ", "completion": "line"}] * 3]
    path = write_lines(tmp_path / "data.jsonl", rows)
    train, validation, config = prepared(tokenizer, path, tmp_path, monkeypatch)
    counts = train.stores[0].notes.counts
    assert (counts["read"], counts["dropped"], counts["cut"]) == (4, 1, 1)
    assert len(train) + len(validation) == 3 and "1 dropped" in chat.describe(train, config)
    said = capsys.readouterr().err
    assert f"cuts 1 of the 4 samples of {path} and leaves 1 without an answer; --seq_length " in said
    longer = int(re.search(r"--seq_length (\d+) cuts none", said)[1])
    prepared(tokenizer, path, tmp_path, monkeypatch, seq_length=longer)
    assert "cuts" not in capsys.readouterr().err and longer < 64 + len(tokenizer("the line " * 100 + "x")["input_ids"])


def test_plain_text_makes_as_many_samples_as_it_takes_and_is_held_out_whole(tokenizer, tmp_path, monkeypatch):
    texts = [f"text {number}: " + "the model reads a line " * (number * 20) for number in range(12)]
    path = write_lines(tmp_path / "data.jsonl", [{"text": text} for text in texts])
    train, validation, config = prepared(tokenizer, path, tmp_path, monkeypatch, validation_split_percentage=25)
    found = []
    for split in (train, validation):
        samples = [list(split.tokens(number)[0]) for number in range(len(split))]
        while samples:
            ids = samples.pop(0)
            while ids[-1] != tokenizer.eos_token_id:
                following = samples.pop(0)
                assert following[0] == ids[-1]
                ids += following[1:]
            found.append((tokenizer.decode(ids[:-1]), split is validation))
    assert sorted(text for text, _ in found) == sorted(texts)
    assert sum(held_out for _, held_out in found) == 3
    counts = train.stores[0].notes.counts
    assert max(train.lengths) == 96 and (counts["read"], counts["cut"], counts["dropped"]) == (12, 0, 0)
    assert f"{len(train)} to train on" in chat.describe(train, config)
    tokens = sum(len(tokenizer(text)["input_ids"]) for text in texts)
    assert sum(split.num_targets(np.arange(len(split))) for split in (train, validation)) == tokens


def test_a_long_text_file_ends_once_and_of_one_the_end_is_held_out(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "PIECE", 100)
    for number in range(2):
        (tmp_path / f"{number}.txt").write_text("the model reads a line\n" * 40)
    train, _, _ = prepared(tokenizer, tmp_path, tmp_path / "cache", monkeypatch)
    ids = train.stores[0]["ids"]  # of both
    assert (ids == tokenizer.eos_token_id).sum() == 2
    monkeypatch.setattr(records, "PIECE", 4000)  # whole pieces would be a third of it
    text = "".join(f"line {number} of the text\n" for number in range(500))
    path = tmp_path / "book.txt"
    path.write_text(text)
    train, validation, config = prepared(tokenizer, path, tmp_path / "cache", monkeypatch)
    tokens = [sum(split.lengths) for split in (train, validation)]
    assert tokens[1] / sum(tokens) == pytest.approx(0.05, abs=0.02)
    ids = [validation[index]["input_ids"] for index in range(len(validation))]  # neighbours share a token
    last = tokenizer.decode(np.concatenate(ids))
    assert text.removesuffix("\n").endswith(last.removesuffix("\n")) and len(last) > 300
    share = len(validation) / (len(train) + len(validation))
    stated = f"to validate on: {len(validation)}, the last {share:.0%} (whole records"
    assert stated in chat.describe(train, config)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=200), st.floats(0.01, 99.9))
def test_what_is_held_out_is_near_the_share_that_was_asked_for(samples_of_records, percent):
    is_first = np.concatenate([[1] + [0] * (n - 1) for n in samples_of_records])
    held_out, how = chat._hold_out(is_first, percent)
    record = np.cumsum(is_first) - 1
    assert held_out.any() and (not held_out.all() or len(record) == 1)
    share = len(record) * percent / 100
    if "last" in how:
        assert abs(held_out.sum() - share) <= 1 and (np.diff(held_out.astype(int)) >= 0).all()
    else:
        parts = [held_out[record == number] for number in range(len(samples_of_records))]
        assert all(part.all() or not part.any() for part in parts)
        assert share / 2 - 1 <= held_out.sum() <= 2 * share + 2


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 64), max_size=120))
def test_packing_uses_each_sample_once_and_never_overfills(lengths):
    lengths = np.array(lengths, dtype=np.int64)
    bins = best_fit_decreasing(lengths, 64)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(lengths[b].sum() <= 64 for b in bins)
    assert len(bins) <= 11 / 9 * -(-lengths.sum() // 64) + max(6 / 9, sum(lengths > 32))
    assert bins == best_fit_decreasing(lengths, 64)
    with pytest.raises(ValueError, match="above the capacity"):
        best_fit_decreasing(np.append(lengths, 65), 64)


def test_packed_rows_restart_positions_and_keep_labels_apart(tokenizer, chat_file, tmp_path, monkeypatch):
    train, _, _ = prepared(tokenizer, chat_file, tmp_path, monkeypatch)
    packed = Packed(train, 96)
    row = packed[0]
    starts = np.flatnonzero(row["position_ids"] == 0)
    assert len(starts) == len(packed.bin(0))
    for start, index in zip(starts, packed.bin(0), strict=True):
        part = slice(start, start + train.lengths[index])
        assert (row["labels"][part] == train[index]["labels"]).all()
        assert (row["input_ids"][part] == train[index]["input_ids"]).all()
    everything = np.arange(len(packed))
    assert packed.num_targets(everything) == train.num_targets(np.arange(len(train)))
    assert packed.waste == pytest.approx(1 - train.lengths.sum() / (len(packed) * 96))


def test_collators_fill_without_targets_and_keep_a_real_end_of_text():
    end = 0  # the id of what fills up, and a real target: no loss may be lost for that
    rows = [
        {"input_ids": np.array([5, 6, 7]), "labels": np.array([IGNORED, 7, end]), "position_ids": np.arange(3)},
        {"input_ids": np.array([8]), "labels": np.array([end]), "position_ids": np.arange(1)},
    ]
    padded, packed = collate_padded(rows), collate_packed(rows)
    for batch in (padded, packed):
        assert batch["labels"].tolist() == [[IGNORED, 7, end], [end, IGNORED, IGNORED]]
        assert batch["targets"].tolist() == [1, 2, 3]
        assert "attention_mask" not in batch
        assert "position_ids" not in batch  # of rows that hold a single conversation
    for collate in (collate_padded, collate_packed):
        longer = collate(rows, multiple_of=8)
        assert longer["labels"].shape == longer["input_ids"].shape == (2, 8)
        assert longer["labels"][:, :3].tolist() == [[IGNORED, 7, end], [end, IGNORED, IGNORED]]
        assert (longer["labels"][:, 3:] == IGNORED).all() and longer["targets"].tolist() == [1, 2, 8]
        assert collate(rows, multiple_of=8, at_most=5)["labels"].shape == (2, 5)
    rows[0]["position_ids"] = np.array([0, 0, 1])
    several = collate_packed(rows, multiple_of=4)
    assert several["position_ids"].tolist() == [[0, 0, 1, 2], [0, 1, 2, 3]]
    bounded = collate_packed(rows, multiple_of=4, longest=2)  # a model with two positions
    assert bounded["position_ids"].tolist() == [[0, 0, 1, 0], [0, 1, 0, 1]]


class OfLengths:
    """Conversations of given lengths."""

    def __init__(self, *lengths):
        self.lengths = np.array(lengths)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"input_ids": np.full(self.lengths[index], index), "labels": np.full(self.lengths[index], index)}

    def num_targets(self, indices):
        return int(self.lengths[indices].sum())


def test_what_memory_has_to_suffice_for_is_as_long_as_can_be_and_has_a_mask():
    def longest(samples, collate, rows):
        share = Share(0, 1, torch.device("cpu"))
        return Loader(samples, collate, Order(len(samples), rows, 0), share, per_device=rows).longest(rows)

    talks = OfLengths(16, 3, 9, 7, 12)
    padded = longest(talks, collate_padded, 3)
    assert (padded["labels"] != IGNORED).sum(1).tolist() == [16, 3, 3] and padded["labels"].shape == (3, 16)
    assert set(longest(talks, collate_padded, 1)) == {"input_ids", "labels", "filled"}
    packed = Packed(talks, 16)
    assert [len(members) for members in map(packed.bin, range(len(packed)))] == [1, 2, 2]  # of 16, of 12 + 3, of 9 + 7
    assert packed.lengths.tolist() == [16, 15.5, 16.5]
    for rows in (1, 3):
        batch = longest(packed, collate_packed, rows)
        assert batch["labels"].shape == (rows, 16) and batch["position_ids"][0].tolist() == [*range(9), *range(7)]


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 700), batch=st.integers(1, 9), seed=st.integers(0, 5))
def test_grouped_order_covers_each_epoch_once(size, batch, seed):
    lengths = np.random.default_rng(seed).integers(1, 500, size)
    order = GroupedOrder(size, batch, seed, lengths=lengths)
    for epoch in range(2):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        assert sorted(np.concatenate([order.indices(s) for s in steps]).tolist()) == list(range(size))


def test_grouped_batches_pad_less_and_come_in_an_order_that_changes():
    lengths = np.random.default_rng(0).integers(1, 500, 1000)
    order = training_order(OfLengths(*lengths), SimpleNamespace(size=8, seed=0), DataConfig(), is_padded=True)
    stretch = permuted(1000, (0, 0), 256, 512)  # the second of 32 batches
    longest_first = stretch[np.argsort(-lengths[stretch], kind="stable")].reshape(32, 8)
    expected = longest_first[permuted(32, (0, 0, 1), 0, 32)]
    assert [order.indices(step).tolist() for step in range(32, 64)] == expected.tolist()

    def padding(order):
        batches = [lengths[order.indices(step)] for step in range(order.steps_per_epoch)]
        return sum(int((b.max() - b).sum()) for b in batches)

    assert padding(order) < 0.2 * padding(Order(1000, 8, 0))
    longest = [[int(lengths[order.indices(125 * epoch + step)].max()) for step in range(8)] for epoch in range(3)]
    orders = {tuple(np.argsort(np.argsort(epoch)).tolist()) for epoch in longest}
    assert len(orders) == 3 and tuple(range(7, -1, -1)) not in orders


def test_conversations_are_prepared_anew_when_something_changed(tokenizer, chat_file, tmp_path, monkeypatch):
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path))
    config = {"train_file": (str(chat_file),), "seq_length": 96}
    kinds = ({}, {"seq_length": 64}, {"loss_on": "all"}, {"max_train_samples": 9}, {"validation_split_percentage": 30.0})

    def fingerprint(**kind):
        return chat.open_samples(ChatConfig(**config | kind), tokenizer)[0].fingerprint

    found = [fingerprint(**kind) for kind in kinds]
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    found.append(fingerprint())
    assert len(set(found)) == 6 and fingerprint() == found[-1]
