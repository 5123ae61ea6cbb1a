"""Signals that stop a run, and how a process ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.process.errors import CleanExit
from shared.process.printing import redact
from shared.process.ranks import is_main_rank

# Stop the run after a checkpoint. SIGINT is Ctrl-C, SIGHUP a terminal that is closed, which a run under nohup survives.
STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    STOP_SIGNALS.remove(signal.SIGHUP)


@contextlib.contextmanager
def clean_exit() -> Iterator[None]:
    """Turn a `CleanExit` into one line on the console and its exit code."""
    try:
        yield
    except CleanExit as end:
        note_exit_code(end.exit_code, sure=not end.alone)
        if end.exit_code == 143 and not end.alone and not is_main_rank():
            time.sleep(1)  # until the main rank has said so: the launcher ends the others when one ends
        elif not is_main_rank():
            # Most errors are seen by all ranks and told by the main one; the launcher then ends this one right here.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
            print(redact(f"error on rank {os.environ['RANK']}: {end}"), file=sys.stderr, flush=True)
        else:
            print(redact(f"{'' if end.exit_code == 143 else 'error: '}{end}"), file=sys.stderr, flush=True)
        if os.environ.get("SHOW_TRACEBACK"):  # for whoever changes the code rather than runs it
            traceback.print_exc()
        sys.exit(end.exit_code)
    except KeyboardInterrupt:  # in a command that trains nothing
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def note_exit_code(code: int, *, sure: bool = True) -> None:
    """Tell `python -m shared run`, if this runs under it; the first one of a launch stays, since it is the cause."""
    folder = os.environ.get("TEMPLATES_RUN")
    if folder:
        with contextlib.suppress(OSError), open(Path(folder, "code"), "x", encoding="utf-8") as noted:
            noted.write(f"{code}{'' if sure else '?'}")


def _be_told_of_signals() -> None:
    """Tell `python -m shared run`, if this runs under it, that this process trains, and when it fails."""
    folder = os.environ.get("TEMPLATES_RUN")
    if folder:
        with contextlib.suppress(OSError):
            Path(folder, str(os.getpid())).touch()
        before = sys.excepthook

        def noted(*error: Any) -> None:
            note_exit_code(1)
            before(*error)

        sys.excepthook = noted


@contextlib.contextmanager
def stop_signals_wait() -> Iterator[None]:
    """Hold stop signals back, also in processes that are started meanwhile and have no handlers yet."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop_before_the_start(number: int, _frame: object) -> None:
    """Until training has its own handlers. Whoever started this may have signals ignored, as `run` does."""
    note_exit_code(143, sure=False)
    if is_main_rank():
        with contextlib.suppress(OSError):  # not print, which may be at work right now
            os.write(2, f"stopped by {signal.Signals(number).name} before the start\n".encode())
    os._exit(143)


_PARENT = os.getppid()


def end_with_the_launcher() -> None:
    """Get SIGTERM when the launcher dies: one that is killed, or that does not pass SIGTERM on, would leave an orphan.

    `accelerate launch` of a single process is such a one. Linux only.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    if launched and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != _PARENT:  # it has died meanwhile
            os.kill(os.getpid(), signal.SIGTERM)
