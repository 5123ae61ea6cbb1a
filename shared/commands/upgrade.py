"""Merge later changes of the templates into this project. Your edits stay; conflicts are marked as git marks them.

python -m shared upgrade --source ../templates --check      # only list the changes
python -m shared upgrade --source ../templates              # a checkout of the templates, whose code this runs
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from shared.process.errors import CleanExit, ConfigError, shown
from shared.process.files import inside

ORIGIN = ".template/origin.json"  # templates, their version, and a hash of each file as `new` wrote it
BASE = ".template/base"  # those files, for a three-way merge


class Conflicts(CleanExit):
    """Some lines were changed on both sides."""

    exit_code = 1


MARK = b"<<<<<<< yours\n"


@dataclass
class Plan:
    """What an upgrade does, by path."""

    writes: dict[str, bytes] = field(default_factory=dict)
    removes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # are not here, so that their changes stay to be made
    notes: dict[str, str] = field(default_factory=dict)  # what happens to each file, for the user
    conflicts: list[str] = field(default_factory=list)


def read_origin(made: Path, project: Path) -> dict:
    """What `new` recorded about a project when it was `made`. All paths in it are to be used in `project`.

    Raises:
        ConfigError: `new` did not make it, or a path leads out of the project, where a file of others may name it.
    """
    try:
        origin = json.loads(inside(made, ORIGIN).read_text(encoding="utf-8"))
        origin["name"] = Path(origin["name"]).name or "new"  # of the folder that it was made in, not of a clone
        for name in (ORIGIN, *origin["files"]):
            inside(project, name)
            inside(inside(project, BASE), name)
    except (OSError, ValueError, LookupError, TypeError):
        raise ConfigError(f"{made / ORIGIN}: missing or damaged: was this project made by `new`?") from None
    return origin


def make_latest(source: Path, names: list[str], into: Path) -> None:
    """Let the templates at `source` make the project again, with their own code.

    Raises:
        ConfigError: there are no templates, or `new` fails there.
    """
    if not (source / "templates").is_dir():
        raise ConfigError(f"{source}: no templates there; --source names a checkout of them")
    command = [sys.executable, "-m", "shared", "new", *names, str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(source)})
    if done.returncode:
        raise ConfigError(f"{source}: `new` failed: {done.stderr.strip()[-300:]}")


def plan(folder: Path, new: Path, origin: dict) -> Plan:
    """Compare three versions of each file: as `new` wrote it, as it is now, as `new` would write it today."""
    then, today = origin["files"], read_origin(new, folder)["files"]
    made = Plan()
    for name in sorted(then | today):
        if today.get(name) == then.get(name):
            continue
        mine = (folder / name).read_bytes() if (folder / name).is_file() else None
        edited = mine is not None and hashlib.sha256(mine).hexdigest() != then.get(name)
        theirs = (new / name).read_bytes() if name in today else None
        if theirs is None:
            if mine is not None:
                fate = "kept, since you edited it" if edited else "deleted here"
                made.notes[name] = f"removed from the templates; {fate}"
                made.removes += [] if edited else [name]
        elif mine is None and name in then:
            made.notes[name] = "changed in the templates, not here: if renamed, name it so while you upgrade"
            made.missing.append(name)
        elif mine is None or not edited:
            made.writes[name] = theirs
            made.notes[name] = "new" if mine is None else "updated"
        elif mine != theirs:
            _merge(folder, new, name, made)
    return made


def put(path: Path, content: bytes) -> None:
    """Write a file of a project; a script gets the right to be executed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if content.startswith(b"#!"):
        path.chmod(path.stat().st_mode | 0o111)


def _merge(folder: Path, new: Path, name: str, made: Plan) -> None:
    sides = {"yours": folder / name, "original": folder / BASE / name, "templates": new / name}
    labels = [token for label in sides for token in ("-L", label)]
    done = subprocess.run(["git", "merge-file", "-p", *labels, *map(str, sides.values())], capture_output=True)
    if not 0 <= done.returncode <= 127:  # a binary file, or no base
        made.notes[name] = f"cannot be merged; yours is kept, the new one is in {BASE}/"
        made.conflicts.append(name)
        return
    made.writes[name] = done.stdout
    count = done.returncode
    made.notes[name] = f"merged, {count} conflict{'s' * (count > 1)} to solve in it" if count else "merged with your edits"
    made.conflicts += [name] if count else []


def _uncommitted() -> list[str]:
    """Files here that git knows and that differ from the last commit; none where there is no repository."""
    command = ["git", "diff", "HEAD", "--name-only", "--relative"]
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared upgrade", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only list what would change")
    # Asked for, not recorded: a project got from others does not choose whose code runs.
    parser.add_argument("--source", type=Path, required=True, help="checkout of the templates")
    options = parser.parse_args()
    folder = Path.cwd()
    origin = read_origin(folder, folder)
    if not shutil.which("git"):
        raise ConfigError("upgrade merges with git, which is not installed")
    unsolved = [name for name in origin["files"] if (folder / name).is_file() and MARK in (folder / name).read_bytes()]
    if unsolved:
        raise Conflicts(f"first solve the conflicts of an earlier upgrade in {', '.join(unsolved)}")
    if not options.check and (changed := _uncommitted()):
        raise ConfigError(f"first commit your edits, so that git can undo the upgrade: {', '.join(changed)}")
    with tempfile.TemporaryDirectory() as temporary:
        new = Path(temporary) / origin["name"]
        make_latest(options.source.resolve(), origin["templates"], new)
        made, latest = plan(folder, new, origin), read_origin(new, folder)
        if made.notes and options.check:
            print("an upgrade would do this:")
        for name, note in made.notes.items():
            print(shown(f"  {name}: {note}"))
        if not made.notes:
            print(shown(f"no change in the templates since {origin['version']}"))
        if options.check and made.conflicts:
            raise Conflicts(f"it would leave conflicts in {', '.join(made.conflicts)}")
        if options.check:
            return
        for name, content in made.writes.items():
            put(folder / name, content)
        for name in made.removes:
            (folder / name).unlink(missing_ok=True)
        for name in made.missing:
            put(new / BASE / name, (folder / BASE / name).read_bytes())
            latest["files"][name] = origin["files"][name]
        shutil.rmtree(folder / BASE, ignore_errors=True)
        shutil.copytree(new / BASE, folder / BASE)
        put(folder / ORIGIN, (json.dumps(latest, indent=1) + "\n").encode())
    if made.conflicts:
        raise Conflicts(f"conflicts to solve in {', '.join(made.conflicts)} (`git stash -u` puts the upgrade aside)")
    if made.notes:
        print(f"now at {latest['version']}")
