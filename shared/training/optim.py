"""Optimizers with the right decay groups, and learning rates as a function of the step alone."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shared.config.options import OptimConfig
from shared.models.blocks import heads
from shared.parallel.gradients import local_part
from shared.process.errors import ConfigError

DECAY = 0.2  # share of the run in which wsd decays


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step`, counted from 0, of `total_steps`.

    A function of the step alone: there is no scheduler state to save, and nothing that steps once a
    process.
    """
    warmup = (
        config.warmup_steps
        if config.warmup_steps >= 1
        else math.ceil(config.warmup_steps * total_steps)
    )
    if step < warmup:
        return config.peak * (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.peak
    decay_start = warmup
    if config.lr_scheduler_type == "wsd":
        decay_start = max(warmup, total_steps - math.ceil(DECAY * total_steps))
    progress = (
        (step - decay_start) / (total_steps - decay_start) if total_steps > decay_start else 0.0
    )
    progress = min(1.0, max(0.0, progress))
    shape = (
        (1 + math.cos(math.pi * progress)) / 2
        if config.lr_scheduler_type == "cosine"
        else 1 - progress
    )
    return config.peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def set_learning_rate(
    optimizers: Iterable[Optimizer], config: OptimConfig, step: int, total_steps: int
) -> float:
    """Give all parameter groups the rate of `step`, scaled by their layer's factor, and return it
    unscaled.
    """
    rate = learning_rate(config, step, total_steps)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            _set_rate(group, rate * group.get("lr_scale", 1.0))
    return rate


def _set_rate(group: dict[str, Any], rate: float) -> None:
    # torchao's optimizers, which would compile again for each number
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


# Parameters whose names end so are no weight matrices, whatever their shape: Levit's and Swin's
# position biases, Swin 2's temperatures, Mamba's decay rates.
VECTORS = ("bias", "biases", "_bias_table", "logit_scale", "A_log")


def _token_head(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of what turns features into scores of tokens; empty for a model of something
    else.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return set() if head is None else set(head.parameters())


def head_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Parameters of what turns features into scores, of tokens or classes; empty where it is not
    known.
    """
    if found := _token_head(model):
        return found
    try:
        return {p for module in heads(model) for p in module.parameters()}
    except ConfigError:
        return set()


def split_parameters(
    model: nn.Module,
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters as (hidden matrices, embeddings and output heads, norms, biases and
    other vectors).

    Convolutions count as matrices, and so do the heads of image models. Vectors are, too, what has
    one dimension above 1 at most, class tokens and position embeddings of vision models, which are
    added to every sample alike ([1, positions, width]) or to attention scores, and what is named as
    one.
    """
    embeddings = {
        p
        for m in model.modules()
        if isinstance(m, nn.Embedding)
        for p in m.parameters(recurse=False)
    }
    embeddings |= _token_head(model)
    trainable = {p: name for name, p in model.named_parameters() if p.requires_grad}

    def is_vector(p: nn.Parameter) -> bool:
        plain = sum(size > 1 for size in p.shape) < 2 or (p.ndim == 3 and p.shape[0] == 1)
        return plain or trainable[p].endswith(VECTORS)

    return (
        [p for p in trainable if p not in embeddings and not is_vector(p)],
        [p for p in trainable if p in embeddings],
        [p for p in trainable if p not in embeddings and is_vector(p)],
    )


def build(model: nn.Module, config: OptimConfig) -> list[Optimizer]:
    """The optimizers of a model's trainable parameters: one, or two for Muon with AdamW.

    Weight decay applies to hidden matrices alone. Hand all of them to `Setup.prepare` together
    with the model.

    Raises:
        ConfigError: torchao is asked for and not installed, nothing is trainable, or --optim would
            lose updates of bf16 weights.
    """
    matrices, embeddings, vectors = split_parameters(model)
    if not matrices + embeddings + vectors:
        raise ConfigError("no parameter of the model is trainable")
    scales: dict[nn.Parameter, float] = {}
    if config.layer_decay < 1:
        from shared.extras.optimizers.layer_decay import layer_scales

        scales = layer_scales(model, config.layer_decay)

    def groups(
        decaying: list[nn.Parameter], others: Sequence[nn.Parameter] = ()
    ) -> list[dict[str, Any]]:
        # a group costs the optimizer a launch of its own
        alike: dict[tuple[float, float], list[nn.Parameter]] = {}
        for weight_decay, parameters in ((config.weight_decay, decaying), (0.0, others)):
            for parameter in parameters:
                # a vision tower has its own
                scale = getattr(parameter, "lr_scale", scales.get(parameter, 1.0))
                alike.setdefault((weight_decay, scale), []).append(parameter)
        return [
            {"params": ps, "weight_decay": decay, "lr_scale": scale}
            for (decay, scale), ps in alike.items()
        ]

    plain = embeddings + vectors
    everything = groups(matrices, plain)
    adam: dict[str, Any] = {
        "lr": config.peak,
        "betas": (config.adam_beta1, config.adam_beta2),
    }
    if any(p.dtype == torch.bfloat16 for p in (*matrices, *plain)):
        if config.optim != "adamw":
            raise ConfigError(
                f"--optim {config.optim} would lose small updates of bf16 weights: use adamw"
            )
        from shared.extras.optimizers.low_memory import StochasticAdamW

        return [StochasticAdamW(everything, **adam)]
    if config.optim == "adamw_8bit":
        from shared.extras.optimizers.low_memory import adamw_8bit

        try:
            return [adamw_8bit(everything, **adam)]
        except ImportError:
            raise ConfigError("--optim adamw_8bit needs torchao: pip install torchao") from None
    if config.optim == "sgd":
        return [torch.optim.SGD(everything, lr=config.peak, momentum=0.9, nesterov=True)]
    head = head_parameters(model)
    orthogonal = [p for p in matrices if p.ndim == 2 and p not in head]
    if config.optim == "muon" and orthogonal:
        from shared.extras.optimizers.muon import Muon

        muon = Muon(groups(orthogonal), lr=config.peak, momentum=0.95)
        rest = groups([p for p in matrices if p.ndim > 2 or p in head], plain)
        return [muon, *([torch.optim.AdamW(rest, fused=True, **adam)] if rest else [])]
    return [torch.optim.AdamW(everything, fused=True, **adam)]


def fill_state(optimizer: Any) -> None:
    """Make an optimizer allocate its state, to be loaded into: a step on zero gradients at rate
    0.
    """
    if optimizer.state:
        return
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    new: list[Any] = []
    for group in optimizer.param_groups:
        _set_rate(group, 0.0)
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                new.append(parameter)
    optimizer.step()
    # DDP's, which are zero by now, stay: from another tensor DDP takes a mean by other arithmetic
    for parameter in new:
        parameter.grad = None
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        _set_rate(group, rate)


def state_tensors(optimizer: Optimizer) -> Iterator[tuple[nn.Parameter, str, Any]]:
    """The live state as (parameter, key, value). 8-bit moments come as two plain tensors each."""
    parameter: Any
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if hasattr(local_part(value), "codes"):
                from shared.extras.optimizers.low_memory import moments

                yield from ((parameter, *named) for named in moments(key, value, parameter))
            else:
                yield parameter, key, value
