"""How a model is spread over processes: who reads which data, tensor parallelism, one gradient norm for all."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shared import config as configs
from shared import zero
from shared.config import ConfigError

# Who reads what ------------------------------------------------------------------------------------------------------


def data_rank(accelerator: Accelerator) -> int:
    """This process's place among those that read different data: ranks that share a model's pieces read the same."""
    return accelerator.process_index // (accelerator.num_processes // configs.data_parallel_size())


def share(accelerator: Accelerator) -> dict[str, Any]:
    """What a `Loader` must know of this process: rank and world_size among those that read different data, device."""
    return {
        "rank": data_rank(accelerator),
        "world_size": configs.data_parallel_size(),
        "device": accelerator.device,
    }


def total(accelerator: Accelerator, value: torch.Tensor) -> torch.Tensor:
    """The sum of `value` over the data that all processes read, each piece counted once. Every rank calls this."""
    return accelerator.reduce(value, "sum") / (accelerator.num_processes // configs.data_parallel_size())


# Spreading a model -----------------------------------------------------------------------------------------------------


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizers: list[Any], *, max_grad_norm: float, comm_hook: str = "none"
) -> tuple[Any, list[Any]]:
    """Model and optimizers as the launch config wants them: on the device, wrapped, sharded. Every rank calls this.

    Args:
        model: whole, on every rank, the same weights.
        optimizers: of its parameters, without state.
        max_grad_norm: DeepSpeed clips inside its own step, so it must know.
        comm_hook: none, bf16 or fp16: the type in which DDP reduces gradients.

    Returns:
        The model; the optimizers without Accelerate's wrappers, which `steps.update` has no use for.

    Raises:
        ConfigError: the model or the optimizers cannot be spread that way, or the launch config has an answer of its own
            to a question that the template's config answers.
    """
    mesh = tensor_parallel_mesh(accelerator)
    if zero.is_used(accelerator):
        zero.configure(accelerator, optimizers, max_grad_norm)
    if mesh is not None:
        if accelerator.mixed_precision == "fp16":
            raise ConfigError("tensor parallelism does not work with fp16's loss scaling: use bf16")
        if any(type(optimizer).__module__.startswith("bitsandbytes") for optimizer in optimizers):
            raise ConfigError("--optim adamw_8bit cannot work on weights that are cut over ranks: use adamw")
        if accelerator.mixed_precision == "fp8":
            raise ConfigError("tensor parallelism does not work with fp8: use bf16, or fsdp2.yaml")
        names = {p: name for name, p in model.named_parameters()}
        tensor_parallel(model, mesh)
        _replace_parameters(optimizers, names, dict(model.named_parameters()))
    if mesh is not None and accelerator.distributed_type != DistributedType.FSDP:
        # Accelerate would hand the model to transformers' tensor parallelism, or to DDP, which has no sharded weights.
        prepared = [accelerator.prepare_model(model, evaluation_mode=True)]
        prepared += [accelerator.prepare_optimizer(optimizer) for optimizer in optimizers]
    else:
        layout = accelerator.parallelism_config
        if mesh is not None:
            layout.tp_size = 1  # done above; Accelerate would do it again
        if accelerator.distributed_type == DistributedType.FSDP:
            _own_what_is_left(model)
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.transformer_cls_names_to_wrap is None:
            # Models name blocks of models that they could be made of, too, which Accelerate would look for in vain.
            named = set(getattr(model, "_no_split_modules", None) or ())
            plugin.transformer_cls_names_to_wrap = sorted(named & {type(module).__name__ for module in model.modules()})
        prepared = accelerator.prepare(model, *optimizers)
        if mesh is not None:
            layout.tp_size = mesh.size()
    model, *wrapped = prepared
    optimizers = [wrapper.optimizer for wrapper in wrapped]
    if comm_hook != "none":
        if not isinstance(model, DistributedDataParallel):
            raise ConfigError("--ddp_comm_hook needs the processes of ddp.yaml")
        model.register_comm_hook(None, {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}[comm_hook])
    if mesh is not None:
        for optimizer in optimizers:
            _one_mesh_a_group(optimizer)
    return model, optimizers


def tensor_parallel_mesh(accelerator: Accelerator) -> DeviceMesh | None:
    """The ranks over which each matrix is cut, or None."""
    mesh = getattr(accelerator, "torch_device_mesh", None)
    return mesh["tp"] if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) else None


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the matrices of each block over the ranks of `mesh`, in place (Megatron-LM, arXiv 1909.08053).

    Follows the plan that transformers ships with an architecture: colwise [out / ranks, in], rowwise [out, in / ranks].
    An adapter is cut as the matrix that it belongs to: B with its columns, A with its rows. What the plan does not name
    (norms, embeddings) stays whole on every rank, with equal gradients.

    Raises:
        ConfigError: there is no plan, or it has a kind of cut that is not supported.
    """
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    decoder = getattr(whole, getattr(whole, "base_model_prefix", ""), whole)
    plan: dict[str, str] = getattr(whole.config, "base_model_tp_plan", None) or {}  # type: ignore[union-attr, assignment]
    plan = {name: kind for name, kind in plan.items() if "*" in name}  # some versions' plans cut tied embeddings, too
    kinds = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    name_of_model = type(whole).__name__
    if not plan or not set(plan.values()) <= set(kinds):
        foreign = ", ".join(sorted(set(plan.values()) - set(kinds))) or "none"
        raise ConfigError(f"{name_of_model} cannot be tensor parallel here (its plan: {foreign}): use fsdp2.yaml")
    for which in ("key_value", "attention"):
        heads = getattr(whole.config, f"num_{which}_heads", None) or mesh.size()
        if heads % mesh.size():
            what = which.replace("_", "-")
            raise ConfigError(f"{name_of_model} has {heads} {what} heads, which tp_size {mesh.size()} does not divide")
    for name, module in decoder.named_modules():
        if re.search(r"\b(q|k|query|key)_(layer_?)?norm$", name) and any(True for _ in module.parameters()):
            raise ConfigError(f"{name_of_model} cannot be tensor parallel here ({name} sees all heads): use fsdp2.yaml")
    if any(getattr(p, "quant_state", None) is not None or not p.is_floating_point() for p in model.parameters()):
        raise ConfigError("tensor parallelism cannot cut quantised weights: use ddp.yaml or fsdp2.yaml")
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): kind for name, kind in plan.items()}
    matches = [
        (name, module, kind)
        for name, module in decoder.named_modules()
        for pattern, kind in patterns.items()
        if pattern.fullmatch(name)
    ]
    for name, module, kind in matches:
        size: Any = module.out_features if kind == "colwise" else module.in_features
        if size % mesh.size():
            raise ConfigError(f"{name_of_model}: tp_size {mesh.size()} does not divide the {size} features of {name}")
        if getattr(module, "lora_magnitude_vector", None):
            raise ConfigError("tensor parallelism does not work with --use_dora")
    for _, module, kind in matches:
        adapters = getattr(module, "lora_B" if kind == "colwise" else "lora_A", {})
        for matrix in (getattr(module, "base_layer", module), *adapters.values()):
            parallelize_module(matrix.to(mesh.device_type), mesh, kinds[kind]())  # one by one: whole, they may not fit


def _own_what_is_left(model: nn.Module) -> None:
    """Give the modules that `modules_to_save` replaced weights of their own: FSDP cannot cut a tied one in two places."""
    places = Counter(parameter for module in model.modules() for parameter in module._parameters.values())
    for module in list(model.modules()):
        if hasattr(module, "modules_to_save") and isinstance(old := getattr(module, "original_module", None), nn.Module):
            for part in old.modules():
                for name, parameter in part._parameters.items():
                    if parameter is not None and places[parameter] > 1:
                        part._parameters[name] = nn.Parameter(parameter.detach().clone(), requires_grad=False)


def _replace_parameters(optimizers: Iterable[Any], names: dict[nn.Parameter, str], new: dict[str, nn.Parameter]) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [new[names[p]] for p in group["params"]]


def _one_mesh_a_group(optimizer: Any) -> None:
    """Split parameter groups so that those of one group are sharded over the same ranks, as fused kernels require."""
    split = []
    for group in optimizer.param_groups:
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        split += [{**group, "params": parameters} for parameters in by_mesh.values()]
    optimizer.param_groups[:] = split


def keeps_gradients(accelerator: Accelerator) -> bool:
    """Whether to zero gradients in place: DDP's are views of its buckets; new ones would take their memory once more."""
    ddp = accelerator.distributed_type in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    sizes = accelerator.parallelism_config
    return ddp and not (sizes is not None and sizes.tp_enabled)


def end_step(model: nn.Module) -> None:
    """Let FSDP forget a forward or backward that an exception has ended.

    As `FSDPModule.reset_iter_state` of torch 2.15 does, which 2.11 has not.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._training_state = TrainingState.IDLE
            state._state_ctx.post_backward_final_callback_queued = False
            state._state_ctx.iter_forward_root = None
            state._modules_to_run_forward.clear()
            for group in state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]:
                if group is not None:
                    group._training_state = TrainingState.IDLE
                    group._post_forward_indices.clear()
            module.reshard()


def held(accelerator: Accelerator, model: nn.Module, optimizers: Iterable[Any]) -> dict[str, float]:
    """The share of all weights, and of the optimizer's state, that this process keeps between steps.

    Empty for a pipeline, whose ranks do not know the whole.
    """
    if configs.pipeline_ranks() > 1:
        return {}

    def pieces(parameters: Iterable[torch.Tensor]) -> float:
        mine = everything = 0
        for p in parameters:
            local = p.to_local() if isinstance(p, DTensor) else getattr(p, "ds_tensor", p)
            mine, everything = mine + local.numel(), everything + getattr(p, "ds_numel", p.numel())
        return mine / everything

    shares = {"weights": pieces(accelerator.unwrap_model(model).parameters())}
    if zero.is_used(accelerator):
        return shares | {"optimizer state": 1 / accelerator.num_processes}  # from stage 1 on
    trained = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    return shares | {"optimizer state": pieces(trained)}


def holds(accelerator: Accelerator, model: nn.Module, optimizers: Iterable[Any]) -> str | None:
    """`held` in words, for the summary; None where one process has everything."""
    if accelerator.num_processes == 1:
        return None
    return ", ".join(f"{share:.0%} of the {name}" for name, share in held(accelerator, model, optimizers).items())


# Gradients -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def gradient_norm(accelerator: Accelerator, gradients: list[torch.Tensor]) -> torch.Tensor:
    """L2 norm of all gradients as one vector, wherever their pieces are: scalar, the same on all ranks.

    Each rank adds up its pieces, each divided by the number of ranks that hold the same piece, so that one sum over all
    ranks counts everything once. Not a collective where every rank holds whole gradients. Every rank calls this.
    """
    pieces: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        copies = accelerator.num_processes // configs.pipeline_ranks()
        if isinstance(gradient, DTensor):
            for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
                assert not isinstance(placement, Partial)
                copies //= 1 if isinstance(placement, Replicate) else size
            gradient = gradient.to_local()
        pieces.setdefault(copies, []).append(gradient)
    if set(pieces) <= {accelerator.num_processes}:
        return nn.utils.get_total_norm(next(iter(pieces.values()), [])).to(accelerator.device)
    norms = {copies: nn.utils.get_total_norm(tensors).to(accelerator.device) for copies, tensors in pieces.items()}
    squares = torch.stack([norm.square() / copies for copies, norm in norms.items()]).sum()
    dist.all_reduce(squares)
    return squares.sqrt()


@torch.no_grad()
def scale_gradients(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all gradients in place by `factor`, a scalar tensor."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        piece = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        by_device.setdefault(piece.device, []).append(piece)
    for device, pieces in by_device.items():
        torch._foreach_mul_(pieces, factor.to(device))
