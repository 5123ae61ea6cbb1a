"""--find_batch_size and --dress_rehearsal: does it fit, does a checkpoint work."""

import time

import torch
from accelerate.utils import gather_object, release_memory
from torch.distributed.fsdp import FSDPModule

from shared.parallel.gradients import end_step
from shared.process import ranks
from shared.process.errors import is_out_of_memory
from shared.process.printing import print_main
from shared.run.checkpoint import Checkpointer
from shared.run.rehearsal import Rehearsal
from shared.training.step import reduced


def find_batch_size(trial: Rehearsal) -> int:
    """Halve the rows of a micro-batch until memory suffices; the loader uses the number from
    then on.

    They divide the loader's rows and are a multiple of its `multiple`. The optimizer's state
    and gradients are in place meanwhile. The global batch stays, so training learns the same.

    Raises:
        OutOfMemoryError: a single row does not fit; or FSDP's ranks do not have the same free
            memory.
        ConfigError: under DeepSpeed, whose engine cannot take a step back.
    """
    trial.strategy.require("--find_batch_size")
    asked = rows = trial.loader.per_device
    step = trial.loader.multiple
    with trial.taken_back(trial.optimizers):
        while not _fits(trial, rows):
            fewer = [n for n in range(step, rows // 2 + 1, step) if rows % n == 0]
            if not fewer:
                raise torch.OutOfMemoryError(f"a micro-batch of {rows} does not fit")
            print_main(
                f"out of memory with {rows} at once; trying {max(fewer)} at once, accumulated "
                f"{asked // max(fewer)} times as often"
            )
            rows = max(fewer)
    trial.loader.per_device = rows
    return rows


def dress_rehearsal(trial: Rehearsal, saver: Checkpointer) -> None:
    """Do once what would otherwise fail after hours: the longest batch, a save and a load.

    Raises:
        OutOfMemoryError: the longest batch does not fit beside gradients and the optimizer's
            state.
        CheckpointError: a checkpoint cannot be written or read.
        ConfigError: under DeepSpeed, whose engine cannot take a step back.
    """
    trial.strategy.require("--dress_rehearsal")
    start = time.perf_counter()
    with trial.taken_back(trial.optimizers):
        if not _fits(trial, trial.loader.per_device):
            raise torch.OutOfMemoryError("the longest batch does not fit")
        trained = time.perf_counter()
        size = saver.save_and_load()
    saved = time.perf_counter()
    print_main(
        f"dress rehearsal: the longest batch, twice: {trained - start:.1f} s; a checkpoint of "
        f"{size / 1e9:.2f} GB saved and read back: {saved - trained:.1f} s"
    )


def _fits(trial: Rehearsal, rows: int) -> bool:
    """Whether the longest micro-batch of so many rows fits, on all ranks."""
    batch = trial.loader.longest(rows)
    enough = True
    try:
        for _ in range(2):  # the second beside the gradients of the first
            with reduced(trial.strategy.accelerator, trial.models, last=False):
                trial.strategy.backward(trial.loss(batch), 0.0)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        enough = False
    trial.clear_gradients()
    if not enough:
        for model in trial.models:
            end_step(model)
        release_memory()
    fits = gather_object([enough])
    gathers = ranks.sequence_ranks() > 1
    gathers |= any(isinstance(model, FSDPModule) for model in trial.models)
    if any(fits) and not all(fits) and gathers:
        # The others' gathers still wait for the rank that gave up: nothing can be tried again.
        raise torch.OutOfMemoryError(
            f"{rows} rows at once fit on some ranks, but not on rank {fits.index(False)}"
        )
    return all(fits)
