"""templates/dpo.py beside TRL's DPOTrainer (SimPO: CPOTrainer): the same losses, rewards and gradients; pairs a second.

    python benchmarks/peers_dpo.py                                   # writes benchmarks/peers_dpo.json
    python benchmarks/peers_dpo.py --rounds 3 --steps 24 --only speed

Goal: losses, rewards and gradient norms equal to 1e-5 in fp32 for each loss that both have, and 1.5 times the pairs a second
of TRL, padded.

The data are pairs made here, of prompts and answers of very different lengths (log-normal, seeded). All train the same
adapter from the same weights in fp32. For the comparison of numbers TRL gets the template's order.

- template: templates/dpo.py as it is, both answers of a pair in a row; template padded: with --no_packing.
- TRL padded: DPOTrainer as it is, on shuffled pairs; the reference is computed in each step.
- TRL, reference before: the same with precompute_ref_log_probs.
- TRL, the template's order: TRL padded on pairs of similar lengths.

TRL 1.16 warns that padding_free does nothing, so it is not measured. ORPO is not compared: the loss of TRL's trainer for the
chosen answer is a mean over the tokens of prompts and answers of the whole batch, the template's is the paper's, a mean over
pairs of each answer's own. Start-up, the first interval, evaluation and a reference that is computed
before are not timed.
"""

import argparse
import json
import re
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import rounds
import torch
import yaml
from rounds import Clock, Row

from shared import demo

KINDS = {"sigmoid": 0.1, "robust": 0.1, "ipo": 0.1, "simpo": 2.0}  # loss: beta
SPEED = ("template", "template padded", "TRL padded", "TRL, reference before", "TRL, the template's order")
NAMES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "grad_norm")
TOLERANCE = 1e-5


def make_pairs(file: Path, count: int, seed: int) -> list[Row]:
    """Texts of words that are one token each."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(demo.MODEL)
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    words = [text for text in texts if re.fullmatch("( [a-z]{3,})", text)]
    rng = np.random.default_rng(seed)

    def text(typical: float) -> str:
        return "".join(rng.choice(words, int(np.exp(rng.normal(np.log(typical), 0.7)).clip(2, 4 * typical))))

    records = [{"prompt": text(40), "chosen": text(30), "rejected": text(30)} for _ in range(count)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def run_template(options: argparse.Namespace, environment: dict, folder: Path, **given: Any) -> None:
    pairs = f"{options.folder}/pairs.jsonl"
    flags: Row = {"train_file": pairs, "validation_file": f"{options.folder}/held-out.jsonl", "eval_samples": 4}
    flags |= {"global_batch_size": 8, "per_device_train_batch_size": 4, "seq_length": 512, "show_answers": 0}
    flags |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "report_to": "none", "learning_rate": 1e-4}
    flags |= {"eval_steps": 10**6, "save_steps": 10**6, "output_dir": folder, "metric_for_best_model": "none"}
    rounds.launch("templates/dpo.py", rounds.flags(flags | given), environment)


# TRL, in processes of its own ------------------------------------------------------------------------------------------


def trl(options: argparse.Namespace) -> Any:
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    from shared.data.order import GroupedOrder, Order
    from shared.models.tokenizers import load_tokenizer
    from shared.text.options import PreferenceConfig
    from shared.text.preferences import read_pairs

    run = Path(options.run_dir)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    kind = settings["loss_type"]
    data_options = PreferenceConfig(
        train_file=tuple(settings["train_file"]),
        validation_file=tuple(settings["validation_file"]),
        seq_length=settings["seq_length"],
    )
    pairs, _ = read_pairs(SimpleNamespace(data=data_options), load_tokenizer(str(demo.MODEL)), demo_samples=0)
    records = [json.loads(line) for line in Path(options.folder, "pairs.jsonl").read_text().splitlines()]
    order: Any = GroupedOrder(len(pairs), 8, settings["seed"], lengths=pairs.lengths)
    if options.shuffled:
        order = Order(len(pairs), 8, settings["seed"])
    chosen = [int(i) for step in range(options.steps) for i in order.indices(step)]
    data = Dataset.from_list([records[i] for i in chosen])

    torch.manual_seed(settings["seed"])
    base = AutoModelForCausalLM.from_pretrained(demo.MODEL, dtype=torch.float32)
    adapter = LoraConfig.from_pretrained(str(run / "final"))
    adapter.inference_mode = False
    start = {name: p.detach().clone() for name, p in get_peft_model(base, adapter).named_parameters() if p.requires_grad}
    base = AutoModelForCausalLM.from_pretrained(demo.MODEL, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(demo.MODEL)
    tokenizer.bos_token = None  # CPOTrainer would put it before each text
    clock = Clock(options.steps)

    values = rounds.trainer_settings(options.steps, precision="no")
    values |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-4}
    values |= {"adam_beta1": 0.9, "adam_beta2": 0.999, "beta": settings["beta"]}
    values |= {"train_sampling_strategy": "sequential", "gradient_checkpointing": False, "max_length": 512}
    values |= {"remove_unused_columns": False} if kind == "simpo" else {}
    if options.each_step:
        values["logging_steps"] = 1
    if kind == "simpo":
        arguments: Any = CPOConfig(
            f"{run}/trl", loss_type="simpo", cpo_alpha=0.0, simpo_gamma=settings["simpo_gamma"], **values
        )
        trainer_class: Any = CPOTrainer
    else:
        values |= {"label_smoothing": settings["label_smoothing"], "loss_type": [kind]}
        arguments = DPOConfig(f"{run}/trl", precompute_ref_log_probs=options.before, **values)
        trainer_class = DPOTrainer
    if not options.each_step:
        trainer_class = clock.counted(trainer_class, lambda inputs: {"pairs": len(inputs["input_ids"]) // 2})
    given: Row = {"train_dataset": data, "processing_class": tokenizer, "peft_config": adapter}
    given |= {} if options.each_step else {"callbacks": [clock.callback()]}
    trainer = trainer_class(base, args=arguments, **given)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(start[name])
    if options.before and not options.each_step:
        trainer.get_train_dataloader()
        clock.start = __import__("time").perf_counter()
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return {"rows": rows, "intervals": clock.intervals, "memory": peak(resource.RUSAGE_SELF)}


def peak(who: int) -> float:
    """The peak of resident memory in GB."""
    return resource.getrusage(who).ru_maxrss / 1e6


# Rounds ----------------------------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace, environment: dict) -> dict[str, float]:
    """The largest relative difference of each loss type's logged values; ends this process where they differ."""
    found = {}
    for kind, beta in KINDS.items():
        folder = Path(options.folder) / kind
        more = {"label_smoothing": 0.1} if kind == "robust" else {}
        run_template(options, environment, folder, loss_type=kind, beta=beta, max_steps=6, logging_steps=1, **more)
        ours = [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
        given = {"run_dir": folder, "steps": 6, "each_step": True, "before": False, "shuffled": False}
        theirs = rounds.worker(__file__, "TRL", options, environment, **given)["rows"]
        worst = 0.0
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
            for name in NAMES:
                if name in b and not (kind == "simpo" and name.startswith("logps")):  # TRL's are means over tokens there
                    difference = abs(a[name] - b[name]) / max(1.0, abs(b[name]))
                    worst = max(worst, difference)
                    if not difference < TOLERANCE:
                        sys.exit(f"{kind}, step {step}: {name} is {a[name]}, TRL has {b[name]}")
        found[kind] = worst
        print(f"{kind}: largest difference {worst:.1e}", flush=True)
    return found


def main() -> None:
    parser = rounds.parser(__doc__, __file__, rounds=3, steps=24)
    parser.add_argument("--only", choices=("equal", "speed"))
    parser.add_argument("--each_step", type=bool, default=False, help=argparse.SUPPRESS)
    options = rounds.parse(parser, {"TRL": trl})
    if rounds.absent("trl", ["TRL"]):
        sys.exit("pip install trl")
    with rounds.folder(options) as environment:
        make_pairs(Path(options.folder, "pairs.jsonl"), 8 * max(options.steps, 32), 0)
        make_pairs(Path(options.folder, "held-out.jsonl"), 4, 1)
        differences = compare(options, environment) if options.only != "speed" else {}

        def measure(name: str, number: int) -> Row:
            if name.startswith("template"):
                folder = rounds.run_dir(options, number, "-padded" if "padded" in name else "")
                steps = {"max_steps": options.steps, "logging_steps": rounds.every(options.steps)}
                more = {"packing": "off"} if "padded" in name else {}
                run_template(options, environment, folder, **steps, **more)
                rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
                rows = [row for row in rows if "loss" in row]
                kept = ("step", "loss", "trained_pairs_per_second")
                intervals = [{key.removeprefix("trained_"): row[key] for key in kept} for row in rows]
                return {"intervals": intervals, "memory": max(row["peak_memory_gb"] for row in rows)}
            given = {"run_dir": rounds.run_dir(options, number), "before": "before" in name}
            given |= {"shuffled": "order" not in name, "each_step": False}
            done = rounds.worker(__file__, "TRL", options, environment, **given)
            return {key: done[key] for key in ("intervals", "memory")}

        rows = rounds.alternate(SPEED, options.rounds, measure) if options.only != "equal" else []
    for row in rows:
        row["pairs_per_second"] = rounds.steady(row["intervals"], "pairs_per_second")
    rounds.pair(rows, "pairs_per_second", "TRL padded", ratio="to TRL padded")
    columns = {"pairs/s": ("pairs_per_second", ",.2f"), "ratio to TRL padded": ("to TRL padded", ".2f")}
    columns["peak memory, GB"] = ("memory", ".2f")
    notes = [f"largest difference to TRL, {kind}: {value:.1e}" for kind, value in differences.items()]
    notes.append(f"Medians (and ranges) of {options.rounds} rounds of {options.steps} steps of 8 pairs in fp32, 4 at once.")
    options.differences = differences
    rounds.report(options, rows, rounds.table("program", rows, columns) if rows else "", notes, ("peft", "trl"))


if __name__ == "__main__":
    main()
