"""Replicas that take optimizer steps of their own, and agree on their weights now and then instead
of on each gradient.

Local SGD (Stich, arXiv 1805.09767) and DiLoCo (Douillard et al., arXiv 2311.08105).
"""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from torch import nn

from shared.config.options import OptimConfig
from shared.models.weights import WeightCopy
from shared.parallel import sharding
from shared.parallel.gradients import local_part
from shared.parallel.strategy import Strategy
from shared.process import ranks
from shared.process.errors import ConfigError
from shared.training.options import SyncConfig


class Replicas(Strategy):
    """Replicas that train apart. Every rank makes one and calls its methods alike.

    Each replica (a process, or a group of HSDP) updates its own weights. Every `sync_every` steps
    the mean of what they have moved since the agreed weights is one gradient of an outer optimizer,
    SGD with Nesterov momentum, which moves the agreed weights. All replicas go on from these.

    Attributes:
        count: of replicas.
        agreed: the agreed weights, the same on all replicas.
        momentum: of the outer optimizer, by the weights' names.
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
        self.momentum: dict[str, torch.Tensor] = {}

    def prepare(
        self, model: nn.Module, optimizers: list[Any], options: OptimConfig
    ) -> tuple[Any, list[Any]]:
        model, optimizers = sharding.prepare(self.accelerator, model, optimizers, replicas=True)
        self.begin(model)
        return model, optimizers

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        """Agree on the present weights of a model, the same on all ranks."""
        self.agreed = WeightCopy(self.accelerator, model)
        self.momentum = {
            name: torch.zeros_like(value)
            for name, value in self.agreed.tensors.items()
            if name not in self.agreed.buffers
        }

    def everywhere(self, finite: torch.Tensor) -> torch.Tensor:
        return finite if self.group is None else super().everywhere(finite)

    @torch.no_grad()
    def after(self, step: int, total_steps: int) -> None:
        """Agree on the weights, if that is due after an optimizer step; always after the last."""
        if step % self.options.sync_every and step != total_steps:
            return
        rate = self.options.outer_learning_rate
        decay = self.options.outer_momentum
        for name in self.momentum:
            own, agreed, momentum = (
                local_part(tensors[name])
                for tensors in (self.agreed.live, self.agreed.tensors, self.momentum)
            )
            gradient = agreed - own
            if self.across is not None:
                dist.all_reduce(gradient, group=self.across)
            gradient /= self.count
            momentum.mul_(decay).add_(gradient)
            agreed.sub_(rate * (gradient + decay * momentum))
            own.copy_(agreed)

    @torch.no_grad()
    def begin_from_agreed(self) -> None:
        """Let this replica have the agreed weights."""
        for name, value in self.agreed.live.items():
            local_part(value).copy_(local_part(self.agreed.tensors[name]))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The outer momentum."""
        return {f"outer.{name}": value for name, value in self.momentum.items()}
