"""What a mirror costs the training: seconds of a step beside those of a run without one.

    python benchmarks/mirror_cost.py                         # writes benchmarks/mirror_cost.json

Two runs compute at the same time, each on a core of its own, and change cores after each window of time: whatever else the
machine does slows both. A window's figure is the median of the steps in it. The store is as bad as it gets: an S3 server
(moto's, in a process of its own) that fails every fifth request, answers after two seconds and takes 1 MB a second, while
the run saves every 20 steps. Steps are short, so that what Python does in the mirror's threads counts as much as it can.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from accelerate.utils.launch import get_free_port

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from about import about, line

from shared.commands.run import kill
from shared.process.files import read_json_lines
from tests.object_store import ObjectStore

ROOT = Path(__file__).resolve().parents[1]
SHAPE = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,intermediate_size=128"
FLAGS = f"--config_overrides {SHAPE} --seq_length 64 --global_batch_size 4 --max_steps 1000000 --save_steps 20"
FLAGS += " --eval_steps 1000000 --eval_samples 2 --logging_steps 1 --report_to none"
TOKENS = 4 * 64  # of a step


def start(folder: Path, store: ObjectStore | None) -> subprocess.Popen:
    words = ["-m", "accelerate.commands.launch", "--mixed_precision", "no", str(ROOT / "templates/pretrain.py")]
    words += [*FLAGS.split(), "--output_dir", str(folder)]
    env = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if store:
        words += ["--mirror_to", f"{store.url}/{folder.name}"]
        env |= store.environment
    log = folder.with_suffix(".log").open("w")
    return subprocess.Popen([sys.executable, *words], env=env, stdout=log, stderr=log)


def move(launcher: subprocess.Popen, core: int) -> None:
    """Let a run compute on this core alone."""
    for pid in subprocess.check_output(["pgrep", "-P", str(launcher.pid)], text=True).split():
        for thread in Path("/proc", pid, "task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                os.sched_setaffinity(int(thread.name), [core])


def steps_of(folder: Path) -> list[float]:
    """Seconds of each step so far."""
    path = folder / "metrics.jsonl"
    rows = [row for row in read_json_lines(path) if "loss" in row] if path.exists() else []
    return [TOKENS / row["trained_tokens_per_second"] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=20, help="of a window")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    with tempfile.TemporaryDirectory() as temporary:
        store = ObjectStore((get_free_port(), get_free_port()), Path(temporary, "store.log"))
        store.kill()
        store.start(fail=0.2, latency=2, rate=1e6)
        folders = [Path(temporary, name) for name in ("alone", "mirrored")]
        runs = [start(folders[0], None), start(folders[1], store)]
        while not all(len(steps_of(folder)) > 20 for folder in folders):
            time.sleep(1)
        windows = []
        for number in range(args.windows):
            for run, core in zip(runs, cores if number % 2 else cores[::-1], strict=True):
                move(run, core)
            before = [len(steps_of(folder)) for folder in folders]
            time.sleep(args.seconds)
            found = [steps_of(folder)[count:] for folder, count in zip(folders, before, strict=True)]
            names = ("alone", "mirrored")
            windows.append({n: {"steps": len(s), "median": statistics.median(s)} for n, s in zip(names, found, strict=True)})
            print(windows[-1], file=sys.stderr, flush=True)
        checkpoints = sum("MANIFEST" in path for path in store.requests("PUT"))
        for run in runs:
            kill(run.pid)
        store.close()
    ratios = sorted(window["mirrored"]["median"] / window["alone"]["median"] for window in windows)
    figures = {"median": statistics.median(ratios), "least": ratios[0], "most": ratios[-1], "sent": checkpoints}
    facts = about()
    args.output.write_text(json.dumps({"about": facts, "mirrored / alone": figures, "windows": windows}, indent=1) + "\n")
    print(figures, line(facts), sep="\n")


if __name__ == "__main__":
    main()
