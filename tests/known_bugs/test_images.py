"""Images left out or decoded too dark; masks that a kernel of attention does not take, and that make the host wait."""

import io
import struct
import tarfile
import zlib

import numpy as np
import pytest
import torch
import transformers
from accelerate import PartialState
from PIL import Image

from shared.images.decoding import FORMATS
from shared.images.files import prepare
from shared.images.options import ImageConfig
from shared.models.attention import forward_rows
from shared.models.counts import measure
from shared.process.errors import ConfigError
from shared.text.labelled import collate

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
SIZES |= {"pad_token_id": 1, "num_labels": 3}
BART = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48, "d_model": 32, "eos_token_id": 2}
BART |= {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 48}
CLASSIFIERS = {
    "bert": transformers.BertConfig(**SIZES),
    "roberta": transformers.RobertaConfig(**SIZES),
    "distilbert": transformers.DistilBertConfig(**SIZES, dim=32, n_layers=2, n_heads=2, hidden_dim=48),
    "deberta": transformers.DebertaV2Config(**SIZES, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "llama": transformers.LlamaConfig(**SIZES, num_key_value_heads=1),
    "bart": transformers.BartConfig(**BART, vocab_size=40, pad_token_id=1, num_labels=3),
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
    others += ["cat/a.txt", "dog/.hidden"]  # the last one is not counted
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
        assert data.about.endswith("; left out: 1 .dib, 1 .eps, 2 .heic, 1 .txt, 3 no ending"), data.about
    for part in parts:
        for row in range(len(part)):
            red, green, blue = part[row]["image"].getpixel((4, 4))
            grey = part.where(row).endswith((".pbm", ".pgm"))
            assert grey or (abs(red - 200) < 9 and abs(green - 100) < 9 and abs(blue - 50) < 9), part.where(row)


def write_png(pixels: torch.Tensor) -> bytes:
    """A PNG of 16-bit colours [height, width, 3], which Pillow cannot write."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.numpy().astype(">u2").tobytes() for row in pixels)

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "colours"])
def test_images_of_more_than_8_bits_are_refused(tmp_path, one_process, kind):
    """Greys of 12 bits in 16 were learned as black pictures. github.com/python-pillow/Pillow/issues/3011 (2018)."""
    pixels = np.random.default_rng(0).integers(0, 4096, (12, 16)).astype(np.uint16)
    deep = write_png(torch.from_numpy(np.stack([pixels] * 3, 2)))
    if kind != "colours":
        deep = encoded(Image.fromarray(pixels), kind)
    for number in range(8):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        content = encoded(Image.fromarray((pixels >> 4).astype(np.uint8)), "PNG")
        (tmp_path / "ab"[number % 2] / f"{number}.png").write_bytes(deep if number == 3 else content)
    with pytest.raises(ConfigError, match=r"b/3\.png: more than 8 bits a channel: convert it to 8"):
        prepare(ImageConfig(train_dir=(tmp_path,)))
    data = prepare(ImageConfig(train_dir=(tmp_path,), skip_bad_images=True))
    assert len(data.train) + len(data.validation) == 7


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_texts_with_padding_turn_off_the_kernel_that_may_give_nan_and_are_not_read(name, monkeypatch):
    """cuDNN's attention with a mask has NaN gradients: github.com/pytorch/pytorch/issues/196678 (2026).

    And transformers reads a padding mask from the device in each forward (masking_utils._ignore_bidirectional_mask_sdpa).
    """
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(CLASSIFIERS[name])
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
