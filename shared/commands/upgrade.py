"""Merge later changes of the templates into this project. Your edits stay.

python -m shared upgrade --source ../templates --check      # only list the changes
python -m shared upgrade --source ../templates              # conflicts are marked as git marks them

--source is a git checkout of the templates. Its code runs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from shared.process.errors import CleanExit, ConfigError, shown
from shared.process.files import inside

RECORD = ".template.json"  # in a project: its name, its templates, and the commit that they had
OUTSIDE = 128  # what git returns outside of a repository
FATES = {  # git's status of a file after the merge: what happens to it
    "M ": "changed",
    "A ": "new",
    "D ": "deleted",
    "DU": "changed in the templates; you deleted it, and it stays deleted",
    "UD": "deleted in the templates; you changed it, and it stays",
}


class Conflicts(CleanExit):
    """Some lines were changed on both sides."""

    exit_code = 1


def git(
    folder: Path, *arguments: str, data: bytes = b"", expected: int = 0, env: Any = os.environ
) -> bytes:
    """What git prints when it runs in a folder.

    Raises:
        ConfigError: it fails with another code than the expected one.
    """
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, input=data, capture_output=True, env=env)
    if done.returncode not in (0, expected):
        raise ConfigError(
            f"{folder}: git {arguments[0]}: {os.fsdecode(done.stderr).partition(chr(10))[0]}"
        )
    return done.stdout


def read_record(folder: Path) -> dict:
    """What `new` wrote about a project.

    Raises:
        ConfigError: `new` did not make it.
    """
    try:
        record = json.loads(inside(folder, RECORD).read_text(encoding="utf-8"))
        name = Path(record["name"]).name
        templates = map(str, record["templates"])
        commit = str(record["commit"])
    except (OSError, ValueError, LookupError, TypeError):
        raise ConfigError(
            f"{folder / RECORD}: missing or damaged: was this project made by `new`?"
        ) from None
    return {"name": name or "new", "templates": list(templates), "commit": commit}


def latest_commit(source: Path, since: str) -> str:
    """The commit of a checkout of the templates.

    Raises:
        ConfigError: its history lacks the commit that made the project. A project got from others
            does not choose whose code runs: only what is in this history.
    """
    history = git(source, "rev-list", "HEAD").decode().split()
    if since not in history:
        made = (
            f"commit {since}, which made this project: fetch it"
            if since
            else "this project: it was made without git"
        )
        raise ConfigError(f"{source}: its history lacks {made}")
    return history[0]


def files_at(source: Path, commit: str, record: dict) -> dict[str, bytes]:
    """The project as `new` makes it from the templates of a commit, with their own code.

    Raises:
        ConfigError: there are no templates, or `new` fails there.
    """
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "templates"
        project = Path(temporary) / "new" / record["name"]
        git(source, "archive", "--format=tar", f"--output={temporary}/templates.tar", commit)
        shutil.unpack_archive(f"{temporary}/templates.tar", tree)
        command = [sys.executable, "-m", "shared", "new", "--", *record["templates"], str(project)]
        done = subprocess.run(
            command, cwd=tree, capture_output=True, env=os.environ | {"PYTHONPATH": str(tree)}
        )
        if done.returncode:
            raise ConfigError(
                f"{source}: `new` failed at commit {commit[:12]}: "
                f"{os.fsdecode(done.stderr).strip()[-300:]}"
            )
        paths = [path for path in project.rglob("*") if path.is_file() and path != project / RECORD]
        names = {
            path.relative_to(project).as_posix(): path for path in paths if ".git" not in path.parts
        }
        return {name: path.read_bytes() for name, path in names.items()}


def files_here(folder: Path, names: set[str]) -> dict[str, bytes]:
    """These files of a project, and those in git that may be one of them under another name."""
    tracked = git(folder, "ls-files", "-z", "*.py", "*.sh", "*.yaml", expected=OUTSIDE)
    paths = {name: folder / name for name in names.union(os.fsdecode(tracked).split("\0"))}
    return {name: path.read_bytes() for name, path in paths.items() if path.is_file()}


def merge(
    then: dict[str, bytes], now: dict[str, bytes], here: dict[str, bytes]
) -> tuple[dict[str, str], bytes]:
    """Merge what changed between `then` and `now` into `here`: git's status of each file that
    changes, and a patch.
    """

    def commit(branch: str, files: dict[str, bytes], parent: str) -> bytes:
        head = f"commit refs/heads/{branch}\ncommitter upgrade <> 0 +0000\ndata 0\n"
        lines = [f"{head}{parent}deleteall\n".encode()]
        for name, content in files.items():
            mode = b"755" if content.startswith(b"#!") else b"644"
            lines.append(
                b"M %s inline %s\ndata %d\n%s\n" % (mode, os.fsencode(name), len(content), content)
            )
        return b"".join(lines)

    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        env = os.environ | {"GIT_DIR": f"{work}/.git", "GIT_WORK_TREE": temporary}
        # no setting of the user changes the merge
        env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        env |= {"GIT_COMMITTER_NAME": "upgrade", "GIT_COMMITTER_EMAIL": "upgrade"}
        run = partial(git, work, env=env)
        run("init", "--quiet")
        parent = "from refs/heads/then\n"
        run(
            "fast-import",
            "--quiet",
            data=commit("then", then, "")
            + commit("templates", now, parent)
            + commit("yours", here, parent),
        )
        run("checkout", "--quiet", "yours")
        run("merge", "--no-commit", "--no-ff", "templates", expected=1)  # 1: there are conflicts
        status = os.fsdecode(run("status", "--porcelain", "-z", "--no-renames")).split("\0")
        changes = {line[3:]: line[:2] for line in status if line}
        for name, code in changes.items():
            if code == "DU":
                (work / name).unlink()
        run("add", "--all", "--force")
        return changes, run("diff", "--cached", "--binary", "--no-renames", "yours")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only list what would change")
    # Asked for, not recorded: a project got from others does not choose whose code runs.
    parser.add_argument("--source", type=Path, required=True, help="git checkout of the templates")
    options = parser.parse_args()
    folder = Path.cwd()
    source = options.source.resolve()
    record = read_record(folder)
    if not shutil.which("git"):
        raise ConfigError("upgrade merges with git, which is not installed")
    edits = os.fsdecode(
        git(folder, "status", "--porcelain", "--untracked-files=no", ".", expected=OUTSIDE)
    )
    if edits and not options.check:
        names = ", ".join(line[3:] for line in edits.splitlines())
        raise ConfigError(f"first commit your edits, so that git can undo the upgrade: {names}")
    latest = latest_commit(source, record["commit"])
    changes: dict[str, str] = {}
    patch = b""
    if latest != record["commit"]:
        then, now = (files_at(source, commit, record) for commit in (record["commit"], latest))
        changes, patch = merge(then, now, files_here(folder, then.keys() | now.keys()))
    if changes and options.check:
        print("an upgrade would do this:")
    for name, code in sorted(changes.items()):
        print(
            shown(
                f"  {name}: {FATES.get(code, 'changed on both sides: a conflict to solve in it')}"
            )
        )
    if not changes:
        print(f"no change in the templates since {record['commit'][:12]}")
    if patch:  # all of it or nothing; git refuses links, and paths that lead out of the project
        inner = os.fsdecode(git(folder, "rev-parse", "--show-prefix", expected=OUTSIDE)).strip()
        apply = [
            "apply",
            "--whitespace=nowarn",
            f"--directory={inner}",
            *["--check"] * options.check,
        ]
        git(folder, *apply, data=patch)
    if not options.check:
        inside(folder, RECORD).write_text(
            json.dumps(record | {"commit": latest}, indent=1) + "\n", encoding="utf-8"
        )
    if conflicts := [name for name, code in changes.items() if code not in FATES]:
        raise Conflicts(
            shown(
                f"conflicts to solve in {', '.join(conflicts)} (`git stash "
                "-u` puts an upgrade aside)"
            )
        )
    if changes and not options.check:
        print(f"now at {latest[:12]}")
