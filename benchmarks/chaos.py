"""SIGKILL at random times, over and over, and the comparison at the end: does a killed run end as one left alone?

    python benchmarks/chaos.py --kills 60                    # over six templates, 1 and 2 processes
    python benchmarks/chaos.py --kills 30 --templates pretrain/periodic pretrain/asynchronous --processes 2 4
    python benchmarks/chaos.py --kills 30 --templates pretrain --wipe --output benchmarks/chaos_wiped.json

Each run is killed with all its processes at a moment drawn uniformly from its whole life (imports, preparation, steps,
evaluations, saves, resumes, the final writing) and started again with the same command, until it ends by itself. Then
the samples of each step, losses, learning rates, evaluations, weights and the optimizer's state must be those of a run
that was left alone, bit for bit, and before each start at least one checkpoint must be whole if ever one was.

With --wipe, each start is that of a new machine: an empty folder, and --mirror_to an S3 server (moto's, in a process of its
own). A third of the kills hits the run, a third an upload, a third the server, which comes back three seconds later while
the run trains on. After each kill, all that seems whole in the bucket is read and compared with its hashes.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from accelerate.utils.launch import get_free_port
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from about import about, line

from shared.commands.run import kill
from shared.commands.verify_resume import compare
from shared.extras.mirror.mirror import LEASE
from shared.extras.mirror.place import Place
from shared.run.checkpoint_files import CheckpointError, checkpoints, verify
from tests.object_store import ObjectStore

ROOT = Path(__file__).resolve().parents[1]
SHAPE = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,intermediate_size=128"
COMMON = "--max_steps 12 --save_steps 2 --eval_steps 5 --logging_steps 1 --report_to none --audit_data"
PRETRAIN = f"--seq_length 64 --global_batch_size 8 --eval_samples 8 --config_overrides {SHAPE},attention_dropout=0.1"
TEMPLATES = {  # a name may say after a slash what is special
    "pretrain": PRETRAIN,
    "lora_finetune": "--max_train_samples 200 --seq_length 64 --global_batch_size 8 --lora_dropout 0.1 "
    "--eval_samples 8 --show_answers 0",
    "full_finetune": "--max_train_samples 200 --seq_length 64 --global_batch_size 8 "
    "--weights_dtype bf16 --eval_samples 8 --show_answers 0",
    "dpo": "--max_train_samples 200 --seq_length 128 --global_batch_size 8 --eval_samples 8 --show_answers 0",
    "distill": "--max_train_samples 200 --seq_length 128 --global_batch_size 8 --on_policy 0.5 "
    "--max_new_tokens 16 --eval_samples 8 --show_answers 0",
    "grpo": "--updates_per_rollout 2 --global_batch_size 8 --group_size 4 --eval_answers 8 --show_answers 0",
    "text_classification": "--seq_length 64 --global_batch_size 8 --lora_r 4",
    "token_classification": "--seq_length 64 --global_batch_size 8 --lora_r 4",
    "image_classification": "--global_batch_size 32 --per_device_train_batch_size 8 --ema_decay 0.9 --mixup_alpha 0.2",
    "pretrain/periodic": PRETRAIN + " --sync_every 3",
    "pretrain/asynchronous": PRETRAIN + " --sync_every 4 --sync_delay 2 --sync_fragments 2 --sync_dtype bf16",
}


def command(template: str, folder: Path, processes: int) -> list[str]:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no"]
    if processes > 1:
        launch += ["--config_file", str(ROOT / "accelerate_configs/ddp.yaml"), "--num_processes", str(processes)]
        launch += ["--main_process_port", "0"]
    flags = [*COMMON.split(), *TEMPLATES[template].split(), "--output_dir", str(folder)]
    return [*launch, str(ROOT / "templates" / f"{template.split('/')[0]}.py"), *flags]


def whole(folder: Path) -> int:
    """Checkpoints of a run that verify."""
    count = 0
    for path in checkpoints(folder) if folder.exists() else []:
        try:
            verify(path)
        except CheckpointError:
            continue
        count += 1
    return count


def broken(store: ObjectStore, url: str, folder: Path) -> list[str]:
    """What seems whole in the bucket, and is not."""
    found = []
    place = Place(url)
    for path, name in place.whole().items():
        try:
            place.fetch(path, folder / name)
        except (CheckpointError, OSError) as error:
            found.append(str(error))
    return found


def torment(template: str, processes: int, kills: int, rng: random.Random, folder: Path, bar: tqdm, wipe: bool) -> dict:
    """Kill runs of one template `kills` times; what was seen."""
    log = (folder / "log").open("a")
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    quiet: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
    store = ObjectStore((get_free_port(), get_free_port()), folder / "store.log") if wipe else None
    if store:
        os.environ |= store.environment
        environment |= os.environ
    # Data are prepared by a run that is not timed, so that kills fall on all of a run's life and not on its first part.
    first = [*command(template, folder / "first", processes), "--max_steps", "1"]
    subprocess.run(first, check=True, env=environment, **quiet)
    start = time.monotonic()
    subprocess.run(command(template, folder / "straight", processes), check=True, env=environment, **quiet)
    life = time.monotonic() - start
    seen: dict[str, Any] = {"template": template, "processes": processes, "kills": 0, "runs compared": 0}
    if store:
        seen |= {"of runs": 0, "of uploads": 0, "of the server": 0}
    differing: set[str] = set()
    while seen["kills"] < kills:
        run_dir = folder / f"killed-{seen['runs compared']}"
        had = machine = 0
        while True:
            is_last = seen["kills"] >= kills
            words, env, kind = command(template, run_dir, processes), environment, "of runs"
            if store:
                run_dir = folder / f"killed-{seen['runs compared']}-{machine}"
                words = [*command(template, run_dir, processes), "--mirror_to", f"{store.url}-{seen['runs compared']}"]
                kind = rng.choice(("of runs", "of uploads", "of the server"))
                if kind == "of uploads" and not is_last:
                    env = environment | {"TEMPLATES_FAULT": f"mirror.part:kill@{rng.randint(1, 40)}"}
            # Once enough kills are done, the last run is left to end. A new machine first waits for the lease.
            wait = rng.uniform(0, life) + LEASE * bool(machine) if not is_last else None
            process = subprocess.Popen(words, env=env, **quiet)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=wait if kind != "of uploads" or is_last else None)
            if store and kind == "of the server" and process.returncode is None and not is_last:
                store.kill()
                time.sleep(3)
                store.start()
                seen["kills"] += 1
                seen[kind] += 1
                bar.update()
                process.wait()
            was_killed = process.returncode is None or (kind == "of uploads" and process.returncode and not is_last)
            if was_killed:
                kill(process.pid)
                process.wait()
                seen["kills"] += 1
                bar.update()
            if store:
                seen[kind] += was_killed
                found = broken(store, f"{store.url}-{seen['runs compared']}", folder / "read")
                differing |= {f"not whole: {error}" for error in found}
            elif was_killed:
                left = whole(run_dir)
                if had and not left:
                    differing.add("no whole checkpoint was left")
                had = max(had, left)
            if not was_killed:
                break
            if store:
                shutil.rmtree(run_dir, ignore_errors=True)
                machine += 1
        if process.returncode:
            differing.add(f"exit code {process.returncode}: see {folder}/log")
        else:
            differing |= {part for part, difference in compare(folder / "straight", run_dir).items() if difference}
        seen["runs compared"] += 1
    if store:
        store.close()
    return seen | {"differ": ", ".join(sorted(differing)) or "nothing"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="over all")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--templates", nargs="+", default=[name for name in TEMPLATES if "/" not in name], choices=TEMPLATES)
    parser.add_argument("--wipe", action="store_true", help="the disk, at each kill; an S3 server has a mirror")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    rng = random.Random(args.seed)
    cases = [(template, processes) for template in args.templates for processes in args.processes]
    rows = []
    with tqdm(total=args.kills, unit="kill", desc="chaos") as bar:
        for number, (template, processes) in enumerate(cases):
            kills = args.kills // len(cases) + (number < args.kills % len(cases))
            with tempfile.TemporaryDirectory() as folder:
                row = torment(template, processes, kills, rng, Path(folder), bar, args.wipe)
                if row["differ"] != "nothing":
                    shutil.copy(Path(folder, "log"), "chaos.log")
            rows.append(row)
            tqdm.write(f"{row}", file=sys.stderr)
    facts = about()
    args.output.write_text(json.dumps({"about": facts, "rows": rows}, indent=1) + "\n")
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    print(f"\n{line(facts)}")
    sys.exit(any(row["differ"] != "nothing" for row in rows))


if __name__ == "__main__":
    main()
