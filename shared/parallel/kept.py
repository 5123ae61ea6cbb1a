"""What checkpoints hold of a run: the interface between its parts and the checkpointer."""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch

# Fills tensors in place, whole ones and shards, by name from a checkpoint. Raises CheckpointError
# if one is not there, or has another shape. Every rank calls it equally often.
Read = Callable[[dict[str, torch.Tensor]], None]


class Kept:
    """A part of a run that is saved in checkpoints, under a prefix of its own, and loaded on
    resume. Every rank calls its methods alike. `step`: optimizer steps done.
    """

    # Of `tensors`, a model's buffers. Floating-point ones are statistics of the samples that a rank
    # saw, as BatchNorm's: their mean is saved, and each rank's for a resume on as many ranks.
    buffers: Mapping[str, torch.Tensor] = {}

    def tensors(self, step: int) -> dict[str, Any]:
        """The live tensors by name."""
        return {}

    def load(self, read: Read, saved: Set[str], step: int) -> None:
        """Fill the live tensors.

        Args:
            saved: the names that the checkpoint has under the prefix; empty: it has no such part.
        """
        read(self.tensors(step))


@dataclass
class Tensors(Kept):
    """Tensors that are changed in place."""

    named: dict[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def tensors(self, step: int) -> dict[str, Any]:
        return self.named
