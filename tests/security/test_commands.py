"""Commands change nothing outside of their folder, and run no code that a file names."""

import json
import shutil
import subprocess
import sys

import hypothesis  # noqa: F401  # pytest would import it after these tests, when Python 3.11 has miscounted its recursion
import pytest

from shared.commands import upgrade
from shared.process.errors import ConfigError
from tests.conftest import ROOT
from tools import new


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project in the current folder, and beside it a file that is none of its business."""
    (tmp_path / "victim.txt").write_text("dear to me")
    folder = tmp_path / "project"
    new.create(folder, ("pretrain",), new.build(("pretrain",), "project"), "project")
    monkeypatch.chdir(folder)
    return folder


def upgraded(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["upgrade", *map(str, flags)])
    upgrade.main()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def link(path, target):
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def rename_to_a_link(project):
    """One that git knows, and so may take for the template that is gone."""
    (project / "train.py").rename(project.parent / "train.py")
    link(project / "mine.py", project.parent / "train.py")
    subprocess.run(["git", "add", "-A"], check=True)
    subprocess.run(["git", "-c", "user.name=me", "-c", "user.email=me", "commit", "-qm", "all"], check=True)


ATTACKS = {
    "a-file": lambda project: link(project / "train.py", project.parent / "victim.txt"),
    "a-folder": lambda project: link(project / "shared", project.parent),
    "another-name": rename_to_a_link,
    "the-record": lambda project: link(project / upgrade.RECORD, project.parent / "origin.json"),
    "a-new-file": lambda project: link(project / "accelerate_configs/fresh.yaml", project.parent / "victim.txt"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_upgrade_does_not_leave_the_project(attack, project, monkeypatch):
    shutil.copy(project / upgrade.RECORD, project.parent / "origin.json")

    def made(source, commit, record):  # the templates of today have two files more, and one that is changed
        files = new.build(("pretrain",), "project")
        if commit == "later":
            files |= {"accelerate_configs/fresh.yaml": b"num_processes: 2\n", "train.py": files["train.py"] + b"# better\n"}
            files |= {"shared/fresh.py": b""}
        return files

    monkeypatch.setattr(upgrade, "files_at", made)
    monkeypatch.setattr(upgrade, "latest_commit", lambda *_: "later")
    ATTACKS[attack](project)
    before = contents(project.parent)
    for flags in (("--check",), ()):
        with pytest.raises(ConfigError, match=r"leads out of this folder|git apply: error: "):
            upgraded(monkeypatch, "--source", ROOT, *flags)
        assert contents(project.parent) == before


def test_a_project_does_not_name_the_folder_whose_code_an_upgrade_runs(project, tmp_path, monkeypatch, capsys):
    other = tmp_path / "other"
    for path in ("templates/pretrain.py", "shared/__init__.py"):
        (other / path).parent.mkdir(parents=True)
        (other / path).touch()
    (other / "shared/__main__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    record = project / upgrade.RECORD
    record.write_text(json.dumps(json.loads(record.read_text()) | {"source": str(other)}))
    for flags in (("--check",), ()):
        with pytest.raises(SystemExit) as end:
            upgraded(monkeypatch, *flags)
        assert end.value.code == 2 and "--source" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
