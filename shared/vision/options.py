"""Flags of images in conversations."""

from dataclasses import dataclass

from shared.config.types import Count, Free


@dataclass(frozen=True)
class VisionConfig:
    """Images in conversations."""

    # Shrink images above so many pixels (height x width): fewer tokens, less memory. If not given,
    # the model's processor decides alone
    image_max_pixels: Count | None = None
    fetch_images: Free[bool] = False  # Download images that the data name by URL
    skip_bad_images: bool = False  # Leave out samples whose images cannot be read; else an error
