"""Checkpoints that are whole or do not exist, and that any strategy and world size can resume.

One format for all strategies: the trainable parameters, the buffers and the optimizer's state as
safetensors (see `tensors`). Everything else is JSON. Learning rate, order of samples and random
numbers are not saved, because they depend on the step alone.
"""

import contextlib
import dataclasses
import json
import secrets
import shutil
from collections.abc import Container, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from shared.config import parse as configs
from shared.config.options import CheckpointConfig
from shared.models.weights import WeightCopy, average_buffers, persistent_buffers
from shared.parallel.gradients import local_part, reshard
from shared.parallel.strategy import Strategy
from shared.process import faults
from shared.process.collectives import on_main
from shared.process.errors import NotNow, first_line, is_out_of_memory
from shared.process.files import commit, new_folder, remove
from shared.process.printing import print_main
from shared.process.redaction import redact
from shared.run import exits, launch
from shared.run.checkpoint_files import (
    MANIFEST,
    STATE,
    CheckpointError,
    NoAnswer,
    checkpoints,
    require_compatible,
    run_of,
    verify,
    versions,
    write_manifest,
)
from shared.run.folder import run_id
from shared.run.state import TrainState
from shared.run.tensors import TensorReader, pieces_of, share_out, write
from shared.training import optim
from shared.training.low_memory import state_tensors


class Checkpointer:
    """Saves and resumes one run. Every rank makes one and calls its methods together.

    Args:
        strategy: of the run.
        models: as `Setup.prepare` returned them, by name; final/ is made of "model".
        optimizers: of all models.
        run_dir: where `checkpoint-000120/` and its siblings go.
        config: the template's. Its `checkpoint` group says how many stay; its values are compared
            on resume.
        data: fingerprint of the samples; resuming with others is refused.
        base: fingerprint of weights that are not trained, and so not saved.
        ema: the moving average of the weights, if there is one.
        extra: more tensors of the run, by name. They are saved and loaded in place.
    """

    def __init__(
        self,
        strategy: Strategy,
        models: Mapping[str, nn.Module],
        optimizers: list[Any],
        run_dir: Path,
        config: Any,
        *,
        data: str,
        base: str = "",
        ema: WeightCopy | None = None,
        extra: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.strategy = strategy
        self.ema = ema
        self.extra = dict(extra or {})
        accelerator = self.accelerator = strategy.accelerator
        self.run_dir = run_dir
        self.data = data
        self.base = base
        self.options: CheckpointConfig = config.checkpoint
        self.in_background: bool = config.speed.async_save
        self.settings = redact(configs.flatten(config))
        self.free = configs.free_fields(type(config))
        self.optimizers = optimizers
        self.trainable: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        for name, model in models.items():
            prefix = "" if name == "model" else f"{name}/"
            whole = accelerator.unwrap_model(model)
            reshard(whole)  # gathered weights are other Parameter objects
            # After `fully_shard` a tied parameter has two names; `named_parameters` gives the first
            # alone.
            self.trainable |= {
                prefix + n: p for n, p in whole.named_parameters() if p.requires_grad
            }
            self.buffers |= _named(prefix, persistent_buffers(whole))
        self.model = accelerator.unwrap_model(models["model"])
        self.run: str = on_main(partial(run_id, run_dir))
        self.latest: Path | None = None
        self.passed_over: list[Path] = []  # newer ones than the one that was resumed
        self.pending: Future[None] | None = None
        # its own, so that the writing thread's collectives do not mix with training's
        self.group: Any = None
        if self.in_background:
            self.thread = ThreadPoolExecutor(1, "checkpoint")
            # Not DefaultStager: in PyTorch 2.11 it drops its pinned memory after each save. Tensors
            # below 1 MiB are not pinned: two of them on one page cannot both be.
            self.on_gpu = accelerator.device.type == "cuda"
            self.stager = StateDictStager(pin_memory=self.on_gpu, pin_memory_min_bytes=2**20)
            if dist.is_initialized():
                self.group = dist.new_group(
                    backend="gloo", timeout=timedelta(seconds=config.speed.ddp_timeout)
                )

    def _statistics(self) -> dict[str, torch.Tensor]:
        """Live buffers of floating-point numbers, by name in a checkpoint: BatchNorm's statistics.

        They differ from rank to rank: each rank's are of the images that it saw.
        """
        live = _named("model.", self.buffers) | _named("ema.", self.ema.buffers if self.ema else {})
        return {name: b for name, b in live.items() if b.is_floating_point()}

    def _live(
        self, step: int, saved: Container[str] = ()
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(live tensors by name, scalars by name) of trained parameters, buffers and optimizers.

        What all ranks share has its own name. What a rank has alone begins with `rankN.`: it is
        read back if as many ranks resume, else the shared value is.
        """
        tensors = _named("extra.", self.extra) | self.strategy.tensors(saved)
        if self.strategy.agreed:
            tensors |= _named("model.", self.strategy.agreed.tensors)
        if self.ema:
            tensors |= _named("ema.", self.ema.tensors)
        trained = _named("model.", self.buffers)
        scalars: dict[str, Any] = {}
        elsewhere = self.strategy.gather(self.trainable, step)
        if elsewhere is not None:
            return tensors | trained | elsewhere, scalars
        trained |= {f"model.{name}": p.detach() for name, p in self.trainable.items()}
        name_of = {p: name for name, p in self.trainable.items()}
        for optimizer in self.optimizers:
            for parameter, key, value in state_tensors(optimizer):
                into: dict[str, Any] = trained if isinstance(value, torch.Tensor) else scalars
                into[f"optimizer.{name_of[parameter]}.{key}"] = value
        if prefix := self.strategy.prefix:
            trained = {prefix + name: local_part(value) for name, value in trained.items()}
        return tensors | trained, scalars

    def _to_save(self, step: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """As `_live`, with the mean of all ranks' statistics, and each rank's own for a resume on
        as many ranks.
        """
        tensors, scalars = self._live(step)
        own = self._statistics()
        if self.accelerator.num_processes > 1 and own and not self.strategy.apart:
            # saving changes nothing in the live model
            mean = {name: value.clone() for name, value in own.items()}
            average_buffers(self.accelerator, [mean])
            tensors |= mean | _named(f"rank{self.accelerator.process_index}.", own)
        return tensors, scalars

    def save(self, state: TrainState) -> None:
        """Write `checkpoint-<step>`, commit it, then prune old ones: see `_prune`. Every rank calls
        this.

        Temporary sibling, all ranks' shards, their agreement, hashes into the manifest, fsync,
        rename, fsync of the parent, prune. Killed at any point, the checkpoints before it are what
        they were. With --async_save all but a copy to the host's memory happens in the background:
        see `wait`.

        Raises:
            CheckpointError: on all ranks, naming the rank that failed, here or in the save before,
                if that was in the background; nothing saved before is lost.
        """
        failed: CheckpointError | None = None
        try:
            self.wait()
        except CheckpointError as error:
            failed = error  # still try this save
        if state.step > 0 and self.latest != self.run_dir / f"checkpoint-{state.step:06d}":
            self._save(state)
        if failed is not None:
            self.wait()
            raise failed

    def _save(self, state: TrainState, prefix: str = "") -> None:
        folder = self.run_dir / f"{prefix}checkpoint-{state.step:06d}"
        temporary = self.run_dir / f".tmp-checkpoint-{state.step:06d}"
        if self.accelerator.is_main_process:
            with contextlib.suppress(OSError):  # reported below: writing into it fails
                new_folder(temporary)
        self.accelerator.wait_for_everyone()
        reshard(self.model)  # an evaluation may have left weights gathered
        tensors, scalars = self._to_save(state.step)
        content = dataclasses.asdict(state) | {"scalars": scalars}
        if self.accelerator.scaler is not None:  # fp16's loss scale
            content["scaler"] = self.accelerator.scaler.state_dict()
        manifest = {
            "run": self.run,
            "step": state.step,
            "best_step": state.best_step,
            "started_from": state.started_from,
            "world_size": self.accelerator.num_processes,
            "strategy": launch.strategy(self.accelerator),
            "held": self.strategy.shares(self.model, self.optimizers),
            "versions": versions(),
            "replicas": self.strategy.apart,
            "data": self.data,
            "base": self.base,
            "settings": self.settings,
        }
        if self.in_background:
            staged = self.stager.stage(tensors, non_blocking=self.on_gpu)
            if self.on_gpu:  # once for all copies
                torch.cuda.current_stream().synchronize()
            self.pending = self.thread.submit(self._write, folder, staged, content, manifest)
        else:
            self._write(folder, tensors, content, manifest)

    def save_and_load(self, state: TrainState) -> int:
        """Save, verify, read back and delete, to see whether it works. Returns bytes on disk. Every
        rank calls this.
        """
        prefix = ".tmp-gone-"  # resume ignores this prefix; the next start deletes leftovers
        self._save(state, prefix)
        self.wait()
        folder = self.run_dir / f"{prefix}checkpoint-{state.step:06d}"
        size: int = on_main(lambda: sum(file["size"] for file in verify(folder)["files"].values()))
        self._load(folder, {}, state.step)
        self.latest = None
        self.accelerator.wait_for_everyone()
        on_main(lambda: remove(folder))
        return size

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
        tensors: dict[str, Any],
        content: dict[str, Any],
        manifest: dict[str, Any],
    ) -> None:
        name = f"checkpoint-{manifest['step']:06d}"
        temporary = folder.with_name(f".tmp-{name}")
        rank = self.accelerator.process_index
        held = self._gather(pieces_of(tensors))
        files: dict[str, Any] = {}
        problem = ""
        try:
            if temporary.is_symlink():
                raise OSError(f"{temporary} is a link")
            # where the main rank could not, or on a disk that is not shared
            temporary.mkdir(parents=True, exist_ok=True)
            shard = f"rank-{rank}.safetensors"
            files[shard] = write(temporary / shard, tensors, share_out(held)[rank])
            faults.point("save.shard")
        except Exception as error:
            problem = f"rank {rank}: {first_line(error)}"
        reports = self._gather((problem, files))
        problems = [p for p, _ in reports if p]
        if not problems and rank == 0:
            try:
                files = {name: fact for _, part in reports for name, fact in part.items()}
                write_manifest(temporary, content, manifest, files)
                if folder.exists() and not self._wrote(folder):
                    aside = folder.with_name(f"other-{name}-{secrets.token_hex(4)}")
                    folder.rename(aside)
                    print_main(
                        f"warning: {name} was not written by this run, and "
                        f"is called {aside.name} now"
                    )
                commit(temporary, folder)
            except OSError as error:
                problems = [f"rank 0: {first_line(error)}"]
            else:
                # this one is whole
                self.passed_over = [old for old in self.passed_over if old != folder]
                try:
                    self._prune(manifest["step"], manifest["best_step"])
                except OSError as error:
                    print_main(
                        f"warning: {name} is saved, but an older one could not be removed "
                        f"({first_line(error)})"
                    )
                if folder.name == name:  # and not in a rehearsal
                    print_main(
                        f"saved {name}"
                        + ", the best so far" * (manifest["best_step"] == manifest["step"])
                    )
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

    def _prune(self, step: int, best: int) -> None:
        """Keep the newest --save_total_limit up to `step`, and that of step `best`. Later ones are
        of a run that was taken back, or damaged.

        What this run has not written, as its manifest says, stays. One that was found damaged does
        not count, and goes.
        """
        own = [
            folder
            for folder in checkpoints(self.run_dir)
            if folder not in self.passed_over or _step_of(folder) <= step
        ]
        own = [folder for folder in own if self._wrote(folder)]
        behind = [p for p in own if _step_of(p) <= step and p not in self.passed_over]
        kept = [*behind[-self.options.save_total_limit :], self.run_dir / f"checkpoint-{best:06d}"]
        for old in (p for p in own if p not in kept):
            faults.point("save.prune")
            remove(old)

    def _wrote(self, folder: Path) -> bool:
        return run_of(folder) == self.run

    def resume(self, named: Path | None = None) -> TrainState:
        """Load the newest valid checkpoint of the run, or the one named, or none. Every rank calls
        this.

        A checkpoint of another folder is where the run starts. One of its own takes the run back to
        that step. In both cases, once the run has saved again, the same command continues from its
        own newest checkpoint.

        Args:
            named: a checkpoint's folder.

        Raises:
            CheckpointError: the one named is damaged or missing, or all of the run's are damaged.
            ConfigError: it was made with other data or other settings that change what is learned.
            NotNow: the file system gives an error.
        """
        folder = self._choose(named)
        begins = folder is None or folder.parent != self.run_dir
        if folder is None:
            return TrainState()
        faults.point("resume.verified")
        try:
            content = json.loads((folder / STATE).read_text(encoding="utf-8"))
            scalars = content.pop("scalars")
            scaler = content.pop("scaler", None)
            state = TrainState(**content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(f"{folder}: {STATE} cannot be read") from None
        self._load(folder, scalars, state.step)
        if begins:  # the checkpoint of another run: drop its tracker id and scores
            state.tracker_run_id = ""
            state.started_from = ""
            state.interval = []
            state.forget_scores()
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
        """`verify`, with the files shared among the ranks; all of them raise alike. Every rank
        calls this.
        """
        problem = None
        manifest = {}
        try:
            manifest = verify(
                folder, self.accelerator.process_index, self.accelerator.num_processes
            )
        except CheckpointError as error:
            problem = error
        problems = [problem for problem in gather_object([problem]) if problem is not None]
        for problem in problems:
            if isinstance(problem, NoAnswer):
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
            on_main(partial(self._require_compatible, named, manifest))
            return named.resolve()
        for folder in reversed(own):
            try:
                manifest = self._verify(folder)
                if manifest["run"] != self.run:
                    raise CheckpointError(f"{folder}: another run has written it")
            except CheckpointError as error:
                print_main(f"warning: {error}" + "; the one before it is used" * (folder != own[0]))
                self.passed_over.append(folder)
                continue
            on_main(partial(self._require_compatible, folder, manifest))
            if named is not None and folder != named.resolve():
                print_main(
                    f"--resume_from_checkpoint {named} is where this run began; it continues from "
                    f"its own {folder.name}"
                )
            return folder
        if own:
            raise CheckpointError(
                f"{self.run_dir}: none of its {len(own)} checkpoints is complete and written by "
                "it; to start anew, choose another --output_dir"
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

    def _require_compatible(self, folder: Path, manifest: dict[str, Any]) -> None:
        own = {
            "data": self.data,
            "base": self.base,
            "settings": self.settings,
            "strategy": launch.strategy(self.accelerator),
            "replicas": self.strategy.apart,
        }
        saved = TensorReader(folder).pieces
        fits = all(
            f"model.{name}" in saved
            # ZeRO-3 leaves an empty tensor
            and saved[f"model.{name}"][0][1].shape == tuple(getattr(p, "ds_shape", p.shape))
            for name, p in self.trainable.items()
        )
        allowed = set(self.options.allow_changed)
        require_compatible(folder, manifest, own, free=self.free, allowed=allowed, fits=fits)

    def _drop_unsaved(
        self, saved: Iterable[str], tensors: dict[str, torch.Tensor], scalars: Iterable[str]
    ) -> None:
        """Drop optimizer state that a checkpoint lacks: of parameters that never had a gradient, or
        of another --optim.
        """
        prefix = self.strategy.prefix
        before = f"{prefix}optimizer."
        states = {*saved, *(prefix + name for name in scalars)}
        with_state = {
            name.removeprefix(before).rpartition(".")[0]
            for name in states
            if name.startswith(before)
        }
        # 8 bits
        with_state |= {
            name.removesuffix(part) for name in with_state for part in (".exp_avg", ".exp_avg_sq")
        }
        name_of = {p: name for name, p in self.trainable.items()}
        new = []
        for optimizer in self.optimizers:
            keys: dict[nn.Parameter, list[str]] = {}
            for parameter, key, _ in state_tensors(optimizer):
                keys.setdefault(parameter, []).append(f"{before}{name_of[parameter]}.{key}")
            for parameter, of_it in keys.items():
                name = name_of[parameter]
                if not all(key in states for key in of_it) and f"{prefix}model.{name}" in states:
                    del optimizer.state[parameter]
                    for key in of_it:
                        tensors.pop(key, None)
                    new += [name] * (name in with_state)
        if new:
            print_main(
                f"warning: {len(new)} parameters, such as {new[0]}, begin "
                "with a new optimizer state"
            )

    def _own_statistics(self, saved: Iterable[str]) -> dict[str, torch.Tensor]:
        """This rank's own statistics, by name in a checkpoint of these names, if the world size is
        unchanged.
        """
        if (
            len({name.partition(".")[0] for name in saved if name.startswith("rank")})
            != self.accelerator.num_processes
        ):
            return {}
        return _named(f"rank{self.accelerator.process_index}.", self._statistics())

    def load_best(self, step: int) -> bool:
        """Load the best checkpoint, that of `step`, at the end. False if it is damaged. Every rank
        calls this.
        """
        folder = self.run_dir / f"checkpoint-{step:06d}"
        try:
            self._verify(folder)
        except CheckpointError as error:
            print_main(f"warning: {error}; final/ holds the last weights, not the best")
            return False
        scalars = json.loads((folder / STATE).read_text(encoding="utf-8"))["scalars"]
        self._load(folder, scalars, step)
        return True

    def _load(self, folder: Path, scalars: dict[str, Any], step: int) -> None:
        reader = TensorReader(folder)
        saved = reader.pieces

        def read(tensors: dict[str, torch.Tensor]) -> None:
            problem = ""
            try:
                reader.read(tensors)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                problem = first_line(error)
            if problems := [problem for problem in self._gather(problem) if problem]:
                raise CheckpointError(
                    f"{folder}: does not fit this model and optimizer ({problems[0]})"
                )

        if self.strategy.scatter(self.trainable, step, read):
            read(_named("model.", self.buffers))
            return
        if self.strategy.agreed and reader.manifest["replicas"] != self.strategy.apart:
            # as --allow_changed replicas allows
            read(_named("model.", self.strategy.agreed.tensors) | self.strategy.tensors())
            self.strategy.begin_from_agreed()
            print_main("each replica begins at the agreed weights, with a new optimizer")
            return
        for optimizer in self.optimizers:
            optim.fill_state(optimizer)
        tensors, _ = self._live(step, saved)
        self._drop_unsaved(saved, tensors, scalars)
        begins = not any(name.startswith("ema.") for name in saved)
        if begins:
            tensors = {
                name: value for name, value in tensors.items() if not name.startswith("ema.")
            }
        if not self.strategy.apart and (own := self._own_statistics(saved)):
            tensors = {
                name: value for name, value in tensors.items() if name not in self._statistics()
            } | own
        read(tensors)
        if self.ema and begins:
            self.ema.begin()
            print_main(f"the moving average begins at the weights of step {step}")
        for optimizer in self.optimizers:
            for name, parameter in self.trainable.items():
                for key in optimizer.state.get(parameter, {}):
                    if (scalar := f"optimizer.{name}.{key}") in scalars:
                        optimizer.state[parameter][key] = scalars[scalar]


def _named(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in tensors.items()}


def _step_of(folder: Path) -> int:
    return int(folder.name.split("-")[1])
