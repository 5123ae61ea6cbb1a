"""DeepSpeed's ZeRO: its settings, and its weights and moments as plain tensors.

DeepSpeed keeps fp32 weights and optimizer state in flat pieces of its own. Read out by parameter
name, they give a ZeRO run the same checkpoints as any other: no pickles, and they resume under FSDP
or in one process.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from shared.config.options import OptimConfig
from shared.parallel.kept import Kept, Read
from shared.parallel.strategy import Strategy
from shared.process import faults
from shared.process.errors import ConfigError

MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeed(Strategy):
    """ZeRO in stages 1 to 3. DeepSpeed clips and updates inside of the last backward pass."""

    title = "DeepSpeed: use ddp.yaml or fsdp2.yaml"
    lacks = frozenset(
        (
            *("a second model", "Setup.keep", "Muon", "--torch_compile by default"),
            *("--ema_decay", "--find_batch_size", "--dress_rehearsal", "--updates_per_rollout"),
            "--skip_steps",
        )
    )
    can_skip = False

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        # transformers makes whole models, the same on every rank, for DeepSpeed to cut: else its
        # random draws would differ
        unset_hf_deepspeed_config()

    def prepare(
        self, model: nn.Module, optimizers: list[Any], options: OptimConfig
    ) -> tuple[Any, list[Any]]:
        """As `Strategy.prepare`, after DeepSpeed has got the template's answers.

        Raises:
            ConfigError: the launch config has other answers, or DeepSpeed cannot work with these
                optimizers.
        """
        # that of bf16 weights is another
        if [type(optimizer) for optimizer in optimizers] != [torch.optim.AdamW]:
            raise ConfigError(
                "under DeepSpeed only --optim adamw works, on fp32 weights: choose it, or "
                "fsdp2.yaml"
            )
        if (precision := self.accelerator.mixed_precision) in ("fp16", "fp8"):
            raise ConfigError(f"{precision} does not work with DeepSpeed: use bf16")
        settings = self.accelerator.state.deepspeed_plugin.deepspeed_config
        theirs = settings.get("gradient_clipping", "auto")
        if theirs not in ("auto", None) and float(theirs) != options.max_grad_norm:
            raise ConfigError(
                f"gradient_clipping is {theirs} in the DeepSpeed config, but --max_grad_norm is "
                f"{options.max_grad_norm}: remove it there"
            )
        settings["gradient_clipping"] = options.max_grad_norm
        settings["gradient_accumulation_steps"] = 1  # the template accumulates
        # counts for DeepSpeed's own throughput log alone
        settings["train_micro_batch_size_per_gpu"] = 1
        # PyTorch's AdamW runs on offloaded state, and needs no compiler
        settings["zero_force_ds_cpu_optimizer"] = False
        return super().prepare(model, optimizers, options)

    def backward(self, loss: torch.Tensor, scale: float) -> None:
        self.accelerator.backward(loss * scale)

    def clip(self, models: list[nn.Module], max_norm: float) -> torch.Tensor:
        norm = self.accelerator.deepspeed_engine_wrapped.get_global_grad_norm()
        return torch.tensor(float(norm), device=self.accelerator.device)

    def update(self, optimizers: list[Any], finite: torch.Tensor, norm: torch.Tensor) -> None:
        faults.point("update")

    def engine(self, trainable: Mapping[str, nn.Parameter]) -> Kept:
        return Engine(self.accelerator, trainable)


@dataclass
class Engine(Kept):
    """Weights and moments, read out of DeepSpeed's engine and put into it, by parameter."""

    accelerator: Accelerator
    trainable: Mapping[str, nn.Parameter]

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """Whole, in the main rank's memory; empty on the others."""
        from deepspeed.utils import safe_get_full_optimizer_state

        _link_moments(self.accelerator.deepspeed_engine_wrapped.engine.optimizer)
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.trainable.items():
            values = {f"model.{name}": full_weight(parameter)}
            for key in MOMENTS:
                values[f"optimizer.{name}.{key}"] = safe_get_full_optimizer_state(parameter, key)
            if self.accelerator.is_main_process:
                tensors |= {
                    key: value.detach().to("cpu", copy=True) for key, value in values.items()
                }
                tensors[f"optimizer.{name}.step"] = torch.tensor(float(step))
        return tensors

    def load(self, read: Read, saved: Set[str], step: int) -> None:
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        zero = self.accelerator.deepspeed_engine_wrapped.engine.optimizer
        stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
        for piece in (
            zero.fp32_partitioned_groups_flat if stage3 else zero.single_partition_of_fp32_groups
        ):
            zero.optimizer.state[piece] = {key: torch.zeros_like(piece) for key in MOMENTS}
            # for the fused kernel
            zero.optimizer.state[piece]["step"] = torch.tensor(float(step), device=piece.device)
        _link_moments(zero)
        for name, parameter in self.trainable.items():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            weight = torch.empty(shape, device=self.accelerator.device)
            moments = {key: torch.empty(shape, device=self.accelerator.device) for key in MOMENTS}
            read(
                {f"model.{name}": weight}
                | {f"optimizer.{name}.{key}": value for key, value in moments.items()}
            )
            safe_set_full_fp32_param(parameter, weight)
            for key, value in moments.items():
                safe_set_full_optimizer_state(parameter, value, key)
            with torch.no_grad(), GatheredParameters([parameter], modifier_rank=0, enabled=stage3):
                parameter.copy_(weight)  # what the next forward computes with


def full_weight(parameter: nn.Parameter) -> torch.Tensor:
    """A parameter's whole value, fp32 if it is trained. Every rank calls this."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    if parameter.requires_grad:
        return safe_get_full_fp32_param(parameter)
    if not hasattr(parameter, "ds_id"):  # whole on every rank, as before ZeRO-3
        return parameter.detach()
    with GatheredParameters([parameter]):
        return parameter.detach().clone()


def _link_moments(zero: Any) -> None:
    """Let parameters find their moments: ZeRO-2 does so after its first step, but of the first
    parameter group alone.
    """
    if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()
