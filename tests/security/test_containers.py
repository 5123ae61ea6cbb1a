"""Containers and clusters give nothing away, and take nothing along."""

import re
import subprocess

import yaml

from tests.conftest import ROOT


def documents(name: str) -> list[dict]:
    return list(yaml.safe_load_all((ROOT / f"jobs/{name}.yaml").read_text()))


def test_pods_have_no_token_and_talk_only_to_pods_of_their_job():
    for name in ("kubernetes", "kubernetes_multi_node"):
        (job,) = (d for d in documents(name) if d["kind"] == "Job")
        assert job["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    (policy,) = (d for d in documents("kubernetes_multi_node") if d["kind"] == "NetworkPolicy")
    pods = {"matchLabels": {"job-name": job["metadata"]["name"]}}
    rules = policy["spec"]
    assert rules["podSelector"] == pods and rules["policyTypes"] == ["Ingress", "Egress"]
    assert rules["ingress"] == [{"from": [{"podSelector": pods}]}]
    own, names = rules["egress"]
    assert own == {"to": [{"podSelector": pods}]} and {port["port"] for port in names["ports"]} == {53}


def test_only_kinds_of_files_that_the_image_needs_get_into_it():
    """A key, a token or a data file beside the source stays out."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    wild = {r"\*\*/": "(.*/)?", r"\*": "[^/]*"}

    def included(path: str) -> bool:
        result = True
        for pattern in patterns:  # the last one that matches decides; `*` takes folders with all that is in them
            plain = re.escape(pattern.removeprefix("!"))
            for old, new in wild.items():
                plain = plain.replace(old, new)
            if re.fullmatch(f"{plain}(/.*)?", path):
                result = pattern.startswith("!")
        return result

    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    copied = ("shared/", "templates/", "tools/", "accelerate_configs/")
    needed = {f for f in tracked if f.startswith(copied) and "README" not in f}
    assert {f for f in tracked if included(f)} == needed | {"requirements.txt", "requirements.lock"}
    strangers = "templates/id_rsa shared/hf_token.txt shared/demo/chats.jsonl shared/.env.py accelerate_configs/key.pem .env"
    assert not any(included(path) for path in [*strangers.split(), "shared/demo/tiny-llama/key.bin", "outputs/x.py"])


def test_the_lock_holds_what_requirements_name():
    """Made anew by: grep -v '^-e' requirements.txt | uv pip compile - --universal --python-version 3.11
    --generate-hashes -o requirements.lock
    """
    pins = set(re.findall(r"^[\w-]+==\S+", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    lock = (ROOT / "requirements.lock").read_text()
    locked = re.findall(r"^([\w.-]+==\S+)(?: ;.*?)? \\\n    --hash=sha256:[0-9a-f]{64}", lock, re.MULTILINE)
    assert {pin.lower() for pin in pins} <= set(locked) and len(locked) == len(re.findall("^[a-z].*==", lock, re.MULTILINE))
    assert "://" not in lock
