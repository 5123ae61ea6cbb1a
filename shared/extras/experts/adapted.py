"""LoRA on fused experts: made and saved by PEFT, computed as two narrow products.

PEFT adds the product of an adapter's matrices to a copy of all experts' weights in each forward.
In 16 bits that rounds small updates away, takes the memory of a second set of weights, and cannot
be done to 4-bit weights.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.lora.layer import Linear, ParamWrapper
from torch import nn

from shared.extras.experts.products import NAME, grouped_product, is_fused, weight_product


class _ComputedInside(ParamWrapper):
    """PEFT's adapter of a fused weight, which the experts' own forward computes."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.base_layer(x, *args, **kwargs)


class _BesideWeight(ParamWrapper):
    """PEFT's adapter of a linear layer's weight, added to what the layer returns: in the sum of
    both weights, 16 bits round small updates away.
    """

    forward = Linear.forward


class _AdaptedProduct:
    """Rows times the weights of their experts, plus rows times the adapters of their experts."""

    def __init__(self, base: Any, adapter: ParamWrapper) -> None:
        self.base = base  # the product without adapters
        self.adapter = adapter

    def __call__(
        self, experts: Any, name: str, rows: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        result = self.base(experts, name, rows, ends)
        adapter = self.adapter
        if adapter.disable_adapters or adapter.merged:
            return result
        for key in adapter.active_adapters:
            # PEFT keeps one A of all experts, [experts * r, in], and one B, [out, r * experts].
            first: Any = adapter.lora_A[key].weight
            second: Any = adapter.lora_B[key].weight
            first = first.to(result.dtype).view(len(ends), adapter.r[key], -1)
            second = second.to(result.dtype).view(-1, adapter.r[key], len(ends))
            second = torch.stack(second.unbind(2))  # a copy that the compiler does not leave out
            narrow = grouped_product(rows, first.mT, ends)
            result = result + grouped_product(narrow, second.mT, ends) * adapter.scaling[key]
        return result


def attach(model: Any) -> None:
    """Let the fused experts of a PEFT model, and layers that PEFT takes for experts, compute the
    adapters that PEFT has made for their weights.
    """
    for wrapper in model.modules():
        if not isinstance(wrapper, ParamWrapper):
            continue
        experts: Any = wrapper.get_base_layer()
        name = wrapper.parameter_name
        if isinstance(experts, nn.Linear):
            wrapper.__class__ = _BesideWeight
        # where transformers computes the experts, PEFT changes their weights
        if is_fused(experts, name) and experts.config._experts_implementation == NAME:
            wrapper.__class__ = _ComputedInside
            products = vars(experts).setdefault("products", {})
            products[name] = _AdaptedProduct(products.get(name, weight_product), wrapper)


@contextlib.contextmanager
def in_full_shape(model: nn.Module) -> Iterator[None]:
    """Give quantised experts the shape and type that they were read in, for PEFT to see. The
    stand-ins take no memory; afterwards the quantised weights are back.
    """
    packed = {}
    for experts in model.modules():
        for name, state in getattr(experts, "quant_states", {}).items():
            weight: Any = experts._parameters[name]
            packed[experts, name] = weight
            one = torch.empty((), dtype=state.dtype, device=weight.device)
            experts._parameters[name] = nn.Parameter(one.expand(state.shape), requires_grad=False)
    try:
        yield
    finally:
        for (experts, name), weight in packed.items():
            experts._parameters[name] = weight
