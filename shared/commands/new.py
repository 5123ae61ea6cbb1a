"""Make a new project from templates: it works at once and holds nothing that it does not need.

python -m shared new lora_finetune ../my-project
python -m shared new pretrain lora_finetune ../my-project      # several in one
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shared import __version__
from shared.commands.selftest import ALONE, FLAGS
from shared.commands.upgrade import BASE, ORIGIN, mergeable, put
from shared.process.errors import ConfigError

SOURCE = Path(__file__).resolve().parents[2]
COMMANDS = ("run", "verify_resume", "audit", "upgrade", "selftest")  # that serve a project; and plan, for language models
# Launch configs that a template does not support.
UNFIT = {
    "image_classification": {"tensor_parallel", "fsdp2_tensor_parallel", "fsdp2_offload"}
    | {"deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3_offload"},
    "pretrain_pipeline": {"single_gpu", "fsdp2", "hsdp", "multi_node_hsdp", "tensor_parallel", "fsdp2_tensor_parallel"}
    | {"fsdp2_offload", "fp8", "deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3_offload"},
}


def templates() -> list[str]:
    """The templates that there are, by name."""
    return sorted(path.stem for path in (SOURCE / "templates").glob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it, dotted; of `from a import b` also a.b, which may be one."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("find_spec"):  # another package imports it
            yield from (str(a.value) for a in node.args if isinstance(a, ast.Constant))


def closure(start: Iterable[Path]) -> tuple[list[Path], set[str]]:
    """(files of `shared` that these need, themselves left out; top-level names of all other packages)."""
    found: set[Path] = set()
    others: set[str] = set()
    queue = list(start)
    while queue:
        for name in imports(queue.pop()):
            parts = name.split(".")
            if parts[0] != "shared":
                others.add(parts[0])
                continue
            for count in range(1, len(parts) + 1):
                place = SOURCE.joinpath(*parts[:count])
                for file in (place.with_suffix(".py"), place / "__init__.py"):
                    if file.is_file() and file not in found:
                        found.add(file)
                        queue.append(file)
    return sorted(found), others


def requirements(packages: set[str]) -> str:
    """The lines of requirements.txt whose packages are among these top-level names, pins and comments kept."""
    by_module = importlib.metadata.packages_distributions()
    wanted = {_plain(name) for module in packages for name in (module, *by_module.get(module, ()))}
    lines = (SOURCE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if (m := re.match(r"([\w.-]+)==", line)) and _plain(m[1]) in wanted]
    return "\n".join(["# One consistent set: what was tested together.", *kept]) + "\n"


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Project:
    """The files of a new project, by their path in it."""

    names: tuple[str, ...]
    files: dict[str, bytes]
    origin: dict[str, Any]


def script(name: str, names: tuple[str, ...]) -> str:
    """What a template is called in a project: train.py if it is the only one."""
    return "train.py" if len(names) == 1 else f"{name}.py"


def build(names: tuple[str, ...], called: str) -> Project:
    """All files of a project of these templates, in memory; its containers are `called` so.

    Raises:
        ConfigError: there is no such template, or this copy of the package has none.
    """
    if not templates():
        raise ConfigError("the templates are not beside this package: run the command in their repository")
    for name in names:
        if name not in templates():
            raise ConfigError(f"no template {name!r}: there is {', '.join(templates())}")
    start = [SOURCE / "templates" / f"{name}.py" for name in names]
    main = SOURCE / "shared/__main__.py"
    commands = (*COMMANDS, "plan") if set(names) != {"image_classification"} else COMMANDS
    serving = [SOURCE / "shared/commands" / f"{name}.py" for name in commands]
    modules, packages = closure([*start, main, *serving])
    files = {script(name, names): _renamed(path.read_bytes(), name, names) for name, path in zip(names, start, strict=True)}
    paths = {*modules, main, *serving, SOURCE / "shared/__init__.py", SOURCE / "shared/commands/__init__.py"}
    if SOURCE / "shared/demo/__init__.py" in paths and "lora_finetune" in names:
        paths |= {path for path in (SOURCE / "shared/demo").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    elif "plan" in commands:
        paths.add(SOURCE / "shared/demo/tiny-llama/config.json")  # its default
    configs = (SOURCE / "accelerate_configs").glob("*.yaml")
    paths |= {path for path in configs if any(path.stem not in UNFIT.get(name, ()) for name in names)}
    files |= {str(path.relative_to(SOURCE)): path.read_bytes() for path in sorted(paths)}
    for path in sorted((SOURCE / "jobs").iterdir()):
        files[f"jobs/{path.name}"] = _named(path.read_text(encoding="utf-8"), names).encode()
    compose = files["jobs/compose.yaml"].decode()  # on one machine, projects share neither image nor volumes
    for of, common in (("name", "accelerate-templates"), ("image", "templates")):
        compose = compose.replace(f"{of}: {common}", f'{of}: "{called}"')
    files["jobs/compose.yaml"] = compose.encode()
    own = {"requirements.txt": requirements(packages), "README.md": _readme(names), "smoke_test.py": _smoke_test(names)}
    own |= {"Dockerfile": _dockerfile(names), ".dockerignore": _dockerignore(names), ".gitignore": GITIGNORE}
    files |= {name: text.encode() for name, text in own.items()}
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    return Project(names, files, {"templates": list(names), "source": str(SOURCE), "version": version(), "files": hashes})


def version() -> str:
    """Of this package, with the commit where it is a git checkout."""
    done = subprocess.run(["git", "-C", str(SOURCE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return f"{__version__}+{done.stdout.strip()}" if done.returncode == 0 else __version__


def write_origin(folder: Path, project: Project) -> None:
    """Note in the project where its files come from, and keep them as they came."""
    base = folder / BASE
    for name, content in project.files.items():
        if mergeable(content):
            (base / name).parent.mkdir(parents=True, exist_ok=True)
            (base / name).write_bytes(content)
    for path in [path for path in base.rglob("*") if path.is_file()]:
        if str(path.relative_to(base)) not in project.files:
            path.unlink()
    (folder / ORIGIN).write_text(json.dumps(project.origin, indent=1) + "\n", encoding="utf-8")


# Files of a project's own ------------------------------------------------------------------------------------------------


def _renamed(content: bytes, name: str, names: tuple[str, ...]) -> bytes:
    """Its launch lines say what it is called now."""
    return content.replace(f"templates/{name}.py".encode(), script(name, names).encode())


def _launches(names: tuple[str, ...]) -> tuple[str, str, str]:
    """(what goes before a first command, that command, one for two processes) of a project, on a CPU too."""
    first = script(names[0], names)
    two = f"accelerate launch --config_file accelerate_configs/ddp.yaml --mixed_precision no --num_processes 2 {first}"
    if names[0] == "pretrain_pipeline":
        return "ACCELERATE_USE_CPU=true ", two, two
    return "", f"accelerate launch {first}", two


def _readme(names: tuple[str, ...]) -> str:
    scripts = [script(name, names) for name in names]
    first = scripts[0]
    before, run, two = _launches(names)
    places = (
        "`Config`, `build_datasets` (or `build_loaders`), `build_model`, `evaluate`; `batch_loss` and the loop in `main`"
    )
    edits = "\n".join(f"- `{s}`: {places}" for s in scripts)
    return f"""# Training

Made from {", ".join(names)} of the training templates. All of it is yours to change.

Run it, with no argument, on a laptop too:

```bash
pip install -r requirements.txt
{before}{run}
```

On GPUs, say where it runs with a launch config, and what is learned with flags (`python {first} --help`):

```bash
accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 {first} --output_dir runs/first
```

The same command again continues a run that was killed. Rehearse several processes on the CPU:

```bash
ACCELERATE_USE_CPU=true {two} --max_steps 3
```

## Where to edit first

{edits}

`shared/` holds what is tedious to get right: order of data, accumulation, checkpoints, logging.

## Test

```bash
python smoke_test.py
{before}python -m shared verify-resume -- {run}
```

The first trains some steps, is killed and resumes. The second does so with your own command, and says what is not as it
would have been.

## Container and cluster

```bash
docker build -t training . && docker run training selftest
mkdir -p outputs
docker run --gpus all --shm-size 8g --user "$(id -u):$(id -g)" -v "$PWD/outputs:/workspace/outputs" training
sbatch jobs/slurm.sh {first}
```

`jobs/` also holds what Kubernetes and Docker Compose are given.

## Later improvements

`python -m shared upgrade --check` lists what has changed in the templates since; without `--check` it is merged into your
files, your edits stay, and conflicts are marked as git marks them.
"""


def _smoke_test(names: tuple[str, ...]) -> str:
    runs = "".join(f"    {script(name, names)!r}: ({FLAGS[name]!r}, {ALONE.get(name, (1, 2))}),\n" for name in names)
    return f'''"""Each script trains, is killed and resumes, small and without network: `python smoke_test.py`, or pytest."""

from shared.commands.selftest import prove
from shared.process.signals import clean_exit

# Flags of a small run, and on how many CPU processes: yours to change with the script.
RUNS = {{
{runs}}}


def test_trains_and_resumes() -> None:
    prove(RUNS)


if __name__ == "__main__":
    with clean_exit():
        test_trains_and_resumes()
'''


def _dockerfile(names: tuple[str, ...]) -> str:
    text = (SOURCE / "Dockerfile").read_text(encoding="utf-8")
    scripts = " ".join(script(name, names) for name in names)
    text = _named(text.replace("COPY templates templates", f"COPY {scripts} smoke_test.py ./"), names)
    text = text.replace("One image for every template", "An image for training")
    return text.replace("the LoRA template's offline demo", "the script without arguments")


def _named(text: str, names: tuple[str, ...]) -> str:
    """A file that names templates, with this project's scripts in their place."""
    for name in templates():
        text = text.replace(f"templates/{name}.py", script(name, names) if name in names else script(names[0], names))
    if names == ("pretrain_pipeline",):  # which takes no sharded data parallelism, and two processes at least
        text = re.sub(r" *- --parallelism_config_\w+=\d+.*\n", "", text.replace("multi_node_hsdp", "multi_node_ddp"))
        text = text.replace("${GPUS:-1}", "${GPUS:-2}")
    return text


def _dockerignore(names: tuple[str, ...]) -> str:
    text = (SOURCE / ".dockerignore").read_text(encoding="utf-8")
    return text.replace(
        "!templates\n", "".join(f"!{name}\n" for name in [*(script(n, names) for n in names), "smoke_test.py"])
    )


GITIGNORE = "__pycache__/\n*.pyc\noutputs/\nruns/\nwandb/\n.venv/\n"


# The command -----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared new", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("templates", nargs="+", help=f"one or more of {', '.join(templates())}")
    parser.add_argument("folder", type=Path, help="of the new project; it must not hold anything yet")
    options = parser.parse_args()
    called = re.sub(r"[^a-z0-9]+", "-", options.folder.resolve().name.lower()).strip("-") or "training"
    made = build(tuple(dict.fromkeys(options.templates)), called)
    create(options.folder, made)
    size = sum(map(len, made.files.values()))
    before, run, _ = _launches(made.names)
    print(f"{options.folder}: {len(made.files)} files, {size / 1e6:.1f} MB. Next:")
    print(f"  cd {shlex.quote(str(options.folder))} && pip install -r requirements.txt && {before}{run}")


def create(folder: Path, made: Project) -> None:
    """Write a project.

    Raises:
        ConfigError: the folder holds something, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty: nothing is ever overwritten, so choose another folder")
    try:
        for name, content in made.files.items():
            put(folder / name, content)
        write_origin(folder, made)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror})") from None
    if shutil.which("git"):
        git = partial(subprocess.run, check=False, capture_output=True)
        if git(["git", "-C", str(folder), "rev-parse", "--is-inside-work-tree"]).returncode:  # a repository in one breaks it
            git(["git", "-C", str(folder), "init", "--quiet"])
