"""What an image goes through before the model, in training and in use."""

from __future__ import annotations

import os
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, BitImageProcessor
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from shared.models.hub import from_hub
from shared.process.errors import ConfigError
from shared.process.printing import print_main

# Preprocessing ---------------------------------------------------------------------------------------------------------


def image_processor(name: str | None, image_size: int | None, crop_pct: float | None) -> Any:
    """What evaluation, and whoever loads final/, does to an image: resize the short side, crop the centre, normalise.

    Args:
        name: model whose own sizes, mean, deviation and interpolation are taken; None or one without: ImageNet's.
        image_size: height and width in pixels; None: the model's, else 224.
        crop_pct: share of the resized image that the crop keeps; None: the model's, else 0.875.
    """
    own: Any = None
    if name is not None:
        try:
            own = from_hub(AutoImageProcessor, name)
        except ConfigError:
            if os.path.exists(os.path.join(name, "preprocessor_config.json")):  # which cannot be used
                raise
            print_main(f"warning: {name} has no image processor: ImageNet's mean and deviation are used")
    mean, std, resample = list(IMAGENET_DEFAULT_MEAN), list(IMAGENET_DEFAULT_STD), Image.Resampling.BICUBIC
    own_size, own_pct, unusual = 224, 0.875, []
    if hasattr(own, "data_config"):  # timm
        timm = own.data_config
        mean, std, own_size, own_pct = list(timm["mean"]), list(timm["std"]), timm["input_size"][-1], timm["crop_pct"]
        resample = Image.Resampling[timm["interpolation"].upper()]
        unusual += [f"input_size: {timm['input_size']}"] if timm["input_size"][-2] != own_size else []
        unusual += [f"crop_mode: {timm['crop_mode']}"] if timm.get("crop_mode", "center") != "center" else []
    elif own is not None:
        mean, std = _normalisation(own, mean, std)
        resample = own.resample if own.resample is not None else resample
        sizes = (own.size, getattr(own, "crop_size", None))
        edges, crop = ({edge: pixels for edge, pixels in dict(given or {}).items() if pixels} for given in sizes)
        resized = edges.get("shortest_edge") or edges.get("height") or own_size
        flags = ("do_flip_channel_order", "rescale_offset", "include_top", "do_pad", "do_color_quantize")
        unusual += [flag for flag in flags if getattr(own, flag, None)]
        unusual += ["do_resize: false"] if getattr(own, "do_resize", None) is False else []
        if not {"shortest_edge", "height"} & set(edges) or edges.get("height") != edges.get("width"):
            unusual.append(f"size: {edges}")
        if getattr(own, "do_center_crop", None):
            own_size = crop.get("height") or resized
            if crop.get("height") != crop.get("width"):
                unusual.append(f"crop_size: {crop}")
            if type(own).__name__.startswith("Levit") and "shortest_edge" in edges:
                resized = int(256 / 224 * resized)
            own_pct = own_size / int(resized / (getattr(own, "crop_pct", None) or 1))
            if own_pct > 1:  # black borders
                unusual.append(f"a crop of {own_size} from {resized} pixels")
                own_pct = 1.0
        else:
            own_size, own_pct = resized, getattr(own, "crop_pct", None) or own_pct
            if resized >= 384 and hasattr(own, "crop_pct"):  # ConvNeXt's, which then does not crop
                own_pct = 1.0
    if unusual:
        print_main(f"warning: {name} was trained with {', '.join(unusual)} in its image processor, which is not done here")
    size, share = image_size or own_size, crop_pct or own_pct
    return BitImageProcessor(
        size={"shortest_edge": round(size / share)},
        crop_size={"height": size, "width": size},
        resample=int(resample),
        image_mean=mean,
        image_std=std,
    )


def _normalisation(own: Any, mean: list[float], std: list[float]) -> tuple[list[float], list[float]]:
    """Mean and deviation of the channels, of pixels between 0 and 1, that do what a processor does.

    Args:
        mean, std: those where it says none.
    """
    # (f x - m) / s = (x / 255 - m / 255 f) / (s / 255 f)
    factor = round(255 * (getattr(own, "rescale_factor", 1 / 255) if getattr(own, "do_rescale", True) else 1), 9)

    def channels(value: Any, otherwise: list[float]) -> list[float]:
        values = otherwise if value is None else [value] if isinstance(value, int | float) else list(value)
        return [v / factor for v in (values * 3 if len(values) == 1 else values)]

    if not getattr(own, "do_normalize", None):
        return channels(0.0, mean), channels(1.0, std)
    return channels(own.image_mean, mean), channels(own.image_std, std)


class ToModel:
    """uint8 images [batch, 3, height, width] on a device -> what the model takes: normalised fp32."""

    def __init__(self, processor: Any, device: torch.device, *, channels_last: bool = False) -> None:
        self.mean = 255 * torch.tensor(processor.image_mean, device=device)[:, None, None]
        self.std = 255 * torch.tensor(processor.image_std, device=device)[:, None, None]
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return (images.float() - self.mean).div_(self.std).contiguous(memory_format=self.memory_format)
