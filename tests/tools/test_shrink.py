"""A copy with smaller images trains on the same samples, in the same order, with the same labels, the same way up."""

import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms
from torch.utils.data import default_collate

from shared.data.loader import Loader, Share
from shared.data.order import Order
from shared.images.augment import training_rows
from shared.images.decoding import decode, decode_tensor
from shared.images.files import prepare
from shared.images.options import ImageConfig, RecipeConfig
from shared.images.processor import image_processor
from shared.process.errors import ConfigError
from tests.conftest import encoded
from tools import shrink

SIZE = 32
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


pytestmark = pytest.mark.usefixtures("cpu_state")


def gradient(width, height, mode="RGB"):
    """Brighter to the right in red and grey, downwards in green; transparent at the top of its right half."""
    y, x = np.mgrid[:height, :width]
    bands = [255 * x / width, 255 * y / height, 0 * x + 90, np.where((y < height / 2) & (x > width / 2), 0, 255)]
    chosen = {"L": [0], "LA": [0, 3], "RGB": [0, 1, 2], "RGBA": [0, 1, 2, 3]}[mode]
    pixels = np.stack([bands[band] for band in chosen], axis=2).astype(np.uint8)
    return Image.fromarray(pixels.squeeze())


def turned(orientation, **options):
    exif = Image.Exif()
    exif[274] = orientation
    return encoded(gradient(200, 120), "JPEG", quality=92, exif=exif, **options)


# name: (content, expected width and height once decoded; None: the same bytes)
CASES = {
    "wide.jpg": (encoded(gradient(333, 100), "JPEG", quality=90, icc_profile=PROFILE), (107, 32)),
    "tall.jpg": (encoded(gradient(65, 401), "JPEG", quality=90), (32, 197)),
    "large.jpg": (encoded(gradient(1024, 768), "JPEG", quality=90), (43, 32)),
    "small.jpg": (encoded(gradient(300, 32), "JPEG", quality=50), None),
    "turned.jpg": (turned(6), (32, 53)),
    "mirrored.jpg": (turned(2), (53, 32)),
    "grey.jpg": (encoded(gradient(77, 99, "L"), "JPEG"), (32, 41)),
    "square.bmp": (encoded(gradient(64, 64), "BMP"), (32, 32)),
    "grey.png": (encoded(gradient(50, 64, "LA"), "PNG"), (32, 41)),
    "alpha.png": (encoded(gradient(90, 64, "RGBA"), "PNG", icc_profile=PROFILE), (45, 32)),
    "lossless.webp": (encoded(gradient(90, 64), "WEBP", lossless=True), (45, 32)),
    "palette.png": (encoded(gradient(90, 64).quantize(), "PNG"), None),
    "cmyk.jpg": (encoded(gradient(90, 64).convert("CMYK"), "JPEG"), None),
    "moving.gif": (encoded(gradient(90, 64), "GIF", save_all=True, append_images=[gradient(90, 64, "L")]), None),
}


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["shrink", *map(str, arguments), "--size", str(SIZE)])
    shrink.main()


def class_folders(root: Path):
    for number, (name, (content, _)) in enumerate(CASES.items()):
        for label in ("cat", "dog"):
            path = root / label / f"{number % 2}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    (root / "cat" / "about.txt").write_text("two cats")
    return root


def files_of(root: Path):
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def check_image(name, before, after):
    size = CASES[name][1]
    if size is None:
        assert after == before, name
        return
    old, new = (Image.open(io.BytesIO(content)) for content in (before, after))
    assert (new.format, new.mode) == (old.format, old.mode), name
    assert new.info.get("icc_profile") == old.info.get("icc_profile"), name
    assert decode(after).size == size == tuple(decode_tensor(after).shape[:0:-1]), name
    # the same picture the same way up, also where it is transparent
    expected = decode(before).resize(size, Image.Resampling.BICUBIC)
    assert np.abs(np.asarray(decode(after), int) - np.asarray(expected, int)).mean() < 3, name


def batches_of(**named):
    """(the data, the labels of each batch of an epoch of training)."""
    data = prepare(ImageConfig(**named))
    processor = image_processor(None, 24, None)
    order = Order(len(data.train), 4, seed=5, shuffle=True)
    rows = training_rows(data.train, RecipeConfig(crop_min_scale=0.35, horizontal_flip=0.5), processor)
    loader = Loader(data.train, default_collate, order, Share(0, 1, torch.device("cpu")), per_device=4, transform=rows)
    batches = [batch for window in loader.windows(0, loader.steps_per_epoch or 0) for batch in window.micro_batches]
    assert {tuple(batch["pixel_values"].shape[1:]) for batch in batches} == {(3, 24, 24)}
    return data, [batch["labels"].tolist() for batch in batches]


def test_class_folders(tmp_path, monkeypatch, capsys):
    source = class_folders(tmp_path / "photos")
    run(monkeypatch, source, tmp_path / "one")
    said = capsys.readouterr().out
    run(monkeypatch, source, tmp_path / "two")
    before, after = files_of(source), files_of(tmp_path / "one")
    assert list(after) == list(before) and after == files_of(tmp_path / "two")
    assert after["cat/about.txt"] == b"two cats"
    for path in before:
        if not path.endswith(".txt"):
            check_image(Path(path).name, before[path], after[path])
    assert said.startswith(f"{len(before) - 1} images:\n  20 made smaller\n")
    assert "  2 small already\n" in said and "  2 kept as they are (JPEG CMYK)\n" in said
    assert f"--train_dir {tmp_path}/one\n" in said
    assert {path.name for path in tmp_path.iterdir()} == {"photos", "one", "two"}


def packed(path: Path):
    """A tar file of WebDataset's samples, with a mask that no training reads and a link."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for number, (name, (content, _)) in enumerate(2 * [*CASES.items()]):
            ending = name.partition(".")[2]
            members = [(f"{number:03d}.{ending}", content), (f"{number:03d}.cls", str(number % 3).encode())]
            members += [(f"{number:03d}.seg.png", CASES["grey.png"][0])]
            for member, data in members[:: 1 if number % 2 else -1]:
                info = tarfile.TarInfo(member)
                info.size, info.mtime = len(data), 1_700_000_000.25  # a fraction needs an extended header
                tar.addfile(info, io.BytesIO(data))
        info = tarfile.TarInfo("link.jpg")
        info.type, info.linkname = tarfile.SYMTYPE, "000.jpg"
        tar.addfile(info)
    return path


def members_of(path: Path):
    with tarfile.open(path) as tar:
        return [(i.name, i.type, i.mtime, i.mode, i.isreg() and tar.extractfile(i).read()) for i in tar]


def test_tar_files(tmp_path, monkeypatch, capsys):
    source = packed(tmp_path / "train-0.tar")
    for name in ("one", "two"):
        run(monkeypatch, source, packed(tmp_path / "val-0.tar"), tmp_path / name)
    assert f"--train_file {tmp_path}/two/train-0.tar --validation_file {tmp_path}/two/val-0.tar" in capsys.readouterr().out
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    before, after = members_of(source), members_of(tmp_path / "one/train-0.tar")
    assert [member[:4] for member in after] == [member[:4] for member in before]
    names = 2 * [*CASES]
    for (member, *_, old), (*_, new) in zip(before, after, strict=True):
        if member.endswith((".cls", ".seg.png")) or not old:
            assert new == old
        else:
            check_image(names[int(member[:3])], old, new)


@pytest.mark.parametrize("form", ["folder", "tar", "list"])
def test_training_gets_the_same_labels_in_the_same_order(tmp_path, monkeypatch, form):
    source, small = tmp_path / "photos", tmp_path / "small"
    if form == "tar":
        run(monkeypatch, packed(tmp_path / "train.tar"), small)
        named = [{"train_file": (str(folder / "train.tar"),)} for folder in (tmp_path, small)]
    elif form == "list":
        paths = [str(path.relative_to(source)) for path in class_folders(source).rglob("*.*") if path.suffix != ".txt"]
        rows = [json.dumps({"path": f"./{path}", "label": number % 3}) for number, path in enumerate(paths[::-1])]
        (source / "list.jsonl").write_text("\n".join(rows))
        run(monkeypatch, source / "list.jsonl", small)
        assert {*files_of(small)} == {*paths, "list.jsonl"}
        named = [{"train_file": (str(folder / "list.jsonl"),)} for folder in (source, small)]
    else:
        run(monkeypatch, class_folders(source), small)
        named = [{"train_dir": (folder,)} for folder in (source, small)]
    (large, labels), (shrunk, labels_of_small) = (batches_of(**source) for source in named)
    assert labels == labels_of_small and large.classes == shrunk.classes and large.identity != shrunk.identity
    for part in ("train", "validation"):
        old, new = (getattr(data, part) for data in (large, shrunk))
        assert [Path(old.where(i)).name for i in range(len(old))] == [Path(new.where(i)).name for i in range(len(new))]


def test_a_damaged_image_is_named_or_kept(tmp_path, monkeypatch, capsys):
    source = class_folders(tmp_path / "photos")
    bad = source / "dog/0/bad.jpg"
    bad.write_bytes(CASES["large.jpg"][0][:2000])
    with pytest.raises(ConfigError, match=r"dog/0/bad\.jpg: .*--skip_bad_images"):
        run(monkeypatch, source, tmp_path / "small")
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
    run(monkeypatch, source, tmp_path / "small", "--skip_bad_images")
    assert (tmp_path / "small/dog/0/bad.jpg").read_bytes() == bad.read_bytes()
    assert "  1 damaged, kept as they are\n" in capsys.readouterr().out


def test_nothing_is_overwritten_and_what_cannot_be_copied_is_named(tmp_path, monkeypatch):
    source = class_folders(tmp_path / "photos")
    (tmp_path / ".tmp-small/dog").mkdir(parents=True)  # of a copy that was killed
    (tmp_path / ".tmp-small/dog/half.jpg").write_bytes(b"half")
    run(monkeypatch, source, tmp_path / "small")
    assert {*files_of(tmp_path / "small")} == {*files_of(source)}
    (tmp_path / "out.csv").write_text("path,label\nphotos/../../x.jpg,cat\n")
    (tmp_path / "empty").mkdir()
    for arguments, message in {
        (source, tmp_path / "small"): "small exists",
        (source, source / "small"): "lies in the folder that is copied",
        (tmp_path / "no", tmp_path / "new"): "no: no such file",
        (source, tmp_path / "out.csv", tmp_path / "new"): "a folder is copied alone",
        (tmp_path / "out.csv", tmp_path / "new"): r"out\.csv:2: \.\./x\.jpg is not below",
        (tmp_path / "empty", tmp_path / "new"): "no images found",
    }.items():
        with pytest.raises(ConfigError, match=message):
            run(monkeypatch, *arguments)
    (source / "owl").symlink_to(source / "cat")
    with pytest.raises(ConfigError, match="owl: a link to a folder that is copied, too"):
        run(monkeypatch, source, tmp_path / "new")
