"""A run outlives who reads its output (with real launches: tests/test_faults.py)."""

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


def say_much(tmp_path, command, *options):
    """What a script writes that prints more than a pipe holds, and what came through."""
    end = tmp_path / "end"
    argv = ["bash", "-c", f"set -o pipefail; {command}", "bash", sys.executable, *options, "-c", SAYS_MUCH, str(end)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return end.read_text(), done.stdout, done.stderr


@pytest.mark.parametrize("unbuffered", [(), ("-u",)])
def test_all_that_is_read_arrives(tmp_path, unbuffered):
    end, output, error = say_much(tmp_path, '"$@"', *unbuffered)
    assert end == "utf-8, backslashreplace"
    assert output == "".join(f"line {n} of standard output\n" for n in range(2000)) + "é\n"
    assert error == "".join(f"line {n} of standard error\n" for n in range(2000))


@pytest.mark.parametrize("unbuffered", [(), ("-u",)])
@pytest.mark.parametrize("command", ['"$@" 2>&1 | true', '"$@" 2>&1 | head -n 1', '"$@" > /dev/full 2>&1'])
def test_what_nobody_reads_is_no_error(tmp_path, command, unbuffered):
    end, output, _ = say_much(tmp_path, command, *unbuffered)
    assert end == "utf-8, backslashreplace"
    assert output.count("\n") <= 1


def test_a_full_pipe_that_does_not_block_is_no_error(tmp_path):
    slow = "import os, sys, time; os.set_blocking(0, True); time.sleep(2); sys.stdin.read()"
    command = f"{sys.executable} -c 'import os; os.set_blocking(1, False)'; \"$@\" 2>&1"
    end, output, _ = say_much(tmp_path, f"( {command} ) | {sys.executable} -c '{slow}'")
    assert (end, output) == ("utf-8, backslashreplace", "")


def test_a_stream_that_is_no_file_stays(monkeypatch):
    """As in a notebook."""
    own = io.StringIO()
    monkeypatch.setattr(sys, "stdout", own)
    monkeypatch.setattr(sys, "stderr", own)
    outlive_readers()
    assert sys.stdout is own and sys.stderr is own


def test_a_stream_that_was_closed_from_the_start(tmp_path):
    end, _, error = say_much(tmp_path, '"$@" >&-')
    assert end == "None, backslashreplace"
    assert error.count("\n") == 2000
