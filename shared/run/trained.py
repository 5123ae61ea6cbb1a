"""What checkpoints hold: trained weights, the optimizers' state, the models' buffers."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shared.models.weights import persistent_buffers
from shared.parallel.gradients import local_part, reshard
from shared.parallel.kept import Kept, Read, Tensors
from shared.process.printing import print_main
from shared.run.prepared import Prepared
from shared.training import optim


def kept_of(prepared: Prepared) -> dict[str, Kept]:
    """All that checkpoints hold of a run, by prefix, in the order of loading: an average may begin
    at the weights that were loaded. Every rank calls this, with all models prepared.

    Replicas that train apart (--sync_every) each have weights, state and buffers of their own.
    """
    strategy = prepared.strategy
    trainable: dict[str, nn.Parameter] = {}
    buffers: dict[str, torch.Tensor] = {}
    for name, model in prepared.models.items():
        prefix = "" if name == "model" else f"{name}/"
        whole = prepared.accelerator.unwrap_model(model)
        reshard(whole)  # gathered weights are other Parameter objects
        # After `fully_shard` a tied parameter has two names; `named_parameters` gives the first
        # alone.
        trainable |= {prefix + n: p for n, p in whole.named_parameters() if p.requires_grad}
        buffers |= {prefix + n: buffer for n, buffer in persistent_buffers(whole).items()}
    own = strategy.prefix
    trained = strategy.engine(trainable) or Trained(trainable, prepared.optimizers, bool(own))
    kept = {own: trained, f"{own}model.": Tensors(buffers, buffers)}
    return kept | strategy.kept() | prepared.kept


@dataclass
class Trained(Kept):
    """Trained weights, and the optimizers' state.

    Args:
        trainable: by name.
        local: save this rank's shards as whole tensors: no other rank has the same ones.
    """

    trainable: Mapping[str, nn.Parameter]
    optimizers: list[Any]
    local: bool

    def __post_init__(self) -> None:
        self.name_of = {p: name for name, p in self.trainable.items()}

    def tensors(self, step: int) -> dict[str, Any]:
        own = {f"model.{name}": p.detach() for name, p in self.trainable.items()}
        for optimizer in self.optimizers:
            for parameter, key, value in optim.state_tensors(optimizer):
                own[f"optimizer.{self.name_of[parameter]}.{key}"] = value
        return {name: local_part(value) if self.local else value for name, value in own.items()}

    def load(self, read: Read, saved: Set[str], step: int) -> None:
        """State that the checkpoint lacks is dropped, as of parameters that never had a gradient,
        or of another --optim.
        """
        new = set()
        for optimizer in self.optimizers:
            optim.fill_state(optimizer)
            for parameter, key, _ in [*optim.state_tensors(optimizer)]:
                name = self.name_of[parameter]
                if f"optimizer.{name}.{key}" not in saved:
                    optimizer.state.pop(parameter, None)
                    new.add(name)
        if new:
            print_main(
                f"warning: {len(new)} parameters, such as {min(new)}, have no optimizer state in "
                "the checkpoint, and begin with a new optimizer state"
            )
        read(self.tensors(step))
