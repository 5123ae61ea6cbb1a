"""Images with several labels: how they are read and held out, mixed, weighted, scored."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shared.data.labels import Labels, rarest
from shared.data.order import IGNORED
from shared.evaluation.kinds import best_threshold, of_one_label, of_several_labels
from shared.images.augment import mix
from shared.images.files import Images, prepare
from shared.images.options import ImageConfig
from shared.process.errors import ConfigError
from tests.conftest import paint, write_lines

LABELS = [["cat"], [], ["dog", "cat"], ["7"], ["dog", "7"], ["cat"], ["dog"], ["cat", "dog", "7"], [], ["7"]]


def evaluation_of(labels, scores, classes, thresholds=None):
    rows = np.concatenate([labels, np.log(scores / (1 - scores))], axis=1)
    return of_several_labels(rows, classes, "images", thresholds)


pytestmark = pytest.mark.usefixtures("cpu_state")


def listings(folder):
    """The same images and labels in each form."""
    datasets = pytest.importorskip("datasets")
    names = [f"{number}.png" for number in range(len(LABELS))]
    for number, name in enumerate(names):
        paint(folder / name, number % 3, number, (9, 9))
    csv = [f"{name}, {' | '.join(labels)}" for name, labels in zip(names, LABELS, strict=True)]
    (folder / "a.csv").write_text("\n".join(["file_name,label", *csv]) + "\n")
    numbered = [[7 if label == "7" else label for label in labels * 2] for labels in LABELS]
    rows = [{"file_name": name, "label": labels} for name, labels in zip(names, numbered, strict=True)]
    write_lines(folder / "a.jsonl", rows)
    columns = {"file_name": names, "label": LABELS}
    datasets.Dataset.from_dict(columns).to_parquet(folder / "a.parquet")
    classes = datasets.List(datasets.ClassLabel(names=["7", "dog", "cat"]))
    features = datasets.Features({"image": datasets.Image(), "label": classes})
    pictures = [{"bytes": (folder / name).read_bytes(), "path": None} for name in names]
    hub = datasets.Dataset.from_dict({"image": pictures, "label": LABELS}, features=features)
    (folder / "hub").mkdir()
    hub.to_parquet(folder / "hub/train-00000-of-00001.parquet")
    files = [{"train_file": (str(folder / f"a.{kind}"),)} for kind in ("csv", "jsonl", "parquet")]
    return [*files, {"dataset_name": (str(folder / "hub"),)}]


def hot_of(labels, classes):
    return [[float(name in given) for name in classes] for given in labels]


def test_lists_and_texts_in_any_file_are_the_same_data(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    found = []
    for source in listings(tmp_path):
        config = ImageConfig(**source, problem_type="multi_label", validation_split_percentage=30)
        data = prepare(config)
        assert data.classes == ("7", "cat", "dog")
        assert "; 1.20 labels an image" in data.about
        parts = []
        for part in (data.train, data.validation):
            numbers = part.index[:, 1].tolist()
            rows = [part[number]["labels"] for number in range(len(part))]
            assert all((row.dtype, row.shape) == (np.float32, (3,)) for row in rows)
            assert [row.tolist() for row in rows] == hot_of([LABELS[n] for n in numbers], data.classes)
            parts.append(numbers)
        found.append(parts)
        other = data.numbered_as(("dog", "7", "cat"))
        assert other.train.labels.values.tolist() == hot_of([LABELS[n] for n in parts[0]], ("dog", "7", "cat"))
    assert all(parts == found[0] for parts in found)
    train, validation = found[0]
    assert sorted(train + validation) == [*range(10)] and len(validation) == 3  # of 7, of cat, and of those without a label
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: the label is a list, .*; --problem_type multi_label takes lists"):
        prepare(ImageConfig(train_file=(str(tmp_path / "a.jsonl"),)))
    (tmp_path / "b.csv").write_text("image,label\n" + "".join(f"{n}.png,{'a|b' if n % 2 else 'c'}\n" for n in range(8)))
    one = prepare(ImageConfig(train_file=(str(tmp_path / "b.csv"),), problem_type="single_label"))
    assert one.classes == ("a|b", "c")


def test_a_mixture_joins_the_labels_of_its_sources_and_weighs_them_as_drawn(tmp_path):
    for name, labels in {"x": ["cat", "cat|dog", "", "cat", "dog"], "y": ["owl|dog", "owl", "owl", "dog", ""]}.items():
        for number in range(5):
            paint(tmp_path / name / f"{number}.png", 0, number, (8, 8))
        rows = "".join(f"{number}.png,{label}\n" for number, label in enumerate(labels))
        (tmp_path / name / "list.csv").write_text("image,label\n" + rows)
    files = tuple(str(tmp_path / name / "list.csv") for name in "xy")
    config = ImageConfig(train_file=files, mix_weights=(3.0, 1.0), problem_type="multi_label", validation_file=(files[0],))
    data = prepare(config)
    assert data.classes == ("cat", "dog", "owl") and data.train.sources == {files[0]: 5, files[1]: 5}
    trained = data.train.labels.values.tolist()
    assert trained[:2] == [[1, 0, 0], [1, 1, 0]] and trained[5] == [0, 1, 1]
    assert data.validation.labels.values.tolist() == trained[:5]
    counts = np.array([1.5 * 3, 1.5 * 2 + 0.5 * 2, 0.5 * 3])
    assert data.class_weights(config.mix_weights).tolist() == pytest.approx((10 - counts) / counts)


def test_images_are_held_out_by_their_rarest_class():
    hot = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 1, 0]], dtype=np.uint8)
    assert rarest(hot).tolist() == [0, 1, 2, 3, 1]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), rows=st.integers(1, 7))
def test_one_label_in_a_row_of_many_is_mixed_as_the_class_is(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    images, labels = torch.rand(rows, 3, 6, 5, generator=generator), torch.randint(0, 4, (rows,), generator=generator)
    draws = torch.rand(rows, 4, generator=generator)
    draws[:, 0] = (draws[:, 0] > 0.5).float()
    hot = torch.nn.functional.one_hot(labels, 4).float()
    labels[-1:], hot[-1:] = IGNORED, IGNORED
    for one, several in zip(mix(images, labels, draws, 4), mix(images, hot, draws, 4), strict=True):
        assert torch.equal(one, several)


@pytest.mark.parametrize(
    ("scores", "labels", "expected"),
    [
        ([0.9, 0.5, 0.3, 0.1], [1, 1, 0, 0], 0.4),  # between the neighbours
        ([0.9, 0.8, 0.7, 0.6], [1, 0, 0, 1], 0.85),  # 2/3 from 0.9 on, and from 0.6 on: the highest
        ([0.9, 0.4, 0.4, 0.2], [1, 1, 0, 0], 0.3),  # equal scores are on one side
        ([0.9, 0.4], [1, 1], 0.2),  # none is lower
        ([0.9, 0.4], [0, 0], 0.5),  # nothing to choose by
        # 0.4 from the tenth on, where precision and recall are 0.4; all have 1/3
        ([*range(50, 0, -1)], [0] * 6 + [1] * 4 + [0] * 34 + [1] * 6, 40.5),
    ],
)
def test_thresholds_by_hand(scores, labels, expected):
    assert best_threshold(np.array(labels, bool), np.array(scores)) == pytest.approx(expected)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), size=st.integers(1, 30))
def test_no_threshold_has_a_better_f1(data, size):
    labels = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    scores = np.array(data.draw(st.lists(st.integers(1, 9), min_size=size, max_size=size))) / 10

    def f1(cut):
        return 2 * (labels & (scores >= cut)).sum() / max(1, labels.sum() + (scores >= cut).sum())

    assert f1(best_threshold(labels, scores)) >= max(map(f1, scores)) - 1e-9 or not labels.any()


def test_the_files_of_an_evaluation(tmp_path, capsys):
    """Several classes, one of them without an image and one named like a formula, and more mistakes than are listed."""

    class Files:
        def __getitem__(self, index):
            Image.new("RGB", (9, 9)).save(tmp_path / "image.png")
            return tmp_path / "image.png"

        def where(self, index):
            return f"image {index}"

    rng = np.random.default_rng(0)
    labels, scores = rng.random((60, 12)) < 0.3, rng.random((60, 12))
    labels[:, 7] = False
    names = ("$5^", *(f"class number {i}" for i in range(11)))
    predictions = evaluation_of(labels, scores, names)
    index = np.stack([np.zeros(60, int), np.arange(60)], axis=1)
    images = Images([Files()], index, Labels("multi_label", names, labels.astype(np.uint8)))
    (tmp_path / "run").mkdir()
    pictures = predictions.write(tmp_path / "run", images)
    assert [path.name for path in pictures] == ["mistakes.png"]
    assert "warning" not in capsys.readouterr().err
    with (tmp_path / "run/predictions.csv").open(newline="") as file:
        row = list(csv.DictReader(file))[5]
    assert row["image"] == "image 5" and row["label"] == "|".join(np.array(names)[labels[5]])
    assert float(row["score of class number 3"]) == pytest.approx(scores[5, 4], abs=1e-4)
    content = json.loads((tmp_path / "run/evaluation.json").read_text())
    empty = content["classes"]["class number 6"]
    assert empty == empty | {"recall": 0.0, "f1": 0.0, "support": 0, "threshold": 0.5}
    average = [each["average_precision"] for each in content["classes"].values() if each["support"]]
    assert content["map"] == pytest.approx(np.mean(average)) and len(average) == 11
    assert content["num_mistakes"] > len(content["mistakes"]) == 60
    numbers = [int(mistake["image"].split()[1]) for mistake in content["mistakes"]]
    apart = np.where(predictions.labels != predictions.predicted, abs(predictions.labels - scores), 0).max(1)[numbers]
    assert apart.tolist() == pytest.approx(sorted(apart, reverse=True), abs=1e-6)


def test_thresholds_of_a_model_are_kept_and_forgotten():
    rng = np.random.default_rng(0)
    own = {"b": 0.25, "a": 0.75}
    labels, scores = rng.random((40, 2)) < 0.4, rng.random((40, 2))
    kept, best = (evaluation_of(labels, scores, ("a", "b"), thresholds) for thresholds in (own, None))
    assert kept.by_class["threshold"].tolist() == [0.75, 0.25]
    assert kept.predicted.tolist() == (scores >= [0.75, 0.25]).tolist()
    assert kept.summary["eval_macro_f1"] < best.summary["eval_macro_f1"]
    config = SimpleNamespace(thresholds=own)
    best.update(config)
    assert config.thresholds == best.thresholds and config.problem_type == "multi_label_classification"
    of_one_label(np.zeros((1, 5)), ("a",), "images").update(config)
    assert not hasattr(config, "thresholds")
