"""Tensor parallelism."""

import re
from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shared.parallel.shards import make_whole
from shared.process.errors import ConfigError

KINDS = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def cut(accelerator: Accelerator, model: nn.Module, optimizers: list[Any], mesh: Any) -> None:
    """Cut a model over the ranks of `mesh`, in place, before it is on the device.

    Raises:
        ConfigError: the precision or the optimizer does not allow it; see `tensor_parallel`.
    """
    if (precision := accelerator.mixed_precision) in ("fp16", "fp8"):
        raise ConfigError(f"tensor parallelism does not work with {precision}: use bf16")
    if any(hasattr(optimizer, "block_size") for optimizer in optimizers):  # of 8-bit moments
        raise ConfigError("--optim adamw_8bit does not work with tensor parallelism: use adamw")
    tensor_parallel(model, mesh)
    make_whole(model)  # what is not cut: embeddings, norms


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the matrices of each block over the ranks of `mesh`, in place (Megatron-LM, arXiv
    1909.08053).

    Follows the plan that transformers ships with an architecture: colwise [out / ranks, in],
    rowwise [out, in / ranks].
    An adapter is cut as the matrix that it belongs to: B with its columns, A with its rows. What
    the plan does not name (norms, embeddings) stays whole on every rank, with equal gradients.

    Raises:
        ConfigError: there is no plan, it has a kind of cut that is not supported, or the model
            would compute something else.
    """
    whole: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    name_of_model = type(whole).__name__
    config = whole.config.get_text_config()
    # Some versions' plans cut tied embeddings, too.
    plan = getattr(config, "base_model_tp_plan", None) or {}
    plan = {name: kind for name, kind in plan.items() if "*" in name}
    if not plan or not set(plan.values()) <= set(KINDS):
        foreign = ", ".join(sorted(set(plan.values()) - set(KINDS))) or "none"
        raise ConfigError(
            f"{name_of_model} cannot be tensor parallel here (its plan: {foreign}): use fsdp2.yaml"
        )
    for which in ("key_value", "attention"):
        heads = getattr(config, f"num_{which}_heads", None) or mesh.size()
        if heads % mesh.size():
            what = which.replace("_", "-")
            raise ConfigError(
                f"{name_of_model} has {heads} {what} heads, which tp_size "
                f"{mesh.size()} does not divide"
            )
    if any(hasattr(p, "quant_state") or not p.is_floating_point() for p in model.parameters()):
        raise ConfigError(
            "tensor parallelism cannot cut quantised weights: use ddp.yaml or fsdp2.yaml"
        )
    patterns = {
        re.compile(re.escape(name).replace(r"\*", r"\d+")): kind for name, kind in plan.items()
    }
    parts = dict(whole.get_decoder().named_modules())
    for name, module in parts.items():
        if re.search(r"\b(q|k|query|key)_(layer_?)?norm$", name) and [*module.parameters()]:
            raise ConfigError(
                f"{name_of_model} cannot be tensor parallel here ({name} sees "
                "all heads): use fsdp2.yaml"
            )
    for name, module in parts.items():
        for pattern, kind in patterns.items():
            if pattern.fullmatch(name):
                if getattr(module, "lora_magnitude_vector", None):
                    raise ConfigError("tensor parallelism does not work with --use_dora")
                adapters = getattr(module, "lora_B" if kind == "colwise" else "lora_A", {})
                for matrix in (getattr(module, "base_layer", module), *adapters.values()):
                    make_whole(matrix)  # one by one: together, they may not fit
                    parallelize_module(matrix.to(mesh.device_type), mesh, KINDS[kind]())


def split_by_mesh(optimizer: Any) -> None:
    """Split parameter groups so that those of one group are sharded over the same ranks, as fused
    kernels require.
    """
    split = []
    for group in optimizer.param_groups:
        by_mesh: dict[Any, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        split += [{**group, "params": parameters} for parameters in by_mesh.values()]
    optimizer.param_groups[:] = split
