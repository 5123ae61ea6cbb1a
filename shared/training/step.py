"""One optimizer step: forward and backward in micro-batches, clipping, the update."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shared.data.loader import Window
from shared.data.order import Batch
from shared.parallel import zero
from shared.parallel.gradients import gradient_norm, keeps_gradients, scale_gradients
from shared.process import faults
from shared.process.ranks import data_parallel_size
from shared.training.muon import Muon


class Step:
    """One optimizer step, as `Run.steps` yields it. All ranks call the same methods in the same
    order.

    Args:
        verdict: (losses of this rank's micro-batches, gradient norm, sample indices) -> a bool on
            the device: whether the losses and the norm are finite on all ranks.
        group: the process group that shares the model, where there are replicas; else None.

    Attributes:
        number: of this optimizer step, from 1.
        num_targets: targets of the global batch, over all ranks. The loss is the mean over them.
        learning_rate: of this step.
        grad_norm: before clipping, a scalar on the device; None before `clip_gradients`.
        positions: of the labels read so far, padding included.
        waited: seconds that reading them has taken.
        finite: whether losses and gradients were finite: a bool on the device, the same on all
            ranks; None before `update`.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        models: Sequence[nn.Module],
        window: Window,
        *,
        number: int,
        rate: float,
        verdict: Callable[[list[torch.Tensor], torch.Tensor, Any], torch.Tensor],
        group: Any = None,
    ) -> None:
        self.accelerator = accelerator
        self.models = models
        self.window = window
        self._verdict = verdict
        self.number = number
        self.learning_rate = rate
        self.group = group
        self.num_targets = window.num_targets
        self.positions = 0
        self.waited = 0.0
        self._batches: list[Batch] | None = None
        self.scale = loss_scale(window.num_targets)
        # logged values by name, a scalar for each micro-batch
        self.sums: dict[str, list[torch.Tensor]] = {}
        self._losses: list[torch.Tensor] = []
        self.grad_norm: torch.Tensor | None = None
        self._is_clipped = False  # since the last update
        self.finite: torch.Tensor | None = None

    def micro_batches(self) -> Iterator[Batch]:
        """Read and yield each micro-batch. Gradients are reduced over ranks in the backward pass of
        the last.
        """
        batches = self._read() if self._batches is None else self._batches
        return accumulate(self.accelerator, self.models, batches, len(self.window.indices))

    @property
    def batches(self) -> list[Batch]:
        """All of this rank's micro-batches, held in memory: for a step that needs them at once, or
        more than once.
        """
        if self._batches is None:
            self._batches = list(self._read())
        return self._batches

    def _read(self) -> Iterator[Batch]:
        start = time.perf_counter()
        for batch in self.window.micro_batches:
            self.waited += time.perf_counter() - start
            # tokens or classes; numbers, or a yes or no for each class, are one target a row
            labels = batch["labels"]
            self.positions += len(labels) if labels.is_floating_point() else labels.numel()
            yield batch
            start = time.perf_counter()

    def backward(self, loss: torch.Tensor, name: str = "loss") -> None:
        """Add the gradients of `loss`, a scalar summed over the micro-batch's targets. It is logged
        as `name`.
        """
        backward(self.accelerator, loss, self.scale)
        self.record(loss, name)

    def record(self, loss: torch.Tensor, name: str = "loss") -> None:
        """Count a loss whose backward pass has run already, as in a pipeline."""
        self._losses.append(loss.detach())
        self.log(**{name: loss})

    def log(self, **sums: torch.Tensor) -> None:
        """Log more values of a micro-batch: scalars summed over its targets, as the loss is."""
        for name, value in sums.items():
            self.sums.setdefault(name, []).append(value.detach())

    def clip_gradients(self, max_norm: float, model: nn.Module | None = None) -> torch.Tensor:
        """Scale gradients down to a global L2 norm of `max_norm`; 0 turns that off. Returns the
        norm before clipping.

        Args:
            model: the model to clip; None: all prepared models together.
        """
        models = self.models if model is None else [model]
        self.grad_norm = clip_gradients(self.accelerator, models, max_norm, self.group)
        self._is_clipped = True
        return self.grad_norm

    def update(self, optimizers: list[Any]) -> None:
        """Step the optimizers and clear the gradients; skipped on all ranks where loss or gradient
        is not finite.
        """
        norm = (
            self.grad_norm
            if self.grad_norm is not None and self._is_clipped
            else self.clip_gradients(0)
        )
        self._is_clipped = False
        finite = self._verdict(self._losses, norm, self.window.indices)
        update(self.accelerator, optimizers, finite, norm)
        self.finite = finite if self.finite is None else self.finite & finite


def accumulate(
    accelerator: Accelerator,
    models: Sequence[nn.Module],
    micro_batches: Iterable[Batch],
    count: int,
) -> Iterator[Batch]:
    """Yield `count` micro-batches. Each goes forward and `backward` before the next. Every rank
    calls this alike.

    Gradients are reduced over ranks in the backward pass of the last. FSDP reduces in every one:
    otherwise each rank would store unsharded gradients. HSDP reduces between its groups in the
    last.
    """
    for i, batch in enumerate(micro_batches):
        with reduced(accelerator, models, last=i + 1 == count):
            yield batch


@contextlib.contextmanager
def reduced(accelerator: Accelerator, models: Sequence[nn.Module], *, last: bool) -> Iterator[None]:
    """Reduce the gradients of a backward pass in this block only if it is the `last`: see
    `accumulate`.
    """
    accelerator.sync_gradients = last  # DeepSpeed's engine steps in the last backward
    faults.point("micro_batch")
    with contextlib.ExitStack() as stack:
        for model in models:
            if isinstance(model, FSDPModule):
                model.set_requires_all_reduce(last)
            elif not last:
                stack.enter_context(accelerator.no_sync(model))
        yield


def loss_scale(num_targets: int) -> float:
    """What to multiply a micro-batch's summed loss by, so that the reduced gradient is that of the
    global mean.

    The mean runs over all `num_targets` of the global batch, however they are distributed over
    ranks and micro-batches. DDP and FSDP average over the ranks that read different data. The
    factor undoes that.
    """
    return data_parallel_size() / max(1, num_targets)


def backward(accelerator: Accelerator, loss: torch.Tensor, scale: float) -> None:
    """Add the gradients of a micro-batch's `loss` times `scale`. Every rank calls this, on what
    `accumulate` yields.

    Args:
        loss: scalar, summed over the micro-batch's targets.
        scale: see `loss_scale`.
    """
    if zero.is_used(accelerator) or accelerator.scaler is not None:  # they need the scaled loss
        accelerator.backward(loss * scale)
    else:  # the same result bit for bit with fewer kernels
        loss.backward(torch.full_like(loss, scale))


def clip_gradients(
    accelerator: Accelerator, models: Sequence[nn.Module], max_norm: float, group: Any = None
) -> torch.Tensor:
    """Scale the models' gradients down to a global L2 norm of `max_norm`, if that is not 0. Returns
    their norm before.

    Every rank calls this before the optimizer.

    Returns:
        Scalar tensor on the device, the same on all ranks; not finite where any rank's gradient is
        not.
    """
    if zero.is_used(accelerator):  # which has clipped and stepped in the last backward
        return torch.tensor(
            float(accelerator.deepspeed_engine_wrapped.get_global_grad_norm()),
            device=accelerator.device,
        )
    accelerator.unscale_gradients()
    gradients = [p.grad for model in models for p in model.parameters() if p.grad is not None]
    norm = gradient_norm(accelerator, gradients, group)
    if max_norm:
        shrink = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        scale_gradients(gradients, shrink)
    return norm


def update(
    accelerator: Accelerator, optimizers: list[Any], finite: torch.Tensor, norm: torch.Tensor
) -> None:
    """Step all optimizers if the step is `finite` (a bool on the device), and clear the gradients.

    With fp16 the gradient's `norm` has to be finite, too. If it is not, no optimizer steps and the
    loss scale falls. The scaler alone would skip only the optimizer with the bad gradients.

    Fused AdamW and Muon read `found_inf` on the device, so the host waits for nothing. For other
    optimizers, offloaded weights and fp16 the host reads `finite`.
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
    if scaler is not None:  # once: Accelerate's wrappers would do it once for each optimizer
        scaler.update()


def _skips_by_itself(optimizer: Any, device: torch.device) -> bool:
    """Whether `step` heeds `found_inf`, as fused AdamW's kernel does; not for weights that are
    offloaded elsewhere.
    """
    if not (
        isinstance(optimizer, Muon)
        or (isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["fused"])
    ):
        return False
    return all(group["params"][0].device == device for group in optimizer.param_groups)
