"""LoRA adapters: precision, PiSSA, quantised bases."""

from __future__ import annotations

import torch
from torch import nn


def pissa_to_lora(weights: dict[str, torch.Tensor], initial: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An adapter trained from PiSSA's start as an ordinary one, of twice the rank, on the unchanged base.

    PiSSA subtracts the initial product from the base, so what was learned is B A - B0 A0 = [B, -B0] [A; A0]
    (appendix C of arXiv 2404.02948). Other tensors pass through.
    """

    def convert(name: str, value: torch.Tensor) -> torch.Tensor:
        if ".lora_A." in name:
            return torch.cat([value, initial[name]], dim=0)
        if ".lora_B." in name:
            return torch.cat([value, -initial[name]], dim=1)
        return value

    return {name: convert(name, value) for name, value in weights.items()}


def trained_in_fp32(model: nn.Module) -> nn.Module:
    """What is trained gets fp32 weights, also `modules_to_save` of a 16-bit base: small updates would be rounded away."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    spare_input_casts(model)
    return model.train()  # from_pretrained leaves dropout off


def spare_input_casts(model: nn.Module) -> None:
    """Let adapters take what their layers are given: PEFT makes it fp32, autocast the type that it was, and both are kept.

    The same numbers in fewer bytes (with lora_dropout to the rounding of its scale). Not for DoRA and the like, which
    compute more than two products with it.
    """
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled") and not getattr(module, "lora_variant", None):
            module.cast_input_dtype_enabled = False  # type: ignore[assignment]


def keep_quantized(model: nn.Module) -> None:
    """Forbid bitsandbytes to rearrange 4-bit weights in an evaluation, which it does on CPUs with AVX512-BF16.

    It rounds their scales to bf16 and leaves them so: what is trained afterwards would differ, a resumed run from one
    left alone for example, and weights that FSDP has cut would be misread.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
