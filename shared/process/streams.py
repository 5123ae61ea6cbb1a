"""Standard output and error that may be lost: that nobody reads them is no reason to end a run of days."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import sys

GONE = {errno.EPIPE, errno.EIO}  # of a pipe whose reader has ended, of a terminal that is closed


class _Stream(io.FileIO):
    """Leaves out what cannot be written, and writes to nowhere from the first time on that nobody would read it."""

    def write(self, data: object) -> int:
        written: int | None = None
        try:
            written = super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            if error.errno in GONE and not stat.S_ISREG(os.fstat(self.fileno()).st_mode):
                with contextlib.suppress(OSError):
                    nowhere = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(nowhere, self.fileno())  # for what libraries and child processes write, too
                    os.close(nowhere)
        if written is None:  # as for a full pipe that another process has made non-blocking
            return len(memoryview(data).cast("B"))  # type: ignore[arg-type]
        return written


def outlive_readers() -> None:
    """From now on, let what is printed be lost where it cannot be written, where printing raised `OSError` before.

    Ctrl-C in `accelerate launch ... | tee train.log` ends `tee`, too, a dropped connection closes the terminal, and a log
    may lie on a full disk: the next line would otherwise come in the way of the last checkpoint.
    """
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if not isinstance(old, io.TextIOWrapper):  # closed from the start, as `>&-` does, or a notebook's
            continue
        with contextlib.suppress(OSError):
            old.flush()
        raw = _Stream(old.fileno(), "w", closefd=False)
        new = io.TextIOWrapper(
            raw if old.write_through else io.BufferedWriter(raw),  # type: ignore[type-var]
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=old.line_buffering,
            write_through=old.write_through,
        )
        setattr(sys, name, new)
