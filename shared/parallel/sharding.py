"""How a model is spread over processes: who reads which data, tensor parallelism, one gradient norm
for all.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from shared.data.loader import Share
from shared.data.stretches import cut
from shared.parallel.shards import make_whole, put_pieces, take_pieces
from shared.parallel.tensor import (
    give_parameters,
    split_by_mesh,
    tensor_parallel,
    tensor_parallel_mesh,
)
from shared.process import ranks
from shared.process.errors import ConfigError


def draws_rank(accelerator: Accelerator) -> int:
    """This process's place among those that compute different tokens, and draw different noise."""
    alike = ranks.data_parallel_size() * ranks.sequence_ranks()
    return accelerator.process_index // (accelerator.num_processes // alike)


def share(accelerator: Accelerator) -> Share:
    """What this process reads of the data: ranks that share a model's pieces read the same."""
    readers = ranks.data_parallel_size()
    place = accelerator.process_index // (accelerator.num_processes // readers)
    part = cut if ranks.sequence_ranks() > 1 else dict
    return Share(place, readers, accelerator.device, part)


def total(accelerator: Accelerator, value: torch.Tensor) -> torch.Tensor:
    """The sum of `value` over the data that all processes read, each piece counted once. Every rank
    calls this.
    """
    return accelerator.reduce(value, "sum") / (
        accelerator.num_processes // ranks.data_parallel_size()
    )


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizers: list[Any],
    *,
    replicas: bool = False,
) -> tuple[Any, list[Any]]:
    """Model and optimizers as the launch config wants them: on the device, wrapped, sharded. Every
    rank calls this.

    Args:
        model: whole, on every rank, the same weights; or made in `shards.in_shards`.
        optimizers: of its parameters, without state.
        replicas: do not reduce gradients between processes, or groups of HSDP: see `training.sync`.

    Returns:
        The model; the optimizers without Accelerate's wrappers, which `Strategy.update` has no use
        for.

    Raises:
        ConfigError: the model cannot be spread that way.
    """
    mesh = tensor_parallel_mesh(accelerator)
    names = {p: name for name, p in model.named_parameters()}
    groups_of = [[[names[p] for p in g["params"]] for g in o.param_groups] for o in optimizers]
    del names  # or it would keep the weights
    if mesh is not None:
        if (precision := accelerator.mixed_precision) in ("fp16", "fp8"):
            raise ConfigError(f"tensor parallelism does not work with {precision}: use bf16")
        tensor_parallel(model, mesh)
        make_whole(model)  # what is not cut: embeddings, norms
        give_parameters(optimizers, groups_of, model)
    sharded = accelerator.distributed_type == DistributedType.FSDP
    layout = accelerator.parallelism_config
    if (mesh is not None or replicas) and not sharded:
        # Accelerate would hand the model to transformers' tensor parallelism, or to DDP, which has
        # no sharded weights. It leaves models with DTensors where they are: the embeddings and
        # norms, which are whole, are still on the CPU.
        prepared = [accelerator.prepare_model(model.to(accelerator.device), evaluation_mode=True)]
        prepared += [accelerator.prepare_optimizer(optimizer) for optimizer in optimizers]
    else:
        if sharded:
            _own_what_is_left(model)
        if pieces := take_pieces(model) if sharded else {}:
            give_parameters(optimizers, groups_of, model)
        if mesh is not None:
            layout.tp_size = 1  # done above; Accelerate would do it again
        groups = layout.dp_replicate_size if layout is not None else 1
        if replicas:
            layout.dp_replicate_size = 1  # each group's FSDP knows its own ranks alone
        plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.transformer_cls_names_to_wrap is None:
            # Models name blocks of models that they could be made of, too, which Accelerate would
            # look for in vain.
            named = set(getattr(model, "_no_split_modules", None) or ())
            plugin.transformer_cls_names_to_wrap = sorted(
                named & {type(module).__name__ for module in model.modules()}
            )
        with _kept_in_bf16(model) if sharded else contextlib.nullcontext():
            prepared = accelerator.prepare(model, *optimizers)
        if pieces:  # Accelerate tells parameters apart by their addresses, which these did not have
            is_offloaded = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
            device = torch.device("cpu") if is_offloaded else accelerator.device
            put_pieces(prepared[0], pieces, device)
            given = [wrapper.optimizer for wrapper in prepared[1:]]
            give_parameters(given, groups_of, prepared[0])
        if mesh is not None:
            layout.tp_size = mesh.size()
        if replicas:
            layout.dp_replicate_size = groups
    model, *wrapped = prepared
    optimizers = [wrapper.optimizer for wrapper in wrapped]
    if mesh is not None:
        for optimizer in optimizers:
            split_by_mesh(optimizer)
    return model, optimizers


@contextlib.contextmanager
def _kept_in_bf16(model: nn.Module) -> Iterator[None]:
    """Let trained bf16 weights stay so: under mixed precision, Accelerate makes trained weights of
    FSDP fp32.
    """
    names = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and p.dtype == torch.bfloat16
    ]
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    yield
    for name in names:
        model.get_parameter(name).requires_grad_(True)


def _own_what_is_left(model: nn.Module) -> None:
    """Give the modules that `modules_to_save` replaced weights of their own: FSDP cannot cut a tied
    one in two places.
    """
    places = Counter(
        parameter for module in model.modules() for parameter in module._parameters.values()
    )
    for module in list(model.modules()):
        if hasattr(module, "modules_to_save") and isinstance(
            old := getattr(module, "original_module", None), nn.Module
        ):
            for part in old.modules():
                for name, parameter in part._parameters.items():
                    if parameter is not None and places[parameter] > 1:
                        part._parameters[name] = nn.Parameter(
                            parameter.detach().clone(), requires_grad=False
                        )
