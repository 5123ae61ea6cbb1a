"""One optimizer step done right: when gradients are reduced, clipping, and what all ranks must agree on."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shared import faults, zero
from shared.checkpoint import Checkpointer, TrainState
from shared.config import STOP_SIGNALS, CleanExit, ConfigError, data_parallel_size, is_main_rank
from shared.data import Batch, Loader, Window
from shared.exits import Stopped, is_out_of_memory, stop_at_once
from shared.launch import say
from shared.optim import fill_state
from shared.parallel import end_step, gradient_norm, keeps_gradients, scale_gradients
from shared.weights import persistent_buffers

T = TypeVar("T")


class Longest(Protocol):
    """A `data.Loader`, or anything else that knows its longest micro-batch."""

    per_device: int

    def longest(self, rows: int) -> Batch: ...


class NonFiniteError(CleanExit):
    """Loss or gradient is not finite, too often. All ranks see it together; no weight was changed by it."""

    exit_code = 4


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


class _OnItsWay:
    """A small tensor's copy to the host. Reading it waits for what came before it on the device, not for what followed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.values = tensor.to("cpu", non_blocking=tensor.is_cuda)  # then to pinned memory
        self.arrived = None
        if tensor.is_cuda:
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def read(self) -> Any:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values.tolist()


class Guard:
    """What all ranks agree on once a step: is everything finite, and does a signal ask to stop.

    The answer is on the device, and the host fetches it one step later, while the device is busy with the next, so that
    it need not wait; but at once where steps take more than a second, or something else waits for the device. From the
    guard's making on, `STOP_SIGNALS` are noted and acted on between steps. Every rank makes one, before any
    reading process is started, and calls its methods alike.

    Args:
        accelerator: of the run.
        model: as prepared.
        state: of the run; skipped steps are counted in it.
        max_skipped: so many steps may be skipped in the whole run.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, state: TrainState, *, max_skipped: int) -> None:
        self.accelerator, self.model, self.state, self.max_skipped = accelerator, model, state, max_skipped
        self.received = self.agreed = self.slow = 0
        self.began = time.perf_counter()
        self.unread: Callable[[], None] | None = None  # acts on the last step's verdict
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        if not self.received and is_main_rank() and sys.stderr.isatty():
            with contextlib.suppress(OSError):
                os.write(2, b"\nstopping after this step, with a checkpoint\n")  # safe in a handler, as print is not
        if self.received != signal.SIGINT:  # Ctrl-C ends the launcher, too, whose SIGTERM follows
            self.received = number

    def _agree(self, good: torch.Tensor, *, slow: bool = False) -> tuple[torch.Tensor, Callable[[], bool]]:
        """Whether it is `good` on all ranks, as a bool on the device; the same as a function that fetches it, with the
        signal that any rank has received and whether any is `slow`."""
        if self.accelerator.num_processes == 1:
            alone, self.slow = _OnItsWay(good), int(slow)
            return good, lambda: bool(alone.read())
        verdict = torch.full((2,), -(2 * self.received + slow), dtype=torch.int32, device=good.device)
        verdict[0] = good
        dist.all_reduce(verdict, dist.ReduceOp.MIN)
        answer = _OnItsWay(verdict)

        def fetch() -> bool:
            everywhere, note = answer.read()
            self.agreed, self.slow = divmod(-note, 2)
            return bool(everywhere)

        return verdict[0] == 1, fetch

    def finite(self, losses: list[torch.Tensor], norm: torch.Tensor, window: Window) -> torch.Tensor:
        """Whether the losses of all ranks' micro-batches and the gradient are finite; if not, the update is to be skipped.

        With fp16 an infinite gradient is the loss scaler's business, and does not count: see `update`.

        Args:
            losses: of this rank's micro-batches, scalars.
            norm: of the gradient.
            window: what was computed, whose samples are named where the loss is not finite.

        Returns:
            bool scalar on the device, the same on all ranks.

        Raises:
            NonFiniteError: on all ranks, by what is known of the step before: see `settle`.
        """
        self.settle()
        scaler = self.accelerator.scaler
        values = losses if scaler is not None and scaler.get_scale() >= 1 else [*losses, norm]
        before, self.began = self.began, time.perf_counter()
        finite = torch.stack(values).sum(dtype=torch.float32).isfinite()
        everywhere, fetch = self._agree(finite, slow=self.began - before > 1)
        step, indices = self.state.step + 1, window.indices  # and not the batch, which takes memory

        def act() -> None:
            if not fetch():
                self._count_skipped(step, losses, norm, indices)

        self.unread = act
        return everywhere

    def settle(self) -> None:
        """Fetch the last step's verdict now: count an update that was skipped, and name its samples.

        Raises:
            NonFiniteError: on all ranks: the limit is reached, or what a skipped update leaves is already spoiled.
        """
        act, self.unread = self.unread, None
        if act is not None:
            act()

    def _count_skipped(self, step: int, losses: list[torch.Tensor], norm: torch.Tensor, indices: np.ndarray) -> None:
        guilty = [i for i, loss in enumerate(losses) if not torch.isfinite(loss)]
        each: list[Any] = gather_object([(self.accelerator.process_index, guilty, indices.tolist())])
        named = [(rank, i, rows[i]) for rank, own, rows in each for i in own if i < len(rows)]
        where = "; ".join(
            f"rank {rank}, micro-batch {i + 1}: {', '.join(str(s) for s in rows if s >= 0)}" for rank, i, rows in named[:8]
        )
        everything = sorted({s for _, _, rows in each for row in rows for s in row if s >= 0})
        samples = f"samples of {where}" if where else f"the gradient, not the loss; samples {str(everything)[1:-1]}"
        what = f"step {step}: loss or gradient is not finite (gradient norm {norm.item():g}; {samples})"
        buffers = [b for b in persistent_buffers(self.model).values() if b.is_floating_point()]
        sound = torch.tensor(all(bool(torch.isfinite(b).all()) for b in buffers), device=norm.device)
        if not self._agree(sound)[0]:
            raise NonFiniteError(f"{what}. The running statistics have taken it in: continue from the last checkpoint")
        if zero.is_used(self.accelerator):
            raise NonFiniteError(f"{what}. DeepSpeed has updated with it: continue from the last checkpoint")
        self.state.skipped += 1
        if self.state.skipped > self.max_skipped:
            raise NonFiniteError(
                f"{what}. No weight was changed, and {self.state.skipped - 1} steps had been skipped before: "
                "look at these samples, lower --learning_rate, or raise --max_skipped_steps"
            )
        say(f"warning: {what}; the update was skipped ({self.state.skipped} of at most {self.max_skipped})")

    def stop_if_asked(self, *, now: bool = False) -> None:
        """End the run if any rank was asked to: at the latest when `finite` was called for the step before.

        Args:
            now: go by this step's verdict and not the last one's, because what comes next waits for the device anyway
                (an evaluation), or needs the state to be true (a save).

        Raises:
            Stopped: on all ranks. The one who catches it saves a checkpoint.
            NonFiniteError: see `settle`.
        """
        if self.accelerator.num_processes == 1:
            self.agreed = self.received
        if now or self.slow or self.agreed:
            self.settle()
        if self.agreed:
            self.received = self.agreed  # also where another rank was told
            raise Stopped(f"stopped by {signal.Signals(self.agreed).name} at step {self.state.step}")

    def watch(self, windows: Iterable[T]) -> Iterator[T]:
        """Pass an evaluation's windows on, and end it if a signal asks to. Every rank calls this alike.

        Raises:
            Stopped: as `stop_if_asked` does.
        """
        self.settle()
        for i, window in enumerate(windows):
            if i % 8 == 0:
                self._ask()
            faults.point("evaluation")
            yield window

    def _ask(self) -> None:
        """`stop_if_asked`, outside of steps."""
        _, fetch = self._agree(torch.tensor(True, device=self.accelerator.device))
        fetch()
        self.stop_if_asked()

    def release(self) -> None:
        """From here on a signal ends the run at once: all that could be lost is saved. Every rank calls this."""
        self._ask()
        stop_at_once()
        if self.received:
            raise Stopped(f"stopped by {signal.Signals(self.received).name} at step {self.state.step}")


def largest_that_fits(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: list[Any],
    loader: Loader,
    loss: Callable[[Batch], torch.Tensor],
    *,
    multiple: int = 1,
) -> int:
    """Rows of a micro-batch that memory suffices for, at most the loader's; the loader gets that many from now on.

    They divide the loader's, and are a multiple of `multiple`, as the loader's have to be.

    Tries the longest sample with the optimizer's state and gradients in place, and halves where memory runs out. The
    global batch stays what it is, so what is learned does, too. Every rank calls this, after `parallel.prepare`; where
    weights are cut over ranks these have to have equally much free memory, or one would wait for another that gave up.

    Raises:
        OutOfMemoryError: a single row does not fit.
        ConfigError: under DeepSpeed, whose engine cannot take a step back.
    """
    if zero.is_used(accelerator):
        raise ConfigError("--find_batch_size does not work under DeepSpeed: `python -m shared plan` predicts what fits")
    asked = rows = loader.per_device
    with _trial(accelerator, model, optimizers):
        while not _fits(accelerator, model, optimizers, loss, loader.longest(rows)):
            fewer = [n for n in range(multiple, rows // 2 + 1, multiple) if rows % n == 0]
            if not fewer:
                raise torch.OutOfMemoryError(f"a micro-batch of {rows} does not fit")
            smaller = max(fewer)
            say(
                f"out of memory with {rows} at once; trying {smaller} at once, accumulated {asked // smaller} times as often"
            )
            rows = smaller
    loader.per_device = rows
    return rows


def warm_up(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: list[Any],
    loader: Longest,
    loss: Callable[[Batch], torch.Tensor],
) -> None:
    """Let DDP lay out its buckets before the first step. Every rank calls this, once in each start.

    It orders gradients anew after its first backward, and from three ranks on a gradient's place decides the order in
    which it is added up: without this, the first step after a resume would differ in the last bit.
    """
    if accelerator.num_processes < 3 or not isinstance(model, DistributedDataParallel):
        return
    batch = loader.longest(loader.per_device)
    with _trial(accelerator, model):
        for _ in range(2):  # the second forward moves the gradients into their new buckets
            backward(accelerator, loss(batch), 0.0)
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=not keeps_gradients(accelerator))


def dress_rehearsal(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: list[Any],
    loader: Longest,
    loss: Callable[[Batch], torch.Tensor],
    saver: Checkpointer,
    state: TrainState,
) -> None:
    """Do once what would otherwise fail after hours: the longest batch, a save and a load. Every rank calls this.

    Leaves weights, buffers and optimizers as they were. Call before the first step; the evaluation that comes next
    belongs to the rehearsal.

    Raises:
        OutOfMemoryError: the longest batch does not fit, with gradients and the optimizer's state in place.
        CheckpointError: a checkpoint cannot be written, or not be read back.
    """
    start = time.perf_counter()
    if zero.is_used(accelerator):
        raise ConfigError("--dress_rehearsal does not work under DeepSpeed, whose engine cannot take a step back")
    with _trial(accelerator, model, optimizers):
        if not _fits(accelerator, model, optimizers, loss, loader.longest(loader.per_device)):
            raise torch.OutOfMemoryError("the longest batch does not fit")
        trained = time.perf_counter()
        saver.save_and_load(state)
    saved = time.perf_counter()
    say(
        f"dress rehearsal: the longest batch, twice: {trained - start:.1f} s; a checkpoint of {saver.size() / 1e9:.2f} GB "
        f"saved and read back: {saved - trained:.1f} s"
    )


@contextlib.contextmanager
def _trial(accelerator: Accelerator, model: nn.Module, optimizers: Sequence[Any] = ()) -> Iterator[None]:
    """Give optimizers that have none a state, and take back in the end what trying changes: that, and BatchNorm's counts."""
    buffers = {b: b.clone() for b in persistent_buffers(accelerator.unwrap_model(model)).values()}
    fresh = [optimizer for optimizer in optimizers if not optimizer.state]
    for optimizer in fresh:
        fill_state(optimizer)
    try:
        yield
    finally:
        for optimizer in fresh:
            optimizer.state.clear()
        for buffer, value in buffers.items():
            buffer.copy_(value)


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
            with _reduced(accelerator, model, last=False):
                backward(accelerator, loss(batch), 0.0)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        enough = False
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=not keeps_gradients(accelerator))
    if not enough:
        end_step(model)
        gc.collect()
        if accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
    return bool(accelerator.reduce(torch.tensor(float(enough), device=accelerator.device), "mean") == 1)
