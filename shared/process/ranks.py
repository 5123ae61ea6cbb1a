"""This process's place in the launch, from the environment alone: no torch."""

import contextlib
import math
import os
from pathlib import Path

from shared.process.errors import ConfigError


def rank() -> int:
    """This process's number in the launch, known from the environment before any process group
    exists.
    """
    return int(os.environ.get("RANK") or "0")


def is_main_rank() -> bool:
    """Whether this process prints."""
    return rank() == 0


def world_size() -> int:
    """Processes of this launch, known from the environment before any process group exists."""
    return int(os.environ.get("WORLD_SIZE") or "1")


def cores() -> int:
    """Processors that this process may use: its own, or fewer where its container has a quota, as
    of `docker run --cpus`.
    """
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return int(min(own, max(1, _quota())))


CGROUP = Path("/sys/fs/cgroup")


def _quota() -> float:
    with contextlib.suppress(OSError, ValueError):  # there is no such file; it says "max"
        quota, period = map(int, (CGROUP / "cpu.max").read_text().split())
        return quota / period
    return math.inf


def env_flag(name: str) -> bool:
    """Whether an environment variable, of Accelerate's launcher for one, says yes, in the words
    that Accelerate knows.
    """
    return os.environ.get(name, "").lower() in ("y", "yes", "t", "true", "on", "1")


_pipeline_ranks = 1


def set_pipeline_ranks(ranks: int) -> None:
    """Say that each model's stages are on so many neighbouring ranks. A template of pipelines calls
    this at its start.
    """
    global _pipeline_ranks
    _pipeline_ranks = ranks


def pipeline_ranks() -> int:
    """Ranks that hold the stages of one model."""
    return _pipeline_ranks


def sequence_ranks() -> int:
    """Neighbouring ranks that share a row's tokens: see `parallel.sequence`."""
    used = env_flag("ACCELERATE_USE_PARALLELISM_CONFIG")
    return int(os.environ.get("PARALLELISM_CONFIG_SP_SIZE", "1")) if used else 1


def data_parallel_size() -> int:
    """Processes of this launch that read different data: all, over those that share one model's
    pieces or a row's tokens.

    Raises:
        ConfigError: the launch config's sizes do not divide the number of processes.
    """
    if not env_flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        if world_size() % _pipeline_ranks:
            raise ConfigError(
                f"{world_size()} processes cannot be split into pipelines of "
                f"{_pipeline_ranks} ranks: "
                f"`accelerate launch --num_processes {_pipeline_ranks}`, or a multiple of that"
            )
        return world_size() // _pipeline_ranks
    sizes = {
        name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) for name in PARALLELISM
    }
    if world_size() != math.prod(sizes.values()):
        product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise ConfigError(
            f"{world_size()} processes were launched, but the launch config's sizes are {product}: "
            f"`accelerate launch --num_processes {math.prod(sizes.values())}`, or other sizes"
        )
    of_models = sizes["tp_size"] > 1 or env_flag("ACCELERATE_USE_DEEPSPEED")
    if sizes["cp_size"] > 1 or (sizes["sp_size"] > 1 and of_models):
        raise ConfigError(
            "cp_size, and sp_size with tp_size or DeepSpeed, do not work: "
            "use sequence_parallel.yaml or fsdp2_sequence_parallel.yaml"
        )
    is_cut = sizes["dp_shard_size"] > 1
    if env_flag("ACCELERATE_USE_FSDP"):
        fits = is_cut or sizes["sp_size"] > 1
    else:  # nothing would reduce gradients
        fits = not is_cut and (sizes["dp_replicate_size"] == 1 or sizes["sp_size"] > 1)
    if not fits:
        raise ConfigError(
            "dp_shard_size above 1 and FSDP need each other: use fsdp2.yaml or ddp.yaml"
        )
    return sizes["dp_replicate_size"] * sizes["dp_shard_size"]


PARALLELISM = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
