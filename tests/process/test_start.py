"""What is decided before torch is imported."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

# instead of torch, which takes seconds, the libgomp that it loads
BEGINS = """
from ctypes import CDLL
from importlib.metadata import files
from shared.process import start

start.begin()
(libgomp,) = [file for file in files("torch") if file.name.startswith("libgomp")]
CDLL(libgomp.locate())
"""


@pytest.mark.parametrize(
    ("chosen", "spins"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "active"}, "INFINITY|[0-9]{8,}")],
)
def test_threads_sleep_where_they_would_spin_on_busy_cores(chosen, spins):
    """As libgomp itself says when torch loads it; what the user chose stays."""
    free = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    env = free | {"OMP_DISPLAY_ENV": "verbose"} | chosen
    done = subprocess.run([sys.executable, "-c", BEGINS], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"GOMP_SPINCOUNT = '(.+)'", done.stderr)
    assert shown and all(re.fullmatch(spins, value) for value in shown), done.stderr
