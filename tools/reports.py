"""What `python -m shared plan` prints."""

import json
import re
import sys
import textwrap
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import AutoConfig

from shared.models.counts import experts_of
from shared.models.hub import from_hub
from shared.models.pretraining import preset
from shared.process.errors import ConfigError
from tools import memory, support, throughput
from tools.gpus import GPU, find_gpu
from tools.plan import RESERVED, PlanConfig
from tools.recipes import FOLDER
from tools.throughput import Setting


def aligned(table: list[tuple[str, ...]]) -> str:
    """A table as text: the first column to the left, the others to the right."""
    first, *others = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [[row[0].ljust(first), *map(str.rjust, row[1:], others)] for row in table]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def architecture_of(config: PlanConfig, name: str = "") -> Any:
    """The config of a model: of the recipes' models without the Hub, some of which need a login
    there.
    """
    if config.model_preset and not name:
        return preset(config.model_preset)
    name = name or config.config_name or config.model_name_or_path
    known = FOLDER / "architectures.json"  # what this command reads in their config.json
    facts = json.loads(known.read_text(encoding="utf-8")) if known.exists() else {}
    return AutoConfig.for_model(**facts[name]) if name in facts else from_hub(AutoConfig, name)


def parts_table(job: memory.Job, gpu: GPU, micro_batches: int) -> str:
    """Where an optimizer step's time goes, eager and compiled."""
    eager = throughput.estimate(job, Setting(micro_batches=micro_batches), gpu)
    compiled = throughput.estimate(job, Setting(True, micro_batches=micro_batches), gpu)
    table: list[tuple[str, ...]] = [
        ("", "TFLOP", "GB", "ms", "GB compiled", "ms compiled", "share", "bound")
    ]
    parts = [
        *zip(throughput.PARTS, eager, compiled, strict=True),
        ("all", eager.sum(0), compiled.sum(0)),
    ]
    for name, plain, fused in parts:
        flops, moved, by_flops, by_bytes, seconds, _ = fused
        numbers = flops / 1e12, plain[1] / 1e9, 1e3 * plain[4], moved / 1e9, 1e3 * seconds
        bound = "" if name == "all" else "compute" if by_flops > by_bytes else "bandwidth"
        share = seconds / compiled.sum(0)[4]
        table.append((name, *(f"{number:.1f}" for number in numbers), f"{share:.0%}", bound))
    return aligned(table)


def ranking(job: memory.Job, config: PlanConfig, gpu: GPU, micro_batches: int) -> str:
    """What settings give, the best that fits first. 4 bits count for memory alone: products are
    computed in bf16.
    """
    settings = [
        Setting(c, k, micro_batches=micro_batches)
        for c in (False, True)
        for k in memory.CHECKPOINTING
    ]
    settings += [
        Setting(True, fused=False, micro_batches=micro_batches),
        Setting(True, micro_batches=8 * micro_batches),
    ]
    if gpu.fp8:
        settings.append(Setting(True, fp8=True, micro_batches=micro_batches))
    rows: list[tuple[bool, float, tuple[str, ...]]] = []
    for rows_at_once in (job.batch, 2 * job.batch):
        stored = replace(job, batch=rows_at_once)
        computed = replace(stored, four_bits=False)
        (_, _, peak), *_ = memory.plan(stored, 1)
        for setting in tqdm(
            settings, f"measuring {rows_at_once} x {job.length}", leave=False, disable=None
        ):
            seconds = throughput.estimate(computed, setting, gpu).sum(0)[4]
            rate = rows_at_once * job.length * setting.micro_batches / seconds
            mfu = throughput.mfu(computed, rate, gpu)
            gigabytes = peak.total(setting.checkpointing) / 1e9
            fits = gigabytes <= config.usable
            memory_gb = f"{gigabytes:.0f}{'' if fits else '!'}" if setting.fused else "more"
            shape = f"{setting.micro_batches} x {rows_at_once} x {job.length}"
            row: tuple[str, ...] = (
                f"{shape}, {setting}",
                f"{1e3 * seconds:.0f}",
                f"{rate:,.0f}",
                f"{mfu:.1%}",
                memory_gb,
            )
            if config.train_tokens:
                row += (f"{config.train_tokens / rate / 3600:,.2f}",)
            rows.append((fits, mfu, row))
    header: tuple[str, ...] = ("settings", "ms", "tokens/s", "MFU", "memory, GB")
    if config.train_tokens:
        header += ("hours",)
    return aligned([header, *(row for _, _, row in sorted(rows, reverse=True))])


def of_throughput(job: memory.Job, config: PlanConfig) -> str:
    """Where an optimizer step's time goes, and what other settings would give."""
    gpu = find_gpu(config.gpu)
    if experts_of(job.config)[0]:
        raise ConfigError(f"--throughput cannot count the experts of {type(job.config).__name__}")
    steps = config.gradient_accumulation_steps
    lines = [
        f"One optimizer step of {steps} x {job.batch} x {job.length} tokens in "
        f"bf16 on one {config.gpu}.",
        "An estimate on paper: nothing is measured.",
        f"\n{parts_table(replace(job, four_bits=False), gpu, steps)}",
        f"\n{ranking(job, config, gpu, steps)}\n",
    ]
    if config.train_tokens:
        lines.append("Hours are those of one GPU; several need at least their share of them.")
    if job.four_bits:
        lines.append("Turning 4 bits back into bf16 before each product is not counted.")
    assumed = ", ".join(f"{name} {share:.0%}" for name, share in throughput.SHARES.items())
    lines += [
        "MFU is counted as a run logs it. Memory is what eager needs (see the "
        "plan without --throughput); "
        f"! is above {config.usable:.1f} GB, which is too much.",
        "FLOPs and bytes are counted from the model's operators.",
        f"Data sheet: {gpu.flops / 1e12:g} TFLOP/s in bf16, {gpu.bandwidth / 1e12:g} TB/s.",
        f"Assumed shares of it, not measured: {assumed}.",
        f"Assumed of a cast to fp8: it moves {throughput.FP8_TRAFFIC} times its operand's bytes.",
        "Left out: gaps between kernels, the L2 cache, falling clocks, data, "
        "logging and communication.",
    ]
    return "\n".join(lines)


def of_memory(job: memory.Job, config: PlanConfig) -> str:
    """What each launch config takes of one GPU, and the command of the one that fits and should be
    fastest.
    """
    numbers = memory.count(job)
    table: list[tuple[str, ...]] = [
        ("launch config", "GPUs", "weights", "gradients", "optimizer", "activations", "peak")
    ]
    # order of speed, checkpointing, launch config, GB
    fitting: list[tuple[int, int, str, float]] = []
    # Offloading costs most, then tensor parallelism, then recomputing. FSDP's gathers run beside
    # the computation.
    order = {"fsdp2_sequence_parallel": 1, "tensor_parallel": 1, "fsdp2_offload": 2}
    left_out = []
    for name, gpus, peak in tqdm(
        memory.plan(job, config.gpus), "measuring", leave=False, disable=None
    ):
        if config.launch and name != config.launch:
            continue
        if line := support.refusal(config.template or "", name, config.features):
            left_out.append(f"{name} is left out: {line}.")
            continue
        totals = [peak.total(setting) / 1e9 for setting in memory.CHECKPOINTING]
        parts = (peak.weights, peak.gradients, peak.optimizer)
        activations = (peak.activations[setting] / 1e9 for setting in memory.CHECKPOINTING)
        row = [name, str(gpus), *(f"{part / 1e9:.1f}" for part in parts)]
        row.append(" / ".join(f"{part:.1f}" for part in activations))
        row.append(" / ".join(f"{t:.1f}{'' if t <= config.usable else '!'}" for t in totals))
        table.append(tuple(row))
        if gpus == config.gpus:
            speed = order.get(name, 0)
            fitting += [
                (speed, i, name, total) for i, total in enumerate(totals) if total <= config.usable
            ]
    if len(table) == 1:
        raise ConfigError(f"no figures for --launch {config.launch}: leave it out")
    lines = [
        f"{type(job.config).__name__.removesuffix('Config')}, "
        f"{numbers.all / 1e9:.3f} B parameters, "
        f"{numbers.trained / 1e9:.3f} B trained; micro-batch {job.batch} x {job.length} tokens, "
        f"{'bf16 over fp32' if job.mixed else 'fp32'}. GB a GPU:\n\n{aligned(table)}\n",
        *[f"weights: with {job.beside / 1e9:.1f} GB of the teacher, which FSDP divides."]
        * bool(job.beside),
        "activations and peak: without gradient checkpointing / of every 2nd block / of all.",
        f"! is over {config.usable:.1f} GB: {config.gpu_memory:g} GB less {RESERVED:.0%} for "
        "CUDA, NCCL and fragmentation.",
        *left_out,
    ]
    if not fitting:
        advice = (
            "a smaller micro-batch or --seq_length, more GPUs, LoRA "
            "(--lora_r), 4 bits (--load_in_4bit)."
        )
        return "\n".join([*lines, f"Nothing fits: {advice}"])
    _, setting, name, total = min(fitting, key=lambda plan: plan[:2])
    command = command_for(config, name, memory.CHECKPOINTING[setting])
    lines.append(
        f"Of those that fit, this should cost least time on {config.gpus} GPU(s); "
        f"{total:.1f} GB on each:\n"
    )
    lines.append(command)
    if config.gpus > 8:
        hint = "multi_node_ddp.yaml for ddp, multi_node_hsdp.yaml for fsdp2; see docs/clusters.md."
        lines.append(f"\nOver several machines: {hint}")
    return "\n".join(lines)


def command_for(config: PlanConfig, launch_config: str, checkpointing: str) -> str:
    """The launch that was planned."""
    recipe = next((path for flag, path in pairwise(sys.argv) if flag == "--config"), "")
    bf16_weights = config.weights_dtype == "bf16"
    template = "lora_finetune" if config.lora_r else "full_finetune" if bf16_weights else "pretrain"
    template = "dpo" if config.loss_type else template
    template = "distill" if config.teacher_name_or_path else template
    named = (
        re.search(r"templates/(\w+)\.py", Path(recipe).read_text(encoding="utf-8"))
        if recipe
        else None
    )
    template = named[1] if named else template
    alone = launch_config in (
        "tensor_parallel",
        "fsdp2_sequence_parallel",
    )  # all have the same rows
    at_once = config.per_device_train_batch_size * (1 if alone else config.gpus)
    flags = {
        f"--config {recipe}": recipe,
        f"--gradient_checkpointing {checkpointing}": recipe or checkpointing != "none",
        f"--teacher_name_or_path {config.teacher_name_or_path}": config.teacher_name_or_path,
        "--teacher_load_in_4bit": config.teacher_load_in_4bit,
        "--full": template == "dpo" and not config.lora_r,
        "--no_full": template == "distill" and config.lora_r,
        "--weights_dtype bf16": bf16_weights,
        "--optim adamw_8bit": config.optim == "adamw_8bit",
        f"--lora_r {config.lora_r}": config.lora_r,
        "--no_lora_experts": not config.lora_experts,
        "--load_in_4bit": config.load_in_4bit,
        f"--seq_length {config.seq_length}": True,
        f"--per_device_train_batch_size {config.per_device_train_batch_size}": True,
        f"--global_batch_size {-(-16 // at_once) * at_once} ...": not recipe,
    }
    wanted = " ".join(flag for flag, is_wanted in flags.items() if is_wanted)
    spread = ""
    if alone:
        kind = (
            "tp"
            if launch_config == "tensor_parallel"
            else "dp_shard_size 1 --parallelism_config_sp"
        )
        spread = f" --parallelism_config_{kind}_size {config.gpus}"
    launcher = (
        f"accelerate launch --config_file accelerate_configs/{launch_config}.yaml --num_processes "
        f"{config.gpus}{spread}"
    )
    wrapper = textwrap.TextWrapper(92, break_long_words=False, break_on_hyphens=False)
    script = wrapper.wrap(f"templates/{template}.py {wanted}")
    return "  " + " \\\n    ".join([*wrapper.wrap(launcher), *script])
