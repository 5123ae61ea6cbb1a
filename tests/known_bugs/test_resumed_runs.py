"""Resuming with other settings: see docs/internals/known_bugs.md."""

import os
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch

from shared.config.options import CheckpointConfig
from shared.process import ranks
from shared.process.errors import ConfigError
from shared.run import launch
from shared.run.checkpoint_files import CheckpointError
from shared.run.resumable import require_resumable
from shared.run.state import TrainState
from tests.conftest import SmallConfig, learn_here, with_fault
from tests.run.test_checkpoint import make as checkpointer
from tests.run.test_checkpoint import train


@pytest.fixture(scope="module")
def trained(text_file, tiny_model, tmp_path_factory):
    """A pretraining run of 4 steps, and its flags."""
    flags = ("--train_file", text_file, "--model_name_or_path", tiny_model, "--seq_length", 32, "--global_batch_size", 8)
    flags = (*flags, "--per_device_train_batch_size", 4, "--eval_samples", 2, "--eval_steps", 9, "--save_steps", 2)
    flags = (*flags, "--lr_scheduler_type", "wsd", "--warmup_steps", 0.2)
    return learn_here("pretrain", tmp_path_factory.mktemp("trained") / "run", *flags, "--max_steps", 4), flags


@pytest.mark.parametrize("name", ["global_batch_size", "mix_weights"])
def test_no_sample_is_used_twice_or_skipped(tmp_path, name):
    """Reported in 2024-25: after a change of the batch size, the place was a step times the new batch."""
    for allowed in ((), (name,)):
        config = SmallConfig(checkpoint=CheckpointConfig(allow_changed=allowed))
        with pytest.raises(ConfigError, match=f"--{name} cannot change within a run, since samples would be repeated or"):
            require_resumable(tmp_path, {"settings": {name: 8}}, {"settings": {name: 4}}, config)


def test_the_jump_of_the_learning_rate_is_said(trained, tmp_path, capsys):
    done, flags = trained
    shutil.copytree(done.folder, tmp_path / "run")
    more = learn_here("pretrain", tmp_path / "run", *flags, "--max_steps", 6, "--allow_changed", "max_steps")
    was, now = re.search(r"learning rate goes from (\S+) to (\S+) here", capsys.readouterr().err).groups()
    (rate,) = (row["learning_rate"] for row in more.rows if row["step"] == 5)
    assert float(was) == 0 and 0 < float(now) == pytest.approx(rate, rel=0.01)


def test_tensorboard_shows_no_step_twice(trained, tmp_path, capsys):
    """Reported in 2022: steps after the last checkpoint were shown again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = (*trained[1], "--max_steps", 4, "--report_to", "tensorboard")
    killed = with_fault("pretrain", tmp_path / "run", "update:kill@4", *flags)
    assert killed.returncode
    for events in (tmp_path / "run").rglob("events.out.tfevents.*"):  # TensorBoard sorts them by second and process
        events.rename(events.with_name(events.name.replace("tfevents.1", "tfevents.0")))
    done = learn_here("pretrain", tmp_path / "run", *flags)
    assert "learning rate goes" not in capsys.readouterr().err
    (events,) = {path.parent for path in (tmp_path / "run").rglob("events.out.tfevents.*") if path.parent.name == "pretrain"}
    seen = EventAccumulator(str(events))
    seen.Reload()
    assert [event.step for event in seen.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.value for event in seen.Scalars("loss")] == pytest.approx(done.each("loss"), rel=1e-6)


@pytest.mark.parametrize("other", ["adamw_8bit", "adamw", "sgd"])
def test_another_optimizer_begins_anew_in_words(tmp_path, capsys, other):
    """There and back."""
    _, _, saver = checkpointer(tmp_path / "run", optim_name="muon")
    for step, name in enumerate((other, "muon"), 1):
        saver.save(TrainState(step=step))
        model, optimizers, saver = checkpointer(tmp_path / "run", optim_name=name)
        assert saver.resume().step == step
        assert "begin with a new optimizer state" in capsys.readouterr().err
        before = model[2].weight.detach().clone()
        assert np.isfinite(train(model, optimizers, 1, 3)).all() and not model[2].weight.equal(before)


def test_an_average_begins_at_the_resumed_weights(trained, tmp_path, capsys):
    done, flags = trained
    flags = (*flags, "--resume_from_checkpoint", done.folder / "checkpoint-000002", "--max_steps", 4, "--ema_decay", 0.5)
    averaged = learn_here("pretrain", tmp_path / "run", *flags, "--allow_changed", "ema_decay")
    assert "the moving average begins at the weights of step 2" in capsys.readouterr().err
    average, last = (r.weights()["model.norm.weight"] for r in (averaged, done))
    assert not np.allclose(average, last, atol=1e-7) and np.allclose(average, last, atol=2e-2)


CHANGES = {
    "lora_alpha": 8, "lora_dropout": 0.1, "use_rslora": True, "learning_rate": 1e-3, "warmup_steps": 2, "optim": "muon",
    "lr_scheduler_type": "constant", "weight_decay": 0.3, "ema_decay": 0.9, "seed": 3, "max_grad_norm": 0.5,
}  # fmt: skip
OTHER_WEIGHTS = {"lora_r": 2, "use_dora": True}


def test_what_a_refusal_advises_works(chat_file, tiny_model, tmp_path, capsys):
    flags = ("--model_name_or_path", tiny_model, "--train_file", chat_file, "--seq_length", 96, "--show_answers", 0)
    flags = (*flags, "--global_batch_size", 8, "--max_steps", 4, "--save_steps", 2, "--packing", "on")
    with_fault("lora_finetune", tmp_path / "run", "update:kill@4", *flags)

    def go_on(changes, *more):
        given = [part for name, value in changes.items() for part in (f"--{name}", value)[: 1 if value is True else 2]]
        return learn_here("lora_finetune", tmp_path / "run", *flags, *given, *more)

    for changes in (*({name: value} for name, value in (CHANGES | OTHER_WEIGHTS).items()), CHANGES):
        capsys.readouterr()
        with pytest.raises(ConfigError, match=rf"learns something else \(.*--allow_changed {' '.join(sorted(changes))}$"):
            go_on(changes)
        assert "loading" not in capsys.readouterr().err
    for name, value in OTHER_WEIGHTS.items():
        with pytest.raises(CheckpointError, match="does not fit this model"):
            go_on({name: value}, "--allow_changed", name)
    assert go_on(CHANGES, "--allow_changed", *CHANGES).rows[-1]["step"] == 4


@pytest.mark.parametrize(
    ("launcher", "its_threads", "threads", "chosen"),
    [
        (["python"], None, None, [7]),
        (["python"], "1", "1", []),
        (["accelerate", "launch"], None, "1", [7]),
        (["accelerate", "launch"], "1", "1", []),
        (["torchrun"], None, "1", [7]),
        (["torchrun"], "2", "2", []),
    ],
)
def test_what_the_user_asks_for_is_heeded(monkeypatch, launcher, its_threads, threads, chosen):
    """pytorch#22260 (2019): the launcher's OMP_NUM_THREADS=1 and the user's look alike. A real launch: test_launch.py."""

    def set_threads(number):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if number:
            monkeypatch.setenv("OMP_NUM_THREADS", number)

    set_threads(its_threads)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["sh", "-c", "echo; read _", *launcher], **pipes) as parent:
        assert parent.stdout.readline()  # /proc does not know its command line before
        set_threads(threads)
        seen = []
        monkeypatch.setattr(os, "getppid", lambda: parent.pid)
        monkeypatch.setattr(ranks, "cores", lambda: 14)
        monkeypatch.setattr(torch, "set_num_threads", seen.append)
        launch._use_all_cores(2)
        parent.communicate(b"\n")
    assert seen == chosen


def test_other_versions_are_said(tmp_path, capsys):
    _, _, saver = checkpointer(tmp_path / "run")
    saver.save(TrainState(step=1))
    saver.facts["versions"] = ["torch 9.9"]
    assert saver.resume().step == 1
    assert re.search(r"versions was \['torch 2\.[\d.]+\S*', .*now \['torch 9\.9'\]", capsys.readouterr().err)
