"""New projects: whole, small, working at once, and git merges later templates without losing an edit."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import shared as shared_package
from tests.conftest import LAUNCHER, MISSING, ROOT, free_port, imports_of, python, slow
from tools import extras as extras_of
from tools import new

NAMES = tuple(new.templates())
WITH_ADAPTERS = ("distill", "dpo", "grpo", "lora_finetune", "text_classification", "token_classification")


def shared(*arguments, cwd=ROOT, check=True):
    """`python -m shared ...` with the package that is in `cwd`."""
    done = python("-m", "shared", *arguments, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}, cwd=cwd)
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module", autouse=True)
def parsed_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(new, "imports", imports_of)
        yield


@pytest.fixture(scope="module")
def projects(tmp_path_factory):
    """A project of each template."""
    folder = tmp_path_factory.mktemp("projects")
    for name in NAMES:
        new.create(folder / name, new.build((name,), name))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_project_holds_what_its_code_imports_and_nothing_else(projects, name):
    folder = projects / name
    modules = {str(p.relative_to(folder)) for p in folder.rglob("*.py")}
    assert modules >= {"train.py", "smoke_test.py", "shared/__main__.py", "shared/commands/run.py"}
    assert not any(module.startswith(("tools/", "shared/commands/ask")) for module in modules)
    users = {
        "images/files": ("image_classification",),
        "models/adapters": WITH_ADAPTERS,
        "extras/pipeline": ("pretrain_pipeline",),
        "extras/optimizers/muon": ("pretrain", "pretrain_pipeline"),
        "extras/vision/towers": (),
    }
    for used, by in users.items():
        assert (f"shared/{used}.py" in modules) == (name in by and (ROOT / f"shared/{used}.py").exists())
    imported = {
        name
        for module in modules
        for name, in_function in imports_of(folder / module)
        if not (in_function and name.startswith("shared.extras."))
    }
    for place in {Path(*name.split(".")) for name in imported}:
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            assert (folder / file).exists() or not (place.parts[0] == "shared" and (ROOT / file).exists()), file

    pins = (folder / "requirements.txt").read_text().splitlines()[1:]
    packages = {line.split("==")[0] for line in pins}
    assert {"torch", "accelerate", "transformers", "wandb", "psutil"} <= packages
    assert "onnxscript" not in packages
    assert ("torchvision" in packages) == (name == "image_classification")
    assert ("peft" in packages) == (name in WITH_ADAPTERS)
    assert set(pins) <= set((ROOT / "requirements.txt").read_text().splitlines())
    configs = [path.stem for path in (folder / "accelerate_configs").iterdir()]
    assert configs and not [name for name in configs if re.search("deepspeed|_parallel", name)]
    left_out = re.findall(r"--with (\w+)` \|", (folder / "README.md").read_text())
    assert sorted(left_out) == sorted(extras_of.useful([name]) - extras_of.chosen((name,), ()))

    told = (folder / "AGENTS.md").read_text()
    assert [path for path in re.findall(r"`([\w./]+/[\w.*]*|\w+\.py)`", told) if not list(folder.glob(path))] == []
    assert "launch train.py" in told and "templates" not in told.split("## Where")[1]
    assert os.access(folder / "jobs/slurm.sh", os.X_OK) and (folder / "shared/LICENSE").read_text().strip()
    started = [path.read_text() for path in [*(folder / "jobs").iterdir(), folder / "Dockerfile", folder / ".dockerignore"]]
    assert not any("templates/" in text for text in started)
    configs = [config for text in started for config in re.findall(r"file=(\S+\.yaml)", text)]
    assert len(configs) == 3 and all((folder / config).exists() for config in configs)


def test_extras_come_at_once_or_later_and_overwrite_no_edit(tmp_path, projects):
    asked = new.build(("lora_finetune",), "lora", ["comparisons", "deepspeed"])
    assert b"scikit-learn==" in asked["requirements.txt"]
    whole = new.build(("lora_finetune",), "lora", ["all"])
    assert "shared/extras/deepspeed.py" in whole and "accelerate_configs/deepspeed_zero2.yaml" in whole
    assert b"Left out" not in whole["README.md"] and b"torchvision" in whole["requirements.txt"]
    folder = tmp_path / "mine"
    shutil.copytree(projects / "lora_finetune", folder)
    edited = folder / "train.py"
    edited.write_text("# mine\n" + edited.read_text())
    (folder / "requirements.txt").open("a").write("mypackage==1\n")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    said = shared("new", "lora_finetune", folder, "--with", "vision", "tensor").stdout
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    changed = {path.name for path in before if after[path] != before[path]}
    assert changed == {"requirements.txt", "README.md"} and b"mypackage==1" in after[folder / "requirements.txt"]
    added = {str(path.relative_to(folder)) for path in after.keys() - before.keys()}
    assert added >= {"shared/extras/tensor.py", "shared/extras/vision/towers.py", "accelerate_configs/tensor_parallel.yaml"}
    assert not any("deepspeed" in name for name in added) and "torchvision==" in said
    assert "accelerate launch --config_file accelerate_configs/tensor_parallel.yaml train.py" in said
    left_out = (folder / "README.md").read_text()
    assert "--with deepspeed`" in left_out and "--with tensor`" not in left_out and "--with vision`" not in left_out
    (folder / "shared/extras/deepspeed.py").write_text("# mine\n")
    refused = shared("new", "lora_finetune", folder, "--with", "deepspeed", check=False)
    there = "shared/extras/deepspeed.py is there, and is not what would be added"
    assert refused.returncode == 2 and there in refused.stderr
    assert not (folder / "accelerate_configs/deepspeed_zero2.yaml").exists()
    wrong = shared("new", "lora_finetune", tmp_path / "other", "--with", "flux", check=False)
    assert wrong.returncode == 2 and "no extra 'flux': there is averages, comparisons, deepspeed" in wrong.stderr


def test_tools_are_found_from_anywhere_and_imported_by_nothing_that_is_copied(tmp_path):
    copied = [*(ROOT / "shared").rglob("*.py"), *(ROOT / "templates").glob("*.py")]
    assert [path for path in copied if any(name.split(".")[0] == "tools" for name, _ in imports_of(path))] == []
    (tmp_path / "tools").mkdir()  # the user's own
    (tmp_path / "tools/__init__.py").touch()
    done = python("-m", "shared", "recipes", cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert "qwen3_8b_lora_80gb: " in done.stdout, done.stderr


@pytest.mark.parametrize("name", ["lora_finetune", *map(slow, sorted({*NAMES} - {"lora_finetune"}))])
def test_a_project_trains_where_it_is(projects, tmp_path, name):
    folder, processes = projects / name, 1 + (name == "pretrain_pipeline")
    argv = ["--config_file", "accelerate_configs/ddp.yaml"] if processes > 1 else []
    argv += ["--mixed_precision", "no", "--num_processes", str(processes), "--main_process_port", str(free_port())]
    argv += [str(folder / "train.py"), "--max_steps", "2", "--report_to", "none", "--output_dir", str(tmp_path / "run")]
    code, output = LAUNCHER.run([*argv, *new.FLAGS[name].split()], dict(os.environ), cwd=folder)
    assert code == 0 and (tmp_path / "run/final").is_dir(), output
    assert json.loads((tmp_path / "run/checkpoint-000002/MANIFEST.json").read_text())["world_size"] == processes


@pytest.mark.slow
def test_the_smoke_test_of_a_project(projects):
    """The part of it on two processes; tests/extras/test_proofs.py has the other."""
    last = "import smoke_test; smoke_test.test_a_killed_run_resumes_on_two_processes()"
    done = python("-c", last, cwd=projects / "pretrain")
    assert done.returncode == 0 and done.stdout.count("same, bit for bit") == 8, done.stdout + done.stderr


@pytest.mark.slow
def test_selftest(tmp_path):
    """Of two templates, in a checkout that has no more: what it starts of the others is what test_faults.py starts."""
    for folder in ("shared", "tools", "accelerate_configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "templates").mkdir()
    for name in ("image_classification", "pretrain_pipeline"):
        shutil.copy(ROOT / f"templates/{name}.py", tmp_path / "templates")
    said = shared("selftest", cwd=tmp_path).stdout
    assert said.count("resumes bit for bit") == 3 and "FAILS" not in said, said


def test_what_a_project_requires_is_known_where_nothing_is_installed():
    """As the installed packages say, by the names of what they hold."""
    _, modules = new.closure(ROOT.rglob("shared/**/*.py"))
    pins = (ROOT / "requirements.txt").read_text().lower().splitlines()
    pinned = {line.split("==")[0] for line in pins if "==" in line}
    holders = {name: {of.lower() for of in held} & pinned for name, held in metadata.packages_distributions().items()}
    for name in modules & {name for name, held in holders.items() if held}:
        (line,) = new.requirements({name}).splitlines()[1:]
        assert line.split("==")[0].lower() in holders[name]
    assert new.requirements({"scipy"}) == new.requirements({"sklearn"})


def test_several_templates_become_a_part_of_the_repository_that_they_are_put_in(tmp_path):
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    shared("new", "pretrain", "lora_finetune", tmp_path / "both")
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    added = subprocess.run(["git", "ls-files"], cwd=tmp_path, capture_output=True, text=True).stdout.splitlines()
    assert {"both/pretrain.py", "both/lora_finetune.py"} <= set(added) and "both/train.py" not in added
    assert not (tmp_path / "both/.git").exists()


def test_what_a_project_is_told_to_do_next_can_be_done(tmp_path):
    folder = tmp_path / "my pipes"
    said, then = map(str.strip, shared("new", "pretrain_pipeline", folder).stdout.splitlines()[-2:])
    run = "ACCELERATE_USE_CPU=true accelerate launch --config_file accelerate_configs/ddp.yaml --mixed_precision no train.py"
    assert said == f"cd '{folder}' && pip install -r requirements.txt && {run}"
    assert f"\n{run}\n" in (folder / "README.md").read_text()
    assert (folder / ".git").is_dir() and then.startswith("git add -A && git commit -m templates && git branch templates ")
    compose = yaml.safe_load((folder / "jobs/compose.yaml").read_text())
    assert compose["name"] == compose["services"]["train"]["image"] == "my-pipes"
    done = shared("plan", cwd=folder, check=False)
    there = "run, verify-resume" if "proofs" in MISSING else "check, replay, run, verify-launch, verify-resume"
    assert done.returncode == 2 and f"no command 'plan': there is {there}; a checkout " in done.stderr


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine").write_text("dear to me")
    done = shared("new", "pretrain", tmp_path, check=False)
    assert done.returncode == 2 and "exists and is not empty" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    done = shared("new", "pretrian", tmp_path / "new", check=False)
    assert done.returncode == 2 and "no template 'pretrian': there is " in done.stderr


def test_a_checkout_may_lack_extras(origin, tmp_path):
    shutil.rmtree(origin / "shared/extras/comparisons", ignore_errors=True)
    shutil.rmtree(origin / "shared/extras/report", ignore_errors=True)  # which all projects have
    shared("new", "pretrain", tmp_path / "mine", "--with", "all", cwd=origin)
    assert (tmp_path / "mine/shared/__main__.py").exists() and not (tmp_path / "mine/shared/extras/report").exists()
    refused = shared("new", "pretrain", tmp_path / "other", "--with", "comparisons", cwd=origin, check=False)
    assert refused.returncode == 2 and "shared/extras/comparisons is not in this project" in refused.stderr


@pytest.mark.slow
def test_the_plain_way_to_copy_works_too(tmp_path):
    shutil.copy(ROOT / "templates/pretrain.py", tmp_path)
    shutil.copytree(ROOT / "shared", tmp_path / "shared", ignore=shutil.ignore_patterns("__pycache__"))
    flags = ["--eval_samples", "2", "--max_steps", "1", "--report_to", "none", "--output_dir", str(tmp_path / "run")]
    code, output = LAUNCHER.run([str(tmp_path / "pretrain.py"), *flags], dict(os.environ), cwd=tmp_path)
    assert code == 0 and (tmp_path / "run/final").is_dir() and "the Python standard library" in output, output


# Upgrade -------------------------------------------------------------------------------------------------------------


def git(folder, *arguments):
    settings = ("-c", "user.name=me", "-c", "user.email=me@x.org")
    done = subprocess.run(["git", "-C", folder, *settings, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commit(folder):
    git(folder, "add", "-A")
    git(folder, "commit", "--quiet", "-m", "all")


@pytest.fixture
def origin(tmp_path):
    """A checkout of the templates that the test may change."""
    folder = tmp_path / "origin"
    folder.mkdir()
    for name in ("shared", "templates", "tools", "accelerate_configs", "jobs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("AGENTS.md", "requirements.txt", "Dockerfile", ".dockerignore", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    git(folder, "init", "--quiet")
    commit(folder)
    return folder


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and not {"__pycache__", ".git"} & {*p.parts}}


def test_git_merges_later_templates_as_the_page_says(origin, tmp_path):
    """Edits stay, improvements come, conflicts are marked; a renamed file is followed, a deleted one is a conflict."""
    page = (ROOT / "docs/copying.md").read_text().split("## Later improvements")[1]
    first, later = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    project, configs = tmp_path / "my-project", tmp_path / "my-project/accelerate_configs"

    def shell(script):
        script = script.replace("accelerate-training-templates", "origin").replace("git pull\n", "")
        script = script.replace(
            "python -m shared new lora_finetune", f"PYTHONPATH=$PWD {sys.executable} -m shared new pretrain"
        )
        names = {f"GIT_{who}_{what}": "me" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        return subprocess.run(["bash", "-ec", script], cwd=project, env=os.environ | names, capture_output=True, text=True)

    shared("new", "pretrain", project, cwd=origin)
    assert git(origin, "rev-parse", "HEAD").strip() in (project / "README.md").read_text()
    assert shell(first).returncode == 0

    with (project / "train.py").open("a") as script:  # edits of the user
        script.write("# mine\n")
    change(configs / "ddp.yaml", "mixed_precision: bf16", "mixed_precision: fp16")
    change(project / "shared/training/optim.py", '"""', '"""Mine. ')
    (project / "mine.py").write_text("print('mine')\n")
    (project / "shared/training/step.py").rename(project / "steps.py")
    commit(project)
    before = contents(project)

    change(origin / "templates/pretrain.py", '"""', '"""Better. ')  # later changes of the templates
    change(origin / "accelerate_configs/ddp.yaml", "mixed_precision: bf16", "mixed_precision: fp8")
    for name in ("shared/data/loader.py", "shared/training/step.py"):
        change(origin / name, '"""', '"""Better. ')
    (origin / "shared/data/extra.py").write_text('"""A new module."""\n')
    with (origin / "shared/data/loader.py").open("a") as module:
        module.write("from shared.data import extra\n")
    (origin / "accelerate_configs/fp8.yaml").unlink()
    commit(origin)

    done = shell(later)
    assert done.returncode == 1 and "CONFLICT (content): Merge conflict in accelerate_configs/ddp.yaml" in done.stdout
    assert done.stdout.count("CONFLICT") == 1, done.stdout + done.stderr
    after = contents(project)
    changed = {str(p.relative_to(project)) for p in before.keys() | after.keys() if before.get(p) != after.get(p)}
    of_two = {"train.py", "steps.py", "shared/data/loader.py", "shared/data/extra.py", "README.md"}
    assert changed == of_two | {"accelerate_configs/ddp.yaml", "accelerate_configs/fp8.yaml"}
    train = (project / "train.py").read_text()
    assert train.startswith('r"""Better. ') and train.endswith("# mine\n")
    assert (project / "steps.py").read_text().startswith('"""Better. ')
    config = (configs / "ddp.yaml").read_text()
    assert "<<<<<<< HEAD\nmixed_precision: fp16\n" in config
    assert "=======\nmixed_precision: fp8\n>>>>>>> templates" in config
    assert not (configs / "fp8.yaml").exists() and os.access(project / "jobs/slurm.sh", os.X_OK)


def test_versions_are_the_same_wherever_they_are_written():
    """requirements.txt, the package's [train], and uv's lock; and what a release is checked for. Made anew by: uv lock"""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = re.findall(r"^[\w-]+==[\w.]+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert project["project"]["optional-dependencies"]["train"] == pins
    lock = (ROOT / "uv.lock").read_text()
    packages = tomllib.loads(lock)["package"]
    locked = {f"{package['name']}=={package['version']}" for package in packages if "version" in package}
    assert {pin.lower() for pin in pins} <= locked
    assert set(re.findall(r"https?://([^/\"]+)/", lock)) == {"pypi.org", "files.pythonhosted.org"}
    check = [sys.executable, str(ROOT / ".ci/release.py")]
    assert subprocess.run([*check, f"v{shared_package.__version__}"]).returncode == 0
    assert subprocess.run([*check, "v9.9.9"], capture_output=True).returncode == 1


@pytest.mark.slow
def test_assistants_are_told_commands_that_work(tmp_path):
    text = (ROOT / "AGENTS.md").read_text()
    (block,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert len(text.splitlines()) <= 50
    assert [path for path in re.findall(r"`([\w./]+/[\w.*]*)`", text) if not list(ROOT.glob(path))] == []
    commands = block.splitlines()
    assert [command.split()[0] for command in commands[3:]] == ["ruff", "pytest"]  # which every run of the tests proves
    small = f"--max_train_samples 100 {new.FLAGS['lora_finetune']}"
    flags = f"--output_dir {tmp_path / 'run'} --audit_data --max_steps 8 {small}", small, ""
    ends = "adapter in", "right, as far as these runs can show it", "exactly once"
    for command, more, end in zip(commands[:3], flags, ends, strict=True):
        words = command.removeprefix("ACCELERATE_USE_CPU=true ").replace("outputs/lora_finetune/RUN", f"{tmp_path}/run")
        words = words.replace("accelerate launch", "python -m accelerate.commands.launch", words.startswith("accelerate"))
        words = words.replace("shared check", "shared check --launches ddp2")
        done = python(*words.removeprefix("python ").split(), *more.split())
        assert done.returncode == 0 and end in done.stdout + done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("template", sorted((ROOT / "templates").glob("*.py")), ids=lambda path: path.stem)
def test_a_template_is_read_in_one_sitting(template):
    """A main of at most 35 lines; 230 lines in all, more for a recipe, six losses, rewards, a teacher or tags."""
    text = template.read_text()
    (main,) = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    assert main.end_lineno - main.lineno + 1 <= 35
    longer = {"image_classification": 300, "dpo": 305, "grpo": 265, "distill": 260, "token_classification": 260}
    assert len(text.splitlines()) <= longer.get(template.stem, 230)
