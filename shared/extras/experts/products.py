"""The layers of experts, computed in the precision of the launch.

transformers lets a model choose the function that computes its fused experts. Its own
`grouped_mm` knows no autocast: fp32 weights give fp32 products, which a GPU computes in a loop over
experts (pytorch#174763). The function here casts as autocast does for linear layers. Weights in
4 bits and adapters bring products of their own: see quantised.py and adapted.py.
"""

from typing import Any

import torch
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "grouped_mm_in_launch_precision"


def is_fused(module: Any, weight: str) -> bool:
    """Whether `weight` is the name of a module's weights of all experts, [experts, ...], and its
    class lets a function be chosen.
    """
    names = ("gate_up_proj", "up_proj", "down_proj")
    return weight in names and hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def use_launch_precision(model: Any) -> None:
    """Let the fused experts of a model of transformers, if it has any, compute with
    `experts_forward`.
    """
    if any(is_fused(module, "down_proj") for module in model.modules()):
        model.set_experts_implementation(NAME)


def experts_forward(
    experts: Any, states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """The output of a layer of experts. The host does not wait for the device.

    Args:
        experts: the module: its weights, biases and activation. Its attribute `products`, if it
            has one, maps names of weights to functions that replace `weight_product`.
        states: [tokens, width].
        chosen: [tokens, k], the experts of each token.
        shares: [tokens, k], the factors of their outputs.

    Returns:
        [tokens, width]
    """
    of_rows, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(experts.num_experts, device=chosen.device)
    ends = torch.searchsorted(of_rows, numbers, right=True, out_int32=True)
    products = getattr(experts, "products", {})

    def product(name: str, rows: torch.Tensor) -> torch.Tensor:
        rows = products.get(name, weight_product)(experts, name, rows, ends)
        if experts.has_bias:
            rows = rows + getattr(experts, f"{name}_bias").to(rows.dtype)[of_rows]
        return rows

    rows = states[order // chosen.shape[1]]
    if experts.has_gate:
        rows = experts._apply_gate(product("gate_up_proj", rows))
    else:
        rows = experts.act_fn(product("up_proj", rows))
    rows = product("down_proj", rows)
    if getattr(experts, "has_post_expert_norm", False):
        rows = experts.post_expert_norm(rows)
    rows = (rows * shares.flatten()[order, None])[order.argsort()]
    return rows.view(*chosen.shape, -1).sum(1).to(states.dtype)


def weight_product(experts: Any, name: str, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows times the weights `name` of their experts; `ends`: see `grouped_product`."""
    weight = getattr(experts, name)
    weight = weight.to(compute_dtype(weight))
    return grouped_product(rows, weight if experts.is_transposed else weight.mT, ends)


def compute_dtype(weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.dtype:
    """That of autocast where it is on, else `dtype` or that of the weight."""
    kind = weight.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return dtype or weight.dtype


def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows times the matrix of their group, in the matrices' precision.

    Args:
        rows: [rows, in], sorted by group.
        matrices: [groups, in, out].
        ends: [groups], int32: the row after each group's last one.

    Returns:
        [rows, out]
    """
    rows = rows.to(matrices.dtype)
    # The kernel is for GPUs of this generation or newer; the compiler knows it in bf16 alone.
    if rows.is_cuda and (
        torch.cuda.get_device_capability(rows.device) < (8, 0)
        or (torch.compiler.is_compiling() and rows.dtype != torch.bfloat16)
    ):
        groups = rows.tensor_split(ends[:-1].long().cpu())
        return torch.cat([group @ matrix for group, matrix in zip(groups, matrices, strict=True)])
    _, width_in, width_out = matrices.shape
    unit = 16 // rows.element_size()  # the kernel takes rows of a multiple of 16 bytes
    if not (width_in % unit or width_out % unit):
        return F.grouped_mm(rows, matrices, offs=ends)
    rows = F.pad(rows, (0, -width_in % unit))
    matrices = F.pad(matrices, (0, -width_out % unit, 0, -width_in % unit))
    return F.grouped_mm(rows, matrices, offs=ends)[:, :width_out]


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
