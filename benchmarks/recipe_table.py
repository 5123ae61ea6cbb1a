"""What mixed precision, gradient checkpointing and accumulation do to memory and speed, one added after the other.

    python benchmarks/recipe_table.py                                         # a small Llama, on what there is
    python benchmarks/recipe_table.py --hidden 2048 --layers 16 --heads 16 --length 2048 --rows 8      # on a GPU
    python benchmarks/recipe_table.py --model resnet50 --length 224 --rows 32          # images: a convolutional net
    python benchmarks/recipe_table.py --long                  # instead, what `plan` predicts for one long row

Each row is a process of its own that makes the templates' optimizer step on the same global batch: tokens/s is the median
of its steps, memory the allocator's peak in a step (weights, gradients, optimizer state and activations; on a CPU as
PyTorch's profiler sees it). Rounds are alternated, and speed is relative to the first row of the same round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from about import about, line

ROWS: list[Any] = [  # (what, precision, gradient checkpointing and memory format, micro-batches)
    ("fp32", "no", "none", 1),
    ("+ bf16 mixed precision", "bf16", "none", 1),
    ("+ gradient checkpointing, every 3rd block", "bf16", "3", 1),
    ("+ gradient checkpointing, every 2nd block", "bf16", "2", 1),
    ("+ gradient checkpointing, every block", "bf16", "full", 1),
    ("+ accumulation of 2", "bf16", "full", 2),
    ("+ accumulation of 4", "bf16", "full", 4),
]
CONVOLUTIONS: list[Any] = [  # BatchNorm would count each batch twice under checkpointing: ResNets go without
    ("fp32", "no", "none", 1),
    ("+ channels_last", "no", "none,channels_last", 1),
    ("+ bf16 mixed precision", "bf16", "none,channels_last", 1),
    ("+ gradient checkpointing, every block", "bf16", "full,channels_last", 1),
    ("+ accumulation of 2", "bf16", "full,channels_last", 2),
    ("+ accumulation of 4", "bf16", "full,channels_last", 4),
]
NETS: dict[str, Any] = {
    "resnet18": ("resnet", {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}),
    "resnet50": ("resnet", {"hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3]}),
    "convnext": ("convnext", {"hidden_sizes": [96, 192, 384, 768], "depths": [3, 3, 9, 3]}),
}


def traced_peak(profiler: torch.profiler.profile, since: int) -> int:
    """Most bytes that were allocated at once on the CPU after `since` (time.time_ns()), of a profile with memory.

    What other threads free (those of collectives, which may be the last to let go of what they sent) is not in the
    profile; it is known by its address, once that is given out again.

    Args:
        profiler: stopped, and started before anything that is to be counted was allocated.
    """
    trace: Any = profiler.profiler
    todo = trace.kineto_results.experimental_event_tree()
    found = []
    while todo:
        event = todo.pop()
        todo += event.children
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    live: dict[int, int] = {}
    now = peak = 0
    for moment, address, size in sorted(found, key=lambda event: event[0]):
        now -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            now += size
        peak = max(peak, now) if moment > since else peak
    return peak


def measure(args: argparse.Namespace, checkpointing: str, accumulation: int) -> dict[str, float]:
    """Tokens/s (images/s) and peak bytes of the templates' step, in this process."""
    from torch.nn.functional import cross_entropy
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification, LlamaConfig

    from shared.config.options import OptimConfig
    from shared.models import fused_head
    from shared.models import loss as lm_loss
    from shared.models.blocks import set_gradient_checkpointing
    from shared.parallel.strategy import Strategy
    from shared.run import launch
    from shared.training import optim, step

    strategy = Strategy(launch.start(0))
    accelerator = strategy.accelerator
    units = args.rows * (args.length if args.model == "llama" else 1)
    shape = LlamaConfig(
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        intermediate_size=3 * args.hidden,
        vocab_size=args.vocab,
        max_position_embeddings=args.length,
        tie_word_embeddings=True,
    )
    on_cuda = accelerator.device.type == "cuda"
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    if args.memory and not on_cuda:
        profiler.start()
    checkpointing, _, last = checkpointing.partition(",")
    if args.model == "llama":
        whole = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation="sdpa")
    else:
        kind, sizes = NETS[args.model]
        net = AutoConfig.for_model(kind, **sizes, num_labels=1000)
        whole = AutoModelForImageClassification.from_config(net)
    whole = whole.to(memory_format=torch.channels_last) if last else whole
    set_gradient_checkpointing(whole, checkpointing)
    options = OptimConfig(learning_rate=3e-4)
    prepared, optimizers = strategy.prepare(whole.train(), optim.build(whole, options), options)
    rows = args.rows // accumulation
    if args.model == "llama":
        fused_head.fuse_head(accelerator, prepared)
        tokens = torch.randint(0, args.vocab, (rows, args.length), device=accelerator.device)
        batch = {"input_ids": tokens, "labels": tokens}
    else:
        pixels = torch.randn(rows, 3, args.length, args.length, device=accelerator.device)
        pixels = pixels.to(memory_format=torch.channels_last) if last else pixels
        batch = {"pixel_values": pixels, "labels": torch.randint(0, 1000, (rows,), device=accelerator.device)}

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if args.model == "llama":
            return lm_loss.causal_lm_loss(prepared, batch)
        return cross_entropy(prepared(batch["pixel_values"]).logits.float(), batch["labels"], reduction="sum")

    def train() -> None:
        for i in range(accumulation):
            with step.reduced(accelerator, [prepared], last=i + 1 == accumulation):
                strategy.backward(loss_of(batch), 1 / units)
        norm = strategy.clip([prepared], 1.0)
        strategy.update(optimizers, norm.isfinite(), norm)
        if on_cuda:
            torch.cuda.synchronize()

    train()
    if args.memory:
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
            train()
            return {"peak": torch.cuda.max_memory_allocated()}
        start = time.time_ns()
        train()
        profiler.stop()
        return {"peak": traced_peak(profiler, start)}
    seconds = []
    for _ in range(args.steps):
        start_time = time.perf_counter()
        train()
        seconds.append(time.perf_counter() - start_time)
    return {"per_second": units / statistics.median(seconds)}


def row(
    args: argparse.Namespace, precision: str, checkpointing: str, accumulation: int, *, memory: bool
) -> dict[str, float]:
    """`measure` in a process of its own."""
    sizes = [f"--{k}={getattr(args, k)}" for k in (*SIZES, "model", "steps")]
    command = [sys.executable, __file__, *sizes, "--measure", checkpointing, str(accumulation)]
    done = subprocess.run(
        [*command, *(["--memory"] if memory else [])],
        env=os.environ | {"ACCELERATE_MIXED_PRECISION": precision},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return {}
    return json.loads(done.stdout.splitlines()[-1])


SIZES = {"hidden": 384, "layers": 12, "heads": 6, "vocab": 4096, "length": 256, "rows": 8}

# Shapes as github.com/citsjtu2020/LLM-Prof, sglang/Model_Config.md, has them from the models' config.json.
LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": ("llama", {"intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}),
    "Qwen3-8B": ("qwen3", {"intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 151936, "head_dim": 128}),
}
LONG_TOKENS = 32768


def predict() -> None:
    """Print what one row of LONG_TOKENS takes on one device, as `python -m shared plan` predicts it."""
    from transformers import AutoConfig

    from tools import memory

    settings = " | ".join(f"activations {setting}, GB (of 1,000 tokens)" for setting in memory.CHECKPOINTING)
    print(f"| predicted | tokens | weights, GB | {settings} | peak full, GB |")
    print("|" + "---|" * 7)
    for name, (kind, shape) in LONG.items():
        config = AutoConfig.for_model(kind, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, **shape)
        for what, four_bits in (("LoRA", False), ("QLoRA", True)):
            job = memory.Job(config, 1, LONG_TOKENS, lora_r=16, four_bits=four_bits)
            ((_, _, peak),) = memory.plan(job, 1)
            found = [peak.activations[setting] / 1e9 for setting in memory.CHECKPOINTING]
            cells = " | ".join(f"{gb:.1f} ({1000 * gb / LONG_TOKENS:.2f})" for gb in found)
            print(
                f"| {name}, {what} | {LONG_TOKENS:,} | {peak.weights / 1e9:.1f} | {cells} | {peak.total('full') / 1e9:.1f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--model", default="llama", choices=["llama", *NETS], help="--length: pixels of an image's side")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--long", action="store_true", help="predict one long row of known models instead")
    args = parser.parse_args()
    if args.long:
        predict()
        return
    if args.measure:
        print(json.dumps(measure(args, args.measure[0], int(args.measure[1]))))
        return
    from tqdm import tqdm

    table, unit = (ROWS, "tokens") if args.model == "llama" else (CONVOLUTIONS, "images")
    if args.model.startswith("resnet"):
        table = [(what, at, kind.replace("full", "none"), n) for what, at, kind, n in table if "checkpointing" not in what]
    speeds: dict[str, list[float]] = {what: [] for what, *_ in table}
    peaks: dict[str, float] = {}
    with tqdm(total=len(table) * (args.rounds + 1)) as bar:
        for what, *settings in table:
            peaks[what] = row(args, *settings, memory=True).get("peak", float("nan"))
            bar.update()
        for _ in range(args.rounds):
            for what, *settings in table:
                speeds[what].append(row(args, *settings, memory=False).get("per_second", float("nan")))
                bar.update()
    facts = about()
    sizes = {k: getattr(args, k) for k in (*SIZES, "model", "steps", "rounds")}
    args.output.write_text(
        json.dumps({"about": facts, "sizes": sizes, "peak": peaks, f"{unit}_per_second": speeds}, indent=1)
    )
    first = table[0][0]
    print(f"| step by step | peak memory, MB | relative | {unit}/s | relative |\n|---|---|---|---|---|")
    for what, *_ in table:
        ratios = [a / b for a, b in zip(speeds[what], speeds[first], strict=True)]
        speed = f"{statistics.median(speeds[what]):,.{1 if unit == 'images' else 0}f}"
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {what} | {peaks[what] / 1e6:,.0f} | {peaks[what] / peaks[first]:.2f} | {speed} | {spread} |")
    model = f"Llama of {args.layers} blocks, width {args.hidden}, vocabulary {args.vocab}; {args.rows} rows of {args.length}"
    model += " tokens"
    if unit == "images":
        model = f"{args.model}; {args.rows} images of {args.length} x {args.length} pixels"
    print(f"\n{model} an optimizer step; medians (and ranges) of {args.rounds} rounds of {args.steps} steps.\n{line(facts)}")


if __name__ == "__main__":
    main()
