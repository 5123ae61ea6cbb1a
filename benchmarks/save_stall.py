"""How long training stands still for a checkpoint, with and without --async_save, beside the length of a step.

    python benchmarks/save_stall.py
    python benchmarks/save_stall.py --flags "--model_preset 1B --seq_length 2048" --rounds 5           # on a GPU

Runs in turn, one of each kind a round. The stall is how much longer the steps with a save took than the ones without,
evaluation and logging left out: what `Checkpointer.save` keeps the training loop waiting for, and what writing in the
background slows the following steps down by.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent))
from about import about, line

ROOT = Path(__file__).resolve().parents[1]
KINDS = {"synchronous": [], "in the background": ["--async_save"]}
PROBE = """
import runpy, sys, time
from shared import checkpoint, data
times, saves = [], []
advance, save = checkpoint.TrainState.advance, checkpoint.Checkpointer.save
def advanced(self, window):
    advance(self, window)
    times.append((self.step, time.perf_counter()))
def saved(self, state):
    start = time.perf_counter()
    save(self, state)
    saves.append((state.step, time.perf_counter() - start))
checkpoint.TrainState.advance, checkpoint.Checkpointer.save = advanced, saved
import atexit, json, os
atexit.register(lambda: json.dump({"times": times, "saves": saves}, open(os.environ["PROBE"], "w")))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def measure(extra: list[str], args: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step without a save, that a save call took, and that the steps with a save took longer."""
    with tempfile.TemporaryDirectory() as folder:
        probe, out = Path(folder) / "probe.py", Path(folder) / "probe.json"
        probe.write_text(PROBE)
        flags = ["--max_steps", str(args.steps), "--save_steps", str(args.every), "--eval_steps", "100000"]
        flags += ["--eval_samples", "1", "--report_to", "none", "--logging_steps", "100000", *shlex.split(args.flags)]
        argv = [sys.executable, str(probe), str(ROOT / "templates/pretrain.py"), *flags, "--output_dir", f"{folder}/run"]
        done = subprocess.run([*argv, *extra], env=os.environ | {"PROBE": str(out)}, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        seen = json.loads(out.read_text())
    at = dict(seen["times"])
    # From the end of one step to the end of the next: a save belongs to the one that follows it.
    lengths = {step: at[step] - at[step - 1] for step in at if step - 1 in at and step > 3}
    after = {step + 1 + i for step, _ in seen["saves"] for i in range(args.every // 2)}
    plain = statistics.median(v for step, v in lengths.items() if step not in after)
    saves = [step for step, _ in seen["saves"] if step + args.every // 2 in at and step > 3]
    lost = [sum(lengths[step + 1 + i] - plain for i in range(args.every // 2)) for step in saves]
    return {
        "step": plain,
        "call": statistics.median(seconds for step, seconds in seen["saves"] if step in saves),
        "lost": statistics.median(lost),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--every", type=int, default=8, help="steps between saves")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flags", default="--model_preset 30M --seq_length 64 --global_batch_size 2")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in tqdm(range(args.rounds), unit="round", desc="save stall"):
        for kind, extra in KINDS.items():
            rounds[kind].append(measure(extra, args))
    facts = about()
    args.output.write_text(json.dumps({"about": facts, "flags": args.flags, "rounds": rounds}, indent=1) + "\n")
    print(
        "| checkpoint | a step, ms | training waits for a save, ms | in steps | lost in all, in steps |\n"
        "|---|---|---|---|---|"
    )
    for kind, seen in rounds.items():
        step, call = (1000 * statistics.median(row[key] for row in seen) for key in ("step", "call"))
        lost = [row["lost"] / row["step"] for row in seen]
        waits = [row["call"] / row["step"] for row in seen]
        print(
            f"| {kind} | {step:.0f} | {call:.0f} | {statistics.median(waits):.2f} ({min(waits):.2f} to {max(waits):.2f}) "
            f"| {statistics.median(lost):.2f} ({min(lost):.2f} to {max(lost):.2f}) |"
        )
    print(f"\nMedians (and ranges) of {args.rounds} rounds; `{args.flags}`.\n{line(facts)}")


if __name__ == "__main__":
    main()
