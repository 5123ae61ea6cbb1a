"""A run's folder: it is the run's own, and has one writer at a time."""

import errno
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
from shared.run.checkpoint_files import checkpoints, facts_of
from shared.run.exits import report_end_in
from shared.run.profiling import TRACE

# What runs write beside their checkpoints.
FILES = (
    *("config.yaml", "summary.txt", "metrics.jsonl", "curves.png", "exit.json"),
    *(audit.FOLDER, TRACE, "evaluation.json", "predictions.csv", "answers.jsonl"),
    *("confusion_matrix.png", "mistakes.png", "answers.png"),
)
MODELS = ("final", "merged", "adapter")
# how the lock of a run begins; a kill can leave an empty one
OWN = re.compile(r"run ([0-9a-f]{16})\n|process |$")

_locks: dict[Path, tuple[IO[Any], str]] = {}  # held by this process, with the run's id


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
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output_dir {folder}: cannot be written ({error.strerror})") from None
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
    number = run_id(folder)  # refuse before anything is written
    try:
        file = (folder / ".lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output_dir {folder}: .lock cannot be written ({error.strerror})"
        ) from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            file.seek(0)
            holder = file.read().strip().rpartition("\n")[2]
            raise NotNow(
                f"--output_dir {folder}: another run is writing to it ({holder}): wait for it, "
                "stop it, or choose another folder"
            ) from None
        # a file system that has no locks
        note(
            f"warning: {folder} cannot be locked ({error.strerror}): make sure "
            "that no other run writes to it"
        )
    _locks[folder] = file, number
    file.truncate(0)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(f"run {number}\nprocess {os.getpid()} on {socket.gethostname()} since {now}\n")
    file.flush()


def run_id(folder: Path) -> str:
    """16 hex digits that the run's checkpoints name; new ones for a new folder. Call on one rank.

    Raises:
        ConfigError: the folder holds what the run would overwrite, and what it is not known to have
            written.
    """
    if folder in _locks:  # to open the file once more, and to close it, would let go of the lock
        return _locks[folder][1]
    lock = folder / ".lock"
    found = None
    if lock.is_file() and not lock.is_symlink():
        with lock.open(encoding="utf-8", errors="replace") as file:
            found = OWN.match(file.read(21))
    ids = [
        str(facts["run"])
        for path in reversed(checkpoints(folder))
        if "run" in (facts := facts_of(path))
    ]
    names = MODELS if found else (".lock", *FILES, *MODELS)
    present = [name for name in names if os.path.lexists(folder / name)]
    if present and not ids:  # with checkpoints, a run's folder was copied without hidden files
        raise ConfigError(
            f"--output_dir {folder}: holds {present[0]}, which the run would overwrite, but no "
            "checkpoint: move it away, or choose another folder"
        )
    return (found and found[1]) or next(iter(ids), "") or secrets.token_hex(8)


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
