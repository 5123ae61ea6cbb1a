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

from tests.conftest import ROOT, slow


@pytest.mark.parametrize(
    "arguments", [("ruff", "check", "."), ("ruff", "format", "--check", "."), slow(("mypy",))], ids=lambda a: "-".join(a[:2])
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
    command = [sys.executable, "-m", "pip_audit", *arguments, "-r", str(pins)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        audited = [d for d in json.loads(done.stdout)["dependencies"] if "vulns" in d]
    except (subprocess.TimeoutExpired, ValueError):
        pytest.skip("the audit cannot be reached")
    if len(audited) < len(packages) / 2:
        pytest.skip(f"the index knows {len(audited)} of {len(packages)} packages: it has no audit")
    found = [(f"{d['name']} {d['version']}: {v['id']}", v["fix_versions"]) for d in audited for v in d["vulns"]]
    for text, fixed in found:
        if not fixed:
            warnings.warn(f"known vulnerability without a remedy: {text}", stacklevel=1)
    assert [f"{text}, mended in {', '.join(fixed)}" for text, fixed in found if fixed] == []


# Each folder of shared/ imports from its own floor's folder and from lower floors alone.
FLOORS = [("process",), ("config",), ("data", "demo"), ("parallel",), ("models",), ("training",), ("text", "images")]
FLOORS += [("run",), ("answers",), ("rollouts",)]
ONLY = {"torchvision": ("images", "extras"), "torchao": ("extras",)}
ONLY |= dict.fromkeys(("peft", "bitsandbytes"), ("models", "extras"))


def test_imports_point_down():
    floor = {folder: number for number, folders in enumerate(FLOORS) for folder in folders}
    for path in (ROOT / "shared").rglob("*.py"):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        assert not re.search(r"^\s*(from|import) templates", text, re.M), name
        own = path.relative_to(ROOT / "shared").parts[0]
        for package, places in ONLY.items():
            assert own in places or not re.search(rf"^(from|import) {package}\b", text, re.M), (name, package)
        for folder in re.findall(r"^\s*from shared\.(\w+)", text, re.M) if own in floor else ():
            assert folder in (own, "extras") or floor[folder] < floor[own], f"{name} imports {folder}"
    for path in (ROOT / "templates").glob("*.py"):
        assert not re.search(r"^\s*(from|import) templates", path.read_text(), re.M), path
