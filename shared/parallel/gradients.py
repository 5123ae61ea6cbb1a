"""Gradients that are sharded over processes."""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from shared.process import ranks


def keeps_gradients(accelerator: Accelerator) -> bool:
    """Whether to zero gradients in place. DDP's are views of its buckets; new gradients would need
    that memory again.
    """
    ddp = accelerator.distributed_type in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    sizes = accelerator.parallelism_config
    return ddp and not (sizes is not None and sizes.tp_enabled)


def end_step(model: nn.Module) -> None:
    """Reset FSDP's state after an exception in a forward or backward pass.

    `FSDPModule.reset_iter_state` of torch 2.15 does the same; torch 2.11 does not have it.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._training_state = TrainingState.IDLE
            state._state_ctx.post_backward_final_callback_queued = False
            state._state_ctx.iter_forward_root = None
            state._modules_to_run_forward.clear()
            for group in (
                state._fsdp_param_groups
                if hasattr(state, "_fsdp_param_groups")
                else [state._fsdp_param_group]
            ):
                if group is not None:
                    group._training_state = TrainingState.IDLE
                    group._post_forward_indices.clear()
            module.reshard()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor; the tensor itself where it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(model: nn.Module) -> None:
    """Drop the weights that FSDP2 has gathered, perhaps in 16 bits, for a forward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gradient_norm(
    accelerator: Accelerator, gradients: list[torch.Tensor], group: Any = None
) -> torch.Tensor:
    """L2 norm of all gradients as one vector, however they are sharded: scalar, the same on all
    ranks.

    Each rank sums the squares of its shards, divided by the number of ranks that hold the same
    shard. So one all-reduce counts each value once. If every rank holds whole gradients, no
    all-reduce is needed. Every rank calls this.

    Args:
        group: the process group that shares the model; None: all ranks.
    """
    pieces: dict[int, list[torch.Tensor]] = {}
    count = accelerator.num_processes if group is None else dist.get_world_size(group)
    for gradient in gradients:
        copies = count // ranks.pipeline_ranks()
        if isinstance(gradient, DTensor):
            for size, placement in zip(
                gradient.device_mesh.shape, gradient.placements, strict=True
            ):
                assert not placement.is_partial()
                copies //= 1 if placement.is_replicate() else size
        pieces.setdefault(copies, []).append(local_part(gradient))
    norms = {
        copies: nn.utils.get_total_norm(tensors).to(accelerator.device)
        for copies, tensors in pieces.items()
    }
    if set(norms) <= {count}:
        return next(iter(norms.values()), torch.zeros((), device=accelerator.device))
    squares = torch.stack([norm.square() / copies for copies, norm in norms.items()]).sum()
    dist.all_reduce(squares, group=group)
    return squares.sqrt()
