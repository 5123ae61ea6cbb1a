"""Lint, format and types, known vulnerabilities of what is installed, and the README against the files."""

import importlib.util
import json
import re
import subprocess
import sys
import warnings
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from tests.conftest import ROOT


@pytest.mark.parametrize(
    "arguments", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)], ids=lambda a: "-".join(a[:2])
)
def test_clean(arguments):
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def installed() -> dict[str, str]:
    """Name and version of what requirements.txt has installed, and what that has."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = [line.split("#")[0].strip() for line in lines if line[:1].isalpha()]
    found: dict[str, str] = {}
    while wanted:
        requirement = Requirement(wanted.pop())
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another platform
            continue
        found[name] = package.version.split("+")[0]  # torch's +cpu is no version of its own to an audit
        wanted += package.requires or []
    return found


def test_no_dependency_has_a_known_vulnerability(tmp_path):
    """Fails where a newer version mends it: then a pin here has to be raised, and somebody has to see that.

    Where none does yet, a warning: a test that stays red with nothing to be done about it hides the next failure.
    """
    if not importlib.util.find_spec("pip_audit"):
        pytest.skip("pip-audit is not installed")
    packages = installed()
    assert {"torch", "transformers", "jinja2", "urllib3"} <= packages.keys()  # also what is not named in requirements.txt
    pins = tmp_path / "installed.txt"
    pins.write_text("".join(f"{name}=={version}\n" for name, version in sorted(packages.items())))
    arguments = ["--format", "json", "--progress-spinner", "off", "--no-deps", "--disable-pip", "--timeout", "10"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip_audit", *arguments, "-r", str(pins)], capture_output=True, text=True, timeout=300
        )
        audited = [d for d in json.loads(done.stdout)["dependencies"] if "vulns" in d]
    except subprocess.TimeoutExpired:
        pytest.skip("the audit did not answer within 5 minutes")
    except ValueError:
        pytest.skip(f"the audit cannot be reached: {(done.stderr.strip().splitlines() or ['no answer'])[-1][:200]}")
    if len(audited) < len(packages) / 2:
        pytest.skip(f"the index knows {len(audited)} of {len(packages)} packages: it has no audit")
    found = [(f"{d['name']} {d['version']}: {v['id']}", v["fix_versions"]) for d in audited for v in d["vulns"]]
    for text, fixed in found:
        if not fixed:
            warnings.warn(f"known vulnerability without a remedy: {text}", stacklevel=1)
    assert [f"{text}, mended in {', '.join(fixed)}" for text, fixed in found if fixed] == []


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ({"vulns": [{"id": "PYSEC-1", "fix_versions": ["9"]}]}, AssertionError),
        ({"vulns": [{"id": "PYSEC-1", "fix_versions": []}]}, UserWarning),
        ({"vulns": []}, None),
        ({"skip_reason": "Dependency not found"}, pytest.skip.Exception),
        (None, pytest.skip.Exception),
    ],
)
def test_what_an_audit_answers_is_understood(tmp_path, monkeypatch, answer, outcome):
    rows = [{"name": name, "version": version} | (answer or {}) for name, version in installed().items()]
    text = json.dumps({"dependencies": rows}) if answer else ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, text, "ConnectionError: x\n"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if outcome is None:
            test_no_dependency_has_a_known_vulnerability(tmp_path)
        else:
            with pytest.raises(outcome):
                test_no_dependency_has_a_known_vulnerability(tmp_path)


def test_every_file_the_readme_names_exists():
    readme = (ROOT / "README.md").read_text()
    names = set(re.findall(r"(?:templates|accelerate_configs|benchmarks|shared|tests)/[\w./-]*\w", readme))
    assert len(names) >= 8
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_every_flag_the_readme_names_exists():
    from shared.config import parse as configs
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
        "parallelism_config_dp_shard_size",
        "time",  # sbatch's
        "gpus",
        "gpu_memory",
        "main_process_port",
        *("build", "read", "shm", "stop", "tmpfs", "user", "nodes"),  # of docker (their first words) and sbatch
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
