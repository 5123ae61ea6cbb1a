"""Averages of weights that evaluations and final/ take in place of the model's."""

from collections.abc import Set

import torch
from accelerate import Accelerator
from torch import nn

from shared.models.weights import WeightCopy
from shared.parallel.gradients import local_part
from shared.parallel.kept import Read
from shared.process.printing import print_main


class MovingAverage(WeightCopy):
    """The exponential moving average of a model's weights (`--ema_decay`)."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, decay: float) -> None:
        super().__init__(accelerator, model)
        self.decay = decay

    def after(self, step: int) -> None:
        self.average_in(min(self.decay, step / (9 + step)))  # lower at first

    @torch.no_grad()
    def average_in(self, decay: float) -> None:
        """Move to the model's present weights: copy = decay * copy + (1 - decay) * present.
        Integers are taken over.
        """
        pairs = [
            (local_part(self.copies[name]), local_part(value)) for name, value in self.live.items()
        ]
        floats = [pair for pair in pairs if pair[0].is_floating_point()]
        torch._foreach_lerp_([c for c, _ in floats], [v for _, v in floats], 1 - decay)
        for copy, value in pairs:
            if not copy.is_floating_point():
                copy.copy_(value)

    def load(self, read: Read, saved: Set[str], step: int) -> None:
        if saved:
            return read(self.copies)
        self.average_in(0)
        print_main(f"the moving average begins at the weights of step {step}")
