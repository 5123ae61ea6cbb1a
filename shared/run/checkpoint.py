"""Checkpoints that are whole or do not exist, and that any strategy and world size can resume.

One format for all strategies: trained weights, buffers, optimizer state and what else is kept as
safetensors (see `trained` and `tensors`); counts, scores and notes as JSON. The order of samples
and random numbers are not saved, because they depend on the step alone.
"""

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shared.config import parse as configs
from shared.models.hub import identity_of_frozen
from shared.models.weights import average_buffers
from shared.parallel.gradients import local_part, reshard
from shared.process import faults
from shared.process.collectives import on_main
from shared.process.errors import first_line, is_out_of_memory
from shared.process.files import commit, digest, discard, new_folder, remove
from shared.process.printing import print_main
from shared.process.redaction import redact
from shared.run import exits, launch
from shared.run.checkpoint_files import (
    MANIFEST,
    CheckpointError,
    checkpoints,
    verify,
    write_manifest,
)
from shared.run.prepared import Prepared
from shared.run.resumable import note_changes, require_resumable
from shared.run.state import TrainState
from shared.run.tensors import Piece, pieces_of, read, saved_tensors, share_out, write
from shared.run.trained import kept_of

PACKAGES = ("torch", "accelerate", "transformers")


class Checkpointer:
    """Saves and resumes one run. Every rank makes one and calls its methods together.

    Args:
        prepared: the run, with all models prepared.
        data: fingerprint of the samples; resuming with others is refused.
    """

    def __init__(self, prepared: Prepared, data: str) -> None:
        strategy = self.strategy = prepared.strategy
        accelerator = self.accelerator = strategy.accelerator
        config = self.config = prepared.config
        self.run_dir = prepared.dir
        self.mirror = prepared.mirror
        self.kept = kept_of(prepared)
        self.model = accelerator.unwrap_model(prepared.models["model"])
        settings = configs.flatten(config)
        self.facts = {  # of the run, in each manifest
            "folder": redact(str(self.run_dir)),
            "data": data,
            # of weights that are not trained, and so not saved
            "base": identity_of_frozen(settings.get("model_name_or_path") or "", self.model),
            "replicas": strategy.apart,
            "settings": redact(settings),
            "strategy": launch.strategy(accelerator),
            "versions": [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES],
            "world_size": accelerator.num_processes,
        }
        self.latest: Path | None = None
        self.pending: Future[None] | None = None
        # its own, so that the writing thread's collectives do not mix with training's
        self.group: Any = None
        self.thread: ThreadPoolExecutor | None = None
        if config.speed.async_save:
            self.thread = ThreadPoolExecutor(1, "checkpoint")
            if dist.is_initialized():
                self.group = dist.new_group(
                    backend="gloo", timeout=timedelta(seconds=config.speed.ddp_timeout)
                )

    def _to_save(self, step: int) -> dict[str, torch.Tensor]:
        """All tensors by name. Per-rank tensors are named `rankN.…`; they are restored only on the
        same number of ranks, otherwise every rank gets the shared value.
        """
        tensors: dict[str, torch.Tensor] = {}
        buffers: dict[str, torch.Tensor] = {}
        for prefix, kept in self.kept.items():
            tensors |= _named(prefix, kept.tensors(step))
            buffers |= _named(prefix, kept.buffers)
        if self.accelerator.num_processes > 1 and not self.strategy.apart:
            statistics = {name: b for name, b in buffers.items() if b.is_floating_point()}
            # saving changes nothing in the live model
            mean = {name: value.clone() for name, value in statistics.items()}
            average_buffers(self.accelerator, mean)
            tensors |= mean | _named(f"rank{self.accelerator.process_index}.", statistics)
        return tensors

    def save(self, state: TrainState) -> None:
        """Write `checkpoint-<step>`, unless that is there or nothing is learned yet, and delete old
        ones: see `_prune`. Every rank calls this.

        All ranks write their shards into a temporary folder beside it and agree that they could.
        Then the main rank writes the manifest with all hashes, syncs, renames the folder and
        syncs its parent. Killed at any point, the checkpoints before it are what they were. With
        --async_save, all but a copy to the host's memory happens in the background: see `wait`.

        Raises:
            CheckpointError: on all ranks, naming the rank that failed, here or in the save before,
                if that was in the background; nothing saved before is lost.
        """
        self.wait()
        folder = self.run_dir / f"checkpoint-{state.step:06d}"
        if state.step > 0 and self.latest != folder:
            self._save(state, folder)

    def _save(self, state: TrainState, folder: Path) -> None:
        temporary = self.run_dir / f".tmp-checkpoint-{state.step:06d}"
        if self.mirror:
            self.mirror.make_room(self.latest)
        if self.accelerator.is_main_process:
            with contextlib.suppress(OSError):  # reported below: writing into it fails
                new_folder(temporary)
        reshard(self.model)  # an evaluation may have left weights gathered
        tensors = self._to_save(state.step)
        # of all ranks; once they have met here, the temporary folder exists
        pieces = self._gather(pieces_of(tensors))
        mine = share_out(pieces)[self.accelerator.process_index]
        local = {name: local_part(tensors[name]).detach() for name in mine}
        scaler = self.accelerator.scaler  # fp16's
        manifest = self.facts | {
            "step": state.step,
            "state": dataclasses.asdict(state),
            "scaler": scaler.state_dict() if scaler is not None else None,
        }
        if self.thread is None:
            self._write(folder, temporary, local, mine, manifest)
        else:
            local = {name: value.to("cpu", copy=True) for name, value in local.items()}
            self.pending = self.thread.submit(self._write, folder, temporary, local, mine, manifest)

    def save_and_load(self) -> int:
        """Save, verify, read back and delete, to see whether it works. Returns bytes on disk. Every
        rank calls this.
        """
        # resume ignores this prefix; the next start deletes leftovers
        folder = self.run_dir / ".tmp-gone-checkpoint-000000"
        self._save(TrainState(), folder)
        self.wait()
        manifest = on_main(partial(verify, folder))
        self._load(folder, manifest)
        self.accelerator.wait_for_everyone()
        on_main(partial(remove, folder))
        self.latest = None
        return sum(file["size"] for file in manifest["files"].values())

    def wait(self) -> None:
        """Wait for a save in the background. Every rank calls this.

        Raises:
            CheckpointError: it failed.
        """
        if self.pending is not None:
            pending = self.pending
            self.pending = None
            pending.result()

    def _write(
        self,
        folder: Path,
        temporary: Path,
        tensors: dict[str, torch.Tensor],
        pieces: dict[str, Piece],
        manifest: dict[str, Any],
    ) -> None:
        """Write this rank's shard; the main rank then writes the manifest, commits and prunes."""
        name = f"checkpoint-{manifest['step']:06d}"
        rank = self.accelerator.process_index
        shard = f"rank-{rank}.safetensors"
        files: dict[str, Any] = {}
        problem = ""
        try:
            files[shard] = write(temporary / shard, tensors, pieces)
            faults.point("save.shard")
        except Exception as error:
            problem = f"rank {rank}: {first_line(error)}"
        reports = self._gather((problem, files))
        problems = [p for p, _ in reports if p]
        if not problems and rank == 0:
            # a chain; a user may have removed it
            if self.latest and (self.latest / MANIFEST).is_file():
                manifest["before"] = [self.latest.name, digest(self.latest / MANIFEST)]
            manifest["files"] = {name: fact for _, part in reports for name, fact in part.items()}
            try:
                write_manifest(temporary, manifest)
                if folder.exists() and not (folder / MANIFEST).exists():
                    raise FileExistsError(f"{folder} is in the way, which is no checkpoint")
                commit(temporary, folder)
                self._prune(manifest["step"], manifest["state"]["best_step"])
            except OSError as error:
                problems = [f"rank 0: {first_line(error)}"]
            else:
                if folder.name == name:  # and not in a rehearsal
                    best = manifest["state"]["best_step"] == manifest["step"]
                    print_main(f"saved {name}" + ", the best so far" * best)
        problems = self._gather(problems)[0]
        if problems:
            if rank == 0:
                discard(temporary)
            raise CheckpointError(f"{name} could not be saved: {'; '.join(problems)}")
        self.latest = folder

    def _gather(self, value: Any) -> list[Any]:
        """Each rank's value, by rank, over the group of the thread that this is."""
        if not dist.is_initialized():
            return [value]
        values: list[Any] = [None] * self.accelerator.num_processes
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _prune(self, step: int, best: int) -> None:
        """Keep the newest --save_total_limit up to `step`, and that of step `best`. A folder
        without a manifest is the user's.
        """
        present = [p for p in checkpoints(self.run_dir) if (p / MANIFEST).exists()]
        own = [p for p in present if int(p.name.split("-")[1]) <= step]
        newest = own[-self.config.checkpoint.save_total_limit :]
        for old in own:
            if old not in newest and old.name != f"checkpoint-{best:06d}":
                try:
                    faults.point("save.prune")
                    remove(old)
                except OSError as error:  # it is tried again after the next save
                    print_main(
                        f"warning: checkpoint-{step:06d} is saved, but an older one could not be "
                        f"removed ({first_line(error)})"
                    )

    def resume(self, found: tuple[Path, dict[str, Any]] | None) -> TrainState:
        """Load a checkpoint, as `checkpoint_files.find` has found it, or begin. Every rank calls
        this.

        Raises:
            ConfigError: it was made with other data or other settings that change what is learned.
        """
        if found is None:
            return TrainState()
        folder, manifest = found
        require_resumable(folder, manifest, self.facts, self.config)
        note_changes(folder, manifest, self.facts)
        faults.point("resume.verified")
        state = TrainState(**manifest["state"])
        self._load(folder, manifest)
        origin = manifest.get("folder", self.facts["folder"])
        if state.tracker_run_id and origin != self.facts["folder"]:  # copied, moved or another's
            state.tracker_run_id = ""
            print_main(f"{folder.name} was saved in {origin}: the tracker gets another run")
        if folder.parent != self.run_dir:  # of another run: drop its scores, too
            state.tracker_run_id = ""
            state.interval = []
            state.forget_scores()
            on_main(lambda: (self.run_dir / "metrics.jsonl").unlink(missing_ok=True))
        if manifest["scaler"] and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(manifest["scaler"])
        exits.at_step(state.step)
        faults.point("resume.loaded")
        self.latest = folder
        print_main(f"resumed from {folder} at step {state.step}")
        return state

    def load_best(self, step: int) -> bool:
        """Load the best checkpoint, that of `step`, at the end. False if it is damaged. Every rank
        calls this.
        """
        folder = self.run_dir / f"checkpoint-{step:06d}"
        try:
            manifest = on_main(partial(verify, folder))
        except CheckpointError as error:
            print_main(f"warning: {error}; final/ holds the last weights, not the best")
            return False
        self._load(folder, manifest)
        return True

    def _load(self, folder: Path, manifest: dict[str, Any]) -> None:
        saved = saved_tensors(folder)
        own = f"rank{self.accelerator.process_index}."  # where as many ranks resume
        as_many = manifest["world_size"] == self.accelerator.num_processes
        of_rank = saved if as_many and not self.strategy.apart else ()

        def fill(prefix: str, tensors: dict[str, torch.Tensor]) -> None:
            tensors = {
                own + name if own + name in of_rank else name: t
                for name, t in _named(prefix, tensors).items()
            }
            problem = ""
            try:
                read(folder, tensors)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                problem = first_line(error)
            if problems := [problem for problem in self._gather(problem) if problem]:
                raise CheckpointError(
                    f"{folder}: does not fit this model, its optimizers and setup.keep "
                    f"({problems[0]})"
                )

        for prefix, kept in self.kept.items():
            names = {name.removeprefix(prefix) for name in saved if name.startswith(prefix)}
            kept.load(partial(fill, prefix), names, manifest["step"])


def _named(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in tensors.items()}
