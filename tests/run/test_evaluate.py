"""`python -m shared evaluate`: a finished run measured again on other data."""

import json
import shutil
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from transformers import BertConfig

from shared.commands.evaluate import evaluate, settings, titles
from shared.models.tokenizers import load_tokenizer
from shared.process.errors import CleanExit
from shared.text.labelled import open_texts
from shared.text.options import LabelledTextConfig
from tests.conftest import ACCELERATE, learn_here, python, run, slow, write_lines


def evaluated(folder, flag, data, template, *more):
    """The table that the command prints, by metric: a value for each of base, final/, merged/ and another run."""
    done = python("-m", "shared", "evaluate", folder, flag, data, *more, "--", *ACCELERATE, f"templates/{template}.py")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [name for name, *_ in rows[1:]] and "final" in rows[0]
    return {name: list(map(float, values)) for name, *values in rows[1:]}


@pytest.mark.slow
def test_a_run_is_measured_as_it_measured_itself(chat_file, tiny_model, tmp_path):
    """Adapter and merged model, beside another run; on its own validation data, loss and scores are those that it logged."""
    held_out = write_lines(tmp_path / "held_out.jsonl", [*map(json.loads, chat_file.read_text().splitlines()[:6])])
    flags = ("--train_file", chat_file, "--validation_file", held_out, "--model_name_or_path", tiny_model, "--max_steps", 4)
    flags = (*flags, "--seq_length", 64, "--global_batch_size", 4, "--lora_r", 4, "--merge_adapter", "--eval_answers", 5)
    flags = (*flags, "--max_new_tokens", 8, "--learning_rate", 1e-2, "--metric_for_best_model", "none")
    ended = run("lora_finetune", tmp_path / "run", *flags)
    other = run("lora_finetune", tmp_path / "other", *flags, "--lora_r", 2, "--eval_answers", 0)
    again = evaluated(ended.folder, "--test_file", held_out, "lora_finetune", "--eval_answers", 5, "--beside", other.folder)
    for name in ("loss", "token_f1"):
        first, *_, last = ended.each(f"eval_{name}")
        assert again[name][:3] == pytest.approx([first, last, last], abs=2e-4)
    assert again["loss"][3] == pytest.approx(other.last("eval_loss"), abs=2e-4) and len(again["exact_match"]) == 4
    answered = (ended.folder / "evaluations/held_out/final/answers.jsonl").read_text().splitlines()
    assert len(answered) == 5 and not list(tmp_path.glob("*/evaluations/*/*/final"))


def test_a_run_on_the_demo_is_evaluated_on_other_data(tmp_path):
    (tmp_path / "config.yaml").write_text("train_file: []\nmax_steps: 9\nlearning_rate: 0.1\n")
    given = settings(tmp_path, tmp_path / "base", {"validation_file": "x", "eval_answers": "2"}, tmp_path)
    files = {"train_file": "x", "validation_file": "x"}
    assert given == files | {"eval_answers": "2", "max_steps": 0, "learning_rate": 0.1}


@pytest.mark.parametrize("template", ["lora_finetune", *map(slow, ("text_classification", "token_classification"))])
def test_a_test_file_stands_in_for_a_data_set_that_the_run_read(template, tmp_path):
    """Also if it has fewer samples than a batch, or classes, and the data set is gone."""
    rows = [{"text": f"sample {number} of some", "label": "ab"[number % 2]} for number in range(16)]
    if template == "token_classification":
        rows = [{"tokens": ["sample", str(number)], "tags": ["O", f"B-{'ab'[number % 2]}"]} for number in range(16)]
    data = tmp_path / "data" / "train.jsonl"
    data.parent.mkdir()
    write_lines(data, rows)
    test = write_lines(tmp_path / "test.jsonl", rows[:1])
    flags = ("--dataset_name", data.parent, "--validation_split_name", "train", "--global_batch_size", 4)
    flags = (*flags, "--max_steps", 1, "--seq_length", 32, "--lora_r", 4, "--fail_on", "duplicates")
    more = ("--allow_unused_columns", "label") if template == "lora_finetune" else ()
    learn_here(template, tmp_path / "run", *flags, *more)
    shutil.rmtree(data.parent)
    given = settings(tmp_path / "run", tmp_path / "run/final", {"validation_file": str(test)}, tmp_path)
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(given))
    again = learn_here(template, tmp_path / "again", "--config", tmp_path / "settings.yaml")
    assert [row["step"] for row in again.rows if "eval_loss" in row] == [0]


@pytest.mark.parametrize(
    ("kind", "names", "raw"),
    [
        ("single_label", "b|c a", "b|c"),
        ("single_label", "LABEL_0 LABEL_1", "LABEL_1"),
        ("multi_label", "b a", ["a", "b"]),
        ("regression", "LABEL_0", 2),
    ],
)
def test_classes_are_those_of_the_model(tiny_model, tmp_path, kind, names, raw):
    """Not those of the test file alone, whose labels may look like another kind."""
    config = {"problem_type": f"{kind}_classification".replace("regression_classification", "regression")}
    config["id2label"] = dict(enumerate(names.split()))
    BertConfig(**config).save_pretrained(tmp_path / "final")
    of_texts = {"train_file": ["gone.csv"], "problem_type": None}
    of_texts |= {"text_column": None, "text_pair_column": "other", "label_column": "kind"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(of_texts))
    test = write_lines(tmp_path / "test.jsonl", [{"text": "some", "other": "x", "kind": raw}])
    given = settings(tmp_path, tmp_path / "final", {"validation_file": [str(test)]}, tmp_path)
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    del options["model_name_or_path"]
    data = open_texts(LabelledTextConfig(**options), load_tokenizer(str(tiny_model)))
    assert (data.problem_type, sorted(data.classes)) == (kind, sorted(names.split()))
    assert len(data.validation) == 1 and len(data.train) >= 64


@pytest.mark.parametrize(("said", "message"), [("error: no labels", "no labels"), ("KeyError: 1", "ended with an error")])
def test_a_template_that_fails_is_a_line_and_what_it_said(tmp_path, capsys, said, message):
    (tmp_path / "config.yaml").write_text("train_file: [x]\n")
    command = [sys.executable, "-c", f"raise SystemExit({said!r})"]
    with pytest.raises(CleanExit, match=message):
        evaluate(tmp_path, tmp_path / "final", {"validation_file": "x"}, tmp_path / "evaluations/x/final", command)
    assert (said in capsys.readouterr().err.splitlines()) is (said == "KeyError: 1")


def test_each_run_has_a_column_of_its_own():
    for names in ([], ["chat", "other"], ["seed1/chat", "seed2/chat"], ["old/base"], ["b/final", "c/d/final"]):
        runs = [Path("/x", name) for name in names]
        assert titles(runs) == dict(zip(names, runs, strict=True))
    assert titles([Path("/x/y/a"), Path("/x/y/b/../a")]).keys() == {"y/a"}


@pytest.mark.slow
def test_a_classifier_of_images_is_measured_on_other_folders(image_folder, tmp_path):
    """And lists and tar files, without its training data."""
    images = shutil.copytree(image_folder, tmp_path / "images")
    flags = ("--train_dir", images, "--image_size", 16, "--max_steps", 3, "--global_batch_size", 16)
    ended = run("image_classification", tmp_path / "run", *flags)
    shutil.move(images, tmp_path / "moved")
    again = evaluated(ended.folder, "--test_dir", image_folder / "val", "image_classification")
    assert again["accuracy"] == pytest.approx([ended.last("eval_accuracy")], abs=1e-4)
    assert (ended.folder / "evaluations/val/final/evaluation.json").exists()
    files = sorted((image_folder / "val").rglob("*.*"))
    lines = [f"{file.parent.name},{file}" for file in files]
    (tmp_path / "list.csv").write_text("\n".join(["label,path", *lines]))
    assert evaluated(ended.folder, "--test_file", tmp_path / "list.csv", "image_classification") == again
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        tar.add(image_folder / "val", "val")
    assert evaluated(ended.folder, "--test_file", tmp_path / "all.tar", "image_classification") == again
