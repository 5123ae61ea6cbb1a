"""Image classifiers: made or loaded, frozen backbones, export."""

from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification

from shared.models.blocks import heads
from shared.models.classifier import load_classifier, name_classes
from shared.models.hub import from_architecture, from_hub
from shared.process.errors import ConfigError


def channels_last(model: nn.Module, accelerator: Accelerator) -> bool:
    """Whether images and filters should be in NHWC order: convolutions in 16 bits on a GPU run
    several times faster so.

    Not under FSDP, which shards contiguous weights alone, nor for the one convolution that cuts an
    image into patches.
    """
    convolutions = sum(isinstance(module, nn.Conv2d) for module in model.modules())
    in_16_bits = accelerator.device.type == "cuda" and accelerator.mixed_precision in (
        "bf16",
        "fp16",
    )
    return in_16_bits and convolutions > 1 and accelerator.distributed_type != DistributedType.FSDP


def from_scratch(config: Any, classes: tuple[str, ...], **options: Any) -> Any:
    """A classifier of these classes with random weights."""
    name_classes(config, classes)
    return from_architecture(
        AutoModelForImageClassification, config, dtype=torch.float32, **options
    )


def load_pretrained(
    name: str, classes: tuple[str, ...], *, image_size: int, **options: Any
) -> tuple[nn.Module, tuple[str, ...]]:
    """A classifier of these classes with the weights of `name`, and the order in which it scores
    them.

    Args:
        image_size: height and width in pixels. timm resamples position embeddings for it.

    Raises:
        ConfigError: it cannot be loaded, or weights of its backbone are missing.
    """
    config = from_hub(AutoConfig, name)
    config.problem_type = None
    model, classes = load_classifier(
        AutoModelForImageClassification, name, config, classes, heads, **options
    )
    if hasattr(getattr(model, "timm_model", None), "set_input_size"):
        model.timm_model.set_input_size(img_size=(image_size, image_size))
        model.config.model_args = (model.config.model_args or {}) | {"img_size": image_size}
    return model, classes


def freeze_backbone(model: nn.Module) -> None:
    """Leave only the head to be trained: linear probing. Raises ConfigError if it has no
    parameters.
    """
    trained = [p for module in heads(model) for p in module.parameters()]
    if not trained:
        raise ConfigError(
            f"{type(model).__name__} has no head that could be trained "
            "alone: drop --freeze_backbone"
        )
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)


def training_mode(model: nn.Module) -> None:
    """`model.train()`, except for frozen modules: they neither drop out nor update statistics."""
    model.train()
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            module.eval()
