"""image_classification.py --problem_type multi_label, launched for real."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import average_precision_score, f1_score
from transformers import AutoModelForImageClassification

from tests.conftest import continued, learn_here, paint, python, refusal, run, save_classifier
from tests.plain_loop import pixels_of
from tests.same import assert_same_learning

NAMES = ("cat", "dog", "owl")
MULTI = ("--problem_type", "multi_label", "--image_size", 16, "--dataloader_num_workers", 0)


def write(folder, counts):
    """train.csv with | between labels and val.jsonl with lists, of so many pictures; some have no label. Returns their flags
    and, by split, [(path, [classes] 0 or 1)]."""
    made = {}
    for split, count in counts.items():
        lines, made[split] = [], []
        for number in range(count):
            labels = [label for label in range(3) if number >> label & 1 or number % 5 == label]
            path = folder / "images" / f"{split}{number}.png"
            mislabelled = split == "val" and number % 6 == 1  # so that scores are neither 0 nor 1
            paint(path, [(label + mislabelled) % 3 for label in labels], number + 1000 * len(split), (24, 24))
            given = [NAMES[label] for label in labels]
            record = {"file_name": f"images/{path.name}", "label": given}
            lines.append(json.dumps(record) if split == "val" else f"images/{path.name},{'|'.join(given)}")
            made[split].append((path, [float(label in labels) for label in range(3)]))
        file = folder / ("val.jsonl" if split == "val" else "train.csv")
        file.write_text("\n".join(["file_name,label"] * (split == "train") + lines) + "\n")
    assert any(not any(hot) for _, hot in made["train"])
    return ("--train_file", folder / "train.csv", "--validation_file", folder / "val.jsonl", *MULTI), made


@pytest.fixture(scope="module")
def base(tmp_path_factory, architectures):
    """Flags of a tiny run with everything that changes targets, whose epochs end in a ragged global batch."""
    flags, _ = write(tmp_path_factory.mktemp("data"), {"train": 53, "val": 17})
    return (
        *(*flags, "--config_name", architectures / "convnext", "--mixup_alpha", 0.3, "--cutmix_alpha", 1.0),
        *("--label_smoothing", 0.1, "--class_weights", "balanced", "--learning_rate", 3e-3, "--global_batch_size", 8),
        *("--per_device_eval_batch_size", 4, "--max_steps", 12, "--eval_steps", 6, "--save_steps", 4, "--audit_data"),
    )


@pytest.fixture(scope="module")
def one_process(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return learn_here("image_classification", folder, *base, "--per_device_train_batch_size", 8)


def test_two_processes_of_which_one_is_killed_learn_what_one_learns(one_process, base, tmp_path):
    """With the thresholds. That a resumed run is the same bit for bit: test_faults.py."""
    flags, folder = (*base, "--per_device_train_batch_size", 2), tmp_path / "run"
    other = continued("image_classification", folder, "update:kill@11#1", *flags, processes=2)
    assert "at step 8" in other.output
    assert_same_learning(one_process, other, atol=None, keys=("eval_map", "eval_macro_f1"))
    assert {*np.diff([0, *one_process.each("images")]).tolist()} == {8, 5}  # a ragged batch, filled up to the others' size
    ours, theirs = other.evaluation, one_process.evaluation
    assert ours["images"] == theirs["images"] == 17
    for name in NAMES:
        assert ours["classes"][name] == pytest.approx(theirs["classes"][name], rel=1e-4)
    limits = [json.loads((each.folder / "final/config.json").read_text())["thresholds"] for each in (other, one_process)]
    assert limits[0] == pytest.approx(limits[1], rel=1e-4)


@pytest.mark.slow
def test_an_evaluation_is_scikit_learns_and_the_card_serves_it(architectures, tmp_path):
    """That losses are those of a plain loop: test_text_classification.py. That no threshold is better: tests/data."""
    flags, made = write(tmp_path / "data", {"train": 21, "val": 34})
    model_folder = save_classifier(architectures / "convnext", tmp_path / "model", ("owl", "dog", "cat"))
    (model_folder / "preprocessor_config.json").unlink()
    theirs = run(
        *("image_classification", tmp_path / "run", *flags, "--model_name_or_path", model_folder, "--crop_pct", 1),
        *("--crop_min_scale", 1, "--horizontal_flip", 0, "--label_smoothing", 0.1, "--class_weights", "balanced"),
        *("--learning_rate", 5e-3, "--weight_decay", 0, "--lr_scheduler_type", "constant", "--warmup_steps", 0),
        *("--max_steps", 30, "--max_grad_norm", 0, "--global_batch_size", 21, "--per_device_train_batch_size", 21),
        *("--metric_for_best_model", "none", "--per_device_eval_batch_size", 4),
    )
    assert "its head is kept" in theirs.output

    final = AutoModelForImageClassification.from_pretrained(tmp_path / "run/final").eval()
    hot = torch.tensor([labels[::-1] for _, labels in made["val"]])  # in the model's order: owl, dog, cat
    with torch.no_grad():
        logits = final(pixel_values=pixels_of(path for path, _ in made["val"])).logits
    expected, found = F.binary_cross_entropy_with_logits(logits, hot).item(), theirs.evaluation
    scores, hot = logits.sigmoid().numpy(), hot.numpy().astype(bool)
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["map"] == pytest.approx(average_precision_score(hot, scores, average="macro"), rel=1e-5)
    assert final.config.problem_type == "multi_label_classification" and set(final.config.thresholds) == set(NAMES)
    limits = np.array([final.config.thresholds[final.config.id2label[i]] for i in range(3)])
    assert found["macro_f1"] == pytest.approx(f1_score(hot, scores >= limits, average="macro"), rel=1e-6)
    assert 0.5 < found["map"] < 1  # neither is trivial
    assert found["num_mistakes"] == ((scores >= limits) != hot).sum() > 0

    # What the model card says, in another process, with transformers alone.
    code = f"""import json, transformers
usage = open("final/README.md").read().split("```python")[1].split("```")[0]
found = []
for path in {[str(path) for path, _ in made["val"]]}:
    scope = {{"transformers": transformers}}
    exec(usage.replace("image.jpg", path), scope)
    found.append([scope["labels"], scope["answers"]])
print(json.dumps(found))"""
    done = python("-c", code, cwd=tmp_path / "run")
    assert done.returncode == 0, done.stderr
    for (labels, answers), row, given in zip(json.loads(done.stdout), scores, scores >= limits, strict=True):
        by_name = {final.config.id2label[i]: float(score) for i, score in enumerate(row)}
        assert {answer["label"]: answer["score"] for answer in answers} == pytest.approx(by_name, abs=1e-5)
        assert set(labels) == {final.config.id2label[i] for i in np.flatnonzero(given)}


def test_one_label_after_several_forgets_thresholds(one_process, image_folder, tmp_path):
    """Pipelines would take a probability for each class, and users thresholds that mean nothing."""
    flags = ("--train_dir", image_folder, "--model_name_or_path", one_process.folder / "final", "--image_size", 16)
    flags = (*flags, "--global_batch_size", 8, "--max_steps", 1, "--dataloader_num_workers", 0)
    learn_here("image_classification", tmp_path, *flags)
    config = json.loads((tmp_path / "final/config.json").read_text())
    assert not {"problem_type", "thresholds"} & set(config)
    assert "metric_for_best_model: accuracy\n" in (tmp_path / "config.yaml").read_text()
    assert "keeps the best map (higher is better)" in one_process.summary


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"label": ["ghost"]}, "the class 'ghost' has no image to train on"),
        ({"label": "cat,dog"}, "val.jsonl:18: the label is 'cat,dog': write name|name for several"),
        (("--train_file", ()), "--problem_type multi_label needs the labels of each image"),
        (("--per_device_train_batch_size", 1), "choose an even number"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(tmp_path, extra, message):
    flags, made = write(tmp_path, {"train": 13, "val": 17})
    flags = (*flags, "--output_dir", tmp_path / "run", "--global_batch_size", 4, "--mixup_alpha", 0.1)
    if isinstance(extra, dict):
        with (tmp_path / "val.jsonl").open("a") as file:
            file.write(json.dumps({"file_name": str(made["val"][0][0]), **extra}) + "\n")
    elif extra[0] == "--train_file":
        flags = ("--problem_type", "multi_label", "--output_dir", tmp_path / "run")
    else:
        flags = (*flags, *extra)
    assert message in refusal("image_classification", *flags)
