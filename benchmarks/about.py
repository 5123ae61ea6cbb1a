"""What a measurement was made on and with."""

import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def about(packages: Iterable[str] = ("torch", "transformers", "accelerate")) -> dict[str, Any]:
    """Versions, device, cores and date, for a benchmark's JSON."""
    versions: dict[str, Any] = {package: version(package) for package in packages}
    return versions | {"device": device_name(), "cores": cores(), "date": datetime.now(UTC).date().isoformat()}


def line(facts: dict[str, Any]) -> str:
    """The same as one line of a table's caption."""
    versions = ", ".join(f"{k} {v}" for k, v in facts.items() if k not in ("device", "cores", "date"))
    return f"{versions}; {facts['device']}, {facts['cores']} CPU cores; {facts['date']}."
