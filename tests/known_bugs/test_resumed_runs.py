"""Resuming with other settings: see docs/internals/known_bugs.md."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from shared.config import parse as configs
from shared.config.options import CheckpointConfig
from shared.process.errors import ConfigError
from shared.run import checkpoint_files
from shared.run.state import TrainState
from tests.conftest import ROOT, SmallConfig, load_template, run
from tests.run.test_checkpoint import make as checkpointer

SMALL = ("--seq_length", 32, "--global_batch_size", 8, "--per_device_train_batch_size", 4, "--logging_steps", 1)


@pytest.fixture(scope="module")
def trained(text_file, tmp_path_factory):
    """A pretraining run of 10 steps, and its flags."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    flags = ("--train_file", text_file, *SMALL, "--eval_steps", 5, "--save_steps", 5, "--save_total_limit", 9)
    flags = (*flags, "--lr_scheduler_type", "wsd", "--warmup_steps", 0.2)
    return run("pretrain", folder, *flags, "--max_steps", 10), flags


@pytest.mark.parametrize("name", ["global_batch_size", "mix_weights"])
def test_no_sample_is_used_twice_or_skipped(tmp_path, name):
    """Reported in 2024-25: after a change of the batch size, the place was a step times the new batch."""
    for allowed in ((), (name,)):
        config = SmallConfig(checkpoint=CheckpointConfig(allow_changed=allowed))
        with pytest.raises(ConfigError, match=f"--{name} cannot change within a run, since samples would be repeated or"):
            checkpoint_files.refuse_changes(tmp_path, {name: 8}, {name: 4}, config)


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
    done = run("pretrain", tmp_path / "run", *flags)
    (events,) = {path.parent for path in (tmp_path / "run").rglob("events.out.tfevents.*") if path.parent.name == "pretrain"}
    seen = EventAccumulator(str(events))
    seen.Reload()
    assert [event.step for event in seen.Scalars("loss")] == list(range(1, 9))
    assert [event.value for event in seen.Scalars("loss")] == pytest.approx(done.each("loss"), rel=1e-6)


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
    "ema_decay": 0.9, "seed": 3, "max_grad_norm": 0.5,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_refusal_advises_works(chat_file, tiny_model, tmp_path_factory, tmp_path, name):
    flags = ("--model_name_or_path", tiny_model, "--train_file", chat_file, "--seq_length", 96, "--show_answers", 0)
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


def test_other_versions_are_said(tmp_path, capsys):
    _, _, saver = checkpointer(tmp_path / "run")
    saver.save(TrainState(step=1))
    saver.facts["versions"] = ["torch 9.9"]
    assert saver.resume().step == 1
    assert re.search(r"versions was \['torch 2\.[\d.]+\S*', .*now \['torch 9\.9'\]", capsys.readouterr().err)
