"""Products of fused experts, in the precision of the launch.

transformers lets a model choose the function that computes its experts. Its own `grouped_mm` knows
no autocast: fp32 weights give fp32 products, which a GPU computes in a loop over experts
(pytorch#174763). The one here casts as autocast does for linear layers, multiplies 4-bit weights
without keeping them in 16 bits for the backward, and adds LoRA as two narrow products.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
NAME = "grouped_mm_in_launch_precision"


def is_fused(module: Any, weight: str) -> bool:
    """Whether `weight` is one of a module of fused experts, [experts, ...], whose class lets a
    function be chosen.
    """
    return weight in WEIGHTS and hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def use_launch_precision(model: Any) -> None:
    """Let a model's fused experts compute with `experts_forward`. A model without any stays as it
    is.
    """
    if any(is_fused(module, "down_proj") for module in model.modules()):
        model.set_experts_implementation(NAME)


def experts_forward(
    experts: Any, states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """The output of a layer of experts. The host does not wait for the device.

    Args:
        experts: the module: its weights, biases and activation.
        states: [tokens, width].
        chosen: [tokens, k], the experts of each token.
        shares: [tokens, k], what each of them counts.

    Returns:
        [tokens, width]
    """
    if experts._is_expert_parallel:
        return grouped_mm_experts_forward(experts, states, chosen, shares)
    of_rows, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(experts.num_experts, device=chosen.device)
    ends = torch.searchsorted(of_rows, numbers, right=True, out_int32=True)

    def product(name: str, rows: torch.Tensor) -> torch.Tensor:
        rows = _product(experts, name, rows, ends)
        if experts.has_bias:
            rows = rows + getattr(experts, f"{name}_bias").to(rows.dtype)[of_rows]
        return rows

    rows = states[order // chosen.shape[1]]
    if experts.has_gate:
        rows = experts._apply_gate(product("gate_up_proj", rows))
    else:
        rows = experts.act_fn(product("up_proj", rows))
    rows = product("down_proj", rows)
    if experts.has_post_expert_norm:
        rows = experts.post_expert_norm(rows)
    rows = (rows * shares.flatten()[order, None])[order.argsort()]
    return rows.view(*chosen.shape, -1).sum(1).to(states.dtype)


def _product(experts: Any, name: str, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows, sorted by expert, times the weights `name` of their experts, and times their
    adapters.
    """
    weight = getattr(experts, name)
    quantised = vars(experts).get("quantised", {}).get(name)
    kind = rows.device.type
    dtype = quantised.dtype if quantised else weight.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    rows = rows.to(dtype)
    if quantised:
        result = _Product4bit.apply(rows, weight, quantised, ends, experts.is_transposed)
    else:
        weight = weight.to(dtype)
        result = grouped_product(rows, weight if experts.is_transposed else weight.mT, ends)
    adapter = vars(experts).get("adapters", {}).get(name)
    return result if adapter is None else result + _low_rank(adapter, rows, ends)


def _low_rank(adapter: Any, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows times the adapter of their experts, a `ParamWrapper` of PEFT: its matrices of all
    experts are one A, [experts * r, in], and one B, [out, r * experts].
    """
    (name,) = adapter.active_adapters
    rank = adapter.r[name]
    first = adapter.lora_A[name].weight.view(len(ends), rank, -1)
    second = adapter.lora_B[name].weight.view(-1, rank, len(ends)).permute(2, 1, 0)
    padding = (0, 0, 0, -rank % 8)  # to rows of 16 bytes
    first = F.pad(first.to(rows.dtype), padding)
    second = F.pad(second.to(rows.dtype), padding).contiguous()
    narrow = grouped_product(rows, first.mT, ends)
    return grouped_product(narrow, second, ends) * adapter.scaling[name]


def grouped_product(
    rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Rows times the matrix of their group.

    Args:
        rows: [rows, in], sorted by group.
        matrices: [groups, in, out].
        ends: [groups], int32: the row after each group's last one.

    Returns:
        [rows, out]
    """
    unit = 16 // rows.element_size()  # the kernel wants strides of 16 bytes
    aligned = not any(size % unit for size in matrices.shape[1:])
    old = rows.is_cuda and torch.cuda.get_device_capability(rows.device) < (8, 0)
    if aligned and not old:
        return F.grouped_mm(rows, matrices, offs=ends)
    groups = rows.tensor_split(ends[:-1].long().cpu())
    return torch.cat([group @ matrix for group, matrix in zip(groups, matrices, strict=True)])


class _Product4bit(torch.autograd.Function):
    """`grouped_product` of packed, frozen weights. They are unpacked for forward and backward
    alike: 16-bit copies of all layers would take the memory that 4 bits save.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, packed: Any, state: Any, ends: Any, transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, ends)
        ctx.state = state
        ctx.transposed = transposed
        return grouped_product(rows, _unpacked(packed, state, rows.dtype, transposed), ends)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        packed, ends = ctx.saved_tensors
        matrices = _unpacked(packed, ctx.state, gradient.dtype, ctx.transposed)
        return grouped_product(gradient.contiguous(), matrices.mT, ends), None, None, None, None


def _unpacked(packed: Any, state: Any, dtype: torch.dtype, transposed: bool) -> torch.Tensor:
    """[experts, in, out]"""
    from bitsandbytes.functional import dequantize_4bit

    weight = dequantize_4bit(packed.data, state).to(dtype)
    return weight if transposed else weight.mT


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
