"""Training of what images pass through: the vision tower, and the projector behind it."""

import re
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shared.models.loading import outer_parts
from shared.process.errors import ConfigError
from shared.process.printing import note
from shared.text.options import FullVisionConfig

# In names of weights that turn what a tower sees into embeddings of the language model.
PROJECTOR = re.compile(r"projector|connector|merger|aligner|embed_vision|multi_modal")
OF_SOUND = re.compile(r"audio|speech|sound")


def train_vision(model: Any, samples: Any, config: FullVisionConfig) -> None:
    """Unfreeze the projector, or all that images pass through, with a learning rate of its own.

    Call it before the optimizer is built.

    Args:
        samples: conversations with images.

    Raises:
        ConfigError: the data have no images, or the model has no such part.
    """
    if config.train_vision == "none":
        return
    processor = getattr(samples, "processor", None)
    if processor is None:
        raise ConfigError(f"--train_vision {config.train_vision}: the data have no images")
    parts = tuple(f"{name}." for name in outer_parts(model) if not OF_SOUND.search(name))
    chosen = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.startswith(parts) and (config.train_vision == "all" or PROJECTOR.search(name))
    }
    if not chosen:
        raise ConfigError(
            f"--train_vision {config.train_vision}: {type(model).__name__} has no such part"
        )
    for parameter in chosen.values():
        parameter.requires_grad_(True)
        parameter.lr_scale = config.vision_lr_scale  # type: ignore[attr-defined]
    if not any(isinstance(parameter, DTensor) for parameter in chosen.values()):
        _freeze_unused(model, chosen, processor.inputs([[processor.blank()]]))
    trained = sum(p.numel() for p in chosen.values() if p.requires_grad)
    note(
        f"--train_vision {config.train_vision} trains {trained:,} parameters of "
        f"{', '.join(part.rstrip('.') for part in parts)}"
    )


def _freeze_unused(
    model: Any, chosen: dict[str, nn.Parameter], inputs: dict[str, torch.Tensor]
) -> None:
    """Freeze what gets no gradient from an image, such as a pooling head: DDP would wait for
    one.
    """
    device = next(iter(chosen.values())).device
    with torch.enable_grad():
        features: Any = ()
        if hasattr(model, "get_image_features"):
            features = model.get_image_features(**{k: v.to(device) for k, v in inputs.items()})
        # what the language model gets of them
        if hasattr(features, "pooler_output"):
            features = [features.pooler_output, getattr(features, "deepstack_features", None)]
        leaves = tree_leaves(features, is_leaf=lambda value: isinstance(value, dict))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        sums = [tensor.float().sum() for tensor in tensors if tensor.requires_grad]
        if not sums:
            raise ConfigError(
                f"--train_vision: {type(model).__name__} cannot be asked what it sees"
            )
        torch.stack(sums).sum().backward()
    for parameter in chosen.values():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None
