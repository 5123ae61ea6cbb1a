"""Predict the peak memory of one GPU under each launch config, on any machine and without weights.

python -m shared plan --model_name_or_path meta-llama/Llama-3.1-8B --seq_length 2048 --gpus 8 --gpu_memory 80
"""

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared import demo
from shared.config import parse as configs
from shared.process.errors import ConfigError, first_line


@dataclass(frozen=True)
class PlanConfig:
    """The training that is planned."""

    model_name_or_path: str = str(demo.MODEL)
    """Model, or architecture only, on the Hub or in a folder; its weights are not read."""
    config_overrides: str | None = None
    """Changes to the architecture: hidden_size=256,num_hidden_layers=4."""
    seq_length: int = 2048
    """Tokens of one row."""
    per_device_train_batch_size: int = 1
    """Rows of one micro-batch."""
    gpus: int = 8
    """GPUs there are."""
    gpu_memory: float = 80.0
    """Memory of one, GB (10^9 bytes)."""
    mixed_precision: Literal["bf16", "no"] = "bf16"
    """As the launch config says."""
    lora_r: int = 0
    """Rank of LoRA adapters on all linear layers, rows being packed; 0: all weights are trained."""
    load_in_4bit: bool = False
    """Quantise the frozen base to 4 bits (with lora_r)."""

    def __post_init__(self) -> None:
        configs.require(self, "at least 1", "seq_length", "per_device_train_batch_size", "gpus")
        if self.gpu_memory <= 0:
            raise ConfigError(f"--gpu_memory must be positive, not {self.gpu_memory}")
        if self.load_in_4bit and not self.lora_r:
            raise ConfigError("--load_in_4bit needs --lora_r: quantised weights are not trained")


RESERVED = 0.08  # of a GPU, for the CUDA context, NCCL's buffers and fragmentation


def main() -> None:
    config = configs.parse(PlanConfig, description=__doc__)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers import AutoConfig

    from shared.models import memory
    from shared.models.hub import from_hub, override
    from shared.run import launch

    launch.quieten_libraries()
    architecture = from_hub(AutoConfig, config.model_name_or_path)
    override(architecture, config.config_overrides)
    job = memory.Job(
        architecture,
        config.per_device_train_batch_size,
        config.seq_length,
        config.mixed_precision == "bf16",
        config.lora_r,
        config.load_in_4bit,
        packed=config.lora_r > 0,  # as lora_finetune.py does
    )
    print("measuring a few blocks on fake tensors ...", file=sys.stderr, flush=True)
    with contextlib.redirect_stdout(sys.stderr):
        numbers = memory.count(job)
        try:
            rows = list(memory.plan(job, config.gpus))
        except (AssertionError, RuntimeError) as error:  # a forward that looks at the values of its tensors
            raise ConfigError(f"{type(architecture).__name__} cannot be measured: {first_line(error)}") from None
    print(
        f"{type(architecture).__name__.removesuffix('Config')}, {numbers.all / 1e9:.3f} B parameters, "
        f"{numbers.trained / 1e9:.3f} B trained; micro-batch {job.batch} x {job.length} tokens, "
        f"{'bf16 over fp32' if job.mixed else 'fp32'}. GB a GPU:\n"
    )
    header: tuple[str, ...] = ("launch config", "GPUs", "weights", "gradients", "optimizer")
    header += tuple(f"activations {c}" for c in memory.CHECKPOINTING) + tuple(f"peak {c}" for c in memory.CHECKPOINTING)
    table = [header]
    usable = config.gpu_memory * (1 - RESERVED)
    fitting: list[tuple[str, str, int, float]] = []
    for name, gpus, peak in rows:
        cells = [peak.weights, peak.gradients, peak.optimizer, *(peak.activations[c] for c in memory.CHECKPOINTING)]
        totals = [peak.total(c) / 1e9 for c in memory.CHECKPOINTING]
        marks = [f"{t:.1f}{' ' if t <= usable else '!'}" for t in totals]
        table.append((name, str(gpus), *(f"{c / 1e9:.1f}" for c in cells), *marks))
        fitting += [(name, c, gpus, t) for c, t in zip(memory.CHECKPOINTING, totals, strict=True) if t <= usable]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    for first, *rest in table:
        print("  ".join([f"{first:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(rest, widths[1:], strict=True))]))
    print(
        f"\nactivations and peak: without gradient checkpointing, of every 2nd block, of all. ! is over {usable:.1f} GB "
        f"({config.gpu_memory:g} GB less {RESERVED:.0%} for CUDA, NCCL and fragmentation)."
    )
    # Offloading costs most, then tensor parallelism, then recomputing. FSDP's gathers run beside the computation.
    last = {"tensor_parallel": 1, "fsdp2_offload": 2}
    several = [found for found in fitting if found[2] == config.gpus]
    several.sort(key=lambda found: (last.get(found[0], 0), memory.CHECKPOINTING.index(found[1])))
    if not several:
        print("Nothing fits: a smaller micro-batch or --seq_length, more GPUs, LoRA (--lora_r), 4 bits (--load_in_4bit).")
        return
    name, checkpointing, gpus, total = several[0]
    flags = "" if checkpointing == "none" else f" --gradient_checkpointing {checkpointing}"
    spread = f" --parallelism_config_tp_size {gpus}" if name == "tensor_parallel" else ""
    print(f"Of those that fit, this should cost least time on {gpus} GPU(s); {total:.1f} GB on each:\n")
    template = "lora_finetune" if config.lora_r else "pretrain"
    places = (f"templates/{template}.py", f"{template}.py")  # here and in a project of several templates
    script = next((place for place in places if (Path(__file__).parents[2] / place).exists()), "train.py")
    if config.lora_r:
        flags += f" --lora_r {config.lora_r}" + (" --load_in_4bit" if config.load_in_4bit else "")
    at_once = config.per_device_train_batch_size * (1 if name == "tensor_parallel" else gpus)
    print(
        f"  accelerate launch --config_file accelerate_configs/{name}.yaml --num_processes {gpus}{spread} \\\n"
        f"    {script}{flags} --per_device_train_batch_size {config.per_device_train_batch_size} "
        f"--global_batch_size {-(-16 // at_once) * at_once} ..."
    )
