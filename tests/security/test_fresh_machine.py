"""A bare machine runs the templates, or one line says what it lacks."""

import os
import shutil
import subprocess
import sys

import pytest

from shared.process import ranks
from shared.run import exits
from tests.conftest import ROOT

BARE = """mount -t tmpfs -o ro none "$HOME" && mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 &&
mknod -m 666 /dev/urandom c 1 9 && exec "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts need root and util-linux")
@pytest.mark.slow
def test_no_dev_shm_a_read_only_home_and_an_ascii_console(tmp_path):
    (tmp_path / "home").mkdir()
    flags = ["--max_steps", "1", "--report_to", "none", "--dataloader_num_workers", "0", "--output_dir", f"{tmp_path}/run"]
    command = ["unshare", "--mount", "sh", "-c", BARE, "sh", sys.executable, "templates/image_classification.py", *flags]
    env = os.environ | {"HOME": str(tmp_path / "home"), "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = done.stdout.decode("ascii")
    assert done.returncode == 0 and "model in" in said, said


def test_too_little_of_it_is_said_in_one_line():
    """What torch raises in a container with Docker's 64 MB."""
    for error in (
        "unable to allocate shared memory(shm) for file </torch_25_38_0>: No space left on device (28)",
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
        "shared memory. Please try to raise your shared memory limit.",
    ):
        said = str(exits._as_clean_exit(RuntimeError(error), None))
        assert said.startswith("/dev/shm is too small") and "--shm-size" in said and len(said.splitlines()) == 1
    assert exits._as_clean_exit(RuntimeError("out of resource: shared memory, Required: 262144"), None) is None  # a GPU's


def test_the_quota_of_a_container_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert ranks.cores() == 8
    for quota, expected in (("max", 8), ("350000", 3), ("1000", 1), ("9900000", 8)):
        (tmp_path / "cpu.max").write_text(f"{quota} 100000\n")
        assert ranks.cores() == expected
