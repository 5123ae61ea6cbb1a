"""A run as it is prepared: what `Setup` fills, and what trains, saves and logs reads."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from shared.models.weights import WeightCopy
from shared.parallel.kept import Kept
from shared.parallel.strategy import Strategy


@dataclass(eq=False, repr=False)  # its config may hold secrets
class Prepared:
    """The parts of a run before its first step.

    Attributes:
        config: the template's, with what was chosen so far.
        name: of the template, for the run's folder and the tracker's project.
        unit: what throughput counts: tokens, images, texts or pairs.
        accelerator, strategy: Accelerate's object; how processes share the training.
        device, is_main: this rank's device, whether this is rank 0.
        dir: the run's folder.
        models: as prepared, by name; final/ is made of "model".
        optimizers: as prepared.
        average: the weights that evaluations and final/ have in place of the model's, if any: their
            moving average, or those that replicas agreed on.
        kept: what checkpoints hold beside models and optimizers, by prefix.
        flops: floating-point operations of forward and backward for one token or image, for MFU;
            None where unknown.
        mirror: with --mirror_to, what copies the run's folder to another place.
        about: rows of the summary, each written where its fact is decided.
        details: further rows, for summary.txt alone.
    """

    config: Any
    name: str
    unit: str
    accelerator: Accelerator
    strategy: Strategy
    dir: Path = Path()
    models: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: list[Any] = field(default_factory=list)
    average: WeightCopy | None = None
    kept: dict[str, Kept] = field(default_factory=dict)
    flops: float | None = None
    mirror: Any = None
    about: dict[str, str | None] = field(default_factory=dict)
    details: dict[str, str | None] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process
