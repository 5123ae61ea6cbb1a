"""Run a command so that it can be stopped, and so that its end can be understood. The container starts everything so.

python -m shared run accelerate launch templates/pretrain.py --output_dir runs/first
python -m shared run selftest

SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and SIGHUP go to the training processes, which write a checkpoint and end; the launcher,
which would die of them before that, does not see them (save SIGHUP, of which it may die: training is waited for). What it
starts after that, as --max_restarts has it do, ends before it trains. What trains nothing is ended at once. The exit code
is the training's own, of which `accelerate launch` makes 1: 0 done, 2 input or settings, 3 checkpoint or disk, 4 not finite,
143 stopped by SIGTERM, 130 by SIGINT, 138 by SIGUSR1, 129 by SIGHUP, 1 anything else.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shared.process.errors import ConfigError
from shared.process.signals import STOP_SIGNALS

STOPPED = 143


def main() -> None:
    command = sys.argv[2:] if sys.argv[1:2] == ["--"] else sys.argv[1:]
    if not command or command[0] in ("-h", "--help"):
        print(__doc__)
        return
    if command[0] == "selftest":
        command = [sys.executable, "-m", "shared", *command]
    sys.exit(run(command))


def run(command: list[str]) -> int:
    """Run a command to its end; its exit code, or that of the training in it.

    Raises:
        ConfigError: there is no such command.
    """
    seen: list[int] = []
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, lambda number, _frame: seen.append(number))
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        # Time for the last checkpoint, after which torch's launcher kills; by default it leaves 30 seconds.
        env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "290"} | os.environ | {"TEMPLATES_RUN": folder}
        # That launcher would handle the others although they are ignored: also SIGHUP, where it is.
        env |= {"PET_SIGNALS_TO_HANDLE": "SIGHUP,SIGQUIT" if signal.SIGHUP in STOP_SIGNALS else "SIGQUIT"}
        try:
            process = subprocess.Popen(command, env=env, preexec_fn=_ignore_stop_signals)
        except OSError as error:
            raise ConfigError(f"{command[0]}: {error.strerror}") from None
        passed = 0
        told: set[int] = set()  # training processes that a signal was passed on to
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.02 if seen else 0.2)  # new ones end before they remove exit.json, which tells why
            for number in seen[passed:]:
                passed += 1
                told = _training(folder)
                if not _pass_on(number, told):
                    kill(process.pid)
            if seen:  # under --max_restarts torch's launcher takes their end for a failure, and starts others
                late = _training(folder) - told
                _pass_on(seen[0], late)
                told |= late
        _wait_for_checkpoints(folder)
        noted = Path(folder, "code")
        code = noted.read_text() if process.returncode and noted.exists() else str(process.returncode)
    if code.endswith("?"):  # by a signal that may have been the launcher's, after another process had died
        code = code.removesuffix("?") if seen else "1"
    if seen and (int(code) == STOPPED or int(code) < 0):
        return 128 + seen[0]
    return int(code) if int(code) >= 0 else 128 - int(code)


def _ignore_stop_signals() -> None:
    """In the command's process, for all that it starts, too: some clusters signal every process of a job."""
    for number in STOP_SIGNALS - {signal.SIGHUP}:  # which means nohup to whoever finds it ignored
        signal.signal(number, signal.SIG_IGN)


def _training(folder: str) -> set[int]:
    """The training processes that there are or were: they leave their numbers in `folder` once they take signals."""
    return {int(path.name) for path in Path(folder).glob("[0-9]*")}


def _pass_on(number: int, processes: set[int]) -> bool:
    """Signal processes; whether any of them is left."""
    reached = False
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
            reached = True
    return reached


def _wait_for_checkpoints(folder: str, seconds: float = 290) -> None:
    """Until all training processes have ended, which outlive a launcher that is killed: they write a checkpoint then."""
    import psutil

    deadline, numbers = time.monotonic() + seconds, list(_training(folder))
    while numbers and time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(numbers[-1]).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.1)
                continue
        numbers.pop()


def kill(pid: int) -> None:
    """SIGKILL a process and all its descendants, the parents first, so that none can react."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family[1:], timeout=30)
