"""Signals that stop a run, and how a process ends."""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from shared.process.errors import CleanExit, first_line
from shared.process.files import discard
from shared.process.ranks import is_main_rank, rank
from shared.process.redaction import redact

# Each stops the run after a checkpoint. Ctrl-C sends SIGINT. A closed terminal sends SIGHUP; under
# nohup, it is ignored.
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    STOP_SIGNALS.remove(signal.SIGHUP)

# The folder in which `python -m shared run`, if that is used, looks for processes and their end.
LAUNCHED = os.environ.get("TEMPLATES_RUN")


@contextlib.contextmanager
def clean_exit() -> Iterator[None]:
    """Turn a `CleanExit` into one line on the console and its exit code, and record the end for
    `python -m shared run`, if that is used.
    """
    try:
        yield
    except CleanExit as end:
        record_end(LAUNCHED, end)
        if end.exit_code == 143 and not is_main_rank():
            time.sleep(1)  # the main rank prints first: the launcher ends all ranks when one ends
        elif not is_main_rank():
            # Most errors occur on all ranks. The main rank prints them; the launcher then ends this
            # rank during the sleep.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
            print(f"error on rank {os.environ['RANK']}: {end}", file=sys.stderr, flush=True)
        else:
            print(f"{'' if end.exit_code == 143 else 'error: '}{end}", file=sys.stderr, flush=True)
        if os.environ.get("SHOW_TRACEBACK"):  # for developers
            traceback.print_exc()
        sys.exit(end.exit_code)
    except KeyboardInterrupt:  # only in commands that do not train
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        record_end(LAUNCHED, error)
        raise


def record_end(folder: Path | str | None, error: BaseException | None, step: int = 0) -> None:
    """Write exit.json into a folder, whole or not at all, unless another rank has: the first cause
    is the true one.

    Each run's folder gets one, and that of `python -m shared run`. Nothing without a folder.
    """
    if not folder:
        return
    content = {
        "exit_code": getattr(error, "exit_code", int(error is not None)),
        "cause": "finished" if error is None else redact(first_line(error)),
        "step": step,
        "rank": rank(),
        "alone": getattr(error, "alone", False),
    }
    path = Path(folder, "exit.json")
    temporary = Path(folder, f".tmp-exit-{rank()}")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(content) + "\n", encoding="utf-8")
        if not path.exists():
            temporary.rename(path)
    discard(temporary)


def stop_on_signals_before_training() -> None:
    """Let a stop signal end this process at once, with exit code 143, until training sets its own
    handlers.

    Also tell `python -m shared run`, if that is used, that this process trains.
    """
    end_with_the_launcher()
    for number in STOP_SIGNALS:
        signal.signal(number, _stop_before_training)
    if LAUNCHED:
        with contextlib.suppress(OSError):
            pid = os.getpid()
            Path(LAUNCHED, str(pid)).write_text(start_of(pid), encoding="utf-8")


@contextlib.contextmanager
def stop_signals_wait() -> Iterator[None]:
    """Block stop signals in this process, and in processes that it starts meanwhile: they have no
    handlers yet.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop_before_training(number: int, _frame: object) -> None:
    end = CleanExit(f"stopped by {signal.Signals(number).name} before the start")
    end.exit_code = 143
    end.alone = True
    record_end(LAUNCHED, end)
    if is_main_rank():
        with contextlib.suppress(OSError):  # not print: the signal may have interrupted a print
            os.write(2, f"{end}\n".encode())
    os._exit(143)


def start_of(pid: int) -> str:
    """When a process started, in clock ticks since the boot: with its id, this names it for good.

    Empty where there is no such process, or no /proc.
    """
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()[19]
    return ""


_PARENT = os.getppid()


def end_with_the_launcher() -> None:
    """Get SIGTERM when the launcher dies, so that this process does not stay behind as an orphan.
    Linux only.

    A launcher may be killed. `accelerate launch` with one process does not pass SIGTERM on.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    if launched and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != _PARENT:  # the launcher is dead already
            os.kill(os.getpid(), signal.SIGTERM)
