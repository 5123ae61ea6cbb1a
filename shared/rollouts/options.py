"""Flags of prompts. Stays clear of torch, so that --help and a mistyped flag answer at once."""

from dataclasses import dataclass

from shared.process.errors import ConfigError
from shared.text.options import Length, RecordsConfig


@dataclass(frozen=True)
class PromptConfig(RecordsConfig):
    """Prompts, and what their answers are checked with."""

    # Column of the prompt, a text or a list of messages; all others reach the reward function. If
    # not given, prompt, messages, question or problem
    prompt_column: str | None = None
    # Message that comes before a prompt; needs a chat template
    system_prompt: str | None = None
    # Tokens of a prompt at most; longer ones are left out, and counted
    seq_length: Length = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mix_weights:
            raise ConfigError(
                "--mix_weights does not work with prompts: put them into one data set"
            )
