"""Optimizers with the right decay groups, and learning rates as a function of the step alone."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shared.config import ConfigError
from shared.options import OptimConfig


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step`, counted from 0, of `total_steps`.

    A function of the step alone: there is no scheduler state to save, and nothing that steps once a process.
    """
    warmup = math.ceil(config.warmup_ratio * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.learning_rate
    decay_start = warmup
    if config.lr_scheduler_type == "wsd":
        decay_start = max(warmup, total_steps - math.ceil(config.decay_ratio * total_steps))
    progress = (step - decay_start) / (total_steps - decay_start) if total_steps > decay_start else 0.0
    progress = min(1.0, max(0.0, progress))
    shape = (1 + math.cos(math.pi * progress)) / 2 if config.lr_scheduler_type == "cosine" else 1 - progress
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def set_learning_rate(optimizers: Iterable[Optimizer], config: OptimConfig, step: int, total_steps: int) -> float:
    """Give all parameter groups the rate of `step`, and return it."""
    rate = learning_rate(config, step, total_steps)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
    return rate


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters as (hidden matrices, embeddings and output heads, norms, biases and other vectors)."""
    embeddings = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    embeddings |= set(head.parameters()) if head is not None else set()
    trainable = [p for p in model.parameters() if p.requires_grad]
    return (
        [p for p in trainable if p.ndim >= 2 and p not in embeddings],
        [p for p in trainable if p in embeddings],
        [p for p in trainable if p.ndim < 2 and p not in embeddings],
    )


def build(model: nn.Module, config: OptimConfig) -> list[Optimizer]:
    """The optimizers of a model's trainable parameters: one, or two for Muon with AdamW.

    Weight decay applies to hidden matrices alone. Hand all of them to `accelerator.prepare` together with the model.

    Raises:
        ConfigError: bitsandbytes is asked for and not installed, or nothing is trainable.
    """
    matrices, embeddings, vectors = split_parameters(model)
    if not matrices + embeddings + vectors:
        raise ConfigError("no parameter of the model is trainable")
    decayed = {"params": matrices, "weight_decay": config.weight_decay}
    plain = {"params": embeddings + vectors, "weight_decay": 0.0}
    adam: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
    }
    if config.optim == "adamw_8bit":
        if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
            raise ConfigError("--optim adamw_8bit cannot work on weights that FSDP shards: use adamw")
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError:
            raise ConfigError("--optim adamw_8bit needs bitsandbytes: pip install bitsandbytes") from None
        return [AdamW8bit([g for g in (decayed, plain) if g["params"]], **adam)]
    if config.optim == "muon" and any(p.ndim == 2 for p in matrices):
        # Matched to AdamW's update size (Moonlight, arXiv 2502.16982), so that one learning rate serves both.
        muon = torch.optim.Muon(
            [p for p in matrices if p.ndim == 2],
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            momentum=config.muon_momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        groups = [{**decayed, "params": [p for p in matrices if p.ndim > 2]}, plain]
        groups = [g for g in groups if g["params"]]
        return [muon, *([torch.optim.AdamW(groups, fused=True, **adam)] if groups else [])]
    return [torch.optim.AdamW([g for g in (decayed, plain) if g["params"]], fused=True, **adam)]
