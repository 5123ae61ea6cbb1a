"""BatchNorm over several processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm

from shared.config.options import BatchConfig
from shared.process.errors import ConfigError

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
