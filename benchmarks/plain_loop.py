"""What the templates cost: their steady-state tokens/s beside a plain PyTorch loop on the same model and data.

    python benchmarks/plain_loop.py                                    # writes benchmarks/plain_loop.json
    python benchmarks/plain_loop.py --rounds 5 --steps 80 --output results.json
    python benchmarks/plain_loop.py --mixed_precision bf16 --pretrain_flags "--model_preset 125M"      # on a GPU

Each round starts, one after the other, a template with `accelerate launch` and a hand-written loop in a process of
its own; a ratio pairs the two of one round, so that a machine that is slow for a while is slow for both.

The plain loop takes the sizes from the template's config.yaml and final/, and then does without the templates' code:
forward, loss, backward, clip, fused AdamW, and the loss read once an interval. Its batches are made before the clock
starts, so reading and collating counts against the template alone, as do its schedule, its logging and its guards.
It computes the same batches from the same initial weights at the same constant rate; the losses of both are compared,
which shows that they do the same work. Start-up, the first interval, evaluation and saving are not timed.
"""

import argparse
import contextlib
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
import yaml
from about import about, cores, line
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"pretrain": "pretrain.py", "lora": "lora_finetune.py"}
FLAGS = {  # what the plain loop does not have: a schedule, decay groups, samples of text
    "pretrain": ["--optim", "adamw"],
    "lora": ["--max_train_samples", "2000", "--num_generations", "0"],
}
COMMON_FLAGS = [*("--lr_scheduler_type", "constant"), *("--warmup_ratio", "0"), *("--weight_decay", "0")]
COMMON_FLAGS += [*("--report_to", "none"), *("--eval_samples", "8")]
LOSS_TOLERANCE = 0.02  # nats: rounding, bf16 included; other data or another rate is far beyond it


# The plain loop --------------------------------------------------------------------------------------------------------


def pretrain_task(settings: dict, final: Path) -> tuple[nn.Module, list[list[dict]]]:
    """(model, micro-batches of each step) of the pretraining run with these settings."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from shared import corpus

    torch.manual_seed(settings["seed"])
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(final), dtype=torch.float32)
    folder = corpus.prepare(group(corpus.CorpusConfig, settings), None)
    tokens, _, _ = corpus.open_splits(folder, settings["seq_length"], settings["validation_split_percentage"])
    return model, batches(tokens, corpus.collate, settings)


def lora_task(settings: dict, final: Path) -> tuple[nn.Module, list[list[dict]]]:
    """(model, micro-batches of each step) of the fine-tuning run with these settings, in packed rows."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from shared import chat

    torch.manual_seed(settings["seed"])
    dtype = torch.bfloat16 if settings["mixed_precision"] == "bf16" else torch.float32
    base = AutoModelForCausalLM.from_pretrained(settings["model_name_or_path"], dtype=dtype)
    adapter = LoraConfig.from_pretrained(str(final))
    adapter.inference_mode = False
    tokenizer = AutoTokenizer.from_pretrained(settings["model_name_or_path"])
    conversations = chat.Conversations(chat.prepare(group(chat.ChatConfig, settings), tokenizer), "train")
    return get_peft_model(base, adapter), batches(
        chat.Packed(conversations, settings["seq_length"]), chat.collate_packed, settings
    )


def group(config_class: Any, settings: dict):
    """The group of flags with its values in `settings`."""
    return config_class(**{name: settings[name] for name in config_class.__dataclass_fields__})


def batches(samples, collate, settings: dict) -> list[list[dict]]:
    """The micro-batches of each step, in the template's order."""
    from shared.data import Order

    order = Order(len(samples), settings["global_batch_size"], settings["seed"])
    size = settings["per_device_train_batch_size"]
    steps = [order.indices(step).tolist() for step in range(settings["max_steps"])]
    return [[collate([samples[i] for i in step[at : at + size]]) for at in range(0, len(step), size)] for step in steps]


def plain_loop(task: str, run_dir: Path, mixed_precision: str) -> list[dict]:
    """Train as the template's run in `run_dir` did; one {"step", "loss", "tokens_per_second"} an interval."""
    settings = yaml.safe_load((run_dir / "config.yaml").read_text()) | {"mixed_precision": mixed_precision}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(cores())
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")
    model, steps = {"pretrain": pretrain_task, "lora": lora_task}[task](settings, run_dir / "final")
    model.to(device).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    betas = settings["adam_beta1"], settings["adam_beta2"]
    optimizer = torch.optim.AdamW(parameters, lr=settings["learning_rate"], betas=betas, weight_decay=0.0, fused=True)
    autocast = torch.autocast(device.type, torch.bfloat16) if mixed_precision == "bf16" else contextlib.nullcontext()

    intervals, tokens, since = [], 0, 0
    total: Any = torch.zeros((), device=device)
    start = time.perf_counter()
    for number, micro_batches in enumerate(steps, 1):
        targets = sum(int((batch["labels"] != -100).sum()) for batch in micro_batches)
        for batch in micro_batches:
            batch = {key: value.to(device, non_blocking=True) for key, value in batch.items()}
            labels = batch.pop("labels")
            with autocast:
                logits = model(**batch, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / targets
            loss.backward()
            total += loss.detach()
            tokens += labels.numel()
        torch.nn.utils.clip_grad_norm_(parameters, settings["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        since += 1
        if number % settings["logging_steps"] == 0 or number == len(steps):
            loss = total.item() / since  # waits for the device, as the template's logging does
            now = time.perf_counter()
            intervals.append({"step": number, "loss": loss, "tokens_per_second": tokens / (now - start)})
            tokens, since, start = 0, 0, now
            total.zero_()
    return intervals


# Runs ------------------------------------------------------------------------------------------------------------------


def run_template(task: str, run_dir: Path, options: argparse.Namespace, environment: dict) -> list[dict]:
    """Launch a template for real; the intervals of its metrics.jsonl."""
    launch = ROOT / "accelerate_configs" / ("single_gpu.yaml" if torch.cuda.is_available() else "cpu.yaml")
    command = [*("-m", "accelerate.commands.accelerate_cli", "launch"), *("--config_file", str(launch))]
    command += ["--mixed_precision", options.mixed_precision, str(ROOT / "templates" / SCRIPTS[task]), *COMMON_FLAGS]
    command += [*("--max_steps", str(options.steps)), *("--logging_steps", str(max(1, options.steps // 8)))]
    command += [*("--eval_steps", str(options.steps)), *("--save_steps", str(options.steps)), *FLAGS[task]]
    run([*command, "--output_dir", str(run_dir), *shlex.split(getattr(options, f"{task}_flags"))], environment)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {"step": row["step"], "loss": row["loss"], "tokens_per_second": row["processed_tokens_per_second"]}
        for row in rows
        if "processed_tokens_per_second" in row
    ]


def run_plain(task: str, run_dir: Path, options: argparse.Namespace, environment: dict) -> list[dict]:
    """The plain loop in a process of its own; its intervals."""
    command = [str(Path(__file__).resolve()), "--worker", task, "--run_dir", str(run_dir)]
    return json.loads(run([*command, "--mixed_precision", options.mixed_precision], environment).splitlines()[-1])


def run(arguments: list[str], environment: dict) -> str:
    """What a Python process prints; ends this one with its last words if it fails."""
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(arguments)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def steady(intervals: list[dict]) -> float:
    """Tokens a second: the median interval, without the first, which warms up."""
    return statistics.median(interval["tokens_per_second"] for interval in intervals[1:])


def measure(options: argparse.Namespace) -> list[dict]:
    """One {"template", "round", "ratio", ...} for each pair of runs."""
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TEMPLATES_CACHE": f"{folder}/cache", "PYTHONPATH": str(ROOT)}
        environment.pop("OMP_NUM_THREADS", None)  # both use all cores
        for number in range(1, options.rounds + 1):
            for task in SCRIPTS:
                started, run_dir = time.perf_counter(), Path(folder) / f"{task}-{number}"
                template = run_template(task, run_dir, options, environment)
                plain = run_plain(task, run_dir, options, environment)
                difference = max(abs(a["loss"] - b["loss"]) for a, b in zip(template, plain, strict=True))
                if not difference < LOSS_TOLERANCE:
                    sys.exit(f"{task}: the losses differ by {difference}, so the two did not do the same work")
                ours, theirs = steady(template), steady(plain)
                pairs.append({"template": task, "round": number, "ratio": ours / theirs, "loss_difference": difference})
                pairs[-1] |= {"template_tokens_per_second": ours, "plain_tokens_per_second": theirs}
                pairs[-1] |= {"template_intervals": template, "plain_intervals": plain}
                line = f"template {ours:,.0f} tokens/s, plain loop {theirs:,.0f}, ratio {ours / theirs:.3f}"
                seconds = time.perf_counter() - started
                print(f"round {number}/{options.rounds} {task}: {line} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    return pairs


# Report ----------------------------------------------------------------------------------------------------------------


def table(pairs: list[dict]) -> str:
    """The Markdown table: medians over the rounds, and ranges."""

    def cell(rows: list[dict], key: str, form: str) -> str:
        values = [row[key] for row in rows]
        return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"

    lines = ["| template | template, tokens/s | plain loop, tokens/s | ratio |", "|---|---|---|---|"]
    for task, script in SCRIPTS.items():
        rows = [pair for pair in pairs if pair["template"] == task]
        speeds = [cell(rows, f"{who}_tokens_per_second", ",.0f") for who in ("template", "plain")]
        lines.append(f"| `{script}` | {speeds[0]} | {speeds[1]} | {cell(rows, 'ratio', '.3f')} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs of each template")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a run, timed in eighths (at least 2)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"), help="all figures, as JSON")
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="no")
    parser.add_argument(
        "--pretrain_flags", default="", help="sizes or files for pretrain.py, which the plain loop takes over"
    )
    parser.add_argument("--lora_flags", default="", help="the same for lora_finetune.py")
    parser.add_argument("--worker", choices=list(SCRIPTS), help=argparse.SUPPRESS)
    parser.add_argument("--run_dir", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(plain_loop(options.worker, options.run_dir, options.mixed_precision)))
        return
    if options.steps < 2 or options.rounds < 1:
        parser.error("at least 2 steps and 1 round")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    pairs = measure(options)
    facts = about(("torch", "transformers", "accelerate", "peft"))
    settings = {k: getattr(options, k) for k in ("rounds", "steps", "mixed_precision", "pretrain_flags", "lora_flags")}
    options.output.write_text(json.dumps({"about": facts, "settings": settings, "pairs": pairs}, indent=1) + "\n")
    difference = max(pair["loss_difference"] for pair in pairs)
    precision = {"no": "fp32"}.get(options.mixed_precision, options.mixed_precision)
    print(f"{table(pairs)}\n\nMedians (and ranges) of {options.rounds} rounds of {options.steps} steps in {precision}.")
    print(line(facts))
    print(f"Losses of the template and of the plain loop differ by {difference:.1e} at most.")


if __name__ == "__main__":
    main()
