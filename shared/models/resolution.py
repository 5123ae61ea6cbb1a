"""An image classifier at another resolution than that of its weights."""

import copy
import math
from typing import Any

import torch
from torch.nn import functional as F

from shared.process.errors import ConfigError, first_line
from shared.process.printing import note


def at_resolution(model: Any, size: int) -> Any:
    """`model`, or one of its weights whose position embeddings are resampled, if it takes images of
    its own size only.

    Bicubic, as for ViT, arXiv 2010.11929, section 3.2. Every rank calls this, with the whole model.

    Args:
        size: height and width of the images in pixels.

    Raises:
        ConfigError: it does not take them, and position embeddings are not the only reason.
    """
    training = model.training
    try:
        with torch.no_grad():
            model.eval()(pixel_values=torch.zeros(1, 3, size, size))
        return model.train(training)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        problem = ConfigError(
            f"--image_size {size}: {type(model).__name__} does not take it ({first_line(error)})"
        )
    if hasattr(model, "timm_model"):
        if not hasattr(model.timm_model, "set_input_size"):
            raise problem
        model.timm_model.set_input_size(img_size=(size, size))
        model.config.model_args = (model.config.model_args or {}) | {"img_size": size}
    else:
        model = _resampled(model, size, problem)
    note(f"the position embeddings are resampled for images of {size} x {size} pixels")
    return model.train(training)


def _resampled(model: Any, size: int, problem: ConfigError) -> Any:
    config = copy.deepcopy(model.config)
    if not isinstance(getattr(config, "image_size", None), int):
        raise problem
    config.image_size = size
    made = type(model)(config)
    weights = model.state_dict()
    for name, wanted in made.state_dict().items():
        if weights[name].shape != wanted.shape:
            if "position_embedding" not in name or wanted.ndim != 3:
                raise problem
            weights[name] = resample(
                weights[name], wanted.shape[1], (size // config.patch_size) ** 2
            )
    made.load_state_dict(weights)
    return made


def resample(embeddings: torch.Tensor, length: int, patches: int) -> torch.Tensor:
    """Position embeddings of another number of patches; those of other tokens, which come first,
    stay.

    Args:
        embeddings: [1, tokens, width], of a square of patches.
        length: tokens that there are to be, of which the last `patches` are a square, too.

    Returns:
        [1, length, width].
    """
    others = embeddings[:, : length - patches]
    square = embeddings[:, length - patches :]
    before = math.isqrt(square.shape[1])
    after = math.isqrt(patches)
    picture = square.reshape(1, before, before, -1).permute(0, 3, 1, 2)
    picture = F.interpolate(picture, size=(after, after), mode="bicubic", antialias=True)
    return torch.cat([others, picture.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)
