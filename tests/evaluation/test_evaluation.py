"""Figures of an evaluation equal those by hand and scikit-learn's, and the files are what they say."""

import csv
import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib import font_manager, rcParams
from PIL import Image
from sklearn import metrics
from torch.nn import functional as F

from shared.data.labels import Labels
from shared.data.order import IGNORED
from shared.evaluation import kinds
from shared.evaluation import pictures as class_pictures
from shared.evaluation.evaluation import gather_rows, row_of
from shared.evaluation.evaluation import of_batch as scores
from shared.evaluation.kinds import binary_cross_entropy, cross_entropy, of_one_label
from shared.images.files import Images
from shared.process.errors import ConfigError

WEIGHT = torch.tensor([0.51, 25.5])  # of a class with 50 times the samples of the other, and of that


@pytest.mark.parametrize(
    ("loss", "targets"), [(cross_entropy, [0]), (cross_entropy, [[1.0, 0.0]]), (binary_cross_entropy, [[1.0, 0.0]])]
)
def test_the_best_answer_for_a_common_sample_is_its_class_whatever_a_rare_one_weighs(loss, targets):
    """The smoothed target has the least loss. F.cross_entropy's own weights make it 0.275 and 0.725."""
    best, targets = torch.tensor([[0.95, 0.05]]), torch.tensor(targets)
    logits = best.log() if loss is cross_entropy else best.logit()
    (slope,) = torch.autograd.grad(loss(logits.requires_grad_(), targets, weight=WEIGHT, label_smoothing=0.1).sum(), logits)
    torch.testing.assert_close(slope, torch.zeros(1, 2))


def test_weights_without_smoothing_are_torchs_and_a_mixed_sample_is_the_sum_of_its_parts():
    torch.manual_seed(0)
    logits, labels, weight = torch.randn(6, 3), torch.tensor([0, 1, 2, 2, IGNORED, 1]), torch.tensor([0.5, 30.0, 0.0])
    counts, close = labels != IGNORED, torch.testing.assert_close
    one_hot = F.one_hot(labels.clamp(min=0), 3).float()
    ours = cross_entropy(logits, labels, weight=weight)
    close(ours * counts, F.cross_entropy(logits, labels, weight=weight, reduction="none"))
    close(cross_entropy(logits, one_hot, weight=weight)[counts], ours[counts])
    theirs = F.binary_cross_entropy_with_logits(logits, one_hot, pos_weight=weight, reduction="none")
    close(3 * binary_cross_entropy(logits, one_hot, weight=weight), theirs)
    even = {"weight": torch.ones(3), "label_smoothing": 0.1}
    for loss in (cross_entropy, binary_cross_entropy):
        close(loss(logits, one_hot, label_smoothing=0.1), loss(logits, one_hot, **even))
        losses = partial(loss, logits, weight=weight, label_smoothing=0.1)
        mixed = losses(0.3 * one_hot + 0.7 * one_hot.flip(0))
        close(mixed, 0.3 * losses(one_hot) + 0.7 * losses(one_hot.flip(0)))
        assert losses(labels if loss is cross_entropy else labels[:, None].expand(6, 3)).isfinite().all()


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 1000), classes=st.integers(2, 9))
def test_the_classes_above_the_true_one_give_any_top_k(seed, classes):
    generator = torch.Generator().manual_seed(seed)
    logits, labels = torch.randn(7, classes, generator=generator), torch.randint(0, classes, (7,), generator=generator)
    above = scores(logits, labels)[:, 4]
    for k in range(1, classes + 1):
        top = logits.topk(k).indices
        assert torch.equal(above < k, (top == labels[:, None]).any(1))


def test_gathering_drops_the_filling_and_keeps_the_order():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    logits, labels = torch.randn(12, 3), torch.randint(0, 3, (12,))
    padded = labels.clone()
    padded[10:] = IGNORED
    batches = [scores(logits[i : i + 4], padded[i : i + 4]) for i in (0, 4, 8)]
    rows = gather_rows(accelerator, batches, 10)
    result = of_one_label(rows, ("a", "b", "c"), "images")
    assert result.labels.tolist() == labels[:10].tolist()
    assert result.predicted.tolist() == logits[:10].argmax(1).tolist()
    assert result.columns["confidence"] == pytest.approx(logits[:10].softmax(1).amax(1).numpy(), abs=1e-6)
    expected = torch.nn.functional.cross_entropy(logits[:10], labels[:10], reduction="none")
    assert rows[:, 3] == pytest.approx(expected.numpy(), rel=1e-5)
    assert {result.labels.dtype, result.predicted.dtype} == {np.dtype(np.int64)}
    with pytest.raises(AssertionError):
        gather_rows(accelerator, batches, 11)


def test_windows_of_several_ranks_are_put_back_in_the_order_of_the_data_set(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    # what an accelerator of two processes gathers from this rank and one whose labels are 2 higher
    higher = torch.tensor([2.0, 0, 0, 0, 0])
    two = SimpleNamespace(num_processes=2, gather=lambda mine: torch.cat([mine, mine + higher]))
    batches = [torch.tensor([[base + row, 0, 0.5, 1, 0] for row in range(2)]) for base in (0.0, 4.0)]
    assert gather_rows(two, batches, 8)[:, 0].tolist() == list(range(8))


def made(labels, predicted, classes, *, confidence=0.5, losses=1.0, above=None):
    labels, predicted = np.array(labels), np.array(predicted)
    given = (confidence, losses, labels != predicted if above is None else above)
    rows = np.stack([labels, predicted, *(np.broadcast_to(values, labels.shape) for values in given)], axis=1)
    return of_one_label(rows, tuple(classes), "images")


@pytest.mark.parametrize("classes", [5, 6])
def test_top_5_is_told_where_it_says_something(classes):
    above = [0, 4, 5, 1] if classes == 6 else [0, 4, 3, 1]
    predictions = made([0, 1, 2, 3], [0, 0, 0, 0], "abcdef"[:classes], above=above)
    assert predictions.summary.get("eval_top5_accuracy") == (0.75 if classes == 6 else None)


@settings(deadline=None, max_examples=30)
@given(data=st.data(), classes=st.integers(2, 8), size=st.integers(1, 60))
def test_the_figures_are_scikit_learns(data, classes, size):
    numbers = st.lists(st.integers(0, classes - 1), min_size=size, max_size=size)
    labels, predicted = data.draw(numbers), data.draw(numbers)
    predictions = made(labels, predicted, "abcdefgh"[:classes])
    summary = predictions.summary
    assert summary["eval_accuracy"] == pytest.approx(metrics.accuracy_score(labels, predicted))
    f1 = metrics.f1_score(labels, predicted, average="macro", zero_division=0)
    assert summary["eval_macro_f1"] == pytest.approx(f1)
    assert summary["eval_matthews"] == pytest.approx(metrics.matthews_corrcoef(labels, predicted))
    recalls = metrics.recall_score(labels, predicted, average=None, labels=sorted(set(labels)), zero_division=0)
    assert summary["eval_balanced_accuracy"] == pytest.approx(recalls.mean())
    options = {"labels": range(classes), "zero_division": 0}
    by_class = metrics.precision_recall_fscore_support(labels, predicted, **options)
    for name, expected in zip(("precision", "recall", "f1", "support"), by_class, strict=True):
        assert predictions.by_class[name].tolist() == pytest.approx(expected.tolist())
    assert all(type(value) is float for value in summary.values())


def test_a_probability_of_just_the_threshold_is_a_yes_and_the_worst_sample_comes_first():
    rows = np.array([[1, 1, 0.0, -1.0], [1, 0, -3.0, -2.0], [0, 0, 1.0, 2.0], [0, 1, 0.5, 4.0], [1, 1, 3.0, 3.0]])
    # labels, logits
    predictions = kinds.of_several_labels(rows, ("a", "b"), "images", {"a": 0.5, "b": 0.5})
    assert predictions.predicted.tolist() == [[1, 0], [0, 0], [1, 1], [1, 1], [1, 1]]
    assert predictions.worst.tolist() == [1, 2, 0, 3]
    assert predictions.scores["score of a"].tolist() == [0.5, 0.047426, 0.731059, 0.622459, 0.952574]


@pytest.fixture
def pictures(tmp_path):
    """pictures(count): as many images of 10 x 8 pixels, bytes and names alike."""

    class Files:
        def __getitem__(self, index):
            path = tmp_path / f"{index}.png"
            Image.fromarray(np.full((8, 10, 3), index % 256, dtype=np.uint8)).save(path)
            return path

        def where(self, index):
            return f"image {index}"

    # The data set's numbers are not those of its source.
    def images(count):
        index = np.stack([np.zeros(count, int), 1000 + np.arange(count)], axis=1)
        return Images([Files()], index, Labels("single_label", (), np.zeros(count, int)))

    return images


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_the_files_of_an_evaluation(run_dir, pictures):
    given = {"confidence": [0.9, 0.6, 0.8, 0.7000004], "losses": [0, 1, 2, 5]}
    predictions = made([0, 0, 1, 1], [0, 1, 1, 0], ["cat", "dog", "eel"], **given)
    assert predictions.write(run_dir, pictures(4)) == [run_dir / "confusion_matrix.png", run_dir / "mistakes.png"]
    content = json.loads((run_dir / "evaluation.json").read_text())
    half = {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 2}
    figures = {"loss": 2.0, "accuracy": 0.5, "macro_f1": 0.5, "balanced_accuracy": 0.5, "matthews": 0.0, "images": 4}
    assert content == figures | {
        "classes": {"cat": half, "dog": half, "eel": dict.fromkeys(half, 0)},
        "num_mistakes": 2,
        "mistakes": [
            {"image": "image 1003", "label": "dog", "predicted": "cat", "confidence": 0.7},
            {"image": "image 1001", "label": "cat", "predicted": "dog", "confidence": 0.6},
        ],
    }
    names = ["confusion_matrix.png", "evaluation.json", "mistakes.png", "predictions.csv"]
    assert sorted(p.name for p in run_dir.iterdir()) == names
    of_all = "66.67% of 3 validation images are right; the model calls all of them 'b'"
    assert made([0, 1, 1], [1, 1, 1], "ab").headline == of_all
    assert made([0, 1, 1], [1, 1, 0], "ab").headline == "33.33% of 3 validation images are right"
    with (run_dir / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == [f"image {1000 + i}" for i in range(4)]  # in the order of the data
    assert rows[1] == {"image": "image 1001", "label": "cat", "predicted": "dog", "confidence": "0.6"}
    for name in ("confusion_matrix.png", "mistakes.png"):
        with Image.open(run_dir / name) as image:
            image.load()
            assert image.format == "PNG"
            assert len(np.unique(np.asarray(image.convert("L")))) > 5


def test_many_classes_and_odd_names_are_drawn(run_dir, pictures, capsys):
    """matplotlib takes text between dollar signs for a formula, and refuses what is not Unicode."""
    labels = np.arange(42)  # more than a picture shows
    names = ["$5^", "cost $_{$", "caf\udce9", *(f"class number {i}" for i in range(39))]
    written = made(labels, (labels + 1) % 42, names).write(run_dir, pictures(42))
    assert [path.name for path in written] == ["confusion_matrix.png", "mistakes.png"]
    assert "warning" not in capsys.readouterr().err
    assert set(names) == set(json.loads((run_dir / "evaluation.json").read_text(encoding="utf-8"))["classes"])
    assert "caf\\udce9" in (run_dir / "predictions.csv").read_text(encoding="utf-8")
    written = made(labels[:4], labels[:4] * 0 + 1, names[:4]).write(run_dir, pictures(4))  # its name is in the title
    assert len(written) == 2 and "warning" not in capsys.readouterr().err


def test_an_image_that_is_gone_costs_the_pictures_alone(run_dir, pictures, capsys):
    samples = pictures(4)
    samples.draw = lambda *_: samples[99]
    assert made([0, 1, 1, 0], [1, 1, 0, 0], "ab").write(run_dir, samples) == []
    assert "warning: the evaluation's pictures cannot be drawn (" in capsys.readouterr().err
    assert (run_dir / "evaluation.json").exists() and (run_dir / "predictions.csv").exists()
    right = made([0, 1, 1], [0, 1, 1], "ab")
    assert right.write(run_dir, pictures(3)) == [run_dir / "confusion_matrix.png"]  # no page without mistakes
    assert json.loads((run_dir / "evaluation.json").read_text())["mistakes"] == []


@pytest.mark.filterwarnings("error")  # matplotlib warns of characters without a font
def test_names_that_a_font_has_are_drawn_and_others_are_numbered(run_dir, pictures, tmp_path, monkeypatch):
    classes = ("cat", "кошка", "猫", "犬")
    manager = font_manager.fontManager
    matplotlib = [font for font in manager.ttflist if "mpl-data" in font.fname]
    monkeypatch.setattr(manager, "ttflist", matplotlib)  # whatever this machine has besides
    monkeypatch.setitem(rcParams, "font.family", ["sans-serif"])
    assert list(class_pictures.picture_names(classes).values()) == ["cat", "кошка", "class 2", "class 3"]

    square, font = TTGlyphPen(None), FontBuilder(1000)
    square.moveTo((0, 0))
    for corner in ((0, 500), (500, 500), (500, 0)):
        square.lineTo(corner)
    square.closePath()
    font.setupGlyphOrder([".notdef", "neko"])
    font.setupCharacterMap({ord("猫"): "neko"})
    font.setupGlyf({".notdef": square.glyph(), "neko": square.glyph()})
    font.setupHorizontalMetrics({".notdef": (600, 0), "neko": (600, 0)})
    font.setupHorizontalHeader(ascent=800, descent=-200)
    font.setupNameTable({"familyName": "Only Cats", "styleName": "Regular"})
    font.setupOS2()
    font.setupPost()
    font.save(tmp_path / "cats.ttf")
    manager.addfont(tmp_path / "cats.ttf")
    assert list(class_pictures.picture_names(classes).values()) == ["cat", "кошка", "猫", "class 3"]
    assert len(made([0, 1, 2, 3], [1, 2, 3, 0], classes).write(run_dir, pictures(4))) == 2


def test_numbers_that_do_not_vary_have_no_correlation():
    numbers, same = np.array([0.1, 0.2, 0.42]), np.full(3, 0.054675)
    for pair in ((numbers, same), (same, numbers)):
        constant = kinds.of_numbers(np.stack(pair, axis=1), "texts")
        errors = {"eval_loss": ((numbers - 0.054675) ** 2).mean(), "eval_mae": 0.24 - 0.054675}
        assert constant.summary == pytest.approx(errors | {"eval_pearson": 0, "eval_spearman": 0}, rel=1e-5)
        assert constant.worst.tolist() == [2, 1, 0]
    good = kinds.of_numbers(np.stack([numbers, numbers + 1], axis=1), "texts")
    assert good.headline == "Pearson's correlation 1.0000, Spearman's 1.0000 on 3 validation texts"
    assert row_of(good.columns, 1) == {"label": 0.2, "predicted": 1.2}


@pytest.mark.parametrize("options", [{"class_weights": "balanced"}, {"label_smoothing": 0.1}], ids=str)
def test_what_is_for_classes_is_refused_for_numbers(options):
    data = SimpleNamespace(problem_type="regression", classes=("score",))
    asked = SimpleNamespace(**{"class_weights": "none", "label_smoothing": 0.0} | options)
    with pytest.raises(ConfigError, match="--label_smoothing and --class_weights are for classes, not for numbers"):
        kinds.SampleLosses(None, data, asked)
