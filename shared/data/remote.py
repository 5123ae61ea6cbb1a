"""Files on a server or in an object store: copied once into the cache, where readers find them."""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from shared.data import prepared
from shared.process.collectives import on_main
from shared.process.errors import ConfigError, NotNow, first_line, is_of_the_network
from shared.process.files import cache_dir
from shared.process.printing import label
from shared.process.redaction import masked

T = TypeVar("T")

PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before each new try
STEADY = 60.0  # seconds without an error, after which the tries are counted anew
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of the cache, not of the network
BLOCK = 2**23  # bytes of one request to an object store
# How hubs and stores say that the name or the rights are wrong. Any other error may pass.
_REFUSED = re.compile(
    r"(?i)denied|forbidden|not.?found|not.?exist|invalid|unauth|authenticat|authoriz|expired"
    r"|offline|(?<![\d,])40[0134](?![\d,])"
)


class Copy(PosixPath):
    """The copy of a remote file. As text, it is the URL without secrets: what messages name."""

    url = ""

    def __str__(self) -> str:
        return self.url or super().__str__()

    def __fspath__(self) -> str:
        return super().__str__()


class Version(NamedTuple):
    """What tells whether a file has changed."""

    size: int
    tag: str | None  # its ETag, or its time
    commit: str | None = None  # of the Hub


def fetched(url: str) -> Copy:
    """The copy of the file that a URL names, downloaded if there is none of its present version.

    Every rank calls this: the main one downloads, the others wait.

    Raises:
        ConfigError: the server or store refuses, or the file changes meanwhile.
        NotNow: it does not answer, after several tries.
    """
    version = on_main(lambda: _retry(url, partial(_look, url)))
    if version.tag is None:
        unseen = "the server gives no ETag and no time, so a change could not be seen"
        raise ConfigError(f"{url}: {unseen}: download it")
    signed = masked(url) != url  # each time anew
    address = masked(url.partition("?")[0] if signed else url)
    key = prepared.fingerprint(remote=[address, version.size, version.tag])
    name = "file" + "".join(PurePosixPath(urlsplit(url).path).suffixes[-2:])  # readers look at it

    def build(folder: Path) -> None:
        download = _download_from_hub if url.startswith("hf://") else _download
        download(url, version, folder / name)

    copy = Copy(prepared.build_once(cache_dir() / "remote" / key, build) / name)
    copy.url = label(url)
    return copy


def read_once(url: str, most: int) -> bytes:
    """The content of a file of at most so many bytes that a URL names. Any process may call this.

    Raises:
        ConfigError: the server refuses, or the file is larger.
        NotNow: it does not answer, after several tries.
    """

    def read() -> bytes:
        with _open(url, 0) as (version, blocks):
            if version.size > most:
                raise ConfigError(f"{url}: {version.size:,} bytes are more than {most:,}")
            return b"".join(blocks)[:most]

    return _retry(url, read)


def _look(url: str) -> Version:
    if url.startswith("hf://"):
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        name, revision, file = _parts_on_hub(url)
        found = get_hf_file_metadata(hf_hub_url(name, file, repo_type="dataset", revision=revision))
        return Version(found.size or 0, found.etag, found.commit_hash)
    with _open(url, 0, "0") as (version, _):
        return version


def _parts_on_hub(url: str) -> tuple[str, str | None, str]:
    """Name, revision and file of `hf://datasets/org/name@revision/path`."""
    found = re.fullmatch(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)", url)
    if not found:
        forms = "hf://datasets/org/name/file or hf://datasets/org/name@revision/file"
        raise ConfigError(f"{url}: expected {forms}")
    name, revision, file = found.groups()
    return name, revision and unquote(revision), file


def _download_from_hub(url: str, version: Version, into: Path) -> None:
    from huggingface_hub import hf_hub_download

    name, _, file = _parts_on_hub(url)

    def download() -> str:
        return hf_hub_download(
            name,
            file,
            repo_type="dataset",
            revision=version.commit,
            local_dir=into.parent,
        )

    os.replace(_retry(url, download), into)


def _download(url: str, version: Version, into: Path) -> None:
    from tqdm import tqdm

    name = f"fetching {label(url)}"
    with (
        into.open("wb") as file,
        tqdm.wrapattr(file, "write", version.size, desc=name, leave=False, disable=None) as out,
    ):

        def go_on() -> None:
            """Append what is missing: all of it, or what follows the place where a try broke."""
            with _open(url, file.tell()) as (found, blocks):
                if found != version:
                    changed = "it was changed while this run read it"
                    raise ConfigError(f"{url}: {changed}: start a new run")
                for block in blocks:
                    out.write(block)
            if file.tell() < version.size:
                read = f"{file.tell():,} of {version.size:,} bytes"
                raise ConnectionError(f"the connection ended after {read}")

        _retry(url, go_on)


@contextmanager
def _open(url: str, place: int, last: str = "") -> Iterator[tuple[Version, Iterator[bytes]]]:
    """The version of a file, and its bytes from `place` to the one that is numbered `last`.

    An object store is asked for bytes only as they are read, so it needs no `last`.
    """
    if not url.startswith("http"):
        files, path = _find_object(url)
        with files.open_input_file(path) as file:
            known = {str(name).lower(): value for name, value in (file.metadata() or {}).items()}
            tag = known.get("etag") or known.get("last-modified")
            time_of_change = str(files.get_file_info(path).mtime_ns)
            file.seek(place)
            version = Version(file.size(), tag.decode() if tag else time_of_change)
            yield version, iter(partial(file.read, BLOCK), b"")
        return

    import httpx2

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs URLs, with their signatures
    headers = {"Range": f"bytes={place}-{last}", "Accept-Encoding": "identity"}
    # Not HEAD: a signed URL is signed for GET. Redirects to anything but http and https are errors,
    # and a login in the URL stays with its host.
    with httpx2.stream("GET", url, headers=headers, timeout=30, follow_redirects=True) as response:
        if response.status_code == 416:
            raise ConfigError(f"{url}: the file is empty, or shorter than before")
        response.raise_for_status()
        given = response.headers
        size = given.get("Content-Range", "").rpartition("/")[2] or given.get("Content-Length", "")
        if not size.isdecimal():
            raise ConfigError(f"{url}: the server does not say how long the file is: download it")
        skip = 0 if response.status_code == 206 else place  # a server that always sends the whole
        version = Version(int(size), given.get("ETag") or given.get("Last-Modified"))
        yield version, _body(response, skip)


def _body(response: Any, skip: int) -> Iterator[bytes]:
    for block in response.iter_raw():
        yield block[skip:]
        skip = max(0, skip - len(block))


def _find_object(url: str) -> tuple[Any, str]:
    """The store of an object, for pyarrow, and its path there."""
    from pyarrow import fs

    # by default, 15 minutes
    if url.startswith(("gs:", "gcs:")) and "retry_limit_seconds" not in url:
        url += f"{'&' if '?' in url else '?'}retry_limit_seconds=60"
    return fs.FileSystem.from_uri(url)


def _retry(url: str, work: Callable[[], T]) -> T:
    """What `work` gives, after a few tries if the network or the server fails.

    Raises:
        ConfigError: the server refuses, so that another try would not help.
        NotNow: no try was successful.
    """
    import httpx2

    tries = 0
    while True:
        began = time.monotonic()
        try:
            return work()
        except (OSError, ValueError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            if getattr(error, "errno", None) in DISK:
                raise
            answer = getattr(error, "response", None)
            reason = first_line(error)
            if answer is not None:
                reason = f"the server answers {answer.status_code} {answer.reason_phrase}"
            if not _may_pass(error):
                raise ConfigError(f"{url}: {reason}") from None
            tries = 1 if time.monotonic() - began > STEADY else tries + 1
            if tries > len(PAUSES):
                raise NotNow(f"{url}: {reason} ({tries} tries)") from None
            time.sleep(PAUSES[tries - 1])


def _may_pass(error: Exception) -> bool:
    """Whether another try may help."""
    import httpx2

    if isinstance(error, httpx2.HTTPError):  # also the Hub's
        return is_of_the_network(error) and not isinstance(error, httpx2.UnsupportedProtocol)
    words = re.sub(r"'[^']*'", "", str(error))  # without names of objects
    return isinstance(error, OSError) and not _REFUSED.search(words)
