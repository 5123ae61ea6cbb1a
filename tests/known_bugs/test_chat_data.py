"""Every word of an answer is learned, and where it ends."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from shared.process.errors import ConfigError
from shared.text import chat
from shared.text.encoder import Encoder
from shared.text.forms import Example, read_example
from shared.text.options import ChatConfig

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
)
MARKED += "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
NO_END = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] }}{% endfor %}"
NO_END += "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
HEADERS = "{% for m in messages %}{{ '# ' + m['role'] + ' ' + m['content'] + '\n' }}{% endfor %}"
HEADERS += "{% if add_generation_prompt %}{{ '# assistant' }}{% endif %}"
TURNS = [
    {"role": "user", "content": "a line"},
    {"role": "assistant", "content": "says what"},
    {"role": "user", "content": "comes next"},
    {"role": "assistant", "content": "since it saw many"},
]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {"at": "text"}}}]}


@pytest.fixture
def tokenizer(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<image>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


def learned(tokenizer, example, loss_on="assistant") -> list[str]:
    """The text of each run of tokens that the loss counts."""
    ids, mask = Encoder(tokenizer, loss_on)(example, "here")
    runs = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1)
    return [tokenizer.decode([ids[i] for i in run]).strip() for run in runs if mask[run[0]]]


@pytest.mark.parametrize(
    ("answer", "lost"),
    [
        ({"content": "says what", "reasoning_content": "it saw many"}, "reasoning_content"),
        ({"content": "says what", "tool_calls": CALL["tool_calls"]}, "tool_calls"),
        ({"content": "<think>\nit saw many</think>says what"}, "content"),
    ],
)
def test_words_that_a_template_leaves_out_are_said(tokenizer, tmp_path, monkeypatch, capsys, answer, lost):
    """slime#330 (2025), trl#6361 (2026): reasoning and calls vanished in the template, and the rest was learned unsaid."""
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path / "cache"))
    tokenizer.chat_template = CHATML.replace("(m['content'] or '')", "m['content'].split('</think>')[-1]")
    rows = [json.dumps({"messages": [TURNS[0], {"role": "assistant", **answer}]}) + "\n"] * 30
    (tmp_path / "chats.jsonl").write_text("".join(rows))
    chat.prepare(ChatConfig(train_file=(str(tmp_path / "chats.jsonl"),), preprocessing_num_workers=1), tokenizer)
    said = f"the chat template leaves out or changes {lost} of an answer (30 times, first in {tmp_path}/chats.jsonl:1)"
    assert said in capsys.readouterr().err


def test_an_answer_of_calls_alone_is_not_learned_as_an_empty_one(tokenizer):
    """trl#6361 (2026): a template without tools made an empty answer of a call."""
    with pytest.raises(ConfigError, match="leaves out tool_calls of an answer, and nothing is left to learn"):
        learned(tokenizer, Example([TURNS[0], CALL]))


def test_the_history_of_alpaca_is_earlier_turns():
    """A common report: `history` was dropped, and answers were learned without the questions they go back to."""
    record = {"instruction": "comes next", "output": "since it saw many", "history": [["a line", "says what"]]}
    assert read_example(record, "Alpaca instructions", "here").messages == TURNS


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss": False}])
def test_turns_that_are_marked_are_not_learned_in_any_form(tokenizer, mark):
    """axolotl#1703 (2024): the mark was heeded in one form of data and ignored in the others."""
    turns = [{"from": {"user": "human", "assistant": "gpt"}[turn["role"]], "value": turn["content"]} for turn in TURNS]
    turns[1] |= mark
    messages = [TURNS[0], TURNS[1] | mark, *TURNS[2:]]
    for record, form in (
        ({"conversations": turns}, "ShareGPT conversations"),
        ({"messages": messages}, "chat messages"),
        ({"prompt": messages[:1], "completion": messages[1:]}, "prompt and completion"),
    ):
        assert learned(tokenizer, read_example(record, form, "here")) == ["since it saw many<|im_end|>"]


def test_an_end_is_learned_with_every_loss_on(tokenizer):
    """alpaca_lora_4bit#35 (2023): no end was learned, and the model never stopped."""
    end = tokenizer.eos_token
    for template in (HEADERS, NO_END):
        tokenizer.chat_template = template
        for loss_on in ("assistant", "completion", "all"):
            last = learned(tokenizer, Example(TURNS), loss_on)[-1]
            assert "".join(last.split()).endswith(f"sinceitsawmany{end}"), (template, loss_on)
    tokenizer.chat_template = CHATML
    for completion, ends in (("what<image>", f"what<image>{end}"), ("what<|im_end|>", "what<|im_end|>")):
        assert learned(tokenizer, Example(prompt="says ", completion=completion)) == [ends]


def test_a_character_of_several_tokens_at_a_marks_end_is_learned_whole(tokenizer):
    """Only the first token of an emoji before `{% endgeneration %}` was in the mask."""
    tokenizer.chat_template = MARKED
    turns = [TURNS[0], {"role": "assistant", "content": "what 🦉"}]
    assert learned(tokenizer, Example(turns)) == ["what 🦉<|im_end|>"]


def test_turns_that_a_template_does_not_mark_are_said(tokenizer):
    """A template that writes calls outside of its marks left them out of the loss unsaid."""
    tokenizer.chat_template = MARKED.replace("'assistant' %}", "'assistant' and m.content != 'says what' %}")
    encoder = Encoder(tokenizer, "assistant")
    encoder(Example(TURNS), "here")
    assert encoder.notes == {"a turn of the assistant that the chat template does not mark is not learned": [1, "here"]}


@pytest.mark.parametrize(
    ("template", "middle"), [(NO_END, "says what<|im_start|>"), (HEADERS, "says what\n#"), (MARKED, "says what<|im_end|>")]
)
def test_middle_turns_learn_what_follows_them(tokenizer, template, middle):
    """In templates without an end of turn (GLM-4.5, SOLAR, Falcon) only the last answer learned to end."""
    tokenizer.chat_template = template
    assert learned(tokenizer, Example(TURNS))[0] == middle
