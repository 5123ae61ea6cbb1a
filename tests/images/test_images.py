"""Any file becomes an upright RGB image or one clear line, and images are looked at once."""

import io
import os
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin
from transformers.image_utils import load_image

from shared.data.labels import LabelledData, Labels
from shared.extras import tars as shards
from shared.images import files as images
from shared.images.decoding import FORMATS, BadImage, Part, check, decode, decode_tensor
from shared.images.files import prepare
from shared.images.options import ImageConfig
from shared.process.errors import ConfigError
from tests.conftest import encoded, paint, write_lines

pytestmark = pytest.mark.usefixtures("cpu_state")


def pixels(height=8, width=12, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels)).astype(np.uint8)


def both(content, tmp_path, name="image.bin"):
    """A source of each kind with this content."""
    path = tmp_path / name
    path.write_bytes(content)
    return [content, path]


def reason(source, **options):
    with pytest.raises(BadImage) as error:
        decode(source, **options)
    with pytest.raises(BadImage, match=re.escape(str(error.value))):
        decode_tensor(source, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def set_upright(pixels, orientation):
    """What a camera's turn (EXIF orientation) asks for, of [height, width, colours]."""
    turned = pixels.transpose(1, 0, 2) if orientation > 4 else pixels
    return turned[:: -1 if orientation in (3, 4, 7, 8) else 1, :: -1 if orientation in (2, 3, 6, 7) else 1]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("options", [{}, {"quality": 30, "subsampling": 2}, {"progressive": True}, {"subsampling": 0}])
def test_a_turned_photograph_is_set_upright(orientation, options, tmp_path):
    """As a picture and as a tensor, bit for bit."""
    exif, stored = Image.Exif(), Image.fromarray(pixels(67, 101))
    exif[0x0112] = orientation
    upright = set_upright(np.asarray(decode(encoded(stored, "JPEG", **options))), orientation)
    for source in both(encoded(stored, "JPEG", exif=exif, **options), tmp_path):
        assert np.array_equal(np.asarray(decode(source)), upright)
        assert np.array_equal(decode_tensor(source).permute(1, 2, 0).numpy(), upright)


NUMBER, TEXT = b"\x12\1\3\0\1\0\0\0%c\0\0\0", b"\x12\1\2\0\2\0\0\0%c\0\0\0"  # EXIF's entry of the orientation


def with_orientation(kind, value):
    """An image of 64 x 40 pixels whose orientation is a number, a text, or 6 in XMP alone."""
    image = Image.fromarray(pixels(40, 64))
    if value == "xmp":
        xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6"/></x:xmpmeta>'
        text = PngImagePlugin.PngInfo()
        text.add_itxt("XML:com.adobe.xmp", xmp.decode())
        return encoded(image, kind, **{"TIFF": {"tiffinfo": {700: xmp}}, "PNG": {"pnginfo": text}}.get(kind, {"xmp": xmp}))
    entry = TEXT % value.encode() if isinstance(value, str) else NUMBER % value
    if kind == "TIFF":
        return encoded(image, kind, tiffinfo={274: 6}).replace(NUMBER % 6, entry)
    return encoded(image, kind, exif=b"Exif\0\0II*\0\x08\0\0\0\1\0" + entry + b"\0\0\0\0")


@pytest.mark.parametrize("value", [1, 3, 6, 9, "6", "xmp"])
@pytest.mark.parametrize("kind", ["JPEG", "MPO", "PNG", "TIFF", "WEBP"])
def test_the_size_that_is_counted_is_that_of_the_pixels_of_plain_transformers(kind, value, tmp_path):
    """Also of a tag that stands for no turn, and of one that TIFF's decoder has followed already."""
    sizes = set()
    for source in both(with_orientation(kind, value), tmp_path):
        image = decode(source)
        sizes |= {image.size, check(source)[0], tuple(decode_tensor(source).shape[:0:-1])}
    assert np.array_equal(np.asarray(load_image(str(source))), np.asarray(image))
    assert sizes == {(40, 64) if value in (6, "xmp") else (64, 40)}


FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (50, 33), colour) for colour in ("lime", "blue")]}


@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        *(("PNG", mode, {}) for mode in ("RGBA", "LA", "P", "RGB", "L")),
        *(("PNG", mode, {"transparency": value}) for mode, value in (("P", 3), ("P", bytes([0, 128, 255])), ("L", 9))),
        *[("PNG", "RGB", {"transparency": (9, 9, 9)}), ("GIF", "P", {"transparency": 3}), ("GIF", "RGB", FRAMES)],
        *[("WEBP", "RGBA", {}), ("TIFF", "RGBA", {}), ("MPO", "RGB", {})],
        *(("JPEG", mode, {}) for mode in ("RGB", "L", "CMYK", "1")),
    ],
)
def test_pixels_are_what_pipelines_make_of_them(kind, mode, options, tmp_path):
    """transformers' load_image drops transparency: the colour below it shows. Tensors hold the same, bit for bit."""
    image = Image.fromarray(pixels(33, 50, channels=4), "RGBA").convert("RGB" if mode == "CMYK" else "RGBA").convert(mode)
    content = encoded(image, kind, lossless=True, **options)
    assert getattr(Image.open(io.BytesIO(content)), "n_frames", 1) == (3 if options is FRAMES else 1)  # the first is taken
    for source in both(content, tmp_path):
        ours, tensor = decode(source), decode_tensor(source)
        assert (ours.mode, tensor.dtype) == ("RGB", torch.uint8)
        assert np.array_equal(np.asarray(ours), np.asarray(load_image(str(tmp_path / "image.bin"))))
        assert np.array_equal(np.asarray(ours), tensor.permute(1, 2, 0).numpy())


def test_a_large_jpeg_is_shrunk_while_it_is_decoded_and_keeps_its_colours():
    y, x = np.mgrid[:256, :256]  # a gradient of colours, which JPEG keeps within a few shades
    smooth = Image.fromarray(np.stack([y, x, 0 * x + 128], axis=2).astype(np.uint8))
    content = encoded(smooth, "JPEG", quality=95)
    image = decode(content, at_least=32)
    assert image.size == (32, 32)
    expected = np.asarray(smooth.resize((32, 32), Image.Resampling.BOX)).astype(int)
    assert np.abs(np.asarray(image) - expected).max() <= 6
    assert decode(content).size == (256, 256)


def test_what_is_no_image_or_an_enormous_one_says_why(tmp_path, monkeypatch):
    deep = "more than 8 bits a channel: convert it to 8, scaled by what is white"
    for content, expected in (
        (b"", "the file is empty"),
        (b"hello, not a picture", f"not an image ({', '.join(FORMATS)})"),
        (encoded(Image.fromarray(np.array([[0, 0x10000]], dtype=np.int32)), "TIFF"), deep),
        (encoded(Image.fromarray(np.array([[0.5, 1e4]], dtype=np.float32)), "TIFF"), deep),
    ):
        for source in both(content, tmp_path):
            assert reason(source) == expected
    assert reason(tmp_path / "none.png") == "no such file"
    content = encoded(Image.fromarray(pixels(2000, 1001)), "BMP")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000_000)
    assert "exceeds limit of 2000000 pixels" in reason(content)


@pytest.mark.parametrize("kind", ["JPEG", "progressive", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_what_is_cut_off_empty_or_no_image_is_bad(kind, tmp_path):
    options = {"kind": "JPEG", "progressive": True} if kind == "progressive" else {"kind": kind}
    content = encoded(Image.fromarray(pixels(300, 400)), **options)
    size = len(content)
    damage = {"empty": b"", "no image": b"<html>404 not found</html>" * 100, "a third": content[: size // 3]}
    damage |= {"its end is missing": content[:-100], "zeros alone": bytes(size), "zeros first": bytes(4096) + content[4096:]}
    if kind not in ("WEBP", "BMP", "TIFF"):  # which tell neither
        damage["zeros last"] = content[: size // 3] + bytes(size - size // 3)
    if kind != "WEBP":
        for at_least in (None, 1):
            assert not reason(damage["a third"], at_least=at_least).startswith(("not an image", "the file is empty"))
    tar = tmp_path / "a.tar"
    for what, damaged in damage.items():
        tar.write_bytes(content + damaged + content)
        for source in (*both(damaged, tmp_path), Part(tar, size, len(damaged))):
            with pytest.raises(BadImage):
                check(source)
                pytest.fail(what)
    padded = content + bytes(40)  # as some writers leave it
    tar.write_bytes(padded * 2)
    for source in (*both(padded, tmp_path), Part(tar, len(padded), len(padded))):
        check(source)
        assert np.array_equal(np.asarray(decode(source)), np.asarray(decode(content)))


@settings(deadline=None, max_examples=40)
@given(data=st.data(), kind=st.sampled_from(["JPEG", "PNG"]))
def test_damage_anywhere_is_an_image_or_a_reason_and_nothing_else(data, kind):
    content = bytearray(encoded(Image.fromarray(pixels(16, 16)), kind))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert decode(bytes(content)).mode == "RGB"
    except BadImage as error:
        assert str(error) and "\n" not in str(error)


# Class folders -------------------------------------------------------------------------------------------------------


def put(path: Path, seed=0, size=6):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(size, size, seed=seed)).save(path)
    return path


def class_folders(root: Path, counts, seed=0):
    for label, count in counts.items():
        for number in range(count):
            put(root / label / f"{label}{number:02d}.png", seed=seed + number)
    return root


def names(data: LabelledData, part="train"):
    """{class: names of its files} of a part."""
    found = getattr(data, part)
    result = {}
    for number in range(len(found)):
        label = data.classes[int(found[number]["labels"])]
        result.setdefault(label, []).append(os.path.basename(found.where(number)))
    return result


def refused(**options):
    with pytest.raises(ConfigError) as error:
        prepare(ImageConfig(**options))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("validation", ["val", "validation", "valid"])
def test_train_and_val_folders_are_found(tmp_path, validation):
    """What is nested counts for its class, and what is hidden or no image does not."""
    class_folders(tmp_path / "train", {"cat": 3, "dog": 2})
    for name in ("cat/.hidden/no.png", "cat/._apple.png", ".cache/no.png", "beside.png"):
        put(tmp_path / "train" / name)
    for name in ("notes.txt", ".DS_Store"):
        (tmp_path / "train/cat" / name).write_text("no image")
    (tmp_path / "train/cat/deep/er").mkdir(parents=True)
    (tmp_path / "train/cat/cat02.png").rename(tmp_path / "train/cat/deep/er/x.PNG")
    class_folders(tmp_path / validation, {"cat": 1, "dog": 2})
    class_folders(tmp_path / "test", {"bird": 1})  # is not looked at
    data = prepare(ImageConfig(train_dir=(tmp_path,)))
    assert data.classes == ("cat", "dog")
    assert names(data) == {"cat": ["cat00.png", "cat01.png", "x.PNG"], "dog": ["dog00.png", "dog01.png"]}
    assert names(data, "validation") == {"cat": ["cat00.png"], "dog": ["dog00.png", "dog01.png"]}
    assert data.validation.where(0) == str(tmp_path / validation / "cat" / "cat00.png")
    assert data.about == f"{tmp_path}: 5 images of 2 classes; validation: 3, {tmp_path / validation}; left out: 1 .txt"


@pytest.mark.parametrize(
    ("train", "val", "message"),
    [
        ({"cat": 2, "eel": 0}, {}, "/train/eel: a class folder without an image"),
        ({}, {}, "/train: no class folders in it; expected "),
        ({"cat": 4}, {"cat": 1}, ": only one class, 'cat'"),
        ({"cat": 1, "dog": 2}, {"cat": 0}, ": no image to validate on"),
        ({"cat": 2, "dog": 2}, {"cat": 1, "eel": 1}, ": the class 'eel' has no image to train on"),
    ],
)
def test_folders_that_cannot_serve_say_why(tmp_path, train, val, message):
    (tmp_path / "train").mkdir()
    for part, counts in (("train", train), ("val", val)):
        for label in counts:
            (tmp_path / part / label).mkdir(parents=True)
        class_folders(tmp_path / part, counts)
    assert refused(train_dir=(tmp_path,)).startswith(f"{tmp_path}{message}")


def test_bad_images_end_the_run_before_it_starts_or_are_left_out_and_counted_on_demand(tmp_path, capsys):
    class_folders(tmp_path / "train", {"cat": 4, "dog": 4})
    class_folders(tmp_path / "val", {"cat": 2, "dog": 2})
    bad, *others = (tmp_path / name for name in ("train/cat/cat02.png", "train/dog/dog01.png", "val/dog/dog00.png"))
    for path, content in ((bad, ""), (others[0], "text"), (others[1], "")):
        path.write_text(content)
    expected = f"{bad}: the file is empty, and 2 more cannot be read; --skip_bad_images"
    assert refused(train_dir=(tmp_path,)).startswith(expected)
    data = prepare(ImageConfig(train_dir=(tmp_path,), skip_bad_images=True))
    assert names(data)["cat"] == ["cat00.png", "cat01.png", "cat03.png"]
    assert names(data)["dog"] == ["dog00.png", "dog02.png", "dog03.png"]
    assert names(data, "validation") == {"cat": ["cat00.png", "cat01.png"], "dog": ["dog01.png"]}
    said = capsys.readouterr().err
    assert f"skipped 3 of 12 images that cannot be read; the first is {bad}: the file is empty" in said
    assert data.about.endswith("; 3 that cannot be read are left out")
    assert refused(train_dir=(tmp_path,)).startswith(expected)  # what was seen is remembered, the flag is not
    for path in others:
        put(path)
    assert "more" not in refused(train_dir=(tmp_path,))
    Path(data.train.where(1)).unlink()  # later
    with pytest.raises(ConfigError) as error:
        data.train[1]
    assert str(error.value) == f"{data.train.where(1)}: no such file; {images.REPAIR}"


CHANGES = {
    "content": lambda file: file.write_text("damaged"),
    "time": lambda file: os.utime(file, ns=(10**18, 10**18)),
    "permissions": lambda file: file.chmod(0o600),
    "new": lambda file: put(file.with_name("cat99.png")),
    "gone": Path.unlink,
    "moved": lambda file: file.rename(file.parents[1] / "dog" / file.name),
}


@pytest.mark.parametrize("change", CHANGES)
def test_images_are_read_once_and_all_again_after_a_change_of_a_file(tmp_path, monkeypatch, change):
    reads = []
    monkeypatch.setattr(images, "check", lambda source: reads.append(source) or check(source))
    class_folders(tmp_path, {"cat": 4, "dog": 4})
    config = ImageConfig(train_dir=(tmp_path,))
    first, second = prepare(config), prepare(config)
    assert len(reads) == 8
    assert (first.identity, first.about, first.classes) == (second.identity, second.about, second.classes)
    assert np.array_equal(first.train.index, second.train.index)
    del reads[:]
    file = tmp_path / "cat" / "cat01.png"
    CHANGES[change](file)
    if change == "content":
        assert str(file) in refused(train_dir=(tmp_path,))
    else:
        prepare(config)
    assert len(set(reads)) == {"gone": 7, "new": 9}.get(change, 8)


def test_the_identity_changes_with_labels_contents_and_split_not_with_times_or_the_place(tmp_path):
    folder = class_folders(tmp_path / "a", {"cat": 10, "dog": 10})
    first = prepare(ImageConfig(train_dir=(folder,))).identity
    os.utime(folder / "cat" / "cat01.png", ns=(10**18, 10**18))
    assert prepare(ImageConfig(train_dir=(folder,))).identity == first
    shutil.copytree(folder, tmp_path / "b")
    assert prepare(ImageConfig(train_dir=(tmp_path / "b",))).identity == first
    seen = {first, prepare(ImageConfig(train_dir=(folder,), validation_split_percentage=40)).identity}
    put(folder / "cat" / "cat01.png", size=20)
    seen.add(prepare(ImageConfig(train_dir=(folder,))).identity)
    (folder / "cat" / "cat01.png").rename(folder / "dog" / "cat01.png")
    seen.add(prepare(ImageConfig(train_dir=(folder,))).identity)
    assert len(seen) == 4


# Lists ---------------------------------------------------------------------------------------------------------------


def listed(root, lines, name="list.csv"):
    """A list of the images cat0 to cat3 and dog0 to dog3 in root/pictures, or of what `lines` says."""
    for label in ("cat", "dog"):
        for number in range(4):
            put(root / "pictures" / f"{label}{number}.png", seed=number)
    (root / name).write_text(lines)
    return str(root / name)


def csv_lines(header="image,label", files=4):
    rows = [f"pictures/{label}{number}.png,{label}" for label in ("cat", "dog") for number in range(files)]
    return "\n".join([header, *rows]) + "\n"


@pytest.mark.parametrize("header", ["image,label", "path,class", "file_name,target"])
def test_a_csv_names_paths_that_count_from_its_folder(tmp_path, header, monkeypatch):
    monkeypatch.chdir("/")
    data = prepare(ImageConfig(train_file=(listed(tmp_path, csv_lines(header)),), validation_split_percentage=25))
    assert data.classes == ("cat", "dog")
    assert {k: len(v) for k, v in names(data).items()} == {"cat": 3, "dog": 3}
    assert {k: len(v) for k, v in names(data, "validation").items()} == {"cat": 1, "dog": 1}
    assert data.about.endswith("validation: 2, 25% of each class held out")
    assert data.train.where(0).startswith(str(tmp_path / "pictures" / "cat"))


def test_columns_of_other_names_are_named_by_flags(tmp_path):
    file = listed(tmp_path, csv_lines("Bild,Art"))
    images = "image, img, image_path, path, file_name, filename, file, jpg, jpeg, png or webp"
    labels = "label, labels, class, fine_label, target or cls"
    for flag, named, usual in (("image_column", {}, images), ("label_column", {"image_column": "Bild"}, labels)):
        message = refused(train_file=(file,), **named)
        assert message == f"{file}:2: no column {usual} (has: Bild, Art); name it with --{flag}"
    message = refused(train_file=(file,), image_column="image", label_column="Art")
    assert message.startswith(f"{file}:2: no column 'image'")
    data = prepare(ImageConfig(train_file=(file,), image_column="Bild", label_column="Art"))
    assert data.classes == ("cat", "dog")


def test_json_lines_may_hold_numbers_and_absolute_paths(tmp_path):
    listed(tmp_path, "")
    pictures = [(str(tmp_path / "pictures" / f"{name}{i}.png"), name) for name in ("cat", "dog") for i in range(4)]
    rows = [{"image": path, "label": 10 if name == "cat" else 9} for path, name in pictures]
    data = prepare(ImageConfig(train_file=(str(write_lines(tmp_path / "list.jsonl", rows)),)))
    assert data.classes == ("9", "10")
    assert {k: {n[:3] for n in v} for k, v in names(data).items()} == {"9": {"dog"}, "10": {"cat"}}


def test_images_on_both_sides_of_the_split_are_told(tmp_path, capsys):
    class_folders(tmp_path / "folder", {"a": 2, "b": 2})
    message = refused(train_dir=(tmp_path / "folder",), validation_dir=tmp_path / "folder/a")
    assert f"{tmp_path}/folder/a: lies within {tmp_path}/folder, whose folders are all trained on" in message
    train = listed(tmp_path, csv_lines(files=3))
    (tmp_path / "linked").symlink_to(tmp_path / "pictures")
    rows = ("../pictures/dog0.png", f"{tmp_path}/pictures/dog1.png", "../linked/dog2.png", "../pictures/dog3.png")
    check = listed(tmp_path / "other", "label,image\n" + "".join(f"dog,{row}\n" for row in rows), "check.csv")
    prepare(ImageConfig(train_file=(train,), validation_file=(check,)))
    assert "warning: 2 of the 4 images to validate on are trained on, too" in capsys.readouterr().err
    prepare(ImageConfig(train_file=(train,), validation_file=(train,)))
    assert "warning: 6 of the 6 images to validate on are trained on, too" in capsys.readouterr().err
    twice = csv_lines(files=3) + "./pictures/cat0.png,cat\n" * 9
    prepare(ImageConfig(train_file=(listed(tmp_path, twice),), validation_split_percentage=50))
    assert "images to validate on are trained on, too" in capsys.readouterr().err
    prepare(ImageConfig(train_file=(listed(tmp_path, csv_lines(files=3)),)))
    assert "warning" not in capsys.readouterr().err


NO_LABEL = "expected a name or a number; --problem_type multi_label takes lists and name|name"


@pytest.mark.parametrize(
    ("image", "label", "problem"),
    [
        ("a.png", None, f"the label is null, {NO_LABEL}"),
        ("a.png", 1.5, f"the label is a float, {NO_LABEL}"),
        (None, "x", "the image is null, expected a path"),
        (3, "x", "the image is an int, expected a path"),
        ("", "x", "the image is empty, expected a path"),
    ],
)
def test_a_record_without_a_path_or_a_label_is_refused_with_its_line(tmp_path, image, label, problem):
    rows = {"image": "pictures/cat0.png", "label": 1}, {"image": image, "label": label}
    file = write_lines(tmp_path / "a.jsonl", rows)
    assert refused(train_file=(str(file),)) == f"{file}:2: {problem}"


# Tar files -----------------------------------------------------------------------------------------------------------


def packed(path: Path, members, **options):
    """A tar file of (name, content), or (name, "", kind of a member that has none)."""
    with tarfile.open(path, "w", **options) as tar:
        for name, content, *kind in members:
            info = tarfile.TarInfo(name)
            info.size, info.linkname = len(content), "cat/0.png" * len(kind)
            info.type = kind[0] if kind else tarfile.REGTYPE
            tar.addfile(info, io.BytesIO(content) if content else None)
    return path


def picture(seed):
    return encoded(Image.fromarray(pixels(seed=seed)), "PNG")


def samples(numbers, says=lambda label: (".cls", str(label).encode())):
    """WebDataset's samples, of classes 0 and 1."""
    pairs = (((f"{i:03d}{says(i % 2)[0]}", says(i % 2)[1]), (f"{i:03d}.png", picture(i))) for i in numbers)
    return [member for pair in pairs for member in pair]


def contents(data):
    rows = [part[i] for part in (data.train, data.validation) for i in range(len(part))]
    return {(data.classes[int(row["labels"])], np.asarray(row["image"]).tobytes()) for row in rows}


@pytest.mark.parametrize("how", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_tar_file_of_class_folders_is_those_folders_and_is_not_unpacked(tmp_path, how, monkeypatch):
    folder = class_folders(tmp_path / "photos", {"cat": 8, "dog": 5})
    put(folder / "dog" / f"{'ä' * 50}{'long' * 20}.png")
    put(folder / "dog" / "._hidden.png")
    with tarfile.open(tmp_path / "photos.tar", "w", format=how) as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, f"./photos/{path.relative_to(folder)}", recursive=False)
    there = sorted(tmp_path.rglob("*"))
    for name in ("extract", "extractall", "extractfile"):
        monkeypatch.setattr(tarfile.TarFile, name, lambda *_: pytest.fail("extracted"))
    data = prepare(ImageConfig(train_file=(str(tmp_path / "photos.tar"),)))
    plain = prepare(ImageConfig(train_dir=(folder,)))
    assert (data.identity, data.classes) == (plain.identity, plain.classes)  # a run on one goes on with the other
    assert (names(data), names(data, "validation")) == (names(plain), names(plain, "validation"))
    for part in ("train", "validation"):
        ours, theirs = getattr(data, part), getattr(plain, part)
        for i in range(len(theirs)):
            assert np.array_equal(np.asarray(ours[i]["image"]), np.asarray(theirs[i]["image"]))
    assert data.train.where(0) == f"{tmp_path}/photos.tar/./photos/cat/cat00.png".replace("/./", "/")
    assert sorted(tmp_path.rglob("*")) == there


@pytest.mark.parametrize(
    ("says", "options", "classes"),
    [
        (lambda label: (".cls", b"%d\n" % label), {}, ("0", "1")),
        (lambda label: (".json", b'{"width": 8, "label": %d}' % label), {}, ("0", "1")),
        (lambda label: (".json", b'{"kind": "k%d"}' % label), {"label_column": "kind"}, ("k0", "k1")),
        (lambda label: (".txt", b"t%d" % label), {"label_column": "txt"}, ("t0", "t1")),
        (lambda label: (".json", b'{"label": %s}' % (b"[]", b'["a", "b"]')[label]), {"problem_type": "multi_label"}, "ab"),
    ],
)
def test_samples_of_webdataset_have_the_labels_beside_them(tmp_path, says, options, classes):
    packed(tmp_path / "train-0.tar", samples(range(5), says))
    packed(tmp_path / "train-1.tar", [*samples(range(5, 12), says)][::-1])  # in any order
    packed(tmp_path / "test.tar", samples(range(20, 24), says))
    config = ImageConfig(train_file=(f"{tmp_path}/train-*.tar",), validation_file=(f"{tmp_path}/test.tar",), **options)
    data = prepare(config)
    assert (data.classes, len(data.train), len(data.validation)) == (tuple(classes), 12, 4)
    for part in (data.train, data.validation):
        for row in range(len(part)):
            number = int(Path(part.where(row)).stem)
            assert part[row]["labels"].ravel()[-1] == number % 2
            assert np.array_equal(np.asarray(part[row]["image"]), pixels(seed=number))
    assert data.about.startswith(f"{tmp_path}/train-*.tar: 12 images of 2 classes; validation: 4, {tmp_path}/test.tar")


def test_tar_files_are_listed_once_and_again_when_one_changes(tmp_path, monkeypatch):
    listed, original = [], shards._samples
    monkeypatch.setattr(shards, "parallel_map", lambda work, items, _: map(work, items))
    monkeypatch.setattr(shards, "_samples", lambda file, *rest: listed.append(file.name) or original(file, *rest))
    for number in range(3):
        packed(tmp_path / f"{number}.tar", samples(range(10 * number, 10 * number + 4)))
    config = ImageConfig(train_file=(str(tmp_path),))
    first = prepare(config)
    again = prepare(config)
    assert (first.identity, listed) == (again.identity, ["0.tar", "1.tar", "2.tar"])
    packed(tmp_path / "1.tar", samples(range(40, 46)))
    assert (len(prepare(config).train), listed[3:]) == (12, ["0.tar", "1.tar", "2.tar"])


def test_what_else_is_in_a_tar_file_is_said_or_passed_over(tmp_path, capfd):
    link, hard, device, pipe = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE
    odd = [(f"cat/{i}.png", b"", kind) for i, kind in enumerate((link, hard, device, pipe))]
    more = [("cat", b"", tarfile.DIRTYPE), ("README.md", b"text"), ("cat/notes.txt", b""), ("../cat/up.png", picture(1))]
    good = [(f"{label}/a{i}.b.png", picture(i)) for label in ("cat", "dog") for i in range(4)]
    mixed = [("s0.seg.png", picture(0)), ("s0.cls", b"cat"), ("s0.jpg", picture(5)), ("s1.cls", b"dog")]
    packed(tmp_path / "a.tar", [*odd, *more, *good, *mixed])
    (tmp_path / "README.md").write_text("text")
    data = prepare(ImageConfig(train_file=(str(tmp_path),)))
    found = names(data)["cat"] + names(data, "validation")["cat"]
    assert sorted(found) == ["a0.b.png", "a1.b.png", "a2.b.png", "a3.b.png", "s0.jpg"]
    said = capfd.readouterr().err
    assert data.about.endswith("; left out: 1 .md, 1 .txt, 4 links or devices")
    assert "--train_file: of 2 files only the 1 tar files are read" in said


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("1.png", picture(0))], "/1: an image without a label: neither 1.cls, 1.json nor a class folder"),
        ([("1.json", b"{"), ("1.png", picture(0))], "/1.json: cannot be read ("),
        ([("1.json", b'{"a": 1}'), ("1.png", picture(0))], "/1: no column label, labels, "),
        ([("1.cls", b""), ("1.png", picture(0))], f"/1: the label is empty, {NO_LABEL}"),
        ([("1.cls", b"\xff"), ("1.png", picture(0))], "/1.cls: cannot be read ("),
        ([("1.cls", b"1"), ("1.png", picture(0)), ("1.jpg", picture(0))], "/1: several images (png, jpg): name one"),
        ([("a/1.txt", b"")], ": no images in it (.apng, .avif, "),
    ],
)
def test_a_tar_file_that_cannot_serve_says_why(tmp_path, members, message):
    file = packed(tmp_path / "a.tar", members)
    assert refused(train_file=(str(file),)).startswith(f"{file}{message}")


def test_tar_files_are_named_as_files(tmp_path):
    train, val = (packed(tmp_path / f"{name}.tar", samples(range(4))) for name in ("in-train-0", "in-val-0"))
    assert refused(train_file=(str(tmp_path),)).endswith(f"{val} for one: give these as --validation_file")
    assert refused(train_dir=(tmp_path,)).endswith("/<class>/<image>, or tar files as --train_file")
    expected = "--train_file names tar files: --validation_file must do so, too"
    assert refused(train_file=(str(train),), validation_file=(listed(tmp_path, csv_lines()),)) == expected


def test_a_damaged_tar_file_is_named_wherever_the_damage_is(tmp_path):
    file = packed(tmp_path / "a.tar", samples(range(6)))
    whole = file.read_bytes()
    prepare(ImageConfig(train_file=(str(file),)))
    with tarfile.open(file) as tar:
        starts = [member.offset for member in tar][1:]
    cuts = [whole[:at] for start in starts for at in (start, start + 100, start + 520)]
    holes = [whole[:start] + b"x" * 512 + whole[start + 512 :] for start in starts]
    for content in (b"", b"no tar file" * 100, *cuts, *holes):
        file.write_bytes(content)
        assert refused(train_file=(str(file),)).startswith(f"{file}: no tar file, or damaged (")
    damaged = bytearray(whole)
    at = whole.index(b"IDAT", starts[4])
    damaged[at + 10 : at + 40] = bytes(30)
    file.write_bytes(damaged)
    with pytest.raises(ConfigError, match=rf"^{file}/002\.png: .*; --skip_bad_images leaves such images out"):
        prepare(ImageConfig(train_file=(str(file),)))
    data = prepare(ImageConfig(train_file=(str(file),), skip_bad_images=True))
    assert len(contents(data)) == 5


# Data sets -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes a split of a local data set: table(folder, split, labels)."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")

    def write(folder, split, labels, bad=()):
        folder.mkdir(exist_ok=True)
        pictures = [dict(bad).get(i, picture(i)) for i in range(len(labels))]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["dog", "cat"])})
        rows = {"image": [p and {"bytes": p, "path": None} for p in pictures], "label": labels}
        datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / f"{split}-00000-of-00001.parquet")
        return str(folder)

    return write


def test_splits_of_a_data_set(tmp_path, table):
    """With its own to validate on, and without."""
    name = table(tmp_path / "set", "train", [0, 1, 0, 1])
    table(tmp_path / "set", "validation", [1, 1, 0])
    data = prepare(ImageConfig(dataset_name=(name,)))
    assert data.classes == ("cat", "dog")
    assert data.train.labels.values.tolist() == [1, 0, 1, 0]
    assert [data.classes[int(data.validation[i]["labels"])] for i in range(3)] == ["cat", "cat", "dog"]
    assert np.array_equal(np.asarray(data.train[3]["image"]), pixels(seed=3))
    assert np.array_equal(np.asarray(data.validation[2]["image"]), pixels(seed=2))
    assert data.train.where(3) == f"{name}:train: row 3"
    assert data.about == f"{name}: 4 images of 2 classes; validation: 3, split validation"
    name = table(tmp_path / "other", "train", [0, 1] * 4)
    table(tmp_path / "other", "test", [0, 1])
    data = prepare(ImageConfig(dataset_name=(name,), validation_split_percentage=25))
    assert (len(data.train), len(data.validation)) == (6, 2)
    named = prepare(ImageConfig(dataset_name=(name,), validation_split_name="test"))
    assert (len(named.train), len(named.validation)) == (8, 2)
    assert named.validation.where(0) == f"{name}:test: row 0"
    other = prepare(ImageConfig(dataset_name=(name,), train_split_name="test", validation_split_name="train"))
    assert (len(other.train), len(other.validation)) == (2, 8)
    for flag in ("train_split_name", "validation_split_name"):
        assert "no split 'val' (has: train, test)" in refused(dataset_name=(name,), **{flag: "val"})


@pytest.mark.parametrize("mixed", [False, True])
def test_files_to_validate_on_beside_a_data_set(tmp_path, table, mixed):
    """Its splits do not count, and its classes are those of the training data."""
    names = tuple(table(tmp_path / f"set{number}", "train", [0, 1, 0, 1]) for number in range(1 + mixed))
    table(tmp_path / "set0", "validation", [1, 1, 0])
    for number in range(3):
        paint(tmp_path / "test" / "dog" / f"{number}.png", number, number, (20, 20))
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(f"test/dog/{n}.png,dog\n" for n in range(3)))
    weights = {"mix_weights": (1.0, 1.0)} if mixed else {"dataset_config_name": "default"}
    for other in ({"validation_dir": tmp_path / "test"}, {"validation_file": (str(tmp_path / "list.csv"),)}):
        data = prepare(ImageConfig(dataset_name=names, **other, **weights))
        assert data.classes == ("cat", "dog") and len(data.train) == 4 + 4 * mixed
        assert [data.classes[int(data.validation[i]["labels"])] for i in range(3)] == ["dog"] * 3
        assert [data.validation.where(i)[-5:] for i in range(3)] == ["0.png", "1.png", "2.png"]
        assert data.about.endswith(": 3 images of 1 classes") and data.about.count("validation") == 1
    (tmp_path / "test" / "dog").rename(tmp_path / "test" / "owl")
    message = refused(dataset_name=names, validation_dir=tmp_path / "test", **weights)
    assert "the class 'owl' has no image to train on" in message


def test_columns_of_bytes_and_samples_of_webdataset_are_images(tmp_path, table):
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    pictures = [picture(i) for i in range(8)]
    columns = {"binary": pictures, "struct": [{"bytes": content, "path": None} for content in pictures]}
    for kind, column in columns.items():  # as pandas or Spark write them
        (tmp_path / kind).mkdir()
        pq.write_table(pa.table({"image": column, "label": [i % 2 for i in range(8)]}), tmp_path / kind / "train.parquet")
    (tmp_path / "tars").mkdir()
    packed(tmp_path / "tars" / "train-0.tar", samples(range(8)))
    for kind in (*columns, "tars"):
        data = prepare(ImageConfig(dataset_name=(str(tmp_path / kind),)))
        assert len(data.train) + len(data.validation) == len(contents(data)) == 8, kind
    message = refused(train_file=(str(tmp_path / "binary" / "train.parquet"),))
    assert message.endswith("expected a path; images in its rows: give its folder as --dataset_name")


def test_a_data_set_that_cannot_serve_says_why(tmp_path, table):
    for label in (-1, None):
        name = table(tmp_path / str(label), "train", [0, label, 1])
        assert refused(dataset_name=(name,)) == f"{name}:train: row 1: the label is {label}, expected a class"
    assert refused(dataset_name=(str(tmp_path / "none"),)).startswith(f"--dataset_name {tmp_path}/none: ")
    name = table(tmp_path / "other", "train", [0, 1] * 4, bad={3: b"damaged", 6: None})
    assert refused(dataset_name=(name,)).startswith(f"{name}:train: row 3: not an image (")
    data = prepare(ImageConfig(dataset_name=(name,), skip_bad_images=True))
    rows = [part.where(i) for part in (data.train, data.validation) for i in range(len(part))]
    assert sorted(rows) == [f"{name}:train: row {i}" for i in (0, 1, 2, 4, 5, 7)]
    message = refused(dataset_name=(name,), image_column="label")
    assert message == f"--dataset_name {name}: the column 'label' holds no images"
    assert refused(dataset_name=(name,), label_column="x").startswith(f"{name}: no column 'x' (has: image, label)")


def hold_out(labels, percent):
    return Labels("single_label", (), np.array(labels, dtype=np.int64)).hold_out(percent)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.floats(0.1, 99.9), st.lists(st.integers(6, 9), min_size=1))
def test_the_same_share_of_each_class_is_held_out_at_least_one_and_never_all(labels, percent, others):
    """Without regard to the other classes."""
    held_out = hold_out(labels, percent)
    assert (held_out.shape, held_out.dtype) == ((len(labels),), bool)
    assert np.array_equal(hold_out(labels + others, percent)[: len(labels)], held_out)
    for label in set(labels):
        members = held_out[np.array(labels) == label]
        if len(members) == 1:
            assert not members.any()
        else:
            assert 1 <= members.sum() < len(members)
            assert abs(members.sum() - len(members) * percent / 100) <= 0.5 or members.sum() in (1, len(members) - 1)
