"""Files on a server or in an object store: copied once into the cache, where readers find them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from shared.data import prepared
from shared.process.collectives import on_main
from shared.process.errors import ConfigError, NotNow, first_line, is_of_the_network
from shared.process.files import cache_dir
from shared.process.printing import label, print_main
from shared.process.redaction import masked

T = TypeVar("T")
Version = tuple[int, str]  # size of a file, and its ETag or time: what tells of a change

# pyarrow knows others, some of which do not tell of a change
SCHEMES = ("http", "https", "s3", "gs", "gcs", "abfs", "abfss")
PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before each new try
STEADY = 60.0  # seconds without an error, after which the tries are counted anew


def fetched(url: str) -> Path:
    """The copy of the file that a URL names, downloaded if there is none of its present version.

    Every rank calls this: the main one downloads, the others wait.

    Raises:
        ConfigError: the server or store refuses, the file changes meanwhile, or the URL names no
            file or is of a kind that is not read.
        NotNow: it does not answer, after several tries.
    """
    scheme, _, path, *_ = urlsplit(url)
    name = os.path.basename(path)
    if scheme not in SCHEMES or not name:
        raise ConfigError(
            f"{url}: expected one file, by {', '.join(SCHEMES)}; the Hub is read with "
            "--dataset_name, or a file's https URL"
        )
    is_web = scheme.startswith("http")
    version = on_main(lambda: (_look if is_web else _look_at_object)(url))
    is_signed = masked(url) != url  # each time anew
    place = masked(url.partition("?")[0]) if is_signed else url
    key = prepared.fingerprint(remote=[place, *version])
    name = f"copy-{name}"  # readers look at its end

    def build(folder: Path) -> None:
        print_main(f"fetching {label(url)}: {version[0]:,} bytes")
        (_download if is_web else _download_object)(url, version, folder / name)

    return prepared.build_once(cache_dir() / "remote" / key, build) / name


def read_once(url: str, most: int) -> bytes:
    """The content of a file of at most so many bytes on a web server. Any process may call this.

    Raises:
        ConfigError: the server refuses, or the file is larger.
        NotNow: it does not answer, after several tries.
    """

    def read() -> bytes:
        with _opened(url, 0) as response:
            content = b""
            for block in response.iter_raw():
                content += block
                if len(content) > most:
                    raise ConfigError(f"{url}: it has more than {most:,} bytes")
            if len(content) < _size_of(response):
                raise _ended(len(content), _size_of(response))
            return content

    return _tried(url, read)


# Web servers --------------------------------------------------------------------------------------


def _look(url: str) -> Version:
    def look() -> Version:
        with _opened(url, 0, "0") as response:
            return _version_of(url, response)

    return _tried(url, look)


def _version_of(url: str, response: Any) -> Version:
    size = _size_of(response)
    tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
    if tag is None or size < 0:
        unseen = "the server gives no size, or no ETag and no time, so a change could not be seen"
        raise ConfigError(f"{url}: {unseen}: download it")
    return size, tag


def _size_of(response: Any) -> int:
    """The bytes of the whole file, as the server says; -1 if it does not know them."""
    headers = response.headers
    size = headers.get("Content-Range", "").rpartition("/")[2] or headers.get("Content-Length", "")
    return int(size) if size.isdecimal() else -1


def _ended(sent: int, size: int) -> ConnectionError:
    return ConnectionError(f"the server sent {sent:,} of {size:,} bytes")


def _changed(url: str) -> ConfigError:
    return ConfigError(f"{url}: it was changed while this run read it: start a new run")


def _download(url: str, version: Version, into: Path) -> None:
    from tqdm import tqdm

    with (
        into.open("wb") as file,
        tqdm.wrapattr(file, "write", version[0], leave=False, disable=None) as written,
    ):

        def go_on() -> None:
            """Append what is missing: all of it, or what follows the place where a try broke. An
            answer may hold less than was asked for.
            """
            while (place := file.tell()) != version[0]:
                with _opened(url, place) as response:
                    if _version_of(url, response) != version:
                        raise _changed(url)
                    if response.status_code != 206:  # a server that always sends the whole
                        file.seek(0)
                        file.truncate()
                    for block in response.iter_raw():
                        written.write(block)
                if file.tell() <= place:
                    raise _ended(place, version[0])

        _tried(url, go_on)


@contextmanager
def _opened(url: str, place: int, last: str = "") -> Iterator[Any]:
    """A web server's answer that has the bytes from `place` on, to the one numbered `last`."""
    import httpx2

    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs URLs, with their signatures
    headers = {"Range": f"bytes={place}-{last}", "Accept-Encoding": "identity"}
    # Not HEAD: a signed URL is signed for GET. Redirects to anything but http and https are errors,
    # and a login in the URL stays with its host.
    with httpx2.stream("GET", url, headers=headers, timeout=30, follow_redirects=True) as response:
        response.raise_for_status()
        begins = response.headers.get("Content-Range", "")
        if response.status_code == 206 and not begins.startswith(f"bytes {place}-"):
            raise ConfigError(f"{url}: the server sends other bytes than asked for: download it")
        yield response


def _tried(url: str, work: Callable[[], T]) -> T:
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
        except (ConnectionError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            answer = getattr(error, "response", None)
            reason = first_line(error)
            if answer is not None:
                reason = f"the server answers {answer.status_code} {answer.reason_phrase}"
            if not is_of_the_network(error) or isinstance(error, httpx2.UnsupportedProtocol):
                raise ConfigError(f"{url}: {reason}") from None
            tries = 1 if time.monotonic() - began > STEADY else tries + 1
            if tries > len(PAUSES):
                raise NotNow(f"{url}: {reason} ({tries} tries)") from None
            time.sleep(PAUSES[tries - 1])


# Object stores ------------------------------------------------------------------------------------


def _look_at_object(url: str) -> Version:
    from pyarrow import fs

    with _refusals(url):
        files, path = fs.FileSystem.from_uri(url)
        found = files.get_file_info(path)
    if not found.is_file:
        raise ConfigError(f"{url}: does not exist")
    return found.size, str(found.mtime_ns)


def _download_object(url: str, version: Version, into: Path) -> None:
    from pyarrow import fs

    with _refusals(url):
        files, path = fs.FileSystem.from_uri(url)
        fs.copy_files(path, os.fspath(into), source_filesystem=files)
    if _look_at_object(url) != version or into.stat().st_size != version[0]:
        raise _changed(url)


@contextmanager
def _refusals(url: str) -> Iterator[None]:
    """What a store answers, after tries of its own, in one line."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{url}: {first_line(error)}") from None
    except OSError as error:
        raise NotNow(f"{url}: {first_line(error)}") from None
