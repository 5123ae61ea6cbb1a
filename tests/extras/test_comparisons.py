"""fork, compare, repeat, reproduce: what a change did, and whether seeds do as much."""

import csv
import json
import shutil

import numpy as np
import pytest
from scipy.stats import t

from shared.extras.comparisons._runs import RunFolder
from shared.extras.comparisons._statistics import noise_of, paired
from shared.extras.comparisons.compare import compared, verdict
from shared.extras.comparisons.reproduce import compared as rows_compared
from shared.process.errors import ConfigError
from shared.process.files import read_json_lines
from tests.conftest import ROOT, SHAPE, Run, instead, run, shown, slow, write_lines
from tests.security.conftest import flip


def logged(folder, after=0):
    rows = [row for row in read_json_lines(folder / "metrics.jsonl") if "loss" in row and row["step"] > after]
    return [(row["step"], row["loss"], row["grad_norm"], row["learning_rate"]) for row in rows]


@pytest.fixture(scope="module")
def flags_of(tiny_model, text_file, chat_file, image_folder, architectures):
    tiny = ("--model_name_or_path", tiny_model, "--show_answers", 0, "--eval_samples", 6)
    common = ("--max_steps", 6, "--save_steps", 2, "--save_total_limit", 9, "--global_batch_size", 4)
    common += ("--per_device_train_batch_size", 2)
    text = ("--train_file", text_file, "--vocab_size", 300, "--config_overrides", SHAPE)
    images = ("--train_dir", image_folder, "--config_name", architectures / "resnet", "--image_size", 32)
    return {
        "pretrain": (*text, "--seq_length", 32, *common),
        "lora_finetune": ("--train_file", chat_file, *tiny, "--seq_length", 64, "--learning_rate", 0.01, *common),
        "full_finetune": ("--train_file", chat_file, *tiny, "--seq_length", 64, *common),
        "dpo": ("--max_train_samples", 40, "--show_answers", 0, "--seq_length", 64, "--eval_samples", 4, *common),
        "grpo": ("--group_size", 2, "--max_new_tokens", 3, "--eval_answers", 2, "--show_answers", 0, *common),
        "text_classification": ("--max_train_samples", 200, "--seq_length", 32, "--model_name_or_path", tiny_model, *common),
        "image_classification": (*images, *common),
    }


@pytest.mark.parametrize(
    ("template", "processes"),
    [("image_classification", 1), *(slow(name, 1) for name in ("pretrain", "full_finetune", "dpo", "grpo"))]
    + [slow(name, 2) for name in ("lora_finetune", "text_classification")],
)
def test_a_fork_continues_as_its_parent_did_unless_something_differs(template, processes, flags_of, tmp_path):
    flags = flags_of[template]
    if template == "text_classification":
        flags = [flag for flag in flags if flag not in ("--max_train_samples", 200)]
    run(template, tmp_path / "parent", *flags, processes=processes)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "parent").rglob("*")}
    launcher = ["accelerate", "launch"]
    if processes > 1:
        launcher += ["--config_file", f"{ROOT}/accelerate_configs/ddp.yaml", "--mixed_precision", "no"]
        launcher += ["--num_processes", str(processes), "--main_process_port", "0"]
    command = ["--", *launcher, f"{ROOT}/templates/{template}.py"]
    fork = ["fork", "parent", "--step", 4, "--output_dir"]
    out = shown(tmp_path, *fork, "same", *command)
    assert "with the same settings" in out
    assert logged(tmp_path / "same") == logged(tmp_path / "parent", 4)  # bit for bit
    if template != "image_classification":
        return
    out = shown(tmp_path, *fork, "other", *command, "--learning_rate", 0.002, "--save_steps", 1)
    assert "learning_rate was 0.001, now 0.002 (changes what is learned)" in out
    assert "save_steps was 2, now 1 (does not change what is learned)" in out
    assert [row["step"] for row in RunFolder(tmp_path / "other").before if "loss" in row] == [1, 2, 3, 4]
    same, other = (logged(tmp_path / name) for name in ("same", "other"))
    assert [row[0] for row in other] == [5, 6] and other != same
    card = (tmp_path / "other/final/README.md").read_text()
    assert "parent/checkpoint-000004" in card and "learning_rate" in card
    parent = json.loads((tmp_path / "other/parent.json").read_text())
    assert parent["step"] == 4 and parent["changed"]["learning_rate"] == [0.001, 0.002]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "parent").rglob("*")} == before
    said = shown(tmp_path, *instead(fork, "--step", 3), "x", *command, code=2)
    assert "no checkpoint of step 3 (of 2, 4, 6)" in said

    found = shown(tmp_path, "compare", "parent", "other")
    assert "learning_rate: 0.001, 0.002" in found and "other began with" in found and "training losses part at step" in found
    assert "accuracy: " in found and (tmp_path / "compare.png").stat().st_size > 5000
    again = ("reproduce", "parent", "--steps", "3..6", *command)
    assert "the same, bit for bit" in shown(tmp_path, *again)
    receipts(tmp_path, command)
    changed = tmp_path / "parent/metrics.jsonl"
    rows = [*read_json_lines(changed)]
    rows[[row["step"] for row in rows].index(5)]["loss"] *= 1.001
    write_lines(changed, rows)
    assert "error: not the same: loss at step 5" in shown(tmp_path, *again, code=3)


def receipts(folder, command):
    """A changed byte in a card, weights, a checkpoint or the code is named; what was pruned is not missed."""
    card = (folder / "parent/final/README.md").read_text()
    receipt = json.loads((folder / "parent/final/receipt.json").read_text())
    assert all(f"- {name}: {receipt[name]}" in card for name in ("data", "code", "checkpoint", "hardware"))
    assert receipt["settings"]["global_batch_size"] == 4 and {"README.md", "model.safetensors"} <= receipt["files"].keys()
    assert "are as they were" in shown(folder, "reproduce", "parent/final", *command)
    checkpoints = "checkpoint-000006/rank-0.safetensors", "checkpoint-000002/MANIFEST.json"
    for name in ("final/README.md", "final/model.safetensors", *checkpoints):
        path = folder / "parent" / name
        content = path.read_bytes()
        flip(path, 8 * (len(content) // 2))
        said = shown(folder, "reproduce", "parent", *command, code=3)
        assert f"parent/{name}" in said or name.split("/")[0] in said, (name, said)
        path.write_bytes(content)
    other = [*command[:-1], f"{ROOT}/templates/pretrain.py"]
    assert "other code now" in shown(folder, "reproduce", "parent", *other, code=3)
    shutil.copytree(folder / "parent", folder / "pruned")
    shutil.rmtree(folder / "pruned/checkpoint-000004")
    assert "are as they were" in shown(folder, "reproduce", "pruned", *command)


@pytest.mark.slow
def test_losses_are_compared_sample_by_sample_and_against_the_noise_of_seeds(flags_of, tmp_path):
    """A trained model is better than one that hardly learns; two that differ in their seed alone are not known to be."""
    texts = [f"Line {n}: {'the model reads ' * (n % 4)}{n % 7}" for n in range(200)]
    lines = write_lines(tmp_path / "texts.jsonl", [{"prompt": "Say.", "completion": text} for text in texts])
    flags = [*map(str, instead(flags_of["lora_finetune"], "--train_file", lines)), "--validation_split_percentage", "20"]
    flags = [*instead(instead(flags, "--eval_samples", "40"), "--max_steps", "12")]
    command = ["--", "accelerate", "launch", f"{ROOT}/templates/lora_finetune.py"]
    more = (*flags, "--merge_adapter", "--report_to", "none")
    out = shown(tmp_path, "repeat", "--seeds", 3, "--output_dir", "noise", *command, *more)
    values = json.loads((tmp_path / "noise/noise.json").read_text())
    assert len(values["loss"]) == 3 and len({*values["loss"]}) == 3 and "two seeds differ by at most" in out
    run("lora_finetune", tmp_path / "low", *flags, "--learning_rate", 1e-6)
    out = shown(tmp_path, "compare", "low", "noise/seed-0", "--noise", "noise", "--json", *command)
    (row,) = json.loads(out)["pairs"][0]["samples"]
    ends = [Run(tmp_path / name, 0, "").each("eval_loss") for name in ("low", "noise/seed-0")]
    assert row["values"] == pytest.approx([min(end) for end in ends], rel=1e-5)  # final/ has the best weights
    assert row["low"] < row["difference"] < row["high"] < 0
    assert row["verdict"].startswith("better, beyond the noise of seeds")
    out = shown(tmp_path, "compare", "noise/seed-1", "noise/seed-2", "--noise", "noise", *command)
    assert "not known" in out
    weights = [f"noise/seed-0{of}" for of in ("/base", "", "/merged")]
    base, merged = json.loads(shown(tmp_path, "compare", *weights, "--json", *command))["pairs"]
    assert base["samples"][0]["verdict"].startswith("better on these samples") and base["training"] == []
    assert base["samples"][0]["values"][1] == pytest.approx(row["values"][1], rel=1e-6)
    base, merged = merged["samples"][0]["values"]
    assert merged == pytest.approx(row["values"][1], rel=1e-4) and base == pytest.approx(ends[0][0], rel=1e-5)
    assert "are as they were" in shown(tmp_path, "reproduce", "noise/seed-0/merged", *command)
    assert "has no merged/" in shown(tmp_path, "compare", "low", "low/merged", *command, code=2)


def test_other_validation_samples_are_refused():
    one, other = ({"loss": dict.fromkeys(keys, (1.0, 1.0, ""))} for keys in ("abcd", "abce"))
    with pytest.raises(ConfigError, match="validated on other samples"):
        compared(one, other, {})


def test_the_interval_holds_the_true_difference_nineteen_times_out_of_twenty():
    """Of sums over unequal weights, as losses over tokens are; and equal values give no difference."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(300):
        weights = rng.integers(1, 60, 80)
        one = rng.gamma(2.0, 1.0, 80) * weights
        other = one + weights * rng.normal(0.05, 0.3, 80)
        found = paired(one, other, weights, lower=True)
        held += found.low <= 0.05 <= found.high
    assert 0.90 <= held / 300 <= 0.985
    same = paired(one, one, weights, lower=True)
    assert (same.difference, same.low, same.high, same.wins, same.losses) == (0, 0, 0, 0, 0) and not same.is_known


def test_seeds_alone_are_hardly_ever_called_better_or_worse():
    """At most one in twenty verdicts on pairs without a true difference, also where each interval excludes 0."""
    rng = np.random.default_rng(1)
    said = []
    for _ in range(1000):
        seeds, (a, b) = rng.normal(3.0, 0.02, 3), rng.normal(3.0, 0.02, 2)
        mean, _, most = noise_of(seeds)
        assert most == pytest.approx(t.ppf(0.975, 2) * np.std(seeds, ddof=1) * 2**0.5)
        assert mean == pytest.approx(seeds.mean())
        if len(said) < 40:
            found = paired(np.full(40, a), np.full(40, b) + rng.normal(0, 1e-4, 40), np.ones(40), lower=True)
            assert found.is_known or abs(a - b) < 1e-3
            said.append(verdict("loss", found, most, 40))
        else:
            said.append("better" if abs(a - b) > most else "not known")
    assert np.mean([text.startswith(("better", "worse")) for text in said]) <= 0.065


def test_predictions_are_paired_by_sample(tmp_path):
    """Mistakes that were mended count as wins; the verdict says how many samples would tell."""
    for name, wrong in (("a", {1, 2, 3, 4}), ("b", {3, 4, 5})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"seed: 0\nlearning_rate: {len(wrong)}\n")
        with (tmp_path / name / "predictions.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["where", "text", "label", "predicted"])
            writer.writerows([[f"x.jsonl:{n}", f"text {n}", "yes", "no" if n in wrong else "yes"] for n in range(60)])
    out = shown(tmp_path, "compare", "a", "b", "--json")
    (row,) = json.loads(out)["pairs"][0]["samples"]
    assert row["values"] == pytest.approx([56 / 60, 57 / 60]) and (row["wins"], row["losses"]) == (2, 1)
    assert row["verdict"].startswith("not known: 60 samples do not tell, ") and row["needed"] > 600
    assert {each["text"].split()[0] for each in row["changed"]} == {"x.jsonl:1", "x.jsonl:2", "x.jsonl:5"}
    for name in "ab":  # a tagger's rows are texts, and its accuracy is of words: other noise
        (tmp_path / name / "config.yaml").write_text("label_pieces: first\n")
    (tmp_path / "noise").mkdir()
    (tmp_path / "noise/noise.json").write_text('{"accuracy": [0.9, 0.9]}')
    (row,) = json.loads(shown(tmp_path, "compare", "a", "b", "--noise", "noise", "--json"))["pairs"][0]["samples"]
    assert row["name"] == "texts_right" and "noise" not in row["verdict"]
    shutil.rmtree(tmp_path / "b")
    assert "no folder of a run" in shown(tmp_path, "compare", "a", "b", code=2)


def test_lines_of_a_log_are_the_same_or_not():
    row = {"step": 3, "loss": 2.0, "grad_norm": 1.0, "peak_memory_gb": 5.0}
    assert rows_compared([row], [row | {"peak_memory_gb": 6.0}]) == (1, 0.0, "")
    assert rows_compared([row], [row | {"loss": 2.0 + 1e-6}]) == (1, pytest.approx(5e-7), "")
    assert rows_compared([row], [row | {"loss": 2.1}])[2] == "loss at step 3: 2, now 2.1"
    assert rows_compared([row], [])[0] == 0
