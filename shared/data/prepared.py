"""Data that is prepared once and kept for later runs. The main rank builds it while the others
wait.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from shared.process import faults
from shared.process.errors import CleanExit, ConfigError, first_line
from shared.process.printing import print_main
from shared.process.ranks import cores, is_main_rank, rank

# seconds without a write, where locks do not tell whether a process lives
ABANDONED_AFTER = 24 * 3600
CHECKSUMS = "checksums.json"
PIECE = 2**26  # of each PIECE bytes of each file of a folder
VERIFIED = ".verified"  # when a folder's checksums were compared with its files


def fingerprint(**parts: Any) -> str:
    """16 hex digits that change when any of the JSON-like `parts` does. A Path stands for its size
    and time.
    """

    real = cache(os.path.realpath)

    def describe(value: Any) -> Any:
        if isinstance(value, Path):
            stat = value.stat()
            return [f"{real(value.parent)}/{value.name}", stat.st_size, stat.st_mtime_ns]
        raise TypeError(type(value))

    text = json.dumps(parts, sort_keys=True, default=describe)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def source_of(*places: str) -> str:
    """A hash of the code at these places in `shared`, folders or files: what other code prepared is
    not used.
    """
    shared = Path(__file__).parents[1]
    paths = [shared / place for place in places]
    files = [
        file for path in paths for file in (sorted(path.glob("*.py")) if path.is_dir() else [path])
    ]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def build_once(folder: Path, build: Callable[[Path], None], *, continues: bool = False) -> Path:
    """Let the main rank fill `folder` while the others wait. On the next run it is there already.

    `build` gets a temporary sibling, which is renamed at the end: the folder is whole or does not
    exist, also when two runs build it at once. One that was damaged since then is built again. The
    other ranks wait for the main one's word, since a collective would time out. What killed runs
    have left is removed: see `remove_abandoned`. Every rank calls this. The folder must be on a
    file system that all ranks see.

    Args:
        continues: `build` goes on with what a killed run has left in the temporary folder. A second
            run waits for the first.

    Raises:
        ConfigError: the cache cannot be written.
        CleanExit: the main rank has ended without making the folder.
    """
    from torch import distributed

    store = (
        distributed.distributed_c10d._get_default_store() if distributed.is_initialized() else None
    )
    ready = f"{folder.name} is prepared"
    if is_main_rank():
        remove_abandoned(folder)
        keep(folder, build, continues=continues)
        if store:
            store.set(ready, "")
    looked = 0
    try:
        while (store and not store.check([ready])) or not folder.exists():
            time.sleep(0.05)
            looked += 1
            if looked == 1200:
                print(
                    f"rank {rank()} waits for rank 0 to prepare {folder}; both "
                    "must see this file system",
                    flush=True,
                )
    except RuntimeError:  # the launcher of the main rank's machine is gone
        raise CleanExit(f"rank 0, which prepares {folder}, has ended: see its own output") from None
    return folder


def keep(folder: Path, build: Callable[[Path], None], *, continues: bool = False) -> Path:
    """`build_once` by one process alone, for a part of what that prepares."""
    if usable(folder):
        return folder
    temporary: Path | None = None
    lock: int | None = None
    is_left = False
    try:
        temporary, lock = _claim(folder, continues)
        if not folder.exists():
            faults.point("prepare")
            build(temporary)
            (temporary / CHECKSUMS).write_text(json.dumps(_checksums(temporary)))
            (temporary / VERIFIED).write_text(_state(temporary))
            temporary.rename(folder)
    except OSError as error:
        if not folder.exists():  # else another run has built the same meanwhile
            raise ConfigError(
                f"{folder.parent}: prepared data cannot be written ({first_line(error)}); "
                "set TEMPLATES_CACHE to a writable folder with room for it"
            ) from error
    except (KeyboardInterrupt, SystemExit):
        is_left = continues
        raise
    finally:
        if temporary is not None and not is_left:
            shutil.rmtree(temporary, ignore_errors=True)
        if lock is not None:
            os.close(lock)
    return folder


def _claim(folder: Path, continues: bool) -> tuple[Path, int]:
    """A temporary sibling of `folder` in which no other process works, and the lock that says
    so.
    """
    temporary = own = folder.with_name(f".{folder.name}.new-{secrets.token_hex(4)}")
    if continues:
        temporary = folder.with_name(f".{folder.name}.new")
    while True:
        temporary.mkdir(parents=True, exist_ok=True)
        lock = os.open(temporary, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if temporary.exists() and os.path.samestat(os.fstat(lock), temporary.stat()):
                return temporary, lock
        except BlockingIOError:  # another run builds the same
            time.sleep(0.2)
        except OSError:  # not all network file systems can lock a folder
            if temporary == own:
                return temporary, lock
            temporary = own
        os.close(lock)


def usable(folder: Path) -> bool:
    """Whether `folder` is there as `build_once` has left it; a damaged one is put aside. Call on
    one rank.

    Files are read and compared with their checksums once a day, and again after a restart of the
    machine or a change.

    Raises:
        ConfigError: it is damaged and cannot be put aside.
    """
    if not folder.exists():
        return False
    mark = folder / VERIFIED
    try:
        if mark.exists() and mark.read_text(errors="replace") == _state(folder):
            return True
        known = json.loads((folder / CHECKSUMS).read_text())
        found = _checksums(folder)
        if known == found:
            # it may be a cache that only others write
            with contextlib.suppress(OSError):
                mark.write_text(_state(folder))
            return True
        damage = next(
            (name for name in found if found[name] != dict(known).get(name)), "a file is missing"
        )
    except (OSError, TypeError, ValueError) as error:
        damage = first_line(error)
    print_main(f"warning: {folder}: prepared data is damaged ({damage}), so it is prepared again")
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        folder.rename(aside)
        os.utime(aside)  # kept as long as what killed runs have left: another run may read it now
    except OSError as error:
        raise ConfigError(
            f"{folder}: damaged, and cannot be replaced ({first_line(error)}): remove it"
        ) from None
    return False


def _files(folder: Path) -> dict[str, Path]:
    files = (
        (str(path.relative_to(folder)), path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    )
    return {name: path for name, path in files if name != VERIFIED}


def _state(folder: Path) -> str:
    """Changes when any file does, each day, and when the machine is started."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    stats = {name: path.stat() for name, path in _files(folder).items()}
    return fingerprint(
        files={
            name: [s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for name, s in stats.items()
        },
        day=date.today().isoformat(),
        boot=boot.read_text() if boot.exists() else "",
    )


def _checksums(folder: Path) -> dict[str, list[int]]:
    """Size and CRC-32 of each PIECE bytes of all files in a folder."""

    def crc(path: Path, first: int) -> int:
        found = 0
        with path.open("rb") as file:
            file.seek(first)
            for _ in range(PIECE >> 20):
                found = zlib.crc32(file.read(2**20), found)
        return found

    files = {name: path for name, path in _files(folder).items() if name != CHECKSUMS}
    with ThreadPoolExecutor(min(4, cores())) as pool:
        sums = {
            name: [pool.submit(crc, path, first) for first in range(0, path.stat().st_size, PIECE)]
            for name, path in files.items()
        }
        return {
            name: [path.stat().st_size, *(one.result() for one in sums[name])]
            for name, path in files.items()
        }


def remove_abandoned(folder: Path) -> None:
    """Remove what killed runs have left of `folder`, unless it can be continued, and what nobody
    has used for a day.

    Where another run builds something now, its process holds a lock. A damaged folder that was put
    aside stays for a day, since another run may read it.
    """
    for temporary in folder.parent.glob(".*"):
        with contextlib.suppress(OSError):  # it was renamed meanwhile
            lock = os.open(temporary, os.O_RDONLY)
            try:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    is_left = temporary.name.startswith(f".{folder.name}.new-")
                except BlockingIOError:
                    continue
                except OSError:
                    is_left = False
                written = max(path.stat().st_mtime for path in (temporary, *temporary.rglob("*")))
                if is_left or time.time() - written > ABANDONED_AFTER:
                    shutil.rmtree(temporary, ignore_errors=True)
            finally:
                os.close(lock)
