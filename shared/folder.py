"""A run's folder: one writer at a time, sub-folders that are whole or do not exist, and why the run ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from accelerate import Accelerator
from accelerate.utils import gather_object

from shared import faults
from shared.config import ConfigError, NotNow
from shared.exits import report_end_in
from shared.launch import on_main, say

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
            say(f"warning: {folder} cannot be locked ({error.strerror}): see that no other run writes to it")
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


# The answers of file systems (Samba, sshfs, drvfs of WSL) that do not sync folders, only files.
_FILES_ONLY = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM, errno.EACCES}


def _fsync(path: Path) -> None:
    """Wait until a file is on disk, or a folder's list of names, where the file system can do that.

    Raises:
        OSError: it did not get there.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _FILES_ONLY or not path.is_dir():
            raise


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary sibling that becomes `folder`, replacing it, when the block ends without an error.

    All files are on disk before the rename, and the rename before the return, where the file system can sync folders.
    Call on one rank.
    """
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    faults.point("finish")
    commit(temporary, folder)


def commit(temporary: Path, folder: Path) -> None:
    """Give a folder that is completely written its name, so that it is there whole or not at all. Call on one rank."""
    os.umask(umask := os.umask(0o077))  # the only way to read it; files made meanwhile are not open to all
    for path in temporary.rglob("*"):
        if path.is_file():
            with contextlib.suppress(OSError):  # where a mount decides on owners and permissions, nobody may change them
                path.chmod(0o666 & ~umask)  # safetensors writes for the owner alone
        _fsync(path)
    _fsync(temporary)
    faults.point("save.rename")
    if folder.exists():  # rename cannot replace a folder that is not empty
        old = folder.with_name(f".old-{folder.name}")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(folder)
    faults.point("save.renamed")
    _fsync(folder.parent)


def remove(folder: Path) -> None:
    """Delete a folder, which is never seen half deleted under its name. Call on one rank."""
    gone = folder.with_name(f".tmp-gone-{folder.name}")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def digest(path: Path) -> dict[str, Any]:
    """SHA-256 and size of a file."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": path.stat().st_size}


def require_space(folder: Path, needed: int, what: str) -> None:
    """Refuse to start what would fill the disk. Call on one rank.

    Args:
        needed: bytes that will be written.

    Raises:
        ConfigError: there are fewer free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"--output_dir {folder} has {free / 1e9:.1f} GB free, but {what} need {needed / 1e9:.1f} GB: make room, "
            "lower --save_total_limit, or choose another folder"
        )


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; a half-written line, which a kill can leave, is passed over."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(value := json.loads(line), dict):
                    yield value
