"""What the data say is learned, and where an answer ends, too: or the run says what is not."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from shared.data import store
from shared.process.errors import ConfigError
from shared.text import chat
from shared.text.forms import read_example, recognise
from shared.text.options import ChatConfig
from tests.chats import ANSWER, CHATML, LAST, MORE, USER, Learns, headed, marked
from tests.conftest import write_lines

CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": '{"city": "Rome"}'}}]}
ENDLESS = CHATML.replace("<|im_end|>\n", "")  # the header of the next turn ends a turn, as in GLM-4.5's template


@pytest.fixture
def learns(tiny_model):
    return Learns(tiny_model)


def test_a_call_that_the_template_does_not_write_is_no_empty_answer(learns):
    """slime#330 (2025): a template without tools wrote a call as an empty answer, and that was learned."""
    refusal = r"^here: .*nothing of what the assistant says in message 2, so an empty answer .* \('{}' is missing\)"
    for template, loss_on in ((CHATML, "assistant"), (CHATML, "all"), (ENDLESS, "assistant"), (None, "assistant")):
        for content in ("", None):  # as OpenAI returns it
            with pytest.raises(ConfigError, match=refusal.format("look")):
                learns([USER, {**CALL, "content": content}, MORE, LAST], template, loss_on)
    short = {"name": "n", "arguments": {"d": "m"}}  # letters of `<|im_end|>`, taken for a written name
    with pytest.raises(ConfigError, match=refusal.format(r"\w")):
        learns([USER, {**CALL, "tool_calls": [{"function": short}]}, MORE, LAST])
    assert learns([USER, {**CALL, "weight": 0}, MORE, LAST]) == ["it saw many<|im_end|>"]


CALLS = "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] + (c['function']['arguments'] | tojson) }}{% endfor %}"
JOINED_CALLS = headed("{{ m['content'] + '' }}" + CALLS + "{{ '<|im_end|>\n' }}", "{{ tools | tojson if tools }}")
CALLS = JOINED_CALLS.replace(" + ''", "")
LOOK = {"name": "look", "arguments": {"city": "Rome"}}
TOOL = {"name": "look", "description": "sees", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("value", [LOOK, [LOOK, LOOK], LOOK | {"arguments": '{"city": "Rome"}'}, {"function": LOOK}])
def test_calls_and_results_of_sharegpt_records_are_those_of_messages(learns, value):
    """glaive_toolcall of LLaMA-Factory: calls, and the tools, are JSON in strings, without what is around a function."""
    calls = [{"type": "function", "function": LOOK}] * (2 if isinstance(value, list) else 1)
    talk = [("human", "a line"), ("function_call", json.dumps(value)), ("observation", "it saw"), ("gpt", "says what")]
    record = {"conversations": [{"from": who, "value": said} for who, said in talk], "tools": json.dumps([TOOL])}
    messages = [USER, {**CALL, "tool_calls": calls}, {"role": "tool", "content": "it saw"}, ANSWER]
    alike = {"messages": messages, "tools": [{"type": "function", "function": TOOL}]}
    read, expected = (read_example(given, recognise(given, "here"), "here") for given in (record, alike))
    assert (read.messages[0], read.messages[2:], read.tools) == (USER, messages[2:], expected.tools)
    written = 'look{"city": "Rome"}' * len(calls) + "<|im_end|>"
    assert learns(record, CALLS) == learns(alike, CALLS) == [written, "says what<|im_end|>"]
    assert learns.noted("lost") == []
    without = {**record, "tools": "[]"}
    with pytest.raises(ConfigError, match="nothing of what the assistant says in message 2"):
        learns(without, CALLS.replace("m['tool_calls'] or []", "[]"))


GIVEN = {"tool_calls": CALL["tool_calls"]}
OLDER = {"content": "", "function_call": CALL["tool_calls"][0]["function"]}


@pytest.mark.parametrize("template", [CALLS, JOINED_CALLS], ids=["direct", "joined"])
@pytest.mark.parametrize("said", [{"content": "", **GIVEN}, {"content": None, "function_call": None, **GIVEN}, GIVEN, OLDER])
def test_each_form_of_a_call_without_a_text_is_learned(learns, template, said):
    """OpenAI returns both: platform.openai.com/docs/api-reference/chat (2023). Templates wrote None, or refused.

    The older form was passed over, and an empty answer was learned.
    """
    written = ['look{"city": "Rome"}<|im_end|>', "it saw many<|im_end|>"]
    call, result = {"role": "assistant", **said}, {"role": "tool", "content": "it saw"}
    assert learns([USER, call, result, LAST], template) == written


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("look", "turn 1: 'function_call' is a str, expected a list of objects"),
        ('["look"]', "turn 1: 'function_call' is a list, expected a list of objects"),
        ('{"city": "Rome"}', "message 1 calls a tool without its name"),
    ],
)
def test_a_call_that_cannot_be_read_is_refused(learns, value, said):
    """An empty call would be learned."""
    with pytest.raises(ConfigError, match=f"^here: {said}"):
        learns({"conversations": [{"from": "function_call", "value": value}]}, CALLS)


STRIPPED = CHATML.replace("m['content'] +", "m['content'].split('</think>')[-1] +")  # as DeepSeek-R1's template does
DROPPING = CHATML.replace("in messages %}", "in messages if m['role'] != 'tool' %}")  # as Phi-3's
LAST_ALONE = headed(marked("{{ m['content'] + '<|im_end|>' }}", when="loop.last"))
LONG = "since a line " * 9
SAID, SAW = "says what<|im_end|>", "it saw many<|im_end|>"


@pytest.mark.parametrize(
    ("template", "messages", "learned", "lost"),
    [
        (CHATML, [{**ANSWER, "reasoning_content": LONG}], [SAID], (2, LONG[:40])),
        (CHATML, [{**ANSWER, "tool_calls": CALL["tool_calls"]}], [SAID], (2, "look")),
        (STRIPPED, [{**ANSWER, "content": "<think>since</think>says what"}], [SAID], (2, "<think>since</think>says what")),
        (DROPPING, [ANSWER, {"role": "tool", "content": LONG}, LAST], [SAID, SAW], (3, LONG[:40])),
        (LAST_ALONE, [ANSWER, MORE, LAST], [SAW], (2, "says what")),
        (LAST_ALONE, [CALL, MORE, LAST], [SAW], (2, "look")),
    ],
    ids=["reasoning", "call", "thoughts in the answer", "result", "turn that is not marked", "call that is not marked"],
)
def test_words_that_the_template_does_not_write_are_counted(learns, template, messages, learned, lost):
    """trl#6361 (2026): a template dropped the reasoning, and the rest was learned in silence."""
    assert learns([USER, *messages], template) == learned
    assert learns.noted("lost") == ["here, message {}: {!r}".format(*lost)]


def test_words_that_the_template_writes_as_json_are_not_lost(learns):
    written = {**ANSWER, "content": 'says\n "what"', "tool_calls": [{"function": {"name": "a", "arguments": {"b": '"\n'}}}]}
    body = "{{ m['content'] | tojson }}{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}<|im_end|>"
    learns([USER, written], headed(body))
    assert learns.noted("lost") == []


@pytest.mark.parametrize(
    ("written", "is_whole"),
    [
        ("m['content'] | tojson", True),
        ("m['content'] | tojson(ensure_ascii=True)", True),
        ("('so ' + m['content'] + ' then') | tojson", True),
        ("m['content'][1:] | tojson", False),
        ("m['content'][:-1] | tojson", False),
    ],
)
def test_an_answer_that_is_written_as_json_is_whole_or_not(learns, written, is_whole):
    template = headed(marked(f"{{{{ {written} }}}}<|im_end|>"))
    learns([USER, {**ANSWER, "content": 'é "says"\n what'}], template)
    assert (learns.noted("lost") == []) == is_whole


def said(capsys) -> list[str]:
    """The notes but the one that all of these records are alike, to train and to validate on."""
    return [line for line in capsys.readouterr().err.splitlines() if not line.endswith("too, word for word")]


def test_lost_words_are_said_once_with_their_number_and_first_place(tiny_model, tmp_path, monkeypatch, capsys):
    """trl#6361 (2026), as above, in a whole file: several chunks, by several processes."""
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "BATCH", 200)
    rows = [{"messages": [USER, {**ANSWER, "thinking": "since"} if number in (3, 4, 7) else ANSWER]} for number in range(9)]
    path = write_lines(tmp_path / "data.jsonl", rows)
    config = ChatConfig(train_file=(str(path),), seq_length=96, preprocessing_num_workers=2)
    chat.open_samples(config, AutoTokenizer.from_pretrained(tiny_model))
    (line,) = said(capsys)
    assert line.startswith("warning: ") and "3 turns" in line and "data.jsonl:4, message 2: 'since'" in line


def test_the_history_of_alpaca_records_is_read_as_earlier_turns(learns):
    """trl#6361 (2026), for `history`, which was not read at all."""
    history = [["a line", "says what"]]
    for given in (history, json.dumps(history)):
        record = {"instruction": "comes next", "output": "it saw many", "history": given}
        assert learns(record) == ["says what<|im_end|>", "it saw many<|im_end|>"]
    assert learns(record | {"history": []}) == learns(record | {"history": ""}) == ["it saw many<|im_end|>"]
    with pytest.raises(ConfigError, match=r"^here: 'history' is not a list of \[question, answer\] pairs"):
        learns(record | {"history": ["a line"]})


def test_turns_that_are_not_to_be_trained_on_are_not_in_each_form(learns):
    """axolotl#1703 (2024): a turn's own switch was ignored in one of the forms."""
    for mark in ({"weight": 0}, {"loss_weight": 0}, {"loss_weight": 0.0}, {"train": False}, {"loss": False}):
        talk = [("human", "a line", {}), ("gpt", "says what", mark), ("human", "comes next", {}), ("gpt", "it saw many", {})]
        for record in (
            {"messages": [USER, {**ANSWER, **mark}, MORE, LAST]},
            {"prompt": [USER], "completion": [{**ANSWER, **mark}, MORE, LAST]},
            {"conversations": [{"from": who, "value": value, **marks} for who, value, marks in talk]},
        ):
            assert learns(record) == ["it saw many<|im_end|>"]
    assert len(learns([USER, {**ANSWER, "train": True, "loss": 0.7, "loss_weight": 1, "weight": True}])) == 1
    for key in ("weight", "loss_weight"):
        with pytest.raises(ConfigError, match=r"^here: weight of message 2 is 0\.5, not 0 or 1"):
            learns([USER, {**ANSWER, key: 0.5}])


def test_parts_of_a_message_are_read_as_its_text_or_refused(learns):
    """What is no text was left out elsewhere (a common report)."""
    parts = [{"type": "text", "text": "says "}, {"text": "what"}]
    assert learns([USER, {**ANSWER, "content": parts}]) == ["says what<|im_end|>"]
    for other in ({"type": "image"}, {"type": "tool_result", "text": "what"}, {"type": "text", "value": "what"}, "what"):
        with pytest.raises(ConfigError, match=r"^here: content of message 2 is a list, expected text or parts of type"):
            learns([USER, {**ANSWER, "content": [*parts, other]}])


@pytest.fixture(params=["lines", "table", "datasets"])
def prepared(request, tiny_model, tmp_path, monkeypatch):
    """A function of rows and options, in each kind of file: the line about them."""

    def about(rows, **options):
        monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(store, "BATCH", 200)
        (tmp_path / "data").mkdir(exist_ok=True)
        if request.param == "table":
            columns = {key: None for row in rows for key in row}
            pq.write_table(pa.Table.from_pylist([columns | row for row in rows]), path := tmp_path / "data/train.parquet")
        else:
            path = write_lines(tmp_path / "data/train.jsonl", rows)
        source = {"dataset_name": (str(path.parent),)} if request.param == "datasets" else {"train_file": (str(path),)}
        config = ChatConfig(**source, seq_length=96, preprocessing_num_workers=1, **options)
        return chat.describe(chat.open_samples(config, AutoTokenizer.from_pretrained(tiny_model))[0], config)

    return about


def test_columns_and_keys_that_nobody_reads_are_said(prepared, capsys):
    """trl#6361 (2026), for whole columns. One that is empty everywhere is none."""
    rows = [{"id": n, "tags": [], "messages": [USER, ANSWER], "images": None, "source": "a" * n} for n in (0, 1)]
    assert prepared(rows * 2).endswith("; not used: id, source")
    rows[1] |= {"id": None, "messages": [USER, {**ANSWER, "at": "noon", "thinking": None}]}
    rows[0] |= {"id": None, "source": None}
    assert prepared(rows * 3).endswith("; not used: at (of messages), source")
    assert ", from 1 of 4 records" in (line := prepared([{"messages": [USER, ANSWER]}] * 4)) and "not used" not in line
    assert prepared([{"prompt": "a", "completion": "b", "tools": "[1]"}] * 3).endswith("; not used: tools")
    (line,) = said(capsys)
    assert line.startswith("warning: 3 texts with a prompt are joined as they are, although the model has a chat template")


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"label": False}, r"data with labels, for text_classification\.py \(columns: label\);"),
        ({"label": 0, "score": 0.5}, r"data with labels, .* and data with scores or ranks \(columns: label, score\);"),
        ({"images": ["1.png"]}, r"data with images, which are learned if one of the first 100 .*\(columns: images\);"),
        ({"chosen": "a"}, r"preference data, for templates/dpo\.py \(columns: chosen\);"),
        ({"chosen": "a", "rejected": "b"}, r"preference data, for templates/dpo\.py \(columns: chosen, rejected\);"),
    ],
)
def test_columns_that_change_what_an_answer_means_are_refused_or_allowed_by_name(prepared, columns, what):
    """Answers that people have marked as bad were learned as good ones (a common report)."""
    rows = [{"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER], **columns}] * 3
    names = tuple(columns)
    refusal = rf"(row [12]|:2): this is {what}.*add --allow_unused_columns {' '.join(names)}( \(\d more: .*\))?$"
    for _ in range(2):  # the second time, allowed data have been prepared
        with pytest.raises(ConfigError, match=refusal):
            prepared(rows)
        assert prepared(rows, allow_unused_columns=names).endswith(f"; not used: {', '.join(sorted(names))}")


def test_data_of_other_kinds_are_named():
    """They are no chats with something missing."""
    for record, said in (
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, r"this is preference .*dpo\.py \(columns: chosen, rejected\)$"),
        ({"sentence": "a", "label": "b"}, r"this is data with labels, for text_classification\.py \(columns: label\)$"),
        ({"prompt": "a", "kto_tag": True}, r"this is data with labels, .*\(columns: kto_tag\)$"),
        ({"image": "a.png", "label": 1}, "this is data with images, .* for image_classification.py and data with labels, "),
        ({"images": ["a.png"], "question": "b"}, r"this is data with images, .*\(columns: images\)$"),
        ({"question": "b"}, "columns question are of no known form"),
        ({"message": []}, "columns message are of no known form .*chat messages: messages;"),
    ):
        with pytest.raises(ConfigError, match=f"^here: {said}"):
            recognise(record, "here")


def test_marks_of_images_are_said_once_with_their_first_place(prepared, capsys):
    """Data for models that see, without their images, taught the words of the marks (a common report)."""
    seen = {"role": "user", "content": "<image>\na line, <image>"}
    prepared([{"messages": [seen if number in (2, 5) else USER, ANSWER]} for number in range(7)])
    (line,) = said(capsys)
    assert line.startswith("warning: 2 records mark a place for what is not text") and line.endswith(": <image>")
    assert "row 2: " in line or "row 3: " in line or ":3: " in line


@pytest.mark.parametrize(
    "template", [ENDLESS, "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"]
)
def test_an_end_is_learned_if_all_tokens_are(learns, template):
    """alpaca_lora_4bit#35 (2023): no end of text was learned, so the model never stopped."""
    (text,) = learns([USER, ANSWER], template, loss_on="all")
    assert text.rstrip().endswith("<|endoftext|>")
    assert learns([USER, ANSWER], loss_on="all")[0].count("<|endoftext|>") == 0


def test_a_completion_that_ends_in_a_special_token_that_is_no_end_gets_one(learns):
    """alpaca_lora_4bit#35 (2023), where the last word is a special token."""
    for last, end in (("<|pause|>", "<|endoftext|>"), ("<|im_end|>", ""), ("<|endoftext|>", "")):
        assert learns({"prompt": "a line", "completion": " says" + last}) == [" says" + last + end]
        assert learns.noted("special") == [f"here: {last!r}"]
    assert learns([{**USER, "content": "a <|pause|>"}, ANSWER]) == ["says what<|im_end|>"]
    assert learns.noted("special") == ["here, message 1: '<|pause|>'"]


@pytest.mark.parametrize("loss_on", ["assistant", "completion"])
def test_a_marked_turn_that_ends_in_an_emoji_is_learned_whole(learns, loss_on):
    """transformers' mask begins and ends at the first token of a character, and an emoji has several."""
    template = headed(marked("{{ m['content'] }}") + "{{ '<|im_end|>' }}")
    answers = [{"role": "assistant", "content": text} for text in ("\U0001f642 says \U0001f642", "\U0001f643")]
    runs = learns([USER, answers[0], MORE, answers[1]], template, loss_on)
    assert runs == ["\U0001f642 says \U0001f642<|im_end|>", "\U0001f643<|im_end|>"][-2 if loss_on == "assistant" else -1 :]
    assert learns.noted("lost") == []


TOUCHING = "{% for m in messages %}" + marked("{{ m.content + '<|im_end|>' }}", "m.role != 'user'") + "{% endfor %}"
JOINED = (  # answers without a turn between them share one header and one end, as in Gemma 4's template
    "{% for m in messages %}{% if loop.first or loop.previtem.role != m.role %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% endif %}{{ m.content }}{% if loop.last or loop.nextitem.role != m.role %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt and messages[-1].role != 'assistant' }}"
)


def test_a_turn_of_weight_0_that_touches_another_is_left_out(learns):
    """Two answers without a turn between them were taken for one, and both were learned."""
    end = LAST["content"] + "<|im_end|>"
    assert learns([USER, ANSWER, LAST], TOUCHING) == [ANSWER["content"] + "<|im_end|>" + end]
    assert learns([USER, ANSWER, {**LAST, "weight": 0}], TOUCHING) == [ANSWER["content"] + "<|im_end|>"]
    for template in (TOUCHING, JOINED):
        assert learns([USER, {**ANSWER, "weight": 0}, LAST], template) == [end]


WITHIN = (  # what a tool answers, and then the text of the call, stand in the turn of the call, as in Gemma 4's template
    "{{ tools | tojson if tools }}{% for m in messages %}{% set after = loop.nextitem or {} %}{% if m.role != 'tool' %}"
    "{{ '<|im_start|>' + m.role + '\n' if loop.first or loop.previtem.role != 'tool' }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + (c.function.arguments | tojson) + '<|pause|>' }}{% endfor %}"
    "{{ '<answer>' + after.content + '</answer>' if after.role == 'tool' }}{{ m.content }}"
    "{{ '<|im_end|>\n' if m.content or after.role != 'tool' }}{% endif %}{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt and messages[-1].role != 'tool' }}"
)


@pytest.mark.parametrize("content", ["", "says what"])
def test_what_a_tool_answers_within_a_turn_is_not_learned(learns, content):
    """Found here in 2026, with Gemma 4's template: if the call had a text, the tool's answer was learned in silence."""
    call = {**CALL, "content": content}
    messages = [USER, call, {"role": "tool", "content": "sunny"}, {**call, "tool_calls": call["tool_calls"] * 2}]
    messages += [{"role": "tool", "content": "it rains"}, LAST]
    text = f"{content}<|im_end|>\n" * bool(content)
    called = 'look{"city": "Rome"}<|pause|>'
    assert learns(messages, WITHIN) == [called, text + called * 2, text + "it saw many<|im_end|>"]


THINKING = ENDLESS.replace("{{ m['content']", "{{ '<think>' if loop.last and m.role == 'assistant' }}{{ m['content']")
PLAIN = (
    "{% for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)
TIGHT = PLAIN.replace("+ '\n\n' }}", "}}").replace("### ", "\n\n### ")


def test_an_answer_with_the_text_of_the_next_turn_in_it_is_refused(learns):
    """Where the template has no tokens of its own, nobody can tell which of two places ends such an answer."""
    says = {"role": "assistant", "content": "says\n\n### user:\ncomes next\n\n### assistant:\nwhat"}
    for messages, template in (([USER, says, MORE, LAST], PLAIN), ([CALL, {"role": "tool", "content": "it"}, LAST], CALLS)):
        with pytest.raises(ConfigError, match=r"^here: what the assistant says cannot be found"):
            learns(messages, template)  # the header of an answer cannot be told from the name that is called
    assert learns([USER, says, USER, LAST], PLAIN)[1] == "it saw many<|endoftext|>"


@pytest.mark.parametrize(
    ("template", "end", "thought"),
    [(ENDLESS, "<|im_start|>", ""), (THINKING, "<|im_start|>", "<think>"), (PLAIN, "\n\n#", ""), (TIGHT, "\n\n#", "")],
    ids=["GLM", "GLM with thoughts", "SOLAR", "nothing at the end"],
)
def test_each_turn_learns_to_end_if_the_template_has_no_end_token(learns, template, end, thought):
    """GLM-4.5's, SOLAR's and ChatQA's templates: the next turn's header ends a turn, and only the last learned an end."""
    runs = [f"says what{end}", f"it saw many{end}", f"{thought}says what<|endoftext|>"]
    assert learns([USER, ANSWER, USER, LAST, USER, ANSWER], template) == runs
    observed = {"role": "tool", "content": "a line"}
    assert learns([USER, ANSWER, observed], ENDLESS) == ["says what<|im_start|>"]
