"""Text that a model in training writes."""

import sys
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast, extract_model_from_parallel
from torch import nn

from shared.models.attention import row_layout
from shared.models.checks import _context
from shared.process.printing import indented, print_main


def end_generation_at(model: Any, end: int | None) -> None:
    """Let `generate` end at the token `end`, too: what ends a turn need not be what ends a base model's text."""
    settings = model.generation_config
    before = settings.eos_token_id
    ends = [] if before is None else [before] if isinstance(before, int) else list(before)
    if end is None or end in ends:
        return
    try:
        settings.validate(strict=True)
    except ValueError:  # transformers saves settings that contradict each other only as they were
        print_main(f"warning: the model's generation settings cannot be changed: they do not end a text at token {end}")
        return
    settings.eos_token_id = [*ends, end] if ends else end
    print_main(f"generation ends at the token {end}, too, which ends the turns (the model's settings named {before})")


def first_lines(text: str, most: int = 8) -> str:
    """The first lines of a text, for a log: a model that has not learned yet repeats itself."""
    lines = text.splitlines()
    return text if len(lines) <= most else "\n".join([*lines[:most], f"... and {len(lines) - most} more lines"])


@torch.no_grad()
def continuations(
    model: nn.Module,
    tokenizer: Any,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    end: int | None = None,
    sample: bool = False,
    seed: int = 0,
) -> list[str]:
    """Continue each prompt (token ids) up to the end-of-text token or the token `end`, greedily or by sampling.

    Runs the prepared model's own forward, without a cache, so that it works under every strategy. Rows are padded at the
    end, since kernels are chosen anew for each length. Every rank calls this with the same prompts.
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    context = _context(extract_model_from_parallel(model)) or sys.maxsize
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(max_new_tokens):
            seen = ids[-context:]
            row = [*seen, *[0] * (min(-len(seen) % 64, context - len(seen)))]
            with torch.compiler.set_stance("force_eager"), row_layout():
                logits = model(input_ids=torch.tensor([row], device=device), use_cache=False).logits
            logits = logits[0, len(seen) - 1].float().cpu()
            choice = torch.multinomial(logits.softmax(-1), 1, generator=generator)[0] if sample else logits.argmax()
            # One rank's choice for all: kernels that differ in the last bit would have them end at different lengths.
            ids.append(int(broadcast(choice.to(PartialState().device))))
            if ids[-1] in (tokenizer.eos_token_id, end):
                break
        texts.append(tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True))
    model.train(training)
    return texts


def answers(
    model: nn.Module,
    tokenizer: Any,
    prompts: list[tuple[list[int], list[int]]],
    *,
    step: int,
    max_new_tokens: int,
    end: int | None,
) -> list[list[str]]:
    """Let the model answer prompts, and print its answers beside the references. Every rank calls this.

    Args:
        prompts: (ids to give the model, ids of a reference).
        step: optimizer steps that the model has learned.
        max_new_tokens, end: see `continuations`.

    Returns:
        Rows of a table: step, prompt, reference, answer.
    """
    outputs = continuations(model, tokenizer, [ids for ids, _ in prompts], max_new_tokens=max_new_tokens, end=end)
    rows = []
    for (ids, expected), output in zip(prompts, outputs, strict=True):
        prompt, reference = tokenizer.decode(ids), tokenizer.decode(expected, skip_special_tokens=True).strip()
        rows.append([str(step), prompt, reference, output])
        parts = {"prompt": prompt, "reference": reference, f"model at step {step}": first_lines(output)}
        print_main(*(line for title, text in parts.items() for line in (f"--- {title}", *indented(text))), "---")
    return rows
