"""What people really have, given to the templates: each trains on it, or says in one line what is wrong with what."""

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from shared.data import records
from shared.data.files import find_files
from shared.process.errors import ConfigError
from tests.conftest import paint, run_here

TEXTS = [f"the model reads line {number} of a text and says what comes next" for number in range(40)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
UNUSUAL = "naïve 🙂 👩‍👩‍👧 \u202bשלום עליכם\u202c مرحبا بالعالم 日本語 e\u0301 \u2028 \\u0000"


IMAGE_NAMES = "image, img, image_path, path, file_name, filename or file"


@pytest.fixture
def attempt(tiny_model, architectures, image_folder, tmp_path):
    """`attempt(template, *flags)`: one step of a tiny run; the message of the ConfigError that ends it, or "" ."""
    text = ("--model_name_or_path", tiny_model, "--validation_split_percentage", 20, "--eval_samples", 2, "--max_steps", 1)
    base = {
        "pretrain": (*text, "--seq_length", 16, "--global_batch_size", 2, "--optim", "adamw"),
        "lora_finetune": (*text, "--seq_length", 32, "--global_batch_size", 2, "--num_generations", 0),
        "image_classification": (
            *("--config_name", architectures / "convnext", "--image_size", 16, "--max_steps", 1),
            *("--global_batch_size", 2, "--per_device_train_batch_size", 2, "--dataloader_num_workers", 0),
        ),
    }

    def attempt(template: str, *flags: object, output_dir: Path = tmp_path / "run") -> str:
        try:
            run_here(template, *base[template], "--output_dir", output_dir, *flags)
        except ConfigError as error:
            assert "\n" not in str(error) and "\r" not in str(error)
            return str(error)
        assert (output_dir / "final").is_dir()
        return ""

    return attempt


BOTH = pytest.mark.parametrize("template", ["pretrain", "lora_finetune"])
ALL = pytest.mark.parametrize("template", ["pretrain", "lora_finetune", "image_classification"])


# Text ----------------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b"\xef\xbb\xbf" + LINES),
        ("a.jsonl", "".join(json.dumps({"text": t + UNUSUAL}, ensure_ascii=False) + "\n" for t in TEXTS).encode()),
        ("a.jsonl", "".join(json.dumps({"text": t + UNUSUAL + "\0"}) + "\n" for t in TEXTS).encode()),
        ("a.csv", ("text\n" + "".join(f'"{t}\0{UNUSUAL}"\n' for t in TEXTS)).encode()),
        ("a.jsonl", LINES + json.dumps({"text": "the model reads " * 200_000}).encode()),
        ("a.jsonl", LINES.replace(b"\n", b"\r\n")),
        ("a.jsonl", LINES.rstrip()),
    ],
    ids=["mark", "unusual", "escaped", "nul-in-csv", "3-MB-line", "crlf", "no-last-newline"],
)
def test_unusual_text_trains(attempt, tmp_path, template, name, content):
    (tmp_path / name).write_bytes(content)
    assert attempt(template, "--train_file", tmp_path / name) == ""


@BOTH
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", LINES + b'{"text": "\xe9"}\n', ":41: not UTF-8 text (byte 2840); save it as UTF-8"),
        ("a.jsonl", LINES.decode().encode("utf-16"), ":1: not UTF-8 text (byte 0); save it as UTF-8"),
        ("a.jsonl", LINES + b'{"text": "a\0b"}\n', ":41: not valid JSON (Invalid control character, column 12)"),
        ("a.jsonl", LINES + b'{"text": "\\ud83d"}\n', r":41: not valid JSON ('\ud83d' is half a character)"),
        ("a.jsonl", LINES + b'{"text": 3}\n', ":41: 'text' is an int, expected text"),
        ("a.jsonl", LINES + b'{"text": NaN}\n', ":41: 'text' is a float, expected text"),
        ("a.jsonl", LINES + b'{"text": "a", "text": "b"}\n', ":41: not valid JSON (the key 'text' is there twice)"),
        ("a.csv", b"text,text\na,b\n", ":1: the column 'text' is there twice"),
        ("a.csv", b"text,n\n" + b"a,1\n" * 30 + b"b\n", ":32: not as many fields as the header has"),
        ("a.json", b'[{"text": "a"}, {"te', ":1: not valid JSON"),
        ("a.jsonl", b"\n \n\n", ": no "),
        ("a.csv", b"text\n", ": no "),
        ("a.json", b"[]", ": no "),
    ],
)
def test_text_that_cannot_be_used_is_named_with_its_line(attempt, tmp_path, template, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert attempt(template, "--train_file", tmp_path / name).startswith(f"{tmp_path / name}{message}")


# Paths ---------------------------------------------------------------------------------------------------------------


@ALL
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


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.txt"])
def test_a_file_that_may_not_be_read_is_named(public, name):
    (public / name).write_bytes(LINES)
    (public / name).chmod(0)
    with without_root(), pytest.raises(ConfigError) as caught:
        list(records.read_records(find_files([str(public / name)], flag="train_file")))
    assert str(caught.value).startswith(f"{public / name}: ") and str(caught.value).endswith("Permission denied")


def test_a_folder_that_may_not_be_read_is_named_and_not_passed_over(public):
    from shared.images.files import _class_folders

    for kind in (0, 1):
        paint(public / f"class{kind}" / "sub" / "a.png", kind, 0, (8, 8))
    (public / "class1" / "sub").chmod(0)
    for read in (
        lambda: _class_folders(public, training=True),
        lambda: find_files([str(public)], flag="train_file"),
    ):
        with without_root(), pytest.raises(ConfigError) as caught:
            read()
        assert str(caught.value) == f"{public}/class1/sub: Permission denied"


def test_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(ConfigError) as caught:
        find_files([str(tmp_path)], flag="train_file")
    assert str(caught.value) == f"--train_file {tmp_path}/b.txt: a link to nothing"


@pytest.mark.parametrize(
    "suffix", [".zip", ".tar", ".tar.gz", ".tgz", ".jsonl.gz", ".JSONL.ZST", ".7z", ".xz", ".bz2", ".rar"]
)
def test_archives_are_not_unpacked(attempt, tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    path.write_bytes(b"PK\3\4 or something else")
    for template, flag in (
        ("pretrain", "train_file"),
        ("lora_finetune", "train_file"),
        ("image_classification", "train_dir"),
    ):
        assert attempt(template, f"--{flag}", path).startswith(f"--{flag} {path}: an archive or compressed file: unpack it")
    (tmp_path / "a.txt").write_text("x")
    assert attempt("pretrain", "--train_file", tmp_path).startswith(f"--train_file {path}: an archive")


@pytest.mark.parametrize(
    ("template", "flag", "message"),
    [
        ("pretrain", "--model_name_or_path", "FILE: a file; a model is given as the folder"),
        ("pretrain", "--tokenizer_name", "FILE: a file; a model is given as the folder"),
        ("lora_finetune", "--adapter_name_or_path", "FILE: a file; a model is given as the folder"),
        ("lora_finetune", "--output_dir", "--output_dir FILE: cannot be written"),
        ("image_classification", "--train_dir", "--train_dir FILE: no such folder"),
        ("image_classification", "--config_name", "FILE: a file; a model is given as the folder"),
    ],
)
def test_a_file_where_a_folder_is_expected(attempt, image_folder, tmp_path, template, flag, message):
    file = tmp_path / "file"
    file.write_bytes(LINES)
    (tmp_path / "data.jsonl").write_bytes(LINES)
    data = ("--train_dir", image_folder) if template == "image_classification" else ("--train_file", tmp_path / "data.jsonl")
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


@BOTH
@pytest.mark.parametrize("packing", ["--packing", "--no_packing"])
def test_a_tokenizer_without_a_padding_token_trains(attempt, model, lines, template, packing):
    from transformers import AutoTokenizer

    edit(model / "tokenizer_config.json", pad_token=None)
    edit(model / "config.json", pad_token_id=None)
    assert AutoTokenizer.from_pretrained(model).pad_token is None
    flags = [packing] if template == "lora_finetune" else []
    assert attempt(template, "--model_name_or_path", model, "--train_file", lines, *flags) == ""


@BOTH
def test_a_tokenizer_that_is_larger_than_the_model_is_refused(attempt, model, lines, template):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(model)
    message = attempt(template, "--model_name_or_path", model, "--train_file", lines)
    assert message.startswith("the tokenizer has 322 tokens, the model only 320 embeddings: ")


@BOTH
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "list"])
def test_a_damaged_description_of_a_model_is_named(attempt, model, lines, template, name, damage):
    whole = (model / name).read_bytes()
    (model / name).write_bytes({"truncated": whole[: len(whole) // 2], "empty": b"", "list": b"[1]"}[damage])
    message = attempt(template, "--model_name_or_path", model, "--train_file", lines)
    assert message.startswith(f"{model / name}: damaged, not valid JSON (")


@BOTH
@pytest.mark.parametrize("damage", ["truncated", "empty", "other"])
def test_damaged_weights_are_named(attempt, model, lines, template, damage):
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes({"truncated": whole[:-100], "empty": b"", "other": b"version https://git-lfs" * 10}[damage])
    message = attempt(template, "--model_name_or_path", model, "--train_file", lines)
    assert message.startswith(f"{file}: damaged, not valid safetensors (")


@BOTH
def test_weights_that_are_missing_do_not_start_at_random_unsaid(attempt, model, lines, template):
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    message = attempt(template, "--model_name_or_path", model, "--train_file", lines)
    assert message == f"{model}: 1 weights are missing in its files, such as model.layers.1.mlp.up_proj.weight"


@BOTH
def test_weights_that_the_model_has_no_place_for_are_a_warning(attempt, model, lines, capsys, template):
    edit(model / "config.json", num_hidden_layers=1)
    assert attempt(template, "--model_name_or_path", model, "--train_file", lines) == ""
    assert (
        f"warning: {model}: 9 weights in its files have no place in this model, such as model.layers.1"
        in capsys.readouterr().err
    )


@BOTH
@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "many"},
        {"hidden_size": 65},
        {"num_attention_heads": 0},
        {"num_hidden_layers": 3},
        {"vocab_size": 100},
        {"model_type": "of_its_own", "architectures": ["Own"]},
        {"model_type": None, "architectures": None},
        {"rope_parameters": {"rope_type": "nonesuch"}},
    ],
    ids=str,
)
def test_a_model_that_cannot_be_is_one_line_that_names_it(attempt, model, lines, template, changes):
    edit(model / "config.json", **changes)
    message = attempt(template, "--model_name_or_path", model, "--train_file", lines)
    assert message.startswith((f"{model}: ", "the tokenizer has"))


@pytest.mark.parametrize(
    ("template", "changes", "message"),
    [
        ("pretrain", "hidden_size=100", "LlamaConfig: The hidden size (100) is not a multiple"),
        ("pretrain", "hidden_size=many", "--config_overrides hidden_size=many: "),
        ("pretrain", "vocab_size=-1", "LlamaConfig: "),
        ("pretrain", "hidden_act=nonesuch", "LlamaConfig: "),
        ("image_classification", "hidden_sizes=[7]", "ConvNextConfig: "),
        ("image_classification", "patch_size=big", "--config_overrides patch_size=big: "),
    ],
)
def test_an_architecture_that_cannot_be_is_refused_at_once(attempt, lines, image_folder, template, changes, message):
    data = ("--train_file", lines, "--vocab_size", 320) if template == "pretrain" else ("--train_dir", image_folder)
    flags = (*data, "--config_overrides", changes) + (("--model_name_or_path", None) if template == "pretrain" else ())
    assert attempt(template, *flags).startswith(message)


@BOTH
@pytest.mark.parametrize(
    "content", [{"temperature": 0.5, "do_sample": False}, {"max_new_tokens": -1}, {"num_beams": 1, "length_penalty": 2.0}]
)
def test_unusual_generation_settings_do_not_end_a_run_when_it_is_saved(attempt, model, lines, template, content):
    (model / "generation_config.json").write_text(json.dumps(content))
    flags = ["--merge_adapter"] if template == "lora_finetune" else []
    message = attempt(template, "--model_name_or_path", model, "--train_file", lines, *flags)
    assert message == "" or message.startswith(f"{model}: ")


def test_a_folder_without_a_model_says_so(attempt, lines, tmp_path):
    (tmp_path / "nothing").mkdir()
    for template, flag in (("pretrain", "model_name_or_path"), ("lora_finetune", "adapter_name_or_path")):
        message = attempt(template, "--train_file", lines, f"--{flag}", tmp_path / "nothing")
        assert message == f"{tmp_path / 'nothing'}: no model in the format of the Hub, there is no config.json"


# Images --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path):
    for number in range(12):
        paint(tmp_path / f"{number}.png", number % 3, number, (20, 20))
    return tmp_path


def listed(folder: Path, labels: list) -> Path:
    file = folder / "list.jsonl"
    file.write_text("".join(json.dumps({"image": f"{n}.png", "label": label}) + "\n" for n, label in enumerate(labels)))
    return file


@pytest.mark.parametrize("labels", [[0, 1, 2], ["0", "1", "2"], [7, 1000, -5], ["🙂", "כלב", "a b"], [True, False, True]])
def test_labels_of_any_one_kind_train(attempt, pictures, labels):
    assert attempt("image_classification", "--train_file", listed(pictures, labels * 4)) == ""


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("1", ":12: the label is a str, that of FILE:1 an int: use one"),
        (True, ":12: the label is a bool, that of FILE:1 an int: use one"),
        (1.0, ":12: the label is a float, expected a name or a number"),
        (None, ":12: the label is null, expected a name or a number"),
    ],
)
def test_labels_of_mixed_kinds_are_refused(attempt, pictures, label, message):
    file = listed(pictures, [0, 1, 2] * 3 + [0, 1, label])
    assert attempt("image_classification", "--train_file", file) == str(file) + message.replace("FILE", str(file))


def test_a_label_beyond_the_classes_of_a_data_set_is_refused(attempt, pictures, monkeypatch):
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = {"image": [str(pictures / f"{n}.png") for n in range(6)], "label": [0, 1, 0, 1, 0, 1]}
    table = datasets.Dataset.from_dict(rows, features=features)
    column = datasets.Dataset.from_dict({"label": [0, 1, 0, 1, 0, 2]})  # as a damaged file of a data set gives it
    broken = datasets.concatenate_datasets([table.remove_columns("label"), column], axis=1)
    broken.info.features = broken._info.features = features
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: datasets.DatasetDict(train=broken))
    assert (
        attempt("image_classification", "--dataset_name", "org/name")
        == "org/name:train: row 5: the label 2 is none of its classes"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"image,label\n0.png,a\n1.png\n", ":3: not as many fields as the header has"),
        (b"image,label\n0.png,a\n1.png,b,c\n", ":3: not as many fields as the header has"),
        (b"image,label,label\n0.png,a,b\n", ":1: the column 'label' is there twice"),
        (b"image,label\n0.png,\xff\n", ":2: not UTF-8 text (byte 18); save it as UTF-8"),
        (b"image,label\n", ": no records in it"),
        (b"0.png,a\n1.png,b\n", f":2: no column {IMAGE_NAMES} (has: 0.png, a); name it with --image_column"),
    ],
)
def test_a_list_of_images_that_cannot_be_used_is_named_with_its_line(attempt, pictures, content, message):
    file = pictures / "list.csv"
    file.write_bytes(content)
    assert attempt("image_classification", "--train_file", file).removeprefix("--train_file ") == f"{file}{message}"


def test_a_list_that_names_a_folder_as_an_image(attempt, pictures):
    (pictures / "11.png").unlink()
    (pictures / "11.png").mkdir()
    message = attempt("image_classification", "--train_file", listed(pictures, [0, 1, 2] * 4))
    assert message.startswith(f"{pictures / '11.png'}: ") and "--skip_bad_images" in message
