"""Execute steps of a run again, and say whether they are the same.

python -m shared reproduce runs/chat --steps 200..220 -- accelerate launch train.py
python -m shared reproduce runs/chat/final -- accelerate launch train.py

Checks the receipt in final/: its files, the checkpoints that are left and the order in which they
were written, and the code, each by its digest. Of other data, a run is refused by itself. Then
continues from the last checkpoint before the first of these steps, with the run's settings, and
compares each line of the log: same bits, the same to rounding, or what differs first; then with
exit code 3. Bits are promised on the same GPU type, launch and versions (--deterministic); what
differs of these is said.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from shared.commands.verify_resume import MEASURED, Differs
from shared.extras.comparisons._runs import RunFolder
from shared.extras.proofs._launches import divided
from shared.extras.proofs._receipt import RECEIPT, problems
from shared.extras.proofs.replay import ROUNDING, replay, start_of
from shared.process.errors import ConfigError

APART = (*MEASURED, "step", "eval_")


def compared(theirs: list[dict[str, Any]], mine: list[dict[str, Any]]) -> tuple[int, float, str]:
    """(log lines in both, the largest relative difference, the first that is above rounding)."""
    rows = {row["step"]: row for row in mine}
    lines, largest, first = 0, 0.0, ""
    for row in theirs:
        other = rows.get(row["step"])
        if other is None:
            continue
        lines += 1
        for name, value in row.items():
            if name.startswith(APART) or not isinstance(value, int | float):
                continue
            again = other.get(name)
            if not isinstance(again, int | float):
                again = float("inf")
            relative = abs(again - value) / (abs(value) or 1.0)
            largest = max(largest, relative)
            if relative > ROUNDING and not first:
                first = f"{name} at step {row['step']}: {value:.8g}, now {again:.8g}"
    return lines, largest, first


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="folder of the run, or its final/ or merged/")
    parser.add_argument("--steps", help="the first and the last, as 200..220")
    parser.add_argument("--from_start", action="store_true", help="where no checkpoint is left")
    parser.add_argument("command", nargs="+", help="-- and the command that trained it")
    options = parser.parse_args()
    folder: Path = options.run
    final = folder if (folder / RECEIPT).exists() else folder / "final"
    words, _ = divided(options.command)
    if (final / RECEIPT).exists():
        if wrong := problems(final, Path(words[-1])):
            raise Differs(*wrong)
        print(f"{final / RECEIPT}: files, checkpoints and code are as they were")
    elif not options.steps:
        raise ConfigError(f"{final} has no {RECEIPT}")
    if not options.steps:
        return
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", options.steps)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not 1 <= first <= last:
        raise ConfigError("--steps: the first and the last, as 200..220")
    run = RunFolder(final.parent if folder == final else folder)
    start = start_of(run.path, first, from_start=options.from_start)
    print(f"training steps {first} to {last} again ...", file=sys.stderr, flush=True)
    mine = replay(run.path, last, [], options.command, start, look=False)["logged"]
    theirs = [row for row in run.rows if first <= row["step"] <= last and "loss" in row]
    lines, largest, differs = compared(theirs, [row for row in mine if "loss" in row])
    if not lines:
        raise ConfigError(f"{run.path}/metrics.jsonl has no line of the steps {options.steps}")
    if differs:
        raise Differs(f"not the same: {differs}")
    how = "the same to rounding" if largest else "the same, bit for bit"
    print(f"{lines} log lines of the steps {first} to {last}: {how}", end="")
    print(f" ({largest:.1e} at most)" if largest else "")


if __name__ == "__main__":
    main()
