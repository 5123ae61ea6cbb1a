"""Files behind URLs: the same records as local ones, fetched once, through a network that fails, without a secret told."""

import base64
import gzip
import hashlib
import json
import logging
import os
import random
import resource
import signal
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shared.config.options import BatchConfig
from shared.data import prepared, store
from shared.data.loader import Share
from shared.data.records import open_sources
from shared.data.store import prepare_sources
from shared.extras import remote
from shared.extras.streaming.sources import Cursor, open_stream
from shared.extras.streaming.stream import Stream
from shared.images.files import prepare
from shared.images.options import ImageConfig
from shared.process.errors import ConfigError, NotNow
from shared.text import chat, corpus
from shared.text.options import ChatConfig, CorpusConfig
from tests.conftest import LAUNCHER, learn_here, run, slow
from tests.data.test_records import PACK
from tests.security.test_secrets import canary, files_with

ROWS = b"".join(b'{"text": "line %d"}\n' % number for number in range(20_000))


class Server(ThreadingHTTPServer):
    """HTTP as web servers and S3 answer it: GET and HEAD, with parts, ETags, redirects and faults."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"/a.jsonl": ROWS}
        self.statuses: dict[str, int] = {}  # path -> the answer instead of the file
        self.redirects: dict[str, str] = {}
        self.ranges = self.tags = True
        self.drops: list[int] = []  # the next bodies end after so many bytes
        self.most = 10**9  # bytes of one answer
        self.chunked = False  # its length is not said, so that a short one looks whole
        self.shift = 0  # answers begin so many bytes before what was asked for
        self.before_body = lambda: None
        self.requests: list[tuple[str, str, str]] = []  # (method, path with query, Range)
        self.logins: list[str | None] = []
        self.sent = 0
        self.root = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def __exit__(self, *_) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_) -> None:
        """A client that closed its connection."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_) -> None:
        pass

    def answer(self, status: int, **headers: object) -> None:
        self.send_response(status)
        for name, value in ({"Content_Length": 0} | headers).items():
            if value is not None:
                self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def do_GET(self) -> None:
        server, path, part = self.server, self.path.partition("?")[0], self.headers.get("Range", "")
        server.requests.append((self.command, self.path, part))
        server.logins.append(self.headers.get("Authorization"))
        if path in server.redirects:
            return self.answer(302, Location=server.redirects[path])
        if path in server.statuses or path not in server.files:
            return self.answer(server.statuses.get(path, 404))
        content, headers = server.files[path], {}
        if server.tags:
            headers["ETag"] = f'"{hashlib.md5(content).hexdigest()}"'
            headers["Last-Modified"] = f"Wed, 21 Oct 2026 07:28:{zlib.crc32(content) % 60:02} GMT"
        status, body = 200, content
        if part and server.ranges:
            first, last = part.removeprefix("bytes=").split("-")
            if int(first) >= len(content):
                return self.answer(416, Content_Range=f"bytes */{len(content)}")
            first = max(0, int(first) - server.shift)
            body = content[first : int(last) + 1 if last else None]
            if not server.chunked:
                body = body[: server.most]
            status, headers["Content-Range"] = 206, f"bytes {first}-{first + len(body) - 1}/{len(content)}"
        if server.chunked and len(body) > 1:
            self.answer(status, Content_Length=None, Transfer_Encoding="chunked", **headers)
            part = body[: server.most]
            return self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(part), part))
        self.answer(status, Content_Length=len(body), **headers)
        if self.command == "GET" and len(body) > 1:
            cut = server.drops.pop(0) if server.drops else len(body)
            if cut:
                server.before_body()
            server.sent += len(body[:cut])
            self.wfile.write(body[:cut])
            self.close_connection = cut < len(body)

    do_HEAD = do_GET


@pytest.fixture
def server(tmp_path, monkeypatch, own_cache):
    """A server of its own cache, with pauses of no time and no login of the machine's."""
    monkeypatch.setattr(remote, "PAUSES", (0.0, 0.01, 0.02))
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with Server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.root)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield server


def source(*urls, streaming=False):
    config = CorpusConfig(train_file=urls)
    return open_stream(config, corpus.DEMO) if streaming else open_sources(config, demo=corpus.DEMO)[0]


def read(*urls, streaming=False):
    return [record for _, record in source(*urls, streaming=streaming).read()]


def nothing_is_left(tmp_path):
    return {path.suffix for path in (tmp_path / "cache").glob("remote/*")} <= {".lock"}


def parquet(path, rows=3000):
    pq.write_table(pa.table({"text": [f"line {n}" for n in range(rows)]}), path, row_group_size=500)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("name", "scheme", "streaming"),
    [
        *(("a.jsonl", "http", False), ("a.jsonl.gz", "s3", True), ("a.jsonl.zst", "http", True)),
        *(("a.parquet", "s3", False), ("a.csv.bz2", "s3", True), ("a.txt", "http", False), ("a.parquet", "http", True)),
    ],
)
def test_a_remote_file_gives_the_records_of_the_local_one(server, tmp_path, name, scheme, streaming):
    plain = b"text,n\na,1\n" + b"b,2\n" * 5000 if "csv" in name else ROWS
    local = tmp_path / name
    content = parquet(local) if "parquet" in name else PACK.get(local.suffix, bytes)(plain)
    local.write_bytes(content)
    server.files["/bucket/sub/" + name] = content
    root = {"http": f"{server.root}/bucket/sub/", "s3": "s3://bucket/sub/"}[scheme]
    found = list(source(root + name, streaming=streaming).read())
    expected = list(source(str(local)).read())
    assert [record for _, record in found] == [record for _, record in expected] and len(found) > 1 - (name == "a.txt")
    assert [where.rpartition("/copy-")[2] for where, _ in found] == [where.rpartition("/")[2] for where, _ in expected]
    assert len(list((tmp_path / "cache").glob("*/*"))) == 1


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_it_is_fetched_again_only_when_it_has_changed(server, tokenizer, tmp_path, scheme):
    url = {"http": f"{server.root}/b/a.jsonl", "s3": "s3://b/a.jsonl"}[scheme]
    content = server.files["/b/a.jsonl"] = b'{"text": "line 7"}\n' * 20
    encode = corpus.EncodeDocuments(tokenizer, "text")

    def prepare(url):
        server.sent = 0
        config = CorpusConfig(train_file=(url,), preprocessing_num_workers=1)
        return prepare_sources(config, encode)[0][""]

    first = prepare(url)
    assert server.sent == len(content)
    assert prepare(url).folder == first.folder and server.sent == 0
    server.files["/b/a.jsonl"] = content.replace(b"line 7", b"line 8", 1)  # as long
    changed = prepare(url)
    assert changed.folder != first.folder and server.sent == len(content)
    assert changed.source == url and changed.identity != first.identity
    local = tmp_path / "a.jsonl"
    local.write_bytes(server.files["/b/a.jsonl"])
    assert prepare(str(local)).identity == changed.identity


def test_a_url_that_is_signed_anew_is_the_same_file_and_the_library_s_log_does_not_tell_it(server, caplog):
    caplog.set_level(logging.INFO)
    secrets = canary(40), canary(40)
    first, second = (source(f"{server.root}/a.jsonl?X-Amz-Date={n}&X-Amz-Signature={s}") for n, s in enumerate(secrets))
    assert first.identity() == second.identity()
    assert len(list(first.read())) == len(list(second.read())) == 20_000
    assert [part for _, _, part in server.requests] == ["bytes=0-0", "bytes=0-", "bytes=0-0"]
    assert first.identity() != source(server.root + "/a.jsonl?version=1").identity()
    assert not any(secret in caplog.text for secret in secrets)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_dropped_connection_is_taken_up_where_it_broke(server, ranges):
    content = gzip.compress(random.Random(0).randbytes(300_000).hex().encode() + b"\n" + ROWS)
    server.files, server.ranges = {"/a.txt.gz": content}, ranges
    server.drops = [100_000, 50_000] if ranges else [0, 100_000, 150_000]  # without, the first question is answered in full
    (first, *rest) = read(f"{server.root}/a.txt.gz")
    texts = [first["text"], *(record["text"] for record in rest)]
    assert "".join(texts).encode() == gzip.decompress(content)
    parts = [part for _, _, part in server.requests if part != "bytes=0-0"]
    assert parts == ["bytes=0-", "bytes=100000-", "bytes=150000-"]
    if ranges:
        assert server.sent == len(content)


@pytest.mark.parametrize("chunked", [False, True])
def test_an_answer_that_holds_less_than_was_asked_for_is_not_the_file(server, tmp_path, chunked):
    server.most, server.chunked = 100_000, chunked
    assert len(read(f"{server.root}/a.jsonl")) == 20_000
    parts = [part for _, _, part in server.requests]
    assert parts == ["bytes=0-0", *(f"bytes={place}-" for place in range(0, len(ROWS), 100_000))]
    with pytest.raises(NotNow, match="the server sent 100,000 of"):
        remote.read_once(f"{server.root}/a.jsonl", 10**6)
    server.files["/b.jsonl"], server.most = ROWS, 0  # nothing comes
    if chunked:
        with pytest.raises(NotNow, match=rf"the server sent 0 of {len(ROWS):,} bytes \(4 tries\)"):
            read(f"{server.root}/b.jsonl")


def test_a_part_that_begins_elsewhere_is_not_appended(server, tmp_path):
    server.drops, server.shift = [100_000], 30_000
    with pytest.raises(ConfigError, match=r"a\.jsonl: the server sends other bytes than asked for: download it"):
        read(f"{server.root}/a.jsonl")
    assert nothing_is_left(tmp_path)


def test_a_store_s_copy_has_the_store_s_size(server, monkeypatch):
    from pyarrow import fs

    server.files["/b/a.jsonl"] = ROWS
    monkeypatch.setattr(fs, "copy_files", lambda _path, into, **_: Path(into).write_bytes(ROWS[:100]))
    with pytest.raises(ConfigError, match=r"s3://b/a\.jsonl: it was changed while this run read it"):
        read("s3://b/a.jsonl")


@pytest.mark.parametrize(
    ("scheme", "name"),
    # In s3, pyarrow tries for 6 seconds itself.
    [("http", "a.jsonl"), ("http", "a.parquet"), slow("s3", "a.jsonl")],
)
def test_a_network_that_fails_for_ever_is_one_line_and_exit_code_1(server, tmp_path, name, scheme):
    server.files[f"/b/{name}"] = ROWS if "jsonl" in name else parquet(tmp_path / name)
    url = {"http": server.root, "s3": "s3:/"}[scheme] + f"/b/{name}"
    server.drops = [0] * 1000
    with pytest.raises(NotNow) as error:
        read(url)
    assert str(error.value).startswith(f"{url}: ") and error.value.exit_code == 1
    assert scheme == "s3" or str(error.value).endswith(f"({len(remote.PAUSES) + 1} tries)")
    assert "\n" not in str(error.value)
    assert nothing_is_left(tmp_path)
    if scheme == "http":  # nobody listens
        server.server_close()
        with pytest.raises(NotNow, match=r"onnection refused.*\(4 tries\)"):
            read(url)


@pytest.mark.parametrize(
    ("url", "status", "code", "what"),
    [
        ("http", 404, 2, "the server answers 404 Not Found"),
        ("http", 403, 2, "the server answers 403 Forbidden"),
        ("http", 503, 1, "503"),
        ("http", 429, 1, "429"),
        ("s3", 404, 2, "does not exist"),
        ("s3", 403, 1, "ACCESS_DENIED"),
    ],
)
def test_a_refusal_is_the_user_s_and_a_server_in_trouble_is_not(server, url, status, code, what):
    server.files["/b/a.jsonl"], server.statuses["/b/a.jsonl"] = ROWS, status
    roots = {"http": f"{server.root}/b/", "s3": "s3://b/"}
    url = roots[url] + "a.jsonl"
    with pytest.raises((ConfigError, NotNow), match=what) as error:
        source(url)
    assert error.value.exit_code == code
    assert str(error.value).startswith(f"{url}: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_that_changes_while_it_is_read_is_not_mixed_with_the_new_one(server, tmp_path, ranges):
    server.ranges = ranges
    server.drops = [100_000] if ranges else [0, 100_000]
    changed = {"/a.jsonl": ROWS.replace(b"line 9", b"line 8")}
    server.before_body = lambda: server.files.update(changed)
    with pytest.raises(ConfigError, match=r"a\.jsonl: it was changed while this run read it"):
        read(f"{server.root}/a.jsonl")
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "s3://b/a.jsonl"])
def test_a_redirect_leads_to_http_only(server, target):
    server.files["/b/a.jsonl"] = ROWS
    server.redirects = {"/a.jsonl": target, "/b.jsonl": "/b/a.jsonl"}
    assert len(read(f"{server.root}/b.jsonl")) == 20_000
    with pytest.raises(ConfigError, match="protocol"):
        read(f"{server.root}/a.jsonl")
    assert all(path in ("/a.jsonl", "/b.jsonl", "/b/a.jsonl") for _, path, _ in server.requests)


def test_a_login_does_not_follow_a_redirect_to_another_host(server):
    with Server() as other:
        server.redirects["/a.jsonl"] = f"{other.root}/a.jsonl"
        assert len(read(f"http://me:pass@127.0.0.1:{server.server_port}/a.jsonl")) == 20_000
        assert set(server.logins) == {"Basic " + base64.b64encode(b"me:pass").decode()}
        assert set(other.logins) == {None}


def test_what_is_said_of_a_copy_has_the_file_s_name(server, capsys):
    server.files["/a.tsv"] = b'text\tlabel\n"a\t1\n'
    server.files |= {"/b.jsonl": b'{"text": "a"}\n{', "/c.txt": b"a\n\xff"}
    url = f"http://me:{canary(20)}@{server.root.partition('//')[2]}"
    read(f"{url}/a.tsv")
    said = capsys.readouterr().err
    assert "/copy-a.tsv: quotes are part of the text, since each line is a record\n" in said
    messages = {"b.jsonl": "b.jsonl:2: not valid JSON", "c.txt": "c.txt:2: not UTF-8 text"}
    for name, message in messages.items():
        with pytest.raises(ConfigError) as error:
            read(f"{url}/{name}")
        assert f"/copy-{message}" in str(error.value)
    rows = source(f"{url}/b.jsonl", streaming=True).read_from(Cursor(number=1, offset=14))
    with pytest.raises(ConfigError, match=r"b\.jsonl:2"):
        next(rows)


def test_a_full_disk_leaves_nothing_and_says_where_room_is_needed(server, tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))  # EFBIG in place of ENOSPC
    try:
        with pytest.raises(ConfigError, match=r"prepared data cannot be written .* TEMPLATES_CACHE"):
            read(f"{server.root}/a.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert nothing_is_left(tmp_path)


def test_a_download_that_is_killed_is_begun_anew_and_two_runs_give_one_copy(server, tmp_path):
    code = "import sys; from shared.extras.remote import fetched; print(len(fetched(sys.argv[1]).read_bytes()))"
    words = ["-c", code, f"{server.root}/a.jsonl"]
    goes_on = threading.Event()
    reached = threading.Event()
    server.drops, server.before_body = [100_000], lambda: (reached.set(), goes_on.wait(60))
    with (tmp_path / "said").open("w+") as said:
        first = LAUNCHER.start(words, said, sys.__stderr__)
        assert reached.wait(60)
        assert {path.suffix for path in (tmp_path / "cache" / "remote").iterdir()} == {".new", ".lock"}
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        goes_on.set()
        server.drops, server.before_body = [], lambda: None
        assert [run.wait() for run in [LAUNCHER.start(words, said, sys.__stderr__) for _ in range(2)]] == [0, 0]
    assert (tmp_path / "said").read_text() == f"{len(ROWS)}\n" * 2
    assert [part for _, _, part in server.requests].count("bytes=0-") == 2  # of the first, and of one of these
    (copy,) = (tmp_path / "cache" / "remote").iterdir()
    assert (copy / "copy-a.jsonl").read_bytes() == ROWS


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("ftp://h/a.jsonl", r"ftp://h/a.jsonl: expected one file, by http, .*; the Hub is read with --dataset_name"),
        ("hf://datasets/org/name/a.jsonl", "expected one file, by http"),  # pyarrow reads it, and sees no change
        ("https://h/folder/", "expected one file"),  # a web page
        ("s3://b/*.jsonl", "does not exist"),
    ],
)
def test_what_no_store_has_is_refused(server, url, what):
    with pytest.raises(ConfigError, match=what):
        source(url)


def test_what_a_server_does_not_say_is_not_guessed(server):
    server.files["/empty.jsonl"] = b""
    server.tags = False
    with pytest.raises(ConfigError, match="no ETag and no time, so a change could not be seen: download it"):
        source(f"{server.root}/a.jsonl")
    with pytest.raises(ConfigError, match="the server answers 416"):
        read(f"{server.root}/empty.jsonl")


def test_a_list_in_a_file_is_never_followed(server, tmp_path, tiny_model):
    """Neither a list of images, nor URLs in the records of a file."""
    with pytest.raises(ConfigError, match="no such file"):
        prepare(ImageConfig(train_file=(f"{server.root}/list.csv",)))
    (tmp_path / "list.txt").write_text(f"{server.root}/a.jsonl\n" * 50)
    (tmp_path / "list.jsonl").write_text(json.dumps({"text": f"{server.root}/a.jsonl"}) + "\n")
    assert len(read(str(tmp_path / "list.txt"), str(tmp_path / "list.jsonl"))) == 2
    assert server.requests == []


def test_only_the_main_rank_fetches(server, tokenizer, chat_file, monkeypatch):
    """Another rank takes part in what is decided together and asks nothing itself."""
    server.files["/a.jsonl"] = chat_file.read_bytes()
    config = ChatConfig(train_file=(f"{server.root}/a.jsonl",), preprocessing_num_workers=1)
    decided = []

    def decide(function):
        decided.append(function())
        return decided[-1]

    for module in (remote, store):
        monkeypatch.setattr(module, "on_main", decide)
    samples, _ = chat.open_samples(config, tokenizer)
    server.requests.clear()
    for module, decision in zip((remote, store), decided, strict=True):
        monkeypatch.setattr(module, "on_main", lambda _function, decision=decision: decision)
    monkeypatch.setattr(prepared, "is_main_rank", lambda: False)
    again, _ = chat.open_samples(config, tokenizer)
    assert again.fingerprint == samples.fingerprint
    assert server.requests == []


def test_a_stream_of_a_remote_file_is_that_of_the_local_one(server, text_file, tokenizer):
    server.files["/b/text.jsonl"] = text_file.read_bytes()

    def windows(url):
        batch = BatchConfig(global_batch_size=4, per_device_train_batch_size=4)
        share = Share(0, 1, torch.device("cpu"))
        stream = Stream(source(url, streaming=True), tokenizer, 16, CorpusConfig(), batch, share)
        return [window.micro_batches[0]["input_ids"].tolist() for window in stream.windows(0, 90)]

    assert windows("s3://b/text.jsonl") == windows(f"{server.root}/b/text.jsonl") == windows(str(text_file))


@pytest.mark.slow
def test_a_run_on_a_remote_file_learns_what_it_learns_from_a_local_one(server, chat_file, tiny_model, tmp_path):
    """Two processes, a dropped connection, and a login and a signature in the URL that no file and no line tells."""
    server.files["/chats.jsonl.gz"] = content = gzip.compress(chat_file.read_bytes())
    flags = ("--model_name_or_path", tiny_model, "--max_steps", 3, "--global_batch_size", 4, "--show_answers", 0)
    flags += ("--per_device_train_batch_size", 1, "--seq_length", 64, "--save_steps", 2)
    expected = learn_here("lora_finetune", tmp_path / "local", "--train_file", chat_file, *flags)
    secrets = password, signature, token = canary(40), canary(40), canary(40)
    url = f"http://me:{password}@127.0.0.1:{server.server_port}/chats.jsonl.gz?X-Amz-Signature={signature}&token={token}"
    settings = tmp_path / "run.yaml"  # not on the command line, which the launcher prints when a run fails
    settings.write_text(f"train_file: {url}\n")
    flags += ("--config", settings)
    server.drops = [100]
    result = run("lora_finetune", tmp_path / "run", *flags, "--report_to", "wandb", processes=2)
    assert result.losses == pytest.approx(expected.losses, rel=1e-5)
    parts = [part for _, _, part in server.requests]
    # once to see whether there are images, once to prepare; the content is sent once
    assert server.sent == len(content) and parts == ["bytes=0-0", "bytes=0-", "bytes=100-", "bytes=0-0"]
    server.statuses["/chats.jsonl.gz"] = 403
    refused = run("lora_finetune", tmp_path / "refused", *flags, check=False)
    cause = json.loads((tmp_path / "refused" / "exit.json").read_text())
    assert cause["exit_code"] == 2 and "error: http://***@127" in refused.output
    assert "X-Amz-Signature=***" in refused.output and "the server answers 403 Forbidden" in refused.output
    settings.unlink()
    (tmp_path / "console.txt").write_text(result.output + refused.output)
    for secret in secrets:
        assert files_with(secret, tmp_path) == []
    assert base64.b64encode(f"me:{password}".encode()).decode() not in result.output + refused.output
    for name in ("run/config.yaml", "run/final/README.md", "run/checkpoint-000002/MANIFEST.json", "refused/exit.json"):
        assert "X-Amz-Signature=***" in (tmp_path / name).read_text()
    assert files_with("X-Amz-Signature=***", tmp_path / "run" / "wandb")
