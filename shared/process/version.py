"""Which code runs."""

import subprocess
from pathlib import Path

from shared import __version__


def version() -> str:
    """The version of this package, with the commit if it is in a git checkout, and `-dirty` if a
    file was changed since.
    """
    git = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        done = subprocess.run(
            git, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):  # there is no git, or no checkout
        return __version__
    return f"{__version__}+{done.stdout.strip()}"
