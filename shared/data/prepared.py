"""Data that is prepared once and kept for later runs. The main rank builds it while the others wait."""

import contextlib
import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shared.process import faults
from shared.process.errors import CleanExit, ConfigError, first_line
from shared.process.ranks import is_main_rank, rank

ABANDONED_AFTER = 24 * 3600  # seconds without a write


def fingerprint(**parts: Any) -> str:
    """16 hex digits that change when any of the JSON-like `parts` does. A Path stands for its size and time."""

    def describe(value: Any) -> Any:
        if isinstance(value, Path):
            stat = value.stat()
            return [str(value.resolve()), stat.st_size, stat.st_mtime_ns]
        raise TypeError(type(value))

    text = json.dumps(parts, sort_keys=True, default=describe)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def source_of(*packages: str) -> str:
    """A hash of the code in these folders of `shared`: data that other code has prepared are not used."""
    shared = Path(__file__).parents[1]
    files = sorted(file for package in packages for file in (shared / package).glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Let the main rank fill `folder` while the others wait. On the next run it is there already.

    `build` gets a temporary sibling, which is renamed at the end: the folder is whole or does not exist, also when two
    runs build it at once. The other ranks wait for the folder to appear, since a collective would time out. What killed
    runs have left is removed. Every rank calls this. The folder must be on a file system that all ranks see.

    Raises:
        ConfigError: the cache cannot be written.
        CleanExit: the main rank has ended without making the folder.
    """
    from torch import distributed

    if is_main_rank():
        _remove_abandoned(folder)
    if is_main_rank() and not folder.exists():
        temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        try:
            temporary.mkdir(parents=True)
            faults.point("prepare")
            build(temporary)
            temporary.rename(folder)
        except OSError as error:
            if not folder.exists():  # else another run has built the same meanwhile
                raise ConfigError(
                    f"{folder.parent}: prepared data cannot be written ({first_line(error)}); "
                    "set TEMPLATES_CACHE to a writable folder with room for it"
                ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    looked = 0
    while not folder.exists():
        time.sleep(0.2)
        looked += 1
        if distributed.is_initialized() and looked % 25 == 0:
            try:
                distributed.distributed_c10d._get_default_store().check(["there"])
            except RuntimeError:  # the launcher of the main rank's machine is gone
                raise CleanExit(f"rank 0, which prepares {folder}, has ended: see its own output") from None
        if looked == 300:
            print(f"rank {rank()} waits for rank 0 to prepare {folder}; both must see this file system", flush=True)
    return folder


def _remove_abandoned(folder: Path) -> None:
    """Remove what killed runs have left of `folder`. Another run may be building it now."""
    for temporary in folder.parent.glob(f".{folder.name}.*"):
        with contextlib.suppress(OSError):  # it was renamed meanwhile
            written = max(path.stat().st_mtime for path in (temporary, *temporary.rglob("*")))
            if time.time() - written > ABANDONED_AFTER:
                shutil.rmtree(temporary, ignore_errors=True)


def leading_bos(tokenizer: Any) -> list[int]:
    """The token that a tokenizer puts before each text, or an empty list."""
    ids = tokenizer("a")["input_ids"]
    return [tokenizer.bos_token_id] if ids[:1] == [tokenizer.bos_token_id] and len(ids) > 1 else []


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the highest token id: a vocabulary may have gaps."""
    return 1 + max(tokenizer.get_vocab().values())


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """For a block that reads what `build_once` left in `folder`: damage is a ConfigError that says what to do."""
    try:
        yield
    except Exception as error:  # NumPy, JSON and tokenizers raise many types
        raise ConfigError(
            f"{folder}: prepared data is damaged ({first_line(error)}); remove the folder to make it anew"
        ) from error
