"""Checkpoint folders: found, verified, read without running code."""

from __future__ import annotations

import hashlib
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

from shared.process.errors import CleanExit
from shared.process.files import digest

MANIFEST = "MANIFEST.json"
NAME = re.compile(r"checkpoint-(\d+)")


class CheckpointError(CleanExit):
    """A checkpoint cannot be written, or the one asked for cannot be read."""

    exit_code = 3


class _NoAnswer(CheckpointError):
    """The file system gives an error where it should give a file: the file may be good."""


# Folders ---------------------------------------------------------------------------------------------------------------


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first; anything else in it is not looked at."""
    found = [(int(m[1]), p) for p in run_dir.iterdir() if (m := NAME.fullmatch(p.name)) and p.is_dir()]
    return [p for _, p in sorted(found)]


def verify(folder: Path, part: int = 0, parts: int = 1) -> dict[str, Any]:
    """The manifest of a checkpoint, after every file's size and SHA-256 was compared with it.

    Args:
        part, parts: look at every `parts`-th file only, from this one on: ranks share the work.

    Raises:
        CheckpointError: what is wrong with which file.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest.pop("sha256") != _digest_of(manifest):
            raise ValueError
        files = {str(name): (fact["sha256"], fact["size"]) for name, fact in manifest["files"].items()}
        if any(Path(name).name != name or not name.isprintable() for name in files):
            raise ValueError
        if type(manifest["step"]) is not int or not isinstance(manifest.get("settings", {}), dict):
            raise ValueError
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no {MANIFEST}, not a complete checkpoint") from None
    except OSError as error:
        raise _NoAnswer(f"{folder}: {MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged") from None
    for name, (expected, size) in list(files.items())[part::parts]:
        path = folder / name
        try:
            if not path.is_file() or path.stat().st_size != size or digest(path)["sha256"] != expected:
                raise CheckpointError(f"{folder}: {name} is {'damaged' if path.is_file() else 'missing'}")
        except OSError as error:
            raise _NoAnswer(f"{folder}: {name} cannot be read ({error.strerror})") from None
    return manifest


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# Tensors ---------------------------------------------------------------------------------------------------------------


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


class _TensorReader(dcp.FileSystemReader):
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that torch.distributed is not used
        dcp.load(tensors, storage_reader=_TensorReader(folder), no_dist=True)
    return tensors


def read_weights(folder: Path, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The model's tensors in a checkpoint by their own names, whole, on the CPU. Call on one rank."""
    tensors = read_tensors(folder, "model.")
    cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    return {name.removeprefix("model."): value for name, value in cast.items()}
