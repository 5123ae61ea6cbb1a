"""Each benchmark of speed at its smallest size: all rows are there and finite, and all contenders did the same work.

How fast anything is decides nothing here. A script that finds that two contenders did not do the same ends with an error.
"""

import importlib
import importlib.util
import json
import math
import os
import re
import sys

import pytest

from shared.config.parse import parse
from tests.conftest import LAUNCHER, ROOT, load_template, python

SHAPE = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,num_key_value_heads=2,intermediate_size=32"
PARTS = (
    *("next window", "seeds", "learning rate", "accumulate", "forward", "backward", "clip", "finite?", "update"),
    *("count and log", "stop, evaluate, save?"),
)


@pytest.fixture
def run_benchmark(monkeypatch, tmp_path, capsys):
    """Run a script's `main` with its processes forked (see launcher.py): the lines of its table, and its JSON."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    rounds = importlib.import_module("rounds")

    def forked(arguments, environment):
        done = python(*arguments, env=dict(environment))
        assert done.returncode == 0, done.stdout + done.stderr

    monkeypatch.setattr(rounds, "run", forked)

    def run(name, *arguments):
        output = tmp_path / "figures.json"
        flags = ["--rounds", 1, "--output", output, *arguments]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, flags)])
        importlib.import_module(name).main()
        text = capsys.readouterr().out
        content = json.loads(output.read_text())
        assert {"torch", "device", "date"} <= content["about"].keys()
        lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
        assert len({len(line) for line in lines}) == 1, text
        numbers = [value for row in content["rows"] for value in row.values() if isinstance(value, float)]
        assert numbers and all(map(math.isfinite, numbers))
        return [line[0] for line in lines[1:]], content["rows"]

    return run


@pytest.mark.slow
def test_peers_pretrain(run_benchmark, text_file):
    flags = f"--train_file {text_file} --vocab_size 320 --seq_length 16 --config_overrides {SHAPE}"
    lines, rows = run_benchmark("peers_pretrain", "--steps", 2, "--precisions", "no", "--flags", flags)
    assert lines == ["template, fp32", "raw loop, fp32", "Trainer, fp32"]
    assert max(row["loss_difference"] for row in rows) < 1e-5


@pytest.mark.slow
def test_peers_lora(run_benchmark, tiny_model):
    lines, rows = run_benchmark("peers_lora", "--steps", 3, "--model_name_or_path", tiny_model, "--rows", 1, "--length", 256)
    assert lines == ["template", "raw packed", "raw padded", "TRL packed", "TRL padded"]
    measured = {row["contender"]: row for row in rows}
    assert ("TRL packed" in measured) == bool(importlib.util.find_spec("trl"))
    assert measured["template"]["loss_difference"] < 1e-5
    assert measured["template"]["waste"] == measured["raw packed"]["waste"] < measured["raw padded"]["waste"]


@pytest.mark.slow
def test_peers_image(run_benchmark, architectures):
    size = ("--images", 20, "--image_size", 16, "--batch_size", 4, "--workers", 1, "--learning_rate", 0.01)
    lines, _ = run_benchmark("peers_image", "--steps", 24, *size, "--model_folder", architectures / "resnet")
    loops, loaders = ["template", "plain", "Trainer", "model alone"], ["template's loader", "plain's loader"]
    assert sorted(lines) == sorted([*loops, *loaders, "timm", "timm's loader"])


@pytest.mark.slow
def test_overhead(run_benchmark):
    lines, rows = run_benchmark("overhead", "--steps", 8)
    assert [line for line in lines if not line.startswith("- ")] == [row["contender"] for row in rows]
    assert [line.removeprefix("- ") for line in lines if line.startswith("- ")] == list(PARTS)
    assert max(row["difference"] for row in rows) < 1e-5


@pytest.mark.slow
def test_startup(run_benchmark):
    flags = "--global_batch_size 8 --per_device_train_batch_size 8 --dataloader_num_workers 0"
    arguments = ("--templates", "image_classification", "--steps", 1, "--flags", flags)
    lines, rows = run_benchmark("startup", *arguments)
    kinds = ("baseline", "--help", "first step", "resume")
    starts = [f"image_classification, {kind}" for kind in kinds]
    assert lines == ["`accelerate launch` of nothing", "`accelerate-launch` of nothing", *starts]
    assert [row.get("from") for row in rows] == [None, None, None, None, 0, 1]


@pytest.mark.slow
def test_save_stall(run_benchmark, text_file):
    flags = f"--train_file {text_file} --vocab_size 320 --seq_length 16 --global_batch_size 2 --config_overrides {SHAPE}"
    lines, rows = run_benchmark("save_stall", "--steps", 10, "--every", 4, "--flags", flags)
    assert lines == ["synchronous", "in the background"]
    assert all(row["waits"] > 0 for row in rows)


@pytest.mark.slow
def test_growth(run_benchmark):
    lines, rows = run_benchmark("growth", "--steps", 2, "--sizes", 400, 4000, "--limit", 1e-9)
    assert len(lines) >= 16 and lines == list(dict.fromkeys(row["work"] for row in rows))
    left_out = {(row["work"], row["size"]) for row in rows if "absent" in row}
    assert left_out <= {(work, 4000) for work in lines if not work.startswith(("drawing", "starting", "resuming"))}


def test_operators(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    output = tmp_path / "figures.json"
    flags = ["--model_preset", "3M", "--rows", "1", "--seq_length", "32", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["operators.py", *flags])
    importlib.import_module("operators").main()
    said = capsys.readouterr()
    assert "nanochat is left out" in said.err and "| TFLOP of a micro-batch, counted |" in said.out
    ours = json.loads(output.read_text())["rows"]["ours"]
    assert ours["compiled"]["other"] < ours["eager"]["other"] and ours["compiled"]["flops"] == ours["eager"]["flops"]


def test_every_script_is_in_the_readme():
    readme = (ROOT / "benchmarks" / "README.md").read_text()
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()}
    assert {name for name in scripts if f"benchmarks/{name}" not in readme} == set()


# Why a row of gpu.py may have no figures here: packages that are not required, kernels that a CPU has not.
ABSENT = re.compile(
    r"needs [\w, ]*(torchao|bitsandbytes|timm|liger_kernel)\b|(flex attention|attention of .*) has no .* on a CPU"
)

SIZES = re.compile(r"[\d.]+[MB], \d+ x \d+")  # in a row's name: all the same in a rehearsal


def numbers(value):
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, float | int):
        yield value


def gpu_benchmark(*arguments, script="import gpu; gpu.main()"):
    done = python("-c", f"import sys; sys.path.insert(0, 'benchmarks'); {script}", *arguments, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_row_of_the_gpu_benchmark_is_rehearsed(tmp_path):
    output = tmp_path / "gpu.json"
    calls, names = zip(*(text.split(" s  ") for text in gpu_benchmark("--list").splitlines()), strict=True)
    assert len(names) == len(set(names)) > 40
    assert calls[0].startswith("call 1") and calls[-1].startswith(("call 2", "call 3", "call 4"))
    table = gpu_benchmark("--toy", "--limit", 850, "--output", output)
    assert all(f"| {name} |" in table for name in names)
    assert "FAIL" not in table
    rows = json.loads(output.read_text())["rows"]
    launched = re.compile(r"(?!image)\w+( --\w+( \w+)?)* (trains|resumes)")  # other tests launch these
    kinds = {re.sub(SIZES, "", name) for name in rows}
    assert [name for name in names if re.sub(SIZES, "", name) not in kinds] == list(filter(launched.match, names))
    for name, outcome in rows.items():
        assert "figures" in outcome or ABSENT.match(outcome.get("skipped", "")), (name, outcome)
        assert "not fused" not in outcome.get("figures", {}).get("note", ""), (name, outcome)
        assert all(math.isfinite(number) for number in numbers(outcome)), (name, outcome)
    assert rows["losses, FSDP2 of one process"]["figures"]["strategy"].startswith("FSDP")


FAILING = """
import os, subprocess, gpu
from pathlib import Path

mark = Path(sys.argv.pop(1))

def measure(how):
    with mark.open("a") as file:
        file.write(how + "\\n")
    if how == "raises":
        raise ValueError("no luck")
    if how == "hangs":
        subprocess.run(["sleep", "60"])
    if how == "exits":
        os._exit(7)
    if how == "is killed":
        os.kill(os.getpid(), 9)
    return {"note": "measured"}

kinds = ("raises", "hangs", "exits", "is killed", "works")
gpu.ROWS[:] = [gpu.Row(f"{how}{n}", measure, 1, {"how": how}, timed=n == 1) for n in (1, 2) for how in kinds]
gpu.PATIENCE, gpu.PRELOADED = 0.2, ()
gpu.main()
"""


@pytest.mark.slow
def test_a_row_that_fails_leaves_the_others_and_is_tried_again(tmp_path):
    first, second, mark = tmp_path / "first.json", tmp_path / "out" / "second.json", tmp_path / "mark"
    gpu_benchmark(mark, "--toy", "--output", first, script=FAILING)
    rows, order = json.loads(first.read_text())["rows"], mark.read_text().splitlines()
    assert order[:5] == ["raises", "hangs", "exits", "is killed", "works"]
    assert sorted(order[5:]) == sorted(order[:5])  # side by side
    for n in "12":
        assert rows[f"works{n}"]["figures"] == {"note": "measured"}
        assert rows[f"raises{n}"]["failed"] == "ValueError: no luck" and "Traceback" in rows[f"raises{n}"]["log"]
        assert rows[f"hangs{n}"]["failed"].startswith("took more than 2 s")
        assert rows[f"exits{n}"]["failed"] == "ended with exit code 7"
        assert rows[f"is killed{n}"]["failed"] == "ended with exit code -9"
    content = json.loads(first.read_text())
    del content["rows"]["works2"]
    first.write_text(json.dumps(content))
    mark.unlink()
    table = gpu_benchmark(mark, "--toy", "--before", first, "--output", second, script=FAILING)
    again = mark.read_text().splitlines()
    assert again[0] == "works" and again.count("works") == 1 and len(again) == 9  # what was not tried yet comes first
    assert "| works1 |  |  |  |  |  |  | measured |" in table and len(json.loads(second.read_text())["rows"]) == 10


@pytest.mark.slow
def test_quality(monkeypatch, tmp_path, text_file):
    """The row that needs no package. Those with real weights are started by hand."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    small = f"--train_file {text_file} --vocab_size 320 --seq_length 16 --config_overrides {SHAPE} --max_steps 2"
    output = tmp_path / "quality.json"
    argv = ["quality.py", "sizes", "--seeds", 0, 1, "--flags", small, f"{small} --learning_rate 0.1", "--output", output]
    monkeypatch.setattr(sys, "argv", [*map(str, argv)])
    importlib.import_module("quality").main()
    rows = json.loads(output.read_text())["sizes"]["rows"]
    assert [row["seed"] for row in rows] == [0, 0, 1, 1]
    assert rows[1]["learning_rate"] == 0.1 and 0 < rows[0]["learning_rate"] <= 5e-3
    assert len({row["loss"] for row in rows}) == 4


@pytest.mark.slow
def test_golden_tells_the_same_from_another_bit(tmp_path):
    """Recorded, compared, and compared after a loss has changed in its last bit."""

    def golden(mode):
        own = os.environ | {"TESTS_LAUNCHER": LAUNCHER.address()}
        return python(ROOT / "benchmarks/golden.py", mode, tmp_path / "golden", "--only", "lora_finetune-ddp", env=own)

    recorded = golden("record")
    assert recorded.returncode == 0 and "DDP x 2 on cpu, fp32" in recorded.stdout, recorded.stderr
    same = golden("compare")
    assert same.returncode == 0 and same.stdout.endswith("1 of 1 the same\n"), same.stdout + same.stderr
    path = tmp_path / "golden/runs/lora_finetune-ddp/result.json"
    result = json.loads(path.read_text())
    row = next(row for row in result["metrics"] if "loss" in row)
    row["loss"] = math.nextafter(row["loss"], math.inf)
    path.write_text(json.dumps(result))
    other = golden("compare")
    assert other.returncode == 1 and f"loss at step {row['step']}: " in other.stdout, other.stdout


def test_chaos_uses_flags_that_the_templates_have(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    chaos = importlib.import_module("chaos")
    for name in chaos.TEMPLATES:
        command = chaos.command(name, tmp_path, 1)
        script = next(i for i, word in enumerate(command) if word.endswith(".py"))
        config = parse(load_template(name.split("/")[0]).Config, command[script + 1 :])
        assert config.batch.max_steps == 12, name
