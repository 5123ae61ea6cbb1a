"""templates/lora_finetune.py beside raw peft loops and TRL's SFTTrainer, padded and packed: useful tokens a second.

    python benchmarks/peers_lora.py                                  # writes benchmarks/peers_lora.json
    python benchmarks/peers_lora.py --rounds 5 --steps 40 --output results.json
    python benchmarks/peers_lora.py --mixed_precision bf16 --model_name_or_path llama-1b/ --rows 4      # on a GPU

Goal: at or above the packed raw loop, 1.7 times TRL packed, 3 times TRL padded, and at most 1 % of padding.

The data are conversations made here, at most 512 tokens long and about 100 in the mean (log-normal, seeded). A token is
useful if it is a sample's own and not padding; a sample of n tokens counts n - 1, its predictions, for all contenders.

- template: templates/lora_finetune.py as it is, packed into rows of 512 tokens, started with `accelerate launch`.
- raw packed: forward, loss, backward, clip, fused AdamW on the same packed rows; batches are made before the clock starts.
- raw padded: the same loop with one sample a row, shuffled, padded to the longest of the micro-batch.
- TRL padded: SFTTrainer on the same batches as raw padded.
- TRL packed: SFTTrainer with packing=True, which makes rows of its own. Gradient checkpointing, its default, is off.
  What else it does by default, such as entropy and token accuracy of each step, is left on.

All train the same adapter from the same weights at the same constant rate. A padded micro-batch has as many samples as
a packed one has on average, so all do about the same useful work in a step. The losses of the template and raw packed,
and those of TRL padded and raw padded, are compared, and the script ends with an error where they differ; those that
have batches of their own have to stay within 30 % of raw packed's losses. Start-up, the first interval and evaluation
are not timed.
"""

import argparse
import json
import re
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import rounds
import torch
import yaml
from rounds import DEVICE, Clock, Row
from torch import nn
from torch.nn import functional as F

from shared import demo

CONTENDERS = ("template", "raw packed", "raw padded", "TRL packed", "TRL padded")
PARTNERS = {"template": "raw packed", "TRL padded": "raw padded"}  # who has the same batches
TOLERANCE = 0.02  # nats: rounding, bf16 included; other data or another rate is far beyond it


# Data ------------------------------------------------------------------------------------------------------------------


def make_chats(file: Path, count: int, seed: int, options: argparse.Namespace) -> list[int]:
    """Conversations of words that are one token each; the tokens of each conversation, of log-normal distribution."""
    from transformers import AutoTokenizer

    from shared.text.encoder import Encoder
    from shared.text.forms import Example

    tokenizer: Any = AutoTokenizer.from_pretrained(options.model_name_or_path)
    encode = Encoder(tokenizer, "assistant")
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    words = [text for text in texts if re.fullmatch("( [a-z]{3,})", text)]

    def conversation(number: int) -> tuple[dict[str, Any], int]:
        chosen = rng.choice(words, number).tolist()
        parts = ["".join(chosen[: number // 3]).strip(), "".join(chosen[number // 3 :]).strip()]
        turns = [{"role": role, "content": part} for role, part in zip(("user", "assistant"), parts, strict=True)]
        return {"messages": turns}, len(encode(Example(turns), "")[0])

    rng = np.random.default_rng(seed)
    asked = np.exp(rng.normal(np.log(options.length / 5) - 0.32, 0.8, count)).clip(0, options.length).astype(int).tolist()
    frame = conversation(6)[1] - 6  # tokens of the chat template
    lengths = []
    with file.open("w") as lines:
        for length in asked:
            number = max(6, length - frame)
            record, tokens = conversation(number)
            while tokens > options.length:  # a text's first word may be two tokens
                number -= tokens - options.length
                record, tokens = conversation(number)
            lines.write(json.dumps(record) + "\n")
            lengths.append(tokens)
    return lengths


def run_template(options: argparse.Namespace, environment: dict, folder: Path) -> list[Row]:
    chats, steps = f"{options.folder}/chats.jsonl", options.steps
    given = {"train_file": chats, "validation_file": f"{options.folder}/held-out.jsonl", "eval_samples": 8}
    given |= {"model_name_or_path": options.model_name_or_path, "seq_length": options.length, "show_answers": 0}
    given |= {"global_batch_size": options.rows * options.accumulation, "per_device_train_batch_size": options.rows}
    given |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "report_to": "none", "logging_steps": rounds.every(steps)}
    given |= {"max_steps": steps, "eval_steps": steps, "save_steps": steps, "output_dir": folder}
    rounds.launch("templates/lora_finetune.py", rounds.flags(given), environment, precision=options.mixed_precision)
    return rounds.template_intervals(folder, "tokens")


# The others, in processes of their own ---------------------------------------------------------------------------------


class Task:
    """What the template's run trained: its settings, adapted model and samples."""

    def __init__(self, options: argparse.Namespace) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        from shared.models.tokenizers import load_tokenizer
        from shared.text import chat
        from shared.text.options import ChatConfig
        from shared.text.packing import Packed

        run = Path(options.run_dir)
        self.settings = yaml.safe_load((run / "config.yaml").read_text())
        torch.manual_seed(self.settings["seed"])
        dtype = torch.bfloat16 if options.mixed_precision == "bf16" else torch.float32
        base = AutoModelForCausalLM.from_pretrained(options.model_name_or_path, dtype=dtype)
        adapter = LoraConfig.from_pretrained(str(run / "final"))
        adapter.inference_mode = False
        self.model: Any = get_peft_model(base, adapter).to(DEVICE).train()
        data = ChatConfig(
            train_file=tuple(self.settings["train_file"]),
            validation_file=tuple(self.settings["validation_file"]),
            seq_length=self.settings["seq_length"],
        )
        self.samples, _ = chat.open_samples(data, load_tokenizer(options.model_name_or_path))
        self.packed = Packed(self.samples, options.length)
        self.at_once = max(1, round(options.rows * len(self.samples) / len(self.packed)))  # samples, padded

    def order(self, options: argparse.Namespace, samples: Any, at_once: int) -> list[list[np.ndarray]]:
        """The indices of each step's micro-batches, in the template's order."""
        from shared.data.order import Order

        order = Order(len(samples), at_once * options.accumulation, self.settings["seed"])
        steps = [order.indices(step) for step in range(options.steps)]
        return [np.split(step, range(at_once, len(step), at_once)) for step in steps]


def raw_loop(options: argparse.Namespace) -> list[Row]:
    from shared.text.packing import collate_packed, collate_padded

    task = Task(options)
    packing = options.work == "raw packed"
    samples: Any = task.packed if packing else task.samples
    collate = partial(collate_packed, multiple_of=64, at_most=options.length) if packing else collate_padded
    order = task.order(options, samples, options.rows if packing else task.at_once)
    steps = [[collate([samples[i] for i in indices]) for indices in step] for step in order]
    lengths = (
        np.array([task.samples.lengths[bin].sum() for bin in map(task.packed.bin, range(len(task.packed)))])
        if packing
        else task.samples.lengths
    )
    model, settings = task.model, task.settings
    parameters = [p for p in model.parameters() if p.requires_grad]
    betas = 0.9, 0.999
    optimizer = torch.optim.AdamW(parameters, lr=settings["learning_rate"], betas=betas, weight_decay=0.0, fused=True)
    total: Any = torch.zeros((), device=DEVICE)
    clock = Clock(options.steps)
    for number, micro_batches in enumerate(steps, 1):
        targets = sum(int((batch["labels"] != -100).sum()) for batch in micro_batches)
        for batch in micro_batches:
            batch = {key: value.to(DEVICE, non_blocking=True) for key, value in batch.items()}
            labels, _ = batch.pop("labels"), batch.pop("targets")
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=options.mixed_precision == "bf16"):
                logits = model(**batch, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / targets
            loss.backward()
            total += loss.detach()
            clock.count(positions=labels.numel())
        nn.utils.clip_grad_norm_(parameters, settings["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
        useful = sum(int(lengths[indices].sum()) for indices in order[number - 1])
        clock.count(useful=useful, filled=useful)
        if clock.due(number):
            clock.mark(number, total.item() / (number - clock.step))
            total.zero_()
    return clock.intervals


def trl(options: argparse.Namespace) -> list[Row]:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    task = Task(options)
    packing = options.work == "TRL packed"
    samples, settings = task.samples, task.settings
    # Padded, the samples in raw padded's order; packed, all of them, which TRL shuffles and packs.
    order = [int(i) for step in task.order(options, samples, task.at_once) for indices in step for i in indices]
    chosen = range(len(samples)) if packing else order
    ids, learned = zip(*(samples.tokens(i) for i in chosen), strict=True)
    labels = [np.where(mask, tokens, -100) for tokens, mask in zip(ids, learned, strict=True)]
    data = Dataset.from_dict({"input_ids": [i.tolist() for i in ids], "labels": [i.tolist() for i in labels]})
    clock = Clock(options.steps)

    def amounts(inputs: Any) -> Row:
        positions = inputs["input_ids"].numel()
        filled = positions if packing else inputs["attention_mask"].sum()
        count = (inputs["position_ids"] == 0).sum() if packing else len(inputs["input_ids"])
        return {"positions": positions, "filled": filled, "useful": filled - count}

    values = rounds.trainer_settings(options.steps, precision=options.mixed_precision)
    values |= {"per_device_train_batch_size": options.rows if packing else task.at_once, "seed": settings["seed"]}
    values |= {"gradient_accumulation_steps": options.accumulation, "learning_rate": settings["learning_rate"]}
    values |= {"adam_beta1": 0.9, "adam_beta2": 0.999}
    values |= {"packing": packing, "max_length": options.length, "shuffle_dataset": packing, "gradient_checkpointing": False}
    values |= {"train_sampling_strategy": "random" if packing else "sequential"}
    arguments = SFTConfig(f"{options.folder}/trl", **values)
    tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
    given: Row = {"train_dataset": data, "processing_class": tokenizer, "callbacks": [clock.callback()]}
    clock.counted(SFTTrainer, amounts)(task.model, arguments, **given).train()
    return clock.intervals


# Rounds ----------------------------------------------------------------------------------------------------------------


def require_same_work(rows: list[Row]) -> None:
    """Give those that have the same batches the largest difference of their losses; end here if somebody learned else."""
    by_run = {(row["contender"], row["round"]): row["intervals"] for row in rows}
    for row in rows:
        partner = by_run.get((PARTNERS.get(row["contender"], ""), row["round"]))
        if partner:
            row["loss_difference"] = rounds.require_equal_losses(row["contender"], row["intervals"], partner, TOLERANCE)
        for interval, other in zip(row["intervals"], by_run["raw packed", row["round"]], strict=True):
            if not abs(interval["loss"] - other["loss"]) < 0.3 * other["loss"]:  # other batches of the same data
                sys.exit(f"{row['contender']}: step {interval['step']}: loss {interval['loss']}, raw packed {other['loss']}")


def main() -> None:
    parser = rounds.parser(__doc__, __file__, rounds=3, steps=16)
    parser.add_argument("--mixed_precision", choices=list(rounds.PRECISIONS), default="no")
    parser.add_argument("--model_name_or_path", default=str(demo.MODEL), help="a Llama-like model and its tokenizer")
    parser.add_argument("--rows", type=rounds.at_least(1), default=2, help="of a micro-batch")
    parser.add_argument("--length", type=rounds.at_least(64), default=512, help="of a row, and of a conversation at most")
    parser.add_argument("--accumulation", type=rounds.at_least(1), default=2, help="micro-batches of a step")
    parser.add_argument("--seed", type=int, default=0, help="of the data")
    work = {"raw packed": raw_loop, "raw padded": raw_loop, "TRL packed": trl, "TRL padded": trl}
    options = rounds.parse(parser, work)
    absent = rounds.absent("trl", ("TRL packed", "TRL padded"))
    present = [name for name in CONTENDERS if not any(row["contender"] == name for row in absent)]

    with rounds.folder(options) as environment:
        count = 64 + round(1.3 * 5 * options.steps * options.rows * options.accumulation)
        lengths = make_chats(Path(options.folder, "chats.jsonl"), count, options.seed, options)
        make_chats(Path(options.folder, "held-out.jsonl"), 8, options.seed + 1, options)

        def measure(name: str, number: int) -> Row:
            folder = rounds.run_dir(options, number)
            if name == "template":
                return {"intervals": run_template(options, environment, folder)}
            return {"intervals": rounds.worker(__file__, name, options, environment, run_dir=folder)}

        rows = rounds.alternate(present, options.rounds, measure)
    require_same_work(rows)
    by_run = {(row["contender"], row["round"]): row["intervals"] for row in rows}
    for row in rows:
        if row["contender"] == "template":  # which knows positions only; its batches are raw packed's
            for own, raw in zip(row["intervals"], by_run["raw packed", row["round"]], strict=True):
                own |= {key: raw[key] for key in ("positions", "filled", "useful")}
                own["useful_per_second"] = own["tokens_per_second"] * own["useful"] / own["positions"]
        row["useful_per_second"] = rounds.steady(row["intervals"], "useful_per_second")
        filled, positions = (sum(interval[key] for interval in row["intervals"]) for key in ("filled", "positions"))
        row["waste"] = 1 - filled / positions
    for base in ("raw packed", "TRL packed", "TRL padded"):
        if base in present:
            rounds.pair(rows, "useful_per_second", base, ratio=f"to {base}")
    columns = {"useful tokens/s": ("useful_per_second", ",.0f"), "padding": ("waste", ".1%")}
    columns |= {f"ratio to {base}": (f"to {base}", ".3f") for base in ("raw packed", "TRL packed", "TRL padded")}
    columns["largest difference of losses"] = ("loss_difference", ".1e")
    notes = [
        f"Medians (and ranges) of {options.rounds} rounds of {options.steps} steps in "
        f"{rounds.PRECISIONS[options.mixed_precision]}; {options.rows} rows of {options.length} tokens, or as many samples "
        f"as fill them, {options.accumulation} times a step. {len(lengths):,} conversations of "
        f"{statistics.mean(lengths):.0f} tokens (mean; at most {max(lengths)}). Ratios are paired by round."
    ]
    rounds.report(options, rows, rounds.table("contender", rows + absent, columns), notes, ("peft", "trl", "datasets"))


if __name__ == "__main__":
    main()
