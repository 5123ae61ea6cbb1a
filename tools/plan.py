"""Predict the peak memory of one GPU under each launch config, on any machine and without weights.

python -m shared plan --model_name_or_path meta-llama/Llama-3.1-8B --seq_length 2048 --gpus 8 --gpu_memory 80

python -m shared plan --config recipes/qwen3_8b_qlora_24gb.yaml --gpus 1 --gpu_memory 24
python -m shared plan --model_name_or_path meta-llama/Llama-3.2-1B --per_device_train_batch_size 4 --throughput --gpu H100
"""

import contextlib
import json
import os
import re
import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from shared import demo
from shared.config import parse as configs
from shared.models.options import ModelConfig
from shared.process.errors import ConfigError, first_line
from tools.recipes import FOLDER


@dataclass(frozen=True)
class PlanConfig:
    """The training that is planned."""

    model_name_or_path: str = str(demo.MODEL)
    """Model, or architecture only, on the Hub or in a folder; its weights are not read."""
    model_preset: str | None = None
    """Plan pretrain.py's --model_preset instead."""
    config_name: str | None = None
    """Plan pretrain.py's --config_name instead."""
    config_overrides: str | None = None
    """Changes to the architecture: hidden_size=256,num_hidden_layers=4."""
    seq_length: int = 2048
    """Tokens of one row."""
    per_device_train_batch_size: int = 1
    """Samples of one micro-batch."""
    gpus: int = 1
    """GPUs there are."""
    gpu_memory: float = 80.0
    """Memory of one, GB (10^9 bytes)."""
    mixed_precision: Literal["bf16", "no"] = "bf16"
    """As the launch config says."""
    lora_r: int = 0
    """Rank of LoRA adapters on all linear layers, rows being packed; 0: all weights are trained."""
    load_in_4bit: bool = False
    """Quantise the frozen base to 4 bits (with lora_r)."""
    weights_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of trained weights, as full_finetune.py has it."""
    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """As the templates have it."""
    loss_type: Literal["sigmoid", "robust", "ipo", "simpo", "orpo"] | None = None
    """Plan dpo.py, whose loss this is: a sample is a pair of answers, two rows that go forward together."""
    throughput: bool = False
    """Instead estimate where the time of an optimizer step goes on one GPU, on paper."""
    gpu: str = "H100"
    """The GPU of that estimate, part of its name: H100, A100, L40S, RTX 4090; a wrong one lists all."""
    gradient_accumulation_steps: int = 1
    """Micro-batches of a step in that estimate."""
    train_tokens: float = 0
    """Tokens to train on, of all epochs, such as 20e9: the hours that they take in that estimate."""

    def __post_init__(self) -> None:
        configs.require(
            self, "at least 1", "seq_length", "per_device_train_batch_size", "gpus", "gradient_accumulation_steps"
        )
        if self.gpu_memory <= 0:
            raise ConfigError(f"--gpu_memory must be positive, not {self.gpu_memory}")
        if self.model_preset:
            ModelConfig(self.model_preset)  # refuses an unknown one
        named = self.model_preset or self.config_name or self.model_name_or_path != PlanConfig.model_name_or_path
        if self.config_overrides and not named:
            raise ConfigError("--config_overrides changes a model: name it by --model_name_or_path or --model_preset")
        if self.load_in_4bit and not self.lora_r:
            raise ConfigError("--load_in_4bit needs --lora_r: quantised weights are not trained")
        if self.weights_dtype == "bf16" and (self.lora_r or self.optim != "adamw" or self.loss_type):
            raise ConfigError("--weights_dtype bf16 is for full fine-tuning with AdamW: drop the others")
        if self.throughput and self.mixed_precision == "no":
            raise ConfigError("--throughput estimates bf16: drop --mixed_precision no")
        if self.train_tokens and not self.throughput:
            raise ConfigError("--train_tokens is for --throughput")


RESERVED = 0.08  # of a GPU, for the CUDA context, NCCL's buffers and fragmentation


def aligned(table: list[tuple[str, ...]]) -> str:
    """A table as text: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = (
        [f"{first:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(rest, widths[1:], strict=True))] for first, *rest in table
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def architecture_of(config: PlanConfig) -> Any:
    """The config of a model: of the recipes' models without the Hub, some of which need a login there."""
    from transformers import AutoConfig

    from shared.models.hub import from_hub
    from shared.models.pretraining import preset

    if config.model_preset:
        return preset(config.model_preset)
    name = config.config_name or config.model_name_or_path
    known = FOLDER / "architectures.json"  # what this command reads in their config.json
    facts = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
    return AutoConfig.for_model(**facts[name]) if name in facts else from_hub(AutoConfig, name)


def throughput_report(job: Any, config: PlanConfig) -> str:
    """Where an optimizer step's time goes, eager and compiled, and what other settings would give."""
    from tqdm import tqdm

    from shared.models.counts import experts_of
    from tools import memory, throughput
    from tools.gpus import find_gpu

    gpu = find_gpu(config.gpu)
    if experts_of(job.config)[0]:
        raise ConfigError(f"--throughput cannot count the experts of {type(job.config).__name__}")
    steps, stored, job = config.gradient_accumulation_steps, job, replace(job, four_bits=False)  # computed in bf16
    eager, compiled = (throughput.estimate(job, throughput.Setting(c, micro_batches=steps), gpu) for c in (False, True))
    table: list[tuple[str, ...]] = [("", "TFLOP", "GB", "ms", "GB compiled", "ms compiled", "share", "bound")]
    all_of_it = compiled.sum(0)[4]
    for name, plain, fused in zip(
        (*throughput.PARTS, "all"), [*eager, eager.sum(0)], [*compiled, compiled.sum(0)], strict=True
    ):
        flops, moved, by_flops, by_bytes, seconds, _ = fused
        numbers = flops / 1e12, plain[1] / 1e9, 1e3 * plain[4], moved / 1e9, 1e3 * seconds
        bound = "" if name == "all" else "compute" if by_flops > by_bytes else "bandwidth"
        table.append((name, *(f"{number:.1f}" for number in numbers), f"{seconds / all_of_it:.0%}", bound))
    rows: list[tuple[bool, float, tuple[str, ...]]] = []
    usable = config.gpu_memory * (1 - RESERVED)
    settings = [throughput.Setting(c, k, micro_batches=steps) for c in (False, True) for k in memory.CHECKPOINTING]
    settings += [
        throughput.Setting(True, fused=False, micro_batches=steps),
        throughput.Setting(True, micro_batches=8 * steps),
    ]
    settings += [throughput.Setting(True, fp8=True, micro_batches=steps)] if gpu.fp8 else []
    for larger in (job, replace(job, batch=2 * job.batch)):
        peak = next(memory.plan(replace(stored, batch=larger.batch), 1))[2]
        for chosen in tqdm(settings, f"measuring {larger.batch} x {larger.length}", leave=False, disable=None):
            seconds = throughput.estimate(larger, chosen, gpu).sum(0)[4]
            rate = larger.batch * job.length * chosen.micro_batches / seconds
            used = throughput.mfu(larger, rate, gpu)
            words = f"{chosen.micro_batches} x {larger.batch} x {job.length}, {'compiled' if chosen.compiled else 'eager'}"
            words += ", fp8" * chosen.fp8 + ", whole logits" * (not chosen.fused)
            words += f", checkpointing {chosen.checkpointing}" * (chosen.checkpointing != "none")
            gigabytes = peak.total(chosen.checkpointing) / 1e9
            memory_gb = f"{gigabytes:.0f}{'!' * (gigabytes > usable)}" if chosen.fused else "more"
            hours = (f"{config.train_tokens / rate / 3600:,.2f}",) if config.train_tokens else ()
            row = (words, f"{1e3 * seconds:.0f}", f"{rate:,.0f}", f"{used:.1%}", memory_gb, *hours)
            rows.append((gigabytes <= usable, used, row))
    header = ("settings", "ms", "tokens/s", "MFU", "memory, GB") + ("hours",) * bool(config.train_tokens)
    ranking = [header, *(row for *_, row in sorted(rows, reverse=True))]
    several = "Hours are those of one GPU; several need at least their share of them.\n" if config.train_tokens else ""
    several += "Turning 4 bits back into bf16 before each product is not counted.\n" * stored.four_bits
    assumed = ", ".join(f"{name} {share:.0%}" for name, share in throughput.SHARES.items())
    return (
        f"One optimizer step of {steps} x {job.batch} x {job.length} tokens in bf16 on one {config.gpu}.\n"
        f"An estimate on paper: nothing is measured.\n\n{aligned(table)}\n\n{aligned(ranking)}\n\n"
        f"{several}"
        "MFU is counted as a run logs it. Memory is what eager needs (see the plan without --throughput); "
        f"! is above {usable:.1f} GB, which is too much.\n"
        "FLOPs and bytes are counted from the model's operators.\n"
        f"Data sheet: {gpu.flops / 1e12:g} TFLOP/s in bf16, {gpu.bandwidth / 1e12:g} TB/s.\n"
        f"Assumed shares of it, not measured: {assumed}.\n"
        f"Assumed of a cast to fp8: it moves {throughput.FP8_TRAFFIC} times its operand's bytes.\n"
        "Left out: gaps between kernels, the L2 cache, falling clocks, data, logging and communication."
    )


def main() -> None:
    config = configs.parse(PlanConfig, description=__doc__, only_known=True)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from tqdm import tqdm

    from shared.models.hub import override
    from shared.run import launch
    from tools import memory

    launch.quieten_libraries()
    architecture = architecture_of(config)
    override(architecture, config.config_overrides)
    job = memory.Job(
        architecture,
        config.per_device_train_batch_size * (2 if config.loss_type else 1),
        config.seq_length,
        config.mixed_precision == "bf16",
        config.lora_r,
        config.load_in_4bit,
        packed=config.lora_r > 0 and not config.loss_type,  # as lora_finetune.py does
        bf16_weights=config.weights_dtype == "bf16",
        eight_bits=config.optim == "adamw_8bit",
    )
    print("measuring a few blocks on fake tensors, about a minute ...", file=sys.stderr, flush=True)
    with contextlib.redirect_stdout(sys.stderr):
        numbers = memory.count(job)
        try:
            report = throughput_report(job, config) if config.throughput else ""
            rows = [] if report else list(tqdm(memory.plan(job, config.gpus), "measuring", leave=False, disable=None))
        except (AssertionError, RuntimeError) as error:  # a forward that looks at the values of its tensors
            raise ConfigError(f"{type(architecture).__name__} cannot be measured: {first_line(error)}") from None
    if report:
        print(report)
        return
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
    print(aligned(table))
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
    recipe = next((path for flag, path in pairwise(sys.argv) if flag == "--config"), "")
    named = re.search(r"templates/(\w+)\.py", Path(recipe).read_text(encoding="utf-8")) if recipe else None
    template = "lora_finetune" if config.lora_r else "full_finetune" if config.weights_dtype == "bf16" else "pretrain"
    template = named[1] if named else "dpo" if config.loss_type else template
    flags = f" --config {recipe}" * bool(recipe)
    flags += f" --gradient_checkpointing {checkpointing}" * bool(recipe or checkpointing != "none")
    flags += " --full" * bool(config.loss_type and not config.lora_r) + " --weights_dtype bf16" * job.bf16_weights
    flags += " --optim adamw_8bit" * job.eight_bits + f" --lora_r {config.lora_r}" * bool(config.lora_r)
    flags += " --load_in_4bit" * config.load_in_4bit + f" --seq_length {config.seq_length}"
    spread = f" --parallelism_config_tp_size {gpus}" if name == "tensor_parallel" else ""
    at_once = config.per_device_train_batch_size * (1 if name == "tensor_parallel" else gpus)
    rest = "" if recipe else f" --global_batch_size {-(-16 // at_once) * at_once} ..."
    print(f"Of those that fit, this should cost least time on {gpus} GPU(s); {total:.1f} GB on each:\n")
    print(
        f"  accelerate launch --config_file accelerate_configs/{name}.yaml --num_processes {gpus}{spread} \\\n"
        f"    templates/{template}.py{flags} --per_device_train_batch_size {config.per_device_train_batch_size}{rest}"
    )
    if config.gpus > 8:
        print("\nOver several machines: multi_node_ddp.yaml for ddp, multi_node_hsdp.yaml for fsdp2; see docs/clusters.md.")
