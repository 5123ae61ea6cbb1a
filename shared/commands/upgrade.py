"""Merge later improvements of the templates into this project; your edits stay, conflicts are marked as git marks them.

python -m shared upgrade --check                     # only tell
python -m shared upgrade                             # from where the project was made
python -m shared upgrade --source ../templates       # from another checkout of the templates
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

from shared.process.errors import CleanExit, ConfigError

ORIGIN = ".template/origin.json"  # which files came from where
BASE = ".template/base"  # those files as they came, for a three-way merge


class Conflicts(CleanExit):
    """Some lines were changed on both sides."""

    exit_code = 1


MARK = b"<<<<<<< yours\n"


@dataclass
class Plan:
    """What an upgrade does, by path."""

    writes: dict[str, bytes] = field(default_factory=dict)
    removes: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)  # a word about each
    conflicts: list[str] = field(default_factory=list)


def read_origin(folder: Path) -> dict:
    """What `new` noted about the project.

    Raises:
        ConfigError: this is no project that it made.
    """
    try:
        origin = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
        assert isinstance(origin["files"], dict) and isinstance(origin["templates"], list)
        return origin
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise ConfigError(f"{folder / ORIGIN}: not there, or damaged: was this project made by `new`?") from None


def latest(source: Path, names: list[str], into: Path) -> None:
    """Let the templates at `source` make the project afresh, with their own code.

    Raises:
        ConfigError: there are no templates, or they cannot.
    """
    if not (source / "templates").is_dir():
        raise ConfigError(f"{source}: no templates there; name their checkout with --source")
    command = [sys.executable, "-m", "shared", "new", *names, str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(source)})
    if done.returncode:
        raise ConfigError(f"{source}: cannot make the project ({done.stderr.strip().splitlines()[-1:] or ['']})")


def plan(folder: Path, new: Path, origin: dict) -> Plan:
    """Compare three sides of each file: as it came, as it is, as it would come today."""
    then, today = origin["files"], json.loads((new / ORIGIN).read_text())["files"]
    made = Plan()
    for name in sorted(then | today):
        mine = (folder / name).read_bytes() if (folder / name).is_file() else None
        theirs = (new / name).read_bytes() if name in today else None
        was = then.get(name)
        if theirs is not None and today[name] == was:
            continue
        edited = mine is not None and hashlib.sha256(mine).hexdigest() != was
        if theirs is None:
            if mine is not None:
                made.notes[name] = "is no longer part of it" + ("; kept, since you changed it" if edited else "")
                made.removes += [] if edited else [name]
        elif mine is None and was is not None:
            made.notes[name] = "has changed; you removed it"
        elif mine == theirs:
            continue
        elif mine is None or not edited:
            made.writes[name] = theirs
            made.notes[name] = "new" if mine is None else "updated"
        else:
            _merge(folder, name, mine, theirs, made)
    return made


def mergeable(content: bytes) -> bool:
    """Whether a file is text."""
    return b"\0" not in content[:8000] and len(content) < 1_000_000


def put(path: Path, content: bytes) -> None:
    """Write a file of a project; what begins as a script does can be executed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if content.startswith(b"#!"):
        path.chmod(path.stat().st_mode | 0o111)


def _merge(folder: Path, name: str, mine: bytes, theirs: bytes, made: Plan) -> None:
    base = folder / BASE / name
    if not (base.is_file() and mergeable(mine) and mergeable(theirs)):
        made.notes[name] = "has changed on both sides and cannot be merged; yours is kept"
        made.conflicts.append(name)
        return
    with tempfile.TemporaryDirectory() as temporary:
        sides = [Path(temporary) / side for side in ("mine", "base", "theirs")]
        for path, content in zip(sides, (mine, base.read_bytes(), theirs), strict=True):
            path.write_bytes(content)
        labels = [token for label in ("yours", "as it came", "templates") for token in ("-L", label)]
        done = subprocess.run(["git", "merge-file", "-p", *labels, *map(str, sides)], capture_output=True)
    if done.returncode < 0 or done.returncode > 127:
        raise ConfigError(f"{name}: git merge-file failed ({done.stderr.decode(errors='replace').strip()})")
    made.writes[name] = done.stdout
    count = done.returncode
    made.notes[name] = f"merged, {count} conflict{'s' * (count > 1)} marked in it" if count else "merged with your edits"
    if done.returncode:
        made.conflicts.append(name)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared upgrade", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only tell what would change")
    parser.add_argument("--source", type=Path, help="checkout of the templates (default: where the project was made)")
    options = parser.parse_args()
    folder = Path.cwd()
    origin = read_origin(folder)
    if not shutil.which("git"):
        raise ConfigError("upgrade merges with git, which is not installed")
    unsolved = [name for name in origin["files"] if (folder / name).is_file() and MARK in (folder / name).read_bytes()]
    if unsolved:
        raise Conflicts(f"conflicts of an earlier upgrade are still to be solved in {', '.join(unsolved)}")
    with tempfile.TemporaryDirectory() as temporary:
        new = Path(temporary) / (folder.name or "new")
        latest(options.source or Path(origin["source"]), origin["templates"], new)
        made = plan(folder, new, origin)
        later = json.loads((new / ORIGIN).read_text())
        if made.notes and options.check:
            print("an upgrade would leave:")
        for name, note in made.notes.items():
            print(f"  {name}: {note}")
        if not made.notes:
            print(f"nothing has changed since {origin['version']}")
        if options.check:
            return
        for name, content in made.writes.items():
            put(folder / name, content)
        for name in made.removes:
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / BASE, ignore_errors=True)
        shutil.copytree(new / BASE, folder / BASE)
        later["source"] = str((options.source or Path(origin["source"])).resolve())
        (folder / ORIGIN).write_text(json.dumps(later, indent=1) + "\n", encoding="utf-8")
    if made.conflicts:
        raise Conflicts(f"conflicts to solve in {', '.join(made.conflicts)}")
    if made.notes:
        print(f"now at {later['version']}")
