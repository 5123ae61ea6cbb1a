"""Checkpoint folders: found, verified, compared with the run that reads them."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from shared.process import faults
from shared.process.errors import CleanExit, ConfigError
from shared.process.files import digest
from shared.process.printing import note

MANIFEST = "MANIFEST.json"
STATE = "trainer_state.json"
FORMAT = 5
FIXED = {"global_batch_size", "mix_weights"}  # settings that no --allow_changed allows
NAME = re.compile(r"checkpoint-(\d{6,})")


class CheckpointError(CleanExit):
    """A checkpoint cannot be written, or the one asked for cannot be read."""

    exit_code = 3


class NoAnswer(CheckpointError):
    """The file system gives an error where it should give a file: the file may be good."""


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first; anything else in it is not looked at."""
    found = [
        (int(m[1]), p) for p in run_dir.iterdir() if (m := NAME.fullmatch(p.name)) and p.is_dir()
    ]
    return [p for _, p in sorted(found)]


def run_of(folder: Path) -> str | None:
    """The number of the run that wrote a checkpoint; None where no manifest tells."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["run"])
    return None


def settings_of(run_dir: Path, named: Path | None) -> tuple[Path, dict[str, Any]]:
    """(the checkpoint that a run continues from, its settings); no settings where the run begins,
    or where no manifest can be read.

    Args:
        named: a checkpoint to begin from, where the run has none itself.
    """
    for folder in [*reversed(checkpoints(run_dir)), *([named] if named else [])]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            return folder, dict(manifest["settings"])
    return run_dir, {}


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
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{folder}: format {manifest['format']!r}, but this version reads only {FORMAT}"
            )
        files = {
            name: {"xxh3_128": fact["xxh3_128"], "size": fact["size"]}
            for name, fact in manifest["files"].items()
        }
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
        raise CheckpointError(f"{folder}: holds step {manifest['step']}: was it renamed?")
    for name, expected in list(files.items())[part::parts]:
        path = folder / name
        try:
            right = path.is_file() and path.stat().st_size == expected["size"]
            if not right or digest(path) != expected:
                raise CheckpointError(
                    f"{folder}: {name} is {'damaged' if path.is_file() else 'missing'}"
                )
        except OSError as error:
            raise NoAnswer(f"{folder}: {name} cannot be read ({error.strerror})") from None
    return manifest


def write_manifest(
    folder: Path,
    content: dict[str, Any],
    manifest: dict[str, Any],
    files: dict[str, dict[str, Any]],
) -> None:
    """Write a checkpoint's state and, last, its manifest. Call on one rank, after all ranks have
    written their shards.

    Args:
        content: the state, JSON.
        manifest: facts about the run.
        files: checksum and size of all shards.

    Raises:
        OSError: a file cannot be written, or a shard is not seen here.
    """
    (folder / STATE).write_text(json.dumps(content, indent=1))
    files |= {STATE: digest(folder / STATE)}
    manifest = {"format": FORMAT} | manifest | {"files": dict(sorted(files.items()))}
    (folder / MANIFEST).write_text(
        json.dumps(manifest | {"sha256": _digest_of(manifest)}, indent=1)
    )
    faults.point("save.manifest")
    for name, fact in files.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != fact["size"]:
            raise OSError(
                f"rank 0 does not see {name}, which another rank wrote: is the folder shared?"
            )


def _digest_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# differences that go without saying
UNTOLD = {"output_dir", "resume_from_checkpoint", "allow_changed"}


def require_compatible(
    folder: Path,
    manifest: dict[str, Any],
    own: dict[str, Any],
    *,
    free: frozenset[str],
    allowed: set[str],
    fits: bool,
) -> None:
    """Print which settings differ from a checkpoint's, and refuse those that change what is
    learned.

    Args:
        own: data, base, settings and strategy of this run, as the manifest has them.
        free: settings that change nothing that is learned.
        allowed: what `--allow_changed` names.
        fits: whether the checkpoint's weights have the names and shapes of this run's.

    Raises:
        ConfigError: with the settings and what to do.
    """
    if manifest.get("data") != own["data"] and "data" not in allowed:
        raise ConfigError(
            f"{folder} belongs to a run on other data: use the same data, another --output_dir (to "
            "train its final/ further: docs/after_training.md), or --allow_changed data"
        )
    if manifest.get("base", own["base"]) != own["base"] and "base" not in allowed:
        raise ConfigError(
            f"{folder} belongs to a run on other base weights, which it does not contain: use the "
            "same base, another --output_dir, or --allow_changed base"
        )
    if (before := manifest["replicas"] or "") != own["replicas"] and "replicas" not in allowed:
        raise ConfigError(
            f"{folder} was saved by {before or 'no replicas'} that train apart, and this launch "
            f"has {own['replicas'] or 'none'}: launch as many, or give --allow_changed replicas, "
            "which starts from the agreed weights and drops the weights and optimizer of each"
        )
    if unknown := sorted(allowed - set(own["settings"]) - {"data", "base", "replicas"}):
        raise ConfigError(
            f"--allow_changed {' '.join(unknown)}: no setting of that name; "
            "names have spaces between them"
        )
    lines = changes(manifest.get("settings", {}), own["settings"])
    refuse_changes(folder, lines, free | allowed, fits=fits)
    if manifest.get("strategy") != own["strategy"]:
        lines["strategy"] = f"ran on {manifest.get('strategy')}, now on {own['strategy']}"
    old = manifest.get("versions", {})
    new = versions()
    lines |= {
        name: f"{name} {old[name]}, now {new[name]}"
        for name in old.keys() & new
        if old[name] != new[name]
    }
    told = [line for name, line in lines.items() if name not in UNTOLD]
    if told:
        note(f"settings that differ from those of {folder.name}:", *(f"  {line}" for line in told))


def changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """The settings that differ, by name: what each was and is."""
    return {
        name: f"{name} was {before[name]!r}, now {value!r}"
        for name, value in now.items()
        if name in before and not _same(before[name], value)
    }


def refuse_changes(
    folder: Path, changed: dict[str, str], allowed: frozenset[str], *, fits: bool | None = None
) -> None:
    """Raise ConfigError if settings differ from a checkpoint's that may not.

    Args:
        changed: see `changes`.
        allowed: names of settings that may differ.
        fits: whether its weights fit this run's model; None where that is not known yet.
    """
    if fixed := sorted(changed.keys() & FIXED):
        raise ConfigError(
            f"{folder}: --{fixed[0]} cannot change within a run, since samples would be repeated "
            "or skipped: train its final/ further in another --output_dir"
        )
    if refused := sorted(changed.keys() - allowed):
        condition = "" if fits else ", if its weights fit this model,"
        allow = f", or{condition} --allow_changed {' '.join(refused)}"
        raise ConfigError(
            f"{folder} belongs to a run that learns something else "
            f"({'; '.join(changed[name] for name in refused)}): use the same settings, another "
            f"--output_dir{'; its weights do not fit this model' if fits is False else allow}"
        )


def _same(one: Any, other: Any) -> bool:
    """Whether settings are equal. Secrets are masked in both: those of the environment by what was
    in it at each start.
    """
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if not isinstance(one, str) or not isinstance(other, str):
        return bool(one == other)
    pairs = ((one, other), (other, one))
    return any(re.fullmatch(".*".join(map(re.escape, a.split("***"))), b, re.S) for a, b in pairs)


def versions() -> dict[str, str]:
    packages = ("torch", "accelerate", "transformers", "peft", "torchao")  # torchao may be missing
    return {
        name: importlib.metadata.version(name)
        for name in packages
        if importlib.util.find_spec(name)
    }
