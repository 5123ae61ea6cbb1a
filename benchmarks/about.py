"""What a measurement was made on and with."""

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


def device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def about(*packages: str) -> dict[str, str]:
    """Versions, device, cores and date, for a benchmark's JSON."""
    facts = {}
    for package in ("torch", "transformers", "accelerate", *packages):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "absent"
    return facts | {"device": device(), "cores": str(os.cpu_count()), "date": f"{datetime.now(UTC):%Y-%m-%d}"}


def line(facts: dict[str, str]) -> str:
    """The same as one line of a table's caption."""
    versions = ", ".join(f"{k} {v}" for k, v in facts.items() if k not in ("device", "cores", "date"))
    return f"{versions}; {facts['device']}, {facts['cores']} CPU cores; {facts['date']}."
