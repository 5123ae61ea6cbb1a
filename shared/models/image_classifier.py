"""Image classifiers: made or loaded, frozen backbones, export."""

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification

from shared.models.blocks import heads
from shared.models.classifier import keeps_its_head, name_classes, settle_head
from shared.models.hub import from_architecture, from_hub
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

    If its labels are these classes, it keeps its head and its order. Otherwise it gets a new head,
    also if it has as many labels with other names: the old head means other things.

    Args:
        image_size: height and width in pixels. timm resamples position embeddings for it.

    Raises:
        ConfigError: it cannot be loaded, or weights of its backbone are missing.
    """
    config = from_hub(AutoConfig, name)
    keeps_head, classes = keeps_its_head(config, classes)
    name_classes(config, classes)
    model, info = from_hub(
        AutoModelForImageClassification,
        name,
        config=config,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        dtype=torch.float32,
        **options,
    )
    settle_head(name, model, info, heads(model), keeps_head)
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
        return (
            f"warning: model.onnx could not be written ({first_line(error.__cause__ or error)}); "
            "everything else in final/ is complete"
        )
    return f"model.onnx takes any number of images of {image_size} x {image_size} pixels"
