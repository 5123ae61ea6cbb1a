"""What a forward gets, so that packed documents do not see each other and the host does not wait
for the device.

transformers reads masks and positions from the device, to find padding and documents. A `RowMask`
says it on the host.
"""

import inspect
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    sdpa_mask,
)
from transformers.modeling_utils import AttentionInterface

from shared.data.order import Batch
from shared.models import angles
from shared.models.angles import number_of_document
from shared.models.cudnn import avoid_cudnn
from shared.models.loading import without_adapters
from shared.process import ranks

# Arguments of attention functions that do not change the result if `cu_seqlens` are given.
# A window that is shorter than the row gets a mask instead: see `_is_causal_alone`.
HARMLESS = {
    "scaling",
    "is_causal",
    "sliding_window",
    "position_ids",
    "return_dict",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "cu_seqlens",
    "seq_idx",
}
# Names of attention dropout in model configs
DROPOUT = ("attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob")
# Called with query, key, value: [tokens, heads, head_dim] in 16 bits; cu_seqlens and a bound for
# document lengths, of
# queries and of keys; scale
Kernel = Callable[..., Any]


class Rows(NamedTuple):
    """What the host knows of the rows of a batch."""

    are_padded: bool = False
    position_ids: torch.Tensor | None = None  # of packed rows: they restart with each document
    cu_seqlens: torch.Tensor | None = None  # the documents' bounds, if a kernel takes them
    length: int = 0  # of whole rows, if this rank has a part of them


class RowMask(torch.Tensor):
    """An attention mask, [batch, seq], that knows its `rows`: whether it is all ones needs no read
    from the device.

    A copy in another type or shape knows them, too. What other operations return is a plain tensor.
    """

    rows: Rows

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        mask, *others = arguments
        if function in (torch.all, torch.Tensor.all) and not others and not named:
            return torch.tensor(not mask.rows.are_padded)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*arguments, **(named or {}))
        is_comparison = function is torch.Tensor.__eq__ and others == [1]
        if is_comparison or function in (torch.Tensor.to, torch.Tensor.bool, torch.Tensor.view):
            return with_rows(result, mask.rows)
        return result


@cache
def understand_row_masks() -> None:
    """Let transformers read a `RowMask`, from the first one on. Of other masks, it makes what it
    made before.
    """
    for name, make_mask in list(ALL_MASK_ATTENTION_FUNCTIONS.items()):
        AttentionMaskInterface.register(name, partial(_mask_of_rows, make_mask))
    AttentionMaskInterface.register("sdpa", _sdpa_mask_of_rows)
    use_kernel(None)


def with_rows(mask: torch.Tensor, rows: Rows) -> RowMask:
    """`mask` as a `RowMask`. A fake tensor, for estimates, gets the attribute alone."""
    understand_row_masks()
    result: Any = mask.as_subclass(RowMask) if type(mask) is torch.Tensor else mask
    result.rows = rows
    return result


def row_mask(tokens: torch.Tensor, rows: Rows) -> RowMask:
    """A mask of ones, for rows without padding: [batch, seq, ...]."""
    # Fake tensors lose the attribute when transformers casts them to bool.
    dtype = torch.int64 if type(tokens) is torch.Tensor else torch.bool
    ones = torch.ones(tokens.shape[:2], dtype=dtype, device=tokens.device)
    return with_rows(ones, rows)


class Form(NamedTuple):
    """How the rows of packed documents are handed to a model: found by
    `isolation.isolate_documents`."""

    flat: bool = False  # all in one row
    bounds: str = ""  # of documents, for kernels of recurrent layers: the argument that takes them
    by_kernel: bool = False  # attention takes `cu_seqlens` in place of a mask


def forward_rows(model: nn.Module, batch: Batch, *, like: Any = None) -> Any:
    """A model's outputs for a batch of rows: packed documents, padded texts or neither.

    Args:
        batch: `input_ids`, and what the model takes beside them: `attention_mask` only if it masks
            something, `position_ids` only if rows hold several documents, `cu_seqlens`: see
            `loader.cu_seqlens_of`; or a part of each row: see `stretches.cut`.
        like: the model whose `row_form` counts, if not this one's: that of
            `isolation.isolate_documents`.
    """
    names = ("input_ids", "token_type_ids", "position_ids")
    inputs = {name: batch[name] for name in names if name in batch}
    if angles.kind_of(model):
        inputs["position_ids"] = angles.positions_without_padding(batch)
    for name in batch:
        if name.startswith("image."):  # see `shared.vision`
            inputs[name.removeprefix("image.")] = batch[name].to(batch["input_ids"].device)
    positions = batch.get("row_positions", batch.get("position_ids"))
    length = batch["row_positions"].shape[1] if "row_positions" in batch else 0
    if "attention_mask" in batch:
        mask = with_rows(batch["attention_mask"], Rows(are_padded=True))
    elif "position_ids" not in batch or (length and "cu_seqlens" not in batch):
        mask = row_mask(batch["input_ids"], Rows(length=length))
    else:
        form: Form = getattr(like or model, "row_form", Form())
        if form.flat:
            inputs = {name: value.reshape(1, -1) for name, value in inputs.items()}
            positions = inputs["position_ids"]
        bounds = batch["cu_seqlens"] if form.by_kernel else None
        rows = Rows(position_ids=positions, cu_seqlens=bounds, length=length)
        mask = row_mask(inputs["input_ids"], rows)
        if form.bounds:
            inputs[form.bounds] = batch["cu_seqlens"]
            inputs["seq_idx"] = number_of_document(inputs["position_ids"]).int()
    with angles.chosen_by_document(model):
        return model(**inputs, attention_mask=mask, use_cache=False)


def describe(model: Any) -> str:
    """The attention that a model computes, for the summary."""
    model = without_adapters(model)
    used = model.config.get_text_config()._attn_implementation
    if used == "eager" and not model._supports_sdpa:
        return f"{used}: {type(model).__name__} has no sdpa"
    return used


def scaled_from(model: Any) -> int:
    """The token of a row from which attention is scaled by the place there, as in Llama 4 and
    Inkling; sys.maxsize if there is none.
    """
    of_config = getattr(model.config.get_text_config(), "log_scaling_n_floor", None)
    scaled: list[Any] = [m for m in model.modules() if getattr(m, "attn_temperature_tuning", 0)]
    return min((module.floor_scale for module in scaled), default=of_config or sys.maxsize)


def _within_documents(mask_function: Any, position_ids: torch.Tensor) -> Any:
    """A mask function of transformers, within documents, and on positions in them: windows and
    chunks begin with them."""
    number = number_of_document(position_ids)

    def allows(row: Any, head: Any, query: Any, key: Any) -> Any:
        is_same = number[row, query] == number[row, key]
        return is_same & mask_function(row, head, position_ids[row, query], position_ids[row, key])

    return allows


def _mask_of_rows(
    make_mask: Any, *, attention_mask: torch.Tensor | None = None, **named: Any
) -> Any:
    """What transformers' `make_mask` returns, without a read from the device if it gets a
    `RowMask`."""
    rows = getattr(attention_mask, "rows", None)
    if attention_mask is None or rows is None:
        return make_mask(attention_mask=attention_mask, **named)
    if rows.are_padded:
        named["allow_is_causal_skip"] = named["allow_is_bidirectional_skip"] = False
        return make_mask(attention_mask=attention_mask.as_subclass(torch.Tensor), **named)
    if rows.position_ids is not None:
        named["mask_function"] = _within_documents(named["mask_function"], rows.position_ids)
        named["allow_is_causal_skip"] = named["allow_is_bidirectional_skip"] = False
    return make_mask(attention_mask=None, **named)


def _sdpa_mask_of_rows(
    *, attention_mask: torch.Tensor | None = None, dtype: torch.dtype = torch.float32, **named: Any
) -> torch.Tensor | None:
    """SDPA's mask, [batch, 1, seq, seq], or `cu_seqlens`, 1-D, in its place. `attend` knows them by
    their dimension.

    For packed rows, the mask is additive: of a bool mask, each block would make its own and keep it
    for backward. Where a rank has a part of each row, it is as `sequence.attend_to_whole_rows`
    takes it.
    """
    dtype = computed_in(torch.device(named["device"]), dtype)
    rows = getattr(attention_mask, "rows", Rows())
    if rows.length:
        named["q_length"] = named["kv_length"] = rows.length
    if rows.cu_seqlens is not None and dtype.itemsize == 2 and _is_causal_alone(**named):
        # another number of documents must not recompile
        torch._dynamo.maybe_mark_dynamic(rows.cu_seqlens, 0)
        return rows.cu_seqlens[None] if rows.length else rows.cu_seqlens
    mask = _mask_of_rows(sdpa_mask, attention_mask=attention_mask, dtype=dtype, **named)
    if mask is None:
        return torch.empty(1, 0, device=named["device"]) if rows.length else None
    avoid_cudnn()
    if rows.position_ids is None:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _is_causal_alone(
    *,
    q_length: int,
    config: Any,
    local_size: int | None = None,
    use_vmap: bool = False,
    **named: Any,
) -> bool:
    """Whether a mask is only causal within documents, and the model has no attention dropout."""
    if use_vmap or "allow_is_bidirectional_skip" in named:  # the model's addition, or not causal
        return False
    has_dropout = any(getattr(config, name, 0.0) for name in DROPOUT)
    return not has_dropout and (local_size is None or local_size >= q_length)


def computed_in(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """That of autocast where it is on, else `dtype`."""
    return (
        torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype
    )


def attend(
    kernel: Kernel | None,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA, [batch, heads, seq, head_dim] -> [batch, seq, heads, head_dim].

    It takes nothing, a mask, or `cu_seqlens` for the kernel.
    """
    rows, _, length, _ = query.shape
    if kernel is None or not takes_kernel(attention_mask, **options):
        if attention_mask is not None:
            avoid_cudnn()
            if attention_mask.ndim == 1:
                attention_mask = mask_of(attention_mask, rows, length)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    dtype = computed_in(query.device, value.dtype)
    states = [tensor.transpose(1, 2).flatten(0, 1).to(dtype) for tensor in (query, key, value)]
    # The row length is an upper bound of the longest document: the exact one would cost a device
    # sync and recompiles.
    result = kernel(*states, attention_mask, attention_mask, length, length, scale=scaling)
    return result.unflatten(0, (rows, length)), None


def takes_kernel(mask: torch.Tensor | None, dropout: float = 0.0, **options: Any) -> bool:
    """Whether a call of attention has `cu_seqlens` for a mask, and nothing that the kernel does not
    support.

    Dropout, a bias, a soft cap or sinks change the result.
    """
    if mask is None or mask.ndim != 1 or dropout:
        return False
    return all(
        value is None or value is False or name in HARMLESS for name, value in options.items()
    )


def mask_of(cu_seqlens: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """[rows, 1, length, length] bool: the same document, and not a later token."""
    tokens = torch.arange(rows * length, device=cu_seqlens.device)
    number = torch.bucketize(tokens, cu_seqlens, right=True).view(rows, 1, length)
    return (number[..., :, None] == number[..., None, :]).tril()


def find_kernel(device: torch.device) -> Kernel | None:
    """PyTorch's variable-length flash attention, causal; None if the device has none."""
    if device.type != "cuda":
        return None
    from torch.nn.attention.varlen import varlen_attn  # this import takes seconds

    causal = partial(varlen_attn, window_size=(-1, 0))
    # torch 2.11 has no such flag
    has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(causal, enable_gqa=True) if has_flag else causal


def use_kernel(kernel: Kernel | None) -> None:
    """Let transformers' SDPA take `cu_seqlens`, too: by a kernel, or by the mask that they stand
    for. Ranks that share rows attend by heads.
    """
    function: Any = partial(attend, kernel)
    if ranks.sequence_ranks() > 1:
        from shared.extras.sequence.sequence import attend_to_whole_rows

        function = partial(attend_to_whole_rows, function)
    AttentionInterface.register("sdpa", function)
