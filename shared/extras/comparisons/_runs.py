"""Folders of runs, and commands that start them."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from shared.process.errors import ConfigError
from shared.process.files import read_json_lines
from shared.run.checkpoint_files import MANIFEST, checkpoints

PARENT = "parent.json"  # of a fork


@dataclass
class RunFolder:
    """What a run has written.

    Args:
        path: of the run; or its final/ or merged/, or its base, which needs no folder: these
            weights alone, with the run's settings.

    Raises:
        ConfigError: it is no run's folder.
    """

    path: Path

    def __post_init__(self) -> None:
        self.weights, self.is_whole = self.path / "final", True
        if self.path.name in ("base", "final", "merged"):
            self.weights, self.is_whole = self.path, False
            self.path = self.path.parent
        if not (self.path / "config.yaml").is_file():
            raise ConfigError(f"{self.path}: no folder of a run, which has config.yaml")

    @property
    def name(self) -> str:
        name = self.path.resolve().name
        return name if self.is_whole else f"{name}/{self.weights.name}"

    def __str__(self) -> str:
        return str(self.path if self.is_whole else self.weights)

    @cached_property
    def settings(self) -> dict[str, Any]:
        text = (self.path / "config.yaml").read_text(encoding="utf-8")
        settings: dict[str, Any] = yaml.safe_load(text)
        return settings

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The manifest of the last checkpoint; {} without one."""
        there = checkpoints(self.path)
        if not there:
            return {}
        manifest: dict[str, Any] = json.loads((there[-1] / MANIFEST).read_text(encoding="utf-8"))
        return manifest

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl; [] of weights alone."""
        file = self.path / "metrics.jsonl"
        return [*read_json_lines(file)] if self.is_whole and file.exists() else []

    @cached_property
    def before(self) -> list[dict[str, Any]]:
        """Rows of a fork's parent up to the fork, and of the parent's own; [] where it has gone."""
        try:
            about = json.loads((self.path / PARENT).read_text(encoding="utf-8"))
            parent = RunFolder(Path(about["run"]))
        except (OSError, ConfigError):
            return []
        return [row for row in parent.before + parent.rows if row["step"] <= about["step"]]

    @cached_property
    def losses(self) -> dict[int, float]:
        """Of training, by step."""
        return {row["step"]: row["loss"] for row in self.rows if row.get("loss") is not None}

    @cached_property
    def results(self) -> dict[str, float]:
        """Values of the last evaluation, without eval_."""
        values: dict[str, float] = {}
        for row in self.rows:
            found = {k.removeprefix("eval_"): v for k, v in row.items() if k.startswith("eval_")}
            values = {
                k: v for k, v in found.items() if v is not None and math.isfinite(v)
            } or values
        return values

    def checkpoint(self, step: int) -> Path:
        """The checkpoint of a step. ConfigError where it is not there, with those that are."""
        folder = self.path / f"checkpoint-{step:06d}"
        if not (folder / MANIFEST).is_file():
            there = ", ".join(str(int(p.name.rpartition("-")[2])) for p in checkpoints(self.path))
            raise ConfigError(
                f"{self.path} has no checkpoint of step {step} (of {there or 'none'})"
            )
        return folder
