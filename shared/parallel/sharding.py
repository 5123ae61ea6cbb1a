"""How a model is spread over processes: who reads which data, tensor parallelism, one gradient norm
for all.
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from shared.data.loader import Share
from shared.parallel.shards import put_pieces, take_pieces
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
    if ranks.sequence_ranks() > 1:
        from shared.extras.sequence.stretches import cut

        return Share(place, readers, accelerator.device, cut)
    return Share(place, readers, accelerator.device)


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
        replicas: do not reduce gradients between processes, or groups of HSDP:
            see `extras.replicas`.

    Returns:
        The model; the optimizers without Accelerate's wrappers, which `Strategy.update` has no use
        for.

    Raises:
        ConfigError: the model cannot be spread that way.
    """
    mesh = getattr(accelerator, "torch_device_mesh", None)
    # the ranks over which each matrix is cut
    mesh = mesh["tp"] if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) else None
    names = {p: name for name, p in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["param_names"] = [names[p] for p in group["params"]]
    del names  # or it would keep the weights
    if mesh is not None:
        from shared.extras import tensor

        tensor.cut(accelerator, model, optimizers, mesh)
        give_parameters(optimizers, model)
    if accelerator.distributed_type == DistributedType.FSDP:
        model, optimizers = _shard(accelerator, model, optimizers, replicas=replicas)
    elif mesh is not None or replicas:
        # Accelerate would hand the model to transformers' tensor parallelism, or to DDP, which has
        # no sharded weights.
        model = accelerator.prepare_model(model.to(accelerator.device), evaluation_mode=True)
    else:
        model, *wrapped = accelerator.prepare(model, *optimizers)
        optimizers = [wrapper.optimizer for wrapper in wrapped]
    if mesh is not None:
        for optimizer in optimizers:
            tensor.split_by_mesh(optimizer)
    return model, optimizers


def give_parameters(optimizers: Iterable[Any], model: nn.Module) -> None:
    """Let optimizers have a model's present parameters, by the names in their groups."""
    present = dict(model.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [present[name] for name in group["param_names"]]


def _shard(
    accelerator: Accelerator, model: nn.Module, optimizers: list[Any], *, replicas: bool
) -> tuple[Any, list[Any]]:
    """`prepare` for FSDP2."""
    plugin: Any = accelerator.state.fsdp_plugin
    layout: Any = accelerator.parallelism_config
    _own_what_is_left(model)
    kept = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float32]
    if kept and any(p.requires_grad and p.dtype == torch.bfloat16 for p in model.parameters()):
        raise ConfigError(
            f"the model keeps {len(kept)} weights in fp32, such as {kept[0]}, which FSDP cannot "
            "shard together with bf16 ones: use ddp.yaml, or --weights_dtype fp32"
        )
    if plugin.transformer_cls_names_to_wrap is None:
        # Models name blocks of models that they could be made of, too, which Accelerate would look
        # for in vain.
        named = set(getattr(model, "_no_split_modules", None) or ())
        plugin.transformer_cls_names_to_wrap = sorted(
            named & {type(module).__name__ for module in model.modules()}
        )
    if pieces := take_pieces(model):
        give_parameters(optimizers, model)
    sizes = dict(vars(layout)) if layout is not None else {}
    if sizes:
        layout.tp_size = 1  # done already; Accelerate would do it again
    if replicas:
        layout.dp_replicate_size = 1  # each group's FSDP knows its own ranks alone
    with _kept_in_bf16(model):
        model, *wrapped = accelerator.prepare(model, *optimizers)
    if sizes:
        vars(layout).update(sizes)
    optimizers = [wrapper.optimizer for wrapper in wrapped]
    if pieces:  # Accelerate tells parameters apart by their addresses, which these did not have
        is_offloaded = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        put_pieces(model, pieces, torch.device("cpu") if is_offloaded else accelerator.device)
        give_parameters(optimizers, model)
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
        replaced = getattr(module, "original_module", None)
        if not (hasattr(module, "modules_to_save") and isinstance(replaced, nn.Module)):
            continue
        for part in replaced.modules():
            for name, p in part._parameters.items():
                if p is not None and places[p] > 1:
                    part._parameters[name] = nn.Parameter(p.detach().clone(), requires_grad=False)
