"""Flags of prompts. Stays clear of torch, so that --help and a mistyped flag answer at once."""

from dataclasses import dataclass

from shared.config.types import Count
from shared.text.options import Length, RecordsConfig


@dataclass(frozen=True)
class PromptConfig(RecordsConfig):
    """Prompts, and what their answers are checked with."""

    # Column of the prompt, a text or messages; if not given, prompt, messages, question or problem
    prompt_column: str | None = None
    system_prompt: str | None = None  # System message before each prompt; needs a chat template
    seq_length: Length = 512  # Tokens of a prompt, at most; longer ones are left out and counted
    # Answers in a conversation, at most: `turn` in the template writes what follows one. All of it
    # has to fit --max_new_tokens
    max_turns: Count = 1
