"""Which code runs."""

import subprocess
from pathlib import Path

from shared import __version__


def version() -> str:
    """The version of this package, with the commit if it is in a git checkout, and `-dirty` if a
    file was changed since.
    """
    git = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--exclude",
        "*",
    ]
    try:
        done = subprocess.run(git, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):  # there is no git
        return __version__
    return f"{__version__}+{done.stdout.strip()}" if done.returncode == 0 else __version__
