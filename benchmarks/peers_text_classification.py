"""templates/text_classification.py beside transformers' Trainer, as its example run_glue uses it: texts a second.

    python benchmarks/peers_text_classification.py                # writes benchmarks/peers_text_classification.json
    python benchmarks/peers_text_classification.py --rounds 5 --steps 96 --output results.json

Goal: at least 1.2 times the Trainer with its defaults, and the same losses on the same batches.

The data are texts made here, at most 256 tokens long and about 60 in the mean (log-normal, seeded), in 4 classes. All train
the same small BERT from the same weights at the same constant rate, without dropout, whose random draws would differ.

- template: templates/text_classification.py as it is, started with `accelerate launch`.
- Trainer: with DataCollatorWithPadding and its default order: random batches, each padded to its longest text.
- Trainer, grouped: train_sampling_strategy="group_by_length", which it does not do unless asked.
- Trainer, same batches: reads the texts in the template's order. Its losses have to be the template's.

Start-up, the first interval and evaluation are not timed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import rounds
import torch
from rounds import Clock, Row

CONTENDERS = ("template", "Trainer", "Trainer, grouped", "Trainer, same batches")
TOLERANCE = 1e-5
WORDS = 2000


def make_task(folder: Path, count: int, options: argparse.Namespace) -> float:
    """Write texts, a BERT and its tokenizer. Returns the mean number of tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    rng = np.random.default_rng(options.seed)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*special, *map(str, range(WORDS))])}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=words, model_input_names=inputs, **names).save_pretrained(folder / "bert")
    sizes: Row = {"hidden_size": options.width, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 4 * options.width, "max_position_embeddings": options.length}
    dropout: Row = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(options.seed)
    config = BertConfig(vocab_size=WORDS + 4, id2label=dict(enumerate("0123")), **sizes, **dropout)
    BertForSequenceClassification(config).save_pretrained(folder / "bert")
    lengths = np.exp(rng.normal(np.log(options.length / 4) - 0.32, 0.8, count)).clip(1, options.length - 2).astype(int)
    for name, chosen in (("train", lengths), ("held-out", lengths[:16])):
        with (folder / f"{name}.jsonl").open("w") as lines:
            for number, length in enumerate(chosen.tolist()):
                text = " ".join(map(str, rng.integers(number % 4 * 100, WORDS, length)))
                lines.write(json.dumps({"text": text, "label": number % 4}) + "\n")
    return float(lengths.mean() + 2)


def run_template(options: argparse.Namespace, environment: dict, run_dir: Path) -> list[Row]:
    folder, steps = Path(options.folder), options.steps
    given = {"train_file": folder / "train.jsonl", "validation_file": folder / "held-out.jsonl", "weight_decay": 0}
    given |= {"model_name_or_path": folder / "bert", "seq_length": options.length, "learning_rate": options.learning_rate}
    given |= {"global_batch_size": options.batch_size, "per_device_train_batch_size": options.batch_size}
    given |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "report_to": "none", "logging_steps": rounds.every(steps)}
    given |= {"max_steps": steps, "eval_steps": steps, "save_steps": steps, "output_dir": run_dir}
    rounds.launch("templates/text_classification.py", rounds.flags(given), environment)
    return rounds.template_intervals(run_dir, "texts")


def trainer_loop(options: argparse.Namespace) -> list[Row]:
    from datasets import Dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    from shared.data.order import GroupedOrder
    from shared.models.tokenizers import load_tokenizer
    from shared.text import labelled
    from shared.text.options import LabelledTextConfig

    folder = Path(options.folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "bert")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "bert")
    files = {
        f"{name}_file": (str(folder / f"{file}.jsonl"),) for name, file in (("train", "train"), ("validation", "held-out"))
    }
    settings = LabelledTextConfig(seq_length=options.length, **files)  # type: ignore[arg-type]
    texts = labelled.open_texts(settings, load_tokenizer(str(folder / "bert"), split_special_tokens=True)).train
    chosen = list(range(len(texts)))
    strategy = "group_by_length" if options.work == "Trainer, grouped" else "random"
    if options.work == "Trainer, same batches":
        order = GroupedOrder(len(texts), options.batch_size, 0, lengths=texts.lengths)
        chosen, strategy = [int(i) for step in range(options.steps) for i in order.indices(step)], "sequential"
    rows = [texts[number] for number in chosen]
    data = Dataset.from_dict({key: [row[key].tolist() for row in rows] for key in rows[0]})
    clock = Clock(options.steps)
    values = rounds.trainer_settings(options.steps, precision="no")
    values |= {"per_device_train_batch_size": options.batch_size, "learning_rate": options.learning_rate}
    arguments = TrainingArguments(str(folder / "trainer"), train_sampling_strategy=strategy, **values)

    def amounts(inputs: Any) -> Row:
        return {
            "texts": len(inputs["labels"]),
            "positions": inputs["input_ids"].numel(),
            "filled": inputs["attention_mask"].sum(),
        }

    given: Row = {
        "train_dataset": data,
        "data_collator": DataCollatorWithPadding(tokenizer),
        "callbacks": [clock.callback()],
    }
    clock.counted(Trainer, amounts)(model, arguments, **given).train()
    return clock.intervals


def settle(rows: list[Row], mean: float) -> None:
    """Give each run its speed and padding; end here if the same batches did not give the same losses.

    Batches of similar lengths take very different times, so speed counts the texts' own tokens over all intervals but the
    first, not the median interval. It is told in texts of the mean length.
    """
    by_run = {(row["contender"], row["round"]): row["intervals"] for row in rows}
    for row in rows:
        intervals, same = row["intervals"], by_run["Trainer, same batches", row["round"]]
        if row["contender"] == "template":
            for interval, other in zip(intervals, same, strict=True):  # it does not count tokens; its batches are the same
                interval |= {"texts": other["texts"], "filled": other["filled"]}
        else:
            row["waste"] = 1 - sum(i["filled"] for i in intervals) / sum(i["positions"] for i in intervals)
        if row["contender"] == "Trainer, same batches":
            template = by_run["template", row["round"]]
            row["loss_difference"] = rounds.require_equal_losses(row["contender"], intervals, template, TOLERANCE)
        seconds = sum(interval["texts"] / interval["texts_per_second"] for interval in intervals[1:])
        row["texts_per_second"] = sum(interval["filled"] for interval in intervals[1:]) / seconds / mean


def main() -> None:
    parser = rounds.parser(__doc__, __file__, rounds=3, steps=64)
    parser.add_argument("--width", type=rounds.at_least(32), default=128, help="of the BERT's hidden states")
    parser.add_argument("--length", type=rounds.at_least(16), default=256, help="tokens of a text at most")
    parser.add_argument("--batch_size", type=rounds.at_least(1), default=32)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0, help="of the data")
    options = rounds.parse(parser, dict.fromkeys(CONTENDERS[1:], trainer_loop))
    with rounds.folder(options) as environment:
        mean = make_task(Path(options.folder), options.batch_size * options.steps, options)

        def measure(name: str, number: int) -> Row:
            if name == "template":
                intervals = run_template(options, environment, rounds.run_dir(options, number))
            else:
                intervals = rounds.worker(__file__, name, options, environment)
            return {"intervals": intervals}

        rows = rounds.alternate(CONTENDERS, options.rounds, measure)
    settle(rows, mean)
    rounds.pair(rows, "texts_per_second", "Trainer", ratio="to Trainer")
    rounds.pair(rows, "texts_per_second", "Trainer, grouped", ratio="to grouped")
    columns = {"texts/s": ("texts_per_second", ".4g"), "padding": ("waste", ".1%")}
    columns |= {"ratio to Trainer": ("to Trainer", ".3f"), "ratio to Trainer, grouped": ("to grouped", ".3f")}
    columns["largest difference of losses"] = ("loss_difference", ".1e")
    notes = [
        f"Medians (and ranges) of {options.rounds} rounds of {options.steps} steps of {options.batch_size} texts of "
        f"{mean:.0f} tokens (mean; at most {options.length}). BERT of 4 blocks, width {options.width}, fp32. Ratios are "
        "paired by round."
    ]
    rounds.report(options, rows, rounds.table("program", rows, columns), notes, ("datasets",))


if __name__ == "__main__":
    main()
