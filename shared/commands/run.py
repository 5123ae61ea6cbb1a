"""Run a launcher so that signals stop the training with a checkpoint, and return its exit code.

python -m shared run accelerate launch templates/pretrain.py --output_dir runs/first

The containers and jobs start everything this way. SIGTERM, SIGINT (Ctrl-C), SIGUSR1 and SIGHUP go
to the training processes, which write a checkpoint and end. The launcher would die before that, so
it ignores them. (It may get SIGHUP and die; then this command waits for the training.) A training
that --max_restarts starts after the signal ends before its first step. On a signal, a command
without a training process is killed. The launcher's list of defaults is left out, and its traceback
where the training has said why it ended. `accelerate launch` turns every exit code into 1; this
command returns the original: 0 done, 2 input or settings, 3 checkpoint or disk, 4 loss not finite,
5 another process does not answer, 143 stopped by SIGTERM, 130 by SIGINT, 138 by SIGUSR1, 129 by
SIGHUP, 1 anything else.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shared.process.errors import ConfigError
from shared.process.signals import STOP_SIGNALS, start_of

STOPPED = 143


def main() -> None:
    command = sys.argv[2:] if sys.argv[1:2] == ["--"] else sys.argv[1:]
    if not command or command[0] in ("-h", "--help"):
        print(__doc__)
        return
    if command[0] == "selftest":  # docker run IMAGE selftest
        command = [sys.executable, "-m", "shared", *command]
    sys.exit(run(command))


def run(command: list[str]) -> int:
    """Run a command to its end. Returns its exit code, or that of the training in it.

    Raises:
        ConfigError: the command cannot be started.
    """
    if command[:2] == ["accelerate", "launch"]:
        command = [sys.executable, "-c", f"from {__name__} import launch; launch()", *command[2:]]
    seen: list[int] = []
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, lambda number, _frame: seen.append(number))
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        # torch's launcher kills the training this many seconds after a signal; 30 by default, too
        # short for a checkpoint.
        env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "290"} | os.environ | {"TEMPLATES_RUN": folder}
        # torch's launcher would set handlers for all of them again. Let it do so for SIGHUP, unless
        # started by nohup.
        env |= {
            "PET_SIGNALS_TO_HANDLE": "SIGHUP,SIGQUIT"
            if signal.SIGHUP in STOP_SIGNALS
            else "SIGQUIT"
        }
        try:
            process = subprocess.Popen(command, env=env, preexec_fn=_ignore_stop_signals)
        except OSError as error:
            raise ConfigError(f"{command[0]}: {error.strerror}") from None
        passed = 0
        signalled: set[int] = set()  # training processes that have got a signal
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                # restarted processes must end before they remove exit.json
                process.wait(timeout=0.02 if seen else 0.2)
            for number in seen[passed:]:
                passed += 1
                signalled = _training(folder)
                if not _pass_on(number, signalled):
                    kill(process.pid)
            # with --max_restarts torch's launcher takes the stop for a failure, and starts new
            # processes
            if seen:
                late = _training(folder) - signalled
                _pass_on(seen[0], late)
                signalled |= late
        _wait_for_checkpoints(folder)
        code = process.returncode
        end = Path(folder, "exit.json")
        if code and end.exists():
            recorded = json.loads(end.read_text(encoding="utf-8"))
            # a signal ended it, perhaps the launcher's after another process failed
            code = 1 if recorded["alone"] and not seen else recorded["exit_code"]
    if seen and (code == STOPPED or code < 0):
        return 128 + seen[0]
    return code if code >= 0 else 128 - code


def launch() -> None:
    """`accelerate launch`, in a process of its own, without its list of defaults, and without its
    traceback where the training has said why it ended.
    """
    from accelerate.commands import launch as accelerate

    explained = Path(os.environ["TEMPLATES_RUN"], "exit.json").exists
    # defaults that are right; of torch's launcher, also after a stop that was asked for
    noise = ("were not passed to", "(exitcode: 143)", "closing signal SIGTERM")

    def is_news(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "(exitcode: " in text and explained():
            return False
        return not any(part in text for part in noise)

    accelerate.logger.addFilter(is_news)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(is_news)
    try:
        accelerate.main()
    except FileNotFoundError as error:  # a --config_file that is not there
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        killed = -getattr(error, "returncode", 0)
        if killed > 0 and not explained():
            print(
                f"killed by {signal.Signals(killed).name}; the same command "
                "continues from the last checkpoint, if there is one"
            )
            sys.exit(128 + killed)
        if not explained():
            raise
        sys.exit(1)


def _ignore_stop_signals() -> None:
    """Called in the command's process; its children inherit it. Some clusters signal every process
    of a job.
    """
    for number in STOP_SIGNALS - {signal.SIGHUP}:  # the training would think that nohup started it
        signal.signal(number, signal.SIG_IGN)


def _training(folder: str) -> set[int]:
    """Process ids of all trainings: each notes its start in a file of this name in `folder` once it
    can handle signals.

    Not of those whose id is another process's by now.
    """
    noted = {int(path.name): path.read_text() for path in Path(folder).glob("[0-9]*")}
    return {pid for pid, start in noted.items() if start in ("", start_of(pid))}


def _pass_on(number: int, processes: set[int]) -> bool:
    """Send a signal to processes. Returns whether any of them still exists."""
    reached = False
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
            reached = True
    return reached


def _wait_for_checkpoints(folder: str, seconds: float = 290) -> None:
    """Wait until all training processes have ended: after a launcher was killed, they may still
    write a checkpoint.
    """
    import psutil

    def still_runs(pid: int) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        return False

    deadline = time.monotonic() + seconds
    while any(map(still_runs, _training(folder))) and time.monotonic() < deadline:
        time.sleep(0.1)


def kill(pid: int) -> None:
    """SIGKILL a process and all its descendants, parents first, so that no parent can react."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family[1:], timeout=30)
