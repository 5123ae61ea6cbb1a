"""The Accelerator made right for the launch config: checks, CPU rehearsal, seeds, exit codes, a settings summary."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import AORecipeKwargs, DistributedDataParallelKwargs, broadcast_object_list, set_seed
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from shared import config as configs
from shared import zero
from shared.config import CleanExit, ConfigError
from shared.data import seed_all
from shared.options import BatchConfig

C = TypeVar("C")
T = TypeVar("T")


class OutOfMemory(CleanExit):
    """The device's memory does not suffice: what it holds, and which lever to pull next."""

    exit_code = 2

    def __init__(self, error: torch.OutOfMemoryError, config: Any) -> None:
        rows, checkpointing = config.batch.per_device_train_batch_size, config.speed.gradient_checkpointing
        sharded, deepspeed = _flag("ACCELERATE_USE_FSDP"), _flag("ACCELERATE_USE_DEEPSPEED")
        pipeline, cut = configs.pipeline_ranks() > 1, _flag("ACCELERATE_USE_PARALLELISM_CONFIG")
        find = "" if deepspeed or pipeline else " (or --find_batch_size)"
        whole = not (sharded or deepspeed or pipeline or cut)  # every process holds the whole model
        levers = [
            (rows > 1, f"--per_device_train_batch_size {rows // 2}{find}: what is learned stays the same"),
            (checkpointing != "full", "--gradient_checkpointing full: recomputes activations, a third slower"),
            (whole, "accelerate_configs/fsdp2.yaml on several GPUs: each holds its share only"),
            (whole and config.optim.optim == "adamw", "--optim adamw_8bit: a quarter of the optimizer's state"),
            (pipeline, "more --pipeline_ranks"),
            (
                not (pipeline or _flag("FSDP_OFFLOAD_PARAMS")),
                "accelerate_configs/fsdp2_offload.yaml: weights in the machine's memory",
            ),
            (True, "shorter rows, or a smaller model"),
        ]
        if torch.cuda.is_available():
            print(torch.cuda.memory_summary(abbreviated=True), file=sys.stderr)
        advice = [text for applies, text in levers if applies]
        super().__init__(
            f"out of memory: {configs.first_line(error)}\n  next: {advice[0]}\n  then: {'; '.join(advice[1:])}\n"
            "  `python -m shared plan --help` predicts what fits"
        )


def run(main: Callable[[C], None], config: C) -> None:
    """Call `main(config)` and end with one line and the exit code that names the cause. Every rank calls this.

    Exit codes: 0 done, 2 input or configuration, 3 checkpoint, 4 loss or gradient not finite, 143 stopped by a
    signal after a checkpoint, 1 with a traceback for anything unforeseen. `accelerate launch` itself turns every
    failure into 1.
    """
    with configs.clean_exit():
        try:
            main(config)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(error, config) from None
    if configs.world_size() > 1:
        # All ranks are done and every file is written. The interpreter's own teardown can abort in a thread that a
        # process group left behind, which would make a finished run look failed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def start(seed: int, *, log_with: str | None = None) -> Accelerator:
    """Make the `Accelerator` that the launch config asks for, or refuse. Every rank calls this, first of all.

    Accumulation, clipping and learning-rate schedules are the template's own; the launch config decides on
    processes, strategy and precision alone.

    Raises:
        ConfigError: the launch would train something else than it seems to: processes that each believe they are
            alone, or a second answer to a question that the template's config already answers.
    """
    _quieten_libraries()
    accumulation = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if accumulation not in ("1", "auto"):
        raise ConfigError(
            f"gradient_accumulation_steps is {accumulation} in the launch config, but accumulation follows from "
            "--global_batch_size and --per_device_train_batch_size: remove it from the launch config"
        )
    world_size = configs.world_size()
    on_cpu = _flag("ACCELERATE_USE_CPU")
    if world_size > 1 and not on_cpu and not _has_accelerator_device():
        raise ConfigError(
            f"{world_size} processes were launched but no GPU is visible, so each would train a model of its own. "
            "Put ACCELERATE_USE_CPU=true before the command to rehearse this launch config on CPU"
        )
    _use_all_cores(world_size)
    rehearsal = on_cpu and world_size > 1 and _rehearse_on_cpu()
    accelerator = Accelerator(
        log_with=log_with,
        # No copy of the gradients into buckets, and no broadcast of buffers that do not change in training.
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False),
            *([_fp8_recipe()] if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8" else []),
        ],
    )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None and plugin.mixed_precision_policy is not None:  # sums over ranks in fp32, as DDP's are
        policy = dataclasses.replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)
        plugin.mixed_precision_policy = policy
    if rehearsal and plugin is not None and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning is for copies to a GPU
    if zero.is_used(accelerator):
        zero.make_whole_models()
    if zero.is_used(accelerator) != _flag("ACCELERATE_USE_DEEPSPEED"):
        raise ConfigError("the launch config asks for DeepSpeed, and Accelerate did not start it")
    if accelerator.num_processes != world_size:
        raise ConfigError(
            f"{world_size} processes were launched but Accelerate sees {accelerator.num_processes}: "
            "start with `accelerate launch --config_file accelerate_configs/...`"
        )
    if accelerator.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 where fp32 is asked for
        if accelerator.mixed_precision == "no" and torch.cuda.is_bf16_supported():
            say(
                "warning: training in fp32 on a GPU that has bf16, which is several times faster: "
                "add `--mixed_precision bf16` after `accelerate launch`"
            )
    if on_cpu and world_size > 1:
        say(f"rehearsal: {strategy(accelerator)}: {world_size} CPU processes in place of GPUs")
    set_seed(seed)
    return accelerator


def on_main(function: Callable[[], T]) -> T:
    """Call `function` on the main rank alone and give every rank its result, or its `CleanExit`. Every rank calls this.

    For what must be decided once: a look at the file system, say, which ranks could see differently. Not for minutes
    of work, in which the waiting ranks' collective would time out (see `data.build_once`).
    """
    outcome: list[Any] = [None]
    if configs.is_main_rank():
        try:
            outcome = [function()]
        except CleanExit as error:
            outcome = [error]
    broadcast_object_list(outcome)
    if isinstance(outcome[0], CleanExit):
        raise outcome[0]
    return outcome[0]


def say(text: str) -> None:
    """Print one line on the main rank, above a progress bar if there is one."""
    if configs.is_main_rank():
        from tqdm import tqdm

        tqdm.write(configs.redact(text), file=sys.stderr)
        sys.stderr.flush()


def summary(title: str, rows: dict[str, Any]) -> None:
    """Print the settings in force, one aligned line each, on the main rank. Rows that are None are left out."""
    rows = {k: v for k, v in rows.items() if v is not None}
    width = max(map(len, rows))
    say("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())]))


def batch_line(batch: BatchConfig, accelerator: Accelerator, unit: str) -> str:
    """How a global batch is made up, for the summary."""
    accumulation = batch.accumulation_steps()
    per_device, readers = batch.per_device_train_batch_size, configs.data_parallel_size()
    processes = f"{readers} process(es)"
    if accelerator.num_processes > readers:
        processes = f"{readers} group(s) of {accelerator.num_processes // readers} processes"
    return f"{batch.global_batch_size} {unit} = {processes} x {per_device} at once x {accumulation} accumulated"


def strategy(accelerator: Accelerator) -> str:
    """How this run is spread, for people: `1 process on cuda`, `FSDP x 8 on cuda, bf16`."""
    kind, count = accelerator.distributed_type, accelerator.num_processes
    sizes = getattr(accelerator, "parallelism_config", None)
    if kind == DistributedType.NO:
        spread = "1 process"
    elif configs.pipeline_ranks() > 1:
        spread = f"PP {configs.pipeline_ranks()} x DDP {configs.data_parallel_size()}"
    elif kind == DistributedType.DEEPSPEED:
        spread = f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage} x {count}"
    elif sizes is not None and sizes.total_size > 1:
        parts = {
            "HSDP": f"{sizes.dp_replicate_size} x {sizes.dp_shard_size}" if sizes.dp_replicate_size > 1 else "",
            "FSDP2": str(sizes.dp_shard_size) if sizes.dp_replicate_size == 1 and sizes.dp_shard_size > 1 else "",
            "TP": str(sizes.tp_size) if sizes.tp_size > 1 else "",
            "CP": str(sizes.cp_size) if sizes.cp_size > 1 else "",
        }
        spread = " x ".join(f"{name} {size}" for name, size in parts.items() if size)
    else:
        spread = f"{'FSDP2' if kind == DistributedType.FSDP else 'DDP'} x {count}"
    precision = {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    return f"{spread} on {accelerator.device.type}, {precision}"


def seed_step(seed: int, step: int, rank: int) -> None:
    """Derive all randomness of one optimizer step (dropout, say) from (seed, step, rank).

    Nothing random is carried from step to step, so a resumed run needs no saved generator state to continue bit
    for bit, and evaluation, sampling or a library that draws in between changes nothing. Every rank calls this.
    """
    seed_all(seed, step, rank)


def _has_accelerator_device() -> bool:
    return torch.accelerator.is_available()


def _use_all_cores(world_size: int) -> None:
    """Share this machine's cores among its processes where the model is computed on them.

    `accelerate launch` and torchrun set OMP_NUM_THREADS=1 when nobody did, which leaves all cores but one idle.
    """
    if os.environ.get("OMP_NUM_THREADS", "1") == "1" and not _has_accelerator_device():
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))))


def _fp8_recipe() -> AORecipeKwargs:
    """Matrix products of the blocks in fp8 with one scale a tensor; the head, adapters and odd shapes stay in bf16."""
    try:
        from torchao.float8 import Float8LinearConfig
    except ImportError:
        raise ConfigError("mixed_precision fp8 needs torchao: pip install torchao==0.18.0") from None
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        raise ConfigError(f"{torch.cuda.get_device_name()} has no fp8 (H100 and later, L4, RTX 40 have): use bf16")

    def is_of_a_block(module: nn.Module, name: str) -> bool:
        if type(module) is not nn.Linear or not re.search(r"\.\d+\.", name) or "lora_" in name:
            return False
        return module.in_features % 16 == 0 and module.out_features % 16 == 0

    # Accelerate's default would have FSDP gather weights in fp8, as a kind of tensor that cannot be saved.
    return AORecipeKwargs(config=Float8LinearConfig(), module_filter_func=is_of_a_block)


def _rehearse_on_cpu() -> bool:
    """Make Accelerate honour DeepSpeed, FSDP and parallelism configs in a CPU process group, not turn them to DDP.

    Accelerate looks at `fsdp_config` and `ParallelismConfig` only where the state says MULTI_GPU, and at DeepSpeed only
    where it is not told to use the CPU. Plain DDP stays MULTI_CPU, because MULTI_GPU would hand it device ids of GPUs.

    Returns:
        Whether this is a rehearsal of a sharded strategy.
    """
    asked = {name for name in ("DEEPSPEED", "FSDP", "PARALLELISM_CONFIG") if _flag(f"ACCELERATE_USE_{name}")}
    state = PartialState(cpu=True)
    if not asked or state.distributed_type != DistributedType.MULTI_CPU:
        return False
    if "DEEPSPEED" in asked:
        os.environ["DS_ACCELERATOR"] = "cpu"
        del os.environ["ACCELERATE_USE_CPU"]
    state.distributed_type = DistributedType.DEEPSPEED if "DEEPSPEED" in asked else DistributedType.MULTI_GPU
    return True


def _flag(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true", "yes")


def _quieten_libraries() -> None:
    """Keep from the console what a user cannot act on. Errors stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if not (configs.is_main_rank() and sys.stderr.isatty()):
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
    noisy = ("accelerate", "transformers", "peft", "datasets", "torch.distributed", "torch.utils", "matplotlib", "DeepSpeed")
    for name in noisy:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|accelerate|transformers|peft|bitsandbytes)\b")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|accelerate|transformers|peft|bitsandbytes)\b")
