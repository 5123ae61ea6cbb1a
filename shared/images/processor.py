"""Sizes and normalisation of images: what a model was trained with, and what final/ records."""

import os
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoImageProcessor, BitImageProcessor
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from shared.models.hub import from_hub
from shared.process.errors import ConfigError
from shared.process.printing import note

# what the processor of a model may do to images, or leave out, and ours does not
UNLIKE_OURS = {
    "do_resize": False,
    "do_rescale": False,
    "do_normalize": False,
    "do_flip_channel_order": True,
    "rescale_offset": True,
    "do_pad": True,
}


def size_of(config: Any) -> int:
    """Height and width of the images that an architecture is for; 224, if it takes any."""
    timm = getattr(config, "pretrained_cfg", None) or {}
    size = getattr(config, "image_size", None) or timm.get("input_size") or 224
    return size[-1] if isinstance(size, list | tuple) else size


def processor_of(config: Any) -> Any:
    """The processor for a template's config."""
    name = config.model_name_or_path or config.config_name
    return image_processor(name, config.image_size, config.crop_pct)


def image_processor(name: str | None, image_size: int | None, crop_pct: float | None) -> Any:
    """The processor of evaluation and of final/: resize the short side, crop the centre, normalise.

    Args:
        name: model that gives sizes, mean, deviation and interpolation; None, or one without a
            processor: ImageNet's.
        image_size: height and width in pixels; None: the processor's, else the model's, or 224.
        crop_pct: share of the resized image that the crop keeps; None: the model's, else 0.875.
    """
    own: Any = None
    if name is not None:
        try:
            own = from_hub(AutoImageProcessor, name)
        except ConfigError:
            # it is there, but of no use
            if os.path.exists(os.path.join(name, "preprocessor_config.json")):
                raise
            note(f"warning: {name} has no image processor: ImageNet's mean and deviation are used")
    mean = list(IMAGENET_DEFAULT_MEAN)
    std = list(IMAGENET_DEFAULT_STD)
    resample = Image.Resampling.BICUBIC
    size = 224
    share = 0.875
    if hasattr(own, "data_config"):  # timm
        timm = own.data_config
        mean = list(timm["mean"])
        std = list(timm["std"])
        size = timm["input_size"][-1]
        share = timm["crop_pct"]
        resample = Image.Resampling[timm["interpolation"].upper()]
    elif own is None:
        size = size_of(from_hub(AutoConfig, name)) if name and not image_size else size
    else:
        mean = own.image_mean or mean
        std = own.image_std or std
        resample = own.resample if own.resample is not None else resample
        edges = dict(own.size or {})
        size = resized = edges.get("shortest_edge") or edges.get("height") or size
        own_pct = getattr(own, "crop_pct", None)
        if getattr(own, "do_center_crop", None):
            size = dict(own.crop_size or {}).get("height") or resized
            share = size / int(resized / (own_pct or 1))
        elif own_pct:  # ConvNeXt's, which does not crop from 384 pixels on
            share = own_pct if resized < 384 else 1.0
        share = min(share, 1.0)  # else with black borders
        unlike = [
            f"{key}: {value}"
            for key, value in UNLIKE_OURS.items()
            if getattr(own, key, "") is value
        ]
        if unlike:
            note(f"warning: {name} sets {' and '.join(unlike)}, which is not done here")
    size = image_size or size
    share = crop_pct or share
    return BitImageProcessor(
        size={"shortest_edge": round(size / share)},
        crop_size={"height": size, "width": size},
        resample=int(resample),
        image_mean=mean,
        image_std=std,
    )


def timm_settings(processor: Any, config: Any) -> dict[str, Any]:
    """What final/config.json needs for the images that the model was trained on: timm's models read
    no other file.
    """
    if not getattr(config, "pretrained_cfg", None):
        return {}
    size = processor.crop_size["height"]
    resized = processor.size["shortest_edge"]
    images = {
        "input_size": [3, size, size],
        "crop_pct": size / (resized + 0.25),  # timm rounds the other way
        "crop_mode": "center",
        "interpolation": Image.Resampling(processor.resample).name.lower(),
        "mean": list(processor.image_mean),
        "std": list(processor.image_std),
    }
    return {"pretrained_cfg": config.pretrained_cfg | images}


class ToModel:
    """Normalises images on the device: uint8 [batch, 3, height, width] -> fp32, same shape."""

    def __init__(
        self, processor: Any, device: torch.device, *, channels_last: bool = False
    ) -> None:
        self.mean = 255 * torch.tensor(processor.image_mean, device=device)[:, None, None]
        self.std = 255 * torch.tensor(processor.image_std, device=device)[:, None, None]
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.order = "channels last" if channels_last else "channels first"

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return (
            (images.float() - self.mean).div_(self.std).contiguous(memory_format=self.memory_format)
        )
