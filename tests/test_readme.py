"""Every command that the README shows is given here, on tiny data and two CPU processes in place of a user's."""

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from shared.config import parse as configs
from shared.process import ranks
from tests.conftest import LAUNCHER, ROOT, free_port, load_template

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if line and line[0] != "#"]
PARTS = [part.split(" #")[0].strip() for command in COMMANDS for part in command.split("&&")]
# What a user's values become here; flags that are not shown stay away.
SMALL = {
    "--num_processes": "2",
    "--seq_length": "64",
    "--max_tokens": "1024",
    "--global_batch_size": "8",
    "--per_device_train_batch_size": "2",
    "--vocab_size": "320",
    "--dataloader_num_workers": "1",
    "--max_steps": "2",
    "--model_preset": "3M",
}
TINY = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,intermediate_size=128"


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_model, chat_file, text_file, image_folder, architectures):
    """What stands for a user's models and data, by the word in the README."""
    from transformers import AutoConfig, AutoModelForImageClassification, ConvNextImageProcessor

    folder = tmp_path_factory.mktemp("world")
    config = AutoConfig.from_pretrained(architectures / "convnext")
    AutoModelForImageClassification.from_config(config).save_pretrained(folder / "convnext")
    ConvNextImageProcessor(size={"shortest_edge": 16}, crop_pct=1.0).save_pretrained(folder / "convnext")
    shutil.copytree(text_file.parent, folder / "corpus")
    return {
        "meta-llama/Llama-3.1-8B": tiny_model,
        "facebook/convnext-tiny-224": folder / "convnext",
        "chats.jsonl": chat_file,
        "corpus/": folder / "corpus",
        "/data": folder / "corpus",  # mounted there
        "photos/": image_folder,
    }


def small(tokens: list[str], world: dict, folder: Path) -> list[str]:
    """The arguments of `accelerate launch`, for here."""
    tokens = [str(world.get(token, token)) for token in tokens]
    for i, token in enumerate(tokens[:-1]):
        if token in SMALL:
            tokens[i + 1] = SMALL[token]
        elif token == "--num_train_epochs":
            tokens[i : i + 2] = ["--max_steps", "2"]
    script = next(i for i, token in enumerate(tokens) if token.endswith(".py"))
    launcher, given = tokens[:script], tokens[script + 1 :]
    if "--mixed_precision" not in launcher:
        launcher += ["--mixed_precision", "no"]
    launcher += ["--main_process_port", str(free_port())] if "--config_file" in launcher else []
    template = Path(tokens[script]).stem
    extra = {"--output_dir": str(folder / "run"), "--report_to": "none"}
    extra |= {} if {"--max_steps", "--max_tokens"} & set(given) else {"--max_steps": "2"}
    extra |= {"--eval_samples": "4"} if template != "image_classification" else {"--image_size": "16"}
    extra |= {"--num_generations": "0", "--seq_length": "64"} if template == "lora_finetune" else {}
    extra |= {"--config_overrides": TINY, "--seq_length": "64"} if template == "pretrain" else {}
    given += [
        token for flag, value in extra.items() if flag == "--output_dir" or flag not in given for token in (flag, value)
    ]
    return [*launcher, str(ROOT / tokens[script]), *given]


def kind(part: str) -> str:
    """What sort of command it is; the empty string if this file does not know it."""
    kinds = {
        r"(ACCELERATE_USE_CPU=true )?accelerate launch ": "launch",
        r"python -m shared ": "shared",
        r"pip install -r (tests/)?requirements\.txt$": "install",
        r"pytest -n 2$": "tests",
        r"mkdir -p runs$": "folder",
        r"docker run ": "container",
        r"docker build |(\w+=\S+ )?docker compose -f jobs/compose\.yaml up|kubectl apply -f jobs/|(\w+=\S+ )?sbatch ": "job",
    }
    return next((name for pattern, name in kinds.items() if re.match(pattern, part)), "")


def test_the_readme_shows_no_command_that_is_not_tested_here():
    assert len(PARTS) >= 12 and [part for part in PARTS if not kind(part)] == []


@pytest.mark.parametrize("part", [p for p in PARTS if kind(p) == "launch"])
def test_a_launch(part, world, tmp_path):
    tokens = shlex.split(part.removeprefix("ACCELERATE_USE_CPU=true "))[2:]
    code, output = LAUNCHER.run(small(tokens, world, tmp_path), dict(os.environ), cwd=ROOT)
    assert code == 0, output
    assert (tmp_path / "run/final").is_dir() and (tmp_path / "run/curves.png").exists()


@pytest.mark.parametrize("part", [p for p in PARTS if kind(p) == "shared"])
def test_a_command_of_the_package(part, world, tmp_path):
    words = {"../my-project": tmp_path / "my-project"}
    tokens = [str(words.get(token, world.get(token, token))) for token in shlex.split(part)[1:]]
    done = subprocess.run([sys.executable, *tokens], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.parametrize("part", [p for p in PARTS if kind(p) == "container"])
def test_what_a_container_is_started_with(part, world, tmp_path):
    """The image itself is built and run by tests/test_image.py where that can be done; here, what it would start."""
    tokens = shlex.split(part)
    given = tokens[tokens.index("templates") + 1 :]
    if not given:
        (default,) = re.findall(r"^CMD (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        given = yaml.safe_load(default)
        assert " ".join(given) in README  # the same as the first command
    if given != ["selftest"]:
        assert given[:2] == ["accelerate", "launch"]
        code, output = LAUNCHER.run(small(given[2:], world, tmp_path), dict(os.environ), cwd=ROOT)
        assert code == 0, output


@pytest.mark.parametrize("part", [p for p in PARTS if kind(p) == "job"])
def test_what_a_job_names_is_there(part):
    """tests/test_jobs.py starts what these start."""
    tokens = shlex.split(part)
    files = [token for token in tokens if re.match(r"(jobs|templates)/|accelerate_configs/", token)]
    assert files or "build" in tokens
    assert all((ROOT / file).is_file() for file in files), files


def shipped() -> Iterator[str]:
    """Every launch of a template that the project shows or starts, on one line."""
    yield from PARTS
    for path in sorted(ROOT.glob("templates/*.py")):
        lines = path.read_text().split('"""')[1].replace("\\\\\n", " ").splitlines()
        yield from (line.split(" #")[0].strip() for line in lines)
    for path in sorted(ROOT.glob("jobs/*.yaml")):
        for block in re.findall(r"(?:args|command):\n((?: +- .*\n)+)", path.read_text()):
            yield " ".join(line.strip().removeprefix("- ") for line in block.splitlines())


def launched_on(tokens: list[str]) -> list[int]:
    """How many processes that read data it may find."""
    tokens = [part for token in tokens for part in token.split("=", 1)]
    value = dict(itertools.pairwise(tokens))
    if "sbatch" in tokens:
        (default,) = re.findall(r"#SBATCH --gpus-per-node=(\d+)", (ROOT / "jobs/slurm.sh").read_text())
        return [int(value.get("--nodes", 1)) * int(value.get("--gpus-per-node", default))]
    number = value.get("--num_processes")
    if number is None and "--config_file" in value:
        number = yaml.safe_load((ROOT / value["--config_file"]).read_text())["num_processes"]
    return [1, 2, 4, 8] if number is None or "$" in str(number) else [int(number)]


@pytest.mark.parametrize("line", [line for line in shipped() if re.search(r"(launch|sbatch).* templates/\w+\.py", line)])
def test_the_global_batch_of_every_launch_divides_by_its_processes(line, world, monkeypatch):
    tokens = [str(world.get(token, token)) for token in shlex.split(line)]
    script = next(i for i, token in enumerate(tokens) if re.fullmatch(r"templates/\w+\.py", token))
    name = Path(tokens[script]).stem
    template = load_template(name)
    monkeypatch.setattr(ranks, "_pipeline_ranks", 1)  # which a pipeline's Config sets
    for processes in launched_on(tokens[:script]):
        if processes > 1 or name != "pretrain_pipeline":
            monkeypatch.setenv("WORLD_SIZE", str(processes))
            rows, accumulation = configs.parse(template.Config, tokens[script + 1 :]).batch.micro_batch()
            assert rows >= 1 and accumulation >= 1


def test_the_test_command_is_the_one_of_ci():
    assert "pip install -r tests/requirements.txt && pytest -n 2" in COMMANDS
    assert "pip install -r requirements.txt && accelerate launch templates/lora_finetune.py" in COMMANDS


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if not link.startswith("http") and not (ROOT / link).exists()] == []


def test_every_module_launch_config_template_and_exit_code_is_in_the_readme():
    for folder, pattern in (("shared", "*.py"), ("accelerate_configs", "*.yaml"), ("templates", "*.py"), ("jobs", "*")):
        for path in (ROOT / folder).glob(pattern):
            assert f"{folder}/{path.name}" in README or path.name.startswith("__"), path


def test_the_messages_of_the_readme_are_those_that_are_said():
    (table,) = re.findall(r"## When something goes wrong\n(.*?)\n## ", README, re.DOTALL)
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")][1:]
    spans = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    others = "(?i)addr|DataLoader|ProcessError|FailedError|SignalException|KeyboardInterrupt|values were not passed"
    ours = [text for text in spans if not re.search(others, text)]
    source = " ".join(re.sub(r'"\n\s+f?"', "", path.read_text()) for path in (ROOT / "shared").rglob("*.py"))
    assert len(ours) >= 7
    assert [text for text in ours if text.strip(" .") not in source] == []
