"""Nothing in data runs."""

import io
import os
import random
import shutil
import socket
from pathlib import Path

import pytest
from PIL import Image

from shared.data import prepared
from shared.data.files import find_files
from shared.data.records import load_hub
from shared.extras.streaming.sources import Cursor, read_hub
from shared.images import sources
from shared.images.decoding import BadImage, decode, decode_tensor
from shared.images.options import ImageConfig
from shared.process.errors import ConfigError
from tests.conftest import learn_here, paint, run, slow, write_lines
from tests.security.conftest import TINY, flip, refused


def test_a_pickle_in_place_of_data_runs_nothing(tiny_model, tmp_path, payload):
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet", "a.npy", "a.pkl", "a.txt"):
        (tmp_path / name).write_bytes(payload)
        for template in ("pretrain", "lora_finetune", "image_classification"):
            flags = () if template == "image_classification" else ("--model_name_or_path", tiny_model)
            message = refused(template, tmp_path, "--train_file", tmp_path / name, *flags)
            assert message.startswith(str(tmp_path / name)), name


def test_a_pickle_in_place_of_an_image_runs_nothing(tmp_path, payload):
    for kind in ("a", "b"):
        for number in range(4):
            paint(tmp_path / "images" / kind / f"{number}.png", 0, number, (16, 16))
    bad = tmp_path / "images" / "b" / "0.png"
    bad.write_bytes(payload)
    message = refused("image_classification", tmp_path, "--train_dir", tmp_path / "images")
    assert message.startswith(f"{bad}: not an image")


def test_code_in_a_data_set_s_folder_is_not_run(tiny_model, tmp_path, nobody_answers):
    data = tmp_path / "data"
    data.mkdir()
    (data / "data.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    refused("pretrain", tmp_path, "--dataset_name", data, "--model_name_or_path", tiny_model)
    refused("image_classification", tmp_path, "--dataset_name", data)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("flips", [1, slow(4)])
@pytest.mark.parametrize("template", ["pretrain", "lora_finetune", "text_classification", "image_classification"])
def test_no_damaged_prepared_data_are_learned_from(
    template, flips, tiny_model, text_file, image_folder, architectures, tmp_path, payload, own_cache, capsys
):
    """Pickles in the place of all files, which run nothing, and then flipped bits, one at a time."""
    rows = [{"text": f"the model reads {number} lines", "label": "ab"[number % 2]} for number in range(40)]
    labelled = write_lines(tmp_path / "labelled.jsonl", rows)
    flags = {
        "pretrain": ("--train_file", text_file, "--model_name_or_path", tiny_model),
        "lora_finetune": ("--train_file", text_file, "--model_name_or_path", tiny_model),
        "text_classification": ("--train_file", labelled, "--model_name_or_path", tiny_model, "--seq_length", 32),
        "image_classification": ("--train_dir", image_folder, "--config_name", architectures / "convnext"),
    }[template]
    flags += ("--preprocessing_num_workers", 1) if "--train_file" in flags else ()
    tiny = TINY.get(template, ("--global_batch_size", 2, "--per_device_train_batch_size", 2))

    def losses(name: str) -> list[dict]:
        rows = learn_here(template, tmp_path / name, *tiny, *flags, "--max_steps", 2).rows
        shutil.rmtree(tmp_path / name)
        return [{key: value for key, value in row.items() if "loss" in key} for row in rows]

    def files_of(folder: Path) -> dict[Path, bytes]:
        names = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != prepared.VERIFIED]
        return {path: path.read_bytes() for path in names}

    right = losses("right")
    assert len(right) >= 2
    (folder,) = (path for path in (tmp_path / "cache").glob("*/*") if path.is_dir())
    before, rng = files_of(folder), random.Random(0)
    for number in range(1 + flips):
        if number == 0:
            for path in before:
                path.write_bytes(payload)
        else:
            (path,) = rng.choices([*before], [len(content) for content in before.values()])
            flip(path, rng.randrange(8 * len(before[path])))
        assert losses(str(number)) == right and files_of(folder) == before, path
        assert f"{folder}: prepared data is damaged" in capsys.readouterr().err, path


def test_no_rank_reads_what_the_main_one_finds_damaged(tiny_model, text_file, tmp_path):
    flags = ("--train_file", text_file, "--model_name_or_path", tiny_model, *TINY["pretrain"])
    cache = tmp_path / "cache"
    first, second = (
        run("pretrain", tmp_path / name, *flags, processes=2, env={"TEMPLATES_CACHE": str(cache), "TEMPLATES_FAULT": fault})
        for name, fault in (("first", ""), ("second", "prepare:pause#0"))  # rank 1 is there long before the data are
        if name == "first" or not flip(next(cache.glob("corpus/*/tokens.bin")), 0)
    )
    assert second.output.count("prepared data is damaged, so it is prepared again") == 1
    assert second.losses == first.losses


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n%%EOF\n"


def in_iptc(content: bytes) -> bytes:
    """A picture inside of an IPTC file, which Pillow opens by its own content."""
    parts = {(3, 60): b"\1\0", (3, 65): b"\1", (3, 20): b"\0\x10", (3, 30): b"\0\x10", (3, 120): b"\5", (8, 10): content}
    return b"".join(bytes([0x1C, *tag]) + len(part).to_bytes(2, "big") + part for tag, part in parts.items())


@pytest.fixture
def ghostscript(tmp_path, monkeypatch):
    """A program of that name, which leaves a trace."""
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    yield
    assert not (tmp_path / "started").exists()
    with Image.open(io.BytesIO(in_iptc(EPS))) as image, pytest.raises(OSError):
        image.load()
    assert (tmp_path / "started").exists()  # Pillow alone would have


def test_no_picture_starts_ghostscript(tmp_path, ghostscript):
    folder = tmp_path / "data"
    for name, content in (("a.png", EPS), ("b.png", in_iptc(EPS))):
        for source in (content, tmp_path / name):
            (tmp_path / name).write_bytes(content)
            for function in (decode, decode_tensor):
                with pytest.raises(BadImage, match=r"^not an image \(AVIF, BMP, GIF, .*, WEBP\)$"):
                    function(source)
    folder.mkdir()
    (folder / "b.png").write_bytes(in_iptc(EPS))
    (folder / "metadata.csv").write_text("file_name,text\nb.png,what is seen\n")
    for load in (load_hub, lambda *of: read_hub(*of, Cursor())):  # a text's data may hold pictures, which `datasets` decodes
        ((_, record),) = load(str(folder), None, "train")
        assert record["text"] == "what is seen"


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to a pipe", "link to a device"])
def test_what_is_not_a_regular_file_is_refused_and_not_waited_for(tmp_path, kind, tiny_model):
    def make(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(os.path.relpath(path))
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")  # only root can make one
        else:
            target = tmp_path / "target" if "pipe" in kind else Path("/dev/tty")
            if "pipe" in kind and not target.exists():
                os.mkfifo(target)
            path.symlink_to(target)
        return path

    data = make(tmp_path / "data" / "b.jsonl")
    (tmp_path / "data" / "a.jsonl").write_text('{"text": "a"}\n')
    for flag, named in (("train_file", data), ("train_file", data.parent), ("dataset_name", data.parent)):
        with pytest.raises(ConfigError, match=f"^--{flag} {data}: not a regular file"):
            find_files([str(named)], flag=flag)
    image = make(tmp_path / "images" / "b" / "x.png")
    paint(tmp_path / "images" / "a" / "x.png", 0, 0, (16, 16))
    with pytest.raises(ConfigError, match=f"^{image}: not a regular file"):
        sources.list_files(ImageConfig(), tmp_path / "images")


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "named",
    [
        *("data_files: ../secret.jsonl", "data_files: [{{split: train, path: [a.jsonl, {}/secret.jsonl]}}]"),
        *("data_files: part/../../*.jsonl", "data_files: file:{}/secret.jsonl", "data_files: x/y::{}/secret.jsonl"),
        *("data_dir: ..", "data_dir: {}", "data_files: http://127.0.0.1:9/secret.jsonl", "data_files: hf://datasets/a/b/c"),
    ],
)
def test_a_data_set_s_readme_names_its_own_files_only(tmp_path, named, file, monkeypatch):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asked the network"))
    folder = tmp_path / "data"
    (folder / "part").mkdir(parents=True)
    for path in (folder / "a.jsonl", folder / "part" / "b.jsonl"):
        path.write_text('{"text": "ours"}\n')
    (tmp_path / "secret.jsonl").write_text('{"text": "a secret"}\n')
    marks = "---\n" * (file == "README.md")

    def read(line: str) -> list[str]:
        (folder / file).write_text(f"{marks}configs:\n- config_name: default\n  {line}\n{marks}")
        found = [record["text"] for _, record in load_hub(str(folder), None, "train")]
        with pytest.raises(ConfigError, match=r"holds no images|no column"):
            sources.open_table(ImageConfig(dataset_name=(str(folder),)))
        return found

    with pytest.raises(ConfigError, match=f"^--dataset_name {folder}: its README.md names .*, which is not a file of this"):
        read(named.format(tmp_path))
    with pytest.raises(ConfigError, match=r"its README\.md names"):
        sources.open_table(ImageConfig(dataset_name=(str(folder),)))
    assert read("data_files: '*.jsonl'") == ["ours"]
    assert read("data_dir: part") == ["ours"]
    (folder / "a.jsonl").rename(tmp_path / "blob")
    (folder / "a.jsonl").symlink_to("../blob")  # as in the cache of the Hub
    assert read("data_files: a.jsonl") == ["ours"]
