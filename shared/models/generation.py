"""Text that a model in training writes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from shared.models.angles import chosen_by_answer
from shared.models.blocks import as_in_an_evaluation
from shared.models.checks import context_of
from shared.models.loading import without_adapters
from shared.process.printing import note


def ends_of(model: Any, tokenizer: Any, end: int | None) -> list[int]:
    """The tokens that end an answer, in training and after it: those that the model's generation
    settings name, the tokenizer's, and what ends a turn.
    """
    named = without_adapters(model).generation_config.eos_token_id
    tokens = [*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id, end]
    return [token for token in dict.fromkeys(tokens) if token is not None]


def end_generation_at(model: Any, tokenizer: Any, end: int | None) -> None:
    """Let `generate` of the saved model end at all of `ends_of`: what ends a turn need not be what
    ends a base model's text.
    """
    settings = model.generation_config
    before = settings.eos_token_id
    ends = ends_of(model, tokenizer, end)
    if ends in ([], before, [before]):
        return
    try:
        settings.validate(strict=True)
    except ValueError:  # transformers saves settings that contradict each other only as they were
        note(
            "warning: the model's generation settings cannot be changed: they do not "
            f"end a text at the tokens {ends}"
        )
        return
    settings.eos_token_id = ends if len(ends) > 1 else ends[0]
    note(
        f"generation ends at the tokens {ends}, as in training (the model's settings "
        f"named {before})"
    )


# Relative, of logits behind padding, in fp32 and in 16 bits: rounding alone. More only costs time.
MAX_ERRORS = (0.002, 0.04)


@contextlib.contextmanager
def _through(model: nn.Module, whole: nn.Module) -> Iterator[None]:
    """Let `generate` of `whole` compute with the prepared `model`, its wrapper.

    Ranks of tensor parallelism choose by the logits of the first of them: kernels that differ in
    the last bit would have them answer with different tokens.
    """
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    groups = [mesh.get_group("tp") for mesh in meshes if "tp" in (mesh.mesh_dim_names or ())]

    def call(*args: Any, **named: Any) -> Any:
        whole._compiled_call_impl = None
        try:
            outputs = model(*args, **named)
        finally:
            whole._compiled_call_impl = call
        outputs.logits = outputs.logits[:, -1:].contiguous()
        if groups:
            dist.broadcast(outputs.logits, group=groups[0], group_src=0)
        return outputs

    whole._compiled_call_impl = call  # in place of the module's hooks and forward
    try:
        yield
    finally:
        whole._compiled_call_impl = None


class _Drawn(LogitsProcessor):  # type: ignore[misc]
    """Leaves of all tokens the one that a uniform number chooses, by the cumulated probabilities.

    Args:
        draws: [rows, new tokens], in [0, 1).
        start: where the new tokens begin.
    """

    def __init__(self, draws: np.ndarray, start: int) -> None:
        self.draws = torch.from_numpy(draws)
        self.start = start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1] - self.start
        draws = self.draws[:, place, None].to(scores.device)
        cumulated = scores.double().softmax(-1).cumsum(-1)
        # right: never a token of probability 0
        chosen = torch.searchsorted(cumulated, draws * cumulated[:, -1:], right=True)
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    ends: Sequence[int],
    draws: np.ndarray | None = None,
    beside: Callable[[torch.Tensor], dict[str, torch.Tensor]] | None = None,
    cache: Any = None,
) -> list[list[int]]:
    """Token ids that continue each prompt (token ids), greedily or by sampling: up to the first
    token of `ends`, with it, or `max_new_tokens`.

    Args:
        draws: [prompts, max_new_tokens], uniform in [0, 1). Sample with these: which token each of
            them chooses depends on its row alone, and not on the batch.
        beside: gives what the model gets beside the padded rows, [prompts, longest]: images.
        cache: of what was read of the prompts before, aligned at their ends; it grows. Without one,
            every rank makes the same number of calls.

    The prompts stay, and the answers get what the longest of them leaves of the model's context: at
    least one token, as the last one is not read again. Of a prompt that is longer than the context,
    the last tokens count. `answers.batches_to_answer` finds batches in which no answer depends on
    the other prompts. Runs `generate` of transformers on the prepared model, under every
    strategy: one batch, padded on the left. Ranks may have different prompts.
    """
    whole = without_adapters(model)
    state = PartialState()
    device = state.device  # offloaded weights are elsewhere
    context = context_of(whole)
    fitting = [ids[-context:] for ids in prompts]
    longest = max(map(len, fitting))
    padding = torch.tensor([longest - len(ids) for ids in fitting], device=device)
    rows = torch.tensor([[0] * (longest - len(ids)) + [*ids] for ids in fitting], device=device)
    settings = GenerationConfig(
        max_new_tokens=min(max_new_tokens, context + 1 - longest),
        eos_token_id=[*ends] or None,
        pad_token_id=0,
    )
    before = whole.generation_config
    if beside is not None and isinstance(model, FSDPModule):
        model.unshard()  # transformers calls the vision tower before the model
    whole.generation_config = GenerationConfig()  # which would fill in what `settings` leaves open
    try:
        with as_in_an_evaluation(model), _through(model, whole), chosen_by_answer(model, whole):
            found = whole.generate(
                rows,
                attention_mask=(torch.arange(longest, device=device) >= padding[:, None]).long(),
                generation_config=settings,
                logits_processor=LogitsProcessorList(
                    [] if draws is None else [_Drawn(draws, longest)]
                ),
                past_key_values=cache,
                # a forward of sharded weights takes all ranks
                synced_gpus=cache is None and state.num_processes > 1,
                **({} if beside is None else beside(rows)),
            )
    finally:
        whole.generation_config = before
    answers = found[:, longest:].tolist()
    return [ids[: next((i for i, t in enumerate(ids, 1) if t in ends), None)] for ids in answers]


@torch.no_grad()
def sees_padding(model: nn.Module) -> bool:
    """Whether an answer depends on the padding before its prompt, as where a model counts positions
    from the beginning of the row, or compresses blocks of it: tried once on the prepared model.
    Every rank calls this.
    """
    whole: Any = without_adapters(model)
    if not hasattr(whole, "sees_padding"):
        prompt = [n % whole.get_input_embeddings().num_embeddings for n in range(1, 25)]
        seen: list[torch.Tensor] = []
        head = whole.get_output_embeddings()
        with head.register_forward_hook(lambda *call: seen.append(call[-1][0, -1])):
            for rows in ([prompt], [prompt, prompt + prompt[:7]]):
                generate(model, rows, max_new_tokens=1, ends=())
        alone, padded = (logits.float() for logits in seen)
        allowed = MAX_ERRORS[seen[0].dtype.itemsize == 2]
        differs = bool((padded - alone).norm() > allowed * alone.norm())
        # ranks whose rounding differs would make different numbers of batches
        whole.sees_padding = any(gather_object([differs]))
    return bool(whole.sees_padding)


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
    """Texts of `generate`, which end at one of `ends_of`. Every rank calls this."""
    draws = np.random.default_rng(seed).random((len(prompts), max_new_tokens)) if sample else None
    ends = ends_of(model, tokenizer, end)
    found = generate(model, prompts, ends=ends, max_new_tokens=max_new_tokens, draws=draws)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in found]
