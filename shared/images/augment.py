"""Augmentation of training images, and the preparation of validation images."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torchvision.transforms import v2

from shared.data.order import IGNORED, Row
from shared.images.decoding import decode_tensor
from shared.images.files import Images
from shared.images.options import RecipeConfig


def training_rows(images: Images, recipe: RecipeConfig, processor: Any) -> Callable[[Row], Row]:
    """Set how `images` are decoded for training, and return the `transform` of their Loader: see
    `train_row`.

    Args:
        recipe: its crop_min_scale and horizontal_flip are not None.
        processor: of `image_processor`; gives the size, the interpolation and the mean colour.
    """
    assert recipe.crop_min_scale is not None
    size = processor.crop_size["height"]
    augment = {
        "none": [],
        "randaugment": [v2.RandAugment(), v2.PILToTensor()],
        "trivialaugment": [v2.TrivialAugmentWide(), v2.PILToTensor()],
    }
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(
                size, scale=(recipe.crop_min_scale, 1.0), interpolation=processor.resample
            ),
            v2.RandomHorizontalFlip(recipe.horizontal_flip),
            *augment[recipe.auto_augment],
            v2.RandomErasing(
                recipe.random_erasing, value=[round(255 * mean) for mean in processor.image_mean]
            ),
        ]
    )
    # decoding and cropping are faster on tensors, the others on PIL images
    if recipe.auto_augment == "none":
        images.decode = decode_tensor
    narrowest = 3 / 4  # width to height of a crop by RandomResizedCrop
    # no crop is smaller than `size`
    images.at_least = math.ceil(size / math.sqrt(narrowest * recipe.crop_min_scale))
    return partial(train_row, transform=transform, recipe=recipe)


def train_row(row: Row, transform: Callable, recipe: RecipeConfig) -> Row:
    """An augmented image, uint8 [3, size, size]. All random draws depend on (seed, epoch, sample)
    alone.
    """
    row = {"pixel_values": transform(row["image"]), "labels": row["labels"]}
    return (
        {**row, "mix": draw_mix(recipe.mixup_alpha, recipe.cutmix_alpha)} if recipe.mixes else row
    )


def eval_row(row: Row, processor: Any) -> Row:
    """The image as final/'s own processor prepares it, still uint8 [3, size, size]: the device
    normalises it.
    """
    made = processor(row["image"], do_rescale=False, do_normalize=False, return_tensors="pt")
    return {"pixel_values": made["pixel_values"][0], "labels": row["labels"]}


def draw_mix(mixup_alpha: float, cutmix_alpha: float) -> torch.Tensor:
    """How to mix one image with its partner: [cut instead of blend, share that stays, box centre y
    and x], fp32.
    """
    cut = cutmix_alpha > 0 and (mixup_alpha <= 0 or bool(torch.rand(()) < 0.5))
    alpha = cutmix_alpha if cut else mixup_alpha
    share = torch.distributions.Beta(alpha, alpha).sample()
    return torch.stack([torch.tensor(float(cut)), share, *torch.rand(2)])


def mix(
    images: torch.Tensor, labels: torch.Tensor, draws: torch.Tensor, classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blend each image with its neighbour (mixup), or paste a box of the neighbour in (CutMix),
    labels alike.

    Rows 2k and 2k + 1 are each other's partners. With an even micro-batch they are neighbours in
    the global batch on any number of processes, so the result does not depend on how the batch was
    divided. A row without partner stays. mixup: Zhang et al., arXiv 1710.09412. CutMix: Yun et al.,
    arXiv 1905.04899.

    Args:
        images: [batch, channels, height, width], floating point.
        labels: [batch] class numbers, or [batch, classes] with 1 for each class of an image; -100
            in a row that does not count.
        draws: [batch, 4] of `draw_mix`.
        classes: number of classes.

    Returns:
        (images as given, targets [batch, classes]: shares of the classes, all 0 in rows that do not
        count).
    """
    batch, _, height, width = images.shape
    own = torch.arange(batch, device=images.device)
    partner = own ^ 1
    partner = torch.where(partner < batch, partner, own)
    counts = labels.reshape(batch, -1)[:, 0] != IGNORED
    partner = torch.where(counts[partner], partner, own)
    cut, share, centre_y, centre_x = draws.unbind(1)
    half = (1 - share).clamp(min=0).sqrt() / 2  # of the box's sides, as a share of the image's

    def inside(size: int, centre: torch.Tensor) -> torch.Tensor:
        place = (torch.arange(size, device=images.device) + 0.5) / size
        return (place - centre[:, None]).abs() < half[:, None]  # [batch, size]

    box = inside(height, centre_y)[:, :, None] & inside(width, centre_x)[:, None, :]
    # [batch, height, width]
    kept = torch.where(cut.bool()[:, None, None], (~box).float(), share[:, None, None])
    mixed = torch.lerp(images[partner], images, kept[:, None].to(images.dtype))
    share = kept.mean((1, 2))[:, None]
    one_hot = F.one_hot(labels.clamp(min=0), classes) if labels.ndim == 1 else labels
    targets = one_hot[partner] * (1 - share) + one_hot * share
    return mixed, torch.where(counts[:, None], targets, 0.0)
