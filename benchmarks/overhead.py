"""Microseconds of an optimizer step that are not forward, backward and optimizer, on a model that takes hardly any time.

    python benchmarks/overhead.py                                    # writes benchmarks/overhead.json
    python benchmarks/overhead.py --rounds 9 --steps 4000 --output results.json

Goal: a step of this project that is not logged takes at most 50 us longer than the raw loop's.

- raw loop: a batch from a list of ready ones, forward, loss, backward, clip, fused AdamW, zero_grad.
- raw loop, DataLoader: the same with samples from a torch DataLoader.
- Accelerate: the raw loop with what `accelerator.prepare` returns for model, optimizer and schedule, inside
  `accumulate`, with `accelerator.backward` and `accelerator.clip_grad_norm_`.
- this project: the step of the templates on ready samples, driven by a `Run`, from the Loader's window to the logger.
- Trainer: transformers.Trainer on the same samples; neither logging nor saving.

All train the same two linear layers on the same samples in the same order at the same rate; the weights that they end
with are compared, and the script ends with an error where they differ. A figure is the median over stretches of 50
steps, of which the first quarter is left out. The lines below this project's are its own parts, each timed within the
step by two looks at the clock, beside the raw loop's part that does the same.
"""

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import rounds
import torch
from rounds import DEVICE, Row
from torch import nn
from torch.nn import functional as F

WIDTH, ROWS, CLASSES, RATE = 64, 8, 16, 1e-3
SAMPLES = 2**17  # in the middle of what a shuffled step costs, which depends on how far the next power of four is
TOLERANCE = 1e-4  # of the final weights' norm


class Toy(nn.Module):
    """Two layers; the loss is the mean, or the sum, of cross-entropies."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.layers(inputs), labels, reduction=reduction)}


class Ready:
    """Samples in memory, as `shared.data.order.Samples` and as a torch data set.

    Args:
        order: rearrange them, so that one after the other they come as a project's shuffled order would draw them.
    """

    def __init__(self, order: np.ndarray | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
        if order is not None:
            self.inputs, self.labels = self.inputs[order], self.labels[order]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}

    def num_targets(self, indices: np.ndarray) -> int:
        return len(indices)

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        part = slice(step * ROWS, (step + 1) * ROWS)
        return {"inputs": self.inputs[part].to(DEVICE), "labels": self.labels[part].to(DEVICE)}


def shuffled(options: argparse.Namespace) -> Ready:
    """The samples of all steps, in the order in which this project's loop draws them."""
    from shared.data.order import Order

    order = Order(SAMPLES, ROWS, 0)
    return Ready(np.concatenate([order.indices(step) for step in range(options.steps)]))


class Stopwatch:
    """Where a step's time goes: `start` it, `lap` after each part, `end` it. Without parts only steps are timed."""

    def __init__(self, *, parts: bool) -> None:
        self.with_parts = parts
        self.ends: list[float] = []
        self.parts: dict[str, list[float]] = {}
        self.mark = 0.0

    def start(self) -> None:
        self.mark = time.perf_counter()

    def lap(self, part: str) -> None:
        if self.with_parts:
            now = time.perf_counter()
            self.parts.setdefault(part, []).append(now - self.mark)
            self.mark = time.perf_counter()

    def end(self) -> None:
        self.ends.append(time.perf_counter())

    def figures(self, model: nn.Module) -> Row:
        """Microseconds a step, and of each part, without the first quarter; and what was learned."""

        def steady(seconds: Any) -> float:
            return 1e6 * statistics.median(seconds[len(seconds) // 4 :])

        norm = sum(p.detach().double().square().sum().item() for p in model.parameters()) ** 0.5
        parts = {name: steady(seconds) for name, seconds in self.parts.items()}
        return {"step": steady(np.diff(self.ends).tolist()), "parts": parts, "weights": norm}


# The loops -------------------------------------------------------------------------------------------------------------


def raw_loop(options: argparse.Namespace) -> Row:
    data, model = shuffled(options), Toy().to(DEVICE)
    batches: Any = [data.batch(step) for step in range(options.steps)]
    if options.work == "raw loop, DataLoader":
        batches = torch.utils.data.DataLoader(data, ROWS)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    watch, batches = Stopwatch(parts=options.parts), iter(batches)
    for _ in range(options.steps):
        watch.start()
        batch = {name: tensor.to(DEVICE, non_blocking=True) for name, tensor in next(batches).items()}
        watch.lap("next window")
        loss = model(**batch)["loss"]
        watch.lap("forward")
        loss.backward()
        watch.lap("backward")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        watch.lap("clip")
        optimizer.step()
        optimizer.zero_grad()
        watch.lap("update")
        watch.end()
    return watch.figures(model)


def accelerate_loop(options: argparse.Namespace) -> Row:
    from accelerate import Accelerator

    data, model, watch = shuffled(options), Toy(), Stopwatch(parts=False)
    batches = [data.batch(step) for step in range(options.steps)]
    accelerator = Accelerator()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        watch.end()
    return watch.figures(model)


def project_loop(options: argparse.Namespace) -> Row:
    from shared.config.options import BatchConfig, CheckpointConfig, EvaluationConfig, FullOptimConfig, LogConfig
    from shared.data.loader import Loader
    from shared.data.order import Order
    from shared.parallel import sharding
    from shared.run import run as runs
    from shared.run.setup import Setup
    from shared.training import optim

    template: Any = importlib.import_module("templates.pretrain")
    watch, never = Stopwatch(parts=options.parts), options.steps + 1  # evaluated, saved and logged
    config = template.Config(
        batch=BatchConfig(global_batch_size=ROWS, per_device_train_batch_size=ROWS),
        optim=FullOptimConfig(
            learning_rate=RATE, weight_decay=0.0, adam_beta2=0.999, lr_scheduler_type="constant", warmup_steps=0
        ),
        evaluation=EvaluationConfig(eval_steps=never, metric_for_best_model="none"),
        checkpoint=CheckpointConfig(
            output_dir=Path(options.folder, f"parts-{options.parts}-{time.time_ns()}"), save_steps=never
        ),
        log=LogConfig(report_to="none", logging_steps=never),
    )

    class Timed(Loader):
        def windows(self, start: int, stop: int) -> Iterator[Any]:
            for window in super().windows(start, stop):
                yield window
                watch.lap("stop, evaluate, save?")
                watch.end()

    def timed(owner: Any, name: str, part: str, before: str = "") -> None:
        """Let the owner's function end a part, and the part before it at its start."""
        function = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            if before:
                watch.lap(before)
            result = function(*arguments, **named)
            watch.lap(part)
            return result

        setattr(owner, name, call)

    setup = Setup(config, "overhead")
    toy = Toy()
    model, optimizers = setup.prepare(toy, optim.build(toy, config.optim))
    loader = Timed(
        Ready(),
        lambda rows: {key: torch.stack([row[key] for row in rows]) for key in ("inputs", "labels")},
        Order(SAMPLES, ROWS, 0),
        sharding.share(setup.accelerator),
        per_device=ROWS,
    )
    run = setup.start(loader, None, fingerprint="ready", steps=never)
    if options.parts:
        timed(runs, "seed_all", "seeds", before="next window")
        timed(optim, "set_learning_rate", "learning rate")
        timed(run.guard, "finite", "finite?")
        timed(run.logger, "step", "count and log")
    watch.start()
    for step in run.steps():
        if step.number == never:  # its window was asked for to see the end of the step before
            break
        for batch in step.micro_batches():
            watch.lap("accumulate")
            loss = model(**batch, reduction="sum")["loss"]
            watch.lap("forward")
            step.backward(loss)
            watch.lap("backward")
        watch.lap("accumulate")
        step.clip_gradients(config.optim.max_grad_norm)
        watch.lap("clip")
        step.update(optimizers)
        watch.lap("update")
        if run.should_evaluate():
            raise RuntimeError("no evaluation is due")
    return watch.figures(model)


def trainer_loop(options: argparse.Namespace) -> Row:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    watch, model = Stopwatch(parts=False), Toy()

    class Timed(TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            watch.end()

    values = rounds.trainer_settings(options.steps, precision="no") | {"logging_strategy": "no"}
    values |= {"per_device_train_batch_size": ROWS, "learning_rate": RATE, "train_sampling_strategy": "sequential"}
    arguments: Any = TrainingArguments(f"{options.folder}/trainer", **values)
    Trainer(model, arguments, train_dataset=shuffled(options), callbacks=[Timed()]).train()  # type: ignore[arg-type]
    return watch.figures(model)


WORK = {
    "raw loop": raw_loop,
    "raw loop, DataLoader": raw_loop,
    "Accelerate": accelerate_loop,
    "this project": project_loop,
    "Trainer": trainer_loop,
}


def part_rows(raw: Row, ours: Row) -> Iterator[Row]:
    """Lines for the parts of this project's step in one round, beside the raw loop's."""
    for name, microseconds in ours["parts"].items():
        over = microseconds - raw["parts"].get(name, 0.0)
        yield {"contender": f"- {name}", "round": ours["round"], "step": microseconds, "over": over}


def main() -> None:
    parser = rounds.parser(__doc__, __file__, rounds=5, steps=2000, least=8)
    options = rounds.parse(parser, WORK)
    with rounds.folder(options) as environment:

        def measure(name: str, number: int) -> Row:
            whole = rounds.worker(__file__, name, options, environment, parts=False)
            if name not in ("raw loop", "this project"):
                return whole
            return whole | {"parts": rounds.worker(__file__, name, options, environment, parts=True)["parts"]}

        rows = rounds.alternate(WORK, options.rounds, measure)
    by_run = {(row["contender"], row["round"]): row for row in rows}
    parts: list[Row] = []
    for row in rows:
        raw = by_run["raw loop", row["round"]]
        row["over"] = row["step"] - raw["step"]
        row["difference"] = abs(row["weights"] / raw["weights"] - 1)
        if not row["difference"] < TOLERANCE:
            sys.exit(f"{row['contender']}: the weights' norm is {row['weights']}, the raw loop's {raw['weights']}")
        if row["contender"] == "this project":
            parts += part_rows(raw, row)
    ordered = [row for row in rows if row["contender"] != "Trainer"] + parts
    ordered += [row for row in rows if row["contender"] == "Trainer"]
    columns = {"us a step": ("step", ",.0f"), "us over the raw loop": ("over", "+,.0f")}
    columns["relative difference of weights"] = ("difference", ".0e")
    notes = [
        f"Medians (and ranges) of {options.rounds} rounds of {options.steps} steps; differences are paired by round. Lines "
        "with a dash are parts of this project's step, over the same part of the raw loop."
    ]
    rounds.report(options, rows, rounds.table("loop", ordered, columns), notes)


if __name__ == "__main__":
    main()
