"""Decisions that the main rank makes for all."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate.utils import broadcast_object_list

from shared.process import ranks
from shared.process.errors import CleanExit

T = TypeVar("T")


def on_main(function: Callable[[], T]) -> T:
    """Call `function` on the main rank alone and give every rank its result, or its `CleanExit`.
    Every rank calls this.

    For what must be decided once: a look at the file system, say, which ranks could see
    differently. Not for minutes of work, in which the waiting ranks' collective would time out (see
    `prepared.build_once`).
    """
    outcome: list[Any] = [None]
    if ranks.is_main_rank():
        try:
            outcome = [function()]
        except CleanExit as error:
            outcome = [error]
    broadcast_object_list(outcome)
    if isinstance(outcome[0], CleanExit):
        raise outcome[0]
    return outcome[0]


def wait_for_main(here: str) -> None:
    """Return when the main rank has come here, too, however long that takes. Every rank calls this.

    A collective would time out while the main rank writes a model to a slow disk.

    Args:
        here: a name for this place, of its own.

    Raises:
        CleanExit: its machine has gone.
    """
    if not dist.is_initialized():
        return
    store = dist.distributed_c10d._get_default_store()
    if ranks.is_main_rank():
        store.set(here, "")
    try:
        while not store.check([here]):
            time.sleep(0.2)
    except RuntimeError:
        raise CleanExit(
            "rank 0 has ended while this one waited for it: see its own output"
        ) from None
