"""Nothing in data runs."""

import shutil

import hypothesis  # noqa: F401  # pytest would import it after these tests, when Python 3.11 has miscounted its recursion
import pytest

from tests.conftest import paint
from tests.security.conftest import refused, trains


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


@pytest.mark.parametrize("template", ["pretrain", "lora_finetune", "image_classification"])
def test_a_pickle_in_place_of_prepared_data_runs_nothing(
    template, tiny_model, text_file, image_folder, architectures, tmp_path, payload, monkeypatch
):
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path / "cache"))
    flags = {
        "pretrain": ("--train_file", text_file, "--vocab_size", 320, "--config_overrides", "num_hidden_layers=1"),
        "lora_finetune": ("--train_file", text_file, "--model_name_or_path", tiny_model),
        "image_classification": ("--train_dir", image_folder, "--config_name", architectures / "convnext"),
    }[template]
    assert trains(template, tmp_path, *flags)
    (prepared,) = (tmp_path / "cache").glob("*/*")
    read = ["meta.json", "tokenizer.json", "train.bin"] + ["*.npy"] * (template != "pretrain")
    files = [path for pattern in read for path in prepared.rglob(pattern)]
    assert len(files) >= 2
    for path in files:
        content = path.read_bytes()
        path.write_bytes(payload)
        message = refused(template, tmp_path / "again", *flags)
        assert message.startswith(f"{prepared}: prepared data is damaged ("), path
        assert message.endswith("remove the folder to make it anew")
        path.write_bytes(content)
    shutil.rmtree(prepared)
    assert trains(template, tmp_path / "again", *flags)
