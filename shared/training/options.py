"""Flags of training that one template has. Stays clear of torch, so that --help and a mistyped flag
answer at once.
"""

from dataclasses import dataclass, fields
from typing import Literal

from shared.config.types import BelowOne, Count, CountOrZero, Positive
from shared.process.errors import ConfigError


@dataclass(frozen=True)
class SyncConfig:
    """How data-parallel replicas agree."""

    # Optimizer steps that each replica (a process of ddp.yaml, a group of hsdp.yaml) takes alone
    # between agreements on the weights; 1: agree on the gradient of each step
    sync_every: Count = 1
    # Learning rate of the outer optimizer, which moves the agreed weights; 1 with momentum 0: local
    # SGD
    outer_learning_rate: Positive = 0.7
    outer_momentum: BelowOne = 0.9  # Nesterov momentum of the outer optimizer
    # Steps that replicas train on while an agreement is on its way; 0: they wait for it
    sync_delay: CountOrZero = 0
    # Share of its own weights that a replica keeps at an agreement; if not given, 0, or 0.5 with a
    # delay
    sync_alpha: BelowOne | None = None
    sync_fragments: Count = 1  # Parts in which the weights are sent, at different steps
    sync_dtype: Literal["fp32", "bf16"] = "fp32"  # Precision in which they are sent

    def __post_init__(self) -> None:
        given = [
            f"--{field.name}"
            for field in fields(SyncConfig)
            if getattr(self, field.name) != field.default
        ]
        if given and self.sync_every == 1:
            raise ConfigError(f"{' '.join(given)}: only with a --sync_every above 1")
        if self.sync_delay >= self.sync_every > 1 or self.sync_fragments > self.sync_every:
            raise ConfigError(
                "--sync_delay has to be below --sync_every, and --sync_fragments at most that"
            )

    @property
    def alpha(self) -> float:
        return (0.5 if self.sync_delay else 0.0) if self.sync_alpha is None else self.sync_alpha
