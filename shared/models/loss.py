"""The loss of a language model, and log-probabilities of its targets.

If a batch has `targets`, logits are computed only for them, not for prompts and padding. Where a
model has a `FusedHead` (see fused_head.py), the labels are left to it, and it computes the loss.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shared.data.order import IGNORED, Batch
from shared.models.attention import forward_rows
from shared.models.counts import experts_of
from shared.models.loading import without_adapters

# Of a chunk if the head is trained, also of more logits than usual: each chunk adds to a gradient
# of the head's size. Twice as many were 1.5 % faster (1.2B, H200), but take 2 GB more of a small
# model with a large vocabulary.
MIN_TOKENS = 1024
# routes by pairs of keys; does not return its router's logits
NOT_BALANCED = ("doge", "llama4_text")


def causal_lm_loss(
    model: nn.Module, batch: Batch, *, log: Callable[..., None] | None = None
) -> torch.Tensor:
    """Cross-entropy summed over this micro-batch's target tokens. The caller divides by the global
    batch's number of them.

    In training, its gradient includes that of `balancing_loss` times `router_aux_loss_coef`, if the
    model's config asks for that (`output_router_logits`). Its value does not.

    Args:
        model: returns logits, [batch, seq, vocab], or the loss itself after `fuse_head`.
        batch: `input_ids`, and `labels`: [batch, seq], the next token of each position or -100. Has
            `position_ids` only if rows hold several documents. May have `targets`: [any], the
            indices of the flattened labels that are not -100, ascending; `cu_seqlens`, see
            `loader.cu_seqlens_of`; and `filled`: [batch], the tokens of each row without padding.
        log: called with aux_loss, the balancing loss, if there is one.

    Returns:
        Scalar, fp32.
    """
    labels = batch["labels"].flatten()
    outputs = _forward_with_labels(model, batch, by_target=False)
    loss = outputs.logits
    if loss.ndim > 0:
        loss = F.cross_entropy(
            loss.flatten(0, 1).float(), labels, ignore_index=IGNORED, reduction="sum"
        )
    loss = over_ranks(batch, loss)
    if torch.is_grad_enabled() and getattr(outputs, "router_logits", None):
        config = without_adapters(model).config.get_text_config()
        if can_balance(config):
            from shared.extras.experts.balancing import balancing_loss

            aux_loss = balancing_loss(outputs.router_logits, batch, experts_of(config)[1])
            loss = loss + config.router_aux_loss_coef * (aux_loss - aux_loss.detach())
            if log is not None:
                log(aux_loss=aux_loss)
    return loss


def _forward_with_labels(model: nn.Module, batch: Batch, *, by_target: bool) -> Any:
    fused: Any = getattr(model, "fused_head", None)
    if fused is None:
        return forward_rows(model, batch)
    fused.asked = batch["labels"].flatten(), batch.get("targets"), by_target
    try:
        return forward_rows(model, batch)
    finally:
        fused.asked = fused.result = None


def log_probabilities(
    model: nn.Module, batch: Batch, groups: torch.Tensor, count: int
) -> torch.Tensor:
    """Log-probabilities of a batch's target tokens, summed over groups of them.

    Args:
        model, batch: as for `causal_lm_loss`.
        groups: [batch, seq] int64, the group of each position, such as the number of its answer.
        count: of groups.

    Returns:
        [count], fp32; 0 for a group without targets.
    """
    groups = groups.flatten()
    if (targets := batch.get("targets")) is not None:
        groups = groups[targets]
    found = target_log_probabilities(model, batch)
    return over_ranks(batch, found.new_zeros(count).index_add(0, groups, found))


def target_log_probabilities(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The log-probability of each of a batch's target tokens.

    Args:
        model, batch: as for `causal_lm_loss`.

    Returns:
        [targets], fp32, in the order of `targets`; without `targets` [batch * seq], 0 where the
        label is -100.
    """
    labels = batch["labels"].flatten()
    targets = batch.get("targets")
    found = _forward_with_labels(model, batch, by_target=True).logits
    if found.ndim == 1:
        return found
    logits = found.flatten(0, 1)
    if targets is not None:
        labels = labels[targets]
        logits = logits.index_select(0, targets)
    return log_probabilities_in_chunks(logits, labels, lambda part: part, MIN_TOKENS)


def can_balance(config: Any) -> bool:
    """Whether `balancing_loss` works for a model with this config."""
    text = config.get_text_config()
    has_settings = (
        hasattr(text, "output_router_logits")
        and getattr(text, "router_aux_loss_coef", None) is not None
    )
    return has_settings and all(experts_of(text)) and text.model_type not in NOT_BALANCED


def over_ranks(batch: Batch, value: torch.Tensor) -> torch.Tensor:
    """The sum over whole rows of what `value` sums over the batch's tokens: they differ where ranks
    share rows. Every rank calls this.
    """
    if "row_labels" not in batch:
        return value
    from shared.extras.sequence.sequence import sum_over_ranks

    return sum_over_ranks(value)


def log_probabilities_in_chunks(
    states: torch.Tensor,
    labels: torch.Tensor,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    size: int,
) -> torch.Tensor:
    """The log-probability of each token's label, [tokens]; 0 where it is -100. The backward pass
    computes each chunk's logits again.

    Args:
        states: [tokens, width].
        labels: [tokens].
        logits_of: states of a chunk -> its logits.
        size: tokens of a chunk.
    """

    def chunk(part: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        left_out = label == IGNORED
        log_probs = F.log_softmax(
            logits_of(part.masked_fill(left_out[:, None], 0.0)), -1, dtype=torch.float32
        )
        return (
            log_probs.gather(-1, label.clamp(min=0)[:, None]).squeeze(-1).masked_fill(left_out, 0.0)
        )

    parts = zip(states.split(size), labels.split(size), strict=True)
    return torch.cat([checkpoint(chunk, part, label, use_reentrant=False) for part, label in parts])
