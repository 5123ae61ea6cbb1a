"""Check that your training resumes exactly, by comparing a killed run with an uninterrupted one.

python -m shared verify-resume -- accelerate launch train.py --train_file chats.jsonl

Runs your command for a few steps. Then runs it in another folder, kills all its processes (SIGKILL)
half-way, and runs it again. Both runs must have the same samples in each step, losses, learning
rates, evaluations, weights and optimizer state, bit for bit: they get --deterministic, without
which GPUs add in a varying order. Prints which of them differ, and ends with exit code 3 if one
does.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from shared.commands.run import kill
from shared.data import audit
from shared.process.errors import CleanExit, ConfigError
from shared.process.files import read_json_lines
from shared.run.checkpoint_files import MANIFEST, checkpoints
from shared.run.tensors import read_tensors

# begin names of what is no learning
MEASURED = ("trained_", "processed_", "data_wait_share", "peak_memory_gb", "mfu", "rollout_seconds")
# Flags that this command sets itself, and the budgets that its --max_steps replaces.
OURS = {
    "output_dir",
    "max_steps",
    "num_train_epochs",
    "max_tokens",
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "report_to",
    "audit_data",
    "resume_from_checkpoint",
    "mirror_to",
    "deterministic",
}
WHY = (
    "a step may depend only on its number, the seed and what the checkpoint holds: the model, the "
    "optimizers, run.state.notes and setup.keep"
)


class Differs(CleanExit):
    """A resumed run is not the uninterrupted one."""

    exit_code = 3


def without_ours(command: Sequence[str], folder: Path, ours: Collection[str] = OURS) -> list[str]:
    """The user's command without the flags in `ours`, also without those in the YAML file of
    --config.
    """
    kept: list[str] = []
    dropping = False
    for token in command:
        name, _, value = token.partition("=")
        if token.startswith("--"):
            dropping = name[2:].replace("-", "_").removeprefix("no_") in ours
        if not dropping:
            kept += [name, value] if name == "--config" and value else [token]
    for i, token in enumerate(kept[:-1]):
        # A file that cannot be read is left to the command, which says so.
        with contextlib.suppress(OSError, ValueError, AttributeError, yaml.YAMLError):
            if token == "--config":
                # as texts, which the command reads: to YAML, 010 is 8
                root: Any = yaml.compose(Path(kept[i + 1]).expanduser().read_text(encoding="utf-8"))
                root.value = [v for v in root.value if v[0].value.replace("-", "_") not in ours]
                kept[i + 1] = str(folder / "config.yaml")
                Path(kept[i + 1]).write_text(yaml.serialize(root), encoding="utf-8")
    return kept


def train(
    command: Sequence[str],
    run_dir: Path,
    *,
    steps: int,
    kill_after: int | None = None,
    deterministic: bool = True,
    show_progress: bool = False,
) -> None:
    """Run the command for `run_dir`; kill all its processes once it has logged step `kill_after`
    and saved a checkpoint.

    Raises:
        ConfigError: it fails by itself, or ends before it could be killed.
    """
    flags = ["--output_dir", str(run_dir), *["--deterministic"] * deterministic]
    flags += (
        f"--max_steps {steps} --save_steps {max(1, steps // 3)} --save_total_limit 9 "
        "--logging_steps 1 --report_to none --audit_data"
    ).split()
    log = run_dir.with_suffix(".log")
    # A `shared run` around this must not see the kill.
    env = {name: value for name, value in os.environ.items() if name != "TEMPLATES_RUN"}
    with log.open("a") as output, log.open(errors="replace") as lines:
        lines.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            [*command, *flags], stdout=output, stderr=subprocess.STDOUT, env=env
        )
        while process.poll() is None:
            for line in lines:  # its progress
                if show_progress and line.startswith(
                    ("loading ", "tokenising ", "  run on", "step ")
                ):
                    print(f"  {line.rstrip()}", file=sys.stderr, flush=True)
            if kill_after is not None and logged(run_dir) >= kill_after and checkpoints(run_dir):
                kill(process.pid)
                process.wait()
                return
            time.sleep(0.02)
    if process.returncode or kill_after is not None:
        text = log.read_text(errors="replace")
        what = (
            f"failed with exit code {process.returncode}"
            if process.returncode
            else "ended before it could be killed"
        )
        cause = re.search(r"^error: (.*)", text.replace("\r", "\n"), re.M)
        if cause is None:  # probably a traceback
            print(text[-4000:], file=sys.stderr)
        raise ConfigError(
            f"the command {what}" + (f": {cause[1]}" if cause else "; its output ends as above")
        )


def logged(run_dir: Path) -> int:
    """The last optimizer step in metrics.jsonl; 0 before there is one."""
    with contextlib.suppress(OSError):
        return max(
            (row["step"] for row in read_json_lines(run_dir / "metrics.jsonl") if "loss" in row),
            default=0,
        )
    return 0


def compare(one: Path, other: Path) -> dict[str, str]:
    """What differs between two runs, by part: where it differs first, or an empty string if it is
    equal bit for bit.
    """
    found = {
        "samples of each step": _first(audit.samples_of_steps(one), audit.samples_of_steps(other))
    }
    apart = (*MEASURED, "step", "learning_rate", "eval_")
    wanted: dict[str, Callable[[str], bool]] = {
        "losses and own values": lambda key: not key.startswith(apart),
        "learning rates": lambda key: key == "learning_rate",
        "evaluations": lambda key: key.startswith("eval_"),
    }
    for part, of_it in wanted.items():
        found[part] = _first(_rows(one, of_it), _rows(other, of_it))
    last = [checkpoints(run)[-1] for run in (one, other)]
    states = [json.loads((folder / MANIFEST).read_text("utf-8"))["state"] for folder in last]
    found["notes"] = _first({0: states[0]["notes"]}, {0: states[1]["notes"]})
    mine, theirs = map(read_tensors, last)
    parts = {
        "weights": ("model.",),
        "optimizer's state": ("optimizer.", "replica", "outer.", "flight."),
        "averages and others": ("ema.", "extra.", "rank"),
    }
    for part, keys in parts.items():
        names = {name for name in mine | theirs if name.startswith(keys)}
        unlike = sorted(
            n
            for n in names
            if n not in mine or n not in theirs or not torch.equal(mine[n], theirs[n])
        )
        found[part] = f"{len(unlike)} of {len(names)} tensors, first {unlike[0]}" if unlike else ""
    return found


def _rows(run_dir: Path, wanted: Callable[[str], bool]) -> dict[int, dict[str, Any]]:
    steps: dict[int, dict[str, Any]] = {}
    for row in read_json_lines(run_dir / "metrics.jsonl"):
        steps.setdefault(row["step"], {}).update({k: v for k, v in row.items() if wanted(k)})
    return {step: values for step, values in steps.items() if values}


def _first(one: dict[int, Any], other: dict[int, Any]) -> str:
    for step in sorted(one.keys() | other.keys()):
        mine = one.get(step)
        theirs = other.get(step)
        if mine == theirs:
            continue
        if isinstance(mine, dict) and isinstance(theirs, dict):
            name = next(name for name in mine | theirs if mine.get(name) != theirs.get(name))
            mine = f"{name} {mine.get(name)}"
            theirs = theirs.get(name)
        return f"first at step {step}: {str(mine)[:60]}, resumed {str(theirs)[:60]}"
    return "" if one else "nothing was recorded"


def verify(
    command: Sequence[str],
    folder: Path,
    steps: int,
    *,
    verbose: bool = False,
    deterministic: bool = True,
) -> dict[str, str]:
    """Train without interruption, train with a kill and resume, and compare both in the empty
    `folder`: see `compare`.

    Raises:
        ConfigError: the command fails by itself.
        Differs: the second run starts from scratch instead of resuming.
    """
    straight = folder / "straight"
    killed = folder / "killed"
    half = max(1, steps * 7 // 12)
    command = without_ours(command, folder)
    for text, run_dir, kill_after in (
        (f"training {steps} steps", straight, None),
        (f"training again, to be killed after step {half}", killed, half),
        ("resuming", killed, None),
    ):
        if verbose:
            print(f"{text} ...", file=sys.stderr, flush=True)
        train(
            command,
            run_dir,
            steps=steps,
            kill_after=kill_after,
            deterministic=deterministic,
            show_progress=verbose,
        )
    if "resumed from" not in killed.with_suffix(".log").read_text(errors="replace"):
        raise Differs(
            "the run did not resume: it started from scratch, so equal results prove nothing"
        )
    return compare(straight, killed)


@contextlib.contextmanager
def folder_for(keep: Path | None) -> Iterator[Path]:
    """An empty folder, a temporary one or the one to `keep`. ConfigError if that has files."""
    with tempfile.TemporaryDirectory(prefix="verify-", ignore_cleanup_errors=True) as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"--keep {keep} is not empty")
        yield folder


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared verify-resume",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--steps", type=int, default=6, help="optimizer steps to train, at least 3 (default: 6)"
    )
    parser.add_argument("--keep", type=Path, help="keep both runs in this empty folder")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="-- and the whole command that starts the training",
    )
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.steps < 3:
        raise ConfigError(f"--steps must be at least 3, not {options.steps}")
    if not command:
        raise ConfigError("give `--` and the command that starts the training")
    with folder_for(options.keep) as folder:
        found = verify(command, folder, options.steps, verbose=True)
    for part, difference in found.items():
        print(f"  {part:<22} {'DIFFERS: ' + difference if difference else 'same, bit for bit'}")
    if any(found.values()):
        raise Differs(f"the resumed run differs from the uninterrupted one: {WHY}")
    print(
        "a killed run continues as if it had not been killed (on GPUs without "
        "--deterministic: to rounding)"
    )
