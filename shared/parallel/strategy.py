"""The parts of a step and of a checkpoint that differ between parallel strategies."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from torch import nn

from shared.config.options import OptimConfig
from shared.parallel import sharding
from shared.parallel.gradients import gradient_norm, keeps_gradients, local_part
from shared.parallel.kept import Kept
from shared.process import faults, ranks
from shared.process.errors import ConfigError


class Strategy:
    """Plain PyTorch: one process, DDP, FSDP2, HSDP, tensor parallelism, a pipeline.

    Subclasses are extras: `deepspeed.DeepSpeed`, `sequence_parallel.SequenceParallel` and
    `replicas.Replicas`. Nothing else asks which of them runs. All ranks call the same methods in
    the same order.

    Attributes:
        title: name of the strategy in the error of `require`.
        lacks: features that it does not have, as `require` names them.
        group: the process group whose ranks share one model; None: all ranks.
        average: a `WeightCopy`, the weights of evaluations and final/, if replicas train apart.
            None: the model's own.
        prefix: begins the names of weights and optimizer state in checkpoints, if each rank has its
            own; else empty.
        apart: a text for checkpoints that says how many replicas train apart; else empty.
        can_skip: whether an update that is not finite can be skipped.
    """

    title = ""
    lacks: frozenset[str] = frozenset()
    group: Any = None
    average: Any = None
    prefix = ""
    apart = ""
    can_skip = True

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def require(self, feature: str) -> None:
        """Raise a ConfigError if the strategy lacks this feature."""
        if feature in self.lacks:
            raise ConfigError(f"{feature} does not work with {self.title}")

    # Before training ------------------------------------------------------------------------------

    def prepare(
        self, model: nn.Module, optimizers: list[Any], options: OptimConfig
    ) -> tuple[Any, list[Any]]:
        """Model and optimizers on the device, wrapped, sharded: see `sharding.prepare`."""
        return sharding.prepare(self.accelerator, model, optimizers)

    # A step ---------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, scale: float) -> None:
        """Add the gradients of a micro-batch's `loss` times `scale`.

        Args:
            loss: scalar, summed over the micro-batch's targets.
            scale: see `Step.scale`.
        """
        if self.accelerator.scaler is not None:  # fp16
            self.accelerator.backward(loss * scale)
        else:  # the same result bit for bit with fewer kernels
            loss.backward(torch.full_like(loss, scale))

    @torch.no_grad()
    def clip(self, models: list[nn.Module], max_norm: float) -> torch.Tensor:
        """Scale the models' gradients down to a global L2 norm of `max_norm`, if that is not 0.

        Returns:
            Their norm before: scalar on the device, the same on all ranks of `group`; not finite
            where any rank's gradient is not.
        """
        self.accelerator.unscale_gradients()
        gradients = [p.grad for model in models for p in model.parameters() if p.grad is not None]
        norm = gradient_norm(self.accelerator, gradients, self.group)
        if max_norm and gradients:
            shrink = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            shrink = shrink.to(gradients[0].device)  # the host, where weights are offloaded
            torch._foreach_mul_([*map(local_part, gradients)], shrink)
        return norm

    def everywhere(self, finite: torch.Tensor) -> torch.Tensor:
        """Whether `finite`, a bool on the device, is true on all ranks of `group`: such a bool."""
        if self.accelerator.num_processes == 1:
            return finite
        least = finite.int()
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.group)
        return least == 1

    def update(self, optimizers: list[Any], finite: torch.Tensor, norm: torch.Tensor) -> None:
        """Step all optimizers if the step is `finite` (a bool on the device), and clear the
        gradients.

        With fp16 the gradient's `norm` has to be finite, too. If it is not, no optimizer steps and
        the loss scale falls. The scaler alone would skip only the optimizer with the bad gradients.

        Fused AdamW and Muon read `found_inf` on the device, so the host waits for nothing. For
        other optimizers, offloaded weights and fp16 the host reads `finite`.
        """
        faults.point("update")
        scaler = self.accelerator.scaler
        if scaler is not None:
            finite = finite & norm.isfinite()
        for optimizer in optimizers:
            if scaler is None and _skips_by_itself(optimizer, finite.device):
                optimizer.found_inf = (~finite).float()
                optimizer.step()
                del optimizer.found_inf
            elif finite:
                optimizer.step() if scaler is None else scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=not keeps_gradients(self.accelerator))
        if scaler is not None:  # once: Accelerate's wrappers would do it once for each optimizer
            scaler.update()

    def after(self, step: int, total_steps: int) -> None:
        """What is due after an optimizer step."""

    # Checkpoints ----------------------------------------------------------------------------------

    def kept(self) -> dict[str, Kept]:
        """What it keeps in checkpoints, by prefix, beside models and optimizers."""
        return {}

    def engine(self, trainable: Mapping[str, nn.Parameter]) -> Kept | None:
        """What holds weights and optimizer state, if parameters and optimizers do not."""
        return None


def strategy_of(accelerator: Accelerator) -> Strategy:
    """The strategy that the launch config asks for."""
    if ranks.sequence_ranks() > 1:
        raise ConfigError(
            "this template cannot divide rows over GPUs: use fsdp2.yaml, or sp_size 1"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        from shared.extras.deepspeed import DeepSpeed

        return DeepSpeed(accelerator)
    return Strategy(accelerator)


def strategy_of_rows(accelerator: Accelerator) -> Strategy:
    """As `strategy_of`, for a template whose ranks may share rows."""
    if ranks.sequence_ranks() > 1:
        from shared.extras.sequence.sequence_parallel import SequenceParallel

        return SequenceParallel(accelerator)
    return strategy_of(accelerator)


def _skips_by_itself(optimizer: Any, device: torch.device) -> bool:
    """Whether `step` heeds `found_inf`, as the kernel of fused AdamW does; not for weights that are
    offloaded elsewhere.
    """
    fused = isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["fused"]
    if not fused and not getattr(optimizer, "heeds_found_inf", False):
        return False
    return all(group["params"][0].device == device for group in optimizer.param_groups)
