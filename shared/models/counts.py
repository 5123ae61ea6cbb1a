"""Parameters and floating-point operations of a model, and the peak of GPUs."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shared.models.blocks import as_in_an_evaluation
from shared.models.cudnn import MasksAvoidCudnn
from shared.models.loading import outer_parts
from shared.process.errors import ConfigError, first_line

# Floating-point operations a second, by data sheets: dense, bf16 with sums in fp32 (fp16 where
# there is no bf16).
PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989.4e12,
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    "H100": 989.4e12,
    "A100-SXM4-40GB": 312e12,
    "A100-PCIE-40GB": 312e12,
    "A100 80GB PCIe": 312e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
    "V100": 125e12,
    "T4": 65e12,
    "MI300X": 1307.4e12,
}


def known_gpu(name: str) -> str | None:
    """The first of these that a name contains, as `torch.cuda.get_device_name` prints it or
    shorter.
    """
    return next(
        (key for key in PEAK_FLOPS if re.search(rf"\b{key}\b", name) or name == key.split()[-1]),
        None,
    )


def _numel(parameter: nn.Parameter) -> int:
    state = getattr(parameter, "quant_state", None)  # 4-bit weights are packed
    return state.shape.numel() if state is not None else parameter.numel()


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(trainable, all) parameters; packed 4-bit weights count by their unpacked number."""
    counts = [(_numel(p), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trained in counts if trained), sum(n for n, _ in counts)


def describe_parameters(model: nn.Module) -> str:
    """How many parameters a model has, and how many are trained, for the summary."""
    trained, count = count_parameters(model)
    of = "" if trained == count else f"{trained:,} of "
    share = "" if trained == count else f" trained ({trained / count:.2%})"
    four_bits = any(hasattr(parameter, "quant_state") for parameter in model.parameters())
    return f"{of}{count:,} parameters{share}" + ", base in 4 bits" * four_bits


def measure(model: nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """Run `inputs` forward and backward once, freeze what takes no part in it, and return the
    FLOPs.

    A parameter without a gradient (a mask token that only pretraining used, say) would make DDP
    wait for it. Call it before the model is prepared, compiled or checkpointed.

    Raises:
        ConfigError: the model cannot take these inputs.
    """
    counter = FlopCounterMode(display=False)
    with as_in_an_evaluation(model), counter, MasksAvoidCudnn():
        try:
            logits = model(**inputs).logits
        except (ValueError, RuntimeError, IndexError) as error:
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
            raise ConfigError(
                f"{type(model).__name__} cannot take {shapes}: {first_line(error)}"
            ) from None
        logits.sum().backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.requires_grad_(False)
        parameter.grad = None
    return float(counter.get_total_flops())


def experts_of(config: Any) -> tuple[Any, Any]:
    """(experts of a block, experts that a token is sent to) by a model's config. None for what it
    does not say.
    """
    text = config.get_text_config()
    all_names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    active_names = (
        "num_experts_per_tok",
        "num_experts_per_token",
        "top_k_experts",
        "moe_k",
        "moe_topk",
    )
    experts, active = (
        next((n for k in names if (n := getattr(text, k, None))), None)
        for names in (all_names, active_names)
    )
    return experts, active


def _attention_layers(model: nn.Module, outer: tuple[str, ...]) -> Iterator[nn.Module]:
    """The outermost modules of softmax attention, by their classes' names. Linear attention and
    Mamba have none.
    """
    last = "."
    for name, module in model.named_modules():
        is_attention = re.search(
            r"(?<!Linear)(?<!Delta)(?<!Lightning)(?<!RwkvSelf)(Attention|MLA)$",
            type(module).__name__,
        )
        if is_attention and not name.startswith((*outer, last)):
            last = f"{name}."
            yield module


def _attention_size(attention: Any, text: Any, seq_length: float) -> float:
    """Width times tokens that a token sees, of one layer."""
    types = getattr(text, "layer_types", None)
    index = getattr(attention, "layer_idx", None)
    # without types, a window is that of all layers
    kind = types[index] if types and index is not None else "sliding"
    window = getattr(text, "sliding_window", None) if "sliding" in kind else None
    window = getattr(text, "attention_chunk_size", None) if "chunked" in kind else window
    size = getattr(attention, "head_dim", None) or getattr(text, "head_dim", None)
    if getattr(text, "qk_head_dim", None):  # latent attention: keys are wider than values
        size = (text.qk_head_dim + text.v_head_dim) / 2
    width = text.num_attention_heads * size if size else text.hidden_size
    return width * min(window or seq_length, seq_length)


def flops_per_token(model: nn.Module, seq_length: float) -> float | None:
    """Floating-point operations of forward and backward a token, as MFU counts them (recomputation
    left out).

    6 N for trained matrices, 4 N for frozen ones that gradients pass through, plus 12 x width x
    length for each layer of softmax attention (PaLM, arXiv 2204.02311, appendix B), or its window
    where that is shorter. Only what text runs through counts. Embeddings are look-ups and count
    nothing; the head counts for each token, also where only the targets' logits are computed. Of
    experts those count that a token is sent to; None where the config does not say how many of how
    many. Linear attention and Mamba count by their matrices; their recurrence, a few per cent, is
    left out.

    Args:
        seq_length: tokens that see each other; of documents of several lengths the mean over their
            tokens.
    """
    text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    experts, active = experts_of(text)
    embedding = model.get_input_embeddings().weight  # type: ignore[operator, union-attr]
    head = model.get_output_embeddings()  # type: ignore[operator]
    looked_up = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    if head is not None and head.weight is embedding:
        looked_up.discard(embedding)
    outer = tuple(f"{name}." for name in outer_parts(model))
    total = 0.0
    for name, parameter in model.named_parameters():
        share = 1.0
        names = name.split(".")
        routed = "experts" in names or (
            experts and parameter.ndim == 3 and parameter.shape[0] == experts
        )
        if routed and not any("shared" in part for part in names):
            if not isinstance(experts, int) or not isinstance(active, int):
                return None
            share = active / experts
        if parameter not in looked_up and not name.startswith(outer):
            total += (6 if parameter.requires_grad else 4) * share * _numel(parameter)
    return total + 12.0 * sum(
        _attention_size(layer, text, seq_length) for layer in _attention_layers(model, outer)
    )
