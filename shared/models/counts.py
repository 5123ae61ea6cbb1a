"""Parameters and floating-point operations of a model, and what GPUs can do."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shared.models.attention import watch_masks
from shared.models.loading import outer_parts
from shared.process.errors import ConfigError, first_line


class GPU(NamedTuple):
    """A device, by its vendor's data sheet."""

    flops: float  # a second, dense, bf16 with sums in fp32 (fp16 where there is no bf16)
    bandwidth: float  # bytes a second
    memory: float  # bytes
    fp8: float  # times `flops`; 0: it has none


# Found in the device's name, first match.
GPUS = {
    "GB200": GPU(2500e12, 8e12, 186e9, 2),
    "B200": GPU(2250e12, 8e12, 180e9, 2),
    "GH200": GPU(989.4e12, 4e12, 96e9, 2),
    "H200 NVL": GPU(835.5e12, 4.8e12, 141e9, 2),
    "H200": GPU(989.4e12, 4.8e12, 141e9, 2),
    "H100 PCIe": GPU(756e12, 2e12, 80e9, 2),
    "H100 NVL": GPU(835.5e12, 3.9e12, 94e9, 2),
    "H100": GPU(989.4e12, 3.35e12, 80e9, 2),
    "A100-SXM4-40GB": GPU(312e12, 1.555e12, 40e9, 0),
    "A100-PCIE-40GB": GPU(312e12, 1.555e12, 40e9, 0),
    "A100 80GB PCIe": GPU(312e12, 1.935e12, 80e9, 0),
    "A100": GPU(312e12, 2.039e12, 80e9, 0),
    "L40S": GPU(362e12, 0.864e12, 48e9, 2),
    "L40": GPU(181e12, 0.864e12, 48e9, 2),
    "L4": GPU(121e12, 0.3e12, 24e9, 2),
    "A10G": GPU(70e12, 0.6e12, 24e9, 0),
    "A10": GPU(125e12, 0.6e12, 24e9, 0),
    "RTX 4090": GPU(165.2e12, 1.008e12, 24e9, 2),
    "RTX 3090": GPU(71e12, 0.936e12, 24e9, 0),
    "V100": GPU(125e12, 0.9e12, 32e9, 0),
    "T4": GPU(65e12, 0.32e12, 16e9, 0),
    "MI300X": GPU(1307.4e12, 5.3e12, 192e9, 2),
}


def find_gpu(name: str) -> GPU | None:
    """What is known of a device with this name, as `torch.cuda.get_device_name` prints it or shorter."""
    return next((gpu for key, gpu in GPUS.items() if re.search(rf"\b{key}\b", name) or name == key.split()[-1]), None)


def _numel(parameter: nn.Parameter) -> int:
    state = getattr(parameter, "quant_state", None)  # 4-bit weights are packed
    return state.shape.numel() if state is not None else parameter.numel()


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(trainable, all) parameters; packed 4-bit weights count by their unpacked number."""
    counts = [(_numel(p), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trained in counts if trained), sum(n for n, _ in counts)


def measure(model: nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """Run `inputs` forward and backward once, freeze what takes no part in it, and return the FLOPs.

    A parameter without a gradient (a mask token that only pretraining used, say) would make DDP wait for it. Call it
    before the model is prepared, compiled or checkpointed.

    Raises:
        ConfigError: the model cannot take these inputs.
    """
    watch_masks(model)
    training = model.training
    model.eval()
    with FlopCounterMode(display=False) as counter:
        try:
            logits = model(**inputs).logits
        except (ValueError, RuntimeError, IndexError) as error:
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
            raise ConfigError(f"{type(model).__name__} cannot take {shapes}: {first_line(error)}") from None
        logits.sum().backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.requires_grad_(False)
        parameter.grad = None
    model.train(training)
    return float(counter.get_total_flops())


def experts_of(config: Any) -> tuple[Any, Any]:
    """(experts of a block, experts that a token is sent to) by a model's config. None for what it does not say."""
    text = config.get_text_config()
    all_names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    active_names = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk")
    experts, active = (
        next((n for k in names if (n := getattr(text, k, None))), None) for names in (all_names, active_names)
    )
    return experts, active


def _attention_layers(model: nn.Module, outer: tuple[str, ...]) -> Iterator[nn.Module]:
    """The outermost modules of softmax attention, by their classes' names. Linear attention and Mamba have none."""
    last = "."
    for name, module in model.named_modules():
        is_attention = re.search(r"(?<!Linear)(?<!Delta)(?<!Lightning)(?<!RwkvSelf)(Attention|MLA)$", type(module).__name__)
        if is_attention and not name.startswith((*outer, last)):
            last = f"{name}."
            yield module


def _attention_size(attention: Any, text: Any, seq_length: float) -> float:
    """Width times tokens that a token sees, of one layer."""
    types, index = getattr(text, "layer_types", None), getattr(attention, "layer_idx", None)
    kind = types[index] if types and index is not None else "sliding"  # without types, a window is that of all layers
    window = getattr(text, "sliding_window", None) if "sliding" in kind else None
    window = getattr(text, "attention_chunk_size", None) if "chunked" in kind else window
    size = getattr(attention, "head_dim", None) or getattr(text, "head_dim", None)
    if getattr(text, "qk_head_dim", None):  # latent attention: keys are wider than values
        size = (text.qk_head_dim + text.v_head_dim) / 2
    width = text.num_attention_heads * size if size else text.hidden_size
    return width * min(window or seq_length, seq_length)


def flops_per_token(model: nn.Module, seq_length: float) -> float | None:
    """Floating-point operations of forward and backward a token, as MFU counts them (recomputation left out).

    6 N for trained matrices, 4 N for frozen ones that gradients pass through, plus 12 x width x length for each layer of
    softmax attention (PaLM, arXiv 2204.02311, appendix B), or its window where that is shorter. Only what text runs through
    counts. Embeddings are look-ups and count nothing; the head counts for each token, also where only the targets' logits
    are computed. Of experts those count that a token is sent to; None where the config does not say how many of how many.
    Linear attention and Mamba count by their matrices; their recurrence, a few per cent, is left out.

    Args:
        seq_length: tokens that see each other; of documents of several lengths the mean over their tokens.
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
        share, names = 1.0, name.split(".")
        routed = "experts" in names or (experts and parameter.ndim == 3 and parameter.shape[0] == experts)
        if routed and not any("shared" in part for part in names):
            if not isinstance(experts, int) or not isinstance(active, int):
                return None
            share = active / experts
        if parameter not in looked_up and not name.startswith(outer):
            total += (6 if parameter.requires_grad else 4) * share * _numel(parameter)
    return total + 12.0 * sum(_attention_size(layer, text, seq_length) for layer in _attention_layers(model, outer))
