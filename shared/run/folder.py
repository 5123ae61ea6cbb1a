"""A run's folder: one writer at a time."""

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import TextIO

from accelerate import Accelerator
from accelerate.utils import gather_object

from shared.process.collectives import on_main
from shared.process.errors import ConfigError, NotNow
from shared.process.printing import print_main
from shared.run.exits import report_end_in

_locks: dict[Path, TextIO] = {}


def open_run(accelerator: Accelerator, output_dir: Path | None, template: str) -> Path:
    """The run's folder, made if need be and locked for this run, the same on every rank. Every rank calls this.

    Raises:
        ConfigError: it cannot be written.
        NotNow: another run is writing to it.
    """
    folder = on_main(lambda: (output_dir or Path("outputs") / template / time.strftime("%Y%m%d-%H%M%S")).resolve())
    probe = folder / f".write-test-{secrets.token_hex(8)}"  # of this process alone: another run may start right now
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink(missing_ok=True)  # who holds the folder tidies it meanwhile
    except OSError as error:
        raise ConfigError(f"--output_dir {folder}: cannot be written ({error.strerror})") from None
    on_main(lambda: _lock(folder))
    token = folder / f".write-test-{on_main(lambda: secrets.token_hex(8))}"
    on_main(token.touch)
    seen = gather_object([token.exists()])
    if not all(seen):
        raise ConfigError(
            f"--output_dir {folder}: what rank 0 writes there is not seen by rank {seen.index(False)}; checkpoints need a "
            "folder that all machines share"
        )
    on_main(lambda: _tidy(folder))
    report_end_in(folder)
    return folder


def _lock(folder: Path) -> None:
    """Hold the folder until this process ends, however it does: the kernel lets go of the lock, so none goes stale.

    A lock of the process, not of an open file: reading processes that are forked do not inherit it.
    """
    if folder in _locks:
        return
    file = (folder / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):  # a file system that has no locks
            print_main(f"warning: {folder} cannot be locked ({error.strerror}): see that no other run writes to it")
            return
        file.seek(0)
        raise NotNow(
            f"--output_dir {folder}: another run is writing to it ({file.read().strip()}): wait for it, stop it, or "
            "choose another folder"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    _locks[folder] = file


def _tidy(folder: Path) -> None:
    """Remove what a killed run was in the middle of writing; a folder that it was replacing comes back."""
    for path in list(folder.iterdir()):
        match = re.fullmatch(r"\.(old-|tmp-|tmp-gone-)(checkpoint-\d+|final|merged)|\.(write-test|tmp-exit)-\w+", path.name)
        if match is None:
            continue
        if match[1] == "old-" and not (folder / match[2]).exists():
            path.rename(folder / match[2])
        else:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
