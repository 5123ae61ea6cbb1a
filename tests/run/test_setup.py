"""What is refused before a run begins, since it would be lost or learned otherwise in silence."""

import pytest
import torch
from torch import nn

from shared.config import parse as configs
from shared.data.order import Order
from shared.process.errors import ConfigError
from shared.run.rehearsal import Rehearsal
from shared.run.setup import Setup
from shared.training import optim
from tests.conftest import load_template


class Data:
    """One batch of four numbers, again and again, in place of a loader."""

    one_shape, multiple, per_device, steps_per_epoch, place = True, 1, 4, 3, None
    order = Order(12, 4, 0)

    def longest(self, rows):
        return {"labels": torch.ones(rows, 2)}


@pytest.fixture
def setup(tmp_path):
    template = load_template("pretrain")
    flags = ["--output_dir", str(tmp_path / "run"), "--report_to", "none", "--learning_rate", "0.1", "--optim", "sgd"]
    return Setup(configs.parse(template.Config, [*flags, "--global_batch_size", "4", "--max_steps", "3"]), "small")


def test_optimizers_hold_what_is_trained_and_a_rate_that_was_changed_stays_changed(setup):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    every = torch.optim.SGD(model.parameters(), lr=0.1)
    said = r"^setup.prepare: the optimizers of 'model' have [024] parameters that are frozen"
    for optimizers in ([every], [torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)], []):
        with pytest.raises(ConfigError, match=said):
            setup.prepare(model, optimizers)
    (built,) = optim.build(model, setup.config.optim)
    for group in built.param_groups:
        group["lr"] *= 4
    _, (built,) = setup.prepare(model, [built])
    assert optim.set_learning_rate([built], setup.config.optim, 2, 3) == pytest.approx(0.1 * 0.5, abs=0.1)
    assert {group["lr_scale"] for group in built.param_groups} == {4.0}


def test_kept_tensors_are_named_before_the_start_and_trials_take_back_what_they_change(setup):
    model = nn.Linear(2, 2)
    model, optimizers = setup.prepare(model, optim.build(model, setup.config.optim))
    count = torch.zeros(())
    setup.keep("seen", {"count": count})

    def loss(batch):
        count.add_(1)
        return model(batch["labels"]).sum()

    trial = Rehearsal(setup.strategy, [model], optimizers, Data(), loss, [count])
    with trial.taken_back():
        trial.strategy.backward(loss(Data().longest(2)), 0.0)
        assert count == 1
    assert count == 0
    setup.start(Data(), loss, fingerprint="x")
    with pytest.raises(RuntimeError, match=r"call setup.keep before setup.start"):
        setup.keep("late", {"count": count})
