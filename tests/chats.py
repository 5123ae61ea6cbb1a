"""Conversations, chat templates, and what of a conversation is learned."""

from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from shared.data.notes import Notes
from shared.text.encoder import Encoder
from shared.text.forms import Example, read_example, recognise

USER, ANSWER = {"role": "user", "content": "a line"}, {"role": "assistant", "content": "says what"}
MORE, LAST = {"role": "user", "content": "comes next"}, {"role": "assistant", "content": "it saw many"}
TURNS = [{"role": "system", "content": "the model reads"}, USER, ANSWER, MORE, LAST]
LEARNED = ["says what<|im_end|>", "it saw many<|im_end|>"]  # of TURNS


def headed(body: str, before: str = "") -> str:
    """A template that writes what it says of a message after the role."""
    turns = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}" + body + "{% endfor %}"
    return before + turns + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def marked(body: str, when: str = "m['role'] == 'assistant'") -> str:
    """A part of a template, marked as an answer where it is one."""
    return f"{{% if {when} %}}{{% generation %}}{body}{{% endgeneration %}}{{% else %}}{body}{{% endif %}}"


CHATML = headed("{{ m['content'] + '<|im_end|>\n' }}")
MARKED = headed(marked("{{ m['content'] + '<|im_end|>' }}") + "{{ '\n' }}")
ASKED = (  # the number of the last question
    "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.asked = loop.index0 %}"
    "{% endif %}{% endfor %}"
)


def chat_tokenizer(folder: Path, template: str | None = CHATML) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with the control tokens of the templates here."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    controls = ["<|im_start|>", "<|im_end|>", "<|pause|>", "<|return|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": controls})
    tokenizer.chat_template = template
    return tokenizer


def learned_runs(learned: np.ndarray) -> list[tuple[int, int]]:
    """The first token and the last + 1 of each run of learned ones."""
    bounds = np.flatnonzero(np.diff(learned, prepend=False, append=False))
    return [(int(start), int(stop)) for start, stop in zip(bounds[::2], bounds[1::2], strict=True)]


class Learns:
    """A function of a conversation and a template: what is learned, run by run.

    Attributes:
        ids: the tokens of the conversation.
        text: what they are read as.
        runs: the first and last + 1 of each run.
        notes: what is noted of it.
    """

    def __init__(self, folder: Path) -> None:
        self.tokenizer = chat_tokenizer(folder)

    def __call__(self, record: dict | list, template: str | None = CHATML, loss_on: str = "assistant") -> list[str]:
        self.tokenizer.chat_template = template
        self.notes = Notes()
        if isinstance(record, list):
            record = {"messages": record}
        example = record if isinstance(record, Example) else read_example(record, recognise(record, "here"), "here")
        self.ids, learned = Encoder(self.tokenizer, loss_on)(example, "here", self.notes)
        self.text = self.tokenizer.decode(self.ids)
        self.runs = learned_runs(learned)
        return [self.tokenizer.decode(self.ids[start:stop]) for start, stop in self.runs]

    def noted(self, what: str) -> list[str]:
        """The places of what was noted under a name."""
        return sorted(place for name, place in self.notes.seen if name == what)
