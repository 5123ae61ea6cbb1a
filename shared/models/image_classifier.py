"""Image classifiers: made or loaded, frozen backbones."""

import inspect
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from transformers import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
)

from shared.models import pooled_head
from shared.models.blocks import heads
from shared.models.classifier import load_classifier, name_classes
from shared.models.hub import from_architecture, from_hub, override
from shared.models.resolution import at_resolution
from shared.process.errors import ConfigError
from shared.process.printing import note


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


def of_classifier(config: Any) -> Any:
    """The config of a classifier for the config of any vision model.

    A vision tower, such as CLIPVisionModel, has its class of classifiers through the config of the
    whole model. A model that transformers has no such class of gets one here, if it has pooled
    features.
    """
    if type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return config
    whole: Any
    for whole in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        if whole.sub_configs.get("vision_config") is type(config):
            return whole(vision_config=config.to_dict())
    model: Any = MODEL_MAPPING.get(type(config), None)
    if getattr(model, "main_input_name", "") == "pixel_values" and "WithPooling" in str(
        inspect.signature(model.forward).return_annotation
    ):
        name = model.__name__.removesuffix("Model") + pooled_head.SUFFIX
        made = getattr(pooled_head, name)
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING.register(type(config), made, exist_ok=True)
    return config


def from_scratch(config: Any, classes: tuple[str, ...], **options: Any) -> Any:
    """A classifier of these classes with random weights."""
    config = of_classifier(config)
    name_classes(config, classes)
    return from_architecture(
        AutoModelForImageClassification, config, dtype=torch.float32, **options
    )


def with_image_size(config: Any, overrides: str | None, size: int) -> Any:
    """An architecture for images of `size` pixels, with changes such as depths=[2,2,2,2]."""
    if "image_size=" in (overrides or ""):
        raise ConfigError("give --image_size in place of --config_overrides image_size")
    if hasattr(config, "image_size"):
        is_pair = isinstance(config.image_size, list | tuple)
        config.image_size = [size] * 2 if is_pair else size
    override(config, overrides)
    return config


def load_pretrained(
    name: str, classes: tuple[str, ...], *, image_size: int, **options: Any
) -> tuple[nn.Module, tuple[str, ...]]:
    """A classifier of these classes with the weights of `name`, which takes images of `image_size`
    pixels, and the order in which it scores the classes.

    Raises:
        ConfigError: it cannot be loaded, or weights of its backbone are missing.
    """
    own = from_hub(AutoConfig, name)
    config = of_classifier(own)
    config.problem_type = None
    if config is own:
        model, classes = load_classifier(
            AutoModelForImageClassification, name, config, classes, heads, **options
        )
    else:
        model = from_scratch(config, classes, **options)
        model.vision_model = from_hub(
            AutoModel, name, use_safetensors=True, dtype=torch.float32, **options
        )
        note(f"{name}: a new head for {len(classes)} classes (on resume the checkpoint has it)")
    return at_resolution(model, image_size), classes


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
