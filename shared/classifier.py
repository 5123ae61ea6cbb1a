"""What image classifiers need besides their data: heads, BatchNorm over ranks, mixed images, export."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, BitImageProcessor
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from shared import model as models
from shared.config import ConfigError, first_line
from shared.data import IGNORED
from shared.launch import say
from shared.options import BatchConfig

# Heads -----------------------------------------------------------------------------------------------------------------


def load_pretrained(name: str, classes: tuple[str, ...], **options: Any) -> tuple[nn.Module, tuple[str, ...]]:
    """A classifier of these classes with the weights of `name`, and the order in which it scores them.

    If its labels are these classes, its head is kept, and its order with it. Otherwise it gets a new head: also where
    only the names differ, since the old head means other things.

    Raises:
        ConfigError: it cannot be loaded, or weights of its backbone are missing.
    """
    config = models.from_hub(AutoConfig, name)
    known = config.id2label
    keeps_head = set(known.values()) == set(classes) and len(known) == len(classes)
    if keeps_head:
        classes = tuple(known[number] for number in range(len(classes)))
    name_classes(config, classes)
    model, info = models.from_hub(
        AutoModelForImageClassification,
        name,
        config=config,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        use_safetensors=True,
        dtype=torch.float32,
        **options,
    )
    own = {id(p) for module in models.heads(model) for p in module.parameters()}
    of_head = {key for key, p in model.named_parameters() if id(p) in own}
    lost = {key if isinstance(key, str) else key[0] for key in [*info["missing_keys"], *info["mismatched_keys"]]} - of_head
    if lost:
        raise ConfigError(f"{name}: {len(lost)} weights of the backbone are missing or of another shape: {min(lost)}")
    if not keeps_head:
        for module in models.heads(model):
            for part in module.modules():
                if isinstance(part, nn.Linear | nn.Conv2d):
                    nn.init.trunc_normal_(part.weight, std=0.02)
                    if part.bias is not None:
                        nn.init.zeros_(part.bias)
    say(f"{name}: {'its head is kept' if keeps_head else f'a new head for {len(classes)} classes'}")
    return model, classes


def name_classes(config: Any, classes: tuple[str, ...]) -> None:
    """Put the names of the classes, and so their number, into a model's config."""
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: number for number, name in config.id2label.items()}
    if hasattr(config, "label_names"):  # timm's own, which would win when the config is saved
        config.label_names = list(classes)


def make_shardable(model: Any) -> None:
    """Give Accelerate's FSDP2 what it asks of a model and image models lack: no input embeddings, names of blocks."""
    # Patch embeddings are in blocks already, or none are known.
    model.get_input_embeddings = lambda: None
    if not {type(module).__name__ for module in model.modules()} & set(model._no_split_modules or ()):
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
        model._no_split_modules = sorted({type(b).__name__ for blocks in lists if _alike(blocks) for b in blocks})


def _alike(modules: Any) -> bool:
    return len({type(module) for module in modules}) == 1 and any(True for module in modules for _ in module.parameters())


def freeze_backbone(model: nn.Module) -> None:
    """Leave only the head to be trained: linear probing. Raises ConfigError if it has no parameters."""
    trained = [p for module in models.heads(model) for p in module.parameters()]
    if not trained:
        raise ConfigError(f"{type(model).__name__} has no head that could be trained alone: drop --freeze_backbone")
    model.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)


def training_mode(model: nn.Module) -> None:
    """`model.train()`, but for modules of which nothing is trained: a frozen backbone's statistics and dropout rest."""
    model.train()
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            module.eval()


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
            own = models.from_hub(AutoImageProcessor, name)
        except ConfigError:
            if os.path.exists(os.path.join(name, "preprocessor_config.json")):  # which cannot be used
                raise
            say(f"warning: {name} has no image processor: ImageNet's mean and deviation are used")
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
        say(f"warning: {name} was trained with {', '.join(unusual)} in its image processor, which is not done here")
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


# BatchNorm -------------------------------------------------------------------------------------------------------------


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a trained part of the model mixes the images of a batch, so that their number matters."""
    return any(isinstance(m, _BatchNorm) and any(p.requires_grad for p in m.parameters()) for m in model.modules())


def synchronise_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """BatchNorm over the images of all ranks. Call it before the model is prepared.

    PyTorch's own, which has no CPU kernel; to rehearse on CPU, the same sums through autograd's collectives.
    """
    if device.type != "cpu":
        if hasattr(model, "timm_model"):  # whose BatchNorm layers hold activations, which PyTorch's converter drops
            from timm.layers import convert_sync_batchnorm

            return convert_sync_batchnorm(model)
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in model.modules():
        if type(module) is nn.BatchNorm2d and module.affine and module.track_running_stats:
            module.__class__ = _SyncBatchNormOnCPU
        elif isinstance(module, _BatchNorm):
            raise ConfigError(f"--sync_batchnorm cannot be rehearsed on CPU with this model's {type(module).__name__}")
    return model


class _SyncBatchNormOnCPU(nn.BatchNorm2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (self.training and dist.is_initialized()):
            return super().forward(input)
        count = torch.full((1,), input.numel() / input.shape[1])
        sums = all_reduce(torch.cat([input.sum((0, 2, 3)), count]))
        mean, count = sums[:-1] / sums[-1], sums[-1].detach()
        centred = input - mean[:, None, None]
        variance = all_reduce((centred * centred).sum((0, 2, 3))) / count
        with torch.no_grad():
            assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            rate = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
            self.running_mean.lerp_(mean, rate)
            self.running_var.lerp_(variance * count / (count - 1).clamp(min=1), rate)
        scale = (variance + self.eps).rsqrt() * self.weight
        return centred * scale[:, None, None] + self.bias[:, None, None]


def batch_norm_advice(model: nn.Module, batch: BatchConfig, world_size: int) -> str | None:
    """What to say when BatchNorm sees fewer images at a time than the optimizer step has; None if all is well."""
    if not has_batch_norm(model):
        return None
    synchronised = any(isinstance(m, nn.SyncBatchNorm | _SyncBatchNormOnCPU) for m in model.modules())
    seen = batch.micro_batch()[0] * (world_size if synchronised else 1)
    if seen >= min(batch.global_batch_size, 32):
        return None
    remedies = ["a larger --per_device_train_batch_size", "a model with LayerNorm or GroupNorm (ConvNeXt, Swin, ViT)"]
    if world_size > 1 and not synchronised:
        remedies.insert(0, "--sync_batchnorm")
    return (
        f"warning: BatchNorm takes its statistics from {seen} images at a time, not from the global batch of "
        f"{batch.global_batch_size}; what is learned depends on that number. Better: {', or '.join(remedies)}"
    )


# Mixing ----------------------------------------------------------------------------------------------------------------


def draw_mix(mixup_alpha: float, cutmix_alpha: float) -> torch.Tensor:
    """How to mix one image with its partner: [cut instead of blend, share that stays, box centre y and x], fp32."""
    cut = cutmix_alpha > 0 and (mixup_alpha <= 0 or bool(torch.rand(()) < 0.5))
    alpha = cutmix_alpha if cut else mixup_alpha
    share = torch.distributions.Beta(alpha, alpha).sample()
    return torch.stack([torch.tensor(float(cut)), share, *torch.rand(2)])


def mix(images: torch.Tensor, labels: torch.Tensor, draws: torch.Tensor, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blend each image with its neighbour (mixup), or paste a box of the neighbour in (CutMix), labels alike.

    Rows 2k and 2k + 1 are each other's partners. With an even micro-batch they are neighbours in the global batch on
    any number of processes, so the result does not depend on how the batch was divided. A row without partner stays.
    mixup: Zhang et al., arXiv 1710.09412. CutMix: Yun et al., arXiv 1905.04899.

    Args:
        images: [batch, channels, height, width], floating point.
        labels: [batch] class numbers, or -100 for a row that does not count.
        draws: [batch, 4] of `draw_mix`.
        classes: number of classes.

    Returns:
        (images as given, targets [batch, classes]: shares of the classes, all 0 in rows that do not count).
    """
    batch, _, height, width = images.shape
    own = torch.arange(batch, device=images.device)
    partner = own ^ 1
    partner = torch.where(partner < batch, partner, own)
    partner = torch.where(labels[partner] != IGNORED, partner, own)
    cut, share, centre_y, centre_x = draws.unbind(1)
    half = (1 - share).clamp(min=0).sqrt() / 2  # of the box's sides, as a share of the image's

    def inside(size: int, centre: torch.Tensor) -> torch.Tensor:
        place = (torch.arange(size, device=images.device) + 0.5) / size
        return (place - centre[:, None]).abs() < half[:, None]  # [batch, size]

    box = inside(height, centre_y)[:, :, None] & inside(width, centre_x)[:, None, :]
    kept = torch.where(cut.bool()[:, None, None], (~box).float(), share[:, None, None])  # [batch, height, width]
    mixed = torch.lerp(images[partner], images, kept[:, None].to(images.dtype))
    share = kept.mean((1, 2))[:, None]
    one_hot = F.one_hot(labels.clamp(min=0), classes)
    targets = one_hot[partner] * (1 - share) + one_hot * share
    return mixed, torch.where(labels[:, None] != IGNORED, targets, 0.0)


# Export ----------------------------------------------------------------------------------------------------------------


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=pixel_values).logits


def export_onnx(folder: Path, image_size: int) -> str:
    """Write `folder/model.onnx` for the model saved in `folder`: pixel_values [batch, 3, size, size] -> logits.

    For any batch size if the model can be traced so, else for one image. Call on one rank.

    Returns:
        A line about it.
    """
    import contextlib
    import io
    import warnings

    model = _Logits(AutoModelForImageClassification.from_pretrained(folder)).eval()
    images = torch.zeros(2, 3, image_size, image_size)
    any_batch: tuple[Any, ...] = ({0: torch.export.Dim("batch")},)
    problem = ""
    for example, shapes, size in ((images, any_batch, "any number of images"), (images[:1], None, "one image at a time")):
        try:
            # The exporter prints its progress and draws boxes around its errors.
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.onnx.export(
                    model,
                    (example,),
                    folder / "model.onnx",
                    dynamo=True,
                    input_names=["pixel_values"],
                    output_names=["logits"],
                    dynamic_shapes=shapes,
                    external_data=False,
                    verbose=False,
                )
            return f"model.onnx takes {size}"
        except Exception as error:  # the exporter's own types are not public
            while error.__cause__ is not None:
                error = error.__cause__  # type: ignore[assignment]
            problem = re.sub(r"\x1b\[[0-9;]*m", "", first_line(error))
    return f"warning: model.onnx could not be written ({problem}); everything else in final/ is complete"
