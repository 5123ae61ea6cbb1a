"""LoRA on fused experts: made and saved by PEFT, computed by `products.experts_forward`.

PEFT adds the product of an adapter's matrices to a copy of all experts' weights in each forward.
In 16 bits that rounds small updates away, takes the memory of a second set of weights, and cannot
be done to 4-bit weights.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shared.experts.products import is_fused


def all_quantised(model: nn.Module) -> list[tuple[Any, str, Any]]:
    """(module, name of the weight, its quantisation state) of all quantised experts."""
    return [
        (module, name, state)
        for module in model.modules()
        for name, state in vars(module).get("quantised", {}).items()
    ]


@contextlib.contextmanager
def in_full_shape(model: nn.Module) -> Iterator[None]:
    """Give quantised experts the shape and type that they were read in, for PEFT to see. The
    stand-ins take no memory; afterwards the quantised weights are back.
    """
    packed = {}
    for experts, name, state in all_quantised(model):
        weight = experts._parameters[name]
        packed[experts, name] = weight
        one = torch.empty((), dtype=state.dtype, device=weight.device)
        experts._parameters[name] = nn.Parameter(one.expand(state.shape), requires_grad=False)
    try:
        yield
    finally:
        for (experts, name), weight in packed.items():
            experts._parameters[name] = weight


def attach(model: nn.Module) -> None:
    """Let fused experts compute the adapters that PEFT has made for them, and PEFT not."""
    from peft.tuners.lora.layer import ParamWrapper

    for wrapper in model.modules():
        if not isinstance(wrapper, ParamWrapper):
            continue
        experts: Any = wrapper.get_base_layer()
        if is_fused(experts, wrapper.parameter_name):
            vars(experts).setdefault("adapters", {})[wrapper.parameter_name] = wrapper
            wrapper.enable_adapters(False)  # which freezes them, too
            wrapper.lora_A.requires_grad_(True)
            wrapper.lora_B.requires_grad_(True)
