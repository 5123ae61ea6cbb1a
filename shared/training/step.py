"""One optimizer step: when gradients are reduced, clipping, the update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shared.data.order import Batch
from shared.parallel import zero
from shared.parallel.gradients import gradient_norm, keeps_gradients, scale_gradients
from shared.process import faults
from shared.process.ranks import data_parallel_size

T = TypeVar("T")


def accumulate(accelerator: Accelerator, model: nn.Module, micro_batches: Sequence[Batch]) -> Iterator[Batch]:
    """Yield a window's micro-batches, of which each is to go forward and `backward` before the next. Every rank alike.

    Gradients are reduced over ranks in the last one's backward only. FSDP reduces in every one, or each rank would hold
    whole gradients meanwhile; over HSDP's groups in the last.
    """
    for i, batch in enumerate(micro_batches):
        with _reduced(accelerator, model, last=i + 1 == len(micro_batches)):
            yield batch


@contextlib.contextmanager
def _reduced(accelerator: Accelerator, model: nn.Module, *, last: bool) -> Iterator[None]:
    accelerator.sync_gradients = last  # DeepSpeed's engine steps in the last backward
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)
        last = True
    faults.point("micro_batch")
    with contextlib.nullcontext() if last else accelerator.no_sync(model):
        yield


def loss_scale(num_targets: int) -> float:
    """What to multiply a micro-batch's summed loss by, so that the reduced gradient is that of the global mean.

    The mean runs over all `num_targets` of the global batch, whatever each rank and micro-batch holds of them. DDP
    and FSDP then average over the ranks that read different data, which the factor undoes.
    """
    return data_parallel_size() / max(1, num_targets)


def backward(accelerator: Accelerator, loss: torch.Tensor, scale: float) -> None:
    """Add the gradients of a micro-batch's `loss` times `scale`. Every rank calls this, on what `accumulate` yields.

    Args:
        loss: scalar, summed over the micro-batch's targets.
        scale: see `loss_scale`.
    """
    if zero.is_used(accelerator) or accelerator.scaler is not None:  # which take a loss, no gradient
        accelerator.backward(loss * scale)
    else:  # equal to that bit for bit, and spares the device some small kernels
        loss.backward(torch.full_like(loss, scale))


def clip_gradients(accelerator: Accelerator, model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients down to a global L2 norm of `max_norm`, if that is not 0, and return their norm before.

    Every rank calls this, once a step and before the optimizer.

    Returns:
        Scalar tensor on the device, the same on all ranks; not finite where any rank's gradient is not.
    """
    if zero.is_used(accelerator):  # which has clipped and stepped in the last backward
        return torch.tensor(float(accelerator.deepspeed_engine_wrapped.get_global_grad_norm()), device=accelerator.device)
    accelerator.unscale_gradients()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = gradient_norm(accelerator, gradients)
    if max_norm:
        shrink = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        scale_gradients(gradients, shrink)
    return norm


def update(accelerator: Accelerator, optimizers: list[Any], finite: torch.Tensor, norm: torch.Tensor) -> None:
    """Step all optimizers if the step is `finite` (a bool on the device), and clear the gradients.

    With fp16 the gradient's `norm`, too, has to be finite: else none steps, where the scaler would let those step whose
    own gradients are, and lowers its scale.

    Fused AdamW's kernel looks at it itself and leaves weights and state as they were, so nothing waits for the device;
    for others, offloaded weights and fp16 the answer is fetched.
    """
    faults.point("update")
    if zero.is_used(accelerator):
        return
    scaler = accelerator.scaler
    if scaler is not None:
        finite = finite & norm.isfinite()
    for optimizer in optimizers:
        if scaler is None and _skips_by_itself(optimizer, finite.device):
            optimizer.found_inf = (~finite).float()
            optimizer.step()
            del optimizer.found_inf
        elif finite:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=not keeps_gradients(accelerator))
    if scaler is not None:  # once: Accelerate's wrappers would each do it, and unscale a second one's gradients twice
        scaler.update()


def _skips_by_itself(optimizer: Any, device: torch.device) -> bool:
    """Whether `step` heeds `found_inf`, as fused AdamW's kernel does; not for weights that are offloaded elsewhere."""
    if not (isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["fused"]):
        return False
    return all(group["params"][0].device == device for group in optimizer.param_groups)
