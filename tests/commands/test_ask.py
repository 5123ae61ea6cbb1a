"""`python -m shared ask`: the prompts that training gave the model."""

import shutil
import sys

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GenerationMixin

from shared.commands import ask
from shared.data.notes import Notes
from shared.process.errors import ConfigError
from shared.text.encoder import Encoder
from shared.text.forms import Example

TEMPLATE = """{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}{{ strftime_now("%Y") }}
{%- if add_generation_prompt %}<assistant>{% if not thinks %}<think></think>{% endif %}{% endif %}"""


@pytest.fixture
def asked(tiny_model, tmp_path, monkeypatch):
    """(tokenizer, what gives the prompt of a question): texts end by themselves, the template has parts and a variable."""
    shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    start = ("<s>", tokenizer.bos_token_id)
    both = TemplateProcessing(single=f"<s> $A {end[0]}", special_tokens=[start, end])
    tokenizer.backend_tokenizer.post_processor = both
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    prompts = []

    def generate(model, **inputs):
        assert inputs["attention_mask"].all()
        prompts.append(inputs["input_ids"][0].tolist())
        return torch.cat([inputs["input_ids"], torch.tensor([[5]])], 1)

    monkeypatch.setattr(GenerationMixin, "generate", generate)

    def ask_for(*flags):
        monkeypatch.setattr(sys, "argv", ["ask", str(tmp_path / "model"), *flags])
        ask.main()
        return prompts.pop()

    return tokenizer, ask_for


def test_prompts_are_those_of_training(asked):
    tokenizer, ask_for = asked
    plain = tokenizer("a line", add_special_tokens=False)["input_ids"]
    assert ask_for("a line", "--plain") == [tokenizer.bos_token_id, *plain]
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a line"}]
    for flags, options in (((), {}), (("--chat_template_kwargs", '{"thinks": true}'), {"thinks": True})):
        prompt = ask_for("a line", "--system", "Be brief.", *flags)
        asked_in_training = Example(turns, template_options=options)
        assert prompt == Encoder(tokenizer, "assistant").prompt(asked_in_training, "here", Notes())
        end = "" if options else "<think></think>"
        assert tokenizer.decode(prompt) == f"<system>Be brief.<user>a line2024<assistant>{end}"


def test_flags_that_would_be_ignored_are_refused(asked):
    given = "--chat_template_kwargs"
    for flags in (("--plain", "--system", "x"), ("--plain", given, '{"thinks": true}'), (given, "[1]"), (given, "{")):
        with pytest.raises(SystemExit) as ended:
            asked[1]("a line", *flags)
        assert ended.value.code == 2


def test_a_question_has_to_fit_into_the_context(asked):
    with pytest.raises(ConfigError, match=r"a question of 3\d\d tokens is longer than the model's context"):
        asked[1]("x" * 300, "--plain")
