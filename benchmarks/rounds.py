"""What the benchmarks share: alternated runs, ratios within a round, one table, and processes of their own.

A measuring script names its contenders and how one run of each is measured. Every run is a process of its own, runs are
alternated (A B C A B C ...), and a ratio pairs two runs of the same round, so that a machine that is slow for a while is
slow for all.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from about import about, cores, line

ROOT = Path(__file__).resolve().parents[1]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Row = dict[str, Any]
PRECISIONS = {"no": "fp32", "bf16": "bf16"}


# The command line ------------------------------------------------------------------------------------------------------


def parser(
    doc: str | None, script: str, *, rounds: int, steps: int, least: int = 2, counts: str = "steps of a run"
) -> argparse.ArgumentParser:
    """--rounds, --steps and --output, and the hidden flag that makes a worker process of a script."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=at_least(1), default=rounds, help="runs of each contender")
    made.add_argument("--steps", type=at_least(least), default=steps, help=f"{counts}, at least {least}")
    made.add_argument("--output", type=Path, default=Path(script).with_suffix(".json"), help="all figures, as JSON")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    return made


def at_least(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"at least {least}, not {text}")
        return int(text)

    return integer


def parse(made: argparse.ArgumentParser, work: Mapping[str, Callable[[argparse.Namespace], Any]]) -> argparse.Namespace:
    """The options. A worker process does its part of `work` instead, leaves the result in a file, and ends."""
    options = made.parse_args()
    if options.worker:
        values = json.loads(options.worker)
        torch.set_float32_matmul_precision("high" if DEVICE.type == "cuda" else "highest")  # as `launch.start` does in fp32
        result = work[values["work"]](argparse.Namespace(**values))
        Path(values["result"]).write_text(json.dumps(result))
        sys.exit()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    return options


# Processes -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def folder(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """A temporary folder, as `options.folder`, for all that is made; yields the environment of every process."""
    with tempfile.TemporaryDirectory() as path:
        options.folder = path
        environment = os.environ | {"TEMPLATES_CACHE": f"{path}/cache", "HF_HOME": f"{path}/huggingface"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment["HF_HUB_OFFLINE"] = "1"
        environment["OMP_NUM_THREADS"] = str(cores())  # of which `accelerate launch` would take one
        # One GPU, or Trainer takes all. On a CPU none, as templates have it: torch's optimizers look for one in each step.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] if DEVICE.type == "cuda" else ""
        environment["CUDA_VISIBLE_DEVICES"] = visible
        yield environment


def run(arguments: list[str], environment: Mapping[str, str]) -> None:
    """Run a Python process to its end; ends this one with its last words if it fails."""
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(arguments)}: exit code {done.returncode}\n{done.stdout[-1000:]}{done.stderr[-3000:]}")


def worker(script: str, work: str, options: argparse.Namespace, environment: Mapping[str, str], **more: Any) -> Any:
    """What a script's `work` gives in a process of its own, with the options and what `more` adds to them."""
    result = Path(options.folder) / "result.json"
    result.unlink(missing_ok=True)
    values = vars(options) | {"work": work, "result": result} | more
    run([str(Path(script).resolve()), "--worker", json.dumps(values, default=str)], environment)
    return json.loads(result.read_text())


def launch(script: str | Path, flags: list[str], environment: Mapping[str, str], *, precision: str = "no") -> None:
    """`accelerate launch` a script of the project in one process, on the GPU if there is one."""
    config = ROOT / "accelerate_configs" / ("single_gpu.yaml" if DEVICE.type == "cuda" else "cpu.yaml")
    command = ["-m", "accelerate.commands.launch", "--config_file", str(config)]
    run([*command, "--mixed_precision", precision, str(ROOT / script), *flags], environment)


def run_dir(options: argparse.Namespace, number: int, suffix: str = "") -> Path:
    """Where the template's run of a round goes, from whose config.yaml and final/ the others take what they need."""
    return Path(options.folder) / f"run-{number}{suffix}"


def flags(values: Mapping[str, Any]) -> list[str]:
    """A mapping as command-line flags; True stands for a switch, False and None leave the flag out."""
    given = [(f"--{name}", value) for name, value in values.items() if value is not None and value is not False]
    return [part for name, value in given for part in ([name] if value is True else [name, str(value)])]


def absent(package: str, contenders: Iterable[str]) -> list[Row]:
    """The rows of contenders whose package is not there; none if it is."""
    if importlib.util.find_spec(package):
        return []
    return [{"contender": name, "absent": f"not installed: pip install {package}"} for name in contenders]


# Timing ----------------------------------------------------------------------------------------------------------------


class Clock:
    """Times the intervals of a run, each an eighth of its steps: `count` what is done, and `mark` the steps `due`."""

    def __init__(self, steps: int) -> None:
        self.steps, self.every, self.step = steps, every(steps), 0
        self.intervals: list[Row] = []
        self.counts: dict[str, Any] = {}
        self.start = time.perf_counter()

    def count(self, **amounts: Any) -> None:
        """Add integers, or tensors, which are read at the interval's end only."""
        for name, amount in amounts.items():
            self.counts[name] = self.counts.get(name, 0) + amount

    def due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.steps

    def mark(self, step: int, loss: float | None = None) -> None:
        """End an interval, with the mean loss of its steps."""
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        counts = {name: int(amount) for name, amount in self.counts.items()}
        rates = {f"{name}_per_second": count / (now - self.start) for name, count in counts.items()}
        self.intervals.append({"step": step, "loss": loss, **counts, **rates})
        self.counts, self.step, self.start = {}, step, now

    def callback(self) -> Any:
        """For a transformers `Trainer` that logs every `self.every` steps: its logging marks the intervals."""
        from transformers import TrainerCallback

        clock = self

        class Marking(TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_unused: Any) -> None:
                if "loss" in logs:  # not the summary at the end
                    clock.mark(state.global_step, logs["loss"])

        return Marking()

    def counted(self, trainer: Any, amounts: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Any:
        """A `Trainer` class that counts the amounts in each micro-batch."""
        clock = self

        class Counted(trainer):
            def training_step(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
                clock.count(**amounts(inputs))
                return super().training_step(model, inputs, *arguments, **named)

        return Counted


def every(steps: int) -> int:
    """Steps of an interval."""
    return max(1, steps // 8)


def template_intervals(run_dir: Path, unit: str) -> list[Row]:
    """The intervals of a template's run, from its metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rate = f"processed_{unit}_per_second"
    rows = [row for row in map(json.loads, lines) if rate in row]
    if len(rows) > 2 and rows[2]["step"] == 2 * rows[1]["step"]:  # the first step has a line of its own
        first = rows.pop(0)
        rows[0]["loss"] += (first["loss"] - rows[0]["loss"]) / rows[0]["step"]
    return [{"step": row["step"], "loss": row["loss"], f"{unit}_per_second": row[rate]} for row in rows]


def steady(intervals: list[Row], rate: str, last: int | None = None) -> float:
    """The median interval's rate, without the first, which warms up."""
    return statistics.median(interval[rate] for interval in intervals[1:last])


def require_equal_losses(name: str, ours: list[Row], theirs: list[Row], tolerance: float) -> float:
    """The largest difference of two runs' losses; ends this process if they did not do the same work."""
    difference = max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True))
    if not difference < tolerance:
        sys.exit(f"{name}: the losses differ by {difference}, so these two did not do the same work")
    return difference


def trainer_settings(steps: int, *, precision: str) -> Row:
    """Arguments that make a `Trainer` do what the templates do when asked for a constant rate, and log when clocked."""
    settings: Row = {"max_steps": steps, "logging_steps": every(steps), "lr_scheduler_type": "constant", "weight_decay": 0.0}
    settings |= {"optim": "adamw_torch_fused", "max_grad_norm": 1.0, "bf16": precision == "bf16"}
    settings |= {"use_cpu": DEVICE.type == "cpu", "tf32": DEVICE.type == "cuda" or None}
    return settings | {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}


# Rounds and the table --------------------------------------------------------------------------------------------------


def alternate(names: Iterable[str], rounds: int, measure: Callable[[str, int], Row]) -> list[Row]:
    """`measure(name, round)` of each contender in turn, as {"contender", "round", ...}."""
    names, rows = list(names), []
    for number in range(1, rounds + 1):
        for name in names:
            started = time.perf_counter()
            rows.append({"contender": name, "round": number, **measure(name, number)})
            seconds = time.perf_counter() - started
            print(f"round {number}/{rounds} {name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return rows


def pair(rows: list[Row], value: str, base: str | Callable[[str], str], *, ratio: str = "ratio") -> None:
    """Give each row the ratio of its value to that of the contender `base`, or `base(name)`, in the same round."""
    by_run = {(row["contender"], row["round"]): row for row in rows}
    for row in rows:
        name = base if isinstance(base, str) else base(row["contender"])
        row[ratio] = row[value] / by_run[name, row["round"]][value]


def cell(values: list[float], form: str) -> str:
    """Median and range."""
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def table(title: str, rows: list[Row], columns: Mapping[str, tuple[str, str]]) -> str:
    """A Markdown table with a line for each contender; `columns` are heading -> (key, format).

    Columns without any value are left out. A contender whose rows have a reason to be "absent" gets that for figures.
    """
    columns = {head: place for head, place in columns.items() if any(row.get(place[0]) is not None for row in rows)}
    header = f"| {' | '.join([title, *columns])} |"
    lines = [header, "|---" * (header.count("|") - 1) + "|"]
    for name in dict.fromkeys(row["contender"] for row in rows):
        runs = [row for row in rows if row["contender"] == name]
        found = [[row[key] for row in runs if row.get(key) is not None] for key, _ in columns.values()]
        cells = [cell(values, form) for values, (_, form) in zip(found, columns.values(), strict=True)]
        if "absent" in runs[0]:
            cells = [runs[0]["absent"], *cells[1:]]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def report(options: argparse.Namespace, rows: list[Row], text: str, notes: list[str], packages: Iterable[str] = ()) -> None:
    """Write the JSON, and print the table with its notes and what it was measured on."""
    facts = about(("torch", *(p for p in packages if importlib.util.find_spec(p)), "transformers", "accelerate"))
    settings = {key: value for key, value in vars(options).items() if key not in ("output", "worker", "folder")}
    for key, value in settings.items():  # without this machine's folders
        settings[key] = value.name if isinstance(value, Path) else value
        settings[key] = value.removeprefix(f"{ROOT}/") if isinstance(value, str) else settings[key]
    content = {"about": facts, "settings": settings, "rows": rows}
    options.output.write_text(json.dumps(content, indent=1) + "\n")
    print("\n".join([text, "", *notes, line(facts)]))
