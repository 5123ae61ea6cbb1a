"""mixup and CutMix."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from shared.data.order import IGNORED

# Mixing ----------------------------------------------------------------------------------------------------------------


def draw_mix(mixup_alpha: float, cutmix_alpha: float) -> torch.Tensor:
    """How to mix one image with its partner: [cut instead of blend, share that stays, box centre y and x], fp32."""
    cut = cutmix_alpha > 0 and (mixup_alpha <= 0 or bool(torch.rand(()) < 0.5))
    alpha = cutmix_alpha if cut else mixup_alpha
    share = torch.distributions.Beta(alpha, alpha).sample()
    return torch.stack([torch.tensor(float(cut)), share, *torch.rand(2)])


def mix(images: torch.Tensor, labels: torch.Tensor, draws: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blend each image with its neighbour (mixup), or paste a box of the neighbour in (CutMix), labels alike.

    Rows 2k and 2k + 1 are each other's partners. With an even micro-batch they are neighbours in the global batch on
    any number of processes, so the result does not depend on how the batch was divided. A row without partner stays.
    mixup: Zhang et al., arXiv 1710.09412. CutMix: Yun et al., arXiv 1905.04899.

    Args:
        images: [batch, channels, height, width], floating point.
        labels: [batch] class numbers, or -100 for a row that does not count.
        draws: [batch, 4] of `draw_mix`.
        classes: number of classes.

    Returns:
        (images as given, targets [batch, classes]: shares of the classes, all 0 in rows that do not count).
    """
    batch, _, height, width = images.shape
    own = torch.arange(batch, device=images.device)
    partner = own ^ 1
    partner = torch.where(partner < batch, partner, own)
    partner = torch.where(labels[partner] != IGNORED, partner, own)
    cut, share, centre_y, centre_x = draws.unbind(1)
    half = (1 - share).clamp(min=0).sqrt() / 2  # of the box's sides, as a share of the image's

    def inside(size: int, centre: torch.Tensor) -> torch.Tensor:
        place = (torch.arange(size, device=images.device) + 0.5) / size
        return (place - centre[:, None]).abs() < half[:, None]  # [batch, size]

    box = inside(height, centre_y)[:, :, None] & inside(width, centre_x)[:, None, :]
    kept = torch.where(cut.bool()[:, None, None], (~box).float(), share[:, None, None])  # [batch, height, width]
    mixed = torch.lerp(images[partner], images, kept[:, None].to(images.dtype))
    share = kept.mean((1, 2))[:, None]
    one_hot = F.one_hot(labels.clamp(min=0), classes)
    targets = one_hot[partner] * (1 - share) + one_hot * share
    return mixed, torch.where(labels[:, None] != IGNORED, targets, 0.0)
