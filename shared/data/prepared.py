"""What is made of the data once and kept for later runs: built by the main rank while the others wait, and checked."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import pickle
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import ModuleType
from typing import Any

from shared.process.errors import CleanExit, ConfigError, first_line
from shared.process.ranks import cores, is_main_rank
from shared.process.signals import STOP_SIGNALS, stop_signals_wait

ABANDONED_AFTER = 24 * 3600  # seconds in which nothing was written
ALONE_FOR = 10  # seconds, about as long as other processes take to start and to be worth it


def fingerprint(**parts: Any) -> str:
    """16 hex digits that change when any of the JSON-like `parts` does; a Path stands for its size and time."""

    def describe(value: Any) -> Any:
        if isinstance(value, Path):
            stat = value.stat()
            return [str(value.resolve()), stat.st_size, stat.st_mtime_ns]
        raise TypeError(type(value))

    text = json.dumps(parts, sort_keys=True, default=describe)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Let the main rank fill `folder` while the others wait; on the next run it is there already.

    `build` gets a temporary sibling, which is renamed when it returns: a folder is whole or does not exist. The
    other ranks look for the folder instead of waiting in a collective, which would time out; when the main rank
    fails, the launcher ends them, on other machines they notice that its launcher is gone. What killed runs have left
    is removed. Every rank calls this; the folder must be on a file system that all ranks see.

    Raises:
        ConfigError: the cache cannot be written, or the main rank has ended without making the folder.
    """
    from torch import distributed

    if is_main_rank():
        _remove_abandoned(folder)
    if is_main_rank() and not folder.exists():
        temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
        try:
            temporary.mkdir(parents=True)
            build(temporary)
            temporary.rename(folder)
        except OSError as error:
            if not folder.exists():  # as it does when another run has built the same in the meantime
                raise ConfigError(
                    f"{folder.parent}: prepared data cannot be written ({first_line(error)}); "
                    "set TEMPLATES_CACHE to a writable folder with room for it"
                ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    start, told = time.monotonic(), False
    asked = start
    while not folder.exists():
        time.sleep(0.2)
        if distributed.is_initialized() and time.monotonic() - asked > 5:
            asked = time.monotonic()
            try:
                distributed.distributed_c10d._get_default_store().check(["there"])
            except RuntimeError:
                raise CleanExit(f"rank 0, which prepares {folder}, has ended: see its own output") from None
        if not told and time.monotonic() - start > 60:
            told = True
            rank = os.environ.get("RANK")
            print(
                f"rank {rank} waits for rank 0 to prepare {folder}, which must be on a file system that both see", flush=True
            )
    return folder


def _remove_abandoned(folder: Path) -> None:
    """Remove what runs that were killed while they built `folder` have left. Another run may be building it now."""
    for temporary in folder.parent.glob(f".{folder.name}.*"):
        with contextlib.suppress(OSError):  # it was renamed meanwhile
            written = max(path.stat().st_mtime for path in (temporary, *temporary.rglob("*")))
            if time.time() - written > ABANDONED_AFTER:
                shutil.rmtree(temporary, ignore_errors=True)


def begins_texts(tokenizer: Any) -> list[int]:
    """The token that a tokenizer puts before each text, if it does: models that were trained so need it."""
    ids = tokenizer("a")["input_ids"]
    return [tokenizer.bos_token_id] if ids[:1] == [tokenizer.bos_token_id] and len(ids) > 1 else []


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """For the block that reads what `build_once` left in `folder`: damage is a ConfigError that says what to do."""
    try:
        yield
    except Exception as error:  # what NumPy, JSON and tokenizers make of foreign bytes is any type
        raise ConfigError(
            f"{folder}: prepared data is damaged ({first_line(error)}); remove the folder to make it anew"
        ) from error


_work: Any = None  # what this process does with each item


def in_order(
    make: Callable[..., Callable[[Any], Any]], parts: tuple, items: Iterable[Any], processes: int | None
) -> Generator[Any, None, None]:
    """`make(*parts)` called with each item, by so many processes; what it returns, in the order of the items.

    One process is this one itself. None is this one for the first ALONE_FOR seconds, in which little data is done with,
    and then as many as there are processors, at most 16, since each takes half a gigabyte. All that goes between them is
    pickled, errors included; `make` is not of `__main__`.

    Raises:
        ConfigError: a process was killed.
    """
    items = iter(items)
    if processes is None or processes <= 1:
        until = time.monotonic() + ALONE_FOR if processes is None and cores() > 1 else math.inf
        for result in map(make(*parts), items):
            yield result
            if time.monotonic() > until:
                break
        else:
            return
        processes = min(cores(), 16)
    with tempfile.TemporaryDirectory() as folder:
        # Not as an argument of the processes: one that dies before it has read more than a pipe holds is waited for.
        told = Path(folder, "work")
        told.write_bytes(pickle.dumps((make, parts)))
        # spawn: a fork would copy the threads' locks of a process group that is already up
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start_work, initargs=(told,))
        waiting: deque[Future] = deque()
        try:
            for item in items:
                try:
                    with stop_signals_wait(), _without_main():
                        waiting.append(pool.submit(_do, item))
                except OSError as error:  # one has died while another was started
                    raise BrokenProcessPool from error
                if len(waiting) > 4 * processes:  # and not all at once, which would read all
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise ConfigError(
                "a process that prepares the data has died, of a lack of memory perhaps: choose fewer with "
                "--preprocessing_num_workers"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Let processes that are started meanwhile not import the script once more, with all that training takes."""
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start_work(told: Path) -> None:
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal all get it, and what ends is the other's decision
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    make, parts = pickle.loads(told.read_bytes())
    _work = make(*parts)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # killed, it could not say so
    os._exit(1)


def _do(item: Any) -> Any:
    return _work(item)
