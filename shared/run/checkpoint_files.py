"""Checkpoint folders: found, verified, compared with the run that reads them."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from shared.config import parse as configs
from shared.process import faults
from shared.process.errors import CleanExit, ConfigError, NotNow
from shared.process.files import digest
from shared.process.printing import note, print_main

MANIFEST = "MANIFEST.json"
FORMAT = 7
FIXED = {"global_batch_size", "mix_weights"}  # settings that no --allow_changed allows
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


def require_compatible(
    folder: Path, before: dict[str, Any], now: dict[str, Any], config: Any
) -> None:
    """Print which settings differ from a checkpoint's, and refuse those that change what is
    learned.

    Args:
        before, now: the checkpoint's manifest and this run's: data, base, replicas, settings,
            strategy, versions.
        config: the template's, whose `--allow_changed` names what may differ all the same.

    Raises:
        ConfigError: with the settings and what to do.
    """
    others = {
        "data": "other data",
        "base": "other base weights, which it does not contain",
    }
    if before["replicas"] != now["replicas"]:
        raise ConfigError(
            f"{folder} is of {before['replicas'] or 'no replicas'} that train apart, and this "
            f"launch has {now['replicas'] or 'none'}: use as many, or another --output_dir"
        )
    for name, other in others.items():
        if before[name] != now[name] and name not in config.checkpoint.allow_changed:
            raise ConfigError(
                f"{folder} belongs to a run on {other}: use the same, another --output_dir (to "
                f"train its final/ further: docs/after_training.md), or --allow_changed {name}"
            )
    refuse_changes(folder, before["settings"], now["settings"], config)
    lines = _changes(before["settings"], now["settings"])
    facts = _changes(before, now)
    lines |= {name: facts[name] for name in ("strategy", "versions") if name in facts}
    if lines:
        note(f"settings that differ from those of {folder.name}:", *lines.values())


def _changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """The settings that differ, by name: what each was and is."""
    return {
        name: f"{name} was {before[name]!r}, now {value!r}"
        for name, value in now.items()
        if name in before and before[name] != value
    }


def refuse_changes(folder: Path, before: dict[str, Any], now: dict[str, Any], config: Any) -> None:
    """Raise ConfigError if settings differ from a checkpoint's that change what is learned and
    that `--allow_changed` does not name.
    """
    changed = _changes(before, now)
    allowed = configs.free_fields(type(config)).union(config.checkpoint.allow_changed)
    if fixed := sorted(changed.keys() & FIXED):
        raise ConfigError(
            f"{folder}: --{fixed[0]} cannot change within a run, since samples would be repeated "
            "or skipped: train its final/ further in another --output_dir"
        )
    if refused := sorted(changed.keys() - allowed):
        raise ConfigError(
            f"{folder} belongs to a run that learns something else "
            f"({'; '.join(changed[name] for name in refused)}): use the same settings, another "
            f"--output_dir, or, if its weights fit this model, --allow_changed {' '.join(refused)}"
        )
