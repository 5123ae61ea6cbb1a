"""A real S3 server in a process of its own (moto's), behind a proxy that fails, waits, is slow or dies.

By hand: python -m moto.server --port 5000, then AWS_ENDPOINT_URL=http://127.0.0.1:5000 before the command.
"""

import argparse
import contextlib
import http.client
import os
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FRAMES = {"transfer-encoding", "content-length"}  # how a body is cut up, which is said anew
FAILURE = b"<Error><Code>ServiceUnavailable</Code><Message>on purpose</Message></Error>"


class Handler(BaseHTTPRequestHandler):
    """Passes requests on."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    options: argparse.Namespace
    line = threading.Lock()  # all share one

    def log_message(self, *_) -> None:
        pass

    def on_the_line(self, content: bytes) -> bytes:
        if self.options.rate:
            with self.line:
                time.sleep(len(content) / self.options.rate)
        return content

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.read(int(self.headers.get("Content-Length") or 0))
        blocks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            blocks.append(self.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(blocks)

    def read(self, left: int) -> bytes:
        blocks = []
        while left and (block := self.rfile.read(min(left, 1 << 16))):
            blocks.append(self.on_the_line(block))
            left -= len(block)
        return b"".join(blocks)

    def pass_on(self) -> None:
        body, status, headers, content = self.body(), 503, [], FAILURE
        time.sleep(self.options.latency)
        if random.random() >= self.options.fail:
            connection = http.client.HTTPConnection("127.0.0.1", self.options.behind)
            given = {name: value for name, value in self.headers.items() if name.lower() not in FRAMES}
            connection.request(self.command, self.path, body, given | {"Content-Length": str(len(body))})
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
            headers = [pair for pair in answer.getheaders() if pair[0] not in ("Connection", "Transfer-Encoding")]
        self.send_response(status)
        for name, value in headers:
            if self.command == "HEAD" or name != "Content-Length":
                self.send_header(name, value)
        if self.command != "HEAD" and status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            for begin in range(0, len(content), 1 << 16):
                self.wfile.write(self.on_the_line(content[begin : begin + (1 << 16)]))

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on


class Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_) -> None:
        """A client that closed its connection."""


class ObjectStore:
    """A server with a bucket, `url`, for processes that have `environment`."""

    url = "s3://bucket/runs/first"

    def __init__(self, ports: tuple[int, int], log: Path) -> None:
        self.port, self.behind = ports
        self.log = log.open("a")
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "AKIA" + "Q7" * 8,
            "AWS_SECRET_ACCESS_KEY": "s3cr3t" + "x9" * 17,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self.server = self._started("-m", "moto.server", "--port", self.behind)
        bucket = urllib.request.Request(f"http://127.0.0.1:{self.behind}/bucket", method="PUT")
        self._until(lambda: urllib.request.urlopen(bucket))
        self.start()

    def _started(self, *words: object) -> subprocess.Popen:
        env = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        return subprocess.Popen([sys.executable, *map(str, words)], stdout=self.log, stderr=self.log, env=env)

    def _until(self, work) -> None:
        for _ in range(600):
            with contextlib.suppress(OSError):
                return work()
            time.sleep(0.1)
        raise TimeoutError("the object store does not start")

    def start(self, *, fail: float = 0, latency: float = 0, rate: float = 0) -> None:
        """Let clients reach it, through a line that fails at random, waits, or has so many bytes a second."""
        words = ("--fail", fail, "--latency", latency, "--rate", rate)
        self.proxy = self._started(__file__, self.port, self.behind, *words)
        self._until(lambda: http.client.HTTPConnection("127.0.0.1", self.port).connect())

    def kill(self) -> None:
        """Cut it off, in the middle of whatever it does. What it has stays."""
        self.proxy.kill()
        self.proxy.wait()

    def close(self) -> None:
        self.kill()
        self.server.kill()
        self.server.wait()

    def requests(self, method: str) -> list[str]:
        """What was asked of it."""
        return re.findall(rf'"{method} (\S+)', Path(self.log.name).read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("behind", type=int)
    for name in ("--fail", "--latency", "--rate"):
        parser.add_argument(name, type=float, default=0)
    Handler.options = parser.parse_args()
    Proxy(("127.0.0.1", Handler.options.port), Handler).serve_forever()
