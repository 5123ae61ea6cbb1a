"""Lint, format and types, and the README against the files."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.parametrize(
    "arguments", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)], ids=lambda a: "-".join(a[:2])
)
def test_clean(arguments):
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_the_readme_names_exists():
    readme = (ROOT / "README.md").read_text()
    names = set(re.findall(r"(?:templates|accelerate_configs|benchmarks|shared|tests)/[\w./-]*\w", readme))
    assert len(names) >= 8
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_every_flag_the_readme_names_exists():
    from shared import config as configs
    from tests.conftest import load_template

    known = {"config", "help"}
    for template in ("pretrain", "pretrain_pipeline", "lora_finetune", "image_classification"):
        known |= {name for name, _, _ in configs.fields(load_template(template).Config)}
    launcher = {
        "config_file",
        "num_processes",
        "mixed_precision",
        "machine_rank",
        "main_process_ip",
        "gpus",
        "gpu_memory",
        "rm",
    }
    flags = set(re.findall(r"(?<![\w-])--([a-z][\w]*)", (ROOT / "README.md").read_text()))
    assert {flag.removeprefix("no_") for flag in flags} - known - launcher == set()


def test_templates_and_shared_depend_one_way():
    for path in (ROOT / "shared").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) templates", path.read_text(), re.M), path
        assert not re.search(r"^\s*(from|import) torchvision", path.read_text(), re.M), path
        if "peft" in path.read_text():
            assert not re.search(r"^\s*(from|import) (peft|bitsandbytes)\b", path.read_text(), re.M) or path.name in (
                "optim.py",
                "memory.py",
            )
    for path in (ROOT / "templates").glob("*.py"):
        assert not re.search(r"^\s*(from|import) templates", path.read_text(), re.M), path
