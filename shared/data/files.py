"""Files that a flag names."""

import bz2
import glob
import gzip
import io
import lzma
import os
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import attrgetter
from pathlib import Path, PurePath, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from shared.process.errors import ConfigError, first_line
from shared.process.files import NOT_REGULAR

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hf", "http", "https")
ARCHIVES = (
    ".7z",
    ".bz2",
    ".gz",
    ".lz4",
    ".rar",
    ".tar",
    ".tbz2",
    ".tgz",
    ".txz",
    ".xz",
    ".zip",
    ".zst",
)
PACKED = "an archive or compressed file: unpack it first, and name what was in it"
# A compressed file gives at most FREE + RATIO x its bytes, a record RECORD bytes.
FREE = 2**25
RATIO = 500
RECORD = 2**28


def _open_zstd(file: Any) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(file, "zstd")


COMPRESSED: dict[str, Any] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}


def name_inside(path: PurePath) -> PurePath:
    """a.jsonl for a.jsonl.gz; `path` itself if it is not compressed."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSED else path


class DataFile(io.RawIOBase):
    """The bytes of a file, unpacked if it is compressed. Set `record` to 0 and `line` to its line
    when a record begins.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unpacked = 0  # bytes given so far
        self.record = 0  # and those since the record began
        self.line = 1
        self.file: Any = path.open("rb", buffering=0)
        self.stream = (
            COMPRESSED[path.suffix.lower()](self.file) if path != name_inside(path) else None
        )

    def text(self, newline: str | None = None) -> io.TextIOWrapper:
        buffer = io.BufferedReader(self, 2**17)
        return io.TextIOWrapper(buffer, encoding="utf-8-sig", newline=newline)

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
        except Exception as error:  # each library raises types of its own
            raise ConfigError(
                f"{self.path}: cannot be unpacked, damaged or incomplete ({first_line(error)})"
            ) from None
        self.unpacked += size
        self.record += size
        if self.unpacked > FREE + RATIO * self.file.tell():
            raise ConfigError(
                f"{self.path}: unpacks to more than {RATIO} times its size; if you "
                "trust it, unpack it first"
            )
        if self.record > RECORD:
            raise ConfigError(
                f"{self.path}:{self.line}: more than {RECORD >> 20} MiB in one "
                "record; unpack the file first"
            )
        return size


def is_url(name: str) -> bool:
    return "://" in name


def check_url(url: str, *, flag: str) -> None:
    """Refuse a URL that does not name one file of data. Nothing is asked of the network.

    Raises:
        ConfigError: another scheme, a folder, a glob or an archive.
    """
    scheme = url.partition("://")[0]
    path = urlsplit(url).path
    if scheme not in SCHEMES:
        raise ConfigError(f"--{flag} {url}: no such file; of URLs, {', '.join(SCHEMES)} are read")
    if re.search(r"[*\[]|/$|^$", path):
        raise ConfigError(f"--{flag} {url}: a URL names one file: no folder and no glob")
    if _is_packed(PurePosixPath(path)):
        raise ConfigError(f"--{flag} {url}: {PACKED}")


def find_files(
    paths: Sequence[str | Path],
    *,
    flag: str,
    quick: bool = False,
    tars: bool = False,
) -> list[Path]:
    """The files that a flag names, sorted: files, folders (all below, hidden ones left out), globs.

    `quick`: of a folder, some files are enough. `tars`: tar files are no archives to be refused.

    Raises:
        ConfigError: a path that names nothing, an empty file, a pipe, an archive, or a folder that
            cannot be read.
    """
    files: list[Path] = []
    for named in paths:
        if os.path.isdir(named):
            below = (Path(folder, name) for folder, names in walk(named) for name in names)
            enough = islice(below, 1000 if quick else None)
            files += sorted(enough, key=attrgetter("parts"))  # the order of paths, but faster
        elif os.path.exists(named):
            files.append(named if isinstance(named, Path) else Path(named))
        else:
            matches = sorted(filter(os.path.isfile, glob.glob(str(named), recursive=True)))
            if not matches:
                raise ConfigError(f"--{flag} {named}: no such file")
            files += map(Path, matches)
    if not files:
        raise ConfigError(f"--{flag} {' '.join(map(str, paths))}: the folder holds no files")
    for file in files:
        if not file.is_file():
            reason = NOT_REGULAR if file.exists() else "a link to nothing"
            raise ConfigError(f"--{flag} {file}: {reason}")
        if tars and file.suffix.lower() == ".tar":
            continue
        if _is_packed(file) or flag == "dataset_name":
            refuse_archive(file, flag=flag)
    if all(file.stat().st_size == 0 for file in files):
        raise ConfigError(f"{files[0]}: the file is empty")
    return files


def _is_packed(path: PurePath) -> bool:
    """Whether readers cannot take it: an archive, or compressed twice."""
    suffix = path.suffix.lower()
    inner = name_inside(path).suffix.lower()
    return suffix in ARCHIVES and (suffix == inner or inner in (*ARCHIVES, ".parquet"))


def refuse_archive(path: Path, *, flag: str) -> None:
    """Raise a ConfigError for an archive or a compressed file."""
    if path.suffix.lower() in ARCHIVES:
        raise ConfigError(f"--{flag} {path}: {PACKED}")


def walk(root: str | Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (folder, names of its files) for `root` and all folders below, sorted, hidden ones left
    out.

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
