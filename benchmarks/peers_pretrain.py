"""templates/pretrain.py beside a hand-written PyTorch loop and transformers' Trainer, in fp32 and bf16.

    python benchmarks/peers_pretrain.py                              # writes benchmarks/peers_pretrain.json
    python benchmarks/peers_pretrain.py --rounds 5 --steps 80 --output results.json
    python benchmarks/peers_pretrain.py --precisions bf16 --flags "--model_preset 125M --seq_length 1024"     # on a GPU

Goal: at least 1.0 times the tokens/s of the raw loop, and 1.1 times in bf16.

- template: templates/pretrain.py, started with `accelerate launch`.
- raw loop: reads the sequences from the memory-mapped file, forward, loss, backward, clip, fused AdamW; the loss is read
  once an interval. No schedule, no decay groups, no guards, no logging.
- Trainer: transformers.Trainer on a data set that reads the same file, with its defaults but for what is named below.

All train the same small Llama from the same weights (the seed's), on the same memory-mapped tokens in the same order,
micro-batches and steps, at the same constant rate, with autocast where it is bf16. Their losses are compared, and the
script ends with an error where they differ. Start-up, the first interval, evaluation and saving are not timed; reading
and collating are, for all.
"""

import argparse
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import rounds
import torch
import yaml
from rounds import DEVICE, PRECISIONS, Clock, Row
from torch import nn
from torch.nn import functional as F

CONTENDERS = ("template", "raw loop", "Trainer")
FLAGS: Row = {"model_preset": "3M", "seq_length": 256, "global_batch_size": 8, "per_device_train_batch_size": 2}
FLAGS |= {"eval_samples": 8, "report_to": "none"}
# What the raw loop does not have: a schedule, decay groups.
FLAGS |= {"optim": "adamw", "lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0}
TOLERANCE = 0.02  # nats: rounding, bf16 included; other data or another rate is far beyond it


def run_template(options: argparse.Namespace, environment: dict, precision: str, folder: Path) -> list[Row]:
    steps = options.steps
    given = {"max_steps": steps, "logging_steps": rounds.every(steps), "eval_steps": steps, "save_steps": steps}
    given |= {"output_dir": folder}
    flags = [*rounds.flags(FLAGS | given), *shlex.split(options.flags)]
    rounds.launch("templates/pretrain.py", flags, environment, precision=precision)
    return rounds.template_intervals(folder, "tokens")


# The others, in processes of their own ---------------------------------------------------------------------------------


class Task:
    """What the template's run trained: its settings, model, and tokens, and which sequences each step took."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        from shared.data.order import Order
        from shared.data.store import Store
        from shared.text import corpus

        run = Path(options.run_dir)
        self.settings = settings = yaml.safe_load((run / "config.yaml").read_text())
        torch.manual_seed(settings["seed"])
        architecture = AutoConfig.from_pretrained(run / "final")
        architecture.pad_token_id = None  # as the template starts: no embedding stands still
        model = AutoModelForCausalLM.from_config(architecture, dtype=torch.float32)
        self.model: nn.Module = model.to(DEVICE).train()
        (state,) = Path(options.folder, "cache", "corpus").glob("*/state.json")
        text = Store(state.parent)
        share = settings["validation_split_percentage"], settings["eval_samples"]
        split = corpus.open_splits(text, None, settings["seq_length"], *share).train
        self.tokens = split._read(0, split.num_tokens).astype(text["tokens"].dtype)
        self.length, self.rows = settings["seq_length"], settings["per_device_train_batch_size"]
        order = Order(len(split), settings["global_batch_size"], settings["seed"])
        self.steps = [order.indices(step).tolist() for step in range(options.steps)]

    def sequence(self, index: int) -> np.ndarray:
        """[length + 1] tokens: inputs, and one further to predict."""
        return self.tokens[index * self.length : (index + 1) * self.length + 1].astype(np.int64)


def raw_loop(options: argparse.Namespace) -> list[Row]:
    task = Task(options)
    model, settings, parameters = task.model, task.settings, list(task.model.parameters())
    betas = settings["adam_beta1"], settings["adam_beta2"]
    optimizer = torch.optim.AdamW(parameters, lr=settings["learning_rate"], betas=betas, weight_decay=0.0, fused=True)
    total: Any = torch.zeros((), device=DEVICE)
    clock = Clock(options.steps)
    for number, step in enumerate(task.steps, 1):
        for at in range(0, len(step), task.rows):
            tokens = torch.from_numpy(np.stack([task.sequence(index) for index in step[at : at + task.rows]]))
            tokens = tokens.pin_memory().to(DEVICE, non_blocking=True) if DEVICE.type == "cuda" else tokens
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=options.precision == "bf16"):
                logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum")
            loss = loss / (len(step) * task.length)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(parameters, settings["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        clock.count(tokens=len(step) * task.length)
        if clock.due(number):
            clock.mark(number, total.item() / (number - clock.step))
            total.zero_()
    return clock.intervals


def trainer(options: argparse.Namespace) -> list[Row]:
    from transformers import Trainer, TrainingArguments

    task = Task(options)
    settings, order = task.settings, [index for step in task.steps for index in step]

    class Sequences(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(order)

        def __getitem__(self, position: int) -> dict[str, np.ndarray]:
            tokens = task.sequence(order[position])  # labels that are shifted already, as the template's are
            return {"input_ids": tokens[:-1], "labels": tokens[1:], "shift_labels": tokens[1:]}

    clock = Clock(options.steps)
    values = rounds.trainer_settings(options.steps, precision=options.precision)
    values |= {"per_device_train_batch_size": task.rows, "learning_rate": settings["learning_rate"]}
    values |= {"gradient_accumulation_steps": settings["global_batch_size"] // task.rows, "seed": settings["seed"]}
    values |= {"adam_beta1": settings["adam_beta1"], "adam_beta2": settings["adam_beta2"]}
    values |= {"train_sampling_strategy": "sequential", "remove_unused_columns": False}
    arguments = TrainingArguments(f"{options.folder}/trainer", **values)
    counted = clock.counted(Trainer, lambda inputs: {"tokens": inputs["labels"].numel()})
    counted(task.model, arguments, train_dataset=Sequences(), callbacks=[clock.callback()]).train()
    return clock.intervals


def main() -> None:
    parser = rounds.parser(__doc__, __file__, rounds=3, steps=16)
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--flags", default="", help="sizes or files for pretrain.py, which the others take over")
    options = rounds.parse(parser, {"raw loop": raw_loop, "Trainer": trainer})

    with rounds.folder(options) as environment:

        def measure(contender: str, number: int) -> Row:
            name, _, said = contender.partition(", ")
            precision = next(key for key, value in PRECISIONS.items() if value == said)
            folder = rounds.run_dir(options, number, f"-{precision}")
            if name == "template":
                intervals = run_template(options, environment, precision, folder)
            else:
                intervals = rounds.worker(__file__, name, options, environment, run_dir=folder, precision=precision)
            return {"tokens_per_second": rounds.steady(intervals, "tokens_per_second"), "intervals": intervals}

        names = [f"{name}, {PRECISIONS[precision]}" for precision in options.precisions for name in CONTENDERS]
        rows = rounds.alternate(names, options.rounds, measure)
    rounds.pair(rows, "tokens_per_second", lambda name: "raw loop, " + name.partition(", ")[2])
    by_run = {(row["contender"], row["round"]): row["intervals"] for row in rows}
    for row in rows:
        raw = by_run["raw loop, " + row["contender"].partition(", ")[2], row["round"]]
        row["loss_difference"] = rounds.require_equal_losses(row["contender"], row["intervals"], raw, TOLERANCE)
    columns = {"tokens/s": ("tokens_per_second", ",.0f"), "ratio to the raw loop": ("ratio", ".3f")}
    columns["largest difference of losses"] = ("loss_difference", ".1e")
    notes = [f"Medians (and ranges) of {options.rounds} rounds of {options.steps} steps. Ratios are paired by round."]
    rounds.report(options, rows, rounds.table("contender", rows, columns), notes)


if __name__ == "__main__":
    main()
