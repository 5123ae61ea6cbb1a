"""benchmarks/gpu.py at toy size on a CPU: all rows work, so that a GPU's time is not spent on finding out."""

import json
import math
import os
import re
import subprocess
import sys

from tests.conftest import ROOT

# Why a row may have no figures here: packages that are not required, kernels that a CPU has not.
ABSENT = re.compile(r"needs (torchao|bitsandbytes|flash_attn)\b|(flex attention|attention of .*) has no .* on a CPU")


def benchmark(*arguments, **variables):
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", *arguments]
    done = subprocess.run(
        [str(part) for part in command], env=os.environ | variables, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(value):
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, float | int):
        yield value


def test_every_row_is_rehearsed(tmp_path):
    output = tmp_path / "gpu.json"
    names = [text.split(" s  ")[1] for text in benchmark("--list").splitlines()]
    assert len(names) == len(set(names)) > 40
    table = benchmark("--toy", "--output", output)
    assert all(f"| {name} |" in table for name in names)
    assert "FAIL" not in table
    rows = json.loads(output.read_text())["rows"]
    assert set(names) - set(rows) == {"resuming after a kill"}  # three launches; tests of verify-resume have them
    for name, outcome in rows.items():
        assert "figures" in outcome or ABSENT.match(outcome.get("skipped", "")), (name, outcome)
        assert "loss from whole logits" not in outcome.get("figures", {}).get("note", ""), (name, outcome)
        assert all(math.isfinite(number) for number in numbers(outcome)), (name, outcome)
    for name, strategy in (("FSDP2", "FSDP"), ("DDP", "DistributedDataParallel")):
        used = [outcome["figures"]["strategy"] for row, outcome in rows.items() if name in row]
        assert used and all(kind.startswith(strategy) for kind in used)

    # Some rows anew: the others stay.
    before = rows.pop("memory bandwidth")
    benchmark("--toy", "--only", "bandwidth", "--output", output)
    after = json.loads(output.read_text())["rows"]
    assert after.pop("memory bandwidth")["figures"] != before["figures"]
    assert after == rows


def test_a_row_that_fails_leaves_the_others(tmp_path):
    (tmp_path / "peft.py").write_text("raise RuntimeError('broken on purpose')\n")
    output = tmp_path / "gpu.json"
    table = benchmark("--toy", "--only", "bandwidth|^LoRA 1.2B, 4 x 2048$", "--output", output, PYTHONPATH=str(tmp_path))
    rows = json.loads(output.read_text())["rows"]
    assert rows["memory bandwidth"]["figures"]["tb_per_second"] > 0
    assert rows["LoRA 1.2B, 4 x 2048"]["failed"] == "RuntimeError: broken on purpose"
    assert "Traceback" in rows["LoRA 1.2B, 4 x 2048"]["log"]
    assert "failed: RuntimeError: broken on purpose" in table
