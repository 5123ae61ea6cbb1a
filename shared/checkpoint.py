"""Checkpoints that are whole or do not exist, and that any strategy and world size can resume.

One format for all strategies: torch distributed checkpoint (DCP) of the trainable parameters, the buffers and the
optimizer's state, tensors only. Everything else is JSON. Learning rate, order of samples and random numbers are
functions of the step, so the step is all that has to be remembered of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pickle
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shared import optim, zero
from shared.config import CleanExit, ConfigError
from shared.data import Window
from shared.launch import on_main, say, strategy
from shared.parallel import held
from shared.weights import WeightCopy, average_buffers, persistent_buffers

MANIFEST = "MANIFEST.json"
STATE = "trainer_state.json"
NAME = re.compile(r"checkpoint-(\d+)")


class CheckpointError(CleanExit):
    """A checkpoint cannot be written, or the one asked for cannot be read."""

    exit_code = 3


@dataclass
class TrainState:
    """What a run is besides tensors."""

    step: int = 0  # optimizer steps done
    targets: int = 0  # target tokens (or images) trained on
    samples: int = 0  # samples trained on
    tracker_run_id: str = ""  # so that a resumed run is the same run in W&B
    notes: dict[str, Any] = field(default_factory=dict)  # the template's own, JSON

    def advance(self, window: Window) -> None:
        """Count an optimizer step."""
        self.step += 1
        self.targets += window.num_targets
        self.samples += window.num_samples


# Folders ---------------------------------------------------------------------------------------------------------------


def open_run(accelerator: Accelerator, output_dir: Path | None, template: str) -> Path:
    """The run's folder, made if need be, the same on every rank. Every rank calls this.

    Raises:
        ConfigError: it cannot be written.
    """
    folder = on_main(lambda: (output_dir or Path("outputs") / template / time.strftime("%Y%m%d-%H%M%S")).resolve())
    probe = folder / f".write-test-{accelerator.process_index}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"--output_dir {folder}: cannot be written ({error.strerror})") from None
    return folder


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary sibling that becomes `folder`, replacing it, when the block ends without an error.

    All files are on disk before the rename, and the rename before the return. Call on one rank.
    """
    temporary = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    _commit(temporary, folder)


def _commit(temporary: Path, folder: Path) -> None:
    os.umask(umask := os.umask(0))
    for path in temporary.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~umask)  # safetensors writes for the owner alone
        _fsync(path)
    _fsync(temporary)
    if folder.exists():  # rename cannot replace a folder that is not empty
        old = folder.with_name(f".old-{folder.name}")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(folder)
    _fsync(folder.parent)


def _hash(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": path.stat().st_size}


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first; anything else in it is not looked at."""
    found = [(int(m[1]), p) for p in run_dir.iterdir() if (m := NAME.fullmatch(p.name)) and p.is_dir()]
    return [p for _, p in sorted(found)]


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, after every file's size and SHA-256 was compared with it.

    Raises:
        CheckpointError: what is wrong with which file.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = {str(name): (fact["sha256"], fact["size"]) for name, fact in manifest["files"].items()}
        if any(Path(name).name != name or not name.isprintable() for name in files):
            raise ValueError
        if type(manifest["step"]) is not int or not isinstance(manifest.get("identity", {}), dict):
            raise ValueError
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no {MANIFEST}, not a complete checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged") from None
    for name, (digest, size) in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size or _hash(path)["sha256"] != digest:
            raise CheckpointError(f"{folder}: {name} is {'damaged' if path.is_file() else 'missing'}")
    return manifest


# Tensors ---------------------------------------------------------------------------------------------------------------


class _TensorReader(dcp.FileSystemReader):
    """DCP's `.metadata` is a pickle: read it with an unpickler that knows DCP's own plain classes and runs nothing."""

    class _Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            plain = module.startswith("torch.distributed.checkpoint.") and "." not in name
            if plain or (module, name) in {("torch", "Size"), ("collections", "OrderedDict"), ("pathlib", "PosixPath")}:
                found = super().find_class(module, name)
                if isinstance(found, type):
                    return found
            if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
                return found
            if (module, name) == ("torch.serialization", "_get_layout"):
                return super().find_class(module, name)
            if (module, name) == ("builtins", "getattr"):  # how some releases of Python 3.11 pickle a member of an Enum
                return _enum_member
            raise CheckpointError(f".metadata names {module}.{name}, which no checkpoint of tensors holds")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = self._Unpickler(file).load()
            foreign = [k for k, v in metadata.state_dict_metadata.items() if not isinstance(v, TensorStorageMetadata)]
        except CheckpointError as error:
            raise CheckpointError(f"{path.parent}: {error}") from None
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise CheckpointError(f"{path}: cannot be read ({type(error).__name__})") from None
        if foreign:
            raise CheckpointError(f"{path}: {foreign[0]} is not a tensor")
        if metadata.storage_meta is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _enum_member(enum_class: Any, name: Any) -> Any:
    if isinstance(enum_class, type) and issubclass(enum_class, Enum) and isinstance(name, str):
        return enum_class[name]
    raise CheckpointError(f".metadata asks for {name!r} of {enum_class!r}, which no checkpoint of tensors holds")


def read_tensors(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose names begin with `prefix`, whole, on the CPU. Call on one rank."""
    metadata = _TensorReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=_TensorReader(folder), no_dist=True)
    return tensors


def read_weights(folder: Path, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The model's tensors in a checkpoint by their own names, whole, on the CPU. Call on one rank."""
    tensors = read_tensors(folder, "model.")
    cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    return {name.removeprefix("model."): value for name, value in cast.items()}


class Checkpointer:
    """Saves and resumes one run. Every rank makes one and calls its methods together.

    Args:
        accelerator: of the run.
        model, optimizers: as `accelerator.prepare` returned them.
        run_dir: where `checkpoint-000120/` and its siblings go.
        keep: how many checkpoints stay.
        identity: facts that decide which samples a step means; resuming under others is refused.
        copies: second sets of the model's weights that belong to the run (their moving average, the best ones).
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizers: list[Any],
        run_dir: Path,
        *,
        keep: int,
        identity: dict[str, Any],
        copies: Mapping[str, WeightCopy] | None = None,
    ) -> None:
        self.copies = dict(copies or {})
        self.accelerator, self.run_dir, self.keep, self.identity = accelerator, run_dir, keep, identity
        self.model = accelerator.unwrap_model(model)
        self.optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
        # After `fully_shard` a tied parameter has two names; `named_parameters` gives the first alone.
        self.trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

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

    def save(self, state: TrainState) -> Path:
        """Write `checkpoint-<step>`, commit it, then prune. Every rank calls this.

        Temporary sibling, all ranks' shards, their agreement, hashes into the manifest, fsync, rename, fsync of the
        parent, prune. Killed at any point, the checkpoints before it are what they were.

        Raises:
            CheckpointError: on all ranks, naming the rank that failed; nothing saved before is lost.
        """
        folder = self.run_dir / f"checkpoint-{state.step:06d}"
        temporary = folder.with_name(f".tmp-{folder.name}")
        rank = self.accelerator.process_index
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            with contextlib.suppress(OSError):  # reported below: writing into it fails
                temporary.mkdir()
        self.accelerator.wait_for_everyone()
        # One rank's buffers are written, so they are made one: BatchNorm statistics differ from rank to rank.
        average_buffers(self.accelerator, [persistent_buffers(self.model), *(c.buffers for c in self.copies.values())])
        tensors, scalars = self._state(state.step)
        files: dict[str, Any] = {}
        problem = ""
        try:
            dcp.save(tensors, storage_writer=dcp.FileSystemWriter(temporary), no_dist=not dist.is_initialized())
            files = {p.name: _hash(p) for p in temporary.glob(f"__{rank}_*")}
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            problem = f"rank {rank}: {_cause(error)}"
        reports = gather_object([(problem, files)])
        problems = [p for p, _ in reports if p]
        if not problems and rank == 0:
            try:
                content = dataclasses.asdict(state) | {"scalars": scalars}
                if self.accelerator.scaler is not None:  # fp16's loss scale
                    content["scaler"] = self.accelerator.scaler.state_dict()
                (temporary / STATE).write_text(json.dumps(content, indent=1))
                files = {name: fact for _, part in reports for name, fact in part.items()}
                files |= {name: _hash(temporary / name) for name in (STATE, ".metadata")}
                manifest = {"format": 1, "step": state.step, "files": dict(sorted(files.items()))}
                manifest |= {"world_size": self.accelerator.num_processes, "strategy": strategy(self.accelerator)}
                manifest |= {"held": held(self.accelerator, self.model, self.optimizers)}
                manifest |= {"versions": _versions(), "identity": self.identity}
                (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
                _commit(temporary, folder)
                self._prune(state.step)
            except OSError as error:
                problems = [f"rank 0: {_cause(error)}"]
        outcome: list[Any] = [problems]
        broadcast_object_list(outcome)
        if outcome[0]:
            if rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(f"{folder.name} could not be saved: {'; '.join(outcome[0])}")
        self.latest = folder
        return folder

    def _prune(self, step: int) -> None:
        """Keep the newest ones up to `step`. Later ones are of a run that was taken back to an earlier checkpoint."""
        own = checkpoints(self.run_dir)
        ahead = [p for p in own if int(p.name.split("-")[1]) > step]
        for old in ahead + [p for p in own if p not in ahead][: -self.keep]:
            shutil.rmtree(old)

    def resume(self, named: Path | None = None) -> TrainState:
        """Load the newest valid checkpoint of the run, or the one named, or none. Every rank calls this.

        A checkpoint named from outside the run's folder is where the run starts: once the run has checkpoints of its
        own, the same command continues from those.

        Raises:
            CheckpointError: the one named is damaged or missing, or all of the run's are damaged.
            ConfigError: it was made with other data, seed or global batch size.
        """
        folder = on_main(lambda: self._choose(named))
        if folder is None:
            return TrainState()
        content = json.loads((folder / STATE).read_text())
        self._load(folder, content.pop("scalars"), content["step"])
        scaler = content.pop("scaler", None)
        if scaler and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(scaler)
        state = TrainState(**content)
        self.latest = folder
        say(f"resumed from {folder} at step {state.step}")
        return state

    def _choose(self, named: Path | None) -> Path | None:
        own = checkpoints(self.run_dir)
        if named is not None and (not own or named.resolve().parent == self.run_dir):
            self._check_identity(named, verify(named))
            return named.resolve()
        for folder in reversed(own):
            try:
                manifest = verify(folder)
            except CheckpointError as error:
                say(f"warning: {error}; the one before it is used")
                continue
            self._check_identity(folder, manifest)
            return folder
        if own:
            raise CheckpointError(
                f"{self.run_dir}: none of its {len(own)} checkpoints is whole; choose another --output_dir"
            )
        return None

    def _check_identity(self, folder: Path, manifest: dict[str, Any]) -> None:
        before = manifest.get("identity", {})
        changed = [f"{k} was {before.get(k)!r}, now {v!r}" for k, v in self.identity.items() if before.get(k) != v]
        if changed:
            raise ConfigError(
                f"{folder} belongs to a run that learns something else ({'; '.join(changed)}): "
                "use the same settings, or another --output_dir"
            )

    def _load(self, folder: Path, scalars: dict[str, Any], step: int) -> None:
        def read(tensors: dict[str, torch.Tensor]) -> None:
            try:
                dcp.load(tensors, storage_reader=_TensorReader(folder), no_dist=not dist.is_initialized())
            except CleanExit:
                raise
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise CheckpointError(f"{folder}: does not fit this model and optimizer ({_cause(error)})") from None

        if zero.is_used(self.accelerator):
            zero.load(self.accelerator, self.trainable, step, read)
            read({f"model.{name}": b for name, b in persistent_buffers(self.model).items()})
            return
        for optimizer in self.optimizers:
            optim.fill_state(optimizer)
        tensors, _ = self._state(step)
        read(tensors)
        for optimizer in self.optimizers:
            for name, parameter in self.trainable.items():
                for key in optimizer.state.get(parameter, {}):
                    if f"optimizer.{name}.{key}" in scalars:
                        optimizer.state[parameter][key] = scalars[f"optimizer.{name}.{key}"]


def _cause(error: BaseException) -> str:
    """The innermost message of an error, in one line; DCP wraps the true one once a rank."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "accelerate", "transformers")}
