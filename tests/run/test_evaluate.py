"""`python -m shared evaluate`: a finished run measured again on other data."""

import subprocess
import sys

import pytest

from shared.commands.evaluate import settings
from shared.process.errors import ConfigError
from tests.conftest import ACCELERATE, ROOT, run


def evaluated(folder, flag, data, template, *more):
    """The table that the command prints, by metric: a value for each of base, final/, merged/ and another run."""
    command = [sys.executable, "-m", "shared", "evaluate", str(folder), flag, str(data), *map(str, more), "--", *ACCELERATE]
    done = subprocess.run([*command, f"templates/{template}.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in rows[1:]] and "final" in rows[0]
    return {name: list(map(float, values)) for name, *values in rows[1:]}


@pytest.mark.slow
def test_a_run_is_measured_as_it_measured_itself(chat_file, tiny_model, tmp_path):
    """Adapter and merged model, beside another run; on its own validation data, loss and scores are those that it logged."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(chat_file.read_text().splitlines(keepends=True)[:6]))
    flags = ("--train_file", chat_file, "--validation_file", held_out, "--model_name_or_path", tiny_model, "--max_steps", 4)
    flags = (*flags, "--seq_length", 64, "--global_batch_size", 4, "--lora_r", 4, "--merge_adapter", "--eval_answers", 5)
    flags = (*flags, "--max_new_tokens", 8, "--learning_rate", 1e-2, "--metric_for_best_model", "none")
    ended = run("lora_finetune", tmp_path / "run", *flags)
    other = run("lora_finetune", tmp_path / "other", *flags, "--lora_r", 2, "--eval_answers", 0)
    again = evaluated(ended.folder, "--test_file", held_out, "lora_finetune", "--eval_answers", 5, "--beside", other.folder)
    before = next(row for row in ended.rows if "eval_loss" in row)
    for name in ("loss", "token_f1"):
        first, last = before[f"eval_{name}"], ended.last(f"eval_{name}")
        assert again[name][:3] == pytest.approx([first, last, last], abs=2e-4)
    assert again["loss"][3] == pytest.approx(other.last("eval_loss"), abs=2e-4) and len(again["exact_match"]) == 4
    answered = (ended.folder / "evaluations/held_out/final/answers.jsonl").read_text().splitlines()
    assert len(answered) == 5 and not list(tmp_path.glob("*/evaluations/*/*/final"))


def test_a_demo_has_no_settings_for_other_data(tmp_path):
    (tmp_path / "config.yaml").write_text("train_file: []\nlearning_rate: 1e-4\n")
    with pytest.raises(ConfigError, match="trained on the demo's data"):
        settings(tmp_path, tmp_path / "final")


@pytest.mark.slow
def test_a_classifier_of_images_is_measured_on_other_folders(image_folder, tmp_path):
    flags = ("--train_dir", image_folder, "--image_size", 16, "--max_steps", 3, "--global_batch_size", 16)
    ended = run("image_classification", tmp_path / "run", *flags)
    again = evaluated(ended.folder, "--test_dir", image_folder / "val", "image_classification")
    assert again["accuracy"] == pytest.approx([ended.last("eval_accuracy")], abs=1e-4)
    assert (ended.folder / "evaluations/val/final/evaluation.json").exists()
    files = sorted((image_folder / "val").rglob("*.*"))
    lines = [f"{file.parent.name},{file}" for file in files]
    (tmp_path / "list.csv").write_text("\n".join(["label,path", *lines]))
    assert evaluated(ended.folder, "--test_file", tmp_path / "list.csv", "image_classification") == again
