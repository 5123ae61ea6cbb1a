"""What people really have, given to the templates: each trains on it, or says in one line what is wrong with what."""

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3Config

from shared.data.files import find_files
from shared.images.options import ImageConfig
from shared.images.sources import list_files
from shared.process.errors import ConfigError
from tests.conftest import paint, run_here, write_lines
from tests.security.conftest import TINY

TEXTS = [f"the model reads line {number} of a text and says what comes next" for number in range(40)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
UNUSUAL = "naïve 🙂 👩‍👩‍👧 \u202bשלום עליכם\u202c مرحبا بالعالم 日本語 e\u0301 \u2028 \\u0000"


@pytest.fixture
def attempt(tiny_model, architectures, image_folder, tmp_path):
    """`attempt(template, *flags)`: one step of a tiny run; the message of the ConfigError that ends it, or "" ."""
    of_text = ("--model_name_or_path", tiny_model, "--validation_split_percentage", 20)

    def attempt(template: str, *flags: object, output_dir: Path = tmp_path / "run") -> str:
        more = ("--config_name", architectures / "convnext") if template == "image_classification" else of_text
        try:
            run_here(template, *TINY[template], *more, "--output_dir", output_dir, *flags)
        except ConfigError as error:
            assert "\n" not in str(error) and "\r" not in str(error)
            return str(error)
        assert (output_dir / "final").is_dir()
        return ""

    return attempt


# Text ----------------------------------------------------------------------------------------------------------------

ODD = (
    b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"),
    json.dumps({"text": "the model reads " * 70_000}).encode() + b"\n\n",
    "".join(json.dumps({"text": t + UNUSUAL}, ensure_ascii=False) + "\n" for t in TEXTS).encode(),
    "\n".join(json.dumps({"text": t + UNUSUAL + "\0"}) for t in TEXTS).encode(),
)


@pytest.mark.parametrize(
    ("template", "name", "content"),
    [
        ("pretrain", "a.jsonl", b"".join(ODD)),
        ("lora_finetune", "a.jsonl", b"".join(ODD)),
        ("lora_finetune", "a.csv", ("text\n" + "".join(f'"{t}\0{UNUSUAL}"\n' for t in TEXTS)).encode()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unusual_text_trains(attempt, tmp_path, template, name, content):
    """A byte-order mark, CRLF, a line of 1 MB, an empty line, any script, NUL, and no newline at the end."""
    (tmp_path / name).write_bytes(content)
    assert attempt(template, "--train_file", tmp_path / name) == ""


def test_a_model_without_its_tokenizer_files_is_refused(attempt, tmp_path):
    """transformers makes some tokenizers of nothing, and then of each text nothing."""
    Qwen3Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1).save_pretrained(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    message = attempt("lora_finetune", "--train_file", tmp_path / "a.jsonl", "--model_name_or_path", tmp_path)
    assert message == f"{tmp_path}: a tokenizer without words: copy the model's tokenizer files"


# Paths ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["pretrain", "lora_finetune", "image_classification"])
def test_paths_in_any_script_train(attempt, tiny_model, architectures, image_folder, tmp_path, template):
    place = tmp_path / "дані שלום 日本 🙂 'a b'"
    place.mkdir()
    if template == "image_classification":
        shutil.copytree(architectures / "convnext", place / "модель")
        shutil.copytree(image_folder, place / "صور")
        (place / "صور/train/cat").rename(place / "صور/train/кіт")
        (place / "صور/val/cat").rename(place / "صور/val/кіт")
        flags = ("--config_name", place / "модель", "--train_dir", place / "صور")
    else:
        shutil.copytree(tiny_model, place / "модель")
        (place / "دفتر.jsonl").write_bytes(LINES)
        flags = ("--model_name_or_path", place / "модель", "--train_file", place / "دفتر.jsonl")
    assert attempt(template, *flags, output_dir=place / "виходи") == ""


@contextlib.contextmanager
def without_root():
    """Root reads everything: be nobody meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def public():
    """A folder that everybody may enter, as pytest's own is not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in folder.rglob("*"):
        path.chmod(0o755)
    shutil.rmtree(folder)


def test_a_folder_that_may_not_be_read_is_named_and_not_passed_over(public):
    for kind in (0, 1):
        paint(public / f"class{kind}" / "sub" / "a.png", kind, 0, (8, 8))
    (public / "class1" / "sub").chmod(0)
    for read in (lambda: list_files(ImageConfig(), public), lambda: find_files([str(public)], flag="train_file")):
        with without_root(), pytest.raises(ConfigError) as caught:
            read()
        assert str(caught.value) == f"{public}/class1/sub: Permission denied"


@pytest.mark.parametrize(
    ("template", "flag", "message"),
    [
        ("pretrain", "--model_name_or_path", "FILE: no such folder"),
        ("lora_finetune", "--adapter_name_or_path", "FILE: no such folder"),
        ("lora_finetune", "--output_dir", "--output_dir FILE: cannot be written"),
        ("image_classification", "--train_dir", "--train_dir or --validation_dir FILE: no such folder"),
    ],
)
def test_a_file_where_a_folder_is_expected(attempt, tmp_path, template, flag, message):
    file = tmp_path / "file"
    file.write_bytes(LINES)
    (tmp_path / "data.jsonl").write_bytes(LINES)
    data = () if template == "image_classification" else ("--train_file", tmp_path / "data.jsonl")
    assert attempt(template, *data, flag, file).startswith(message.replace("FILE", str(file)))


# Models --------------------------------------------------------------------------------------------------------------


def edit(file: Path, **changes: object) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


@pytest.fixture
def model(tiny_model, tmp_path):
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def lines(tmp_path):
    (tmp_path / "lines.jsonl").write_bytes(LINES)
    return tmp_path / "lines.jsonl"


@pytest.mark.parametrize(
    ("template", "flags"), [("pretrain", ()), ("lora_finetune", ["--packing"]), ("lora_finetune", ["--no_packing"])]
)
def test_a_tokenizer_without_a_padding_token_trains(attempt, model, lines, template, flags):
    edit(model / "tokenizer_config.json", pad_token=None)
    edit(model / "config.json", pad_token_id=None)
    assert AutoTokenizer.from_pretrained(model).pad_token is None
    assert attempt(template, "--model_name_or_path", model, "--train_file", lines, *flags) == ""


@pytest.mark.parametrize(
    ("template", "names"),
    [("pretrain", ("config.json", "model.safetensors")), ("lora_finetune", ("tokenizer.json", "tokenizer_config.json"))],
)
def test_a_damaged_file_of_a_model_is_named(attempt, model, lines, template, names):
    for name in names:
        whole = (model / name).read_bytes()
        for left in (whole[: len(whole) // 2], b""):
            (model / name).write_bytes(left)
            message = attempt(template, "--model_name_or_path", model, "--train_file", lines)
            assert message.startswith(f"{model}: ")
        (model / name).write_bytes(whole)


@pytest.mark.parametrize("template", ["pretrain", "lora_finetune"])
def test_weights_that_are_missing_do_not_start_at_random_unsaid(attempt, model, lines, template):
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    message = attempt(template, "--model_name_or_path", model, "--train_file", lines)
    assert message == f"{model}: 1 weights are missing in its files, such as model.layers.1.mlp.up_proj.weight"


def test_weights_that_the_model_has_no_place_for_are_a_warning(attempt, model, lines, capsys):
    edit(model / "config.json", num_hidden_layers=1)
    assert attempt("lora_finetune", "--model_name_or_path", model, "--train_file", lines) == ""
    said = capsys.readouterr().err
    assert f"warning: {model}: 9 weights in its files have no place in this model, such as model.layers.1" in said


SHAPES = [{"hidden_size": 65}, {"num_hidden_layers": 3}, {"vocab_size": 100}]
TYPES = [{"model_type": "of_its_own", "architectures": ["Own"]}, {"model_type": None, "architectures": None}]


CANNOT_BE = [*(("pretrain", changes) for changes in SHAPES), *(("lora_finetune", changes) for changes in TYPES)]


@pytest.mark.parametrize(("template", "changes"), CANNOT_BE, ids=str)
def test_a_model_that_cannot_be_is_one_line_that_names_it(attempt, model, lines, template, changes):
    edit(model / "config.json", **changes)
    message = attempt(template, "--model_name_or_path", model, "--train_file", lines)
    assert message.startswith((f"{model}: ", "the tokenizer has"))


@pytest.mark.parametrize("content", [{"temperature": 0.5, "do_sample": False}, {"num_beams": 1, "length_penalty": 2.0}])
def test_unusual_generation_settings_do_not_end_a_run_when_it_is_saved(attempt, model, lines, content):
    (model / "generation_config.json").write_text(json.dumps(content))
    message = attempt("lora_finetune", "--model_name_or_path", model, "--train_file", lines, "--merge_adapter")
    assert message == "" or message.startswith(f"{model}: ")


def test_a_folder_without_a_model_says_so(attempt, lines, tmp_path):
    (tmp_path / "nothing").mkdir()
    for template, flag in (("pretrain", "model_name_or_path"), ("lora_finetune", "adapter_name_or_path")):
        message = attempt(template, "--train_file", lines, f"--{flag}", tmp_path / "nothing")
        assert message.startswith(f"{tmp_path / 'nothing'}: ")


# Images --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [[7, 1000, -5], ["🙂", "כלב", "a b"]])
def test_labels_of_any_one_kind_train(attempt, tmp_path, labels):
    rows = [{"image": f"{number}.png", "label": label} for number, label in enumerate(labels * 4)]
    for number, row in enumerate(rows):
        paint(tmp_path / row["image"], number % 3, number, (20, 20))
    assert attempt("image_classification", "--train_file", write_lines(tmp_path / "list.jsonl", rows)) == ""
