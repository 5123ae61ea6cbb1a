"""Replicas that take optimizer steps of their own, and agree on their weights now and then instead
of on each gradient.

Local SGD (Stich, arXiv 1805.09767), DiLoCo (Douillard et al., arXiv 2311.08105), and its streaming
form, which sends parts of the model in the background (arXiv 2501.18512).
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from torch import nn

from shared.config.options import OptimConfig
from shared.models.weights import WeightCopy, average_buffers
from shared.parallel import sharding
from shared.parallel.gradients import local_part
from shared.parallel.kept import Kept, Read, Tensors
from shared.parallel.strategy import Strategy
from shared.process import ranks
from shared.process.errors import ConfigError
from shared.training.options import SyncConfig


class Replicas(Strategy):
    """Replicas that train apart. Every rank makes one and calls its methods alike.

    Each replica (a process, or a group of HSDP) updates its own weights. Every `sync_every` steps
    the mean of what they have moved since the agreed weights is one gradient of an outer optimizer,
    SGD with Nesterov momentum, which moves the agreed weights. After `sync_delay` steps, in which
    the replicas have gone on, each moves to them: to sync_alpha * its own + (1 - sync_alpha) * the
    agreed weights. With `sync_fragments` the model is sent in parts, at different steps.

    Attributes:
        count: of replicas.
        average: the agreed weights, the same on all replicas.
        group: the ranks of this replica.

    Raises:
        ConfigError: the launch config's processes are not replicas that can differ for a while.
    """

    title = "--sync_every"
    lacks = frozenset(("a second model", "--ema_decay"))

    def __init__(self, accelerator: Accelerator, options: SyncConfig) -> None:
        super().__init__(accelerator)
        self.options = options
        sizes = accelerator.parallelism_config
        is_sharded = accelerator.distributed_type == DistributedType.FSDP
        is_cut = accelerator.distributed_type == DistributedType.DEEPSPEED
        is_cut |= ranks.sequence_ranks() > 1 or (sizes is not None and sizes.tp_enabled)
        if is_cut or accelerator.scaler is not None:
            raise ConfigError("--sync_every works in bf16 or fp32 with ddp.yaml and hsdp.yaml")
        if is_sharded and not (sizes is not None and sizes.dp_replicate_enabled):
            raise ConfigError(
                "--sync_every: all ranks of fsdp2.yaml share one model: use hsdp.yaml, "
                "whose groups are replicas"
            )
        size = sizes.dp_shard_size if is_sharded else 1
        self.count = accelerator.num_processes // size
        self.prefix = f"rank{accelerator.process_index}."
        self.apart = f"{self.count} replicas in {accelerator.num_processes} processes"
        self.across: Any = None  # the ranks that hold the same shards, one of each replica
        processes = range(accelerator.num_processes)
        if self.count > 1:
            alike = [list(processes[place::size]) for place in range(size)]
            self.across = dist.new_subgroups_by_enumeration(alike)[0]
        if size > 1:
            self.group = dist.new_subgroups(size)[0]
        self.dtype = torch.bfloat16 if options.sync_dtype == "bf16" else torch.float32
        self.momentum: dict[str, torch.Tensor] = {}  # by name of the weights that are agreed on
        self.fragments: list[list[str]] = []  # these names
        # by fragment: the sum over replicas of what it has moved ([values of this rank's shards]),
        # and its all-reduce, if there are several
        self.flights: dict[int, tuple[torch.Tensor, Any]] = {}

    def prepare(
        self, model: nn.Module, optimizers: list[Any], options: OptimConfig
    ) -> tuple[Any, list[Any]]:
        model, optimizers = sharding.prepare(self.accelerator, model, optimizers, replicas=True)
        self.begin(model)
        return model, optimizers

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        """Agree on the present weights of a model, the same on all ranks."""
        self.average = WeightCopy(self.accelerator, model)
        self.momentum = {
            name: torch.zeros_like(value)
            for name, value in self.average.copies.items()
            if name not in self.average.buffers
        }
        self.fragments = self._cut()

    def everywhere(self, finite: torch.Tensor) -> torch.Tensor:
        return finite if self.group is None else super().everywhere(finite)

    def _cut(self) -> list[list[str]]:
        """Neighbouring weights, in parts of about the same size."""
        count = self.options.sync_fragments
        parts: list[list[str]] = [[] for _ in range(count)]
        size = sum(value.numel() for value in self.momentum.values())
        done = 0
        for name, value in self.momentum.items():
            middle = done + value.numel() // 2
            parts[min(count - 1, middle * count // size)].append(name)
            done += value.numel()
        return parts

    def _sends(self, step: int, total_steps: int) -> list[int]:
        """The fragments that are sent after a step: each every `sync_every` steps, and evenly
        spread.
        """
        every = self.options.sync_every
        parts = self.options.sync_fragments
        if not 0 < step < total_steps:
            return []
        return [part for part in range(parts) if (step + part * every // parts) % every == 0]

    @torch.no_grad()
    def after(self, step: int, total_steps: int) -> None:
        """Send and apply what is due after an optimizer step."""
        delay = self.options.sync_delay
        last = step == total_steps
        arriving = self._sends(step - delay, total_steps)
        for part in sorted(self.flights) if last else arriving:
            self._apply(part, self.options.alpha)
        # at the end, all that was done is agreed on
        for part in range(len(self.fragments)) if last else self._sends(step, total_steps):
            self._send(part)
            if last or not delay:
                self._apply(part, 0.0)
        if (last or 0 in arriving) and self.average.buffers:
            live = {name: self.average.live[name] for name in self.average.buffers}
            average_buffers(self.accelerator, live)
            for name, value in live.items():
                self.average.buffers[name].copy_(value)

    def _pairs(self, part: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(the replica's own, agreed, momentum) of each weight of a fragment: this rank's
        shards.
        """
        own, agreed, momentum = (
            [local_part(tensors[name]) for name in self.fragments[part]]
            for tensors in (self.average.live, self.average.copies, self.momentum)
        )
        return [*zip(own, agreed, momentum, strict=True)]

    def _send(self, part: int) -> None:
        moved = [(agreed - own).flatten() for own, agreed, _ in self._pairs(part)]
        total = torch.cat(moved) if moved else torch.zeros(0, device=self.accelerator.device)
        total = total.to(self.dtype)
        work = None
        if self.across is not None and total.numel():
            work = dist.all_reduce(total, group=self.across, async_op=True)
        self.flights[part] = total, work

    def landed(self, part: int) -> torch.Tensor:
        """What was sent of a fragment, summed over replicas: [values of this rank's shards]."""
        total, work = self.flights[part]
        if work is not None:
            work.wait()
        return total

    def make_room(self, saved: Set[str]) -> None:
        """Let the fragments that a checkpoint has, and no others, be on their way."""
        self.flights = {}
        for part in range(len(self.fragments)):
            if str(part) in saved:
                size = sum(own.numel() for own, _, _ in self._pairs(part))
                room = torch.zeros(size, dtype=self.dtype, device=self.accelerator.device)
                self.flights[part] = room, None

    def _apply(self, part: int, alpha: float) -> None:
        # without a delay it is applied already; and if the run was prolonged, at the former end
        if part not in self.flights:
            return
        total = self.landed(part).float() / self.count
        del self.flights[part]
        pairs = self._pairs(part)
        rate = self.options.outer_learning_rate
        decay = self.options.outer_momentum
        pieces = total.split([own.numel() for own, _, _ in pairs])
        for (own, agreed, momentum), piece in zip(pairs, pieces, strict=True):
            gradient = piece.view_as(own)
            momentum.mul_(decay).add_(gradient)
            agreed.sub_(rate * (gradient + decay * momentum))
            own.copy_(torch.lerp(agreed, own, alpha) if alpha else agreed)

    # Checkpoints ----------------------------------------------------------------------------------

    def kept(self) -> dict[str, Kept]:
        return {
            "model.": self.average,
            "outer.": Tensors(self.momentum),
            f"{self.prefix}flight.": Flights(self),
        }


@dataclass
class Flights(Kept):
    """What is on its way to this rank, by number of the fragment."""

    replicas: Replicas

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        return {str(part): self.replicas.landed(part) for part in self.replicas.flights}

    def load(self, read: Read, saved: Set[str], step: int) -> None:
        self.replicas.make_room(saved)
        read(self.tensors(step))
