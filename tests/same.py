"""What two runs have in common."""

import pytest
import torch

from shared.commands.verify_resume import MEASURED, compare
from shared.run.checkpoint_files import checkpoints
from shared.run.tensors import read_tensors
from tests.conftest import Run


def assert_same_learning(
    one: Run, other: Run, rel: float = 1e-5, atol: float | None = 5e-5, keys: tuple = (), but: str = "-"
) -> None:
    """Losses, evaluations (and `keys`) and weights agree up to rounding: each number, or without `atol` a tensor as a whole.

    AdamW divides by the root of tiny second moments, which turns the rounding of a sum's order into an update of its own
    size where a gradient is almost zero. Weights with `but` in their names have no other gradient, and are not compared.
    """
    assert other.losses == pytest.approx(one.losses, rel=rel)
    for key in ("eval_loss", *keys):
        assert one.each(key) and other.each(key) == pytest.approx(one.each(key), rel=rel), key
    ours, theirs = other.weights(), one.weights()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if but in name:
            continue
        if atol is not None:
            torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=atol, msg=name)
        else:
            apart, size = ((t.double().square().mean() ** 0.5).item() for t in (ours[name] - value, value))
            assert apart <= 1e-4 + 1e-3 * size, name


def assert_goes_on(whole: Run, again: Run, step: int) -> None:
    """A run that began at a checkpoint of another one learns the rest of it, bit for bit, and saves the same at its end.

    final/ may be another: the best weights of the other run are not in its folder.
    """
    rest, found = (
        [{name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in run.rows]
        for run in (whole, again)
    )
    assert found and found == [row for row in rest if row["step"] > step]
    ours, theirs = (read_tensors(checkpoints(run.folder)[-1]) for run in (again, whole))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in theirs)


def assert_same_bits(one: Run, other: Run) -> None:
    """All that a run logs and saves is the same."""
    differences = compare(one.folder, other.folder)
    assert differences and not any(differences.values()), differences
    ours, theirs = other.weights(), one.weights()
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in theirs)
