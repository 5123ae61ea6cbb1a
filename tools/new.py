"""Make a new project from templates. It runs at once and holds only the files that it needs.

python -m shared new lora_finetune ../my-project
python -m shared new pretrain lora_finetune ../my-project      # several templates in one project
python -m shared new lora_finetune ../my-project --with deepspeed vision     # or all; also later

Needs nothing but Python and, for the project's history, git.
"""

import argparse
import ast
import re
import shlex
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from shared import __version__
from shared.process.errors import ConfigError
from tools.extras import CONFIGS, EXTRAS, chosen, extra_files, useful

SOURCE = Path(__file__).resolve().parents[1]
PACKAGED = SOURCE.parent.name == "training_templates"  # installed, not a checkout
CALLED = "training-templates" if PACKAGED else "python -m shared"
INSTALL = (
    "install 'accelerate-training-templates[train]'"
    if PACKAGED
    else "pip install -r requirements.txt"
)
# Where a package is imported under another name than it is installed; scikit-learn brings scipy.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "scipy": "scikit-learn",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
COMMANDS = ("run", "verify_resume")  # of `python -m shared` in a project
# Launch configs that a template does not support.
UNFIT = {
    "grpo": "sequence_parallel",
    "image_classification": "deepspeed|tensor_parallel|sequence_parallel|offload",
    "pretrain_pipeline": "deepspeed|_parallel|offload|fsdp2|hsdp|fp8|single_gpu",
    "text_classification": "sequence_parallel",
    "token_classification": "sequence_parallel",
}
GITIGNORE = "__pycache__/\n*.pyc\n*.log\ncache/\noutputs/\nruns/\nwandb/\n.venv/\n"

_FEW = "--global_batch_size 4 --per_device_train_batch_size 2 --eval_samples 4"
_TINY = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=4,intermediate_size=128"
# Flags of a run that takes seconds on a CPU, without network.
FLAGS = {
    "pretrain": f"--eval_samples 4 --seq_length 64 --config_overrides {_TINY}",
    "pretrain_pipeline": f"--eval_samples 4 --seq_length 64 --config_overrides {_TINY}",
    "text_classification": "--seq_length 32 --validation_split_percentage 2",
    "token_classification": "--seq_length 32 --validation_split_percentage 2",
    "distill": f"--max_train_samples 60 --show_answers 0 --seq_length 128 {_FEW}",
    "dpo": f"--max_train_samples 60 --show_answers 0 --seq_length 128 {_FEW}",
    "grpo": f"--eval_answers 4 --show_answers 0 --group_size 2 {_FEW}",
    "lora_finetune": f"--show_answers 0 --seq_length 128 {_FEW}",
    "full_finetune": f"--show_answers 0 --seq_length 128 {_FEW}",
    "image_classification": (
        "--dataloader_num_workers 0 --global_batch_size 16 --per_device_train_batch_size 4"
    ),
}
ONE = "accelerate launch --config_file accelerate_configs/cpu.yaml"
TWO = (
    "accelerate launch --config_file accelerate_configs/ddp.yaml --mixed_precision no "
    "--main_process_port 0"
)


def templates() -> list[str]:
    """The names of all templates."""
    return sorted(path.stem for path in (SOURCE / "templates").glob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """The dotted name of every module that a file imports, and whether a function does so; for
    `from a import b`: a and a.b.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        # a library imports it
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("find_spec"):
            names = [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
        yield from ((name, node in inside) for name in names)


def closure(
    start: Iterable[Path], extras: Collection[str] = EXTRAS.keys()
) -> tuple[set[Path], set[str]]:
    """(these files and the files of `shared` that they import, directly or not; names of the
    packages that they import).

    Args:
        extras: that come along where a function asks for them.
    """
    found = set(start)
    packages = set[str]()
    queue = list(found)
    while queue:
        for name, in_function in imports(queue.pop()):
            first, *rest = name.split(".")
            if first != "shared":
                packages.add(first)
                continue
            if rest[:1] == ["extras"] and in_function and not {*rest[1:2]} <= {*extras}:
                continue
            for count in range(len(rest) + 1):
                place = SOURCE.joinpath(first, *rest[:count])
                new = {
                    file
                    for file in (place.with_suffix(".py"), place / "__init__.py")
                    if file.is_file()
                } - found
                found |= new
                queue += new
    return found, packages


def requirements(packages: set[str]) -> str:
    """The lines of requirements.txt for these packages, given by the names that are imported."""

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    wanted = {plain(DISTRIBUTIONS.get(module, module)) for module in packages}
    lines = (SOURCE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if "==" in line and plain(line.split("==")[0]) in wanted]
    return "\n".join(["# One consistent set: tested together.", *kept]) + "\n"


def script(name: str, names: tuple[str, ...]) -> str:
    """The file name of a template in a project: train.py if it is the only one."""
    return "train.py" if len(names) == 1 else f"{name}.py"


def build(names: tuple[str, ...], called: str, extras: Collection[str] = ()) -> dict[str, bytes]:
    """All files of a project by path; `called` names the project and its container.

    Args:
        extras: see `chosen`.

    Raises:
        ConfigError: there is no such template.
    """
    for name in names:
        if name not in templates():
            raise ConfigError(f"no template {name!r}: there is {', '.join(templates())}")
    extras = chosen(names, extras)
    serving = [
        SOURCE / "shared/__main__.py",
        *(SOURCE / f"shared/commands/{name}.py" for name in COMMANDS),
    ]
    asked = [file for extra in extras for file in extra_files(extra)]
    start = [*(SOURCE / f"templates/{name}.py" for name in names), *serving, *asked]
    paths, packages = closure(start, extras)
    fixed = ("commands/__init__.py", "extras/__init__.py", "config/other_programs.yaml")
    paths |= {SOURCE / "shared" / name for name in fixed}
    if any(
        "demo.MODEL" in (SOURCE / f"templates/{name}.py").read_text(encoding="utf-8")
        for name in names
    ):
        paths |= set((SOURCE / "shared/demo/tiny-llama").iterdir())
    if "distill" in names:
        paths |= set((SOURCE / "shared/demo/tiny-llama-tuned").iterdir())
    for config in (SOURCE / "accelerate_configs").iterdir():
        fits = not all(name in UNFIT and re.search(UNFIT[name], config.stem) for name in names)
        missing = [word for extra, word in CONFIGS.items() if extra not in extras]
        if fits and not any(word in config.stem for word in missing):
            paths.add(config)
    paths |= {*(SOURCE / "jobs").glob("*.*"), SOURCE / "Dockerfile", SOURCE / ".dockerignore"}
    changes = {
        f"templates/{name}.py": script(name if name in names else names[0], names)
        for name in templates()
    }
    changes |= {"755 templates templates": "755 *.py ./", "!templates/*.py\n": "!*.py\n"}
    changes |= {"COPY --chmod=755 tools tools\n": "", "!tools/*.py\n": ""}
    # containers and volumes
    changes |= {'"accelerate-templates': f'"{called}', '"templates': f'"{called}'}
    files = {}
    for path in sorted(paths):
        place = str(path.relative_to(SOURCE))
        content = path.read_bytes()
        if not place.startswith(("shared/", "accelerate_configs/")):
            for old, new in changes.items():
                content = content.replace(old.encode(), new.encode())
        files[changes.get(place, place)] = content
    files["shared/LICENSE"] = (SOURCE / "LICENSE").read_bytes()
    made = {"README.md": _readme(names, called, extras), "smoke_test.py": _smoke_test(names)}
    made |= {
        "requirements.txt": requirements(packages),
        ".gitignore": GITIGNORE,
        "AGENTS.md": _agents(names),
    }
    return files | {name: text.encode() for name, text in made.items()}


def first_run(names: tuple[str, ...]) -> str:
    """A command that trains the first script's demo on any machine."""
    if names[0] != "pretrain_pipeline":
        return f"accelerate launch {script(names[0], names)}"
    launch = "accelerate launch --config_file accelerate_configs/ddp.yaml --mixed_precision no"
    return f"ACCELERATE_USE_CPU=true {launch} {script(names[0], names)}"


def small_runs(template: str, script: str) -> list[str]:
    """Command lines that train a template's script on one process (a pipeline has more) and on two,
    within seconds.
    """
    launches = [TWO] if template == "pretrain_pipeline" else [ONE, TWO]
    return [f"{launch} {script} {FLAGS[template]}" for launch in launches]


def _readme(names: tuple[str, ...], called: str, extras: Collection[str]) -> str:
    left_out = sorted(useful(names) - {*extras})
    add = f"{CALLED} new {' '.join(names)} ../{called} --with"
    where = "in this folder" if PACKAGED else "in the templates' repository"
    rows = "".join(f"| {EXTRAS[name]} | `{add} {name}` |\n" for name in left_out)
    left_out_text = f"""
## Left out

What few runs need is not here. A run that asks for it ends at once with a line that says so. To add it, run {where}:

| what asks for it | the line that adds it |
|---|---|
{rows}
It adds files, and overwrites none that you have edited.
""" * bool(left_out)
    first = script(names[0], names)
    tree = ast.parse((SOURCE / "templates" / f"{names[0]}.py").read_text(encoding="utf-8"))
    defined = [
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name != "main"
    ]
    functions = ", ".join(f"`{name}`" for name in defined)
    return f"""# {called}

Made from {", ".join(names)} of the training templates. All of it is yours to change.

```bash
pip install -r requirements.txt
{first_run(names)}
```

This trains a small demo, offline, on any machine. `python {first} --help` lists the flags. On 8 GPUs:

```bash
accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 {first} --output_dir runs/first
```

The same command continues a run that was stopped or killed. With `python -m shared run` before it, the launcher's traceback
is left out.

## Edit

Start with these parts of {" and ".join(f"`{script(name, names)}`" for name in names)}:

- `Config`: settings, each one a flag;
- the step in `main`: loss, backward, clipping, update;
- what builds data and model, evaluates and saves: {functions}.

`docs/editing_the_step.md` in the templates' repository shows edits as diffs. `shared/` holds the parts that are tedious to
get right: the order of the data, gradient accumulation, checkpoints, logging.

Then check that a killed run still resumes exactly, first with small built-in runs, then with your own command, and that it
learns the same on every launch:

```bash
python smoke_test.py
python -m shared verify-launch -- accelerate launch {first}
python -m shared verify-resume -- accelerate launch {first} --learning_rate 1e-4
```
{left_out_text}
## Containers and clusters

```bash
docker build -t {called} .
mkdir -p outputs
docker run --gpus all --shm-size 8g --user "$(id -u):$(id -g)" -v "$PWD/outputs:/workspace/outputs" {called}
sbatch jobs/slurm.sh {first}
```

`jobs/` also has files for Kubernetes and Docker Compose.

## Upgrade

Git merges later changes of the templates into your files. Your edits stay, and conflicts are marked: see "Later improvements" in
`docs/copying.md` of the templates' repository{_commit()}. {"Anywhere" if PACKAGED else "There"}, `{CALLED} evaluate`
and `ask` take a run of this project, and `plan` predicts the GPU memory of language models.
What comes from the templates is under the Apache License 2.0: see `shared/LICENSE`.
"""


def _agents(names: tuple[str, ...]) -> str:
    """The notes for coding assistants, of what a project has: no docs/, no tests/."""
    lines = (SOURCE / "AGENTS.md").read_text(encoding="utf-8").splitlines(keepends=True)
    text = "".join(
        line for line in lines if not re.search("`docs/|^ruff |^pytest |shared audit", line)
    )
    first = script(names[0], names)
    for old, new in {"templates/lora_finetune.py": first, "lora_finetune": names[0]}.items():
        text = text.replace(old, new)
    scripts = ", ".join(f"`{script(name, names)}`" for name in names)
    return re.sub(r"`templates/\*\.py` \(.*?\)", scripts, text)


def _smoke_test(names: tuple[str, ...]) -> str:
    runs = [small_runs(name, script(name, names)) for name in names]
    # two lines each
    one, two = (
        "\n".join(each[place] for each in runs).replace(".py ", ".py \\\n  ") for place in (0, -1)
    )
    return f'''"""Check what edits can break: `python smoke_test.py`, or pytest. Minutes on two cores."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

# Small runs on the CPU. Add the flags that turn your edits on.
CHECKED = """
{one}
"""
RESUMED = """
{two}
"""


def prove(command: str, *proof: str) -> None:
    words = [sys.executable, "-m", "shared", *proof, "--", *shlex.split(command)]
    subprocess.run(words, check=True, cwd=Path(__file__).parent, env=os.environ | {{"ACCELERATE_USE_CPU": "true"}})


def test_edits_are_right() -> None:
    for command in CHECKED.strip().splitlines():
        prove(command, "check")


def test_a_killed_run_resumes_on_two_processes() -> None:
    for command in RESUMED.strip().splitlines():
        prove(command, "verify-resume", "--steps", "3")


if __name__ == "__main__":
    test_edits_are_right()
    test_a_killed_run_resumes_on_two_processes()
'''


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("templates", nargs="+", help=f"one or more of {', '.join(templates())}")
    parser.add_argument(
        "folder", type=Path, help="folder of the new project, empty or not there yet"
    )
    parser.add_argument(
        "--with",
        dest="extras",
        nargs="+",
        default=[],
        metavar="EXTRA",
        help=f"all, or some of {', '.join(EXTRAS)}; also for a project that is there",
    )
    options = parser.parse_args()
    folder = options.folder
    names = tuple(dict.fromkeys(options.templates))
    called = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "training"
    if options.extras and (folder / "shared").is_dir():
        return add(folder, names, called, options.extras)
    files = build(names, called, options.extras)
    create(folder, files)
    print(f"{folder}: {len(files)} files, {sum(map(len, files.values())) / 1e6:.1f} MB. Next:")
    print(
        f"  cd {shlex.quote(str(folder))} && pip install -r requirements.txt && {first_run(names)}"
    )
    print(
        "  git add -A && git commit -m templates && git branch templates    # in a first copy: git then "
        "shows your edits, and merges later templates"
    )


def put(path: Path, content: bytes) -> None:
    """Write a file of a project; a script gets the right to be executed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if content.startswith(b"#!"):
        path.chmod(path.stat().st_mode | 0o111)


def _commit() -> str:
    """The commit of the templates, for the README, or the package's version; empty without git or
    history.
    """
    if PACKAGED:
        return f", whose version {__version__} made this project"
    git = ["git", "-C", str(SOURCE), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
    return f", whose commit {commit} made this project" if commit else ""


def add(folder: Path, names: tuple[str, ...], called: str, extras: Collection[str]) -> None:
    """Add extras to a project that is there.

    Raises:
        ConfigError: a file that would be added is there, and is another.
    """
    without = build(names, called)
    new = {
        name: content
        for name, content in build(names, called, extras).items()
        if name not in without
    }
    edited = [
        name
        for name, content in new.items()
        if (folder / name).exists() and (folder / name).read_bytes() != content
    ]
    if edited:
        raise ConfigError(
            f"{folder / edited[0]} is there, and is not what would be added: nothing was added. "
            "Merge it by git: docs/copying.md, Later improvements"
        )
    for name, content in new.items():
        put(folder / name, content)
    needed = build(names, called, extras)["requirements.txt"].decode().splitlines()
    file = folder / "requirements.txt"
    present = file.read_text("utf-8").splitlines() if file.exists() else []
    lines = [line for line in needed if line not in present and "==" in line]
    if lines:
        file.write_text("\n".join([*present, *lines]) + "\n", "utf-8")
    there = [extra for extra in EXTRAS if any(path.exists() for path in _places(folder, extra))]
    readme = folder / "README.md"
    if readme.exists():  # its list of what is left out
        left_out = re.compile(rf"--with ({'|'.join(there)})` \|$")
        rows = readme.read_text("utf-8").splitlines(keepends=True)
        readme.write_text("".join(row for row in rows if not left_out.search(row)), "utf-8")
    print(f"{folder}: {len(new)} files added: {', '.join(sorted(new))}")
    for config in sorted(name for name in new if name.startswith("accelerate_configs/")):
        print(f"  accelerate launch --config_file {config} {script(names[0], names)}")
        print("  (with ACCELERATE_USE_CPU=true before it and --mixed_precision no: on CPUs)")
    if lines:
        print(f"  new in requirements.txt: {', '.join(lines)}")


def _places(folder: Path, extra: str) -> list[Path]:
    """Where an extra is in a project: a module, or a folder."""
    place = folder / "shared/extras" / extra
    return [place, place.with_suffix(".py")]


def create(folder: Path, files: dict[str, bytes]) -> None:
    """Write a project, and make it a git repository if it is not inside one.

    Raises:
        ConfigError: the folder is not empty, or cannot be written.
    """
    try:
        if folder.exists() and any(path.name != ".git" for path in folder.iterdir()):
            raise ConfigError(
                f"{folder} exists and is not empty: choose another folder, nothing is overwritten"
            )
        for name, content in files.items():
            put(folder / name, content)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from None
    git = ["git", "-C", str(folder)]
    if (
        shutil.which("git")
        and subprocess.run(
            [*git, "rev-parse", "--is-inside-work-tree"], capture_output=True
        ).returncode
    ):
        subprocess.run([*git, "init", "--quiet"], capture_output=True)
