"""One optimizer step done right: when gradients are reduced, clipping with a guard, and the signal to stop."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shared import zero
from shared.config import CleanExit, ConfigError, data_parallel_size
from shared.data import STOP_SIGNALS, Batch, Loader
from shared.launch import say
from shared.optim import fill_state
from shared.parallel import end_step, gradient_norm, keeps_gradients, scale_gradients
from shared.weights import persistent_buffers


class NonFiniteError(CleanExit):
    """The gradient is not finite. All ranks see it together, before any weight has changed."""

    exit_code = 4


class Stopped(CleanExit):
    """A signal asked the run to stop, and it has saved a checkpoint. The same command again continues."""

    exit_code = 143

    def __init__(self, signal_: StopSignal, run_dir: Path, step: int) -> None:
        again = f"the same command with --output_dir {run_dir} continues"
        super().__init__(f"stopped by {signal_.name} at step {step}, after a checkpoint; {again}")


@contextlib.contextmanager
def accumulate(accelerator: Accelerator, model: nn.Module, *, last: bool) -> Iterator[None]:
    """Reduce gradients over ranks in the backward of a window's last micro-batch only. Every rank enters alike.

    FSDP reduces in every one, or each rank would hold whole gradients meanwhile; over HSDP's groups in the last.
    """
    accelerator.sync_gradients = last  # DeepSpeed's engine steps in the last backward
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)
        last = True
    with contextlib.nullcontext() if last else accelerator.no_sync(model):
        yield


def loss_scale(num_targets: int) -> float:
    """What to multiply a micro-batch's summed loss by, so that the reduced gradient is that of the global mean.

    The mean runs over all `num_targets` of the global batch, whatever each rank and micro-batch holds of them. DDP
    and FSDP then average over the ranks that read different data, which the factor undoes.
    """
    return data_parallel_size() / max(1, num_targets)


def clip_gradients(accelerator: Accelerator, model: nn.Module, max_norm: float, *, step: int) -> torch.Tensor:
    """Scale the gradients down to a global L2 norm of `max_norm`, if that is not 0, and return their norm before.

    Every rank calls this, once a step and before the optimizer. Reads the norm on the host: the guard must know it
    before the weights change.

    Returns:
        Scalar tensor, the same on all ranks.

    Raises:
        NonFiniteError: on all ranks, if any rank's gradient is NaN or infinite. With fp16, where the loss scaler
            skips such steps and lowers its scale, nothing is raised.
    """
    if zero.is_used(accelerator):  # which has clipped and stepped in the last backward
        norm = torch.tensor(float(accelerator.deepspeed_engine_wrapped.get_global_grad_norm()))
    else:
        accelerator.unscale_gradients()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = gradient_norm(accelerator, gradients)
        if max_norm:
            shrink = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            scale_gradients(gradients, shrink)
    if accelerator.scaler is None and not torch.isfinite(norm):
        raise NonFiniteError(
            f"step {step}: the gradient norm is {norm.item()}; no weight was changed and saved checkpoints are good. "
            "Lower --learning_rate, or look at this step's data"
        )
    return norm


def update(accelerator: Accelerator, optimizers: list[Any]) -> None:
    """Step all optimizers and clear the gradients.

    The inner ones are driven directly: with fp16, Accelerate's wrappers would each update the loss scale, so that a
    second optimizer's gradients were unscaled twice.
    """
    if zero.is_used(accelerator):
        return
    scaler = accelerator.scaler
    for optimizer in optimizers:
        inner = getattr(optimizer, "optimizer", optimizer)
        if scaler is None:
            inner.step()
        else:
            scaler.step(inner)
        inner.zero_grad(set_to_none=not keeps_gradients(accelerator))
    if scaler is not None:
        scaler.update()


def largest_that_fits(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: list[Any],
    loader: Loader,
    loss: Callable[[Batch], torch.Tensor],
) -> int:
    """Rows of a micro-batch that memory suffices for, at most the loader's; the loader gets that many from now on.

    Tries the longest sample with the optimizer's state and gradients in place, and halves where memory runs out. The
    global batch stays what it is, so what is learned does, too. Every rank calls this, after `parallel.prepare`; where
    weights are cut over ranks these have to have equally much free memory, or one would wait for another that gave up.

    Raises:
        OutOfMemoryError: a single row does not fit.
        ConfigError: under DeepSpeed, whose engine cannot take a step back.
    """
    if zero.is_used(accelerator):
        raise ConfigError("--find_batch_size does not work under DeepSpeed: `python -m shared plan` predicts what fits")
    inner = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
    fresh = [optimizer for optimizer in inner if not optimizer.state]
    for optimizer in fresh:
        fill_state(optimizer)
    buffers = {b: b.clone() for b in persistent_buffers(accelerator.unwrap_model(model)).values()}
    asked = rows = loader.per_device
    while not _fits(accelerator, model, inner, loss, loader.longest(rows)):
        if rows == 1:
            raise torch.OutOfMemoryError("a micro-batch of 1 does not fit")
        smaller = max(n for n in range(1, rows // 2 + 1) if rows % n == 0)
        say(f"out of memory with {rows} at once; trying {smaller} at once, accumulated {asked // smaller} times as often")
        rows = smaller
    for optimizer in fresh:
        optimizer.state.clear()
    for buffer, value in buffers.items():  # BatchNorm has counted the tries
        buffer.copy_(value)
    loader.per_device = rows
    return rows


def _fits(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: list[Any],
    loss: Callable[[Batch], torch.Tensor],
    batch: Batch,
) -> bool:
    enough = True
    try:
        for _ in range(2):  # the second beside the gradients of the first
            with accumulate(accelerator, model, last=False):
                accelerator.backward(loss(batch) * 0)
    except torch.OutOfMemoryError:
        enough = False
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=not keeps_gradients(accelerator))
    if not enough:
        end_step(model)
        gc.collect()
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
    return bool(accelerator.reduce(torch.tensor(float(enough), device=accelerator.device), "mean") == 1)


class StopSignal:
    """SIGTERM and SIGUSR1 on any rank stop all ranks after the same optimizer step.

    Make it before any reading process is started. Calling it is a collective: every rank asks once a step.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.received = 0
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        self.received = number

    def __call__(self) -> bool:
        """Whether any rank has been asked to stop."""
        if self.accelerator.num_processes > 1:
            flag = torch.tensor(self.received, device=self.accelerator.device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
            # A signal that arrives while the flag is read has set `received` meanwhile: it counts at the next step.
            agreed = int(flag)
            self.received = agreed or self.received
            return bool(agreed)
        return bool(self.received)

    @property
    def name(self) -> str:
        return signal.Signals(self.received).name if self.received else "no signal"
