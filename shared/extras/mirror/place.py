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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

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


T = TypeVar("T")


def tried(work: Callable[[], T]) -> T:
    """What `work` gives, after a few tries if the store fails."""
    for pause in PAUSES:
        try:
            return work()
        except FileNotFoundError:
            raise
        except FAILURES:
            time.sleep(pause)
    return work()


@dataclass
class Thing:
    """A folder that is whole at a place, or not there.

    Args:
        folder: on this machine.
        index: the bytes of its manifest: at least checksum and size of all files.
    """

    folder: Path
    index: bytes
    files: dict[str, IO[bytes]] = field(default_factory=dict)  # while they are open

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the files open, so that they can be sent although the run deletes them."""
        with ExitStack() as stack:
            for name in json.loads(self.index)["files"]:
                self.files[name] = stack.enter_context((self.folder / name).open("rb"))
            yield

    @property
    def name(self) -> str:
        return f"{self.folder.name}-{hashlib.sha256(self.index).hexdigest()[:12]}"


def thing_of(folder: Path) -> Thing:
    """A checkpoint by its own manifest, any other folder by one that is made here."""
    if (folder / MANIFEST).exists():
        return Thing(folder, (folder / MANIFEST).read_bytes())
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {str(path.relative_to(folder)): digest(path) for path in paths}
    return Thing(folder, json.dumps({"files": files}).encode())


def parts(name: str, size: int) -> Iterator[tuple[str, int, int]]:
    """(name, begin, bytes) of each part of a file."""
    count = max(1, -(-size // PART))
    for number in range(count):
        begin = number * PART
        yield name + f".{number:05d}" * (count > 1), begin, min(PART, size - begin)


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

    def look(self, folder: str, *, deep: bool = True) -> dict[str, Any]:
        """What is in a folder, by its path there. Nothing if it does not exist."""
        selector = fs.FileSelector(folder, recursive=deep, allow_not_found=True)
        found = tried(lambda: self.files.get_file_info(selector))
        return {os.path.relpath(info.path, folder or "."): info for info in found}

    def writers(self) -> list[str]:
        return sorted(name for name in self.look("", deep=False) if name.startswith("writer-"))

    def whole(self, writer: str) -> list[str]:
        """Names of a writer's things that are whole, the earliest checkpoint first."""
        found = (path.split("/") for path in self.look(writer))
        names = (path[0] for path in found if path[1:] == [MANIFEST])
        return sorted(names, key=lambda name: (len(name), name))  # steps of six digits and more

    def read(self, path: str) -> bytes:
        def read() -> bytes:
            with self.files.open_input_file(path) as file:
                content: bytes = file.read()
            return content

        return tried(read)

    def put(self, path: str, content: bytes) -> None:
        """Write a file; a small one whole or not at all."""
        target = path
        if self.is_local:
            folder, name = os.path.split(path)
            self.files.create_dir(folder, recursive=True)
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
            thing: opened.
            go_on: called before each part; raises to give up.
        """
        where = f"{writer}/{thing.name}"
        there = {path: info.size for path, info in self.look(where).items()}
        if MANIFEST in there:
            return
        others: dict[str, Any] = {}
        for other in self.writers():
            others |= self.look(f"{other}/{thing.name}") if other != writer else {}
        for name, facts in json.loads(thing.index)["files"].items():
            for part, begin, size in parts(name, facts["size"]):
                go_on()
                if there.get(part) == size:
                    continue
                if part in others and others[part].size == size:
                    self.files.create_dir(os.path.dirname(f"{where}/{part}"))
                    self.files.copy_file(others[part].path, f"{where}/{part}")
                else:
                    content = os.pread(thing.files[name].fileno(), size, begin)
                    self.put(f"{where}/{part}", content)
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
        for name, facts in json.loads(index)["files"].items():
            path = temporary / name
            if not path.resolve().is_relative_to(temporary.resolve()):
                raise CheckpointError(f"{self.name}/{thing}: {name} is not below it")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for part, _, _ in parts(name, facts["size"]):
                    file.write(self.read(f"{thing}/{part}"))
            if digest(path) != facts:
                raise CheckpointError(f"{self.name}/{thing}: {name} is damaged")
        if folder.name.startswith("checkpoint-"):
            (temporary / MANIFEST).write_bytes(index)
        commit(temporary, folder)

    def fetch_logs(self, thing: str, folder: Path) -> None:
        """Put the files of `writer/logs-...` into a run's folder."""
        with tempfile.TemporaryDirectory() as temporary:
            self.fetch(thing, Path(temporary, "logs"))
            Path(temporary, "logs/exit.json").unlink(missing_ok=True)  # how this run ends is open
            shutil.copytree(Path(temporary, "logs"), folder, dirs_exist_ok=True)

    def delete(self, folder: str) -> None:
        """Delete a folder: first the manifests, so that nothing in it seems whole."""
        for path, info in self.look(folder).items():
            if os.path.basename(path) == MANIFEST:
                self.files.delete_file(info.path)
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
        for writer in reversed(place.writers()):
            names = place.whole(writer)
            if any(not name.startswith("logs-") for name in names):
                break
        else:
            raise ConfigError(f"{place.name}: no run is mirrored there")
        for name in names:
            kind = name.rpartition("-")[0]
            mark = folder / f".{kind}"
            if mark.exists() and mark.read_text() == name:
                continue
            if kind.startswith("checkpoint-") and not with_checkpoints:
                continue
            if kind == "logs":
                place.fetch_logs(f"{writer}/{name}", folder)
            else:
                place.fetch(f"{writer}/{name}", folder / kind)
            mark.write_text(name)
        for old in checkpoints(folder):
            if not any(name.startswith(f"{old.name}-") for name in names):
                discard(old)
    except FAILURES as error:
        raise NotNow(f"{place.name}: {first_line(error)}") from None
    return folder
