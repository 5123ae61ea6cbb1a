"""Compare two runs or more: is the second better than the first?

python -m shared compare runs/a runs/b [runs/c ...]
python -m shared compare runs/a runs/b --noise runs/noise -- accelerate launch train.py

Prints the settings, data, code and versions that differ; training losses, step by step where both
have the same samples, and where they part; and the last evaluations. What was measured of each
validation sample is compared sample by sample: classes and numbers of a classifier, scores of
answers, and, with a command, the loss of each sample, for which the final models of both runs are
evaluated again. A difference has a 95 % interval, by bootstrap over the samples. With a command, a
run can also be compared with its weights: runs/a/base, runs/a/merged.

The verdict is about these weights. Whether the change is better, and not the seed, is only known
with the noise of seeds, which `repeat` measures: --noise. Writes compare.png; --json prints all.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from shared.extras.comparisons import _sampled
from shared.extras.comparisons._runs import PARENT, RunFolder
from shared.extras.comparisons._statistics import Paired, noise_of, paired
from shared.extras.comparisons.repeat import FILE
from shared.extras.proofs._launches import divided
from shared.models.options import AdapterConfig
from shared.process.errors import ConfigError
from shared.process.files import read_json_lines
from shared.run.checkpoint_files import run_folder
from shared.run.state import better

NOT_COMPARED = {
    *("output_dir", "run_name", "report_to"),
    *("resume_from_checkpoint", "allow_changed", "mirror_to", "mirror_timeout"),
}
CHANGED = 10  # samples that are shown
REPLACED: dict[str, Any] = {
    "max_steps": 0,
    "per_device_eval_batch_size": 1,
    "torch_compile": False,
    "report_to": "none",
    "show_answers": 0,
    "eval_answers": 0,
    "merge_adapter": False,
    "ema_decay": 0.0,
    "resume_from_checkpoint": None,
    "mirror_to": None,
    "num_train_epochs": None,
    "max_tokens": None,
}
KEPT = {"load_in_4bit", "lora_experts"}  # of an adapter's settings
# By what was measured, and by the key of a sample: its value, its weight in the mean, its text.
Values = dict[str, dict[str, tuple[float, float, str]]]


def values_of(run: RunFolder) -> Values:
    """What the run has written of each validation sample."""
    values: Values = {}
    if not run.is_whole:
        return values
    table = run.path / "predictions.csv"
    if table.exists():
        with table.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                key = f"{row.get('where') or row.get('image')} {row['label']}"
                text = " ".join(str(row.get(name) or "") for name in ("where", "image", "text"))
                is_number = run.settings.get("problem_type") == "regression"
                # a tagger's accuracy is of words, its rows are texts
                name = "texts_right" if "label_pieces" in run.settings else "accuracy"
                name = "absolute_error" if is_number else name
                right = float(row["label"] == row["predicted"])
                value = abs(float(row["label"]) - float(row["predicted"])) if is_number else right
                values.setdefault(name, {})[key] = (value, 1.0, text.strip())
    answers = run.path / "answers.jsonl"
    if answers.exists():
        rows = [*read_json_lines(answers)]
        for row in (row for row in rows if row["step"] == rows[-1]["step"]):
            key = f"{row['prompt']}\n{row.get('reference', '')}"
            for name, value in row.items():
                if type(value) in (int, float) and name != "step":  # not cut, which is a bool
                    values.setdefault(name, {})[key] = (float(value), 1.0, row["prompt"])
    return values


def losses_of(run: RunFolder, command: Sequence[str]) -> Values:
    """The loss of each validation sample, by the run's final model or the weights that were named.

    Raises:
        ConfigError: the command fails, or the weights are not there.
    """
    words, flags = divided(command)
    weights = run.weights
    if weights.name != "base" and not weights.is_dir():
        raise ConfigError(f"{run.path} has no {weights.name}/: its own command finishes it")
    settings = {k: v for k, v in run.settings.items() if k not in NOT_COMPARED}
    settings |= {name: value for name, value in REPLACED.items() if name in settings}
    if weights.name != "base":  # a new adapter changes nothing yet
        is_adapter = (weights / "adapter_config.json").exists()
        dropped = {*AdapterConfig.__dataclass_fields__} - KEPT if is_adapter else set()
        dropped |= {"config_name", "config_overrides"}
        settings = {k: v for k, v in settings.items() if k not in dropped}
        name = "adapter_name_or_path" if is_adapter else "model_name_or_path"
        settings[name] = str(weights.resolve())
    with tempfile.TemporaryDirectory(prefix="compare-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        settings["output_dir"] = str(folder / "run")
        file = folder / "settings.yaml"
        file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        argv = [*words[:-1], _sampled.__file__, words[-1], "--config", str(file), *flags]
        print(f"evaluating {run} sample by sample ...", file=sys.stderr, flush=True)
        done = subprocess.run(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"SAMPLED": str(folder / "samples.json"), "WANDB_MODE": "disabled"},
        )
        if not (folder / "samples.json").exists():
            print(done.stdout[-3000:], file=sys.stderr)
            raise ConfigError(f"{run}: it was not evaluated; its output ends as above")
        rows = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
    return {"loss": {r["key"]: (r["loss"], float(r["targets"]), r["text"]) for r in rows}}


def differing(one: RunFolder, other: RunFolder) -> list[str]:
    """Lines on what differs between two runs besides what they learned."""
    lines = []
    for name in sorted({*one.settings, *other.settings} - NOT_COMPARED):
        values = [run.settings.get(name) for run in (one, other)]
        if values[0] != values[1]:
            lines.append(f"{name}: {values[0]}, {values[1]}")
    for name in ("data", "base", "strategy", "versions"):
        values = [run.facts.get(name) for run in (one, other)]
        if values[0] != values[1]:
            lines.append(f"{name}: {values[0]}, {values[1]}")
    for run in {each.path: each for each in (one, other)}.values():
        if (run.path / PARENT).exists():
            parent = json.loads((run.path / PARENT).read_text(encoding="utf-8"))
            lines.append(f"{run.name} began with {parent['run']} at step {parent['step']}")
    return lines


def training(one: RunFolder, other: RunFolder) -> list[str]:
    """Lines on the training losses, paired by step; [] of weights alone."""
    if not (one.is_whole and other.is_whole):
        return []
    steps = sorted(one.losses.keys() & other.losses.keys())
    same = [one.settings.get(n) == other.settings.get(n) for n in ("seed", "global_batch_size")]
    if one.facts.get("data") != other.facts.get("data") or not all(same):
        return ["training losses are not paired: the steps have other samples"]
    if not steps:
        return ["training losses are not paired: no step is in both logs"]
    apart = next((step for step in steps if one.losses[step] != other.losses[step]), None)
    if apart is None:
        return [f"training losses are the same in all {len(steps)} steps that both have logged"]
    later = [step for step in steps if step >= apart]
    mean = float(np.mean([other.losses[step] - one.losses[step] for step in later]))
    return [f"training losses part at step {apart}; from there on, {mean:+.4f} in the mean"]


def verdict(name: str, found: Paired, most: float | None, samples: int) -> str:
    """Whether the second run is better, in words.

    Args:
        most: by how much two seeds differ at most; None: not known.
    """
    lower = better(name) == "lower" or name == "absolute_error"
    word = "better" if (found.difference < 0) == lower else "worse"
    if not found.is_known:
        text = f"not known: {samples} samples do not tell"
        return text + (f", {found.needed:,} would" if found.needed > samples else "")
    if most is None:
        return f"{word} on these samples; whether another seed would be, `repeat` tells"
    if abs(found.difference) <= most:
        return f"not known: within the noise of seeds ({most:.4f})"
    return f"{word}, beyond the noise of seeds ({most:.4f})"


def compared(one: Values, other: Values, noise: dict[str, list[float]]) -> list[dict[str, Any]]:
    """What was measured of each sample in both runs, with its difference.

    Raises:
        ConfigError: they have no samples in common.
    """
    rows = []
    for name in [name for name in one if name in other]:
        keys = [key for key in one[name] if key in other[name]]
        if len(keys) < max(len(one[name]), len(other[name])):
            raise ConfigError(
                f"{name}: the runs were validated on other samples ({len(keys)} of "
                f"{len(one[name])} and {len(other[name])} are the same)"
            )
        first, second = (np.array([of[name][key][0] for key in keys]) for of in (one, other))
        weights = np.array([one[name][key][1] for key in keys])
        lower = better(name) == "lower" or name == "absolute_error"
        found = paired(first, second, weights, lower=lower)
        most = noise_of(noise[name])[2] if len(noise.get(name, ())) > 1 else None
        order = np.argsort(-np.abs(second - first), kind="stable")[:CHANGED]
        a, b = (each / weights for each in (first, second))  # of a loss: a token's
        rows.append(
            {
                "name": name,
                "values": [float(each.sum() / weights.sum()) for each in (first, second)],
                "samples": len(keys),
                **asdict(found),
                "verdict": verdict(name, found, most, len(keys)),
                "changed": [
                    {"text": one[name][keys[i]][2], "values": [float(a[i]), float(b[i])]}
                    for i in order
                    if first[i] != second[i]
                ],
                "all": (b - a).tolist(),
            }
        )
    return rows


def lines_of(row: dict[str, Any]) -> list[str]:
    one, other = row["values"]
    lines = [
        f"{row['name']}: {one:.4f}, {other:.4f}: {row['difference']:+.4f} "
        f"({row['low']:+.4f} to {row['high']:+.4f}, {row['samples']} samples: better on "
        f"{row['wins']}, worse on {row['losses']})",
        f"  {row['verdict']}",
    ]
    for each in row["changed"][:3]:
        text = " ".join(each["text"].split())[:70]
        lines.append(f"    {each['values'][0]:.4g} to {each['values'][1]:.4g}: {text}")
    return lines


def draw(runs: Sequence[RunFolder], rows: list[dict[str, Any]], file: Path) -> None:
    """Training losses by step, and the differences of the samples."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * (1 + bool(rows)), 4), layout="constrained")
    axes = figure.subplots(1, 1 + bool(rows), squeeze=False)[0]
    for run in [run for run in runs if run.losses]:
        lines = run.before + run.rows
        points = [(row["step"], row["loss"]) for row in lines if row.get("loss") is not None]
        axes[0].plot(*zip(*points, strict=True), label=run.name)
    axes[0].set(xlabel="step", ylabel="training loss")
    if axes[0].lines:
        axes[0].legend()
    if rows:
        row = rows[0]
        axes[1].hist(row["all"], bins=40)
        axes[1].axvspan(row["low"], row["high"], color="tab:orange", alpha=0.3)
        axes[1].axvline(0, color="black", linewidth=0.8)
        title = f"{row['name']}: difference of each validation sample,\nand the mean's interval"
        axes[1].set(title=title, ylabel="samples")
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=run_folder, help="folders of runs, or mirrors")
    parser.add_argument("--noise", type=Path, help="folder of `repeat`")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--picture", type=Path, default=Path("compare.png"))
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:cut])
    command = given[cut + 1 :]
    if len(options.runs) < 2:
        raise ConfigError("give two runs or more")
    runs = [RunFolder(path) for path in options.runs]
    noise: dict[str, list[float]] = {}
    if options.noise:
        try:
            noise = json.loads((options.noise / FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ConfigError(f"--noise {options.noise}: no folder of `repeat`") from None
    values = [values_of(run) | (losses_of(run, command) if command else {}) for run in runs]
    report: list[dict[str, Any]] = []
    for run, of_run in zip(runs[1:], values[1:], strict=True):
        rows = compared(values[0], of_run, noise)
        report.append(
            {
                "runs": [str(runs[0]), str(run)],
                "differs": differing(runs[0], run),
                "training": training(runs[0], run),
                "evaluations": [runs[0].results, run.results],
                "samples": rows,
            }
        )
    draw(runs, report[0]["samples"], options.picture)
    if options.json:
        for pair in report:
            for row in pair["samples"]:
                del row["all"]
        print(json.dumps({"version": 1, "pairs": report}, indent=1))
        return
    for pair in report:
        print(f"{pair['runs'][0]} and {pair['runs'][1]}")
        for line in pair["differs"] + pair["training"]:
            print(f"  {line}")
        one, other = pair["evaluations"]
        for name in [name for name in one if name in other]:
            seeds = noise.get(name, ())
            most = f"; seeds differ by {noise_of(seeds)[2]:.4f}" if len(seeds) > 1 else ""
            print(f"  last evaluation, {name}: {one[name]:.4f}, {other[name]:.4f}{most}")
        for row in pair["samples"]:
            print(*(f"  {line}" for line in lines_of(row)), sep="\n")
        if not pair["samples"]:
            print("  no values by sample: add -- and the command, to evaluate both")
    print(f"picture: {options.picture}")


if __name__ == "__main__":
    main()
