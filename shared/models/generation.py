"""Text that a model in training writes."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast, extract_model_from_parallel
from torch import nn
from transformers import GenerationConfig

from shared.models.checks import context_of
from shared.models.loading import without_adapters
from shared.process.printing import indented, note, print_main


def end_generation_at(model: Any, end: int | None) -> None:
    """Let `generate` end at the token `end`, too: what ends a turn need not be what ends a base
    model's text.
    """
    settings = model.generation_config
    before = settings.eos_token_id
    ends = [] if before is None else [before] if isinstance(before, int) else list(before)
    if end is None or end in ends:
        return
    try:
        settings.validate(strict=True)
    except ValueError:  # transformers saves settings that contradict each other only as they were
        note(
            "warning: the model's generation settings cannot be changed: they do not end a text "
            f"at token {end}"
        )
        return
    settings.eos_token_id = [*ends, end] if ends else end
    note(
        f"generation ends at the token {end}, too, which ends the turns (the model's settings "
        f"named {before})"
    )


def first_lines(text: str, most: int = 8) -> str:
    """The first lines of a text, for a log: a model that has not learned yet repeats itself."""
    lines = text.splitlines()
    return (
        text
        if len(lines) <= most
        else "\n".join([*lines[:most], f"... and {len(lines) - most} more lines"])
    )


@contextlib.contextmanager
def _through(model: nn.Module, whole: nn.Module) -> Iterator[None]:
    """Let `generate` of `whole` compute with the prepared `model`, its wrapper, and choose by one
    rank's logits on all.

    Kernels that differ in the last bit would have ranks end at different lengths.
    """

    def call(*args: Any, **named: Any) -> Any:
        whole._compiled_call_impl = None
        try:
            outputs = model(*args, **named)
        finally:
            whole._compiled_call_impl = call
        outputs.logits = broadcast(outputs.logits[:, -1:].contiguous())
        return outputs

    whole._compiled_call_impl = call  # in place of the module's hooks and forward
    try:
        yield
    finally:
        whole._compiled_call_impl = None


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
    """Continue each prompt (token ids) up to the end-of-text token or the token `end`, greedily or
    by sampling.

    A prompt's last tokens count if not all fit into the model's context beside the new ones. Runs
    `generate`, with its cache, on the prepared model under every strategy. Every rank calls this
    with the same prompts.
    """
    training = model.training
    whole = without_adapters(extract_model_from_parallel(model))
    model.eval()
    device = PartialState().device  # offloaded weights are elsewhere
    context = context_of(whole) or sys.maxsize
    ends = [token for token in (tokenizer.eos_token_id, end) if token is not None]
    given: Any = {
        "max_new_tokens": min(max_new_tokens, context - 1),
        "do_sample": sample,
        "eos_token_id": ends or None,
    }
    settings = GenerationConfig(**given, pad_token_id=0, top_k=0)
    before = whole.generation_config
    texts = []
    whole.generation_config = GenerationConfig()  # which would fill in what `settings` leaves open
    forked = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with forked, torch.compiler.set_stance("force_eager"), _through(model, whole):
        torch.manual_seed(seed)
        for prompt in prompts:
            ids = torch.tensor([prompt[-max(1, context - max_new_tokens) :]], device=device)
            mask = torch.ones_like(ids)
            found = whole.generate(
                ids, attention_mask=mask, generation_config=settings, synced_gpus=False
            )
            texts.append(
                tokenizer.decode(found[0, ids.shape[1] :].tolist(), skip_special_tokens=True)
            )
    whole.generation_config = before
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
    """Let the model answer prompts, and print its answers beside the references. Every rank calls
    this.

    Args:
        prompts: (ids to give the model, ids of a reference).
        step: optimizer steps that the model has learned.
        max_new_tokens, end: see `continuations`.

    Returns:
        Rows of a table: step, prompt, reference, answer.
    """
    outputs = continuations(
        model, tokenizer, [ids for ids, _ in prompts], max_new_tokens=max_new_tokens, end=end
    )
    rows = []
    for (ids, expected), output in zip(prompts, outputs, strict=True):
        prompt = tokenizer.decode(ids)
        reference = tokenizer.decode(expected, skip_special_tokens=True).strip()
        rows.append([str(step), prompt, reference, output])
        parts = {
            "prompt": prompt,
            "reference": reference,
            f"model at step {step}": first_lines(output),
        }
        print_main(
            *(line for title, text in parts.items() for line in (f"--- {title}", *indented(text))),
            "---",
        )
    return rows
