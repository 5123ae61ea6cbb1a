"""Labels as people write them: what they look like, which are refused, and whether all classes can be trained."""

import numpy as np
import pytest

from shared.data.labels import Labels, problem_type_of, read_labels
from shared.process.errors import ConfigError


def place(number):
    return f"data.csv:{number + 2}"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        *((raw, None) for raw in (["a", "b"], [1, 0, "2"], [1, "x", 0.5], [True, 0.5], [])),
        *((raw, "regression") for raw in ([0.5, 1, "2"], [0.5, float("nan")], [-1.5, 2])),
        *((raw, "multi_label") for raw in (["a", ["b"]], [0.5, []])),
    ],
)
def test_what_labels_look_like(raw, expected):
    assert problem_type_of(raw) == expected


def test_labels_of_each_kind():
    one = read_labels([10, "9", "b ", 9, "100", "B"], None, place)
    assert (one.problem_type, one.classes) == ("single_label", ("9", "10", "100", "B", "b"))
    assert one.values.tolist() == [1, 0, 4, 0, 2, 3]
    several = read_labels(["b|a", [], "", 3, ["a", "a"]], "multi_label", place)
    assert several.classes == ("3", "a", "b")
    assert several.values.tolist() == [[0, 1, 1], [0, 0, 0], [0, 0, 0], [1, 0, 0], [0, 1, 0]]
    assert several[0].dtype == np.float32 and several.counts().tolist() == [1, 2, 1]
    numbers = read_labels(["1.5", 2, -3.0], "regression", place)
    assert numbers.values.dtype == np.float32 and numbers.values.tolist() == [1.5, 2, -3]
    assert len(numbers.counts()) == 0 and numbers.hold_out(34).sum() == 1
    assert numbers.numbered_as(("LABEL_0",)).values.tolist() == [1.5, 2, -3]


@pytest.mark.parametrize(
    ("raw", "problem_type", "message"),
    [
        (["a", None], None, ":3: the label is null, expected a name or a number"),
        (["a", float("nan")], None, ":3: the label is NaN, expected a name or a number"),
        ([1, "x|y"], None, ":3: the label is 'x|y': for several labels add --problem_type multi_label, for one of this"),
        (["a", "a, b"], "multi_label", ":3: the label is 'a, b': write name|name for several"),
        (["a", ["b"]], "single_label", ":3: the label is a list, expected a name or a number; --problem_type multi_label"),
        (["a", " "], None, ":3: the label is empty, expected a name or a number"),
        (["a", ["a", ""]], "multi_label", ":3: the label is empty, expected a name or a number"),
        ([0.5, [1.5]], "regression", ":3: the label is [1.5], expected a number"),
        (["a", ["a", 0.5]], "multi_label", ":3: the label is a float, expected a name or a number"),
        (["a", {}], "multi_label", ":3: the label is a dict, expected a name or a number"),
        ([1, "x"], "regression", ":3: the label is 'x', expected a number"),
        ([1, "inf"], "regression", ":3: the label is 'inf', expected a number"),
        ([1, -100], "regression", ":3: the label is -100, expected a number, not -100: it marks rows without one"),
    ],
)
def test_what_is_no_label_is_refused_with_its_place(raw, problem_type, message):
    with pytest.raises(ConfigError) as caught:
        read_labels(raw, problem_type, place)
    assert str(caught.value).startswith(f"data.csv{message}")


def test_a_label_to_validate_on_must_be_trained():
    with pytest.raises(ConfigError, match=r"data.csv:5: the label 'c' is none of the training data \(a, b\)"):
        read_labels(["a", "b", "a", "c"], None, place, trained=3)
    assert read_labels(["a", "b", "a", "c"], None, place).classes == ("a", "b", "c")


@pytest.mark.parametrize(
    ("raw", "problem_type", "message"),
    [
        (["a", "a"], None, "name: only one class, 'a'"),
        (["", []], "multi_label", "name: no label"),
        (["a|b", "a"], "multi_label", "name: the class 'b' has no text to train on"),
    ],
)
def test_classes_that_cannot_be_trained_are_named(raw, problem_type, message):
    labels = read_labels(raw, problem_type, place)
    with pytest.raises(ConfigError, match=message):
        labels.take(np.array([1])).require_trained("name", "text")
    Labels("regression", ("LABEL_0",), np.ones(1, np.float32)).require_trained("name", "text")
