"""An image classifier at another resolution than that of its weights."""

import copy
import math
from typing import Any

import torch
from torch.nn import functional as F

from shared.models.blocks import as_in_an_evaluation
from shared.process.errors import ConfigError, first_line
from shared.process.printing import note


def at_resolution(model: Any, size: int) -> Any:
    """`model`, or one of its weights whose position embeddings are resampled, if it takes images of
    its own size only. timm resamples those of its models.

    Bicubic, as for ViT, arXiv 2010.11929, section 3.2. Every rank calls this, with the whole model.

    Args:
        size: height and width of the images in pixels.

    Raises:
        ConfigError: it does not take them, and position embeddings are not the only reason.
    """
    if hasattr(getattr(model, "timm_model", None), "set_input_size"):
        model.timm_model.set_input_size(img_size=(size, size))
        model.config.model_args = (model.config.model_args or {}) | {"img_size": size}
        return model
    try:
        with torch.no_grad(), as_in_an_evaluation(model):
            model(pixel_values=torch.zeros(1, 3, size, size))
        return model
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        problem = ConfigError(
            f"--image_size {size}: {type(model).__name__} does not take it ({first_line(error)})"
        )
    config = copy.deepcopy(model.config)
    of_images = getattr(config, "vision_config", config)
    if not isinstance(getattr(of_images, "image_size", None), int):
        raise problem
    of_images.image_size = size
    other = type(model)(config).train(model.training)
    weights = model.state_dict()
    for name, wanted in other.state_dict().items():
        if weights[name].shape != wanted.shape:
            if "position_embedding" not in name:
                raise problem
            weights[name] = resample(weights[name], wanted, (size // of_images.patch_size) ** 2)
    other.load_state_dict(weights)
    note(f"the position embeddings are resampled for images of {size} x {size} pixels")
    return other


def resample(embeddings: torch.Tensor, wanted: torch.Tensor, patches: int) -> torch.Tensor:
    """Position embeddings for another number of patches; those of other tokens, which come first,
    stay.

    Args:
        embeddings: [1, tokens, width] or [tokens, width], of a square of patches.
        wanted: of the shape that they are to have.
        patches: of these tokens: the last ones, a square, too.
    """
    width = embeddings.shape[-1]
    others, square = embeddings.view(-1, width).tensor_split([wanted.shape[-2] - patches])
    picture = square.view(1, math.isqrt(len(square)), -1, width).movedim(-1, 1)
    size = [math.isqrt(patches)] * 2
    picture = F.interpolate(picture, size=size, mode="bicubic", antialias=True)
    return torch.cat([others, picture[0].flatten(1).T]).view_as(wanted)
