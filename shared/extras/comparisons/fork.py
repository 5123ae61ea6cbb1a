"""Begin a new run with the state of another one at a step, and other settings.

python -m shared fork runs/chat --step 1000 --output_dir runs/lower -- \
    accelerate launch train.py --learning_rate 1e-4

The new run has the weights, the optimizer, the averages and the order of the data that runs/chat
had after the step, its settings, and the flags that you give. Says which settings differ, and which
of these change what is learned. runs/chat is not touched. The new run's config.yaml and card name
the checkpoint that it began with. The same command continues it.
"""

import argparse
import contextlib
import io
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from shared.config import parse as configs
from shared.extras.comparisons._runs import PARENT, RunFolder
from shared.extras.proofs._launches import divided
from shared.process.errors import CleanExit, ConfigError
from shared.run.checkpoint_files import MANIFEST, run_folder
from shared.run.plots import draw_curves

NOT_TAKEN = {"output_dir", "resume_from_checkpoint", "allow_changed", "run_name", "mirror_to"}
DATA = ("train_file", "train_dir", "dataset_name", "validation_file", "validation_dir")


class Failed(CleanExit):
    """The new run ended with an error, which it has said."""

    exit_code = 1


def settings_of(run: RunFolder) -> dict[str, Any]:
    """Those that a fork takes over."""
    return {name: value for name, value in run.settings.items() if name not in NOT_TAKEN}


def differences(script: str, file: Path, flags: list[str], before: dict[str, Any]) -> Any:
    """(settings that differ from `before`, by name: old and new; those that change what is
    learned).

    Args:
        script: the template.
        file: YAML of the settings that the flags override.

    Raises:
        ConfigError: a flag that it does not have.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        kind = runpy.run_path(script, run_name="forked")["Config"]
    settings = configs.flatten(configs.parse(kind, ["--config", str(file), *flags]))
    changed = {
        name: (before.get(name), value)
        for name, value in json.loads(json.dumps(settings, default=str)).items()
        if name not in NOT_TAKEN and before.get(name) != value
    }
    return changed, [name for name in changed if name not in configs.free_fields(kind)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared fork",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=run_folder, help="folder of the run, or its mirror")
    parser.add_argument("--step", type=int, required=True, help="of one of its checkpoints")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the new run")
    parser.add_argument("command", nargs="+", help="-- and the command, with other settings")
    options = parser.parse_args()
    run = RunFolder(options.run)
    new: Path = options.output_dir
    checkpoint = run.checkpoint(options.step)
    words, flags = divided(options.command)
    if new.resolve() == run.path.resolve():
        raise ConfigError(f"--output_dir {new}: a fork needs a folder of its own")
    manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    new.mkdir(parents=True, exist_ok=True)
    file = new / "settings.yaml"
    file.write_text(yaml.safe_dump(settings_of(run)), encoding="utf-8")
    before = {**manifest["settings"], **settings_of(run)}
    changed, learned = differences(words[-1], file, flags, before)
    about = {"run": str(run.path.resolve()), "step": options.step, "changed": changed}
    (new / PARENT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    print(f"{new} begins with {checkpoint}")
    for name, (old, value) in changed.items():
        why = "changes what is learned" if name in learned else "does not change what is learned"
        print(f"  {name} was {old}, now {value} ({why})")
    if not changed:
        print("  with the same settings")
    allowed = [*learned, *["data"] * any(name in changed for name in DATA)]
    flags += ["--output_dir", str(new), "--resume_from_checkpoint", str(checkpoint)]
    flags += ["--allow_changed", *allowed] * bool(allowed)
    sys.stdout.flush()
    done = subprocess.run([*words, "--config", str(file), *flags])
    if done.returncode:
        raise Failed(f"{new}: the command ended with exit code {done.returncode}")
    child = RunFolder(new)
    chosen = child.settings.get("metric_for_best_model", "loss")
    draw_curves(new / "metrics.jsonl", chosen, child.before)


if __name__ == "__main__":
    main()
