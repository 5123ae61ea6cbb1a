"""Files and folders that are whole or do not exist."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shared.process import faults

# The answers of file systems (Samba, sshfs, drvfs of WSL) that do not sync folders, only files.
_FILES_ONLY = {
    errno.EINVAL,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EPERM,
    errno.EACCES,
}


def fsync(path: Path) -> None:
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
    """Yield a temporary sibling that becomes `folder`, replacing it, when the block ends without an
    error.

    All files are on disk before the rename, and the rename before the return, where the file system
    can sync folders. Call on one rank.
    """
    temporary = folder.with_name(f".tmp-{folder.name}")
    new_folder(temporary)
    yield temporary
    faults.point("finish")
    commit(temporary, folder)


def new_folder(path: Path) -> None:
    """Make an empty folder in place of what is there, of which a link's target stays as it is. Call
    on one rank.
    """
    discard(path)
    path.mkdir(parents=True)


def discard(path: Path) -> None:
    """Remove a file, a link or a folder, as far as that can be done."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():  # rmtree would wait for a pipe
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def commit(temporary: Path, folder: Path) -> None:
    """Give a folder that is completely written its name, so that it is there whole or not at all.
    Call on one rank.
    """
    # the only way to read it; files made meanwhile are not open to all
    os.umask(umask := os.umask(0o077))
    for path in temporary.rglob("*"):
        if path.is_file():
            # where a mount decides on owners and permissions, nobody may change them
            with contextlib.suppress(OSError):
                path.chmod(0o666 & ~umask)  # safetensors writes for the owner alone
        fsync(path)
    fsync(temporary)
    faults.point("save.rename")
    old = folder.with_name(f".old-{folder.name}")
    discard(old)
    if folder.exists():  # rename cannot replace a folder that is not empty
        folder.rename(old)
    temporary.rename(folder)
    discard(old)
    faults.point("save.renamed")
    fsync(folder.parent)


def remove(folder: Path) -> None:
    """Delete a folder, which is never seen half deleted under its name. Call on one rank."""
    gone = folder.with_name(f".tmp-gone-{folder.name}")
    discard(gone)
    folder.rename(gone)
    discard(gone)


NOT_REGULAR = (
    "not a regular file, but a pipe, a socket or a device, which could be waited for without end"
)


def digest(path: Path) -> dict[str, Any]:
    """Checksum and size of a file. XXH3 finds damage as surely as SHA-256, and ten times as fast;
    neither stops a forger.
    """
    import xxhash  # here, since `new` does without

    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, xxhash.xxh3_128)  # type: ignore[arg-type]
        return {
            "xxh3_128": checksum.hexdigest(),
            "size": path.stat().st_size,
        }


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; a half-written line, which a kill can leave, is passed
    over.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(value := json.loads(line), dict):
                    yield value


def keep_json_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Drop from a file, if it exists, what `keep` refuses, and half-written lines. Call on one
    rank.
    """
    if path.exists():
        temporary = path.with_name(f".{path.name}")
        with temporary.open("w", encoding="utf-8") as kept:
            kept.writelines(json.dumps(row) + "\n" for row in read_json_lines(path) if keep(row))
        temporary.replace(path)


def cache_dir() -> Path:
    """Where prepared data is kept between runs: $TEMPLATES_CACHE, or below $XDG_CACHE_HOME or
    ~/.cache.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("TEMPLATES_CACHE") or f"{base}/accelerate-templates")
