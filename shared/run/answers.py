"""What a model in training answers to some validation prompts."""

from typing import Any

from torch import nn

from shared.models.generation import answers
from shared.run.run import Run


def log_answers(
    run: Run, model: nn.Module, held_out: Any, tokenizer: Any, *, expected: str = "reference"
) -> None:
    """Print and log answers to --num_generations prompts, before training and at its end. Every
    rank calls this.

    Args:
        held_out: the validation samples, with `prompt` and `end`.
        expected: the column of the table that holds the answers of the data.
    """
    if not (run.state.step == 0 or run.is_last):
        return
    config = run.config
    prompts = [held_out.prompt(i) for i in range(min(config.num_generations, len(held_out)))]
    rows = answers(
        model,
        tokenizer,
        prompts,
        step=run.state.step,
        max_new_tokens=config.max_new_tokens,
        end=held_out.end,
    )
    run.logger.tracker.log_table("generations", ["step", "prompt", expected, "output"], rows)
