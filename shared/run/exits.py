"""How a run ends: one line for people, an exit code that names the cause, and exit.json in the
run's folder.
"""

import atexit
import errno
import os
import re
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.process import ranks
from shared.process.errors import CleanExit, ConfigError, first_line, is_out_of_memory, shown
from shared.process.files import discard
from shared.process.printing import keep_notes, print_main, release_notes
from shared.process.signals import STOP_SIGNALS, clean_exit, record_end

_folder: Path | None = None
_step = 0
_signal = 0  # that ends the run at once
_last: list[Callable[[], None]] = []  # what is left to do


class Stopped(CleanExit):
    """A signal asked the run to stop. The same command again continues it."""

    exit_code = 143

    def __str__(self) -> str:
        again = (
            f"; the same command with --output_dir {shown(shlex.quote(str(_folder)))} continues"
            if _folder
            else ""
        )
        return super().__str__() + again


class Finished(Exception):
    """Nothing is left to do: an end with exit code 0 on all ranks."""


class _EndNow(BaseException):
    """Raised in a signal's handler: no Exception, which a library or a `suppress` on the way could
    take for its own.
    """


class NoRoom(CleanExit):
    """A file of the run cannot be written. Checkpoints that were saved are what they were."""

    exit_code = 3


class LostRank(CleanExit):
    """Another rank does not answer: it hangs, or has ended."""

    exit_code = 5


class OutOfMemory(CleanExit):
    """The device's memory does not suffice: what it holds, and which lever to pull next."""

    exit_code = 2

    def __init__(self, error: BaseException, config: Any) -> None:
        rows = config.batch.micro_batch()[0]
        advice = [f"--per_device_train_batch_size {rows // 2}, which learns the same"] * (rows > 1)
        advice += [
            "--gradient_checkpointing full, a third slower",
            "accelerate_configs/fsdp2.yaml on several GPUs",
            "--optim adamw_8bit",
            "shorter rows, smaller images or a smaller model",
        ]
        super().__init__(
            f"out of memory: {first_line(error)}",
            f"  next: {advice[0]}",
            f"  then: {'; '.join(advice[1:])}",
        )


def run(main: Callable[[Any], None], config: Any) -> None:
    """Call `main(config)` and end with one line and the exit code that names the cause. Every rank
    calls this.

    Exit codes: 0 done, 2 input or configuration, 3 checkpoint or disk, 4 loss or gradient not
    finite, 5 another rank does not answer, 143 stopped by a signal after a checkpoint, 1 anything
    unforeseen (with a traceback). `accelerate launch` itself turns every failure into 1; the true
    code is in exit.json, too, which is missing where the run was killed.
    """
    code = 0
    output_dir: Path | None = config.checkpoint.output_dir
    if output_dir is not None and ranks.is_main_rank():
        discard(output_dir / "exit.json")  # of an earlier run
    try:
        with clean_exit():
            keep_notes()
            try:
                main(config)
            except Finished as done:
                print_main(str(done))
            except BaseException as error:
                end = _as_clean_exit(error, config)
                _record_end(end or error)
                if output_dir is None and _folder and not (_folder / "config.yaml").exists():
                    discard(_folder)  # a new one, in which nothing has begun
                if end is None or end is error:
                    raise
                raise end from error
            finally:
                release_notes()
        if ranks.is_main_rank():
            _record_end(None)
    except BaseException as error:
        if ranks.world_size() == 1:
            raise
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
        atexit._run_exitfuncs()  # trackers send what they have
    if ranks.world_size() > 1:
        # Every file is written. The interpreter's own teardown can abort or hang in a thread that a
        # process group left behind, which would hide how the run ended.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _record_end(error: BaseException | None) -> None:
    record_end(_folder, error, _step)
    while _last:
        _last.pop()()


def _as_clean_exit(error: BaseException, config: Any) -> CleanExit | None:
    if _signal:  # whatever the code on the way made of it
        stopped = Stopped(f"stopped by {signal.Signals(_signal).name} at step {_step}")
        stopped.alone = True
        return stopped
    if isinstance(error, CleanExit):
        return error
    if isinstance(error, ImportError) and str(error.name).startswith("shared.extras"):
        named = re.search(r"shared\.extras\.(\w+)|import name '(\w+)'", str(error))
        extra = named and (named[1] or named[2])
        return ConfigError(
            f"shared/extras/{extra or ''} is not in this project: add it with the line that its "
            f"README.md gives (... new ... --with {extra or 'EXTRA'})"
        )
    if is_out_of_memory(error):
        return OutOfMemory(error, config)
    # not "out of resource: shared memory", a GPU's
    no_shm = r"shared memory\(shm\)|out of\s+shared memory"
    if isinstance(error, RuntimeError) and re.search(no_shm, str(error)):
        return ConfigError(
            "/dev/shm is too small for the processes that read data: give the container more "
            f"(docker run --shm-size 8g), or --dataloader_num_workers 0 ({first_line(error)})"
        )
    number = getattr(error, "errno", None)
    no_room = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS}
    # as safetensors says it
    if number in no_room or any(f"os error {n})" in str(error) for n in no_room):
        where = getattr(error, "filename", None) or _folder
        return NoRoom(
            f"{where}: cannot be written ({first_line(error)}); checkpoints "
            "that were saved are good"
        )
    # gloo and NCCL raise plain RuntimeErrors
    lost = (
        r"gloo|NCCL|[Cc]onnection (closed|reset)|Broken pipe|Timed out waiting|timed? "
        r"?out.*(collective|operation)"
    )
    if ranks.world_size() > 1 and isinstance(error, RuntimeError) and re.search(lost, str(error)):
        return LostRank(
            f"rank {ranks.rank()} at step {_step + 1}: another rank does not answer: it has ended, "
            "or hangs. The same command continues from the last checkpoint, if there is one "
            f"({textwrap.shorten(first_line(error), 200)})"
        )
    return None


def report_end_in(folder: Path) -> None:
    """From now on, say in this folder's exit.json how the run ends. Every rank calls this."""
    global _folder
    _folder = folder


def at_the_end(work: Callable[[], None]) -> None:
    """Do this once exit.json is written, on this rank."""
    _last.append(work)


def at_step(step: int) -> None:
    """Note how many optimizer steps are done, for exit.json and for the last message."""
    global _step
    _step = step


def stop_at_once() -> None:
    """From now on, end the run where a signal asks to: there is nothing to save."""
    for number in STOP_SIGNALS:
        signal.signal(number, _end)


def _end(number: int, _frame: object) -> None:
    global _signal
    if not _signal:  # Ctrl-C brings two: its own, and that of the launcher's end
        _signal = number
        raise _EndNow
