"""The Accelerator made right for the launch config: checks, CPU rehearsal, seeds, a settings
summary.
"""

import contextlib
import dataclasses
import datetime
import importlib
import logging
import os
import re
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import (
    AORecipeKwargs,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    compare_versions,
    patch_environment,
    set_seed,
)
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.rendezvous import register_rendezvous_handler

from shared.config.options import BatchConfig
from shared.data.loader import use_tokenizer_threads
from shared.process import faults, ranks
from shared.process.errors import ConfigError, NotNow
from shared.process.printing import note
from shared.process.signals import end_with_the_launcher
from shared.run import exits


def optional(module: str) -> Any:
    """A module of an extra that a project may do without: None if it does."""
    try:
        return importlib.import_module(f"shared.extras.{module}")
    except ModuleNotFoundError:
        return None


def start(
    seed: int, *, log_with: str | None = None, timeout: float = 1800, deterministic: bool = False
) -> Accelerator:
    """Make the `Accelerator` that the launch config asks for, or refuse. Every rank calls this,
    first of all.

    Accumulation, clipping and learning-rate schedules are the template's own; the launch config
    decides on processes, strategy and precision alone. From here on `signals.STOP_SIGNALS` end the
    run with code 143.

    Args:
        seed: of all generators.
        log_with: tracker, by Accelerate's name.
        timeout: seconds that a rank waits for the others in a collective before it ends with an
            error.
        deterministic: use kernels alone that give the same bits each time.

    Raises:
        ConfigError: the launch would train something else than it seems to: processes that each
            believe they are alone, or a second answer to a question that the template's config
            already answers.
        NotNow: processes for GPUs, of which none is visible, or GPUs that PyTorch cannot use.
    """
    exits.stop_at_once()
    end_with_the_launcher()
    faults.point("setup")
    on_cpu = ranks.env_flag("ACCELERATE_USE_CPU")
    world_size = ranks.world_size()
    if not on_cpu and not torch.accelerator.is_available():
        _refuse_missing_gpus(world_size)
    quieten_libraries()
    _refuse_second_answers()
    _refuse_fewer_processes_than_asked_for()
    _use_all_cores(world_size)
    if deterministic:
        # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # which transformers hands on
        # before NCCL starts, which then takes a fixed order, too
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it costs time
    wait = datetime.timedelta(seconds=timeout)
    group: dict[str, Any] = {"timeout": wait} | _anew()
    with patch_environment(**_sequence_ranks_in_dp()):
        rehearsal = on_cpu and "RANK" in os.environ and _rehearse_on_cpu(group)
        is_deepspeed = ranks.env_flag("ACCELERATE_USE_DEEPSPEED")
        of_several = "LOCAL_RANK" in os.environ and not is_deepspeed
        if of_several and not on_cpu and torch.cuda.is_available():
            # objects go through gloo: NCCL would take memory of the GPUs for them
            group["backend"] = "cuda:nccl,cpu:gloo"
        accelerator = Accelerator(
            log_with=log_with,
            # Trackers that write files insist on a folder; `tracking.Tracker` names the run's.
            project_config=ProjectConfiguration(logging_dir="."),
            # No copy of the gradients into buckets, and no broadcast of buffers that do not change
            # in training.
            kwargs_handlers=[
                DistributedDataParallelKwargs(
                    gradient_as_bucket_view=True, broadcast_buffers=False
                ),
                InitProcessGroupKwargs(**group),
                *([_fp8_recipe()] if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8" else []),
            ],
        )
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    if policy := getattr(plugin, "mixed_precision_policy", None):
        # Sums over ranks in fp32, as DDP's are, and a loss that the model returns is not rounded to
        # 16 bits.
        plugin.mixed_precision_policy = dataclasses.replace(
            policy, reduce_dtype=torch.float32, output_dtype=None
        )
    if rehearsal and plugin and isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # pinning is for copies to a GPU
    if accelerator.num_processes != world_size:
        raise ConfigError(
            f"{world_size} processes were launched but Accelerate sees "
            f"{accelerator.num_processes}: "
            "start with `accelerate launch --config_file accelerate_configs/...`"
        )
    if accelerator.device.type == "cpu" and accelerator.mixed_precision == "fp16":
        raise ConfigError(
            "fp16 needs a GPU, and none is in use: launch on one, or with `--mixed_precision no`"
        )
    if accelerator.device.type == "cuda":
        # TF32 where fp32 is asked for; but models of older versions compute angles of positions by
        # matrix products, also in mixed precision, and TF32 cannot tell the position 2049 from
        # 2048.
        if accelerator.mixed_precision == "no" and compare_versions("transformers", ">=", "5.23"):
            torch.set_float32_matmul_precision("high")
        # not on a T4, say
        better = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        if accelerator.mixed_precision in {"no", "bf16"} - {better}:
            note(
                f"warning: this GPU computes in {better} several times faster: "
                f"add `--mixed_precision {better}` after `accelerate launch`"
            )
    set_seed(seed)
    return accelerator


def batch_line(batch: BatchConfig, accelerator: Accelerator, unit: str) -> str:
    """How a global batch is made up, for the summary."""
    at_once, accumulation = batch.micro_batch()
    readers = ranks.data_parallel_size()
    processes = f"{readers} process{'es' * (readers > 1)}"
    if accelerator.num_processes > readers:
        of_group = accelerator.num_processes // readers
        processes = f"{readers} group{'s' * (readers > 1)} of {of_group} processes"
    return (
        f"{batch.global_batch_size} {unit} = {processes} x {at_once} at once x "
        f"{accumulation} accumulated"
    )


def strategy(accelerator: Accelerator) -> str:
    """How this run is spread, for people: `1 process on cpu, fp32` or `FSDP2 x 8 on cuda: NVIDIA
    H200, bf16`.
    """
    kind = accelerator.distributed_type
    count = accelerator.num_processes
    sizes = getattr(accelerator, "parallelism_config", None)
    if kind == DistributedType.NO:
        spread = "1 process"
    elif ranks.pipeline_ranks() > 1:
        spread = f"PP {ranks.pipeline_ranks()} x DDP {ranks.data_parallel_size()}"
    elif kind == DistributedType.DEEPSPEED:
        spread = f"ZeRO-{accelerator.state.deepspeed_plugin.zero_stage} x {count}"
    elif sizes is not None and sizes.total_size > 1:
        copies = sizes.dp_replicate_size
        shards = sizes.dp_shard_size
        sharded = f"HSDP {copies} x {shards}" if copies > 1 else f"FSDP2 {shards}" * (shards > 1)
        cut = f"TP {sizes.tp_size}" * (sizes.tp_size > 1)
        spread = " x ".join(filter(None, (sharded, cut)))
    else:
        spread = f"{'FSDP2' if kind == DistributedType.FSDP else 'DDP'} x {count}"
    if ranks.sequence_ranks() > 1:
        spread += f" with SP {ranks.sequence_ranks()}"
    precision = {"no": "fp32"}.get(accelerator.mixed_precision, accelerator.mixed_precision)
    if torch.get_float32_matmul_precision() != "highest":
        precision += " (TF32 in matrix products)"
    repeats = ", deterministic" if torch.are_deterministic_algorithms_enabled() else ""
    device = accelerator.device.type
    if device == "cuda":
        device += f": {torch.cuda.get_device_name()}"
    return f"{spread} on {device}, {precision}{repeats}"


def _refuse_second_answers() -> None:
    """Raise ConfigError where the launch config answers what the template's config answers, or a
    way that is not offered.

    Wrappers that the launch config asks for would also give weights other names, in final/ and in
    checkpoints.
    """
    fsdp = ranks.env_flag("ACCELERATE_USE_FSDP")
    answers = {
        "gradient_accumulation_steps": (
            os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1"),
            ("1", "auto"),
            "give --global_batch_size and --per_device_train_batch_size, from which it follows",
        ),
        "dynamo_backend": (
            os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower(),
            ("", "no"),
            "give --torch_compile",
        ),
        "fsdp_activation_checkpointing": (
            str(fsdp and ranks.env_flag("FSDP_ACTIVATION_CHECKPOINTING")),
            ("False",),
            "give --gradient_checkpointing full",
        ),
        "fsdp_version": (
            os.environ.get("FSDP_VERSION", "1") if fsdp else "2",
            ("2",),
            "use fsdp2.yaml, or --fsdp_version 2",
        ),
    }
    for name, (value, accepted, instead) in answers.items():
        if value not in accepted:
            raise ConfigError(
                f"{name} is {value} in the launch config: remove it there, and {instead}"
            )


def _refuse_fewer_processes_than_asked_for() -> None:
    """Raise ConfigError where Accelerate starts one process although --num_processes says several:
    it does so in silence.
    """
    launcher = _of_launcher("cmdline").replace("\0", " ")
    asked = re.search(r" --num[_-]processes[ =](\d+)", launcher)
    if "launch" in launcher and asked and int(asked[1]) > 1 and "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            f"--num_processes {asked[1]}, but this launch config starts one process: take "
            "ddp.yaml, on a CPU with ACCELERATE_USE_CPU=true before the command and without --cpu"
        )


def _of_launcher(what: str) -> str:
    """The `cmdline` or the `environ` that this process's parent was started with; empty where /proc
    does not tell.
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{os.getppid()}/{what}").read_text(encoding="utf-8", errors="replace")
    return ""


def has_compiler() -> bool:
    """Whether a C compiler and Python's headers are installed, which torch.compile needs on GPUs,
    too.
    """
    names = os.environ.get("CC", "gcc"), os.environ.get("CXX", "g++"), "clang"
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return headers.exists() and any(map(shutil.which, names))


def _refuse_missing_gpus(world_size: int) -> None:
    """Raise NotNow where this machine has NVIDIA GPUs that PyTorch cannot use, since a CPU would
    train, a hundred times slower; and where several processes have no GPU.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    if not hidden and _nvidia_gpus():
        raise NotNow(
            f"this machine has a GPU, but PyTorch {torch.__version__} cannot use it: it was built "
            "without CUDA, or needs a newer driver (see `nvidia-smi`). Put ACCELERATE_USE_CPU=true "
            "before the command to train on the CPU"
        )
    if world_size > 1:
        raise NotNow(
            f"{world_size} processes were launched but no GPU is visible, so each would "
            "train a model of its own. "
            "Put ACCELERATE_USE_CPU=true before the command to rehearse this launch config on CPU"
        )


def _nvidia_gpus() -> list[Path]:
    return list(Path("/dev").glob("nvidia[0-9]*"))


def _use_all_cores(world_size: int) -> None:
    """Share this machine's cores among its processes: they compute models, offloaded optimizers,
    decompositions of matrices.

    `accelerate launch` and torchrun set OMP_NUM_THREADS=1 when nobody did, which leaves all cores
    but one idle. The user's own stands in the launcher's environment, too.
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None or (threads == "1" and _is_launchers_own("OMP_NUM_THREADS")):
        torch.set_num_threads(
            max(1, ranks.cores() // int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
        )


def _is_launchers_own(variable: str) -> bool:
    """Whether the launcher has set a variable that it was not started with itself."""
    launches = re.search(r"launch|torch\.distributed|torchrun", _of_launcher("cmdline"))
    return bool(launches) and f"\0{variable}=" not in "\0" + _of_launcher("environ")


def _anew() -> dict[str, Any]:
    """How processes find each other where the launcher has restarted them (--max_restarts): apart
    from the addresses and marks of earlier ones, which its store still has.

    Launchers on several machines may count their restarts differently: docs/resuming.md.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restart == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return {}

    def meet(_url: str, timeout: datetime.timedelta, **_: Any) -> Iterator[Any]:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, timeout=timeout)
        yield PrefixStore(f"restart {restart}", store), ranks.rank(), ranks.world_size()

    register_rendezvous_handler("restart", meet)
    return {"init_method": "restart://"}


def _fp8_recipe() -> AORecipeKwargs:
    """Matrix products of the blocks in fp8 with one scale a tensor; the head, adapters and odd
    shapes stay in bf16.
    """
    from torchao.float8 import Float8LinearConfig

    def is_of_a_block(module: nn.Module, name: str) -> bool:
        if type(module) is not nn.Linear or not re.search(r"\.\d+\.", name) or "lora_" in name:
            return False
        return module.in_features % 16 == 0 and module.out_features % 16 == 0

    # Accelerate's default would have FSDP gather weights in fp8, as a kind of tensor that cannot be
    # saved. Kernels ask for multiples of 16, the tokens of a micro-batch included, which rows of
    # any length are padded to.
    return AORecipeKwargs(
        config=Float8LinearConfig(pad_inner_dim=True), module_filter_func=is_of_a_block
    )


def _sequence_ranks_in_dp() -> dict[str, Any]:
    """The environment that hides sp_size from Accelerate, which would ask DeepSpeed for it: these
    ranks reduce gradients as more ranks of DDP, or shards of FSDP.
    """
    if ranks.sequence_ranks() == 1:
        return {}
    ranks.data_parallel_size()  # refuses sizes that do not fit the processes
    if not ranks.env_flag("ACCELERATE_USE_FSDP"):
        return {"ACCELERATE_USE_PARALLELISM_CONFIG": "false"}
    size = "PARALLELISM_CONFIG_DP_SHARD_SIZE"
    shards = int(os.environ.get(size, "1")) * ranks.sequence_ranks()
    return {size: shards, "PARALLELISM_CONFIG_SP_SIZE": 1}


def _rehearse_on_cpu(group: dict[str, Any]) -> bool:
    """Make Accelerate honour DeepSpeed, FSDP and parallelism configs in a CPU process group, not
    turn them to DDP.

    Accelerate looks at `fsdp_config` and `ParallelismConfig` only where the state says MULTI_GPU,
    and at DeepSpeed only where it is not told to use the CPU. Plain DDP stays MULTI_CPU, because
    MULTI_GPU would hand it device ids of GPUs.

    Returns:
        Whether this is a rehearsal of a sharded strategy.
    """
    asked = {
        name
        for name in ("DEEPSPEED", "FSDP", "PARALLELISM_CONFIG")
        if ranks.env_flag(f"ACCELERATE_USE_{name}")
    }
    state = PartialState(cpu=True, **group)
    if not asked or state.distributed_type != DistributedType.MULTI_CPU:
        return False
    if "DEEPSPEED" in asked:
        os.environ["DS_ACCELERATOR"] = "cpu"
        del os.environ["ACCELERATE_USE_CPU"]
        import deepspeed.ops

        # All-reduce through shared memory: gloo does it, too, and needs no compiler and no minute
        # to compile.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    state.distributed_type = (
        DistributedType.DEEPSPEED if "DEEPSPEED" in asked else DistributedType.MULTI_GPU
    )
    return True


def quieten_libraries() -> None:
    """Keep from the console what a user cannot act on. Errors stay."""
    use_tokenizer_threads(True)
    if not (ranks.is_main_rank() and sys.stderr.isatty()):
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
    noisy = (
        "accelerate",
        "transformers",
        "peft",
        "datasets",
        "torch.distributed",
        "torch.utils",
        "matplotlib",
        "DeepSpeed",
    )
    for name in noisy:
        logging.getLogger(name).setLevel(logging.ERROR)
    libraries = r"(torch|accelerate|transformers|peft|bitsandbytes)\b"
    for category in (UserWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=libraries)
