"""Checkpoint folders: found, verified, read without running code."""

import contextlib
import hashlib
import importlib.metadata
import json
import pickle
import re
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shared.process import faults
from shared.process.errors import CleanExit, ConfigError, first_line
from shared.process.files import digest
from shared.process.printing import note

MANIFEST = "MANIFEST.json"
STATE = "trainer_state.json"
NAME = re.compile(r"checkpoint-(\d{6,})")


class CheckpointError(CleanExit):
    """A checkpoint cannot be written, or the one asked for cannot be read."""

    exit_code = 3


class NoAnswer(CheckpointError):
    """The file system gives an error where it should give a file: the file may be good."""


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first; anything else in it is not looked at."""
    found = [(int(m[1]), p) for p in run_dir.iterdir() if (m := NAME.fullmatch(p.name)) and p.is_dir()]
    return [p for _, p in sorted(found)]


def run_of(folder: Path) -> str | None:
    """The number of the run that wrote a checkpoint, "" of one before runs had any; None where no manifest tells."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        return str(json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("run", ""))
    return None


def verify(folder: Path, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """The manifest of a checkpoint, after every file's size and checksum was compared with it.

    Args:
        part, parts: look at every `parts`-th file only, from this one on: ranks share the work.

    Raises:
        CheckpointError: what is wrong with which file.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest.pop("sha256") != _digest_of(manifest):
            raise ValueError
        files = {}
        for name, fact in manifest["files"].items():
            kind = "sha256" if "sha256" in fact else "xxh3_128"  # the first is of older checkpoints
            files[str(name)] = {kind: fact[kind], "size": fact["size"]}
        if any(Path(name).name != name or not name.isprintable() for name in files):
            raise ValueError
        if type(manifest["step"]) is not int or not isinstance(manifest.get("settings", {}), dict):
            raise ValueError
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no {MANIFEST}, not a complete checkpoint") from None
    except OSError as error:
        raise NoAnswer(f"{folder}: {MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged") from None
    if (named := NAME.fullmatch(folder.name)) and int(named[1]) != manifest["step"]:
        raise CheckpointError(f"{folder}: of step {manifest['step']}, was it renamed?")
    for name, expected in list(files.items())[part::parts]:
        path = folder / name
        try:
            right = path.is_file() and path.stat().st_size == expected["size"]
            if not right or digest(path, next(iter(expected))) != expected:
                raise CheckpointError(f"{folder}: {name} is {'damaged' if path.is_file() else 'missing'}")
        except OSError as error:
            raise NoAnswer(f"{folder}: {name} cannot be read ({error.strerror})") from None
    return manifest


def write_manifest(
    folder: Path, content: dict[str, Any], manifest: dict[str, Any], files: dict[str, dict[str, Any]]
) -> None:
    """Write a checkpoint's state and, last, its manifest. Call on one rank, after all ranks have written their shards.

    Args:
        content: the state, JSON.
        manifest: facts about the run.
        files: checksum and size of all shards.

    Raises:
        OSError: a file cannot be written, or a shard is not seen here.
    """
    (folder / STATE).write_text(json.dumps(content, indent=1))
    files |= {name: digest(folder / name) for name in (STATE, ".metadata")}
    manifest |= {"files": dict(sorted(files.items()))}
    (folder / MANIFEST).write_text(json.dumps(manifest | {"sha256": _digest_of(manifest)}, indent=1))
    faults.point("save.manifest")
    for name, fact in files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != fact["size"]:
            raise OSError(f"{name}, which another rank has written, is not seen here: is the folder shared?")


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


_DESCRIPTIONS = {  # all that DCP's index of tensors is made of, besides their types
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
}


class TensorReader(dcp.FileSystemReader):
    """DCP's `.metadata` is a pickle: read it with an unpickler that knows DCP's own plain classes and runs nothing."""

    class _Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            module = {"pathlib._local": "pathlib"}.get(module, module)  # what Python 3.13 calls it
            if name in _DESCRIPTIONS.get(module, ()):
                return super().find_class(module, name)
            if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
                return found
            if (module, name) == ("builtins", "getattr"):  # how some releases of Python 3.11 pickle a member of an Enum
                return _enum_member
            raise CheckpointError(f".metadata names {module}.{name}, which no checkpoint of tensors holds")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = self._Unpickler(file).load()
            foreign = [k for k, v in metadata.state_dict_metadata.items() if not isinstance(v, TensorStorageMetadata)]
            verified = json.loads((path.parent / MANIFEST).read_text(encoding="utf-8"))["files"]
            elsewhere = {where.relative_path for where in metadata.storage_data.values()} - set(verified)
        except CheckpointError as error:
            raise CheckpointError(f"{path.parent}: {error}") from None
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise CheckpointError(f"{path}: cannot be read ({type(error).__name__})") from None
        if foreign:
            raise CheckpointError(f"{path}: {foreign[0]} is not a tensor")
        if elsewhere:
            raise CheckpointError(f"{path}: reads {min(elsewhere)!r}, which is no file of this checkpoint")
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
    metadata = TensorReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that torch.distributed is not used
        dcp.load(tensors, storage_reader=TensorReader(folder), no_dist=True)
    return tensors


def read_weights(folder: Path, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The model's tensors in a checkpoint by their own names, whole, on the CPU. Call on one rank."""
    tensors = read_tensors(folder, "model.")
    cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    return {name.removeprefix("model."): value for name, value in cast.items()}


UNTOLD = {"output_dir", "resume_from_checkpoint", "allow_changed"}  # differences that go without saying


def require_compatible(
    folder: Path, manifest: dict[str, Any], own: dict[str, Any], *, free: frozenset[str], allowed: set[str]
) -> None:
    """Print which settings differ from a checkpoint's, and refuse those that change what is learned.

    Args:
        own: data, base, settings and strategy of this run, as the manifest has them.
        free: settings that change nothing that is learned.
        allowed: what `--allow_changed` names.

    Raises:
        ConfigError: with the settings and what to do.
    """
    if manifest.get("data") != own["data"] and "data" not in allowed:
        raise ConfigError(
            f"{folder} belongs to a run on other data: use the same, another --output_dir, or --allow_changed data"
        )
    if manifest.get("base", own["base"]) != own["base"] and "base" not in allowed:
        raise ConfigError(
            f"{folder} belongs to a run on other base weights, of which it holds none itself: use the same, another "
            "--output_dir, or --allow_changed base"
        )
    if (before := manifest.get("replicas", 0)) != own["replicas"] and "replicas" not in allowed:
        raise ConfigError(
            f"{folder} is of {before} replicas that train apart, and here are {own['replicas']}: launch as many, or give "
            "--allow_changed replicas, which begins at the agreed weights and loses each replica's own and its optimizer"
        )
    if unknown := sorted(allowed - set(own["settings"]) - {"data", "base", "replicas"}):
        raise ConfigError(f"--allow_changed {' '.join(unknown)}: no setting of that name; names have spaces between them")
    before = manifest.get("settings", {})
    changed = {k: (before[k], v) for k, v in own["settings"].items() if k in before and not _same(before[k], v)}
    lines = {name: f"{name} was {old!r}, now {new!r}" for name, (old, new) in changed.items()}
    if refused := sorted(set(lines) - free - allowed):
        raise ConfigError(
            f"{folder} belongs to a run that learns something else ({'; '.join(lines[n] for n in refused)}): use the "
            f"same settings, another --output_dir, or --allow_changed {' '.join(refused)}"
        )
    precision = [str(text).rsplit(", ", 1)[-1] for text in (manifest.get("strategy", ""), own["strategy"])]
    if precision[0] != precision[1]:
        lines["mixed_precision"] = f"mixed_precision was {precision[0]}, now {precision[1]}"
    told = [line for name, line in lines.items() if name not in UNTOLD]
    if told:
        note(f"settings that differ from those of {folder.name}:", *(f"  {line}" for line in told))


def _same(one: Any, other: Any) -> bool:
    """Whether settings are equal. Secrets are masked in both: those of the environment by what was in it at each start."""
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if not isinstance(one, str) or not isinstance(other, str):
        return bool(one == other)
    pairs = ((one, other), (other, one))
    return any(re.fullmatch(".*".join(map(re.escape, a.split("***"))), b, re.S) for a, b in pairs)


def innermost(error: BaseException) -> BaseException:
    """The true error: DCP wraps it once a rank."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def cause_of(error: BaseException) -> str:
    text = first_line(innermost(error))
    if "inline_container" in text:  # PyTorch's zip writer, which keeps the system's reason to itself
        text = f"a file could not be written whole: is the disk full, or a quota reached? ({text})"
    return text


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "accelerate", "transformers")}
