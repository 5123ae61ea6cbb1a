"""Checkpoints that are whole or do not exist, and that any strategy and world size can resume.

One format for all strategies: torch distributed checkpoint (DCP) of the trainable parameters, the buffers and the
optimizer's state, tensors only. Everything else is JSON. Learning rate, order of samples and random numbers are
functions of the step, so the step is all that has to be remembered of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from shared.config import parse as configs
from shared.config.options import CheckpointConfig
from shared.data.loader import Window
from shared.models.weights import WeightCopy, average_buffers, persistent_buffers, reshard
from shared.parallel import zero
from shared.parallel.sharding import sharding_shares
from shared.process import faults, ranks
from shared.process.collectives import on_main
from shared.process.errors import CleanExit, ConfigError, NotNow, first_line, is_out_of_memory
from shared.process.files import commit, digest, remove, require_space
from shared.process.printing import print_main, redact
from shared.run import exits
from shared.run.checkpoint_files import (
    MANIFEST,
    NAME,
    CheckpointError,
    _digest_of,
    _NoAnswer,
    _TensorReader,
    checkpoints,
    verify,
)
from shared.run.launch import strategy
from shared.training import optim

STATE = "trainer_state.json"
UNTOLD = {"output_dir", "resume_from_checkpoint", "allow_changed"}  # differences that go without saying


@dataclass
class TrainState:
    """What a run is besides tensors."""

    step: int = 0  # optimizer steps done
    targets: int = 0  # target tokens (or images) trained on
    samples: int = 0  # samples trained on
    skipped: int = 0  # steps whose update was skipped
    evaluated: int = -1  # step of the latest evaluation
    started_from: str = ""  # checkpoint of this run that it was taken back to
    tracker_run_id: str = ""  # so that a resumed run is the same run in W&B
    notes: dict[str, Any] = field(default_factory=dict)  # the template's own, JSON

    def advance(self, window: Window) -> None:
        """Count an optimizer step."""
        self.step += 1
        self.targets += window.num_targets
        self.samples += window.num_samples
        exits.at_step(self.step)

    def owes_evaluation(self, every: int, last: int | None = None) -> bool:
        """Whether one is due, each `every` steps and at step `last`, and has not been made: it was stopped, say."""
        return self.evaluated < self.step and (self.step % every == 0 or self.step == last)


class Checkpointer:
    """Saves and resumes one run. Every rank makes one and calls its methods together.

    Args:
        accelerator: of the run.
        model, optimizers: as `parallel.prepare` returned them.
        run_dir: where `checkpoint-000120/` and its siblings go.
        config: the template's, whose `checkpoint` group says how many stay, and which is compared on resume.
        data: fingerprint of the samples; resuming with others is refused.
        base: the same of weights that are not trained, and so not saved.
        copies: second sets of the model's weights that belong to the run (their moving average, the best ones).
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizers: list[Any],
        run_dir: Path,
        config: Any,
        *,
        data: str,
        base: str = "",
        copies: Mapping[str, WeightCopy] | None = None,
    ) -> None:
        self.copies = dict(copies or {})
        self.accelerator, self.run_dir, self.data, self.base = accelerator, run_dir, data, base
        self.options: CheckpointConfig = config.checkpoint
        self.settings = redact(configs.flatten(config))
        self.free = configs.free_fields(type(config))
        self.model = accelerator.unwrap_model(model)
        self.optimizers = optimizers
        reshard(self.model)  # a forward before may have left weights gathered, which are other parameters
        # After `fully_shard` a tied parameter has two names; `named_parameters` gives the first alone.
        self.trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.latest: Path | None = None
        self.passed_over: list[Path] = []  # newer ones than the one that was resumed
        self.pending: Future[None] | None = None
        self.group: Any = None  # of the writing thread, which must not meet the training's collectives
        if self.options.async_save:
            self.thread = ThreadPoolExecutor(1, "checkpoint")
            # And not DefaultStager, which in PyTorch 2.11 forgets after each save how to copy and what it had pinned.
            # Small tensors are not worth a call each, and may share a page, which is pinned once only.
            on_gpu = accelerator.device.type == "cuda"
            self.stager = StateDictStager(pin_memory=on_gpu, share_memory=False, pin_memory_min_bytes=2**20)
            if dist.is_initialized():
                self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.speed.ddp_timeout))

    def _state(self, step: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(live tensors by name, scalars by name) of trainable parameters, persistent buffers and optimizers."""
        tensors: dict[str, torch.Tensor] = {f"model.{name}": b for name, b in persistent_buffers(self.model).items()}
        for kind, copy in self.copies.items():
            tensors |= {f"{kind}.{name}": value for name, value in copy.tensors.items()}
        scalars: dict[str, Any] = {}
        if zero.is_used(self.accelerator):
            return tensors | zero.state(self.accelerator, self.trainable, step), scalars
        tensors |= {f"model.{name}": p.detach() for name, p in self.trainable.items()}
        name_of = {p: name for name, p in self.trainable.items()}
        for optimizer in self.optimizers:
            for parameter, values in optimizer.state.items():
                for key, value in values.items():
                    into: dict[str, Any] = tensors if isinstance(value, torch.Tensor) else scalars
                    into[f"optimizer.{name_of[parameter]}.{key}"] = value
        return tensors, scalars

    def save(self, state: TrainState) -> None:
        """Write `checkpoint-<step>`, commit it, then prune. Every rank calls this.

        Temporary sibling, all ranks' shards, their agreement, hashes into the manifest, fsync, rename, fsync of the
        parent, prune. Killed at any point, the checkpoints before it are what they were. With --async_save all but a
        copy to the host's memory happens in the background: see `wait`.

        Raises:
            CheckpointError: on all ranks, naming the rank that failed, here or in the save before, if that was in the
                background; nothing saved before is lost.
        """
        failed: CheckpointError | None = None
        try:
            self.wait()
        except CheckpointError as error:
            failed = error  # but this one may succeed
        if state.step > 0 and self.latest != self.run_dir / f"checkpoint-{state.step:06d}":
            self._save(state)
        if failed is not None:
            self.wait()
            raise failed

    def _save(self, state: TrainState, prefix: str = "") -> None:
        folder = self.run_dir / f"{prefix}checkpoint-{state.step:06d}"
        temporary = self.run_dir / f".tmp-checkpoint-{state.step:06d}"
        if self.accelerator.is_main_process:
            shutil.rmtree(temporary, ignore_errors=True)
            with contextlib.suppress(OSError):  # reported below: writing into it fails
                temporary.mkdir()
        self.accelerator.wait_for_everyone()
        # One rank's buffers are written, so they are made one: BatchNorm statistics differ from rank to rank.
        average_buffers(self.accelerator, [persistent_buffers(self.model), *(c.buffers for c in self.copies.values())])
        tensors, scalars = self._state(state.step)
        content = dataclasses.asdict(state) | {"scalars": scalars}
        if self.accelerator.scaler is not None:  # fp16's loss scale
            content["scaler"] = self.accelerator.scaler.state_dict()
        manifest = {"format": 1, "step": state.step, "world_size": self.accelerator.num_processes}
        manifest |= {
            "strategy": strategy(self.accelerator),
            "held": sharding_shares(self.accelerator, self.model, self.optimizers),
        }
        manifest |= {"versions": _versions(), "data": self.data, "base": self.base, "settings": self.settings}
        manifest |= {"started_from": state.started_from}
        manifest |= {"tracker_run_id": state.tracker_run_id}
        if self.options.async_save:
            staged = self.stager.stage(tensors)
            self.pending = self.thread.submit(self._write, folder, staged, content, manifest)
        else:
            self._write(folder, tensors, content, manifest)

    def save_and_load(self, state: TrainState) -> None:
        """Save, verify, read back and delete: whether it works, and how long it takes. Every rank calls this."""
        prefix = ".tmp-gone-"  # what no run resumes from, and the next start removes if this is killed
        self._save(state, prefix)
        self.wait()
        folder = self.run_dir / f"{prefix}checkpoint-{state.step:06d}"
        on_main(lambda: verify(folder) and None)
        self._load(folder, {}, state.step)
        self.latest = None
        self.accelerator.wait_for_everyone()
        on_main(lambda: remove(folder))

    def wait(self) -> None:
        """Wait for a save in the background. Every rank calls this.

        Raises:
            CheckpointError: it failed.
        """
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()

    def _write(self, folder: Path, tensors: dict[str, Any], content: dict[str, Any], manifest: dict[str, Any]) -> None:
        name = f"checkpoint-{manifest['step']:06d}"
        temporary = folder.with_name(f".tmp-{name}")
        rank = self.accelerator.process_index
        files: dict[str, Any] = {}
        problem = ""
        try:
            alone = not dist.is_initialized()
            # What is on its way to the CPU is written meanwhile. A copy that was made there before waits for nothing: that
            # loader would wait for the training's stream at every 10 MB.
            ahead = 0 if self.options.async_save else 10_000_000
            writer = dcp.FileSystemWriter(temporary, per_thread_copy_ahead=ahead)
            dcp.save(tensors, storage_writer=writer, process_group=self.group, no_dist=alone)
            faults.point("save.shard")
            files = {p.name: digest(p) for p in temporary.glob(f"__{rank}_*")}
            faults.point("save.hash")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            problem = f"rank {rank}: {_cause(error)}"
        reports = self._gather((problem, files))
        problems = [p for p, _ in reports if p]
        if not problems and rank == 0:
            try:
                (temporary / STATE).write_text(json.dumps(content, indent=1))
                files = {name: fact for _, part in reports for name, fact in part.items()}
                files |= {name: digest(temporary / name) for name in (STATE, ".metadata")}
                manifest |= {"files": dict(sorted(files.items()))}
                (temporary / MANIFEST).write_text(json.dumps(manifest | {"sha256": _digest_of(manifest)}, indent=1))
                faults.point("save.manifest")
                missing = [name for name, fact in files.items() if not _is_there(temporary / name, fact["size"])]
                if missing:
                    raise OSError(f"{missing[0]}, which another rank has written, is not seen here: is the folder shared?")
                commit(temporary, folder)
            except OSError as error:
                problems = [f"rank 0: {_cause(error)}"]
            else:
                try:
                    self._prune(manifest["step"])
                except OSError as error:
                    print_main(f"warning: {name} is saved, but an older one could not be removed ({_cause(error)})")
                if folder.name == name:  # and not in a rehearsal
                    print_main(f"saved {name}")
        problems = self._gather(problems)[0]
        if problems:
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(f"{name} could not be saved: {'; '.join(problems)}")
        self.latest = folder

    def _gather(self, value: Any) -> list[Any]:
        """Each rank's value, by rank, over the group of the thread that this is."""
        if not dist.is_initialized():
            return [value]
        values: list[Any] = [None] * self.accelerator.num_processes
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _prune(self, step: int) -> None:
        """Keep the newest ones up to `step`. Later ones are of a run that was taken back to an earlier checkpoint, or were
        found damaged at its start: these stay until they are due.
        """
        own = [folder for folder in checkpoints(self.run_dir) if folder not in self.passed_over or _step_of(folder) <= step]
        ahead = [p for p in own if _step_of(p) > step]
        for old in ahead + [p for p in own if p not in ahead][: -self.options.save_total_limit]:
            faults.point("save.prune")
            remove(old)

    def size(self) -> int:
        """Bytes of one checkpoint, also before the optimizers have any state."""
        moments = {"AdamW": 8, "AdamW8bit": 2, "Muon": 4, "SGD": 4}  # bytes of state for a parameter
        each = {p: moments.get(type(o).__name__, 8) for o in self.optimizers for g in o.param_groups for p in g["params"]}

        def held_by(tensors: Iterable[torch.Tensor]) -> int:
            return sum(getattr(t, "ds_numel", t.numel()) * t.element_size() for t in tensors)

        trained = self.trainable.values()
        state = sum(each.get(p, 8) * getattr(p, "ds_numel", p.numel()) for p in trained)
        copies = sum(held_by(copy.tensors.values()) for copy in self.copies.values())
        return held_by(trained) + held_by(persistent_buffers(self.model).values()) + state + copies

    def resume(self, named: Path | None = None, *, total_steps: int | None = None) -> TrainState:
        """Load the newest valid checkpoint of the run, or the one named, or none. Every rank calls this.

        Also refuses to start what would fill the disk. A checkpoint named from outside the run's folder is where the run
        starts: once the run has checkpoints of its own, the same command continues from those. One named from inside takes
        the run back to it, once: the same command again continues from what was saved since.

        Args:
            named: a checkpoint's folder.
            total_steps: of the whole run, to know how many checkpoints are to come.

        Raises:
            CheckpointError: the one named is damaged or missing, or all of the run's are damaged.
            ConfigError: it was made with other data or other settings that change what is learned, the run's folder holds
                what was trained before and no checkpoint, or the disk is too full for the checkpoints to come.
            NotNow: the file system gives an error.
        """
        folder = self._choose(named)
        begins = folder is None or folder.parent != self.run_dir
        if begins:
            on_main(self._require_nothing_trained)
        on_main(lambda: self._require_space(folder, total_steps))
        if folder is None:
            return TrainState()
        faults.point("resume.verified")
        try:
            content = json.loads((folder / STATE).read_text(encoding="utf-8"))
            scalars, scaler = content.pop("scalars"), content.pop("scaler", None)
            state = TrainState(**content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(f"{folder}: {STATE} cannot be read") from None
        self._load(folder, scalars, state.step)
        if begins:  # another run, whose name and figures these are not
            state.tracker_run_id = state.started_from = ""
            on_main(lambda: (self.run_dir / "metrics.jsonl").unlink(missing_ok=True))
        elif named is not None and folder == named.resolve():
            state.started_from = folder.name
        if scaler and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(scaler)
        exits.at_step(state.step)
        faults.point("resume.loaded")
        self.latest = folder
        print_main(f"resumed from {folder} at step {state.step}")
        return state

    def _verify(self, folder: Path) -> dict[str, Any]:
        """`verify`, with the files shared among the ranks; all of them raise alike. Every rank calls this."""
        problem, manifest = None, {}
        try:
            manifest = verify(folder, self.accelerator.process_index, self.accelerator.num_processes)
        except CheckpointError as error:
            problem = error
        problems = [problem for problem in gather_object([problem]) if problem is not None]
        for problem in problems:
            if isinstance(problem, _NoAnswer):
                raise NotNow(str(problem))
        if problems:
            raise problems[0]
        return manifest

    def _choose(self, named: Path | None) -> Path | None:
        own: list[Path] = on_main(lambda: checkpoints(self.run_dir))
        inside = named is not None and named.resolve().parent == self.run_dir
        if (named is not None and not own) or (inside and not self._continues_from(named)):
            assert named is not None
            manifest = self._verify(named.resolve())
            on_main(partial(self._compare, named, manifest))
            return named.resolve()
        for folder in reversed(own):
            try:
                manifest = self._verify(folder)
            except CheckpointError as error:
                print_main(f"warning: {error}; the one before it is used")
                self.passed_over.append(folder)
                continue
            on_main(partial(self._compare, folder, manifest))
            if named is not None and folder != named.resolve():
                print_main(
                    f"--resume_from_checkpoint {named} is where this run began; it continues from its own {folder.name}"
                )
            return folder
        if own:
            raise CheckpointError(
                f"{self.run_dir}: none of its {len(own)} checkpoints is whole; choose another --output_dir"
            )
        return None

    def _continues_from(self, named: Path | None) -> bool:
        """Whether the run was taken back to this checkpoint already, and has saved since."""

        def since() -> bool:
            for folder in reversed(checkpoints(self.run_dir)):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
                    return named is not None and manifest.get("started_from") == named.name
            return False

        return on_main(since)

    def _compare(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Print which settings are not the checkpoint's, and refuse those that change what is learned."""
        if manifest.get("data") != self.data and "data" not in self.options.allow_changed:
            raise ConfigError(
                f"{folder} belongs to a run on other data: use the same, another --output_dir, or --allow_changed data"
            )
        if manifest.get("base", self.base) != self.base and "base" not in self.options.allow_changed:
            raise ConfigError(
                f"{folder} belongs to a run on other base weights, of which it holds none itself: use the same, another "
                "--output_dir, or --allow_changed base"
            )
        if unknown := sorted(set(self.options.allow_changed) - set(self.settings) - {"data", "base"}):
            raise ConfigError(
                f"--allow_changed {' '.join(unknown)}: no setting of that name; names have spaces between them"
            )
        before = manifest.get("settings", {})
        changed = {k: (before[k], v) for k, v in self.settings.items() if k in before and before[k] != v}
        lines = {name: f"{name} was {old!r}, now {new!r}" for name, (old, new) in changed.items()}
        refused = sorted(set(lines) - self.free - set(self.options.allow_changed))
        if refused:
            raise ConfigError(
                f"{folder} belongs to a run that learns something else ({'; '.join(lines[n] for n in refused)}): use the "
                f"same settings, another --output_dir, or --allow_changed {' '.join(refused)}"
            )
        precision = [str(text).rsplit(", ", 1)[-1] for text in (manifest.get("strategy", ""), strategy(self.accelerator))]
        if precision[0] != precision[1]:
            lines["mixed_precision"] = f"mixed_precision was {precision[0]}, now {precision[1]}"
        told = [line for name, line in lines.items() if name not in UNTOLD]
        if told:
            print_main(f"settings that differ from those of {folder.name}:\n  " + "\n  ".join(told))

    def _require_nothing_trained(self) -> None:
        for name in ("final", "merged"):
            if (self.run_dir / name).exists():
                raise ConfigError(
                    f"{self.run_dir} holds {name}/ of a run whose checkpoints are gone, and would be overwritten: move it "
                    "away, or choose another --output_dir"
                )

    def _require_space(self, folder: Path | None, total_steps: int | None) -> None:
        if zero.is_used(self.accelerator) or ranks.pipeline_ranks() > 1:
            return  # whose ranks do not know the whole
        step = _step_of(folder) if folder and NAME.fullmatch(folder.name) else 0
        to_come = self.options.save_total_limit
        if total_steps is not None:
            to_come = math.ceil(max(0, total_steps - step) / self.options.save_steps)
        # A new one is there before the oldest goes.
        more, one = min(to_come, self.options.save_total_limit + 1 - len(checkpoints(self.run_dir))), self.size()
        if more > 0:
            require_space(self.run_dir, more * one, f"{more} checkpoints of {one / 1e9:.1f} GB")

    def _drop_unused(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        """Parameters that never had a gradient have no optimizer state, in the checkpoint neither."""
        saved = _TensorReader(folder).read_metadata().state_dict_metadata
        for optimizer in self.optimizers:
            for name, parameter in self.trainable.items():
                keys = [f"optimizer.{name}.{key}" for key in optimizer.state.get(parameter, {})]
                if keys and not any(key in saved for key in keys) and f"model.{name}" in saved:
                    del optimizer.state[parameter]
                    for key in keys:
                        tensors.pop(key, None)

    def _load(self, folder: Path, scalars: dict[str, Any], step: int) -> None:
        def read(tensors: dict[str, torch.Tensor]) -> None:
            try:
                dcp.load(tensors, storage_reader=_TensorReader(folder), no_dist=not dist.is_initialized())
            except CleanExit:
                raise
            except BaseException as error:
                cause = _innermost(error)  # DCP wraps whatever it meets
                if exits.is_of_a_lost_rank(cause) or is_out_of_memory(cause):
                    raise cause from None
                if not isinstance(cause, Exception):  # a signal
                    raise cause from None
                raise CheckpointError(f"{folder}: does not fit this model and optimizer ({_cause(error)})") from None

        if zero.is_used(self.accelerator):
            zero.load(self.accelerator, self.trainable, step, read)
            read({f"model.{name}": b for name, b in persistent_buffers(self.model).items()})
            return
        for optimizer in self.optimizers:
            optim.fill_state(optimizer)
        tensors, _ = self._state(step)
        self._drop_unused(folder, tensors)
        read(tensors)
        for optimizer in self.optimizers:
            for name, parameter in self.trainable.items():
                for key in optimizer.state.get(parameter, {}):
                    if f"optimizer.{name}.{key}" in scalars:
                        optimizer.state[parameter][key] = scalars[f"optimizer.{name}.{key}"]


def _step_of(folder: Path) -> int:
    return int(folder.name.split("-")[1])


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _innermost(error: BaseException) -> BaseException:
    """The true error: DCP wraps it once a rank."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _cause(error: BaseException) -> str:
    text = first_line(_innermost(error))
    if "inline_container" in text:  # PyTorch's zip writer, which keeps the system's reason to itself
        text = f"a file could not be written whole: is the disk full, or a quota reached? ({text})"
    return text


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "accelerate", "transformers")}
