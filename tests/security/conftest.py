"""Runs that are to be refused, and traps that show it when something ran."""

import os
import pickle
import sys
from pathlib import Path

import hypothesis  # noqa: F401  # pytest would import it after these tests, when Python 3.11 has miscounted its recursion
import pytest

from tests.conftest import refusal, run_here


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.fixture
def payload(tmp_path):
    """A pickle that leaves a trace; afterwards, that there is none."""
    content = pickle.dumps(Payload(tmp_path / "ran"))
    yield content
    assert not (tmp_path / "ran").exists()
    pickle.loads(content).close()  # it would have
    assert (tmp_path / "ran").exists()


TEXT = ("--max_steps", 1, "--eval_samples", 2, "--global_batch_size", 2)
TINY = {
    "pretrain": (*TEXT, "--seq_length", 16),
    "lora_finetune": (*TEXT, "--seq_length", 32, "--show_answers", 0),
    "image_classification": (
        *("--max_steps", 1, "--global_batch_size", 2, "--per_device_train_batch_size", 2, "--dataloader_num_workers", 0),
        *("--image_size", 16),
    ),
}


def refused(template: str, folder: Path, *flags: object) -> str:
    """The one line with which a run ends."""
    return refusal(template, *TINY[template], "--output_dir", folder / "run", *flags)


def trains(template: str, folder: Path, *flags: object) -> bool:
    run_here(template, *TINY[template], "--output_dir", folder / "run", *flags)
    return (folder / "run" / "final").is_dir()


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.fixture
def nobody_answers(monkeypatch):
    """Standard input is a terminal at which nobody sits: a question would wait for ever."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    _, slave = os.openpty()
    with os.fdopen(slave) as terminal:
        assert terminal.isatty()
        monkeypatch.setattr(sys, "stdin", terminal)
        yield
