"""A run outlives who reads its output (with real launches: tests/promises/test_faults.py)."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from shared.process.streams import outlive_readers

SAYS_MUCH = """
import sys
from pathlib import Path
from shared.process.streams import outlive_readers

outlive_readers()
for number in range(2000):
    print("line", number, "of standard output")
    print("line", number, "of standard error", file=sys.stderr, flush=True)
print("é")
Path(sys.argv[1]).write_text(f"{sys.stdout and sys.stdout.encoding}, {sys.stderr and sys.stderr.errors}")
"""
LATE_READER = """
import array, fcntl, os, sys, termios, time
waiting = array.array('i', [0])
while waiting[0] < 60_000:  # until the pipe is full
    fcntl.ioctl(0, termios.FIONREAD, waiting)
    time.sleep(0.01)
os.set_blocking(0, True)
sys.stdin.read()
"""
NOT_BLOCKING = f"{sys.executable} -c 'import os; os.set_blocking(1, False)'"


def say_much(tmp_path, command):
    """What a script writes that prints more than a pipe holds, and what came through."""
    argv = ["bash", "-c", f"set -o pipefail; {command}", "bash", sys.executable, "-c", SAYS_MUCH, str(tmp_path / "end")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return (tmp_path / "end").read_text(), done.stdout, done.stderr


def test_all_that_is_read_arrives(tmp_path):
    end, output, error = say_much(tmp_path, '"$@"')
    assert end == "utf-8, backslashreplace"
    assert output == "".join(f"line {n} of standard output\n" for n in range(2000)) + "é\n"
    assert error == "".join(f"line {n} of standard error\n" for n in range(2000))


@pytest.mark.parametrize(
    "command",
    [
        '"$@" 2>&1 | true',
        '"$@" 2>&1 | head -n 1',
        '"$@" > /dev/full 2>&1',
        f'( {NOT_BLOCKING}; "$@" 2>&1 ) | {sys.executable} -c "{LATE_READER}"',
    ],
)
def test_what_nobody_reads_is_no_error(tmp_path, command):
    end, output, _ = say_much(tmp_path, command)
    assert end == "utf-8, backslashreplace" and output.count("\n") <= 1


def test_a_stream_that_was_closed_or_is_no_file_stays(monkeypatch, tmp_path):
    end, _, error = say_much(tmp_path, '"$@" >&-')
    assert end == "None, backslashreplace" and error.count("\n") == 2000
    own = io.StringIO()  # a notebook's
    monkeypatch.setattr(sys, "stdout", own)
    monkeypatch.setattr(sys, "stderr", own)
    outlive_readers()
    assert sys.stdout is own and sys.stderr is own
