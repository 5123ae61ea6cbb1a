"""Resuming with other settings: see docs/internals/known_bugs.md."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from shared.config import parse as configs
from shared.data import audit
from shared.data.mixture import Mixture
from shared.data.order import Order
from shared.process.errors import ConfigError
from shared.run import checkpoint_files
from shared.run.state import TrainState
from shared.text.packing import GroupedOrder
from tests.conftest import ROOT, load_template, run
from tests.run.test_checkpoint import make as checkpointer

SMALL = ("--seq_length", 32, "--global_batch_size", 8, "--per_device_train_batch_size", 4, "--logging_steps", 1)


@pytest.fixture(scope="module")
def trained(text_file, tmp_path_factory):
    """A pretraining run of 10 steps, and its flags."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    flags = ("--train_file", text_file, *SMALL, "--eval_steps", 5, "--save_steps", 5, "--save_total_limit", 9)
    flags = (*flags, "--lr_scheduler_type", "wsd", "--warmup_steps", 0.2)
    return run("pretrain", folder, *flags, "--max_steps", 10), flags


def indices(order, start, stop):
    return np.concatenate([order.indices(step) for step in range(start, stop)])


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("sizes", [(8, 4), (4, 8), (8, 3)])
def test_another_batch_size_goes_on_at_the_same_sample(sizes, drop_last):
    """Reported in 2024-25: the place was a step times the new batch."""
    one, other = (Order(53, size, seed=3, drop_last=drop_last) for size in sizes)
    for step in (1, 4, one.steps_per_epoch, one.steps_per_epoch + 2):
        later = other.resumed(step, json.loads(json.dumps(one.place(step))))
        epoch, before = one.position(step)
        left = indices(later, step, step + later._batches(53 - before))
        whole = Order(53, 1, seed=3)
        assert list(left) == [int(whole.indices(epoch * 53 + before + i)[0]) for i in range(len(left))]
        after = step + later._batches(53 - before)
        assert later.position(after) == (epoch + 1, 0)
        assert list(later.indices(after)) == list(other.indices((epoch + 1) * other.steps_per_epoch))
        # A budget of three epochs ends where the third does.
        assert later.position(3 * other.steps_per_epoch + later.extra_steps) == (3, 0)
    same = one.resumed(5, one.place(5))
    assert same.extra_steps == 0 and all(list(same.indices(s)) == list(one.indices(s)) for s in range(5, 40))


def test_a_mixture_goes_on_at_the_same_sample_of_each_source():
    sources = (("a", 30), ("b", 11))
    one, other = (Mixture(41, size, 5, sources=sources, weights=(3.0, 1.0)) for size in (8, 3))
    later = other.resumed(4, json.loads(json.dumps(one.place(4))))
    plain = Mixture(41, 1, 5, sources=sources, weights=(3.0, 1.0))
    each = [sorted(plain.indices(32 + 3 * i + j)[0] for j in range(3)) for i in range(20)]
    assert [sorted(later.indices(4 + i)) for i in range(20)] == each
    assert later.used(4) == one.used(4) and later.extra_steps == 4 - 11
    with pytest.raises(ConfigError, match="--mix_weights cannot change within a run"):
        dataclasses.replace(other, weights=(1.0, 1.0)).resumed(4, one.place(4))


def test_batches_of_similar_lengths_are_not_cut_anew_within_an_epoch():
    one, other = (GroupedOrder(48, size, 0, lengths=np.arange(48)) for size in (8, 4))
    with pytest.raises(ConfigError, match="--global_batch_size cannot change within an epoch of rows that are not packed"):
        other.resumed(4, one.place(4))
    later = other.resumed(6, one.place(6))
    assert sorted(indices(later, 6, 18)) == list(range(48)) and later.extra_steps == -6


@pytest.mark.parametrize("size", [4, 16])
def test_no_sample_is_used_twice_or_skipped(text_file, tiny_model, tmp_path, size):
    """The same on the command line, and for text that is streamed."""
    for name, more in (("prepared", ()), ("streamed", ("--streaming", "--shuffle_window", 16))):
        flags = ("--train_file", text_file, "--tokenizer_name", tiny_model, *SMALL, "--save_steps", 2, "--audit_data", *more)
        run("pretrain", tmp_path / name, *flags, "--max_steps", 2)
        again = ("--global_batch_size", size, "--max_steps", 4, "--allow_changed", "global_batch_size", "max_steps")
        run("pretrain", tmp_path / name, *flags, *again)
        used = audit.samples_of_steps(tmp_path / name)
        whole = run("pretrain", tmp_path / f"{name}-whole", *flags, "--global_batch_size", 4, "--max_steps", 4 + size // 2)
        expected = [s for _, _, samples in audit.samples_of_steps(whole.folder).values() for s in samples]
        assert sorted(s for _, _, samples in used.values() for s in samples) == sorted(expected)


def test_the_jump_of_the_learning_rate_is_said(trained):
    done, flags = trained
    longer = ("--max_steps", 100, "--allow_changed", "max_steps")
    again = run("pretrain", done.folder, *flags, *longer, check=False, env={"TEMPLATES_FAULT": "update:kill@12"})
    was, now = re.search(r"learning rate goes from (\S+) to (\S+) here", again.output).groups()
    peak = load_template("pretrain").Config().optim.learning_rate
    assert float(was) == 0 and float(now) > 0 and float(now) != peak
    assert "learning rate goes" not in run("pretrain", done.folder, *flags, "--max_steps", 10, check=False).output


def test_tensorboard_shows_no_step_twice(text_file, tmp_path):
    """Reported in 2022: steps after the last checkpoint were shown again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = ("--train_file", text_file, *SMALL, "--save_steps", 4, "--max_steps", 8, "--report_to", "tensorboard")
    killed = run("pretrain", tmp_path / "run", *flags, env={"TEMPLATES_FAULT": "update:kill@7"}, check=False)
    assert killed.returncode
    run("pretrain", tmp_path / "run", *flags)
    (events,) = {path.parent for path in (tmp_path / "run").rglob("events.out.tfevents.*") if path.parent.name == "pretrain"}
    seen = EventAccumulator(str(events))
    seen.Reload()
    assert [event.step for event in seen.Scalars("loss")] == list(range(1, 9))


@pytest.mark.parametrize("optim", ["adamw_8bit", "adamw", "sgd"])
def test_another_optimizer_begins_anew_in_words(trained, tmp_path, optim):
    done, flags = trained
    flags = (*flags, "--resume_from_checkpoint", done.folder / "checkpoint-000005", "--optim", optim, "--max_steps", 10)
    again = run("pretrain", tmp_path / "run", *flags, "--allow_changed", "optim")
    assert "begin with a new optimizer state" in again.output and again.rows[-1]["step"] == 10
    back = (*flags, "--resume_from_checkpoint", tmp_path / "run/checkpoint-000010", "--optim", "muon", "--max_steps", 12)
    again = run("pretrain", tmp_path / "back", *back, "--allow_changed", "optim", "max_steps")
    assert "begin with a new optimizer state" in again.output


def test_an_average_begins_at_the_resumed_weights(trained, tmp_path):
    done, flags = trained
    flags = (*flags, "--resume_from_checkpoint", done.folder / "checkpoint-000005", "--max_steps", 10)
    again = run("pretrain", tmp_path / "run", *flags, "--ema_decay", 0.5, "--allow_changed", "ema_decay")
    assert "the moving average begins at the weights of step 5" in again.output
    assert not np.allclose(again.weights()["model.norm.weight"], done.weights()["model.norm.weight"], atol=1e-7)
    assert np.allclose(again.weights()["model.norm.weight"], done.weights()["model.norm.weight"], atol=2e-2)


CHANGES = {
    "lora_r": 2, "lora_alpha": 8, "lora_dropout": 0.1, "use_rslora": True, "use_dora": True,
    "learning_rate": 1e-3, "warmup_steps": 2, "lr_scheduler_type": "constant", "weight_decay": 0.3, "optim": "muon",
    "ema_decay": 0.9, "seed": 3, "max_grad_norm": 0.5, "global_batch_size": 4, "neftune_noise_alpha": 5.0,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_refusal_advises_works(chat_file, tiny_model, tmp_path_factory, tmp_path, name):
    flags = ("--model_name_or_path", tiny_model, "--train_file", chat_file, "--seq_length", 96, "--num_generations", 0)
    flags = (*flags, "--global_batch_size", 8, "--max_steps", 4, "--save_steps", 2, "--packing", "on")
    config = load_template("lora_finetune").Config
    if name not in configs.flags(config).keys() - configs.free_fields(config):
        pytest.skip(f"{name} is no setting of this template that is refused")
    folder = tmp_path / "run"
    run("lora_finetune", folder, *flags, env={"TEMPLATES_FAULT": "update:kill@4"}, check=False)
    change = [f"--{name}"] if CHANGES[name] is True else [f"--{name}", CHANGES[name]]
    refused = run("lora_finetune", folder, *flags, *change, check=False)
    assert refused.returncode and "learns something else" in refused.output
    assert "loading" not in refused.output.split("loading PyTorch")[1] and f"--allow_changed {name}" in refused.output
    allowed = run("lora_finetune", folder, *flags, *change, "--allow_changed", name, check=False)
    if name in ("lora_r", "use_dora"):
        assert allowed.returncode and "does not fit this model" in allowed.output
    else:
        assert allowed.returncode == 0 and allowed.rows[-1]["step"] == 4


def test_what_counts_as_better_counts_for_the_patience():
    """Equal scores go by the loss, for the best weights and for early stopping alike."""
    state = TrainState(step=1)
    for step, (accuracy, loss) in enumerate([(0.5, 2.0), (0.5, 1.0), (0.5, 1.5)], 1):
        state.step = step
        state.score({"eval_accuracy": accuracy, "eval_loss": loss}, "accuracy")
    assert state.best_step == 2


@pytest.mark.parametrize(("threads", "expected"), [(None, None), ("1", 1), ("2", 2)])
def test_what_the_user_asks_for_is_heeded(threads, expected, tmp_path):
    """pytorch#22260 (2019): the launcher's OMP_NUM_THREADS=1 and the user's look alike."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nfrom shared.run import launch\nlaunch.start(0)\nprint('threads', torch.get_num_threads())"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    env.pop("OMP_NUM_THREADS", None)
    env |= {"OMP_NUM_THREADS": threads} if threads else {}
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    for command in ([sys.executable], launcher)[: 2 if threads else 1]:  # Accelerate's own choice is all of the machine's
        done = subprocess.run([*command, script], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split()[-1] == str(expected or len(os.sched_getaffinity(0)))


def test_other_versions_are_said(tmp_path, capsys, monkeypatch):
    _, _, saver = checkpointer(tmp_path / "run")
    saver.save(TrainState(step=1))
    monkeypatch.setattr(checkpoint_files, "versions", lambda: {"torch": "9.9", "a": "1"})
    assert saver.resume().step == 1
    assert re.search(r"torch 2\.[\d.]+\S*, now 9\.9", capsys.readouterr().err)
