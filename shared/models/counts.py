"""Parameters and floating-point operations of a model."""

from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shared.process.errors import ConfigError, first_line


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
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = next((n for name in names if (n := getattr(text, name, None))), None)
    active = next((n for name in ("num_experts_per_tok", "moe_k", "moe_topk") if (n := getattr(text, name, None))), None)
    return experts, active


def flops_per_token(model: nn.Module, seq_length: float) -> float | None:
    """Floating-point operations of forward and backward a token, as MFU counts them (recomputation left out).

    6 N for trained matrices, 4 N for frozen ones that gradients pass through, plus 12 x layers x width x length for
    attention (PaLM, arXiv 2204.02311, appendix B). The input embedding is a look-up and counts nothing; the head counts for
    each token, also where only the targets' logits are computed. Of experts those count that a token is sent to; None where
    the config does not say how many of how many.

    Args:
        seq_length: tokens that see each other; of documents of several lengths the mean over their tokens.
    """
    text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    experts, active = experts_of(text)
    embedding = model.get_input_embeddings().weight  # type: ignore[operator, union-attr]
    head = model.get_output_embeddings()  # type: ignore[operator]
    tied = head is not None and head.weight is embedding
    total = 0.0
    for name, parameter in model.named_parameters():
        share = 1.0
        if "experts" in name.split(".") or (experts and parameter.ndim == 3 and parameter.shape[0] == experts):
            if not isinstance(experts, int) or not isinstance(active, int):
                return None
            share = active / experts
        if parameter is not embedding or tied:
            total += (6 if parameter.requires_grad else 4) * share * _numel(parameter)
    width = text.hidden_size
    if getattr(text, "qk_head_dim", None):  # latent attention: keys are wider than values
        width = text.num_attention_heads * (text.qk_head_dim + text.v_head_dim) / 2
    elif getattr(text, "head_dim", None):
        width = text.num_attention_heads * text.head_dim
    return total + 12.0 * text.num_hidden_layers * width * seq_length
