"""Flags of images in conversations."""

from dataclasses import dataclass
from typing import Literal

from shared.config.types import Count, Free, Positive


@dataclass(frozen=True)
class VisionConfig:
    """Images in conversations."""

    # Shrink images above so many pixels (height x width): fewer tokens, less memory. If not given,
    # the model's processor decides alone
    image_max_pixels: Count | None = None
    fetch_images: Free[bool] = False  # Download images that the data name by URL
    skip_bad_images: bool = False  # Leave out samples whose images cannot be read; else an error


@dataclass(frozen=True)
class FullVisionConfig(VisionConfig):
    """Images in conversations, and what of the model sees them."""

    # Train what images pass through: the projector behind the vision tower, or the tower, too
    train_vision: Literal["none", "projector", "all"] = "none"
    vision_lr_scale: Positive = 0.1  # Learning rate of these, as a factor on learning_rate
    # The demo shows images: a small model learns to read handwritten digits
    demo_images: bool = False
