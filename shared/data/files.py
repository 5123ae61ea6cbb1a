"""Files that a flag names."""

import glob
import io
import os
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path, PurePath
from typing import BinaryIO, TextIO

from shared.process.errors import ConfigError

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
ARCHIVES = (".tar", ".tgz", ".xz", ".zip")


def name_inside(path: PurePath) -> PurePath:
    """a.jsonl for a.jsonl.gz; `path` itself if it is not compressed."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSED else path


def open_bytes(path: Path) -> BinaryIO:
    """The bytes of a file, unpacked if it is compressed.

    Raises:
        OSError: it cannot be read, here or later.
    """
    codec = COMPRESSED.get(path.suffix.lower())
    if codec is None:
        return path.open("rb", buffering=2**17)
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(path.open("rb"), codec), 2**17)


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Its text."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline=newline)


def is_url(name: str) -> bool:
    return "://" in name


def find_files(paths: Sequence[str | Path], *, flag: str) -> list[Path]:
    """The files that a flag names, sorted: files, folders (all below, hidden ones left out), globs.

    Raises:
        ConfigError: a path that names nothing, a pipe, or a folder that cannot be read.
    """
    files: list[Path] = []
    for named in paths:
        if os.path.isdir(named):
            below = [Path(folder, name) for folder, names in walk(named) for name in names]
            files += sorted(below, key=attrgetter("parts"))  # the order of paths, but faster
        else:
            files += matching(named, flag=flag)
    if not files:
        raise ConfigError(f"--{flag} {' '.join(map(str, paths))}: the folder holds no files")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"--{flag} {file}: not a regular file")
    return files


def matching(named: str | Path, *, flag: str) -> list[Path]:
    """The file or folder of a name, or the files of a glob, sorted.

    Raises:
        ConfigError: there is none.
    """
    if os.path.exists(named):
        return [named if isinstance(named, Path) else Path(named)]
    matches = sorted(filter(os.path.isfile, glob.glob(str(named), recursive=True)))
    if not matches:
        raise ConfigError(f"--{flag} {named}: no such file")
    return [Path(name) for name in matches]


def walk(root: str | Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (folder, names of its files) for `root` and all folders below, sorted, hidden ones left
    out.

    Links are followed, but no folder comes twice, and none that `root` lies in.

    Raises:
        ConfigError: a folder that cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None

    def shown(names: list[str]) -> list[str]:
        return sorted(name for name in names if not name.startswith("."))

    seen = {str(path) for path in Path(root).resolve().parents}
    for place, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(place)
        folders[:] = [] if real in seen else shown(folders)
        if real not in seen:
            seen.add(real)
            yield place, shown(files)
