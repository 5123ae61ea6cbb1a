"""Named places where tests make a run fail."""

import importlib
import os


def point(place: str) -> None:
    """Let tests/fault_actions.py kill, stop or spoil the run here. Nothing without
    TEMPLATES_FAULT.
    """
    if os.environ.get("TEMPLATES_FAULT"):
        importlib.import_module("tests.fault_actions").act_at(place)
