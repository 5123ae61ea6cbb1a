"""One optimizer step: forward and backward in micro-batches, clipping, the update."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shared.data.loader import Window
from shared.data.order import Batch
from shared.parallel.strategy import Strategy
from shared.process import faults
from shared.process.ranks import data_parallel_size


class Step:
    """One optimizer step, as `Run.steps` yields it. All ranks call the same methods in the same
    order.

    Args:
        strategy: how processes share the step.
        models: all models, as prepared.
        verdict: (losses of this rank's micro-batches, gradient norm, sample indices) -> a bool on
            the device: whether the losses and the norm are finite on all ranks.

    Attributes:
        number: counts optimizer steps from 1.
        indices: samples of this rank's micro-batches, -1 where a row counts for nothing.
        num_targets: targets of the global batch, over all ranks. The loss is the mean over them.
        learning_rate: of this step.
        grad_norm: before clipping, a scalar on the device; None before `clip_gradients`.
        positions: labels read so far, those of padding included.
        waited: seconds spent reading the micro-batches.
        finite: whether losses and gradients were finite: a bool on the device, the same on all
            ranks, or on those of a replica; None before `update`.
    """

    def __init__(
        self,
        strategy: Strategy,
        models: list[nn.Module],
        window: Window,
        *,
        number: int,
        rate: float,
        verdict: Callable[[list[torch.Tensor], torch.Tensor, Any], torch.Tensor],
    ) -> None:
        self.strategy = strategy
        self.models = models
        self.window = window
        self._verdict = verdict
        self.number = number
        self.learning_rate = rate
        self.num_targets = window.num_targets
        self.positions = 0
        self.waited = 0.0
        self._batches: list[Batch] | None = None
        self.indices: list[list[int]] = window.indices.tolist()
        # logged values by name, a scalar for each micro-batch
        self.sums: dict[str, list[torch.Tensor]] = {}
        self.means: dict[str, float] = {}  # logged values that are the same on all ranks
        self._losses: list[torch.Tensor] = []
        self.grad_norm: torch.Tensor | None = None
        self._norm: torch.Tensor | None = None  # since the last update
        self.finite: torch.Tensor | None = None
        self.is_logged = False

    @property
    def scale(self) -> float:
        """What to multiply a micro-batch's summed loss by, so that the reduced gradient is that of
        the global mean.

        The mean runs over all `num_targets` of the global batch, however they are distributed over
        ranks and micro-batches. DDP and FSDP average over the ranks that read different data. The
        factor undoes that.
        """
        return data_parallel_size() / max(1, self.num_targets)

    def micro_batches(self) -> Iterator[Batch]:
        """Read and yield each micro-batch. Gradients are reduced over ranks in the backward pass of
        the last.
        """
        for i, batch in enumerate(self._read() if self._batches is None else self._batches):
            with reduced(self.strategy.accelerator, self.models, last=i + 1 == len(self.indices)):
                yield batch

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
            labels = batch.get("row_labels", batch["labels"])
            self.positions += len(labels) if labels.is_floating_point() else labels.numel()
            yield batch
            start = time.perf_counter()

    def use(self, batches: list[Batch], num_targets: int, indices: list[list[int]]) -> None:
        """Take other micro-batches than the data's, such as answers that were just sampled. Before
        `micro_batches`.

        Args:
            batches: this rank's, on its device; as many on all ranks.
            num_targets: of all ranks' batches together.
            indices: of each batch, the samples that its rows are of.
        """
        self._batches = batches
        self.indices = indices
        self.num_targets = num_targets
        self.positions = sum(batch["labels"].numel() for batch in batches)

    def backward(self, loss: torch.Tensor, name: str = "loss") -> None:
        """Add the gradients of `loss`, a scalar summed over the micro-batch's targets. It is logged
        as `name`.
        """
        self.strategy.backward(loss, self.scale)
        self.record(loss, name)

    def record(self, loss: torch.Tensor, name: str = "loss") -> None:
        """Count a loss whose backward pass has run already, as in a pipeline."""
        self._losses.append(loss.detach())
        self.log(**{name: loss})

    def log(self, **sums: torch.Tensor) -> None:
        """Log more values of a micro-batch: scalars summed over its targets, as the loss is."""
        self._require_open()
        for name, value in sums.items():
            self.sums.setdefault(name, []).append(value.detach())

    def log_means(self, **values: float) -> None:
        """Log more values of the step, the same on all ranks. The log has their mean over the steps
        that gave one.
        """
        self._require_open()
        self.means |= values

    def _require_open(self) -> None:
        if self.is_logged:
            raise RuntimeError("the step is logged: log its values before an evaluation")

    def clip_gradients(self, max_norm: float, model: nn.Module | None = None) -> torch.Tensor:
        """Scale gradients down to a global L2 norm of `max_norm`; 0 turns that off. Returns the
        norm before clipping.

        Args:
            model: the model to clip; None: all prepared models together.
        """
        models = self.models if model is None else [model]
        self.grad_norm = self._norm = self.strategy.clip(models, max_norm)
        return self.grad_norm

    def update(self, optimizers: list[Any]) -> None:
        """Step the optimizers and clear the gradients. If loss or gradient is not finite on any
        rank, all ranks skip the update. May be called again, with other optimizers.
        """
        norm = self.clip_gradients(0) if self._norm is None else self._norm
        self._norm = None
        finite = self._verdict(self._losses, norm, self.indices)
        self.strategy.update(optimizers, finite, norm)
        self.finite = finite if self.finite is None else self.finite & finite


@contextlib.contextmanager
def reduced(accelerator: Accelerator, models: Sequence[nn.Module], *, last: bool) -> Iterator[None]:
    """Reduce the gradients of a backward pass in this block over ranks only if it is the `last`.

    FSDP reduces in every one: otherwise each rank would store unsharded gradients. HSDP reduces
    between its groups in the last.
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
