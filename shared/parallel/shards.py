"""Checkpoints that are read in shards: with FSDP2, HSDP and tensor parallelism no rank holds a
model whole.

Inside of `in_shards` each matrix is cut by rows over the ranks that share one model: a DTensor in
host memory, which `sharding.prepare` hands on to FSDP2 or to tensor parallelism. transformers reads
the rows alone out of safetensors.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, TypeGuard
from unittest import mock

import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_module_registration_hook

from shared.process.ranks import env_flag


@cache
def _rows_of(copies: int, shards: int) -> DeviceMesh:
    # a name that PEFT knows
    return init_device_mesh("cpu", (copies, shards), mesh_dim_names=("copies", "fsdp"))["fsdp"]


def _mesh() -> DeviceMesh | None:
    """The ranks that share one model; None if each has it whole. Every rank calls this."""
    if not AcceleratorState._shared_state or env_flag("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        return None
    state = AcceleratorState()
    sizes = getattr(state, "parallelism_config", None)
    if state.distributed_type != DistributedType.FSDP and not (
        sizes is not None and sizes.tp_enabled
    ):
        return None
    copies = sizes.dp_replicate_size if sizes is not None else 1
    return _rows_of(copies, state.num_processes // copies)


def _piece(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A copy of this rank's rows of a tensor."""
    each = -(-len(tensor) // mesh.size())
    start = min(mesh.get_local_rank() * each, len(tensor))
    return tensor.detach()[start : start + each].clone()


def whole(tensor: Any) -> Any:
    """A tensor that may be cut, whole. Every rank calls this."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor


def _read(
    spawn: Callable[..., Any],
    pool: Any,
    tensor: Any,
    *args: Any,
    sharding_op: Any = None,
    tensor_idx: int | None = None,
) -> Any:
    """transformers' `spawn_materialize`. What a weight is made of by a conversion is read whole,
    when its turn comes.
    """
    if tensor_idx is not None:
        pool = sharding_op = None
    return spawn(pool, tensor, *args, sharding_op=sharding_op, tensor_idx=tensor_idx)


def _put(
    put: Callable[..., Any], model: nn.Module, name: str, value: torch.Tensor, *args: Any
) -> None:
    """transformers' `set_param_for_module`, which cuts what was read whole."""
    module, _, key = name.rpartition(".")
    before = getattr(model.get_submodule(module), key, None)
    # a copy: what safetensors gives is a view of the file, which cannot be copied later
    if isinstance(before, DTensor):
        is_whole = value.shape == before.shape
        value = _piece(value, before.device_mesh) if is_whole else value.detach().clone()
    put(model, name, value, *args)


@contextlib.contextmanager
def in_shards() -> Iterator[None]:
    """Cut the matrices of the models of transformers that are read in this block. Every rank reads
    the same ones.
    """
    from transformers import core_model_loading

    mesh = _mesh()
    # transformers 5.17 does not have it
    if mesh is None or not hasattr(core_model_loading, "DtensorShardOperation"):
        yield
        return

    def cut(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        for key, p in [] if module is None else module._parameters.items():
            if p is not None and p.ndim > 1 and p.is_meta and not isinstance(p, DTensor):
                shape: Any = {"shape": p.shape, "stride": p.stride()}
                piece = DTensor.from_local(
                    _piece(p, mesh), mesh, [Shard(0)], run_check=False, **shape
                )
                module._parameters[key] = nn.Parameter(piece, requires_grad=p.requires_grad)  # type: ignore[union-attr]

    loading: Any = core_model_loading
    ours: Any = {
        "spawn_materialize": partial(_read, loading.spawn_materialize),
        "set_param_for_module": partial(_put, loading.set_param_for_module),
    }
    with register_module_module_registration_hook(cut), mock.patch.multiple(loading, **ours):
        yield


def _exchange(model: nn.Module, new: Callable[[nn.Parameter], torch.Tensor]) -> None:
    """Put other tensors in the place of a model's parameters. Tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None and p not in made:
                value = new(p)
                made[p] = p if value is p else nn.Parameter(value, requires_grad=p.requires_grad)
            module._parameters[key] = None if p is None else made[p]


def trained_in_fp32(model: nn.Module) -> None:
    """Make the parameters that are trained fp32."""
    _exchange(
        model, lambda p: p.detach().float() if p.requires_grad and p.dtype != torch.float32 else p
    )


def _is_cut(p: torch.Tensor) -> TypeGuard[DTensor]:
    return isinstance(p, DTensor) and p.device_mesh == _mesh()  # a copied one has a mesh of its own


def make_whole(model: nn.Module) -> None:
    """Give each rank all of what `in_shards` has cut. Every rank calls this."""
    _exchange(model, lambda p: whole(p) if _is_cut(p) else p)


def take_pieces(model: nn.Module) -> dict[str, torch.Tensor]:
    """Take the weights out of a model that `in_shards` has made, and leave it on the meta device.

    Returns:
        This rank's rows of each by name; {} for any other model.
    """
    mesh = _mesh()
    if mesh is None or not any(map(_is_cut, model.parameters())):
        return {}
    pieces = {
        n: p.to_local().detach() if _is_cut(p) else _piece(p, mesh)
        for n, p in model.named_parameters()
    }
    _exchange(model, lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"))
    return pieces


def put_pieces(model: nn.Module, pieces: dict[str, torch.Tensor], device: torch.device) -> None:
    """Give a model that FSDP2 has sharded on the meta device the weights that `take_pieces` has
    taken.
    """
    names = {p: name for name, p in model.named_parameters()}

    def piece(p: Any) -> torch.Tensor:
        # from_local would move what is offloaded to the GPU
        made: Any = torch.empty_like(p, device=device)
        made.to_local().copy_(pieces.pop(names[p]))
        return made

    _exchange(model, piece)
