"""The image: built from the Dockerfile and run, without a Docker engine.

Needs buildah and a base image that it has, named in TEMPLATES_BASE_IMAGE (a Debian with Python 3.11 or newer); further
options of `buildah build`, for an index of packages for one, in TEMPLATES_BUILD_OPTIONS. Takes half an hour without layers
of an earlier build.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from tests.conftest import ROOT

BASE = os.environ.get("TEMPLATES_BASE_IMAGE", "")
pytestmark = pytest.mark.skipif(
    not BASE or not shutil.which("buildah"), reason="needs buildah, and a base image named in TEMPLATES_BASE_IMAGE"
)
NAME = "localhost/templates-test"
SOURCES = (".dockerignore", "Dockerfile", "requirements.lock", "requirements.txt")
SOURCES += ("accelerate_configs", "shared", "templates", "tools")


def buildah(*command: object) -> str:
    """What it said."""
    argv = ["buildah", *map(str, command)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def build(folder, name: str) -> str:
    """What the build said."""
    options = ["--layers", "--isolation", "chroot", "--build-arg", f"BASE_IMAGE={BASE}"]
    options += shlex.split(os.environ.get("TEMPLATES_BUILD_OPTIONS", ""))
    return buildah("build", *options, "-t", name, folder)


class Image:
    """Containers of an image; each call is a `docker run` with the same two volumes."""

    def __init__(self, name: str) -> None:
        self.container = buildah("from", name).split()[-1]
        config = json.loads(buildah("inspect", self.container))["OCIv1"]["config"]
        self.entrypoint, self.default, self.user = config["Entrypoint"], config["Cmd"], config["User"]
        self.environment, self.volumes = config["Env"], list(config["Volumes"])

    def start(self, *command: object) -> subprocess.Popen:
        line = ["buildah", "run", "--isolation", "chroot", self.container, "--", *self.entrypoint]
        line += map(str, command or self.default)
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *command: object) -> tuple[int, str]:
        process = self.start(*command)
        output, _ = process.communicate(timeout=1500)
        return process.returncode, output


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of what the image is made from, which a test may change."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        place = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(place, folder / name, ignore=ignore) if place.is_dir() else shutil.copy(place, folder)
    (folder / "templates/id_rsa").write_text("a key that lies around")
    (folder / "templates").chmod(0o700)
    return folder


@pytest.fixture(scope="module")
def image(source):
    build(source, NAME)
    made = Image(NAME)
    yield made
    buildah("rm", made.container)
    buildah("rmi", NAME)


def test_another_build_after_a_change_of_source_installs_nothing(image, source):
    (source / "shared/extra.py").write_text('"""New."""\n')
    said = build(source, f"{NAME}-2")
    steps = said.split("STEP ")
    (installs,) = (step for step in steps if "pip install --no-cache-dir" in step.split("\n")[0])
    assert "Using cache" in installs and "Collecting" not in said
    assert "Using cache" not in next(step for step in steps if " shared shared" in step.split("\n")[0])
    buildah("rmi", f"{NAME}-2")


def test_it_runs_as_a_user_without_rights(image):
    assert image.user == "1000:1000"
    code, output = image.run("id", "-u")
    assert (code, output.split()[-1]) == (0, "1000")  # after tini's word about not being the first process
    assert image.run("sh", "-c", "test -r templates/dpo.py -a ! -e templates/id_rsa")[0] == 0
    own, others = "/tmp/x outputs/x /cache/x", "/workspace/shared/x /opt/venv/x /etc/x"
    code, output = image.run("sh", "-c", f"touch {others}; touch {own}")
    assert code == 0 and output.count("Permission denied") == 3


@pytest.mark.skipif(os.getuid() != 0, reason="mounts")
def test_the_default_job_where_nothing_else_may_be_written(image):
    """As under `docker run --read-only --tmpfs /tmp`."""
    root = buildah("mount", image.container).strip()
    mounts = f"mount --bind {root} {root} && mount -o remount,ro,bind {root}"
    for folder in ("/dev", "/proc"):
        mounts += f" && mount --rbind {folder} {root}{folder}"
    for folder in ("/tmp", *image.volumes):
        mounts += f" && mount -t tmpfs -o mode=1777 tmpfs {root}{folder}"
    inside = ["chroot", f"--userspec={image.user}", root, "env", "-i", "-C", "/workspace", *image.environment]
    assert "PYTHONUNBUFFERED=1" in inside and len(image.volumes) == 2

    def run(*command: str) -> tuple[int, str]:
        line = ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh", *inside, *image.entrypoint, *command]
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1500)
        return done.returncode, done.stdout

    code, output = run("touch", "outputs/x", "/cache/x", "/tmp/x", "/var/tmp/x")
    assert code != 0 and "'/var/tmp/x': Read-only file system" in output and output.count("touch: ") == 1, output
    code, output = run(*image.default)
    assert code == 0 and "validation loss" in output and "adapter in" in output and "curves.png" in output, output


def test_selftest(image):
    code, output = image.run("selftest")
    assert code == 0 and "user 1000:1000" in output and output.count("resumes bit for bit") == 7, output


def test_a_stop_during_training_and_the_same_command_again(image):
    """`docker stop`: SIGTERM to the first process."""
    command = ["accelerate", "launch", "templates/pretrain.py", "--output_dir", "outputs/stopped", "--max_steps", 12]
    command += ["--logging_steps", 1, "--report_to", "none"]
    process = image.start(*command)
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "step 5/12" in line:
            (tini,) = (p for p in psutil.Process(process.pid).children(recursive=True) if p.name() == "tini")
            tini.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143 and "stopped by SIGTERM at step" in "".join(seen), "".join(seen)
    code, output = image.run(*command)
    assert code == 0 and "resumed from" in output and "step 12/12" in output, output


def test_the_image_of_a_project(image, tmp_path):
    """Its layers of packages are its own; it is built, and trains."""
    new = [sys.executable, "-m", "shared", "new", "image_classification", str(tmp_path / "project")]
    subprocess.run(new, cwd=ROOT, check=True)
    build(tmp_path / "project", f"{NAME}-project")
    project = Image(f"{NAME}-project")
    assert project.default == ["accelerate", "launch", "train.py"]
    code, output = project.run("python", "smoke_test.py")
    assert code == 0 and output.count("same, bit for bit") == 9, output
    assert "right, as far as these runs can show it" in output
    buildah("rm", project.container)
    buildah("rmi", f"{NAME}-project")
