"""Fused experts in 4 bits, quantised one weight of a layer at a time while a checkpoint loads."""

from typing import Any

from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Params4bit
from torch import nn
from transformers import BitsAndBytesConfig
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from shared.experts.adapted import all_quantised
from shared.experts.products import is_fused

METHOD = "bitsandbytes_4bit_with_experts"


@register_quantization_config(METHOD)
class ExpertsConfig(BitsAndBytesConfig):
    """As `BitsAndBytesConfig` in 4 bits, fused experts included."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.quant_method = METHOD


class _Quantise(Bnb4bitQuantize):
    def convert(self, input_dict: Any, *, model: Any = None, **options: Any) -> dict[str, Any]:
        """`input_dict`: full name -> the weight as the model has it, or a list of it."""
        config = self.hf_quantizer.quantization_config
        result: dict[str, Any] = {}
        for name, value in input_dict.items():
            parent, _, weight = name.rpartition(".")
            module = model.get_submodule(parent)
            if is_fused(module, weight):
                whole = value[0] if isinstance(value, list) else value
                packed = Params4bit(
                    whole,
                    compress_statistics=config.bnb_4bit_use_double_quant,
                    quant_type=config.bnb_4bit_quant_type,
                    quant_storage=config.bnb_4bit_quant_storage,
                ).to(whole.device)
                states = vars(module).setdefault("quantised", {})
                states[weight] = packed.quant_state
                result[name] = packed
            else:
                result |= super().convert({name: value}, model=model, **options)
        return result


@register_quantizer(METHOD)
class ExpertsQuantizer(Bnb4BitHfQuantizer):
    """transformers loads, quantises and drops one weight after the other: neither the device nor
    the host holds the experts of more than a layer in 16 bits.
    """

    def param_needs_quantization(self, model: Any, param_name: str, **options: Any) -> bool:
        parent, _, weight = param_name.rpartition(".")
        kept = any(f"{parent}.".startswith(f"{part}.") for part in self.modules_to_not_convert)
        return (is_fused(model.get_submodule(parent), weight) and not kept) or (
            super().param_needs_quantization(model, param_name, **options)
        )

    def get_quantize_ops(self) -> Any:
        return _Quantise(self)

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        for experts, name, state in all_quantised(model):
            weight = dequantize_4bit(getattr(experts, name).data, state).to(dtype)
            setattr(experts, name, nn.Parameter(weight, requires_grad=False))
            del experts.quantised[name]
        return super()._dequantize(model, dtype)
