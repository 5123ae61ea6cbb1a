"""New projects: whole, small, working at once, and upgraded without losing an edit."""

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from shared.commands import upgrade
from shared.commands.new import closure, templates
from shared.commands.selftest import FLAGS
from tests.conftest import LAUNCHER, ROOT, free_port

NAMES = ("image_classification", "lora_finetune", "pretrain", "pretrain_pipeline")


def shared(*arguments, cwd=ROOT, check=True):
    """`python -m shared ...` with the package that is in `cwd`."""
    env = os.environ | {"PYTHONPATH": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "shared", *map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def projects(tmp_path_factory):
    """A project of each template."""
    folder = tmp_path_factory.mktemp("projects")
    for name in NAMES:
        shared("new", name, folder / name)
    return folder


def test_every_template_is_tested_here():
    assert tuple(templates()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_project_holds_what_its_code_imports_and_nothing_else(projects, name):
    folder = projects / name
    modules = {str(p.relative_to(folder)) for p in folder.rglob("*.py") if ".template" not in p.parts}
    assert modules >= {
        "train.py",
        "smoke_test.py",
        "shared/__main__.py",
        "shared/commands/upgrade.py",
        "shared/config/parse.py",
    }
    assert "shared/commands/new.py" not in modules
    users = {"images/files": "image_classification", "text/chat": "lora_finetune", "parallel/pipeline": "pretrain_pipeline"}
    for unused, user in users.items():
        assert (f"shared/{unused}.py" in modules) == (name == user)
    for module in modules:  # every import of `shared` is there
        for node in ast.walk(ast.parse((folder / module).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shared":
                for alias in node.names:
                    place = folder.joinpath(*(node.module or "").split("."))
                    inside = place / f"{alias.name}.py", place / alias.name / "__init__.py"
                    if (place / "__init__.py").exists() and node.module == "shared" and not alias.name.startswith("_"):
                        assert any(p.exists() for p in inside), (module, alias.name)
                    else:
                        assert place.with_suffix(".py").exists() or (place / "__init__.py").exists(), (module, node.module)
    packages = {re.split("==", line)[0] for line in (folder / "requirements.txt").read_text().splitlines() if "==" in line}
    assert {"torch", "accelerate", "transformers", "wandb", "psutil"} <= packages
    assert ("peft" in packages) == (name != "image_classification")  # `plan` predicts adapters' memory
    assert ("torchvision" in packages) == ("onnxscript" in packages) == (name == "image_classification")
    pins = set((ROOT / "requirements.txt").read_text().splitlines())
    assert set((folder / "requirements.txt").read_text().splitlines()[1:]) <= pins
    assert (folder / ".git").is_dir() or not shutil.which("git")
    assert os.access(folder / "jobs/slurm.sh", os.X_OK) and "templates/" not in (folder / "jobs/kubernetes.yaml").read_text()
    assert (
        "smoke_test.py" in (folder / "Dockerfile").read_text() and "!smoke_test.py" in (folder / ".dockerignore").read_text()
    )
    configs = [name for path in (folder / "jobs").iterdir() for name in re.findall(r"file=(\S+\.yaml)", path.read_text())]
    assert configs and all((folder / name).exists() for name in configs)
    refused = (folder / "accelerate_configs" / "deepspeed_zero2.yaml").exists()
    assert refused == (name in ("lora_finetune", "pretrain"))


def test_a_module_that_is_added_later_is_found(tmp_path):
    """The closure is read from the code: also imports inside functions, and modules of modules."""
    script = tmp_path / "train.py"
    script.write_text("def f():\n from shared.models import classifier\n import shared.text.corpus\n import torchvision\n")
    modules, packages = closure([script])
    names = {path.name for path in modules}
    assert {"classifier.py", "corpus.py", "records.py", "parse.py", "order.py"} <= names
    assert {"torchvision", "torch", "tyro", "numpy"} <= packages


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_project_trains_where_it_is(projects, tmp_path, name, processes):
    if name == "pretrain_pipeline" and processes == 1:
        pytest.skip("a pipeline has two processes and more")
    folder = projects / name
    argv = ["--config_file", "accelerate_configs/ddp.yaml"] if processes > 1 else []
    argv += ["--mixed_precision", "no", "--num_processes", str(processes), "--main_process_port", str(free_port())]
    argv += ["train.py", "--max_steps", "2", "--report_to", "none", "--output_dir", str(tmp_path / "run")]
    argv += FLAGS[name].split()
    script = folder / "train.py"
    code, output = LAUNCHER.run([str(script) if a == "train.py" else a for a in argv], dict(os.environ), cwd=folder)
    assert code == 0, output
    assert (tmp_path / "run/final").is_dir()
    assert json.loads((tmp_path / "run/exit.json").read_text())["exit_code"] == 0
    manifest = json.loads((tmp_path / "run/checkpoint-000002/MANIFEST.json").read_text())
    assert manifest["world_size"] == processes


def test_the_smoke_test_of_a_project(projects):
    done = subprocess.run([sys.executable, "smoke_test.py"], cwd=projects / "pretrain", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[:6] for row in rows] == [["train.py", n, "resumes", "bit", "for", "bit,"] for n in "12"], done.stdout


def test_several_templates_in_one(tmp_path):
    shared("new", "pretrain", "lora_finetune", tmp_path / "both")
    assert {"pretrain.py", "lora_finetune.py"} <= {p.name for p in (tmp_path / "both").iterdir()}
    assert not (tmp_path / "both/train.py").exists()
    assert "COPY pretrain.py lora_finetune.py smoke_test.py ./" in (tmp_path / "both/Dockerfile").read_text()


def test_a_project_in_a_repository_becomes_a_part_of_it(tmp_path):
    for command in (["init", "--quiet"], ["add", "-A"]):
        if command[0] == "add":
            shared("new", "image_classification", tmp_path / "training")
        subprocess.run(["git", *command], cwd=tmp_path, check=True, capture_output=True)
    assert not (tmp_path / "training/.git").exists()
    added = subprocess.run(["git", "ls-files"], cwd=tmp_path, capture_output=True, text=True).stdout
    assert "training/train.py" in added.splitlines()


def test_what_a_project_is_told_to_do_next_can_be_done(tmp_path):
    folder = tmp_path / "my pipes"
    said = shared("new", "pretrain_pipeline", folder).stdout.splitlines()[-1].strip()
    assert said.startswith(f"cd '{folder}' && pip install -r requirements.txt && ACCELERATE_USE_CPU=true accelerate launch")
    assert said.endswith("--num_processes 2 train.py")
    readme = (folder / "README.md").read_text()
    assert "\nACCELERATE_USE_CPU=true python -m shared verify-resume -- accelerate launch --config_file" in readme
    compose = yaml.safe_load((folder / "jobs/compose.yaml").read_text())
    assert compose["name"] == compose["services"]["train"]["image"] == "my-pipes"
    assert "jobs/compose.yaml" not in shared("upgrade", "--check", cwd=folder).stdout
    plan = ("plan", "--gpus", 2, "--lora_r", 8, "--load_in_4bit", "--seq_length", 64)
    assert " train.py --lora_r 8 --load_in_4bit --per_device" in shared(*plan, cwd=folder).stdout


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine").write_text("dear to me")
    done = shared("new", "pretrain", tmp_path, check=False)
    assert done.returncode == 2 and "exists and is not empty" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    done = shared("new", "pretrian", tmp_path / "new", check=False)
    assert done.returncode == 2 and "no template 'pretrian': there is image_classification" in done.stderr


def test_the_plain_way_to_copy_works_too(tmp_path):
    shutil.copy(ROOT / "templates/pretrain.py", tmp_path)
    shutil.copytree(ROOT / "shared", tmp_path / "shared", ignore=shutil.ignore_patterns("__pycache__"))
    flags = ["--eval_samples", "2", "--max_steps", "1", "--report_to", "none", "--output_dir", str(tmp_path / "run")]
    code, output = LAUNCHER.run([str(tmp_path / "pretrain.py"), *flags], dict(os.environ), cwd=tmp_path)
    assert code == 0 and (tmp_path / "run/final").is_dir(), output


# Upgrade -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def origin(tmp_path):
    """A checkout of the templates that the test may change."""
    folder = tmp_path / "origin"
    folder.mkdir()
    for name in ("shared", "templates", "accelerate_configs", "jobs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("requirements.txt", "Dockerfile", ".dockerignore"):
        shutil.copy(ROOT / name, folder)
    return folder


def change(path, old, new):
    text = path.read_text()
    assert text.count(old) >= 1
    path.write_text(text.replace(old, new, 1))


def test_an_upgrade_keeps_edits_brings_improvements_and_marks_conflicts(origin, tmp_path):
    project = tmp_path / "project"
    shared("new", "pretrain", project, cwd=origin)
    assert "nothing has changed" in shared("upgrade", cwd=project).stdout

    change(project / "train.py", "DEMO_STEPS = 80", "DEMO_STEPS = 200")  # edits of the user
    change(project / "accelerate_configs/ddp.yaml", "mixed_precision: bf16", "mixed_precision: fp16")
    (project / "mine.py").write_text("print('mine')\n")
    (project / "accelerate_configs/hsdp.yaml").unlink()
    change(project / "shared/training/optim.py", '"""', '"""Mine. ')

    template = origin / "templates/pretrain.py"  # and what the templates do meanwhile
    change(template, "    # Finish ", "    # The end: Finish ")
    change(origin / "accelerate_configs/ddp.yaml", "mixed_precision: bf16", "mixed_precision: fp8")
    change(origin / "shared/data/loader.py", '"""', '"""Better. ')
    change(origin / "accelerate_configs/hsdp.yaml", "mixed_precision: bf16", "mixed_precision: fp8")
    (origin / "shared/data/extra.py").write_text('"""A module that was not there."""\n')
    change(origin / "shared/text/corpus.py", "from shared.data import prepared", "from shared.data import extra, prepared")
    (origin / "accelerate_configs/fp8.yaml").unlink()

    before = {p: p.read_bytes() for p in project.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    told = shared("upgrade", "--check", cwd=project).stdout
    after = {p: p.read_bytes() for p in project.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert before == after
    for line in ("train.py: merged with your edits", "shared/data/loader.py: updated", "shared/data/extra.py: new"):
        assert line in told
    assert "accelerate_configs/ddp.yaml: merged, 1 conflict marked in it" in told
    assert "accelerate_configs/hsdp.yaml: has changed; you removed it" in told
    assert "accelerate_configs/fp8.yaml: is no longer part of it" in told

    done = shared("upgrade", cwd=project, check=False)
    assert done.returncode == 1 and "error: conflicts to solve in accelerate_configs/ddp.yaml" in done.stderr
    again = shared("upgrade", cwd=project, check=False)
    assert again.returncode == 1 and "still to be solved in accelerate_configs/ddp.yaml" in again.stderr
    train = (project / "train.py").read_text()
    assert "DEMO_STEPS = 200" in train and "# The end: Finish" in train
    config = (project / "accelerate_configs/ddp.yaml").read_text()
    assert (
        "<<<<<<< yours\nmixed_precision: fp16\n" in config and "=======\nmixed_precision: fp8\n>>>>>>> templates" in config
    )
    assert (project / "shared/data/loader.py").read_text().startswith('"""Better. ')
    assert (project / "shared/training/optim.py").read_text().startswith('"""Mine. ')
    assert (project / "shared/data/extra.py").exists() and (project / "mine.py").exists()
    assert not (project / "accelerate_configs/fp8.yaml").exists() and not (project / "accelerate_configs/hsdp.yaml").exists()
    (project / "accelerate_configs/ddp.yaml").write_text(config.split("<<<<<<<")[0])
    assert "nothing has changed" in shared("upgrade", cwd=project).stdout


def test_a_checkout_that_has_moved_is_named(origin, tmp_path):
    project = tmp_path / "project"
    shared("new", "pretrain", project, cwd=origin)
    moved = origin.rename(tmp_path / "moved")
    done = shared("upgrade", cwd=project, check=False)
    assert done.returncode == 2 and "no templates there; name their checkout with --source" in done.stderr
    assert "nothing has changed" in shared("upgrade", "--source", moved, cwd=project).stdout
    done = shared("upgrade", cwd=tmp_path / "moved", check=False)
    assert done.returncode == 2 and "was this project made by `new`?" in done.stderr


def test_an_edited_file_that_is_no_longer_part_of_it_stays(tmp_path):
    then = {name: hashlib.sha256(b"as it came").hexdigest() for name in ("edited.py", "plain.py")}
    (tmp_path / "edited.py").write_bytes(b"mine")
    (tmp_path / "plain.py").write_bytes(b"as it came")
    (tmp_path / "new/.template").mkdir(parents=True)
    (tmp_path / "new" / upgrade.ORIGIN).write_text('{"files": {}}')
    assert upgrade.plan(tmp_path, tmp_path / "new", {"files": then}).removes == ["plain.py"]
