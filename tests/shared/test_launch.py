"""Launches that would train something else than they seem to, and what launch.py promises."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from shared import launch
from shared.config import ConfigError
from tests.conftest import ROOT, command, run


def test_two_processes_that_each_believe_they_are_alone_are_refused(tmp_path):
    done = run("pretrain", tmp_path, "--max_steps", 1, processes=2, check=False, env={"ACCELERATE_USE_CPU": ""})
    assert done.returncode != 0
    assert done.output.count("error: 2 processes were launched but no GPU is visible") == 1
    assert "ACCELERATE_USE_CPU=true" in done.output
    assert not (tmp_path / "metrics.jsonl").exists()


def test_accumulation_has_one_owner(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(ConfigError, match="gradient_accumulation_steps is 4 in the launch config"):
        launch.start(0)


def test_a_rehearsal_says_that_it_is_one(tmp_path):
    done = run("pretrain", tmp_path, "--max_steps", 1, "--eval_samples", 1, processes=2, config="fsdp2")
    assert "rehearsal: FSDP on 2 CPU processes" in done.output


def test_randomness_of_a_step_depends_on_seed_step_and_rank_alone():
    def draw(*key):
        launch.seed_step(*key)
        return torch.rand(1).item(), random.random(), np.random.rand()

    assert draw(0, 5, 0) == draw(0, 5, 0)
    assert len({draw(*key) for key in [(0, 5, 0), (1, 5, 0), (0, 6, 0), (0, 5, 1)]}) == 4


@pytest.mark.parametrize("template", ["pretrain", "lora_finetune"])
def test_exit_code_of_the_script_itself_names_the_cause(template, tmp_path):
    script = command(template, tmp_path)
    bad = subprocess.run([sys.executable, *script, "--attn_implementation", "nonesuch"], capture_output=True, text=True)
    assert bad.returncode == 2
    assert bad.stderr.startswith("error: ") and bad.stderr.count("\n") == 1
    assert ROOT.exists()
