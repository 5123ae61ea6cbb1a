"""The edits of docs/editing_the_step.md: each diff applies to its template, trains, and survives a kill."""

import csv
import json
import os
import re
import shutil
import subprocess

import pytest
from sklearn.metrics import cohen_kappa_score

from tests.conftest import LAUNCHER, ROOT, Run, command, python, run, slow

PAGE = (ROOT / "docs/editing_the_step.md").read_text()
DIFFS = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
NAMES = ("z_loss", "two_optimizers", "adversary", "augmented", "penalty", "metric", "own_model")
FIRST_TIER = ("metric",)
CLASSES = ["bad", "fair", "good"]
CASES = [diff if name in FIRST_TIER else slow(diff) for name, diff in zip(NAMES, DIFFS, strict=True)]
KILLED = "adversary"  # the edit that is killed and resumed


def test_each_edit_is_small():
    assert len(DIFFS) == len(NAMES)
    for diff in DIFFS:
        changed = [line for line in diff.splitlines() if re.match(r"[-+](?![-+])", line)]
        assert 0 < len(changed) <= 45


def edited(folder, diff, text_file, image_folder):
    """(the edited template, flags of a small run), with the data that they name, in a folder."""
    shutil.copytree(ROOT / "templates", folder / "templates", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", "-"], input=diff.encode(), cwd=folder, check=True)
    template = re.search(r"a/templates/(\w+)\.py", diff)[1]
    texts = [f"{name} {'and so on ' * (n % 7)}{n},{name}" for n, name in enumerate(CLASSES * 30)]
    (folder / "stars.csv").write_text("\n".join(["text,label", *texts]))
    flags = {
        "full_finetune": ["--seq_length", 128, "--show_answers", 0],
        "pretrain": ["--train_file", text_file, "--vocab_size", 300, "--seq_length", 32],
        "text_classification": ["--train_file", folder / "stars.csv", "--eval_steps", 2],
        "image_classification": ["--train_dir", image_folder, "--image_size", 16, "--dataloader_num_workers", 0],
    }[template]
    return template, flags + (["--metric_for_best_model", "kappa"] if "kappa" in diff else [])


@pytest.mark.parametrize("diff", CASES, ids=NAMES)
def test_an_edited_template_trains_and_resumes(diff, tmp_path, text_file, image_folder):
    template, flags = edited(tmp_path, diff, text_file, image_folder)
    flags = [*flags, "--global_batch_size", 8, "--per_device_train_batch_size", 4, "--max_steps", 5, "--save_steps", 2]

    def train(folder, fault=""):
        argv = command(template, folder, *flags)
        argv = [argument.replace(str(ROOT / "templates"), str(tmp_path / "templates")) for argument in argv]
        environment = dict(os.environ) | {"PYTHONPATH": str(ROOT), "TEMPLATES_FAULT": fault}
        return Run(folder, *LAUNCHER.run(argv, environment))

    straight = train(tmp_path / "straight")
    assert straight.returncode == 0, straight.output
    assert len(straight.losses) == 5
    assert ("z_loss" in straight.rows[-2]) == ("z_loss" in diff)
    if "drop_tokens" in diff:  # other tokens, as many targets
        plain = run("full_finetune", tmp_path / "plain", *flags)
        tokens, expected = ([row["tokens"] for row in each.rows if "loss" in row] for each in (straight, plain))
        assert tokens == expected
        assert all(plain.losses[step] != straight.losses[step] for step in range(1, 6))
    if "kappa" in diff:
        with (tmp_path / "straight/predictions.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        lines = [int(row["where"].rpartition(":")[2]) for row in rows]
        assert lines == sorted(lines)  # in the order of the file, though batches hold texts of one length
        pairs = [[CLASSES.index(row[name]) for row in rows] for name in ("label", "predicted")]
        measured = json.loads((tmp_path / "straight/evaluation.json").read_text())["kappa"]
        assert measured == pytest.approx(cohen_kappa_score(*pairs, weights="quadratic", labels=range(3)))
        assert "best by kappa: step" in straight.output
    if "z_loss" in diff:  # the documented test of it
        (block,) = re.findall(r"```python\n(import torch\n.*?from train import own_loss.*?)```", PAGE, re.S)
        (tmp_path / "templates/pretrain.py").rename(tmp_path / "train.py")
        (tmp_path / "test_train.py").write_text(block)
        argv = ("-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path / "test_train.py")
        done = python(*argv, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert "1 passed" in done.stdout, done.stdout + done.stderr
    if KILLED in diff:
        assert train(tmp_path / "killed", "update:kill@4").returncode != 0
        resumed = train(tmp_path / "killed")
        assert "resumed from" in resumed.output and resumed.losses == straight.losses
        saved = (run.weights() for run in (straight, resumed))
        assert all(one.equal(other) for one, other in zip(*(each.values() for each in saved), strict=True))
