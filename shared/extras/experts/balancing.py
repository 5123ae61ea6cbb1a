"""The loss that lets experts be used equally."""

import torch

from shared.data.order import IGNORED, Batch
from shared.models.loss import over_ranks


def balancing_loss(
    router_logits: tuple[torch.Tensor, ...], batch: Batch, top_k: int
) -> torch.Tensor:
    """The auxiliary loss of Switch Transformer (arXiv 2101.03961, equations 4-6): experts x sum of
    share x probability.

    It is computed for each row and layer, so it does not depend on how the global batch is divided
    into micro-batches. It is the mean over layers, summed over rows; a row counts as often as it
    has targets. If all experts are used equally, it is `top_k` for each target. transformers pools
    the rows of a micro-batch, and all layers.

    Args:
        router_logits: of each layer, [batch * seq, experts].
        batch: `labels`: [batch, seq]. Tokens after a row's last target are padding. May be of
            `stretches.cut`.
        top_k: experts that a token is sent to.

    Returns:
        Scalar, fp32.
    """
    labels = batch["labels"]

    def weights_of(rows: Batch) -> torch.Tensor:
        used = ((rows["labels"] != IGNORED).flip(1).cumsum(1).flip(1) > 0).float()
        return used / used.sum(1, keepdim=True).clamp(min=1)

    if "row_labels" in batch:
        from shared.extras.sequence.sequence import over_rows

        weights = over_rows(batch, weights_of)[..., None]
    else:
        weights = weights_of(batch)[..., None]
    targets = over_ranks(batch, (labels != IGNORED).sum(1))
    by_row = torch.zeros(len(labels), device=labels.device)
    for logits in router_logits:
        probabilities = logits.float().reshape(*labels.shape, -1).softmax(-1)
        sent = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k).indices, 1.0)
        share = over_ranks(batch, (sent * weights).sum(1))
        probability = over_ranks(batch, (probabilities * weights).sum(1))  # [batch, experts]
        by_row = by_row + logits.shape[-1] * (share * probability).sum(1)
    return (by_row * targets).sum() / len(router_logits)
