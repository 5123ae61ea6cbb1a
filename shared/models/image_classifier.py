"""Image classifiers: made or loaded, frozen backbones, export."""

import contextlib
import inspect
import io
import re
import warnings
from pathlib import Path
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
from shared.models.classifier import keeps_its_head, name_classes, settle_head
from shared.models.hub import from_architecture, from_hub
from shared.models.resolution import at_resolution
from shared.process.errors import ConfigError, first_line


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
    name = getattr(model, "__name__", "")
    if getattr(model, "main_input_name", "") != "pixel_values" or not name.endswith("Model"):
        return config
    if "WithPooling" in str(inspect.signature(model.forward).return_annotation):
        made = getattr(pooled_head, name.removesuffix("Model") + pooled_head.SUFFIX)
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING.register(type(config), made, exist_ok=True)
    return config


def from_scratch(config: Any, classes: tuple[str, ...], *, image_size: int, **options: Any) -> Any:
    """A classifier of these classes with random weights, which takes images of `image_size`
    pixels.
    """
    name_classes(config, classes)
    model = from_architecture(
        AutoModelForImageClassification, config, dtype=torch.float32, **options
    )
    return at_resolution(model, image_size)


def load_pretrained(
    name: str, classes: tuple[str, ...], *, image_size: int, **options: Any
) -> tuple[nn.Module, tuple[str, ...]]:
    """A classifier of these classes with the weights of `name`, and the order in which it scores
    them.

    It takes images of `image_size` pixels: see `at_resolution`.

    If its labels are these classes, it keeps its head and its order. Otherwise it gets a new head,
    also if it has as many labels with other names: the old head means other things.

    Raises:
        ConfigError: it cannot be loaded, or weights of its backbone are missing.
    """
    own = from_hub(AutoConfig, name)
    config = of_classifier(own)
    keeps_head, classes = keeps_its_head(config, classes)
    keeps_head = keeps_head and config is own
    name_classes(config, classes)
    options |= {"dtype": torch.float32}
    info: dict[str, Any] = {"missing_keys": (), "mismatched_keys": ()}
    if config is own:
        any_head = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, info = from_hub(
            AutoModelForImageClassification,
            name,
            config=config,
            use_safetensors=True,
            **any_head,
            **options,
        )
    else:
        model = from_architecture(AutoModelForImageClassification, config, **options)
        tower = from_hub(AutoModel, name, use_safetensors=True, **options)
        (place,) = (place for place, part in model.named_children() if type(part) is type(tower))
        setattr(model, place, tower)
    settle_head(name, model, info, heads(model), keeps_head)
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


def export_onnx(folder: Path, image_size: int) -> str:
    """Write `folder/model.onnx` for the model saved in `folder`: pixel_values [batch, 3, size,
    size] -> logits.

    Any batch size works. Call on one rank.

    Returns:
        A line about it, a warning if the model cannot be exported.
    """
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    try:
        # The exporter prints its progress and draws boxes around its errors.
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                f=folder / "model.onnx",
                kwargs={"pixel_values": torch.zeros(2, 3, image_size, image_size)},
                dynamo=True,
                output_names=["logits"],
                dynamic_shapes={"pixel_values": {0: torch.export.Dim("batch")}},
                external_data=False,
                verbose=False,
            )
    except Exception as error:  # the exporter's own types are not public
        while error.__cause__ is not None:
            error = error.__cause__  # type: ignore[assignment]
        problem = re.sub(r"\x1b\[[0-9;]*m", "", first_line(error))
        return (
            f"warning: model.onnx could not be written ({problem}); everything "
            "else in final/ is complete"
        )
    return f"model.onnx takes any number of images of {image_size} x {image_size} pixels"
