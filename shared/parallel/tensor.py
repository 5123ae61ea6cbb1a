"""Tensor parallelism."""

import re
from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shared.parallel.shards import make_whole
from shared.process.errors import ConfigError

# Image models whose blocks have projections of heads and an MLP by these names. transformers has no
# plans for them.
IMAGE_MODELS = ("vit", "deit", "dinov2", "dinov2_with_registers")
IMAGE_PLAN = dict.fromkeys(("q_proj", "k_proj", "v_proj", "fc1", "gate_proj", "up_proj"), "colwise")
IMAGE_PLAN |= dict.fromkeys(("o_proj", "fc2", "down_proj"), "rowwise")


def tensor_parallel_mesh(accelerator: Accelerator) -> DeviceMesh | None:
    """The ranks over which each matrix is cut, or None."""
    mesh = getattr(accelerator, "torch_device_mesh", None)
    return mesh["tp"] if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) else None


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the matrices of each block over the ranks of `mesh`, in place (Megatron-LM, arXiv
    1909.08053).

    Follows the plan that transformers ships with an architecture, or IMAGE_PLAN: colwise [out /
    ranks, in], rowwise [out, in / ranks].
    An adapter is cut as the matrix that it belongs to: B with its columns, A with its rows. What
    the plan does not name (norms, embeddings) stays whole on every rank, with equal gradients.

    Raises:
        ConfigError: there is no plan, or it has a kind of cut that is not supported.
    """
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    name_of_model = type(whole).__name__
    kinds = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    decoder, config, plan = _plan_of(whole)
    if not plan or not set(plan.values()) <= set(kinds):
        foreign = ", ".join(sorted(set(plan.values()) - set(kinds))) or "none"
        raise ConfigError(
            f"{name_of_model} cannot be tensor parallel here (its plan: {foreign}): use fsdp2.yaml"
        )
    for which in ("key_value", "attention"):
        heads = getattr(config, f"num_{which}_heads", None) or mesh.size()
        if heads % mesh.size():
            what = which.replace("_", "-")
            raise ConfigError(
                f"{name_of_model} has {heads} {what} heads, which tp_size {mesh.size()} does not "
                "divide"
            )
    for name, module in decoder.named_modules():
        if re.search(r"\b(q|k|query|key)_(layer_?)?norm$", name) and any(
            True for _ in module.parameters()
        ):
            raise ConfigError(
                f"{name_of_model} cannot be tensor parallel here ({name} sees all heads): use "
                "fsdp2.yaml"
            )
    if any(
        getattr(p, "quant_state", None) is not None or not p.is_floating_point()
        for p in model.parameters()
    ):
        raise ConfigError(
            "tensor parallelism cannot cut quantised weights: use ddp.yaml or fsdp2.yaml"
        )
    patterns = {
        re.compile(re.escape(name).replace(r"\*", r"\d+")): kind for name, kind in plan.items()
    }
    matches = [
        (name, module, kind)
        for name, module in decoder.named_modules()
        for pattern, kind in patterns.items()
        if pattern.fullmatch(name)
    ]
    for name, module, kind in matches:
        size: Any = module.out_features if kind == "colwise" else module.in_features
        if size % mesh.size():
            raise ConfigError(
                f"{name_of_model}: tp_size {mesh.size()} does not divide the {size} features of "
                f"{name}"
            )
        if getattr(module, "lora_magnitude_vector", None):
            raise ConfigError("tensor parallelism does not work with --use_dora")
    for _, module, kind in matches:
        adapters = getattr(module, "lora_B" if kind == "colwise" else "lora_A", {})
        for matrix in (getattr(module, "base_layer", module), *adapters.values()):
            make_whole(matrix)  # one by one: together, they may not fit
            parallelize_module(matrix.to(mesh.device_type), mesh, kinds[kind]())


def _plan_of(model: Any) -> tuple[nn.Module, Any, dict[str, str]]:
    """(the module whose parts the plan names, its config, kinds of cuts by names, in which * stands
    for a number).
    """
    if model.main_input_name != "pixel_values":
        config = model.config.get_text_config()
        plan = getattr(config, "base_model_tp_plan", None) or {}
        # Some versions' plans cut tied embeddings, too.
        return (
            model.get_decoder(),
            config,
            {name: kind for name, kind in plan.items() if "*" in name},
        )
    if getattr(model.config, "model_type", "") not in IMAGE_MODELS:
        raise ConfigError(
            f"{type(model).__name__} cannot be tensor parallel here, as {', '.join(IMAGE_MODELS)} "
            "can: use fsdp2.yaml"
        )
    named = {
        re.sub(r"\.\d+\.", ".*.", name): IMAGE_PLAN.get(name.rpartition(".")[2])
        for name, _ in model.named_modules()
    }
    return model, model.config, {name: kind for name, kind in named.items() if kind and "*" in name}


def _give_parameters(
    optimizers: Iterable[Any], names: list[list[list[str]]], model: nn.Module
) -> None:
    """Let optimizers have a model's present parameters, by the names of each one's groups."""
    present = dict(model.named_parameters())
    for optimizer, groups in zip(optimizers, names, strict=True):
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [present[name] for name in members]


def _one_mesh_a_group(optimizer: Any) -> None:
    """Split parameter groups so that those of one group are sharded over the same ranks, as fused
    kernels require.
    """
    split = []
    for group in optimizer.param_groups:
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_mesh.setdefault(
                parameter.device_mesh if isinstance(parameter, DTensor) else None, []
            ).append(parameter)
        split += [{**group, "params": parameters} for parameters in by_mesh.values()]
    optimizer.param_groups[:] = split
