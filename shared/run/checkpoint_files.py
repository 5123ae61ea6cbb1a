"""Checkpoint folders: found and verified."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from shared.process import faults
from shared.process.errors import CleanExit, ConfigError, NotNow
from shared.process.files import digest
from shared.process.printing import print_main

MANIFEST = "MANIFEST.json"
FORMAT = 7
NAME = re.compile(r"checkpoint-(\d{6,})")


class CheckpointError(CleanExit):
    """A checkpoint cannot be written, or the one asked for cannot be read."""

    exit_code = 3


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first; anything else in it is not looked at."""
    found = [
        (int(m[1]), p) for p in run_dir.iterdir() if (m := NAME.fullmatch(p.name)) and p.is_dir()
    ]
    return [p for _, p in sorted(found)]


def run_folder(text: str, *, with_checkpoints: bool = True) -> Path:
    """The run's folder that a command names; if that is a place that a run is mirrored to, a copy
    in the cache.
    """
    if "://" in text or any(Path(text).glob("writer-*")):
        from shared.extras.mirror.place import fetched

        return fetched(text, with_checkpoints=with_checkpoints)
    return Path(text)


def find(run_dir: Path, named: Path | None) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole checkpoint of a run and its manifest; None where the run begins. Call on
    one rank.

    Args:
        named: a checkpoint to begin from, where the run has none itself.

    Raises:
        ConfigError: it is the run's own, so the same command would take the run back to it again
            and again.
        CheckpointError: the one named is damaged or missing, or all of the run's are damaged.
        NotNow: the file system gives an error.
    """
    if named and named.resolve().parent == run_dir:
        raise ConfigError(
            f"--resume_from_checkpoint {named} is this run's own: to go back to it, delete the "
            "later ones and drop the flag, or choose another --output_dir"
        )
    own = checkpoints(run_dir)
    for folder in reversed(own):
        try:
            return folder, verify(folder)
        except CheckpointError as error:
            print_main(f"warning: {error}" + "; the one before it is used" * (folder != own[0]))
    if own:
        raise CheckpointError(
            f"{run_dir}: none of its {len(own)} checkpoints is complete; to start anew, choose "
            "another --output_dir"
        )
    return (named.resolve(), verify(named.resolve())) if named else None


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, after every file's size and checksum was compared with it.

    Raises:
        CheckpointError: what is wrong with which file.
        NotNow: the file system gives an error where it should give a file, which may be good.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{folder}: format {manifest['format']!r}, but this version reads only {FORMAT}"
            )
        if (named := NAME.fullmatch(folder.name)) and int(named[1]) != manifest["step"]:
            raise CheckpointError(f"{folder}: holds step {manifest['step']}: was it renamed?")
        if manifest.pop("sha256", None) not in (None, _digest_of(manifest)):
            raise ValueError
        if others := {path.name for path in folder.glob("*.safetensors")} - {*manifest["files"]}:
            raise CheckpointError(f"{folder}: {min(others)} is of another checkpoint: remove it")
        for name, expected in manifest["files"].items():
            if digest(folder / name) != expected:
                raise CheckpointError(f"{folder}: {name} is damaged")
    except FileNotFoundError as error:
        raise CheckpointError(f"{error.filename} is missing: not a complete checkpoint") from None
    except OSError as error:
        raise NotNow(f"{folder}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{folder}: {MANIFEST} is damaged") from None
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a checkpoint's manifest. Call on one rank, after all ranks have written their shards.

    Args:
        manifest: facts about the run, its state, and of all files checksum and size.
    """
    manifest = {"format": FORMAT} | manifest
    manifest["sha256"] = _digest_of(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    faults.point("save.manifest")


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
