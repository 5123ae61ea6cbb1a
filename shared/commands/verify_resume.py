"""Kill and resume a run of yours, and compare it with one that was not killed.

python -m shared verify-resume -- accelerate launch train.py --train_file chats.jsonl

Trains a few steps with your command as it is, then again in another folder where everything is killed (SIGKILL) half-way
and the same command is given once more. Samples of each step, losses, learning rates, evaluations, weights and the
optimizer's state must be the same, bit for bit. Says which part differs, and ends with exit code 3 if one does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from shared.commands.run import kill
from shared.data import audit
from shared.process.errors import CleanExit, ConfigError
from shared.process.files import read_json_lines
from shared.run.checkpoint_files import checkpoints, read_tensors

# Given anew for both runs, so taken out of the user's command.
OURS = {"output_dir", "max_steps", "num_train_epochs", "max_tokens", "save_steps", "save_total_limit", "logging_steps"}
OURS |= {"report_to", "audit_data", "resume_from_checkpoint"}


WHY = (
    "what a step depends on has to be a function of its number and the seed (launch.seed_step), or lie in the checkpoint: "
    "in the model, in an optimizer, or in state.notes"
)


class Differs(CleanExit):
    """A resumed run is not what it would have been."""

    exit_code = 3


def without(command: Sequence[str], flags: set[str]) -> list[str]:
    """The command with these flags and their values left out."""
    kept: list[str] = []
    dropping = False
    for token in command:
        if token.startswith("--"):
            name = token.lstrip("-").split("=", 1)[0].replace("-", "_")
            dropping = name in flags or name.removeprefix("no_") in flags
        if not dropping:
            kept.append(token)
    return kept


def prepared(command: Sequence[str], folder: Path) -> list[str]:
    """The user's command without what this one decides, in the YAML of its --config neither."""
    script = next((i for i, token in enumerate(command) if token.endswith(".py")), None)
    if script is None:
        raise ConfigError(f"no script (*.py) in the command: {' '.join(command)}")
    kept = [*command[: script + 1], *without(command[script + 1 :], OURS)]
    for i, token in enumerate(kept[script:], script):
        path = kept[i + 1] if token == "--config" and i + 1 < len(kept) else token.removeprefix("--config=")
        if token == "--config" or token.startswith("--config="):
            try:
                content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
            except (OSError, ValueError, yaml.YAMLError):
                break  # which the command itself will say
            if not isinstance(content, dict):
                break
            copy = folder / "config.yaml"
            copy.write_text(yaml.safe_dump({k: v for k, v in content.items() if str(k).replace("-", "_") not in OURS}))
            kept[i : i + (2 if token == "--config" else 1)] = ["--config", str(copy)]
            break
    return kept


def train(command: Sequence[str], run_dir: Path, *, steps: int, kill_after: int | None = None) -> None:
    """Give the command for `run_dir`; kill all its processes once it has logged step `kill_after`.

    Raises:
        ConfigError: it fails by itself, or ends before it could be killed.
    """
    flags = ["--output_dir", run_dir, "--max_steps", steps, "--save_steps", max(1, steps // 3), "--save_total_limit", 9]
    flags += ["--logging_steps", 1, "--report_to", "none", "--audit_data"]
    log = run_dir.with_suffix(".log")
    env = {name: value for name, value in os.environ.items() if name != "TEMPLATES_RUN"}  # which is for our own
    with log.open("a") as output:
        process = subprocess.Popen([*command, *map(str, flags)], stdout=output, stderr=subprocess.STDOUT, env=env)
        while process.poll() is None:
            if kill_after is not None and logged(run_dir) >= kill_after:
                kill(process.pid)
                process.wait()
                return
            time.sleep(0.02)
    if process.returncode or kill_after is not None:
        said = log.read_text(errors="replace")
        what = f"failed with exit code {process.returncode}" if process.returncode else "ended before it could be killed"
        cause = re.search(r"^error: (.*)", said.replace("\r", "\n"), re.M)
        if cause is None:  # unforeseen, so there is a traceback
            print(said[-4000:], file=sys.stderr)
        raise ConfigError(f"the command {what}" + (f": {cause[1]}" if cause else "; its output ends as above"))


def logged(run_dir: Path) -> int:
    """The last optimizer step in metrics.jsonl; 0 before there is one."""
    with contextlib.suppress(OSError):
        return max((row["step"] for row in read_json_lines(run_dir / "metrics.jsonl") if "loss" in row), default=0)
    return 0


def compare(one: Path, other: Path) -> dict[str, str]:
    """By part of two runs: an empty string if it is the same, bit for bit, else where it differs first."""
    found = {"samples of each step": _first(audit.samples_of_steps(one), audit.samples_of_steps(other))}
    parts = {"losses": ("loss", "grad_norm"), "learning rates": ("learning_rate",), "evaluations": ("eval_",)}
    for part, keys in parts.items():
        found[part] = _first(_rows(one, keys), _rows(other, keys))
    mine, theirs = (read_tensors(checkpoints(run)[-1]) for run in (one, other))
    parts_of = {"weights": ("model.",), "optimizer's state": ("optimizer.",), "copies of weights": ("ema.", "best.")}
    for part, prefix in parts_of.items():
        names = {name for name in mine | theirs if name.startswith(prefix)}
        unlike = sorted(n for n in names if n not in mine or n not in theirs or not torch.equal(mine[n], theirs[n]))
        found[part] = f"{len(unlike)} of {len(names)} tensors, first {unlike[0]}" if unlike else ""
    return found


def _rows(run_dir: Path, keys: tuple[str, ...]) -> dict[int, dict[str, Any]]:
    steps: dict[int, dict[str, Any]] = {}
    for row in read_json_lines(run_dir / "metrics.jsonl"):
        steps.setdefault(row["step"], {}).update({k: v for k, v in row.items() if k.startswith(keys)})
    return {step: values for step, values in steps.items() if values}


def _first(one: dict[int, Any], other: dict[int, Any]) -> str:
    for step in sorted(one.keys() | other.keys()):
        if one.get(step) != other.get(step):
            return f"from step {step} on: {str(one.get(step))[:60]}, resumed {str(other.get(step))[:60]}"
    return "" if one else "nothing was recorded"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared verify-resume", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps to train (default: 12)")
    parser.add_argument("--keep", type=Path, help="folder for both runs, kept (default: a temporary one)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the whole command that starts the training")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command or options.steps < 3:
        raise ConfigError("give `--` and the command that starts the training; --steps is at least 3")
    folder = options.keep or Path(tempfile.mkdtemp(prefix="verify-resume-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"--keep {folder}: is not empty")
    try:
        found = verify(prepared(command, folder), folder, options.steps, tell=True)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    for part, difference in found.items():
        print(f"  {part:<22} {'differ ' + difference if difference else 'same, bit for bit'}")
    if any(found.values()):
        raise Differs(f"the resumed run is not the run that was not killed: {WHY}")
    print("a killed run continues as if it had not been")


def verify(command: Sequence[str], folder: Path, steps: int, *, tell: bool = False) -> dict[str, str]:
    """Train straight, train killed and resumed, compare: see `compare`; `tell` prints what it is at.

    Raises:
        ConfigError: the command fails by itself.
        Differs: it begins anew in place of resuming.
    """
    straight, killed = folder / "straight", folder / "killed"
    half = max(1, steps * 7 // 12)
    for text, run_dir, kill_after in (
        (f"training {steps} steps", straight, None),
        (f"training again, to be killed after step {half}", killed, half),
        ("resuming", killed, None),
    ):
        if tell:
            print(f"{text} ...", file=sys.stderr, flush=True)
        train(command, run_dir, steps=steps, kill_after=kill_after)
        if kill_after is not None and not checkpoints(run_dir):
            raise ConfigError("no checkpoint was written before the kill: give more --steps")
    if "resumed from" not in killed.with_suffix(".log").read_text(errors="replace"):
        raise Differs("the run did not resume: it began anew, which only looks the same")
    return compare(straight, killed)
