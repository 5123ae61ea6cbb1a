"""What all ranks agree on: which updates were skipped, and at which step a signal stops them."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import nn

from shared.models.weights import persistent_buffers
from shared.parallel.strategy import Strategy
from shared.process.errors import CleanExit
from shared.process.printing import print_main
from shared.process.ranks import is_main_rank
from shared.process.signals import STOP_SIGNALS
from shared.run.exits import Stopped, stop_at_once
from shared.run.state import TrainState


class NonFiniteError(CleanExit):
    """Loss or gradient is not finite, too often. All ranks raise it together."""

    exit_code = 4


class _Update(NamedTuple):
    """An update whose verdict is still on the device."""

    step: int
    is_finite: torch.Tensor
    norm: torch.Tensor  # of the gradient
    losses: list[torch.Tensor]  # of this rank's micro-batches
    indices: list[list[int]]  # their samples


class Guard:
    """Skips updates that are not finite, and stops all ranks after the same step.

    Hosts agree on signals: a step sends, and the next one reads, so that slow links delay nothing.
    Which updates were skipped is read from the device with log lines, evaluations and saves, else
    after 100 steps. From construction on, `STOP_SIGNALS` are noted, and acted on between steps. All
    ranks call the same methods in the same order.

    Args:
        strategy: the run's.
        models: as prepared.
        state: of the run; skipped updates are counted in it.
        max_skipped: so many updates may be skipped in the whole run.
        leaves_out: whether a step, from 1, is not to be learned.
        timeout: seconds that a rank waits for the others.
    """

    def __init__(
        self,
        strategy: Strategy,
        models: Sequence[nn.Module],
        state: TrainState,
        *,
        max_skipped: int,
        leaves_out: Callable[[int], bool] = lambda step: False,
        timeout: float = 1800,
    ) -> None:
        self.strategy = strategy
        self.models = models
        self.state = state
        self.max_skipped = max_skipped
        self.leaves_out = leaves_out
        self.group: Any = None
        if strategy.accelerator.num_processes > 1:
            # of hosts, whatever the devices use; DeepSpeed has none
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.unread: list[_Update] = []
        self.received = 0  # the signal that this rank has received
        self.sent: list[tuple[torch.Tensor, Any]] = []  # what the last step sent, on its way
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        if not self.received and is_main_rank() and sys.stderr.isatty():
            with contextlib.suppress(OSError):
                # safe in a handler, as print is not
                os.write(2, b"\nstopping after this step, with a checkpoint\n")
        if self.received != signal.SIGINT:  # Ctrl-C ends the launcher, too, whose SIGTERM follows
            self.received = number

    # Updates that are not finite ------------------------------------------------------------------

    def finite(
        self, losses: list[torch.Tensor], norm: torch.Tensor, indices: list[list[int]]
    ) -> torch.Tensor:
        """Whether the losses of all ranks' micro-batches and the gradient are finite; if not, or if
        the step is to be left out, the update is to be skipped.

        With fp16 an infinite gradient does not count while the loss scale can still fall: see
        `Strategy.update`.

        Args:
            losses: of this rank's micro-batches, scalars.
            norm: of the gradient.
            indices: [micro-batches, rows] samples of this rank, to be named where the loss is not
                finite.

        Returns:
            bool scalar on the device, the same on all ranks, or on those of a replica.
        """
        if self.leaves_out(self.state.step):
            print_main(f"step {self.state.step} is not learned (--skip_steps)")
            return torch.zeros_like(norm, dtype=torch.bool)
        scaler = self.strategy.accelerator.scaler
        values = losses if scaler is not None and scaler.get_scale() >= 1 else [*losses, norm]
        finite = torch.stack(values).sum(dtype=torch.float32).isfinite()
        finite = self.strategy.everywhere(finite)
        self.unread.append(_Update(self.state.step, finite, norm, losses, indices))
        return finite

    def count_skipped(self) -> None:
        """Read from the device which updates were skipped since the last call; count them and name
        their samples. Every rank calls this after the same step.

        Raises:
            NonFiniteError: on all ranks: too many were skipped, or what a skipped update leaves is
                already spoiled.
        """
        unread = self.unread
        self.unread = []
        if not unread:
            return
        finite = torch.stack([update.is_finite for update in unread]).tolist()
        if all(finite) and not self.strategy.apart:
            return  # also on the other ranks
        own = [
            (update.step, update.norm.item(), self._bad_micro_batches(update))
            for update, is_finite in zip(unread, finite, strict=True)
            if not is_finite
        ]
        buffers = [b for model in self.models for b in persistent_buffers(model).values()]
        is_spoiled = gather_object([bool(own) and not all(b.isfinite().all() for b in buffers)])
        skipped = gather_object(own)
        for step in sorted({step for step, _, _ in skipped}):
            norms = [norm for at, norm, _ in skipped if at == step]
            bad = [name for at, _, names in skipped if at == step for name in names]
            samples = f"samples of {'; '.join(bad[:8])}" if bad else "the gradient, not the loss"
            what = (
                f"step {step}: loss or gradient is not finite (gradient norm {norms[0]:g}; "
                f"{samples})"
            )
            spoiled = "" if self.strategy.can_skip else "DeepSpeed has updated with it"
            if any(is_spoiled):
                spoiled = "The running statistics have taken it in"
            if spoiled:
                raise NonFiniteError(f"{what}. {spoiled}: continue from the last checkpoint")
            self.state.skipped += 1
            if self.state.skipped > self.max_skipped:
                raise NonFiniteError(
                    f"{what}. No weight was changed, and {self.state.skipped - 1} steps had been "
                    "skipped before: look at these samples, or lower --learning_rate"
                )
            print_main(
                f"warning: {what}; the update was skipped ({self.state.skipped} of at most "
                f"{self.max_skipped}). "
                f"Its samples: python -m shared replay RUN --step {step} -- COMMAND"
            )

    def _bad_micro_batches(self, update: _Update) -> list[str]:
        rank = self.strategy.accelerator.process_index
        parts = enumerate(zip(update.losses, update.indices, strict=False), 1)
        return [
            f"rank {rank}, micro-batch {number}: {', '.join(str(s) for s in samples if s >= 0)}"
            for number, (loss, samples) in parts
            if not loss.isfinite()
        ]

    # Signals --------------------------------------------------------------------------------------

    def stop_if_asked(self, *, now: bool = False) -> None:
        """End the run if any rank was asked to.

        Args:
            now: wait for the answers of all ranks to what was just sent, and read which updates
                were skipped, because what comes next waits for both anyway (an evaluation) or saves
                the state.

        Raises:
            Stopped: on all ranks. The one who catches it saves a checkpoint.
            NonFiniteError: see `count_skipped`.
        """
        number = self.received
        if self.group is not None:
            flag = torch.tensor(number)
            work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group, async_op=True)
            self.sent.append((flag, work))
            flag, work = self.sent[-1 if now else 0]
            work.wait()
            self.sent = self.sent[-1:]
            number = int(flag)
        if now or number or len(self.unread) >= 100:
            self.count_skipped()
        if number:
            name = signal.Signals(number).name
            raise Stopped(f"stopped by {name} at step {self.state.step}")

    def release(self) -> None:
        """From here on a signal ends the run at once: all that could be lost is saved. Every rank
        calls this.

        Raises:
            Stopped: a signal came before.
        """
        stop_at_once()
        self.stop_if_asked(now=True)
