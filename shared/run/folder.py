"""A run's folder: it is the run's own, and has one writer at a time."""

import fcntl
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import IO, Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from shared.data import audit
from shared.process.collectives import on_main
from shared.process.errors import ConfigError, NotNow
from shared.process.files import discard
from shared.process.printing import note
from shared.run.checkpoint_files import checkpoints
from shared.run.exits import report_end_in
from shared.run.profiling import TRACE

# What runs write beside their checkpoints.
FILES = (
    *("config.yaml", "summary.txt", "metrics.jsonl", "curves.png", "exit.json"),
    *("data.json", "data.html"),
    *(audit.FOLDER, TRACE, "evaluation.json", "predictions.csv", "answers.jsonl"),
    *("confusion_matrix.png", "mistakes.png", "answers.png"),
)
MODELS = ("final", "merged", "adapter")
LOCK = ".run.lock"

_locks: dict[Path, IO[Any]] = {}  # held by this process


def open_run(accelerator: Accelerator, output_dir: Path | None, template: str) -> Path:
    """The run's folder, made if need be and locked for this run, the same on every rank. Every rank
    calls this.

    Raises:
        ConfigError: it cannot be written, or holds files of the user's that the run would
            overwrite.
        NotNow: another run is writing to it.
    """
    folder = on_main(
        lambda: (
            output_dir or Path("outputs") / template / time.strftime("%Y%m%d-%H%M%S")
        ).resolve()
    )
    on_main(lambda: _lock(folder))
    token = folder / f".write-test-{on_main(lambda: secrets.token_hex(8))}"
    on_main(token.touch)
    seen = gather_object([token.exists()])
    if not all(seen):
        raise ConfigError(
            f"--output_dir {folder}: rank {seen.index(False)} does not see what rank 0 writes "
            "there; checkpoints need a folder that all machines share"
        )
    on_main(lambda: _tidy(folder))
    report_end_in(folder)
    return folder


def _lock(folder: Path) -> None:
    """Hold the folder until this process ends, however it does: the kernel lets go of the lock, so
    none goes stale.

    A lock of the process, not of an open file: reading processes that are forked do not inherit it.
    """
    if folder in _locks:
        return
    _refuse_to_overwrite(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output_dir {folder}: cannot be written ({error.strerror})") from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        raise NotNow(
            f"--output_dir {folder}: another run is writing to it ({file.read().strip()}): wait "
            "for it, stop it, or choose another folder"
        ) from None
    except OSError as error:  # a file system that has no locks
        note(
            f"warning: {folder} cannot be locked ({error.strerror}): make sure "
            "that no other run writes to it"
        )
    _locks[folder] = file
    file.truncate(0)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}\n")
    file.flush()


def _refuse_to_overwrite(folder: Path) -> None:
    """Raise ConfigError if the folder holds what the run would overwrite, and no run's lock and
    checkpoints; a finished run's model also if its checkpoints are gone.
    """
    lock = folder / LOCK
    is_of_a_run = lock.is_file() and not lock.is_symlink()
    names = MODELS if is_of_a_run else (LOCK, *FILES, *MODELS)
    present = [name for name in names if os.path.lexists(folder / name)]
    if present and not checkpoints(folder):
        raise ConfigError(
            f"--output_dir {folder}: holds {present[0]}, which the run would overwrite, but no "
            "checkpoint: move it away, or choose another folder"
        )


def _tidy(folder: Path) -> None:
    """Remove what a killed run was in the middle of writing; a folder that it was replacing comes
    back.
    """
    for path in list(folder.iterdir()):
        match = re.fullmatch(
            r"\.(old-|tmp-|tmp-gone-)(checkpoint-\d+|final|merged)|\.(write-test|tmp-exit)-\w+",
            path.name,
        )
        if match is None:
            continue
        if match[1] == "old-" and not path.is_symlink() and not os.path.lexists(folder / match[2]):
            path.rename(folder / match[2])
        else:
            discard(path)
