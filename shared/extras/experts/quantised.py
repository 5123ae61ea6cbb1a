"""Fused experts in 4 bits, quantised one weight of a layer at a time while a checkpoint loads."""

from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Params4bit
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from shared.extras.experts.products import compute_dtype, grouped_product, is_fused

METHOD = "bitsandbytes_4bit_with_experts"


@register_quantization_config(METHOD)
class ExpertsConfig(BitsAndBytesConfig):
    """As `BitsAndBytesConfig` in 4 bits, fused experts included."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.quant_method = METHOD  # type: ignore[assignment]


class _Quantise(Bnb4bitQuantize):
    def convert(self, input_dict: Any, *args: Any, **options: Any) -> Any:
        """`input_dict`: full name -> the weight as the model has it, or a list of it."""
        config = self.hf_quantizer.quantization_config
        result: dict[str, Any] = {}
        for name, value in input_dict.items():
            parent, _, weight = name.rpartition(".")
            experts = options["model"].get_submodule(parent)
            if not is_fused(experts, weight):
                result |= super().convert({name: value}, *args, **options)
                continue
            whole = value[0] if isinstance(value, list) else value
            packed: Any = Params4bit(
                whole,
                compress_statistics=config.bnb_4bit_use_double_quant,
                quant_type=config.bnb_4bit_quant_type,
                quant_storage=config.bnb_4bit_quant_storage,
            )
            result[name] = packed.to(whole.device)
            # FSDP2 makes new parameters, so the module keeps the scales.
            vars(experts).setdefault("quant_states", {})[weight] = result[name].quant_state
            vars(experts).setdefault("products", {})[weight] = quantised_product
        return result


@register_quantizer(METHOD)
class ExpertsQuantizer(Bnb4BitHfQuantizer):
    """transformers loads, quantises and drops one weight after the other: neither the device nor
    the host holds the experts of more than a layer in 16 bits.
    """

    def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> bool:
        parent, _, weight = param_name.rpartition(".")
        kept = any(f"{parent}.".startswith(f"{part}.") for part in self.modules_to_not_convert)
        if is_fused(model.get_submodule(parent), weight):
            return not kept
        return super().param_needs_quantization(model, param_name, **options)

    def get_quantize_ops(self) -> Any:
        return _Quantise(self)

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        for experts in model.modules():
            for name, state in vars(experts).pop("quant_states", {}).items():
                weight = dequantize_4bit(getattr(experts, name).data, state).to(dtype)
                setattr(experts, name, nn.Parameter(weight, requires_grad=False))
                del experts.products[name]
        return super()._dequantize(model, dtype)


def quantised_product(
    experts: Any, name: str, rows: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """As `products.weight_product`, of weights in 4 bits."""
    state = experts.quant_states[name]
    packed = getattr(experts, name)
    rows = rows.to(compute_dtype(packed, state.dtype))
    return _Product.apply(rows, packed, state, ends, experts.is_transposed)


class _Product(torch.autograd.Function):
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
    weight = dequantize_4bit(packed.data, state).to(dtype)
    return weight if transposed else weight.mT
