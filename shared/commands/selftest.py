"""Prove that training works here: every template trains, is killed and resumed, on 1 and 2 CPU processes.

python -m shared selftest
docker run IMAGE selftest

Small offline runs. A row says whether the killed and resumed run is the one that was left alone, bit for bit: samples,
losses, learning rates, evaluations, weights and the optimizer's state.
"""

from __future__ import annotations

import argparse
import os
import platform
import runpy
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from tqdm import tqdm

from shared.commands.verify_resume import WHY, verify
from shared.process.errors import CleanExit, ConfigError

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
_TINY = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=4,intermediate_size=128"
# Of each template: flags for some seconds on a CPU, without network.
FLAGS = {
    "pretrain": f"--eval_samples 4 --seq_length 64 --config_overrides {_TINY}",
    "pretrain_pipeline": f"--eval_samples 4 --seq_length 64 --config_overrides {_TINY}",
    "lora_finetune": "--eval_samples 4 --num_generations 0 --seq_length 128",
    "image_classification": "--dataloader_num_workers 0 --global_batch_size 16 --per_device_train_batch_size 4",
}
ALONE = {"pretrain_pipeline": (2,)}  # numbers of processes, where not 1 and 2


class Broken(CleanExit):
    """A script does not train here, or not as it should."""

    exit_code = 1


def launch_line(processes: int) -> list[str]:
    """`accelerate launch` for so many processes, in fp32."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no"]
    if processes == 1:
        return [*launch, "--config_file", str(ROOT / "accelerate_configs" / "cpu.yaml")]
    config = ROOT / "accelerate_configs" / "ddp.yaml"
    return [*launch, "--config_file", str(config), "--num_processes", str(processes), "--main_process_port", "0"]


def prove(jobs: Mapping[str, tuple[str, Sequence[int]]]) -> None:
    """Train, kill, resume and compare each script, and print a table.

    Args:
        jobs: by script, from the folder of this package: its flags, and on how many processes to launch it.

    Raises:
        Broken: a run fails or differs; the table says which.
    """
    os.environ["ACCELERATE_USE_CPU"] = "true"
    rows = [(script, flags, count) for script, (flags, counts) in jobs.items() for count in counts]
    table, reasons = [], []
    bar = tqdm(rows, desc="self-test", unit="job", disable=not sys.stderr.isatty())
    for script, flags, count in bar:
        bar.set_postfix_str(f"{Path(script).name} x {count}")
        folder, began = Path(tempfile.mkdtemp(prefix="selftest-")), time.monotonic()
        try:
            command = [*launch_line(count), str(ROOT / script), *shlex.split(flags)]
            unlike = [part for part, text in verify(command, folder, STEPS).items() if text]
            result = f"DIFFERS in {', '.join(unlike)}" if unlike else "resumes bit for bit"
            reasons += [f"{script}: {WHY}"] if unlike else []
        except CleanExit as error:
            result = "FAILS"
            reasons.append(f"{script} on {count} process(es): {error}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        table.append((Path(script).name, count, result, f"{time.monotonic() - began:.0f} s"))
    print(f"{'script':<26} processes  result")
    for name, count, result, took in table:
        print(f"{name:<26} {count:<10} {result}, {took}")
    if any("bit for bit" not in row[2] for row in table):
        raise Broken("\n".join(["training does not work here as it should", *reasons]))


def place() -> str:
    """Where this is: versions, user, GPUs, shared memory."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "accelerate", "transformers"))
    gpus = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())) or "none seen"
    shared_memory = f"{shutil.disk_usage('/dev/shm').total / 1e6:,.0f} MB" if Path("/dev/shm").exists() else "none"
    user = f"{os.getuid()}:{os.getgid()}"
    return f"Python {platform.python_version()}, {packages}\nuser {user}, GPUs: {gpus}, /dev/shm: {shared_memory}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared selftest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    scripts, smoke_test = sorted((ROOT / "templates").glob("*.py")), ROOT / "smoke_test.py"
    if not scripts and not smoke_test.is_file():
        raise ConfigError(f"neither templates nor a smoke_test.py in {ROOT}")
    print(place(), flush=True)
    prove(
        {f"templates/{path.name}": (FLAGS[path.stem], ALONE.get(path.stem, (1, 2))) for path in scripts}
        or runpy.run_path(str(smoke_test))["RUNS"]  # of a project
    )
