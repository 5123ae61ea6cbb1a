"""The package, as those use it who have no checkout: built twice, installed alone, tried from an empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tools import new


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and not {".git", "__pycache__"} & {*path.parts})
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.slow
def test_the_wheel_alone_makes_a_project_and_with_pytorch_it_plans_and_trains(tmp_path):
    pytest.importorskip("hatchling")
    done = subprocess.run([ROOT / ".ci/package", tmp_path, sys.executable], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    here, command = tmp_path / "here", tmp_path / "empty/bin/training-templates"
    made, expected = files_of(here / "my-project"), new.build(("lora_finetune",), "my-project")
    assert made.keys() == expected.keys()
    assert [name for name in made if made[name] != expected[name]] == ["README.md"]  # which names the version
    assert b"`training-templates new lora_finetune ../my-project --with vision`" in made["README.md"]

    (site,) = (tmp_path / "empty/lib").glob("python*/site-packages")
    (site / "more.pth").write_text(str(Path(yaml.__file__).parents[1]))  # stands for [train]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    installed = files_of(site / "training_templates")

    def run(*given: str, of: object = command) -> str:
        done = subprocess.run([of, *given], cwd=here, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "--config_file accelerate_configs/single_gpu.yaml" in run("plan", "--seq_length", "128")
    (here / "run.yaml").write_text(run("recipes", "smolvlm2_500m_full_16gb"))
    assert yaml.safe_load((here / "run.yaml").read_text())
    few = ("--max_steps", "2", "--report_to", "none")
    run("demo", "image_classification", *few, "--output_dir", "digits")
    run("demo", "pretrain_pipeline", *few, *new.FLAGS["pretrain_pipeline"].split(), "--output_dir", "pipeline")
    assert all((here / name / "final").is_dir() for name in ("digits", "pipeline"))
    added = run("new", "lora_finetune", "my-project", "--with", "tensor")
    assert "accelerate_configs/tensor_parallel.yaml" in added
    train = ("-m", "shared", "run", "accelerate", "launch", "train.py", *few, *new.FLAGS["lora_finetune"].split())
    here /= "my-project"
    run(*train, "--output_dir", "first", of=tmp_path / "empty/bin/python")
    assert (here / "first/final").is_dir()
    assert files_of(site / "training_templates") == installed  # runs write nothing there
