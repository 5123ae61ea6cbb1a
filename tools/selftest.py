"""Check that training works on this machine: train, kill, resume and compare every template.

python -m shared selftest
docker run IMAGE selftest

Small offline runs, on 1 and 2 CPU processes. Prints one row for each run: whether the killed and
resumed run equals the uninterrupted one, bit for bit, in samples, losses, learning rates,
evaluations, weights and optimizer state.
"""

import argparse
import os
import platform
import shlex
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

from shared.commands.verify_resume import WHY, verify
from shared.process.errors import CleanExit
from tools.new import TWO, small_runs

ROOT = Path(__file__).resolve().parents[1]
STEPS = 4


class Broken(CleanExit):
    """A template does not train here, or not as it should."""

    exit_code = 1


def check(command: str) -> str:
    """Verify one run: what is wrong with it, or an empty string."""
    argv = [sys.executable, "-m", "accelerate.commands.launch", *shlex.split(command)[2:]]
    folder = Path(tempfile.mkdtemp(prefix="selftest-"))
    try:
        different = [part for part, text in verify(argv, folder, STEPS).items() if text]
        return f"{', '.join(different)} differ: {WHY}" if different else ""
    except CleanExit as error:
        return str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment() -> str:
    """Versions, user, GPUs and shared memory of this machine."""
    packages = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "accelerate", "transformers")
    )
    gpus = (
        ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        or "none seen"
    )
    shared_memory = (
        f"{shutil.disk_usage('/dev/shm').total / 1e6:,.0f} MB"
        if Path("/dev/shm").exists()
        else "none"
    )
    user = f"{os.getuid()}:{os.getgid()}"
    return (
        f"Python {platform.python_version()}, {packages}\nuser {user}, GPUs: {gpus}, "
        f"/dev/shm: {shared_memory}"
    )


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(environment(), flush=True)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.chdir(ROOT)
    failures = []
    for path in sorted(Path("templates").glob("*.py")):
        for command in small_runs(path.stem, str(path)):
            print(
                f"{path.stem:<21} {1 + command.startswith(TWO)} process(es)  ", end="", flush=True
            )
            failure = check(command)
            print("FAILS" if failure else "resumes bit for bit", flush=True)
            failures += [f"{command}: {failure}"] if failure else []
    if failures:
        raise Broken("training does not work here as it should", *failures)
