"""Shared/folder.py and exit.json, on file systems that cannot do all (with real launches: tests/promises/test_faults.py)."""

import errno
import json
import os
import resource
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from accelerate import Accelerator

from shared.process import files
from shared.process.errors import CleanExit
from shared.process.files import whole_folder
from shared.process.signals import record_end
from shared.run import exits, folder
from shared.run.folder import open_run
from tests.conftest import ROOT, slow


def write(path: Path, text: str) -> None:
    """As a checkpoint is written."""
    with whole_folder(path) as temporary:
        (temporary / "weights").write_text(text)


def fails(function, number, *, of_folders):
    """The same function, which for folders, or for files, of paths or of descriptors, fails with this error."""

    def failing(path, *args, **kwargs):
        if stat.S_ISDIR(os.stat(path).st_mode) == of_folders:
            raise OSError(number, os.strerror(number))
        return function(path, *args, **kwargs)

    return failing


@pytest.mark.parametrize(
    ("name", "number", "of_folders"),
    [
        ("chmod", errno.EPERM, False),  # files belong to another user: Azure Files on Kubernetes
        ("fsync", errno.EINVAL, True),  # Samba, drvfs, sshfs
        ("fsync", errno.EOPNOTSUPP, True),
        ("fsync", errno.ENOSYS, True),
        ("open", errno.EACCES, True),
    ],
)
def test_what_a_file_system_does_not_offer_is_done_without(monkeypatch, tmp_path, name, number, of_folders):
    monkeypatch.setattr(os, name, fails(getattr(os, name), number, of_folders=of_folders))
    write(tmp_path / "final", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["final"] and (tmp_path / "final/weights").read_text() == "new"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_what_does_not_reach_the_disk_replaces_nothing(monkeypatch, tmp_path, number):
    write(tmp_path / "final", "old")
    monkeypatch.setattr(os, "fsync", fails(os.fsync, number, of_folders=False))
    with pytest.raises(OSError, match=os.strerror(number)):
        write(tmp_path / "final", "new")
    assert (tmp_path / "final/weights").read_text() == "old"


def test_two_starts_in_one_moment_are_not_in_each_others_way(monkeypatch, tmp_path):
    """Who does not hold the folder writes nothing that who holds it could tidy away."""
    touch = Path.touch

    def touch_if_held(path, *args, **kwargs):
        assert path.parent in folder._locks
        touch(path, *args, **kwargs)

    monkeypatch.setattr(Path, "touch", touch_if_held)
    for _ in range(2):
        monkeypatch.setattr(folder, "_locks", {})
        monkeypatch.setattr(exits, "_folder", None)
        assert open_run(Accelerator(cpu=True), tmp_path, "any") == tmp_path
    assert {p.name for p in tmp_path.iterdir()} == {".run.lock"}


def test_a_file_system_without_locks_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(folder, "_locks", {})
    monkeypatch.setattr(folder.fcntl, "lockf", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    folder._lock(tmp_path)
    assert f"warning: {tmp_path} cannot be locked (No locks available)" in capsys.readouterr().err


def test_a_folder_that_another_rank_does_not_see_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(folder, "_locks", {})
    monkeypatch.setattr(folder, "gather_object", lambda own: [*own, False])
    with pytest.raises(CleanExit, match="rank 1 does not see what rank 0 writes there"):
        open_run(Accelerator(cpu=True), tmp_path, "any")


@pytest.mark.parametrize("links", [True, False])
def test_the_first_cause_stays(monkeypatch, tmp_path, links):
    if not links:
        monkeypatch.setattr(os, "link", fails(os.link, errno.EPERM, of_folders=False))
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        record_end(tmp_path, CleanExit(f"of rank {rank}"))
    assert json.loads((tmp_path / "exit.json").read_text())["cause"] == "of rank 1"
    assert [p.name for p in tmp_path.iterdir()] == ["exit.json"]


FULL = """
import sys
from pathlib import Path
from types import SimpleNamespace
from shared.run import exits

def main(_config):
    exits.report_end_in(Path(sys.argv[1]))
    Path(sys.argv[1], "checkpoint").write_text("more than there is room for")

exits.run(main, SimpleNamespace(checkpoint=SimpleNamespace(output_dir=Path(sys.argv[1]))))
"""


@pytest.mark.parametrize("room", [8, slow(4096)])
def test_where_the_end_cannot_be_written_there_is_no_half_of_it(tmp_path, room):
    """RLIMIT_FSIZE, as a full disk would do it."""
    argv = [sys.executable, "-c", FULL.replace("more", "more" * room), tmp_path]
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (room, room))
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=100, preexec_fn=limit)
    assert done.returncode == 3 and done.stderr.count("error: ") == 1, done.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint"} | ({"exit.json"} if room > 1000 else set())
    if room > 1000:
        assert json.loads((tmp_path / "exit.json").read_text())["exit_code"] == 3


def test_files_then_their_folder_then_the_new_name_reach_the_disk(monkeypatch, tmp_path):
    done, temporary = [], tmp_path / ".tmp-final"
    monkeypatch.setattr(files, "fsync", lambda path: done.append((path, (tmp_path / "final").exists())))
    write(tmp_path / "final", "new")
    assert done == [(temporary / "weights", False), (temporary, False), (tmp_path, True)]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_who_may_read_other_files_may_read_what_safetensors_writes(tmp_path, umask):
    before = os.umask(umask)
    try:
        (tmp_path / "other").touch()
        with whole_folder(tmp_path / "final") as temporary:
            (temporary / "weights").touch(mode=0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "final/weights").stat().st_mode == (tmp_path / "other").stat().st_mode
