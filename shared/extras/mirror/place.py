"""A place that outlives the machine: an object store, or a folder on a network disk.

    PLACE/writer-000002-5d1c0a7e-91be33f0/   one machine's: nobody else writes there
        lease                                renewed while that machine trains
        checkpoint-000120-8a61c7d20b4f/      named by its manifest's hash
            rank-0.safetensors.00000         files over 64 MiB in parts
            MANIFEST.json                    last: what lacks it is not there
        final-1f0c58de92ab/
        logs-c04411aa07d3/                   config.yaml, metrics.jsonl, exit.json, ...

Stores have no locks, and pyarrow no conditional writes. So nothing is replaced but leases: what two
writers do at a time stands in two folders, and the one with the greater name counts.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyarrow import ArrowException, fs

from shared.data.prepared import fingerprint
from shared.process.errors import ConfigError, NotNow, first_line
from shared.process.files import cache_dir, commit, digest, discard, new_folder
from shared.process.printing import label
from shared.run.checkpoint_files import MANIFEST, CheckpointError, checkpoints

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss")
PAUSES = (0.5, 1.0, 2.0)  # seconds before each new try
PART = 64 << 20  # bytes that are sent at once, and again if the connection breaks
FAILURES = (OSError, ArrowException)  # of a store


def tried(work: Callable[[], Any]) -> Any:
    """What `work` gives, after a few tries if the store fails."""
    for pause in PAUSES:
        try:
            return work()
        except FileNotFoundError:
            raise
        except FAILURES:
            time.sleep(pause)
    return work()


class Thing:
    """A folder that is whole at a place, or not there.

    A checkpoint goes by its own manifest, any other folder by one that is made here. Files stay
    open, so that they can be sent although the run deletes them.

    Args:
        folder: on this machine.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / MANIFEST).exists():
            self.index = (folder / MANIFEST).read_bytes()
        else:
            paths = sorted(path for path in folder.rglob("*") if path.is_file())
            files = {str(path.relative_to(folder)): digest(path) for path in paths}
            self.index = json.dumps({"files": files}).encode()
        self.manifest = json.loads(self.index)
        self.name = f"{folder.name}-{hashlib.sha256(self.index).hexdigest()[:12]}"
        self.files = {name: (folder / name).open("rb") for name in self.manifest["files"]}


def parts(files: dict[str, Any]) -> Iterator[tuple[str, str, int, int]]:
    """(file, part, begin, bytes) of each part of a manifest's files."""
    for name, facts in files.items():
        begins = range(0, facts["size"] or 1, PART)
        for number, begin in enumerate(begins):
            part = name + f".{number:05d}" * (len(begins) > 1)
            yield name, part, begin, min(PART, facts["size"] - begin)


class Place:
    """What a URL or a folder holds.

    Raises:
        ConfigError: the URL is of a kind that is not known.
    """

    def __init__(self, url: str) -> None:
        self.name = label(url)
        scheme, is_url, _ = url.partition("://")
        if is_url and scheme not in SCHEMES:
            raise ConfigError(
                f"{self.name}: expected a folder, or a URL by {', '.join(SCHEMES)}; a bucket or "
                "repository of the Hub does not work (docs/known_limits.md)"
            )
        try:
            files, path = fs.FileSystem.from_uri(url if is_url else os.path.abspath(url))
        except ValueError as error:
            raise ConfigError(f"{self.name}: {first_line(error)}") from None
        except OSError as error:
            raise NotNow(f"{self.name}: {first_line(error)}") from None
        self.is_local = not is_url
        self.files = fs.SubTreeFileSystem(path, files)

    def look(self, folder: str = "", *, deep: bool = True) -> dict[str, Any]:
        """What is in a folder, by path. Nothing if it does not exist."""
        selector = fs.FileSelector(folder, recursive=deep, allow_not_found=True)
        return {info.path: info for info in tried(lambda: self.files.get_file_info(selector))}

    def writers(self) -> list[str]:
        return sorted(path for path in self.look(deep=False) if path.startswith("writer-"))

    def whole(self, writer: str = "") -> dict[str, str]:
        """`writer/name` of what is whole, and what it is called in a run's folder. The latest
        writer's are last, and of these the latest checkpoint.
        """
        paths = (path.split("/") for path in self.look(writer))
        found = [path[:2] for path in paths if path[2:] == [MANIFEST]]
        # steps have six digits and more
        found.sort(key=lambda path: (path[0], len(path[1]), path[1]))
        return {"/".join(path): path[1].rpartition("-")[0] for path in found}

    def read(self, path: str) -> bytes:
        content: bytes = tried(lambda: self.files.open_input_file(path).read())
        return content

    def put(self, path: str, content: bytes) -> None:
        """Write a file; a small one whole or not at all."""
        target = path
        if self.is_local:
            folder, name = os.path.split(path)
            self.files.create_dir(folder)
            target = f"{folder}/.tmp-{name}"

        def write() -> None:
            with self.files.open_output_stream(target) as stream:
                stream.write(content)

        tried(write)
        if self.is_local:
            self.files.move(target, path)

    def send(self, thing: Thing, writer: str, go_on: Callable[[], None]) -> None:
        """Copy a thing, its manifest last. What an earlier try, or another writer, has sent is not
        sent again.

        Args:
            go_on: called before each part; raises to give up.
        """
        where = f"{writer}/{thing.name}"
        # of each part the latest writer's, which this one is
        there = {(p.partition("/")[2], i.size): p for p, i in sorted(self.look().items())}
        if f"{where}/{MANIFEST}" in there.values():
            return
        for name, part, begin, size in parts(thing.manifest["files"]):
            go_on()
            source, target = there.get((f"{thing.name}/{part}", size)), f"{where}/{part}"
            if source is None:
                self.put(target, os.pread(thing.files[name].fileno(), size, begin))
            elif source != target:
                self.files.create_dir(os.path.dirname(target))
                self.files.copy_file(source, target)
        go_on()
        self.put(f"{where}/{MANIFEST}", thing.index)

    def fetch(self, thing: str, folder: Path) -> None:
        """Copy a thing, `writer/name`, from here, verified. `folder` is whole or as it was.

        Raises:
            CheckpointError: a file of it is damaged.
        """
        temporary = folder.with_name(f".tmp-{folder.name}")
        new_folder(temporary)
        index = self.read(f"{thing}/{MANIFEST}")
        files = json.loads(index)["files"]
        for name, part, _, _ in parts(files):
            path = temporary / name
            if not path.resolve().is_relative_to(temporary.resolve()):
                raise CheckpointError(f"{self.name}/{thing}: {name} is not below it")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(self.read(f"{thing}/{part}"))
        for name, facts in files.items():
            if digest(temporary / name) != facts:
                raise CheckpointError(f"{self.name}/{thing}: {name} is damaged")
        if folder.name.startswith("checkpoint-"):
            (temporary / MANIFEST).write_bytes(index)
        commit(temporary, folder)

    def fetch_logs(self, thing: str, folder: Path) -> None:
        """Put the files of `writer/logs-...` into a run's folder."""
        with tempfile.TemporaryDirectory() as temporary:
            logs = Path(temporary, "logs")
            self.fetch(thing, logs)
            (logs / "exit.json").unlink(missing_ok=True)  # how this run ends is open
            shutil.copytree(logs, folder, dirs_exist_ok=True)

    def delete(self, folder: str) -> None:
        """Delete a folder: first the manifests, so that nothing in it seems whole."""
        for path in self.look(folder):
            if os.path.basename(path) == MANIFEST:
                self.files.delete_file(path)
        self.files.delete_dir(folder)


def fetched(url: str, *, with_checkpoints: bool) -> Path:
    """A copy of the run that a place holds, in the cache. What is there already is not fetched
    again.

    Raises:
        ConfigError: it holds none.
        NotNow: it does not answer.
    """
    place = Place(url)
    folder = cache_dir() / "mirrors" / fingerprint(url=url) / os.path.basename(url.rstrip("/"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        newest = {kind: path for path, kind in place.whole().items()}
        if not newest.keys() - {"logs"}:
            raise ConfigError(f"{place.name}: no run is mirrored there")
        for kind, path in newest.items():
            mark = folder / f".{kind}"
            if mark.exists() and mark.read_text() == path:
                continue
            if kind == "logs":
                place.fetch_logs(path, folder)
            elif with_checkpoints or not kind.startswith("checkpoint-"):
                place.fetch(path, folder / kind)
                mark.write_text(path)
        for old in checkpoints(folder):
            if old.name not in newest:
                discard(old)
    except FAILURES as error:
        raise NotNow(f"{place.name}: {first_line(error)}") from None
    return folder
