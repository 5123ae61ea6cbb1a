"""Rotary angles that depend on a document's length: longrope (Phi-3.5, Phi-4-mini), dynamic NTK.

transformers chooses them by the longest position of a forward, so that they would depend on what
else is in a batch, and on its padding. Here, each document has those that it has alone.
"""

import contextlib
import inspect
from collections.abc import Iterator
from functools import wraps
from typing import Any
from unittest import mock

import torch

from shared.data.order import Batch

KINDS = ("longrope", "dynamic")


def kind_of(model: Any) -> str:
    """The kind of a model's angles if they depend on a document's length, else "".

    Positions of several axes are the model's own matter.
    """
    # a model of the user's has none; called for each forward, where `without_adapters` takes long
    config = getattr(getattr(model, "module", model), "config", None)
    # one of each layer type, or one for all
    settings = str(config and getattr(config.get_text_config(), "rope_parameters", ""))
    kinds = [kind for kind in KINDS if f"'{kind}'" in settings and "mrope_section" not in settings]
    return kinds[0] if kinds else ""


def number_of_document(position_ids: torch.Tensor) -> torch.Tensor:
    """The number, from 0, of each position's document in its row: [batch, seq]."""
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    return begins.cumsum(-1)


def positions_without_padding(batch: Batch) -> torch.Tensor:
    """Positions in documents, [batch, seq]. Those of padding are 0: they make no document longer.

    Args:
        batch: see `attention.forward_rows`. Without `filled` and `attention_mask`, rows are full.
    """
    rows, length = batch["input_ids"].shape
    places = torch.arange(length, device=batch["input_ids"].device).expand(rows, -1)
    positions = batch.get("position_ids", places)
    if "attention_mask" in batch:
        return positions * batch["attention_mask"]
    return positions * (places < batch["filled"][:, None]) if "filled" in batch else positions


@contextlib.contextmanager
def chosen_by_document(model: Any) -> Iterator[None]:
    """In this block, a document's angles depend on its own last position alone. Documents begin
    where positions do not go on.
    """
    with contextlib.ExitStack() as hooks:
        for module in model.modules() if kind_of(model) else ():
            if hasattr(module, "rope_type"):
                hook = module.register_forward_hook(_angles_by_document, with_kwargs=True)
                hooks.enter_context(hook)
        yield


@contextlib.contextmanager
def chosen_by_answer(model: Any, whole: Any) -> Iterator[None]:
    """In this block, `generate` of `whole` computes a cache anew at the token that makes one of
    the texts a long one, as Phi-3's own code does for a batch. Otherwise, earlier keys would keep
    their angles.

    Args:
        model: as it is called, `whole` with its wrappers.
    """
    if kind_of(whole) != "longrope":
        yield
        return
    prepare = whole.prepare_inputs_for_generation
    settings = whole.config.get_text_config().rope_parameters
    kinds = [settings] if "rope_type" in settings else settings.values()
    bounds = [_bound_of(kind) for kind in kinds if kind["rope_type"] == "longrope"]

    @wraps(prepare)  # transformers looks at its arguments
    def prepared(*arguments: Any, **named: Any) -> Any:
        if any(place in bounds for place in named["position_ids"][:, -1].tolist()):
            named["past_key_values"] = named["next_sequence_length"] = None
        return prepare(*arguments, **named)

    replaced = mock.patch.object(whole, "prepare_inputs_for_generation", prepared)
    with replaced, chosen_by_document(model):
        yield


def _bound_of(settings: Any) -> int:
    """The longest document, in tokens, that has longrope's angles for short ones."""
    return int(settings["original_max_position_embeddings"])


def _angles_by_document(module: Any, arguments: Any, named: Any, found: Any) -> Any:
    """What a rotary embedding returns, [batch, seq, size] twice, with each document's own angles.
    A forward hook.
    """
    call = inspect.signature(module.forward).bind(*arguments, **named).arguments
    kind, settings = module.rope_type, module.config.rope_parameters
    if layer := call.get("layer_type"):
        kind, settings = kind[layer], settings[layer]
    if kind not in KINDS:
        return found
    positions = call.pop("position_ids")
    rows, length = positions.shape
    is_long = kind == "longrope"
    bound = _bound_of(settings) if is_long else module.original_max_seq_len
    if 1 < length <= bound:  # a single token may follow others, in a cache
        return found
    number = number_of_document(positions)
    ends = torch.zeros_like(positions).scatter_reduce(1, number, positions + 1, "amax")
    # longrope has two sets of angles, dynamic NTK one for each length
    lengths = ends.gather(1, number).clamp(bound, bound + 1 if is_long else None)
    for longest in (bound, bound + 1) if is_long else lengths.unique().tolist():
        # dynamic NTK keeps the angles of the longest forward until a short one
        module.forward(**call, position_ids=torch.zeros_like(positions))
        is_own = lengths == longest
        last = positions.new_full((rows, 1), longest - 1)
        places = torch.cat([positions.where(is_own, 0), last], 1)
        own = module.forward(**call, position_ids=places)
        found = tuple(
            torch.where(is_own[..., None], new[:, :-1], old)
            for new, old in zip(own, found, strict=True)
        )
    return found
