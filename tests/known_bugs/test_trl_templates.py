"""The chat templates that TRL ships: what is learned with the models' own is what TRL's variants for training mark.

A variant marks answers with `{% generation %}`, and mostly writes the same text. Where it does, the learned tokens have to
be the same: the encoder finds answers in the one, and reads marks in the other. TRL is a requirement of this test alone.
"""

import contextlib
import importlib.util
import itertools
import re
from collections import Counter
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from shared.process.errors import ConfigError
from tests.chats import ANSWER, LAST, MORE, TURNS, USER, Learns

LOOK = {"name": "look", "arguments": {"city": "Rome"}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "call12345", "function": LOOK}]}
AS_TEXT = {**CALL, "tool_calls": [{**CALL["tool_calls"][0], "function": {**LOOK, "arguments": '{"city": "Rome"}'}}]}
RESULT = {"role": "tool", "content": "it saw", "name": "look", "tool_call_id": "call12345"}
TOOL = {"name": "look", "description": "sees", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": TOOL}]
RECORDS = {
    "one answer": {"messages": [USER, ANSWER]},
    "two answers": {"messages": [USER, ANSWER, MORE, LAST]},
    "system": {"messages": TURNS[:3]},
    "reasoning": {"messages": [USER, {**ANSWER, "reasoning_content": "since a line"}]},
    "a call": {"messages": [USER, CALL, RESULT, LAST], "tools": TOOLS},
    "null content": {"messages": [USER, {**CALL, "content": None}, RESULT, LAST], "tools": TOOLS},
    "arguments as text": {"messages": [USER, AS_TEXT, RESULT, LAST], "tools": TOOLS},
}
pytestmark = pytest.mark.slow
SPEC = importlib.util.find_spec("trl")
FOLDER = Path(SPEC.submodule_search_locations[0]) / "chat_templates" if SPEC else Path("missing")
PAIRS = sorted(path.stem for path in FOLDER.glob("*.jinja") if path.with_stem(f"{path.stem}_training").exists())
# A tool's response stands within the turn of the call, and what follows it is taken for the header of an answer.
WITHIN_A_TURN = ("diffusion_gemma",)


def encoded(folder, name, record):
    """(what a template writes, the learned parts of it, a prompt), without end tokens; or a refusal's line and nothing."""
    template, learns = (FOLDER / f"{name}.jinja").read_text(), Learns(folder)
    controls = re.findall(r"<[|\uff5c/]?[\w\u2581:]+[|\uff5c]?>|<\|\w+\|>", template)
    learns.tokenizer.add_special_tokens({"additional_special_tokens": sorted({*controls})})
    try:
        parts = learns(record, template)
    except ConfigError as error:
        return str(error), None, ""
    whole, *parts = (re.sub(r"(\s|<[^<>\s]*>)*$", "", part) for part in (learns.text, *parts))
    prompt = []
    for content in (USER["content"], [{"type": "text", "text": USER["content"]}]):
        with contextlib.suppress(UndefinedError, TypeError):
            messages = [{"role": "user", "content": content}]
            prompt.append(learns.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    return whole, parts, prompt[0]


def test_a_template_learns_what_its_variant_for_training_marks(tiny_model):
    compared, different = Counter(), []
    for name, (kind, record) in itertools.product(PAIRS, RECORDS.items()):
        written, own, prompt = encoded(tiny_model, name, record)
        marked, expected, _ = encoded(tiny_model, name + "_training", record)
        if own is None or expected is None:
            assert "here: " in written
            assert (own is None) == (expected is None) or kind in ("null content", "a call"), (name, kind, written, marked)
        elif written == marked:
            compared[kind] += 1
            heads = [part.removesuffix(text) for part, text in zip(expected, own, strict=False)]
            if len(own) == len(expected) and all(head in prompt for head in heads):  # some mark the header of a turn, too
                expected = own
            if own != expected and not (name in WITHIN_A_TURN and "tools" in record):
                different.append((name, kind, own, expected))
    assert not different
    assert min(compared.values()) > 5 and compared["one answer"] > 25
