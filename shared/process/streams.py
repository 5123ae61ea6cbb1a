"""Standard output and error that may be lost: that nobody reads them is no reason to end a run of
days.
"""

import io
import sys
from typing import Any


class _Stream(io.FileIO):
    """Leaves out what cannot be written."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None
        # None: a full pipe that another process has made non-blocking
        return len(data) if written is None else written


def outlive_readers() -> None:
    """From now on, what cannot be printed is lost, where printing raised `OSError` before.

    Ctrl-C in `accelerate launch ... | tee train.log` ends `tee`, too, a dropped connection closes
    the terminal, and a log may lie on a full disk: the next line would otherwise prevent the last
    checkpoint.
    """
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if isinstance(old, io.TextIOWrapper):  # neither closed, as `>&-` does, nor a notebook's
            raw: Any = io.BufferedWriter(_Stream(old.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=True))
