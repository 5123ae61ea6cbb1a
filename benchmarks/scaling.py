"""Global throughput of pretraining on 1, 2, 4, ... processes, under DDP and FSDP2, as a table and a plot.

    python benchmarks/scaling.py                             # CPU processes where there is no GPU
    python benchmarks/scaling.py --processes 1 2 4 8 --flags "--model_preset 1B --seq_length 2048"       # GPUs

Weak scaling: every process has the same micro-batch, accumulation stays, the global batch grows. Efficiency is the
throughput over that of one process times the number of processes. Processes that share cores share their throughput, so
on one CPU the table shows what communication costs, not what machines would gain.

With two GPUs and more the last rows are nn.DataParallel: one process, a thread and a copy of the model for each GPU.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from about import about, line

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLAGS = argparse.ArgumentParser()  # those of pretrain.py's that nn.DataParallel has to know
FLAGS.add_argument("--model_preset", default="3M")
FLAGS.add_argument("--vocab_size", type=int, default=4096)
FLAGS.add_argument("--seq_length", type=int, default=256)


def throughput(config: str, processes: int, args: argparse.Namespace) -> float:
    """Trained tokens/s over all processes: the median of the logged intervals, the first left out."""
    accelerate = [sys.executable, "-m", "accelerate.commands.launch"]
    if processes > 1:
        accelerate += ["--config_file", str(ROOT / "accelerate_configs" / f"{config}.yaml")]
        accelerate += ["--num_processes", str(processes), "--main_process_port", "0"]
    precision = ["--mixed_precision", "bf16" if torch.cuda.is_available() else "no"]
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--output_dir", folder, "--report_to", "none", "--max_steps", str(args.steps), "--logging_steps", "2"]
        flags += ["--global_batch_size", str(args.rows * args.accumulation * processes), "--eval_samples", "1"]
        flags += ["--per_device_train_batch_size", str(args.rows), "--save_steps", "100000", "--optim", "adamw"]
        flags += shlex.split(args.flags)
        on_cpu = {} if torch.cuda.is_available() else {"ACCELERATE_USE_CPU": "true"}
        command = [*accelerate, *precision, str(ROOT / "templates" / "pretrain.py"), *flags]
        done = subprocess.run(command, env=os.environ | on_cpu, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
            return float("nan")
        rows = [json.loads(row) for row in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    speeds = [row["trained_tokens_per_second"] for row in rows if "trained_tokens_per_second" in row]
    return statistics.median(speeds[1:])


def data_parallel(gpus: int, args: argparse.Namespace) -> float:
    """Tokens/s of nn.DataParallel with the model, micro-batch and accumulation of `throughput`: the median step."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from shared.models.options import PRESETS

    wanted, _ = FLAGS.parse_known_args(shlex.split(args.flags))
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    shape: Any = dict(zip(names, PRESETS[wanted.model_preset], strict=True))
    whole: Any = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=wanted.vocab_size, tie_word_embeddings=True))
    model = torch.nn.DataParallel(whole.to(DEVICE), device_ids=list(range(gpus)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rows = torch.randint(wanted.vocab_size, (gpus * args.rows, wanted.seq_length), device=DEVICE)
    seconds = []
    for _ in range(args.steps):
        start = time.perf_counter()
        for _ in range(args.accumulation):
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = model(input_ids=rows, labels=rows).loss
            loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.mean().item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return args.accumulation * rows.numel() / statistics.median(seconds[2:])


def draw(results: dict[str, dict[int, list[float]]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for config, by_count in results.items():
        counts = sorted(by_count)
        medians = [statistics.median(by_count[n]) for n in counts]
        axes.plot(counts, medians, marker="o", label=config)
    counts = sorted(next(iter(results.values())))
    one = statistics.median(next(iter(results.values()))[counts[0]]) / counts[0]
    axes.plot(counts, [one * n for n in counts], linestyle="--", color="grey", label="linear")
    axes.set(xlabel="processes", ylabel="tokens/s over all", xticks=counts, ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--configs", nargs="+", default=["ddp", "fsdp2"])
    parser.add_argument("--rows", type=int, default=4, help="of one micro-batch of one process")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--flags", default="", help="more flags of templates/pretrain.py")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    from tqdm import tqdm

    results: dict[str, dict[int, list[float]]] = {c: {n: [] for n in args.processes} for c in args.configs}
    for _ in range(args.rounds):
        for config in args.configs:
            for count in tqdm(args.processes, desc=config):
                results[config][count].append(throughput(config, count, args))
    gpus = [count for count in args.processes if 1 < count <= torch.cuda.device_count()]
    if gpus:
        results["nn.DataParallel"] = {n: [data_parallel(n, args) for _ in range(args.rounds)] for n in gpus}
    facts = about()
    args.output.write_text(
        json.dumps({"about": facts, "settings": vars(args) | {"output": ""}, "results": results}, indent=1)
    )
    draw(results, args.output.with_suffix(".png"))
    print("| launch config | processes | tokens/s over all | efficiency |\n|---|---|---|---|")
    first = next(iter(results.values()))
    for config, by_count in results.items():
        one = statistics.median(by_count.get(args.processes[0]) or first[args.processes[0]]) / args.processes[0]
        for count, speeds in by_count.items():
            spread = f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
            print(f"| {config} | {count} | {spread} | {statistics.median(speeds) / one / count:.0%} |")
    print(
        f"\n{args.rows} rows a micro-batch, {args.accumulation} accumulated; medians (ranges) of {args.rounds} rounds of "
        f"{args.steps} steps. One process runs without a launch config.\n{line(facts)}"
    )


if __name__ == "__main__":
    main()
