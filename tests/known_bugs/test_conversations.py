"""What the data say is learned, and where an answer ends, too: or the run says what is not."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from shared.process.errors import ConfigError
from shared.text import chat
from shared.text.encoder import Encoder
from shared.text.forms import read_example, recognise
from shared.text.options import ChatConfig

USER, ANSWER = {"role": "user", "content": "a line"}, {"role": "assistant", "content": "says what"}
MORE, LAST = {"role": "user", "content": "comes next"}, {"role": "assistant", "content": "it saw many"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": '{"city": "Rome"}'}}]}
HEADED = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}BODY{% endfor %}"
HEADED += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = HEADED.replace("BODY", "{{ m['content'] + '<|im_end|>\n' }}")
ENDLESS = CHATML.replace("<|im_end|>\n", "")  # the header of the next turn ends a turn, as in GLM-4.5's template


@pytest.fixture
def learns(tiny_model):
    """A function of a record and a template: the text of each run of learned tokens. `.encoder` is the last encoder."""

    def learned_runs(record, template=CHATML, loss_on="assistant"):
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|pause|>"]})
        tokenizer.chat_template = template
        learned_runs.encoder = Encoder(tokenizer, loss_on)
        ids, mask = learned_runs.encoder(read_example(record, recognise(record, "here"), "here"), "here")
        runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1)
        return [tokenizer.decode([ids[i] for i in run]) for run in runs if mask[run[0]]]

    return learned_runs


def test_a_call_that_the_template_does_not_write_is_no_empty_answer(learns):
    """slime#330 (2025): a template without tools wrote a call as an empty answer, and that was learned."""
    with pytest.raises(ConfigError, match=r"^here: .*nothing of what the assistant says in message 2.*empty answer"):
        learns({"messages": [USER, CALL, MORE, LAST]})
    with pytest.raises(ConfigError, match="empty answer"):
        learns({"messages": [USER, CALL, MORE, LAST]}, loss_on="all")
    assert learns({"messages": [USER, {**CALL, "weight": 0}, MORE, LAST]}) == ["it saw many<|im_end|>"]


STRIPPED = CHATML.replace("m['content'] +", "m['content'].split('</think>')[-1] +")  # as DeepSeek-R1's template does


@pytest.mark.parametrize(
    ("template", "answer", "lost"),
    [
        (CHATML, {**ANSWER, "reasoning_content": "since a line"}, "since a line"),
        (CHATML, {**ANSWER, "tool_calls": CALL["tool_calls"]}, "look"),
        (STRIPPED, {**ANSWER, "content": "<think>since</think>says what"}, "<think>since</think>says what"),
    ],
    ids=["reasoning", "call", "thoughts in the answer"],
)
def test_words_that_the_template_does_not_write_are_counted(learns, template, answer, lost):
    """trl#6361 (2026): a template dropped the reasoning, and the rest was learned in silence."""
    assert learns({"messages": [USER, answer]}, template) == ["says what<|im_end|>"]
    assert learns.encoder.lost == [f"here, message 2: {lost!r}"]
    written = {**ANSWER, "content": 'says\n "what"', "tool_calls": [{"function": {"name": "a", "arguments": {"b": '"\n'}}}]}
    body = "{{ m['content'] | tojson }}{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}<|im_end|>"
    learns({"messages": [USER, written]}, HEADED.replace("BODY", body))
    assert learns.encoder.lost == []


def test_lost_words_are_said_once_with_their_number_and_first_place(tiny_model, tmp_path, monkeypatch, capsys):
    """trl#6361 (2026), as above, in a whole file: several chunks, by several processes."""
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path))
    monkeypatch.setattr(chat, "CHUNK_RECORDS", 2)
    rows = [{"messages": [USER, {**ANSWER, "thinking": "since"} if number in (3, 4, 7) else ANSWER]} for number in range(9)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = ChatConfig(train_file=(str(tmp_path / "data.jsonl"),), seq_length=96, preprocessing_num_workers=2)
    chat.prepare(config, AutoTokenizer.from_pretrained(tiny_model))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ") and "3 turns" in line and "data.jsonl:4, message 2: 'since'" in line


def test_the_history_of_alpaca_records_is_read_as_earlier_turns(learns):
    """trl#6361 (2026), for `history`, which was not read at all."""
    history = [["a line", "says what"]]
    for given in (history, json.dumps(history)):
        record = {"instruction": "comes next", "output": "it saw many", "history": given}
        assert learns(record) == ["says what<|im_end|>", "it saw many<|im_end|>"]
    assert learns(record | {"history": []}) == learns(record | {"history": ""}) == ["it saw many<|im_end|>"]
    with pytest.raises(ConfigError, match=r"^here: 'history' is a list, not \[question, answer\] pairs"):
        learns(record | {"history": ["a line"]})


def test_turns_that_are_not_to_be_trained_on_are_not_in_each_form(learns):
    """axolotl#1703 (2024): a turn's own switch was ignored in one of the forms."""
    for mark in ({"weight": 0}, {"train": False}, {"loss": False}):
        talk = [("human", "a line", {}), ("gpt", "says what", mark), ("human", "comes next", {}), ("gpt", "it saw many", {})]
        for record in (
            {"messages": [USER, {**ANSWER, **mark}, MORE, LAST]},
            {"prompt": [USER], "completion": [{**ANSWER, **mark}, MORE, LAST]},
            {"conversations": [{"from": who, "value": value, **marks} for who, value, marks in talk]},
        ):
            assert learns(record) == ["it saw many<|im_end|>"]
    assert len(learns({"messages": [USER, {**ANSWER, "train": True, "loss": 0.7}]})) == 1


@pytest.mark.parametrize(
    "template", [ENDLESS, "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"]
)
def test_an_end_is_learned_if_all_tokens_are(learns, template):
    """alpaca_lora_4bit#35 (2023): no end of text was learned, so the model never stopped."""
    (text,) = learns({"messages": [USER, ANSWER]}, template, loss_on="all")
    assert text.rstrip().endswith("<|endoftext|>")
    assert learns({"messages": [USER, ANSWER]}, loss_on="all")[0].count("<|endoftext|>") == 0


def test_a_completion_that_ends_in_a_special_token_that_is_no_end_gets_one(learns):
    """alpaca_lora_4bit#35 (2023), where the last word is a special token."""
    for last, end in (("<|pause|>", "<|endoftext|>"), ("<|im_end|>", ""), ("<|endoftext|>", "")):
        assert learns({"prompt": "a line", "completion": " says" + last}) == [" says" + last + end]


@pytest.mark.parametrize("loss_on", ["assistant", "completion"])
def test_a_marked_turn_that_ends_in_an_emoji_is_learned_whole(learns, loss_on):
    """transformers' mask begins and ends at the first token of a character, and an emoji has several."""
    marked = "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}"
    template = HEADED.replace("BODY", marked + "{{ m['content'] }}{% endif %}{{ '<|im_end|>' }}")
    answers = [{"role": "assistant", "content": text} for text in ("\U0001f642 says \U0001f642", "\U0001f643")]
    runs = learns({"messages": [USER, answers[0], MORE, answers[1]]}, template, loss_on)
    assert runs == ["\U0001f642 says \U0001f642<|im_end|>", "\U0001f643<|im_end|>"][-2 if loss_on == "assistant" else -1 :]
    assert learns.encoder.lost == []


def test_turns_outside_of_the_marks_of_a_template_are_counted(learns):
    """A template marked the last answer only, and the others were not learned, in silence."""
    marked = "{% if loop.last %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    template = HEADED.replace("BODY", marked + "{{ m['content'] + '<|im_end|>' }}{% endif %}")
    assert learns({"messages": [USER, ANSWER, MORE, LAST]}, template) == ["it saw many<|im_end|>"]
    assert learns.encoder.lost == ["here, message 2: 'says what'"]
    assert learns({"messages": [USER, CALL, MORE, LAST]}, template) == ["it saw many<|im_end|>"]
    assert learns.encoder.lost == ["here, message 2: 'look'"]


THINKING = ENDLESS.replace("{{ m['content']", "{{ '<think>' if loop.last and m.role == 'assistant' }}{{ m['content']")
PLAIN = (
    "{% for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "runs"),
    [
        (ENDLESS, ["says what<|im_start|>", "it saw many<|endoftext|>"]),
        (THINKING, ["says what<|im_start|>", "<think>it saw many<|endoftext|>"]),
        (PLAIN, ["says what\n\n#", "it saw many<|endoftext|>"]),
    ],
    ids=["GLM", "GLM with thoughts", "SOLAR"],
)
def test_each_turn_learns_to_end_if_the_template_has_no_end_token(learns, template, runs):
    """GLM-4.5's, SOLAR's and ChatQA's templates: the next turn's header ends a turn, and only the last learned an end."""
    assert learns({"messages": [USER, ANSWER, MORE, LAST]}, template) == runs
    observed = {"role": "tool", "content": "a line"}
    assert learns({"messages": [USER, ANSWER, observed]}, ENDLESS) == ["says what<|im_start|>"]
