"""replay: a step again, from a checkpoint, with each of its samples; what it would have been without some."""

import json
import math
import re
import shutil

import pytest

from shared.data import audit
from shared.extras.proofs._replayed import Replay
from shared.process.files import read_json_lines
from shared.run.run import Run as RunOfTemplate
from shared.run.setup import Setup
from shared.training.step import Step
from tests.conftest import ROOT, learn_here, run, run_here, shown, slow, write_lines

COMMON = ("--save_steps", 1, "--save_total_limit", 9, "--audit_data", "--global_batch_size", 6)
FEW = ("--max_steps", 4, "--per_device_train_batch_size", 3)


@pytest.fixture(scope="module")
def flags_of(tiny_model, text_file, chat_file, image_folder, architectures, tmp_path_factory):
    """Flags of small runs, by template."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"text": f"the model reads {'many ' * (n % 7)}lines {n}", "label": "abc"[n % 3]} for n in range(60)]
    labelled = write_lines(folder / "labelled.jsonl", rows)
    pairs = [{"prompt": f"Say {n}.", "chosen": f"Here: {n} " * (n % 5 + 1), "rejected": "No."} for n in range(40)]
    sums = [{"prompt": f"{a} + {b} = ", "answer": str(a + b)} for a in range(6) for b in range(4)]
    sums = write_lines(folder / "sums.jsonl", sums)
    tiny = ("--model_name_or_path", tiny_model)
    chats = ("--train_file", chat_file, *tiny, "--seq_length", 128, "--show_answers", 0, "--eval_samples", 2)
    few = ("--show_answers", 0, "--seq_length", 64, "--eval_samples", 2)
    return {
        "pretrain": ("--train_file", text_file, *tiny, "--seq_length", 32, "--isolate_documents"),
        "lora_finetune": (*chats, "--lora_dropout", 0.2),
        "full_finetune": (*chats, "--packing", "off"),
        "dpo": ("--train_file", write_lines(folder / "pairs.jsonl", pairs), *tiny, *few),
        "grpo": ("--train_file", sums, *tiny, "--group_size", 4, "--max_new_tokens", 8, "--eval_answers", 2, *few[:2]),
        "text_classification": ("--train_file", labelled, *tiny, "--seq_length", 32),
        "image_classification": ("--train_dir", image_folder, "--config_name", architectures / "resnet", "--image_size", 32),
    }


def replayed(monkeypatch, folder, template, run_dir, number, left_out, *flags):
    """What `Replay` sees of a step that this process executes again."""
    for of, name in ((Setup, "start"), (RunOfTemplate, "steps"), (Step, "use"), (Step, "clip_gradients")):
        monkeypatch.setattr(of, name, getattr(of, name))  # taken back at the end
    for name in ("should_evaluate", "_save"):
        monkeypatch.setattr(RunOfTemplate, name, getattr(RunOfTemplate, name))
    again = folder / "again"
    shutil.rmtree(again, ignore_errors=True)
    again.mkdir()
    if number > 1:
        name = f"checkpoint-{number - 2 or 1:06d}"
        (again / name).symlink_to(run_dir / name)
    Replay(number, left_out, folder / "result.json", []).patch()
    run_here(template, *flags, "--output_dir", again)
    monkeypatch.undo()
    return json.loads((folder / "result.json").read_text())


def losses_of(folder):
    return {
        row["step"]: (row["loss"], row["grad_norm"]) for row in read_json_lines(folder / "metrics.jsonl") if "loss" in row
    }


IN_SLOW = ("pretrain", "full_finetune", "text_classification")


@pytest.mark.parametrize("template", ["lora_finetune", "dpo", "grpo", "image_classification", *map(slow, IN_SLOW)])
def test_a_step_again_is_the_sum_of_its_samples(template, flags_of, tmp_path, monkeypatch):
    flags = (*flags_of[template], *COMMON, *FEW, "--max_steps", 3)
    learn_here(template, tmp_path / "run", *flags)
    row = losses_of(tmp_path / "run")[3]
    found = replayed(monkeypatch, tmp_path, template, tmp_path / "run", 3, set(), *flags)
    assert losses_of(tmp_path / "again")[3] == row  # bit for bit
    assert [each["step"] for each in found["steps"]] == [2, 3]
    assert [each["step"] for each in read_json_lines(tmp_path / "again/metrics.jsonl")] == [2, 3]  # and no evaluation
    parts = found["samples"]
    targets = sum(part["targets"] for part in parts)
    whole = sum(part["loss"] for part in parts) / targets
    if template != "lora_finetune":  # whose dropout draws other masks for its second micro-batch
        assert whole == pytest.approx(row[0], rel=2e-5, abs=2e-6)
    assert all(part["gradient"] > 0 for part in parts if template != "grpo")
    norms = [part["gradient"] for part in parts]
    assert math.sqrt(sum(norm**2 for norm in norms)) <= 10 * row[1] and sum(norms) >= 0.9 * row[1]  # triangle inequality
    if template not in ("grpo", "lora_finetune", "full_finetune"):  # samples of rows, answers of prompts
        assert sorted(part["sample"] for part in parts) == audit.samples_of_steps(tmp_path / "run")[3]
    assert all(part["where"] for part in parts)
    assert ("image" in parts[0]) == (template == "image_classification")
    layers = [norm for _, norm, _ in found["layers"]]
    assert layers == sorted(layers, reverse=True) and None not in [before for _, _, before in found["layers"]]

    left_out = parts[0]["sample"]
    other = replayed(monkeypatch, tmp_path, template, tmp_path / "run", 3, {left_out}, *flags)
    rest = [part for part in parts if part["sample"] != left_out]
    expected = sum(part["loss"] for part in rest) / sum(part["targets"] for part in rest)
    if template != "lora_finetune":
        assert other["steps"][-1]["loss"] == pytest.approx(expected, rel=2e-5, abs=2e-6)
    assert other["steps"][0] == found["steps"][0] and other["steps"][-1] != found["steps"][-1]
    assert losses_of(tmp_path / "run")[3] == row  # the run is as it was


@pytest.mark.parametrize(
    ("processes", "config"),
    [(1, None), slow(2, "ddp"), slow(2, "fsdp2"), slow(2, "tensor_parallel"), slow(2, "sequence_parallel")],
)
def test_the_command_shows_a_step_on_any_launch(processes, config, tmp_path, flags_of):
    flags = [*flags_of["lora_finetune"], *COMMON, *FEW, "--lora_dropout", 0]
    launch = {"processes": processes, "config": config} if config else {}
    run("lora_finetune", tmp_path / "run", *flags, **launch)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    launcher = ["accelerate", "launch"]
    if config:
        launcher += ["--config_file", f"{ROOT}/accelerate_configs/{config}.yaml", "--mixed_precision", "no"]
        launcher += ["--num_processes", str(processes)]
    command = ["--", *launcher, f"{ROOT}/templates/lora_finetune.py"]
    out = shown(tmp_path, "replay", "run", "--step", 4, *command)
    assert out.count("the same, bit for bit") == 2 and out.count("step ") >= 3, out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    if config == "sequence_parallel":
        assert "samples are not shown: ranks share rows" in out
        return
    assert ".jsonl:" in out and "⟦" in out and "loss" in (tmp_path / "replay-000004/index.html").read_text()
    parts = json.loads((tmp_path / "replay-000004/replay.json").read_text())["samples"]
    whole = sum(part["loss"] for part in parts) / sum(part["targets"] for part in parts)
    assert whole == pytest.approx(losses_of(tmp_path / "run")[4][0], rel=2e-5)
    assert all(("gradient" in part) == (config in (None, "ddp")) for part in parts)
    if config is None:
        left_out = parts[0]["sample"]
        out = shown(tmp_path, "replay", "run", "--step", 4, "--without", left_out, "--into", tmp_path / "without", *command)
        rest = [part for part in parts if part["sample"] != left_out]
        expected = sum(part["loss"] for part in rest) / sum(part["targets"] for part in rest)
        assert f"without {left_out}:" in out and f"loss {expected:.4g}"[:9] in out
        shutil.rmtree(tmp_path / "run/checkpoint-000001")
        said = shown(tmp_path, "replay", "run", "--step", 2, "--into", "other", *command, code=2)
        assert "no checkpoint before step 2 (there is 2, 3, 4): --from_start" in said
        out = shown(tmp_path, "replay", "run", "--step", 2, "--into", "other", "--from_start", *command)
        assert out.count("the same, bit for bit") == 2


def test_steps_that_are_not_learned_change_no_others(flags_of, tmp_path):
    """Their samples and draws are those of a run with them: only the weights are others, from then on."""
    flags = (*flags_of["lora_finetune"], *COMMON, *FEW)
    learn_here("lora_finetune", tmp_path / "all", *flags)
    learn_here("lora_finetune", tmp_path / "some", *flags, "--skip_steps", "2-3")
    assert audit.samples_of_steps(tmp_path / "all") == audit.samples_of_steps(tmp_path / "some")
    one, other = losses_of(tmp_path / "all"), losses_of(tmp_path / "some")
    assert one[1] == other[1] and one[2][1] == other[2][1] and other[2][0] is None and one[4] != other[4]
    assert re.search(r"skip_steps:\s+- 2-3", (tmp_path / "some/final/README.md").read_text())
    # a run without the steps that continues from before them is the same
    shutil.copytree(tmp_path / "all/checkpoint-000001", tmp_path / "resumed/checkpoint-000001")
    learn_here("lora_finetune", tmp_path / "resumed", *flags, "--skip_steps", "2-3")
    assert losses_of(tmp_path / "resumed")[4] == other[4]
