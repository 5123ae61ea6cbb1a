"""Flags of images in conversations."""

from dataclasses import dataclass
from typing import Literal

from shared.config.types import Count, Free, Positive


@dataclass(frozen=True)
class VisionConfig:
    """Images in conversations."""

    # Shrink images of more pixels (height x width), for fewer tokens and less memory; if not given,
    # the model's processor decides
    image_max_pixels: Count | None = None
    fetch_images: Free[bool] = False  # Download images that records name by URL
    skip_bad_images: bool = False  # Leave out samples with damaged images; else they are an error


@dataclass(frozen=True)
class FullVisionConfig(VisionConfig):
    """Images in conversations, and what of the model sees them."""

    # Train the projector behind the vision tower; all: the tower, too
    train_vision: Literal["none", "projector", "all"] = "none"
    vision_lr_scale: Positive = 0.1  # Factor on the learning rate of what train_vision trains
    # Train the demo with images: a small model learns to read handwritten digits
    demo_images: bool = False
