"""Images left out or decoded too dark; masks that a kernel of attention does not take, and that make the host wait."""

import io
import re
import struct
import tarfile
import zlib

import numpy as np
import pytest
import torch
from accelerate import PartialState
from PIL import Image
from transformers import (
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    LlamaConfig,
    RobertaConfig,
)

from shared.images.decoding import FORMATS, BadImage, decode, decode_tensor
from shared.images.files import prepare
from shared.images.options import ImageConfig
from shared.models.attention import forward_rows
from shared.models.counts import measure
from shared.process.errors import ConfigError
from shared.text.labelled import collate

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
SHAPE = {"layers": 2, "attention_heads": 2, "ffn_dim": 48}
SIZES |= {"pad_token_id": 1, "num_labels": 3}
CLASSIFIERS = {
    "bert": BertConfig(**SIZES),
    "roberta": RobertaConfig(**SIZES),
    "distilbert": DistilBertConfig(
        vocab_size=40, dim=32, n_layers=2, n_heads=2, hidden_dim=48, pad_token_id=1, num_labels=3
    ),
    "deberta": DebertaV2Config(**SIZES, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "llama": LlamaConfig(**SIZES, num_key_value_heads=1),
    "bart": BartConfig(
        vocab_size=40,
        d_model=32,
        **{f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in SHAPE.items()},
        pad_token_id=1,
        eos_token_id=2,
        num_labels=3,
    ),
}
READ_THE_DEVICE = {"bart"}  # by its own code: it looks up which tokens are the end


def texts(*lengths):
    generator = torch.Generator().manual_seed(0)
    tokens = [[*torch.randint(3, 40, (n - 1,), generator=generator).tolist(), 2] for n in lengths]
    return collate([{"input_ids": row, "labels": torch.tensor(0)} for row in tokens], pad_token_id=1, at_most=64)


@pytest.fixture
def one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    PartialState(cpu=True)


def encoded(image, kind):
    into = io.BytesIO()
    image.save(into, kind)
    return into.getvalue()


@pytest.mark.parametrize("in_tar", [False, True])
def test_every_ending_of_a_permitted_format_is_an_image_and_other_files_are_counted(tmp_path, one_process, in_tar):
    """Left out without a word: .jfif, .jpe and the like. github.com/thumbsup/thumbsup/issues/368 (2024)."""
    picture = Image.new("RGB", (8, 8), (200, 100, 50))
    permitted = {end: kind for end, kind in Image.registered_extensions().items() if kind in FORMATS and end != ".pfm"}
    assert {".jfif", ".jpe", ".apng", ".j2k", ".pnm", ".jpg", ".png"} <= permitted.keys()
    files = {f"cat/a{end}": encoded(picture, kind) for end, kind in permitted.items()}
    files |= {"dog/a.JFIF": files["cat/a.jfif"], "dog/b.mpo": files["cat/a.jpg"]}
    images = sorted(files)
    others = ["cat/x.heic", "dog/y.HEIC", "dog/z.dib", "cat/plain", "dog/plain", "dog/other", "dog/x.eps"]
    others += ["cat/a.txt", "cat/Thumbs.db", "dog/.hidden"]  # not counted
    files |= dict.fromkeys(others, b"content")
    if in_tar:
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        config = ImageConfig(train_file=(str(tmp_path / "a.tar"),))
    else:
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
        config = ImageConfig(train_dir=(tmp_path,))
    for _ in range(2):  # found, and known from then on
        data = prepare(config)
        parts = (data.train, data.validation)
        names = [part.where(row)[len(str(tmp_path)) :].removeprefix("/a.tar") for part in parts for row in range(len(part))]
        assert sorted(names) == [f"/{name}" for name in images]
        assert data.about.endswith("; left out: 3 without an ending, 2 .heic, 1 .dib, 1 .eps"), data.about
    for part in parts:
        for row in range(len(part)):
            red, green, blue = part[row]["image"].getpixel((4, 4))
            grey = part.where(row).endswith((".pbm", ".pgm"))
            assert grey or (abs(red - 200) < 9 and abs(green - 100) < 9 and abs(blue - 50) < 9), part.where(row)


GREY = np.random.default_rng(0).integers(0, 256, (12, 16)).astype(np.uint8)
GREY[0, :2] = 0, 255


@pytest.mark.parametrize(
    ("dtype", "kind"), [(np.uint16, "PNG"), (np.uint16, "TIFF"), (">u2", "TIFF"), (np.int32, "TIFF"), (np.float32, "TIFF")]
)
@pytest.mark.parametrize("white", [255, 1023, 4095, 65535])
def test_with_white_level_every_type_of_grey_has_the_pixels_of_8_bits(dtype, kind, white):
    """Greys of 12 bits were scaled as if they had 16. github.com/python-pillow/Pillow/issues/3011 (2018)."""
    stored = np.round(GREY * (white / 255)).astype(dtype)
    content = encoded(Image.fromarray(stored), kind)
    assert np.array_equal(np.asarray(decode(content, white_level=white)), np.asarray(Image.fromarray(GREY).convert("RGB")))
    assert np.array_equal(decode_tensor(content, white_level=white)[1].numpy(), GREY)
    brighter = encoded(Image.fromarray(np.minimum(2 * stored.astype(np.int64), 65535).astype(dtype)), kind)
    clipped = np.minimum(np.round(np.minimum(2 * stored.astype(np.int64), 65535) * (255 / white)), 255)
    assert np.array_equal(np.asarray(decode(brighter, white_level=white))[..., 0], clipped)


def test_white_level_leaves_8_bits_alone_and_refuses_colours_of_16():
    png = encoded(Image.fromarray(GREY), "PNG")
    assert np.array_equal(np.asarray(decode(png, white_level=4095)), np.asarray(decode(png)))
    colours = write_png(torch.from_numpy(np.stack([GREY] * 3, 2).astype(np.uint16)))
    with pytest.raises(BadImage, match="colours of 16 bits"):
        decode(colours, white_level=4095)


def write_png(pixels: torch.Tensor) -> bytes:
    """A PNG of 16-bit colours [height, width, 3], which Pillow cannot write."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.numpy().astype(">u2").tobytes() for row in pixels)

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize(("white", "fits"), [(255, 255), (700, 1023), (4095, 4095), (16383, 16383)])
def test_greys_that_use_little_of_16_bits_are_refused_until_white_is_known(tmp_path, one_process, kind, white, fits):
    """They were learned as black pictures. github.com/python-pillow/Pillow/issues/3011 (2018)."""
    for number in range(8):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        stored = np.round(np.roll(GREY, number) * (white / 255)).astype(np.uint16)
        Image.fromarray(stored).save(tmp_path / "ab"[number % 2] / f"{number}.{kind.lower()}")
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"largest value is {white:,} of 65,535.*--white_level {fits},"):
            prepare(ImageConfig(train_dir=(tmp_path,)))
    data = prepare(ImageConfig(train_dir=(tmp_path,), white_level=white))
    data = data.numbered_as(data.classes[::-1])
    assert f"16-bit greys: 0 to {white} became 0 to 255 (do the same before inference)" in data.about
    for part in (data.train, data.validation):
        assert len(part)
        for row in range(len(part)):
            number = int(re.findall(r"\d+", part.where(row))[-1])
            assert np.array_equal(np.asarray(part[row]["image"])[..., 0], np.roll(GREY, number))
    dark = prepare(ImageConfig(train_dir=(tmp_path,), white_level=65535))  # as it was asked for
    assert np.asarray(dark.train[0]["image"]).max() <= 64
    with pytest.raises(ConfigError, match="largest value"):
        prepare(ImageConfig(train_dir=(tmp_path,)))


def test_dark_colours_of_16_bits_are_refused(tmp_path, one_process):
    for number in range(8):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        pixels = np.stack([np.roll(GREY, number)] * 3, 2).astype(np.uint16)
        (tmp_path / "ab"[number % 2] / f"{number}.png").write_bytes(write_png(torch.from_numpy(pixels << 4)))
    for options in ({}, {"white_level": 4095}):
        with pytest.raises(ConfigError, match=r"colours of 16 bits.*convert them to 8 bits"):
            prepare(ImageConfig(train_dir=(tmp_path,), **options))


def test_greys_that_use_16_bits_are_taken_as_they_are(tmp_path, one_process):
    for number in range(8):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        Image.fromarray(GREY.astype(np.uint16) << 8).save(tmp_path / "ab"[number % 2] / f"{number}.png")
    data = prepare(ImageConfig(train_dir=(tmp_path,)))
    assert np.array_equal(np.asarray(data.train[0]["image"])[..., 0], GREY)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_texts_with_padding_turn_off_the_kernel_that_may_give_nan_and_are_not_read(name, monkeypatch):
    """cuDNN's attention with a mask has NaN gradients: github.com/pytorch/pytorch/issues/196678 (2026).

    And transformers reads a padding mask from the device in each forward (masking_utils._ignore_bidirectional_mask_sdpa).
    """
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(CLASSIFIERS[name])
    torch.backends.cuda.enable_cudnn_sdp(True)
    padded, full = texts(64, 37), texts(64, 64)
    plain = {key: value for key, value in padded.items() if key != "labels"}
    assert "attention_mask" in padded and "attention_mask" not in full
    measure(model, plain)
    model.eval()
    with torch.no_grad():
        expected = model(**plain).logits
        whole = model(input_ids=full["input_ids"], attention_mask=torch.ones_like(full["input_ids"])).logits
        reads = []
        original = torch.Tensor.__bool__
        monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: reads.append(1) or original(tensor))
        logits = forward_rows(model, padded).logits
        monkeypatch.undo()
        torch.testing.assert_close(forward_rows(model, full).logits, whole)
    assert name in READ_THE_DEVICE or not reads
    torch.testing.assert_close(logits, expected)
    for row, length in zip(range(2), (64, 37), strict=True):  # each text has the scores that it has alone
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=padded["input_ids"][row : row + 1, :length]).logits[0], logits[row])
    assert not torch.backends.cuda.cudnn_sdp_enabled() or model.config._attn_implementation == "eager"
