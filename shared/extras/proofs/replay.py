"""Execute a step of a run again, and show each of its samples: what did it learn from?

python -m shared replay runs/chat --step 1204 -- accelerate launch train.py
python -m shared replay runs/chat --step 1204 --without 17,23 -- accelerate launch train.py

Continues from the last checkpoint before the step, with the run's settings and your template's own
code, on any launch. Says whether the log has the same loss and gradient norm. Of each sample, it
gives its place in the data, its text with the tokens that count between brackets, or its picture,
its loss, and the norm of what its gradient adds; and the layers with the largest gradients, beside
those of the step before. --without says what the step would have been without these samples.

The five samples with the largest loss per target are printed. All are in replay-001204/, as JSON
and as a page. The run itself is not changed, and nothing is sent to a tracker. To leave such a step
out and train on: --skip_steps.
"""

import argparse
import html
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from shared.commands.verify_resume import without_ours
from shared.extras.proofs import _replayed
from shared.extras.proofs._launches import divided
from shared.process.errors import ConfigError
from shared.process.files import read_json_lines
from shared.process.printing import collapsed, excerpt, indented
from shared.run.checkpoint_files import checkpoints, run_folder

WORST = 5
TABLE = 5  # steps
ROUNDING = 1e-5  # relative: another launch adds in another order
OURS = {"output_dir", "report_to", "resume_from_checkpoint", "mirror_to", "allow_changed"}
REPLACED: dict[str, Any] = {
    "report_to": "none",
    "show_answers": 0,
    "audit_data": False,
    "profile": False,
    "find_batch_size": False,
    "dress_rehearsal": False,
    "resume_from_checkpoint": None,
    "mirror_to": None,
}
STYLE = (
    "body{font:14px/1.5 sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
    "table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:right}"
    "pre{white-space:pre-wrap;background:#f4f4f4;padding:.6em}"
)


def start_of(run: Path, step: int, *, from_start: bool) -> Path | None:
    """The checkpoint to continue from: before `step`, and if there is one, with a step between.

    Raises:
        ConfigError: there is none, and `from_start` is not wanted.
    """
    there = {int(path.name.rpartition("-")[2]): path for path in checkpoints(run)}
    before = [number for number in there if number < step]
    if before:
        # the step before shows what gradients usually are
        return there[max([number for number in before if number < step - 1] or before)]
    if step > 1 and not from_start:
        kept = ", ".join(map(str, there)) or "none"
        raise ConfigError(
            f"{run} has no checkpoint before step {step} (there is {kept}): --from_start trains "
            "the steps before it again"
        )
    return None


def command_of(command: Sequence[str], run: Path, folder: Path, run_dir: Path) -> list[str]:
    """The user's command with the probe before its script, and the run's settings.

    Raises:
        ConfigError: it names no script, or the run has no config.yaml.
    """
    words, flags = divided(without_ours(command, folder, OURS))
    try:
        settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(f"{run} has no config.yaml: is it the folder of a run?") from None
    settings |= {name: value for name, value in REPLACED.items() if name in settings}
    settings["output_dir"] = str(run_dir)
    file = folder / "settings.yaml"
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return [*words[:-1], _replayed.__file__, words[-1], "--config", str(file), *flags]


def replay(
    run: Path,
    step: int,
    left_out: Sequence[int],
    command: Sequence[str],
    start: Path | None,
    *,
    look: bool = True,
) -> dict[str, Any]:
    """What `_replayed` has seen of the step; its own log lines as `logged`.

    Args:
        look: at each sample.

    Raises:
        ConfigError: the command fails by itself.
    """
    with tempfile.TemporaryDirectory(prefix="replay-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        run_dir = folder / run.name
        run_dir.mkdir()
        if start:
            (run_dir / start.name).symlink_to(start.resolve())
        result = folder / "result.json"
        request = {"step": step, "without": [*left_out], "result": str(result), "look": look}
        environment = os.environ | {"REPLAY": json.dumps(request), "WANDB_MODE": "disabled"}
        done = subprocess.run(
            command_of(command, run, folder, run_dir),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
        if done.returncode or not result.exists():
            cause = re.search(r"^error: (.*)", done.stdout, re.M)
            if cause is None:
                print(done.stdout[-4000:], file=sys.stderr)
            what = cause[1] if cause else "its output ends as above"
            raise ConfigError(f"step {step} was not reached: {what}")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found | {"logged": [*read_json_lines(run_dir / "metrics.jsonl")]}


def compared(run: Path, step: int, logged: list[dict[str, Any]]) -> list[str]:
    """Whether the run's own log has what was just logged, by name."""
    rows = {row["step"]: row for row in read_json_lines(run / "metrics.jsonl") if "loss" in row}
    mine = next((row for row in logged if row["step"] >= step and "loss" in row), None)
    theirs = rows.get(mine["step"]) if mine else None
    if not mine or not theirs:
        return ["metrics.jsonl has no line for it"]
    lines = []
    first = max([number for number in rows if number < mine["step"]], default=0) + 1
    steps = f"step {mine['step']}" if first == mine["step"] else f"steps {first} to {mine['step']}"
    for name in ("loss", "grad_norm"):
        one, other = theirs[name], mine[name]
        how = "the same, bit for bit"
        if one != other:
            is_near = one and other and abs(one - other) <= ROUNDING * abs(one)
            how = "the same to rounding" if is_near else f"DIFFERS: {other}"
        lines.append(f"{name} of {steps} in metrics.jsonl: {one}, {how}")
    return lines


def per_target(sample: dict[str, Any]) -> float:
    return float(sample["loss"]) / max(1, sample["targets"])


def lines_of(sample: dict[str, Any]) -> list[str]:
    """A sample, for the console."""
    figures = [f"loss {per_target(sample):.4g}"]
    figures += [f"over {sample['targets']} targets"] * (sample["targets"] > 1)
    if "gradient" in sample:
        figures.append(f"gradient {sample['gradient']:.3g}")
    if "label" in sample:
        figures.append(f"label {sample['label']}")
    lines = [f"sample {sample['name']}: {', '.join(figures)}"]
    lines += [f"  {sample['where']}"] * ("where" in sample)
    for text in sample.get("texts", []):
        lines += [f"    {line}" for line in excerpt(collapsed(text).splitlines(), 8)]
    return lines


def table(steps: list[dict[str, Any]]) -> list[str]:
    return [
        f"step {row['step']:>7}  loss {row['loss']:<10.5g} grad_norm {row['grad_norm']:<10.4g} "
        f"learning_rate {row['learning_rate']:.3g}"
        for row in steps
    ]


def layers_of(layers: list[list[Any]]) -> list[str]:
    return [
        f"{now:<10.4g} {'' if before is None else f'{before:.4g}':<10} {name}"
        for name, now, before in layers
    ]


def page(title: str, found: dict[str, Any], summary: list[str]) -> str:
    """All samples, the worst first, as HTML."""
    body = [f"<h1>{html.escape(title)}</h1><pre>{html.escape(chr(10).join(summary))}</pre>"]
    for sample in found["samples"]:
        first, *more = lines_of(sample | {"texts": []})
        body.append(f"<h3>{html.escape(first)}</h3><p>{html.escape(' '.join(more))}</p>")
        body += [f"<pre>{html.escape(text)}</pre>" for text in sample.get("texts", [])]
        if "image" in sample:
            body.append(f'<img alt="" src="data:image/png;base64,{sample["image"]}">')
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f"<!doctype html>{head}{''.join(body)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=run_folder, help="folder of the run, or its mirror")
    parser.add_argument("--step", type=int, required=True, help="optimizer step, from 1")
    parser.add_argument("--without", default="", help="samples to leave out, as 17,23")
    parser.add_argument("--from_start", action="store_true", help="where no checkpoint is left")
    parser.add_argument("--into", type=Path, help="folder for the page (replay-STEP)")
    parser.add_argument("command", nargs="+", help="-- and the whole command")
    options = parser.parse_args()
    run: Path = options.run
    if not run.is_dir() or options.step < 1:
        raise ConfigError(f"{run}: no such folder" if options.step >= 1 else "--step: from 1")
    try:
        left_out = [int(text) for text in options.without.split(",") if text]
    except ValueError:
        raise ConfigError("--without: numbers of samples, such as 17,23") from None
    start = start_of(run, options.step, from_start=options.from_start)
    into = options.into or Path(f"replay-{options.step:06d}")
    if into.exists():
        raise ConfigError(f"{into} exists: choose another folder with --into")
    came_from = f"from {start.name}" if start else "from the beginning"
    print(f"replaying step {options.step} {came_from} ...", file=sys.stderr, flush=True)
    found = replay(run, options.step, [], options.command, start)
    found["samples"].sort(key=per_target, reverse=True)
    last = [row for row in found["steps"] if row["step"] <= options.step][-TABLE:]
    summary = [*compared(run, options.step, found["logged"]), "", *table(last)]
    if left_out:
        names = ", ".join(map(str, left_out))
        there = {sample["sample"] for sample in found["samples"]}
        if missing := set(left_out) - there:
            raise ConfigError(f"--without: {min(missing)} is not among the step's samples")
        print(f"replaying it without {names} ...", file=sys.stderr, flush=True)
        other = replay(run, options.step, left_out, options.command, start)
        (row,) = [row for row in other["steps"] if row["step"] == options.step]
        summary += [f"without {names}:", *table([row])]
    summary += ["", "gradient   before     of", *layers_of(found["layers"])]
    title = f"step {options.step} of {run.name}"
    print(*summary, "", sep="\n")
    if found["why_not"]:
        print(f"samples are not shown: {found['why_not']}")
    elif found["samples"]:
        count = min(WORST, len(found["samples"]))
        print(f"the {count} with the largest loss of {len(found['samples'])} samples:")
    for sample in found["samples"][:WORST]:
        print(*indented("\n".join(lines_of(sample))), sep="\n")
    into.mkdir(parents=True)
    (into / "replay.json").write_text(json.dumps(found), encoding="utf-8")
    (into / "index.html").write_text(page(title, found, summary), encoding="utf-8")
    print(f"all samples: {into}/index.html and replay.json")


if __name__ == "__main__":
    main()
