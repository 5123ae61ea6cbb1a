"""May this differ from the checkpoint that a run continues? One table, looked up before anything is
loaded.

| what | may it differ? |
|---|---|
| a setting whose type is `Free` (config/types.py), the launch, versions | yes, and a line says so |
| any other setting, `data`, `base` | if --allow_changed names it |
| `NEVER`, the number of `replicas` | no |
| what `measured_by` digests | as above; but earlier scores no longer count |
"""

import hashlib
from pathlib import Path
from typing import Any

from shared.config import parse as configs
from shared.process.errors import ConfigError
from shared.process.printing import note

NEVER = {"global_batch_size", "mix_weights", "order"}  # settings
OTHERS = {"data": "other data", "base": "other base weights, which it does not contain"}
# Groups of settings that an evaluation's scores depend on, and free ones among them. Files and
# models count by their contents, as `data` and `base`.
MEASURED = {"", "model", "adapter", "data", "recipe"}
MEASURED_THOUGH_FREE = {"eval_samples", "eval_answers", "max_new_tokens"}


def require_resumable(
    folder: Path, before: dict[str, Any], now: dict[str, Any], config: Any
) -> None:
    """Refuse to continue from a checkpoint whose run learns something else.

    Args:
        before: its manifest.
        now: this run's facts, as far as they are known: settings, data, base, replicas.
        config: the template's, with --allow_changed.

    Raises:
        ConfigError: what differs, and what to do.
    """
    allowed = {*config.checkpoint.allow_changed}
    facts = _changes(before, now)
    if "replicas" in facts:
        raise ConfigError(
            f"{folder} is of {before['replicas'] or 'no replicas'} that train apart, and this "
            f"launch has {now['replicas'] or 'none'}: use as many, or another --output_dir"
        )
    for name in [name for name in OTHERS if name in facts and name not in allowed]:
        raise ConfigError(
            f"{folder} belongs to a run on {OTHERS[name]}: use the same, another --output_dir (to "
            f"train its final/ further: docs/after_training.md), or --allow_changed {name}"
        )
    settings = _changes(before["settings"], now["settings"])
    if never := sorted(settings.keys() & NEVER):
        raise ConfigError(
            f"{folder}: --{never[0]} cannot change within a run, since samples would be repeated "
            "or skipped: train its final/ further in another --output_dir"
        )
    if refused := sorted(settings.keys() - configs.free_fields(type(config)) - allowed):
        raise ConfigError(
            f"{folder} belongs to a run that learns something else "
            f"({'; '.join(settings[name] for name in refused)}): use the same settings, another "
            f"--output_dir, or, if its weights fit this model, --allow_changed {' '.join(refused)}"
        )


def note_changes(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Say what differs from a checkpoint, and may."""
    facts = _changes(before, now)
    lines = _changes(before["settings"], now["settings"])
    new = now["settings"].keys() - before["settings"].keys()
    lines |= {name: f"{name} is new, {now['settings'][name]!r}" for name in sorted(new)}
    lines |= {name: facts[name] for name in ("strategy", "versions") if name in facts}
    if lines:
        note(f"settings that differ from those of {folder.name}:", *lines.values())


def _changes(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """What differs, by name: what it was and is."""
    return {
        name: f"{name} was {before[name]!r}, now {value!r}"
        for name, value in now.items()
        if name in before and before[name] != value
    }


def measured_by(config: Any) -> str:
    """A digest of the settings that scores depend on: those of other ones cannot be compared."""
    free = configs.free_fields(type(config)) - MEASURED_THOUGH_FREE
    known = configs.flags(type(config))
    values = [
        (name, value)
        for name, value in configs.flatten(config).items()
        if known[name].group in MEASURED and name not in free | configs.MODELS
    ]
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]
