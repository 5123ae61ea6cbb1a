"""What all ranks agree on once a step: is everything finite, and does a signal ask to stop."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from shared.models.weights import persistent_buffers
from shared.parallel import zero
from shared.process import faults
from shared.process.errors import CleanExit
from shared.process.printing import print_main
from shared.process.ranks import is_main_rank
from shared.process.signals import STOP_SIGNALS
from shared.run.exits import Stopped, stop_at_once
from shared.run.state import TrainState
from shared.training.sync import Replicas

T = TypeVar("T")


class NonFiniteError(CleanExit):
    """Loss or gradient is not finite, too often. All ranks raise it together."""

    exit_code = 4


class _OnItsWay:
    """A small tensor's copy to the host. Reading it waits for what came before it on the device,
    not for what followed.
    """

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

    The answer is on the device. The host reads it one step later, so that it need not wait for the
    device. It reads at once where steps take more than a second, or where something else waits for
    the device anyway. From construction on, `STOP_SIGNALS` are noted, and acted on between steps.
    All ranks call the same methods in the same order.

    Args:
        accelerator: the run's.
        models: as prepared.
        state: of the run; skipped steps are counted in it.
        max_skipped: so many steps may be skipped in the whole run.
        replicas: where these train apart, each decides on its own updates, and all meet now and
            then.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        models: Sequence[nn.Module],
        state: TrainState,
        *,
        max_skipped: int,
        replicas: Replicas | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.models = models
        self.state = state
        self.max_skipped = max_skipped
        self.replicas = replicas
        self.own_skips = 0
        self.asked = 0  # the signal that a rank of this replica has received
        self.last_step: int | None = None  # after which all replicas stop
        self.received = self.agreed = self.slow = 0
        self.began = self.looked = time.perf_counter()
        self.unread: Callable[[], None] | None = None  # acts on the last step's verdict
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: object) -> None:
        if not self.received and is_main_rank() and sys.stderr.isatty():
            with contextlib.suppress(OSError):
                # safe in a handler, as print is not
                os.write(2, b"\nstopping after this step, with a checkpoint\n")
        if self.received != signal.SIGINT:  # Ctrl-C ends the launcher, too, whose SIGTERM follows
            self.received = number

    def _agree(
        self, good: torch.Tensor, *, slow: bool = False, apart: bool = False
    ) -> tuple[torch.Tensor, Callable[[], bool]]:
        """Whether it is `good` on all ranks, as a bool on the device; the same as a function that
        fetches it, with the signal that any rank has received and whether any is `slow`. `apart`:
        on the ranks of this replica, without signals.
        """
        apart = apart and self.replicas is not None
        group = self.replicas.inner if apart and self.replicas else None
        if self.accelerator.num_processes == 1 or (apart and group is None):
            alone = _OnItsWay(good)
            self.slow = int(slow)
            return good, lambda: bool(alone.read())
        verdict = torch.full(
            (2,), -(2 * self.received + slow), dtype=torch.int32, device=good.device
        )
        verdict[0] = good
        dist.all_reduce(verdict, dist.ReduceOp.MIN, group=group)
        answer = _OnItsWay(verdict)

        def fetch() -> bool:
            everywhere, note = answer.read()
            agreed, self.slow = divmod(-note, 2)
            self.agreed, self.asked = (0, agreed) if apart else (agreed, 0)
            return bool(everywhere)

        return verdict[0] == 1, fetch

    def finite(
        self, losses: list[torch.Tensor], norm: torch.Tensor, indices: np.ndarray
    ) -> torch.Tensor:
        """Whether the losses of all ranks' micro-batches and the gradient are finite; if not, the
        update is to be skipped.

        With fp16 an infinite gradient does not count while the loss scale can still fall: see
        `update`.

        Args:
            losses: of this rank's micro-batches, scalars.
            norm: of the gradient.
            indices: [micro-batches, rows] samples of this rank, to be named where the loss is not
                finite.

        Returns:
            bool scalar on the device, the same on all ranks.

        Raises:
            NonFiniteError: on all ranks, by what is known of the step before: see `settle`.
        """
        self.settle()
        scaler = self.accelerator.scaler
        values = losses if scaler is not None and scaler.get_scale() >= 1 else [*losses, norm]
        before = self.began
        self.began = time.perf_counter()
        finite = torch.stack(values).sum(dtype=torch.float32).isfinite()
        everywhere, fetch = self._agree(finite, slow=self.began - before > 1, apart=True)
        step = self.state.step

        def act() -> None:
            if not fetch():
                self._count_skipped(step, losses, norm, indices)

        self.unread = act
        return everywhere

    def settle(self) -> None:
        """Fetch the last step's verdict now: count an update that was skipped, and name its
        samples.

        Raises:
            NonFiniteError: on all ranks: the limit is reached, or what a skipped update leaves is
                already spoiled.
        """
        act = self.unread
        self.unread = None
        if act is not None:
            act()

    def _count_skipped(
        self, step: int, losses: list[torch.Tensor], norm: torch.Tensor, indices: np.ndarray
    ) -> None:
        guilty = [i for i, loss in enumerate(losses) if not torch.isfinite(loss)]
        own = (self.accelerator.process_index, guilty, indices.tolist())
        each: list[Any] = (
            gather_object([own]) if self.replicas is None else self.replicas.gather(own)
        )
        named = [(rank, i, rows[i]) for rank, own, rows in each for i in own if i < len(rows)]
        where = "; ".join(
            f"rank {rank}, micro-batch {i + 1}: {', '.join(str(s) for s in rows if s >= 0)}"
            for rank, i, rows in named[:8]
        )
        everything = sorted({s for _, _, rows in each for row in rows for s in row if s >= 0})
        samples = (
            f"samples of {where}"
            if where
            else f"the gradient, not the loss; samples {str(everything)[1:-1]}"
        )
        what = (
            f"step {step}: loss or gradient is not finite (gradient norm {norm.item():g}; "
            f"{samples})"
        )
        buffers = [
            b for m in self.models for b in persistent_buffers(m).values() if b.is_floating_point()
        ]
        sound = torch.tensor(
            all(bool(torch.isfinite(b).all()) for b in buffers), device=norm.device
        )
        if not self._agree(sound, apart=True)[0]:
            raise NonFiniteError(
                f"{what}. The running statistics have taken it in: continue from the last "
                "checkpoint"
            )
        if zero.is_used(self.accelerator):
            raise NonFiniteError(
                f"{what}. DeepSpeed has updated with it: continue from the last checkpoint"
            )
        self.state.skipped += 1
        if self.replicas is not None:  # the others have done theirs; when all meet, they are told
            self.own_skips += 1
            if self.replicas.leads:
                print(
                    f"warning: {what}; replica {self.replicas.index} skipped its update",
                    file=sys.stderr,
                    flush=True,
                )
            return
        if self.state.skipped > self.max_skipped:
            raise NonFiniteError(
                f"{what}. No weight was changed, and {self.state.skipped - 1} steps had been "
                "skipped before: "
                "look at these samples, lower --learning_rate, or raise --max_skipped_steps"
            )
        print_main(
            f"warning: {what}; the update was skipped ({self.state.skipped} of at most "
            f"{self.max_skipped})"
        )

    def stop_if_asked(self, *, now: bool = False) -> None:
        """End the run if any rank was asked to: at the latest when `finite` was called for the step
        before.

        Replicas that train apart agree on that where they wait for each other anyway, else within
        some seconds.

        Args:
            now: go by this step's verdict and not the last one's, because what comes next waits for
                the device anyway (an evaluation) or saves the state.

        Raises:
            Stopped: on all ranks. The one who catches it saves a checkpoint.
            NonFiniteError: see `settle`.
        """
        if self.replicas is None:
            self._stop_if_agreed(now)
        elif self.replicas.meets(self.state.step):
            self._count_all_skips()
            self._ask()
        else:
            self._stop_apart()

    def _stop_if_agreed(self, now: bool = False) -> None:
        if self.accelerator.num_processes == 1:
            self.agreed = self.received
        if now or self.slow or self.agreed:
            self.settle()
        if self.agreed:
            self.received = self.agreed  # also where another rank was told
            raise Stopped(
                f"stopped by {signal.Signals(self.agreed).name} at step {self.state.step}"
            )

    def _stop_apart(self) -> None:
        """All replicas go on to the step of the one that is ahead, and stop there. No collective
        has more than one in it.

        A replica learns of another one's signal within five seconds.
        """
        replicas = self.replicas
        assert replicas is not None
        now = self.received or replicas.waited or time.perf_counter() - self.looked > 5
        if replicas.leads and replicas.count > 1 and now:
            self.looked = time.perf_counter()
            self.received = replicas.asked_to_stop(self.received)
        # else the ranks of a replica tell each other with the next verdict
        if replicas.inner is None or replicas.waited:
            self.asked = max(replicas.gather(self.received))
        if self.asked and self.last_step is None:
            self.received, self.last_step = self.asked, replicas.last_step(self.state.step)
        if self.last_step == self.state.step:
            self._count_all_skips()
            raise Stopped(
                f"stopped by {signal.Signals(self.received).name} at step {self.state.step}"
            )

    def _count_all_skips(self) -> None:
        assert self.replicas is not None
        self.settle()
        own = self.own_skips
        self.own_skips = 0
        skips = torch.tensor(
            float(own if self.replicas.leads else 0), device=self.accelerator.device
        )
        self.state.skipped += int(self.accelerator.reduce(skips, "sum").item()) - own
        if self.state.skipped > self.max_skipped:
            raise NonFiniteError(
                f"step {self.state.step}: {self.state.skipped} updates of all replicas were "
                "skipped, since loss or gradient "
                "was not finite: look at the samples named above, lower --learning_rate, or raise "
                "--max_skipped_steps"
            )

    def watch(self, windows: Iterable[T]) -> Iterator[T]:
        """Pass an evaluation's windows on, and end it if a signal asks to. Every rank calls this
        alike.

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
        self._stop_if_agreed()

    def release(self) -> None:
        """From here on a signal ends the run at once: all that could be lost is saved. Every rank
        calls this.
        """
        self._ask()
        stop_at_once()
        if self.received:
            raise Stopped(
                f"stopped by {signal.Signals(self.received).name} at step {self.state.step}"
            )
