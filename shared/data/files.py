"""Files that a flag names."""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from shared.process.errors import ConfigError

ARCHIVES = (".7z", ".bz2", ".gz", ".lz4", ".rar", ".tar", ".tbz2", ".tgz", ".txz", ".xz", ".zip", ".zst")


def find_files(paths: Sequence[str], *, flag: str) -> list[Path]:
    """The files that a flag names: files, folders (all files below, hidden ones left out) or globs, sorted.

    Raises:
        ConfigError: a path that names nothing, an empty file, an archive, or a folder that cannot be read.
    """
    found: list[Path] = []
    for path in paths:
        if os.path.isdir(path):
            found += sorted(Path(place, name) for place, names in walk(path) for name in names)
        elif os.path.exists(path):
            found.append(Path(path))
        else:
            matches = [Path(p) for p in sorted(glob.glob(path, recursive=True)) if os.path.isfile(p)]
            if not matches:
                raise ConfigError(f"--{flag} {path}: no such file")
            found += matches
    if not found:
        raise ConfigError(f"--{flag} {' '.join(paths)}: the folder holds no files")
    for file in found:
        if not file.exists():
            raise ConfigError(f"--{flag} {file}: a link to nothing")
        refuse_archive(file, flag=flag)
    if all(p.stat().st_size == 0 for p in found):
        raise ConfigError(f"{found[0]}: the file is empty")
    return found


def refuse_archive(path: Path, *, flag: str) -> None:
    """Raise a ConfigError for an archive or a compressed file: nothing is unpacked here."""
    if path.suffix.lower() in ARCHIVES and path.is_file():
        raise ConfigError(f"--{flag} {path}: an archive or compressed file: unpack it first, and name what was in it")


def walk(root: str | Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (folder, names of its files) for `root` and all folders below, sorted, hidden ones left out.

    Links are followed, but no folder comes twice, and none that `root` lies in.

    Raises:
        ConfigError: a folder that cannot be read.
    """

    def refuse(error: OSError) -> None:  # os.walk would skip the folder without a word
        raise ConfigError(f"{error.filename}: {error.strerror}") from None

    seen = {str(path) for path in Path(root).resolve().parents}
    for place, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield place, sorted(name for name in files if not name.startswith("."))
