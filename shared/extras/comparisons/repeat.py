"""Train with several seeds, to see what is noise.

python -m shared repeat --seeds 3 --output_dir runs/noise -- \
    accelerate launch train.py --train_file chats.jsonl

Runs your command once for each seed. Prints mean, standard deviation and 95 % interval of each
value of the last evaluation, and by how much two runs differ that differ only in their seed.
`compare --noise runs/noise` uses that. A run that was stopped continues: give the same command
again.
"""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from shared.commands.verify_resume import without_ours
from shared.extras.comparisons._runs import RunFolder
from shared.extras.comparisons._statistics import noise_of
from shared.extras.comparisons.fork import Failed
from shared.extras.proofs._launches import divided
from shared.process.errors import ConfigError

FILE = "noise.json"
OURS = {"output_dir", "seed", "run_name", "mirror_to"}


def summary(values: dict[str, list[float]]) -> list[str]:
    """A line for each value of an evaluation, by seed."""
    lines = [f"{'':<24} {'mean':>10} {'deviation':>10}   two seeds differ by at most"]
    for name, of_seeds in values.items():
        mean, spread, most = noise_of(of_seeds)
        relative = f" ({most / abs(mean):.1%})" if mean else ""
        lines.append(f"{name:<24} {mean:>10.4f} {spread:>10.4f}   {most:.4f}{relative}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared repeat",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many runs (3)")
    parser.add_argument("--first_seed", type=int, default=0, help="the others follow it (0)")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the runs")
    parser.add_argument("command", nargs="+", help="-- and the command that starts the training")
    options = parser.parse_args()
    if options.seeds < 2:
        raise ConfigError("--seeds: at least 2")
    folder: Path = options.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    words, flags = divided(options.command)
    flags = without_ours(flags, folder, OURS)
    results: list[dict[str, Any]] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        run_dir = folder / f"seed-{seed}"
        command = [*words, *flags, "--seed", str(seed), "--output_dir", str(run_dir)]
        if subprocess.run(command).returncode:
            raise Failed(f"{run_dir}: the command ended with an error")
        results.append(RunFolder(run_dir).results)
    names = [name for name in results[0] if all(name in of_run for of_run in results)]
    values = {name: [of_run[name] for of_run in results] for name in names}
    (folder / FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    print(*summary(values), sep="\n")
    print(f"{options.seeds} seeds; python -m shared compare A B --noise {folder} uses them")


if __name__ == "__main__":
    main()
