"""Files on a server or in an object store, named by a URL. Nothing is asked of the network until they are opened."""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar
from urllib.parse import unquote, urlsplit

from shared.config.parse import cache_dir
from shared.data import prepared
from shared.process.errors import CleanExit, ConfigError, NotNow, first_line
from shared.process.printing import label
from shared.process.redaction import masked

T = TypeVar("T")

STORES = ("s3", "gs", "gcs", "az", "abfs", "abfss")  # which pyarrow reads
SCHEMES = (*STORES, "hf", "http", "https")
PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before each new try
BLOCK = 2**23  # bytes of one request to an object store
# How the stores' libraries say that the name or the rights are wrong. All else may pass.
_REFUSED = re.compile(r"(?i)denied|forbidden|not.?found|no.?such|invalid|unauth|authenticat|authoriz|expired|\b40[0134]\b")


@dataclass(frozen=True)
class RemoteFile:
    """A file that a URL names, with the part of Path's interface that readers use. As text, it is the URL without secrets.

    Args:
        url: as the user wrote it.
        streamed: it is read from the network; otherwise it is fetched once into the cache and read there.
    """

    url: str
    streamed: bool = False

    @classmethod
    def named(cls, url: str, *, flag: str) -> RemoteFile:
        """Check the form of a URL."""
        scheme, place = url.split("://", 1)
        if scheme not in SCHEMES:
            raise ConfigError(f"--{flag} {url}: no such file; of URLs, {', '.join(SCHEMES)} are read")
        if re.search(r"[*\[]", urlsplit(url).path) or place.endswith("/"):
            raise ConfigError(f"--{flag} {url}: a URL names one file: no folder and no glob")
        return cls(url)

    def __str__(self) -> str:
        return label(self.url)

    @property
    def name(self) -> str:
        return PurePosixPath(unquote(urlsplit(self.url).path)).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    def with_suffix(self, suffix: str) -> PurePosixPath:
        return PurePosixPath(self.name).with_suffix(suffix)

    def resolve(self) -> RemoteFile:
        return self

    def identity(self) -> list[Any]:
        """Changes when the content does, and not when a URL is signed anew."""
        found = _open_store(self.url)
        if found.version is None and not self.streamed:
            raise ConfigError(f"{self}: the server gives no ETag and no time, so a change could not be seen: download it")
        url = self.url if masked(self.url) == self.url else self.url.partition("?")[0]
        return [masked(url), found.size, found.version]

    def open(self, _mode: str = "rb", buffering: int = -1) -> IO[bytes]:
        """Read bytes. Call on the main rank if the file is not streamed.

        Raises:
            ConfigError: the server or store refuses, or the file was changed while it was read.
            NotNow: it does not answer, after several tries.
        """
        if self.streamed:
            return _Reader(self)  # type: ignore[return-value]

        def fetch(folder: Path) -> None:
            from tqdm import tqdm

            copy = (folder / "file").open("wb")
            size = _open_store(self.url).size
            with copy, tqdm.wrapattr(copy, "write", size, desc=f"fetching {self}", leave=False, disable=None) as into:
                shutil.copyfileobj(_Reader(self), into, BLOCK)

        key = prepared.fingerprint(remote=self.identity())
        return (prepared.build_once(cache_dir() / "remote" / key, fetch) / "file").open("rb", buffering)


class _Reader(io.RawIOBase):
    """The bytes of a remote file, read in order from any place. After a dropped connection, it goes on where that broke."""

    def __init__(self, file: RemoteFile) -> None:
        self.file, self.place, self.held = file, 0, memoryview(b"")
        self.store = _open_store(file.url)
        self.blocks: Iterator[bytes] | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        place = offset + (0, self.place, self.store.size)[whence]
        if place != self.place:
            self.place, self.held, self.blocks = place, memoryview(b""), None
        return place

    def readinto(self, buffer: Any) -> int:
        view, done = memoryview(buffer).cast("B"), 0
        wanted = max(0, min(len(view), self.store.size - self.place))
        while done < wanted:
            if not self.held:
                self.held = memoryview(_retry(self.file.url, self._next))
            part = self.held[: wanted - done]
            view[done : done + len(part)] = part
            self.held = self.held[len(part) :]
            done += len(part)
            self.place += len(part)
        return done

    def _next(self) -> bytes:
        blocks, self.blocks = self.blocks or self.store.blocks(self.place), None
        block = next(blocks, b"")
        if not block:
            raise ConnectionError(f"the connection ended after {self.place:,} of {self.store.size:,} bytes")
        self.blocks = blocks
        return block


class _Changed(Exception):
    """The file is not the one whose size and version were read."""


class _Http:
    """A file behind http or https. `version` is its ETag or its time."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        import httpx2

        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs URLs, with their signatures
        self.url, self.size, self.version = url, 0, None
        # Redirects to anything but http and https are errors. Headers with a login stay with the host they are for.
        self.client = httpx2.Client(headers=headers | {"Accept-Encoding": "identity"}, timeout=30, follow_redirects=True)
        response = self._get("bytes=0-0")  # not HEAD: a signed URL is signed for GET
        response.close()
        self.version = self._version(response)
        size = response.headers.get("Content-Range", "").rpartition("/")[2] or response.headers.get("Content-Length", "")
        if not size.isdecimal():
            raise ConfigError(f"{url}: the server does not say how long the file is: download it")
        self.size = 0 if response.status_code == 416 else int(size)

    def _get(self, part: str) -> Any:
        response = self.client.send(self.client.build_request("GET", self.url, headers={"Range": part}), stream=True)
        if response.is_error and not (response.status_code == 416 and part == "bytes=0-0"):  # that of an empty file
            response.close()
            response.raise_for_status()
        return response

    def _version(self, response: Any) -> str | None:
        heads = [one.headers for one in (*response.history, response)]  # the Hub gives its own before it redirects
        linked = next((head["X-Linked-ETag"] for head in heads if "X-Linked-ETag" in head), None)
        return linked or heads[-1].get("ETag") or heads[-1].get("Last-Modified")

    def blocks(self, place: int) -> Iterator[bytes]:
        response = self._get(f"bytes={place}-")
        try:
            if self._version(response) != self.version:
                raise _Changed
            skip = 0 if response.status_code == 206 else place  # a server that always sends the whole
            for block in response.iter_raw():
                if skip < len(block):
                    yield block[skip:]
                skip = max(0, skip - len(block))
        finally:
            response.close()


class _Object:
    """An object of a store that pyarrow reads. `version` is its ETag, or its time."""

    def __init__(self, url: str) -> None:
        from pyarrow import fs

        scheme, _, rest = url.partition("://")
        if scheme == "az":
            if not (account := os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")):
                raise ConfigError(
                    f"{url}: whose container? Set AZURE_STORAGE_ACCOUNT_NAME, or write "
                    "abfss://container@account.dfs.core.windows.net/path"
                )
            key = os.environ.get("AZURE_STORAGE_ACCOUNT_KEY")
            self.files: Any = fs.AzureFileSystem(account, account_key=key)
            self.path = rest
        else:
            if scheme in ("gs", "gcs") and "retry_limit_seconds" not in url:  # by default, a quarter of an hour
                url += f"{'&' if '?' in url else '?'}retry_limit_seconds=60"
            self.files, self.path = fs.FileSystem.from_uri(url)
        with self.files.open_input_file(self.path) as file:
            self.size, self.version = file.size(), self._version(file)

    def _version(self, file: Any) -> str | None:
        known = {str(k).lower(): v for k, v in (file.metadata() or {}).items()}
        version = known.get("etag") or known.get("last-modified")
        return version.decode() if version else str(self.files.get_file_info(self.path).mtime_ns)

    def blocks(self, place: int) -> Iterator[bytes]:
        with self.files.open_input_file(self.path) as file:
            if self._version(file) != self.version:
                raise _Changed
            while block := file.read_at(BLOCK, place):
                yield block
                place += len(block)


@cache  # size and version are asked once a run: the file that is read is the one that was looked at
def _open_store(url: str) -> _Http | _Object:
    def open_it() -> _Http | _Object:
        scheme, _, path = url.partition("://")
        if scheme in STORES:
            return _Object(url)
        return _Http(*_on_the_hub(path)) if scheme == "hf" else _Http(url, {})

    store = _retry(url, open_it)
    if store.size == 0:
        raise ConfigError(f"{url}: the file is empty")
    return store


def _on_the_hub(path: str) -> tuple[str, dict[str, str]]:
    """Address and headers, with the user's login, of `datasets/org/name@revision/path`."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    found = re.fullmatch(r"datasets/([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)", path)
    if not found:
        raise ConfigError(f"hf://{path}: expected hf://datasets/org/name/file or hf://datasets/org/name@revision/file")
    if constants.is_offline_mode():
        raise ConfigError(f"hf://{path}: HF_HUB_OFFLINE is set")
    name, revision, file = found.groups()
    return hf_hub_url(name, file, repo_type="dataset", revision=revision and unquote(revision)), build_hf_headers()


def _retry(url: str, work: Callable[[], T]) -> T:
    """What `work` gives, after a few tries if the network or the server fails.

    Raises:
        ConfigError: the server refuses, so that another try would not help.
        NotNow: no try was successful.
    """
    import httpx2

    for pause in (*PAUSES, None):
        try:
            return work()
        except CleanExit:
            raise
        except _Changed:
            raise ConfigError(f"{url}: it was changed while this run read it: start a new run") from None
        except (OSError, ValueError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            if reason := _refusal(error):
                raise ConfigError(f"{url}: {reason}") from None
            if pause is None:
                raise NotNow(f"{url}: {first_line(error)} ({len(PAUSES) + 1} tries)") from None
            time.sleep(pause)
    raise AssertionError


def _refusal(error: Exception) -> str | None:
    """Why another try would not help; None if it may."""
    import httpx2

    if isinstance(error, httpx2.HTTPStatusError):
        response = error.response
        passes = response.status_code in (408, 425, 429) or response.status_code >= 500
        return None if passes else f"the server answers {response.status_code} {response.reason_phrase}"
    if isinstance(error, httpx2.UnsupportedProtocol | httpx2.TooManyRedirects | httpx2.InvalidURL | ValueError):
        return first_line(error)
    if isinstance(error, FileNotFoundError):
        return "no such object"
    if isinstance(error, OSError) and _REFUSED.search(re.sub(r"'[^']*'", "", str(error))):  # without names of objects
        return first_line(error)
    return None
