"""Data that is prepared once and kept for later runs. The main rank builds it while the others
wait.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from filelock import FileLock

from shared.process import faults
from shared.process.collectives import wait_for_main
from shared.process.errors import ConfigError, first_line
from shared.process.files import digest
from shared.process.printing import print_main
from shared.process.ranks import is_main_rank, rank

CHECKSUMS = "checksums.json"
VERIFIED = ".verified"  # when a folder's checksums were compared with its files


def fingerprint(**parts: Any) -> str:
    """16 hex digits that change when any of the JSON-like `parts` does. A Path stands for its size
    and time.
    """

    def describe(path: Path) -> Any:
        stat = path.stat()
        return [os.path.abspath(path), stat.st_size, stat.st_mtime_ns]

    text = json.dumps(parts, sort_keys=True, default=describe)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def source_of(*places: str) -> str:
    """A hash of the code at these places in `shared`, folders or files: what other code prepared is
    not used.
    """
    shared = Path(__file__).parents[1]
    files = [file for place in places for file in sorted(shared.glob(f"{place}/*.py"))]
    files += [shared / place for place in places if place.endswith(".py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def build_once(folder: Path, build: Callable[[Path], None], *, continues: bool = False) -> Path:
    """Let the main rank fill `folder` while the others wait. On the next run it is there already.

    `build` gets a temporary sibling, which is renamed at the end: the folder is whole or does not
    exist. One that was damaged since then is built again. A second run waits for the first. Every
    rank calls this.

    Args:
        continues: `build` goes on with what a killed run has left in the temporary folder.

    Raises:
        ConfigError: the cache cannot be written, or not all ranks see it.
        CleanExit: the main rank has ended without making the folder.
    """
    if is_main_rank() and not usable(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = folder.with_name(f".{folder.name}.lock")
            with FileLock(lock):
                if not usable(folder):  # else another run has built it meanwhile
                    _build(folder, build, continues)
                lock.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{folder.parent}: prepared data cannot be written ({first_line(error)}); "
                "set TEMPLATES_CACHE to a writable folder with room for it"
            ) from error
    wait_for_main(f"{folder.name} is prepared")
    for _ in range(1200):  # network file systems show a new folder late
        if folder.exists():
            return folder
        time.sleep(0.05)
    raise ConfigError(
        f"rank {rank()} does not see {folder}, which rank 0 has prepared: set TEMPLATES_CACHE to a "
        "folder that all machines see"
    )


def _build(folder: Path, build: Callable[[Path], None], continues: bool) -> None:
    if folder.exists():
        print_main(f"warning: {folder}: prepared data is damaged, so it is prepared again")
        shutil.rmtree(folder)
    temporary = folder.with_name(f".{folder.name}.new")
    if not continues:
        shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(exist_ok=True)
    try:
        faults.point("prepare")
        build(temporary)
        (temporary / CHECKSUMS).write_text(json.dumps(_checksums(temporary)))
        temporary.rename(folder)
        (folder / VERIFIED).write_text(_state(folder))
    except Exception:  # a run that is stopped can go on
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def usable(folder: Path) -> bool:
    """Whether `folder` is there as `build_once` has left it. Call on one rank.

    Files are read and compared with their checksums once a day, and after a change.
    """
    mark = folder / VERIFIED
    try:
        state = _state(folder)
        if mark.exists() and mark.read_bytes() == state.encode():
            return True
        if json.loads((folder / CHECKSUMS).read_text()) != _checksums(folder):
            return False
    except (OSError, ValueError):  # it is not there, or damaged
        return False
    with contextlib.suppress(OSError):  # it may be a cache that only others write
        mark.write_text(state)
    return True


def _files(folder: Path) -> list[Path]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in files if path.name not in (CHECKSUMS, VERIFIED)]


def _state(folder: Path) -> str:
    """Changes when any file does, and each day."""
    files = [*_files(folder), folder / CHECKSUMS]
    return fingerprint(files=files, day=date.today().isoformat())


def _checksums(folder: Path) -> dict[str, Any]:
    return {str(path.relative_to(folder)): digest(path) for path in _files(folder)}
