"""Flags of training that one template has. Stays clear of torch, so that --help and a mistyped flag
answer at once.
"""

from dataclasses import dataclass

from shared.config.types import BelowOne, Count, Positive


@dataclass(frozen=True)
class SyncConfig:
    """How data-parallel replicas agree."""

    # Optimizer steps that each process of ddp.yaml, or group of hsdp.yaml, takes on its own before
    # all agree on weights; 1: they agree on the gradient of every step
    sync_every: Count = 1
    # Of the agreed weights, on what the replicas have moved; 1 with momentum 0: local SGD
    outer_learning_rate: Positive = 0.7
    outer_momentum: BelowOne = 0.9  # Nesterov momentum of the agreed weights
