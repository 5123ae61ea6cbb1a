"""Files that a flag names."""

import bz2
import glob
import gzip
import importlib
import io
import lzma
import os
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path, PurePath
from typing import Any

from shared.data.remote import RemoteFile
from shared.process.errors import CleanExit, ConfigError, first_line
from shared.process.files import NOT_REGULAR

File = Path | RemoteFile

ARCHIVES = (".7z", ".bz2", ".gz", ".lz4", ".rar", ".tar", ".tbz2", ".tgz", ".txz", ".xz", ".zip", ".zst")
FREE, RATIO, RECORD = 2**25, 500, 2**28  # a compressed file gives at most FREE + RATIO x its bytes, a record RECORD bytes
COMPRESSED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSED[".zst"] = lambda file: importlib.import_module("pyarrow").CompressedInputStream(file, "zstd")  # slow to import


def name_inside(path: File) -> File | PurePath:
    """a.jsonl for a.jsonl.gz; `path` itself if it is not compressed."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSED else path


class DataFile(io.RawIOBase):
    """The bytes of a file, unpacked if it is compressed. Set `record` to 0 and `line` to its line when a record begins."""

    def __init__(self, path: File) -> None:
        self.path, self.unpacked, self.record, self.line = path, 0, 0, 1
        self.file: Any = path.open("rb", buffering=0)
        self.stream = COMPRESSED[path.suffix.lower()](self.file) if path != name_inside(path) else None

    def text(self, newline: str | None = None, encoding: str = "utf-8-sig") -> io.TextIOWrapper:
        return io.TextIOWrapper(io.BufferedReader(self, 2**17), encoding=encoding, newline=newline)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        getattr(self, "file", io.BytesIO()).close()  # none if it could not be opened
        super().close()

    def readinto(self, buffer: Any) -> int:
        if self.stream is None:
            return self.file.readinto(buffer)
        try:
            size = self.stream.readinto(buffer)
        except CleanExit:
            raise
        except Exception as error:  # each library raises types of its own
            raise ConfigError(f"{self.path}: cannot be unpacked, damaged or incomplete ({first_line(error)})") from None
        self.unpacked, self.record = self.unpacked + size, self.record + size
        if self.unpacked > FREE + RATIO * self.file.tell():
            raise ConfigError(f"{self.path}: unpacks to more than {RATIO} times its size; if you trust it, unpack it first")
        if self.record > RECORD:
            raise ConfigError(f"{self.path}:{self.line}: more than {RECORD >> 20} MiB in one record; unpack the file first")
        return size


def find_files(paths: Sequence[str], *, flag: str, quick: bool = False, tars: bool = False) -> list[Any]:
    """The files that a flag names: files, folders (all files below, hidden ones left out) or globs, sorted; Paths.

    A URL becomes a RemoteFile. Whether there is such a file is asked when it is opened. `quick`: of a folder, some files are
    enough. A folder may hold a million files: its list says what they are. `tars`: tar files are no archives to be refused.

    Raises:
        ConfigError: a path that names nothing, an empty file, a pipe, an archive, or a folder that cannot be read.
    """
    found: list[File] = []
    unsure: list[Path] = []  # whether these are regular
    for named in paths:
        if "://" in named and flag in ("train_file", "validation_file"):
            found.append(RemoteFile.named(named, flag=flag))
        elif os.path.isdir(named):
            below: list[Path] = []
            for place, names in walk(named):
                with os.scandir(place) as entries:
                    odd = {entry.name for entry in entries if not entry.is_file()}
                below += [Path(place, name) for name in names]
                unsure += [Path(place, name) for name in names if name in odd]
                if below and quick:
                    break
            found += sorted(below, key=attrgetter("parts"))  # the order of paths, but faster
        elif os.path.exists(named):
            found.append(Path(named))
            unsure.append(Path(named))
        else:
            matches = [Path(p) for p in sorted(glob.glob(named, recursive=True)) if os.path.isfile(p)]
            if not matches:
                raise ConfigError(f"--{flag} {named}: no such file")
            found += matches
    if not found:
        raise ConfigError(f"--{flag} {' '.join(paths)}: the folder holds no files")
    for path in unsure:
        if not path.is_file():
            raise ConfigError(f"--{flag} {path}: {NOT_REGULAR if path.exists() else 'a link to nothing'}")
    for file in found:
        if file.suffix.lower() not in ARCHIVES or (tars and file.suffix.lower() == ".tar"):
            continue
        if flag == "dataset_name" or file == (inner := name_inside(file)) or inner.suffix.lower() in (*ARCHIVES, ".parquet"):
            refuse_archive(file, flag=flag)
    if all(isinstance(p, Path) and p.stat().st_size == 0 for p in found):
        raise ConfigError(f"{found[0]}: the file is empty")
    return found


def refuse_archive(path: File, *, flag: str) -> None:
    """Raise a ConfigError for an archive or a compressed file."""
    if path.suffix.lower() in ARCHIVES and (isinstance(path, RemoteFile) or path.is_file()):
        raise ConfigError(f"--{flag} {path}: an archive or compressed file: unpack it first, and name what was in it")


def walk(root: str | Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (folder, names of its files) for `root` and all folders below, sorted, hidden ones left out.

    Links are followed, but no folder comes twice, and none that `root` lies in.

    Raises:
        ConfigError: a folder that cannot be read.
    """

    seen = {str(path) for path in Path(root).resolve().parents}
    left = [os.fspath(root)]
    while left:
        place = left.pop()
        if (real := os.path.realpath(place)) in seen:
            continue
        seen.add(real)
        folders: list[str] = []
        files: list[str] = []
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if not entry.name.startswith("."):
                        (folders if entry.is_dir() else files).append(entry.name)
        except OSError as error:
            raise ConfigError(f"{place}: {error.strerror}") from None
        yield place, sorted(files)
        left += [os.path.join(place, name) for name in sorted(folders, reverse=True)]
