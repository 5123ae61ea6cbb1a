"""BatchNorm over several processes."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shared.config.options import BatchConfig
from shared.process.errors import ConfigError


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the trained part of a model has BatchNorm, whose result depends on the number of
    images in a batch.
    """
    return any(
        isinstance(m, _BatchNorm) and any(p.requires_grad for p in m.parameters())
        for m in model.modules()
    )


def synchronise_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """BatchNorm over the images of all ranks. Call it before the model is prepared.

    Raises:
        ConfigError: on CPU, for which PyTorch has no such BatchNorm.
    """
    if device.type == "cpu":
        raise ConfigError("--sync_batchnorm needs GPUs: drop it to rehearse on CPU")
    # its BatchNorm layers hold activations, which PyTorch's converter drops
    if hasattr(model, "timm_model"):
        from timm.layers import convert_sync_batchnorm

        return convert_sync_batchnorm(model)
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def batch_norm_advice(model: nn.Module, batch: BatchConfig, world_size: int) -> str | None:
    """A warning if BatchNorm sees fewer images at a time than the optimizer step has, else None."""
    if not has_batch_norm(model):
        return None
    synchronised = any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())
    seen = batch.micro_batch()[0] * (world_size if synchronised else 1)
    if seen >= min(batch.size, 32):
        return None
    return (
        f"warning: BatchNorm takes its statistics from {seen} images at a time, not from the "
        f"global batch of {batch.size}; the result depends on that number. Better: a "
        "larger --per_device_train_batch_size, --sync_batchnorm on several GPUs, or a model with "
        "LayerNorm or GroupNorm (ConvNeXt, Swin, ViT)"
    )
