"""README.md and docs/: every command is given here on tiny data, every flag, file, link and message is looked up."""

import ast
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from transformers import AutoModelForSequenceClassification, BertForMaskedLM, ConvNextImageProcessor

from shared.__main__ import commands
from shared.commands import ask
from shared.config import parse as configs
from shared.process import ranks
from shared.text import forms, preferences
from tests.conftest import LAUNCHER, ROOT, SHAPE, free_port, load_template, python, run_here, save_classifier
from tests.small_models import save_bert
from tools.plan import PlanConfig

README = (ROOT / "README.md").read_text()
PAGES = {"README.md": README} | {str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.glob("docs/**/*.md"))}
COMING_FROM = PAGES["docs/coming_from.md"]
PAGES["docs/coming_from.md"] = re.sub(r"^\|.*? \| ", "| ", COMING_FROM, flags=re.MULTILINE)  # without others' flags
ALL = "\n".join(PAGES.values())
TEMPLATES = tuple(sorted(path.stem for path in ROOT.glob("templates/*.py")))
BLOCKS = re.findall(r"^ *```bash\n(.*?)```", ALL, re.DOTALL | re.MULTILINE)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if line and line[0] != "#"]
PARTS = list(dict.fromkeys(part.split(" #")[0].strip() for command in COMMANDS for part in command.split("&&")))
FIRST = "pip install -r requirements.txt && accelerate launch templates/lora_finetune.py"
TESTS = "pip install -r tests/requirements.txt && pytest -n 2"
KINDS = {
    r"(ACCELERATE_USE_CPU=true |python -m shared run )?accelerate launch .*templates/": "launch",
    r"python -m shared ": "shared",
    r"docker run ": "container",
    r"docker build |(\w+=\S+ )?docker compose -f jobs/compose\.yaml up|kubectl apply -f jobs/|(\w+=\S+ +)*sbatch ": "job",
    "sky jobs launch ": "job",
    r"pip install -r (tests/)?requirements\.txt$|pytest -n 2$|python3 -m venv \.venv$|\. \.venv/bin/activate$": "setup",
    r"jobs/rehearse/": "rehearsal",
    r"pip install --no-deps |PYTHONPATH=packages python benchmarks/": "other tool",
    r"transformers (serve|chat) |lm_eval |(\w+=\S+ )?hf (up|down)load |vllm serve |pip install \"": "other tool",
    r"git clone |cd accelerate-training-templates$|python llama\.cpp/|echo \"FROM|ollama ": "other tool",
    r"(uvx|pipx run) |templates=git": "package",
    r"(\w+=\S+ )?torchrun ": "other tool",
    r"git (add|commit|branch|worktree|merge|-C) |cd \.\./|git pull$": "other tool",
    r"mkdir -p runs$|nvidia-smi$|python -c |curl |head -1 |cat runs/chat/exit\.json$|pytest tests/known_bugs$": "shell",
}
# What a user's values become here; flags that are not shown stay away.
SMALL = {"--num_processes": 2, "--parallelism_config_sp_size": 2, "--seq_length": 64, "--max_tokens": 1024}
SMALL |= {"--global_batch_size": 8, "--per_device_train_batch_size": 2, "--vocab_size": 320, "--dataloader_num_workers": 1}
SMALL |= {"--max_steps": 2, "--max_new_tokens": 8, "--model_preset": "3M", "--eval_samples": 4, "--shuffle_window": 9}


def kind(part: str) -> str:
    """What sort of command it is; the empty string if this file does not know it."""
    return next((name for pattern, name in KINDS.items() if re.match(pattern, part)), "")


def parts(wanted: str) -> list[str]:
    return [part for part in PARTS if kind(part) == wanted]


def shipped() -> Iterator[str]:
    """Every launch of a template that the project shows or starts, on one line."""
    yield from PARTS
    for path in sorted(ROOT.glob("templates/*.py")):
        lines = path.read_text().split('"""')[1].replace("\\\n", " ").splitlines()
        yield from (line.split(" #")[0].strip() for line in lines)
    for path in sorted(ROOT.glob("jobs/*.yaml")):
        for block in re.findall(r"(?:args|command):\n((?: +- .*\n)+)", path.read_text()):
            yield " ".join(line.strip().removeprefix("- ") for line in block.splitlines())


LAUNCHES = [line for line in dict.fromkeys(shipped()) if re.search(r"(launch|sbatch).* templates/\w+\.py", line)]


# Quick: what is written is looked up ------------------------------------------------------------------------------------


def test_a_newcomer_reads_the_readme_in_three_minutes_and_its_two_commands_are_the_first():
    assert len(README.splitlines()) <= 120
    assert FIRST in COMMANDS and TESTS in COMMANDS
    assert TESTS in README.splitlines()  # .ci/run looks for this line
    assert [part for part in PARTS if not kind(part)] == []


def test_the_first_screen_is_true():
    """What was counted; the table beside others says what a step is here, and has a no of ours."""
    rows = json.loads((ROOT / "benchmarks/chaos.json").read_text())["rows"]
    kills = sum(row["kills"] for row in rows)
    assert f"Killed {kills} times at random, continued {kills} times: the same weights" in README
    assert {row["differ"] for row in rows} == {"nothing"}
    table = README.split("\n## When to use something else\n")[1].split("\n\n")[0].strip().splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table]
    assert len(cells) == 6 and all(len(row) == 5 and all(row) for row in cells)
    assert any("**no**" in row[1].lower() for row in cells)
    (lines,) = re.findall(r"\[(\d+) lines of `main`\]", README)
    tree = ast.parse((ROOT / "templates/lora_finetune.py").read_text())
    (loop,) = (node for node in ast.walk(tree) if isinstance(node, ast.For) and "run.steps" in ast.unparse(node.iter))
    assert loop.end_lineno - loop.lineno + 1 == int(lines)


def anchors(text: str) -> set[str]:
    """The names that a page's headings can be linked by."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links_lead_to_files_and_headings():
    for page, text in PAGES.items():
        for link in re.findall(r"\]\(([^)]+)\)", text):
            path, _, anchor = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            if not link.startswith("http"):
                assert target.exists() and (not anchor or anchor in anchors(target.read_text())), (page, link)


def test_every_page_config_template_job_and_folder_is_named_and_every_file_named_is_there():
    assert all(re.search(rf"\({page}[)#]", README) for page in PAGES if page.count("/") == 1)
    deeper = [page.removeprefix("docs/") for page in PAGES if page.count("/") > 1]
    assert deeper and [page for page in deeper if f"]({page}" not in ALL] == []
    for pattern in ("accelerate_configs/*.yaml", "templates/*.py", "jobs/*"):
        assert [path for path in ROOT.glob(pattern) if f"{path.parent.name}/{path.name}" not in ALL] == []
    for path in (ROOT / "shared").iterdir():
        assert path.name.startswith("__") or f"shared/{path.name}/" in PAGES["docs/copying.md"], path
    folders = "templates|accelerate_configs|benchmarks|shared|tests|tools|docs|jobs"
    named = set(re.findall(rf"(?<![\w/-])(?:{folders})/[\w./-]*\w", ALL))
    assert len(named) >= 40 and [name for name in named if not (ROOT / name).exists()] == []


def test_commands_fit_a_page_and_the_api_names_what_there_is():
    """The site's column shows 100 characters. Methods of docs/api.md are those of the classes, all of them."""
    assert [line for block in BLOCKS for line in block.splitlines() if len(line) > 100] == []
    page = PAGES["docs/api.md"]
    for file, name in (("run/setup", "Setup"), ("run/run", "Run"), ("training/step", "Step")):
        tree = ast.parse((ROOT / f"shared/{file}.py").read_text())
        (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        methods = [node.name for node in body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
        (table,) = re.findall(rf"\n`{name}` \([^|]*((?:\|[^\n]*\n)+)", page)
        assert re.findall(r"^\| `(\w+)", table, re.MULTILINE) == methods


def test_every_flag_exists():
    known = {"config", "help", *configs.flags(PlanConfig)}
    for template in TEMPLATES:
        known |= configs.flags(load_template(template).Config).keys()
    known |= {option.lstrip("-") for action in launch_command_parser()._actions for option in action.option_strings}
    for path in (*commands().values(), ROOT / "benchmarks/quality.py"):
        known |= set(re.findall(r'add_argument\(\s*"--([\w-]+)"', path.read_text()))
    docker = {"no-build-isolation", "build", "build-arg", "gpus", "read-only", "shm-size", "stop-timeout", "tmpfs", "user"}
    package = {"from", "refresh", "spec"}
    cluster = {"dependency", "from-file", "gpus-per-node", "nodes", "time"}
    rows = ALL.replace("\\\n", " ").splitlines()
    text = "\n".join(row for row in rows if kind(row) != "other tool")
    given = {flag.removeprefix("no_") for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)}
    assert given - known - docker - cluster - package == set()


# Where a page's flags are, if the row names no template.
TABLES = {
    "transformers.Trainer": ("lora_finetune", "image_classification"),
    "TRL": ("lora_finetune", "dpo", "grpo"),
    "axolotl": ("lora_finetune",),
    "LLaMA-Factory": ("lora_finetune",),
    "torchtune": ("lora_finetune",),
    "timm's train.py": ("image_classification",),
}


@pytest.mark.parametrize("title", TABLES)
def test_what_a_flag_is_called_here_is_an_option_of_its_template(title):
    """Also where a row gives it as a key of YAML, or as `the same names`."""
    (table,) = re.findall(rf"\n## {re.escape(title)}\n(.*?)(?=\n## |\Z)", COMING_FROM, re.DOTALL)
    looked_up = set()
    for row in re.findall(r"^\| (?!-)(.*) \|$", table, re.MULTILINE)[1:]:
        theirs, _, ours = row.partition(" | ")
        templates = re.findall(r"(\w+)\.py", ours) or TABLES[title]
        known = {name for template in templates for name in configs.flags(load_template(template).Config)}
        same = "the same name" in ours and "--" not in ours
        flags = set()
        for span in re.findall(r"`([^`]+)`", theirs if same else ours):
            flags |= set(re.findall(r"--(\w+)", span))
            if same or title in ("axolotl", "LLaMA-Factory"):
                flags |= set(re.findall(r"^\w+", span))
        flags.discard("mixed_precision")  # of `accelerate launch`
        assert flags <= known, (row, flags - known)
        looked_up |= flags
    assert len(looked_up) >= 5


def test_the_messages_and_exit_codes_are_those_of_the_source():
    source = " ".join(re.sub(r'"\n\s+f?"', "", path.read_text()) for path in (ROOT / "shared").rglob("*.py"))
    page = PAGES["docs/troubleshooting.md"]
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")][1:]
    spans = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    others = "(?i)addr|DataLoader|ProcessError|FailedError|SignalException|KeyboardInterrupt|values were not passed|config"
    others += "|Watchdog|deterministic implementation|No working C|find C compiler"
    ours = [text for text in spans if not re.search(others, text)]
    assert len(ours) >= 7 and [text for text in ours if text.strip(" .") not in source] == []
    codes = set(re.findall(r"exit_code = (\d+)", source)) | {"0"}
    assert codes == set(re.findall(r"^\| (\d+) \|", PAGES["docs/resuming.md"], re.MULTILINE))


def test_the_examples_of_records_are_read():
    examples = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGES["docs/data/chats.md"], re.DOTALL)]
    found = {forms.recognise(example, "docs/data") for example in examples}
    assert found == set(forms.FORMS)
    for example in examples:
        forms.read_example(example, forms.recognise(example, "docs/data"), "docs/data")
    section = PAGES["docs/data/pairs.md"]
    lines = "".join(re.findall(r"```jsonl\n(.*?)```", section, re.DOTALL)).splitlines()
    pairs = [json.loads(line) for line in lines]
    assert {preferences.recognise(pair, "docs/data") for pair in pairs} == set(preferences.FORMS)
    for pair in pairs:
        form, both = preferences.two_records(pair, preferences.recognise(pair, "docs/data"), "docs/data")
        assert len([forms.read_example(record, form, "docs/data") for record in both]) == 2


def launched_on(tokens: list[str]) -> list[int]:
    """How many processes that read data it may find."""
    tokens = [part for token in tokens for part in token.split("=", 1)]
    value = dict(itertools.pairwise(tokens))
    if "sbatch" in tokens:
        (default,) = re.findall(r"#SBATCH --gpus-per-node=(\d+)", (ROOT / "jobs/slurm.sh").read_text())
        return [int(value.get("--nodes", 1)) * (int(value.get("--gpus-per-node", default)) or 1)]  # no GPU: one process
    number = value.get("--num_processes")
    if number is None and "--config_file" in value:
        number = yaml.safe_load((ROOT / value["--config_file"]).read_text())["num_processes"]
    return [1, 2, 4, 8] if number is None or "$" in str(number) else [int(number)]


USERS_FILES = [
    "names.jsonl",
    "train.conll",
    "valid.conll",
    "chats.jsonl",
    "more.jsonl",
    "pairs.jsonl",
    "problems.jsonl",
    "reviews.csv",
    "corpus/a.txt",
    "data/a.txt",
]
USERS_FILES += [f"{folder}/{split}.jsonl" for folder in ("news", "headlines") for split in ("train", "validation")]
USERS_FILES += ["photos/cat/1.jpg", "digits/train/3/1.png"]


@pytest.mark.parametrize("line", LAUNCHES)
def test_a_launch_is_understood_and_its_global_batch_divides_by_its_processes(line, tmp_path, monkeypatch):
    for name in USERS_FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("-")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    tokens = [{"/data": "data"}.get(token, token) for token in shlex.split(line)]
    script = next(i for i, token in enumerate(tokens) if re.fullmatch(r"templates/\w+\.py", token))
    name = Path(tokens[script]).stem
    if "launch" in tokens:
        launcher = tokens[tokens.index("launch") + 1 : script + 1]
        given = [re.sub(r"\$[({][^)}]*[)}]", "1", token) for token in launcher]  # ${GPUS:-1}
        assert launch_command_parser().parse_args(given).training_script == tokens[script]
    template = load_template(name)
    monkeypatch.setattr(ranks, "_pipeline_ranks", 1)  # which a pipeline's Config sets
    for processes in launched_on(tokens[:script]):
        if processes > 1 or name != "pretrain_pipeline":
            monkeypatch.setenv("WORLD_SIZE", str(processes))
            batch = configs.parse(template.Config, tokens[script + 1 :]).batch
            rows, accumulation = batch.micro_batch()
            assert (rows >= 1 and accumulation >= 1) or batch.global_batch_size == 0  # by the data, and divides then


@pytest.mark.parametrize("part", parts("shared"))
def test_a_command_of_the_package_has_the_flags_that_are_given_to_it(part):
    name, *given = shlex.split(part)[3:]
    source = commands()[name].read_text()
    given = list(itertools.takewhile(lambda token: token != "--", given)) if name != "run" else []
    flags = [token.removeprefix("--") for token in given if token.startswith("--")]
    flags = [flag for flag in flags if flag != "config"]  # which configs.parse reads
    assert [flag for flag in flags if f'"--{flag}"' not in source and f"\n    {flag}: " not in source] == []


# Slow: what is written is given -----------------------------------------------------------------------------------------


# What stands for a user's models and data, and the words for it on the pages. There is no network here:
# tests/extras/test_remote.py reads such files from servers of its own.
STANDS_FOR = {
    "tiny_model": "meta-llama/Llama-3.1-8B meta-llama/Llama-3.1-8B-Instruct Qwen/Qwen3-VL-8B-Instruct runs/sft/final "
    "google-bert/bert-base-uncased news/smollm2 headlines/minilm Qwen/Qwen3-0.6B Qwen/Qwen3-8B",
    "masked": "answerdotai/ModernBERT-base",
    "scorer": "runs/reward/final",
    "instruct": "Qwen/Qwen2.5-1.5B-Instruct",
    "convnext": "facebook/convnext-tiny-224",
    "chats.jsonl": "chats.jsonl news/train.jsonl https://example.com/chats.jsonl.gz",
    "more.jsonl": "more.jsonl news/validation.jsonl",
    "pairs.jsonl": "pairs.jsonl",
    "problems.jsonl": "problems.jsonl",
    "names.jsonl": "names.jsonl train.conll valid.conll",
    "reviews.csv": "reviews.csv headlines/train.jsonl headlines/validation.jsonl",
    "corpus/text.jsonl": "s3://bucket/a.parquet s3://bucket/b.parquet",
    "corpus": "corpus/ /data",
    "images": "photos/ digits/train",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_model, user_files, text_file, image_folder, architectures):
    """A folder with the keys of STANDS_FOR."""
    folder = shutil.copytree(user_files, tmp_path_factory.mktemp("worlds") / "world")
    save_classifier(architectures / "convnext", folder / "convnext")
    ConvNextImageProcessor(size={"shortest_edge": 16}, crop_pct=1.0).save_pretrained(folder / "convnext")
    shutil.copytree(text_file.parent, folder / "corpus")
    (folder / "masked").mkdir()
    save_bert(folder / "masked", BertForMaskedLM, cut=True)
    shutil.copytree(tiny_model, folder / "scorer")
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).save_pretrained(folder / "scorer")
    shutil.copytree(image_folder, folder / "images")
    shutil.copy(folder / "chats.jsonl", folder / "more.jsonl")
    for name in ("tiny_model", "instruct"):
        shutil.copytree(tiny_model, folder / name)
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    (folder / "instruct/chat_template.jinja").write_text(template)
    return folder


def in_the_world(tokens: list[str], world: Path) -> list[str]:
    """Words of the pages as what stands for them."""
    stands_for = {word: str(world / name) for name, words in STANDS_FOR.items() for word in words.split()}
    return [stands_for.get(token, token) for token in tokens]


def small(tokens: list[str], world: Path, folder: Path, port: int = 0) -> list[str]:
    """The arguments of `accelerate launch`, for here."""
    tokens = in_the_world(tokens, world)
    for i, token in enumerate(tokens[:-1]):
        if token in SMALL:
            tokens[i + 1] = str(SMALL[token])
        elif token == "--num_train_epochs":
            tokens[i : i + 2] = ["--max_steps", "2"]
        elif token == "--output_dir":
            tokens[i + 1] = str(folder / "run")
        elif token == "--mirror_to":
            tokens[i + 1] = str(folder / "mirror")
        elif token == "--config_file":  # of two machines, one here
            tokens[i + 1] = tokens[i + 1].replace("multi_node_ddp", "ddp")
    script = next(i for i, token in enumerate(tokens) if token.endswith(".py"))
    launcher, given = tokens[:script], tokens[script + 1 :]
    for flag in ("--machine_rank", "--main_process_ip"):
        if flag in launcher:
            del launcher[launcher.index(flag) : launcher.index(flag) + 2]
    if "--mixed_precision" not in launcher:
        launcher += ["--mixed_precision", "no"]
    launcher += ["--main_process_port", str(port)] if "--config_file" in launcher else []
    extra = {"--output_dir": str(folder / "run"), "--report_to": "none", "--global_batch_size": "8"}
    extra |= {} if {"--max_steps", "--max_tokens"} & set(given) else {"--max_steps": "2"}
    template = Path(tokens[script]).stem
    short, few = {"--seq_length": "64"}, {"--eval_samples": "4"}
    of_template = dict.fromkeys(("lora_finetune", "full_finetune", "dpo", "distill"), short | few | {"--show_answers": "0"})
    of_template |= dict.fromkeys(("text_classification", "token_classification"), short) | {"pretrain": short | few}
    of_template |= {"grpo": {"--group_size": "2", "--eval_answers": "4", "--max_new_tokens": "8"}}
    of_template |= {"image_classification": {"--image_size": "16"}}
    extra |= of_template.get(template, few)
    extra |= {"--config_overrides": SHAPE} if template == "pretrain" and "--model_name_or_path" not in given else {}
    given += [token for flag, value in extra.items() if flag not in given for token in (flag, value)]
    return [*launcher, str(ROOT / tokens[script]), *given]


def launch(tokens: list[str], world: Path, folder: Path) -> str:
    code, output = LAUNCHER.run(small(tokens, world, folder, free_port()), dict(os.environ), cwd=ROOT)
    assert code == 0, output
    return output


def arguments(part: str) -> list[str]:
    return shlex.split(part[part.index("accelerate launch ") :])[2:]


# Once each, of those that are the same here. tests/promises/test_lora_finetune.py launches the first, too.
DIFFERENT = {tuple(small(arguments(part), Path("a"), Path("b"))): part for part in parts("launch")}


@pytest.mark.slow
@pytest.mark.parametrize("part", [part for part in DIFFERENT.values() if part not in FIRST])
def test_a_launch(part, world, tmp_path):
    output = launch(arguments(part), world, tmp_path)
    if "--preprocess_only" in part:
        assert "prepared" in output and not (tmp_path / "run/final").exists(), output
    else:
        assert (tmp_path / "run/final").is_dir() and (tmp_path / "run/curves.png").exists()


AFTER_TRAINING = re.findall(r"```python\n(.*?)```", PAGES["docs/after_training.md"], re.DOTALL)


@pytest.mark.slow
def test_images_without_labels_are_classified_as_the_page_says(image_folder, tmp_path, monkeypatch):
    flags = ("--train_dir", image_folder, "--image_size", 32, "--max_steps", 3, "--global_batch_size", 16)
    run_here("image_classification", *flags, "--report_to", "none", "--output_dir", tmp_path / "runs/photos")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(image_folder / "val/cat", tmp_path / "new")
    shutil.copy(next((tmp_path / "new").iterdir()), tmp_path / "new/1.png")
    _, classify, with_onnx = AFTER_TRAINING
    made = {}
    exec(classify, made)
    exec(with_onnx, made)
    _, *lines = [line.split(",") for line in (tmp_path / "predictions.csv").read_text().splitlines()]
    assert len(lines) == len([*(tmp_path / "new").iterdir()])
    found = {name: (said, float(share)) for name, said, share in lines}
    shares = made["shares"]
    assert found["new/1.png"] == (made["names"][shares.argmax()], pytest.approx(shares.max(), abs=1e-4))


@pytest.mark.slow
def test_a_model_is_talked_to_as_the_page_says(tiny_model, chat_file, tmp_path, monkeypatch, capsys):
    """The adapter in the page's Python, and merged/ behind the page's server, give the same answer."""
    flags = ("--model_name_or_path", tiny_model, "--train_file", chat_file, "--merge_adapter", "--seq_length", 64)
    flags += ("--max_steps", 8, "--learning_rate", 1e-2, "--eval_samples", 4, "--show_answers", 0, "--report_to", "none")
    run_here("lora_finetune", *flags, "--output_dir", tmp_path / "runs/chat")
    monkeypatch.chdir(tmp_path)
    made = {}
    exec(AFTER_TRAINING[0], made)
    tokens = made["model"].generate(**made["chat"], max_new_tokens=20)[0, made["chat"]["input_ids"].shape[1] :]
    (command,) = [part for part in PARTS if part.startswith("transformers serve runs/chat/")]
    _, *arguments = shlex.split(command.removesuffix(" &"))
    url = f"http://localhost:{(port := free_port())}"
    serve = [sys.executable, "-m", "transformers.cli.transformers", *arguments, "--port", str(port)]
    (request,) = [part for part in PARTS if part.startswith("curl http://localhost")]
    message = json.loads(shlex.split(request)[-1]) | {"max_tokens": 20}
    post = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(message).encode())
    post.add_header("Content-Type", "application/json")
    with subprocess.Popen(serve) as server:
        try:
            while server.poll() is None:  # pytest's timeout ends it
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                    break
                time.sleep(0.5)
            answer = json.load(urllib.request.urlopen(post))["choices"][0]["message"]["content"]
        finally:
            server.terminate()
    expected = made["tokenizer"].decode(tokens, skip_special_tokens=True).strip()
    assert answer.strip() == expected != ""
    monkeypatch.setattr(sys, "argv", ["ask", "runs/chat", "Hello", "--max_new_tokens", "20"])
    ask.main()
    base, tuned = capsys.readouterr().out.removeprefix("--- base\n").split("--- chat\n")
    assert tuned.strip() == expected != base.strip()


@pytest.mark.slow
@pytest.mark.parametrize("part", [p for p in parts("shared") if p.split()[3] in ("new", "plan")])
def test_a_command_of_the_package(part, world, tmp_path):
    words = {"../my-project": str(tmp_path / "my-project"), "../upgrade/my-project": str(tmp_path / "upgraded")}
    tokens = [words.get(token, token) for token in in_the_world(shlex.split(part)[1:], world)]
    done = python(*tokens)
    assert done.returncode == 0 and done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("part", parts("container"))
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
        launch(given[2:], world, tmp_path)


def test_the_site_builds_and_its_links_lead_somewhere(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        for picture in re.findall(r'(?:src|srcset)="([^":]+\.(?:png|svg))"', page.read_text()):
            assert (page.parent / picture).resolve().is_file(), (page, picture)
    pages = {str(page.parent.relative_to(tmp_path)) for page in tmp_path.rglob("index.html")}
    assert {page[len("docs/") : -len(".md")] for page in PAGES if page.startswith("docs/")} <= pages
