"""What all ranks agree on: which updates were skipped, and at which step a signal stops them."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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


@dataclass(frozen=True)
class _Skipped:
    """A micro-batch of an update that was skipped."""

    step: int
    norm: float  # of the update's gradient
    is_finite: bool  # the loss
    is_spoiled: bool  # running statistics have taken it in
    name: str


class Guard:
    """Skips updates that are not finite, and stops all ranks after the same step.

    Signals are agreed on between hosts: a step sends, the next one reads, and no device waits.
    Where steps take more than a second, a step waits for what it has sent. Which updates were
    skipped is read from the device with log lines, evaluations and saves, else after 100 steps or a
    minute. From construction on, `STOP_SIGNALS` are noted, and acted on between steps. All ranks
    call the same methods in the same order.

    Args:
        strategy: the run's.
        models: as prepared.
        state: of the run; skipped updates are counted in it.
        max_skipped: so many updates may be skipped in the whole run.
        timeout: seconds that a rank waits for the others.
    """

    def __init__(
        self,
        strategy: Strategy,
        models: Sequence[nn.Module],
        state: TrainState,
        *,
        max_skipped: int,
        timeout: float = 1800,
    ) -> None:
        self.strategy = strategy
        self.models = models
        self.state = state
        self.max_skipped = max_skipped
        self.group: Any = None
        if strategy.accelerator.num_processes > 1:
            # of hosts, whatever the devices use; DeepSpeed has none
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        # whether an update was finite, and what describes it if it was not
        self.unread: list[tuple[torch.Tensor, Callable[[], list[_Skipped]]]] = []
        self.unread_for = 0.0  # seconds, the same on all ranks
        self.received = 0  # the signal that this rank has received
        self.seconds = 0.0  # that the last step took, on the slowest rank
        self.sent_at = time.perf_counter()
        self.sent: list[tuple[torch.Tensor, Any]] = []  # flags of the last step, on their way
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
        """Whether the losses of all ranks' micro-batches and the gradient are finite; if not, the
        update is to be skipped.

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
        scaler = self.strategy.accelerator.scaler
        values = losses if scaler is not None and scaler.get_scale() >= 1 else [*losses, norm]
        finite = torch.stack(values).sum(dtype=torch.float32).isfinite()
        finite = self.strategy.everywhere(finite)
        step = self.state.step
        rank = self.strategy.accelerator.process_index

        def describe() -> list[_Skipped]:
            buffers = [b for model in self.models for b in persistent_buffers(model).values()]
            is_spoiled = not all(b.isfinite().all() for b in buffers)
            return [
                _Skipped(
                    step,
                    norm.item(),
                    all(loss.isfinite() for loss in losses[i : i + 1]),
                    is_spoiled,
                    f"rank {rank}, micro-batch {i + 1}: {', '.join(str(s) for s in row if s >= 0)}",
                )
                for i, row in enumerate(indices)
            ]

        self.unread.append((finite, describe))
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
        self.unread_for = 0.0
        if not unread:
            return
        finite = torch.stack([finite for finite, _ in unread]).tolist()
        own: list[_Skipped] = []
        for (_, describe), is_finite in zip(unread, finite, strict=True):
            own += [] if is_finite else describe()
        if not own and not self.strategy.apart:
            return  # nor on any other rank
        skipped = gather_object(own)
        for step in sorted({part.step for part in skipped}):
            parts = [part for part in skipped if part.step == step]
            bad = [part.name for part in parts if not part.is_finite]
            samples = "; ".join((bad or [part.name for part in parts])[:8])
            cause = "" if bad else "the gradient, not the loss; "
            what = (
                f"step {step}: loss or gradient is not finite (gradient norm "
                f"{parts[0].norm:g}; {cause}samples of {samples})"
            )
            spoiled = "" if self.strategy.can_skip else "DeepSpeed has updated with it"
            if any(part.is_spoiled for part in parts):
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
                f"{self.max_skipped})"
            )

    # Signals --------------------------------------------------------------------------------------

    def stop_if_asked(self, *, now: bool = False) -> None:
        """End the run if any rank was asked to, by what was sent after the step before.

        Args:
            now: ask all ranks and wait for their answers, because what comes next waits for them
                anyway (an evaluation) or saves the state.

        Raises:
            Stopped: on all ranks. The one who catches it saves a checkpoint.
            NonFiniteError: see `count_skipped`.
        """
        asked = time.perf_counter()
        flags = torch.tensor([self.received, asked - self.sent_at])
        self.sent_at = asked
        if self.group is not None:
            work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group, async_op=True)
            self.sent.append((flags, work))
            flags, work = self.sent[-1 if now or self.seconds > 1 else 0]
            work.wait()
            self.sent = self.sent[-1:]
        number, self.seconds = flags.tolist()
        self.unread_for += self.seconds
        if now or number or self.unread_for > 60 or len(self.unread) >= 100:
            self.count_skipped()
        if number:
            name = signal.Signals(int(number)).name
            raise Stopped(f"stopped by {name} at step {self.state.step}")

    def release(self) -> None:
        """From here on a signal ends the run at once: all that could be lost is saved. Every rank
        calls this.

        Raises:
            Stopped: a signal came before.
        """
        stop_at_once()
        self.stop_if_asked(now=True)
