"""What `Run` does for every template: best weights, early stopping, moving averages, also over a kill and a resume; the
profile's table, which says where the time goes.
"""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from shared.parallel import sharding
from shared.run import profiling
from shared.run.tensors import read_tensors
from tests.conftest import learn_here, run, slow


@pytest.fixture(params=[slow("pretrain"), "lora_finetune", slow("image_classification")])
def small(request, text_file, chat_file, tiny_model, image_folder):
    """(template, flags), at rates at which the validation loss soon rises again: the best evaluation is not the last."""
    text = ["--train_file", text_file, "--vocab_size", 300, "--seq_length", 32, "--metric_for_best_model", "loss"]
    chats = ["--train_file", chat_file, "--model_name_or_path", tiny_model, "--seq_length", 64, "--max_new_tokens", 2]
    images = ["--train_dir", image_folder, "--image_size", 16, "--dataloader_num_workers", 0]
    rates = {"pretrain": (text, 0.3), "lora_finetune": (chats, 0.5), "image_classification": (images, 0.05)}
    flags, rate = rates[request.param]
    flags += ["--global_batch_size", 8, "--per_device_train_batch_size", 4, "--eval_steps", 2, "--save_steps", 3]
    return request.param, [*flags, "--learning_rate", rate, "--max_steps", 10]


def test_final_holds_the_average_of_the_best_evaluation_also_after_a_kill(small, tmp_path):
    template, flags = small
    flags = [*flags, "--ema_decay", 0.5, "--early_stopping_patience", 3]
    straight = run(template, tmp_path / "straight", *flags)
    killed = run(template, tmp_path / "killed", *flags, check=False, env={"TEMPLATES_FAULT": "update:kill@5"})
    assert killed.returncode != 0 and not (tmp_path / "killed" / "final").exists()
    resumed = run(template, tmp_path / "killed", *flags)
    assert "resumed from" in resumed.output
    differ = re.compile("per_second|memory|wait")
    one, other = ([{k: v for k, v in row.items() if not differ.search(k)} for row in r.rows] for r in (resumed, straight))
    assert one == other
    metric = "eval_accuracy" if template == "image_classification" else "eval_loss"
    scores = {row["step"]: row[metric] for row in straight.rows if metric in row and row["step"] > 0}
    best = int(re.search(r"best by \w+: step (\d+)", straight.output)[1])
    assert scores[best] == (max if metric == "eval_accuracy" else min)(scores.values())
    last = max(scores)
    assert last <= best + 6  # stopped early after three evaluations without a better one
    kept = read_tensors(tmp_path / "straight" / f"checkpoint-{best:06d}", "ema.")
    for folder in ("straight", "killed"):
        (file,) = (tmp_path / folder / "final").glob("*.safetensors")
        final = {name.replace(".weight", ""): value for name, value in load_file(file).items()}
        for name, value in kept.items():
            short = name.removeprefix("ema.").replace(".default", "").replace(".weight", "")
            torch.testing.assert_close(final[short], value, rtol=0, atol=0)
        card = (tmp_path / folder / "final" / "README.md").read_text()
        assert f"| step | {best} |" in card


def test_ranks_draw_other_dropout(text_file, tiny_model, tmp_path, monkeypatch):
    losses = []
    for rank in (0, 1, 1):
        monkeypatch.setattr(sharding, "draws_rank", lambda _, rank=rank: rank)
        flags = ("--train_file", text_file, "--model_name_or_path", tiny_model, "--seq_length", 32, "--lora_dropout", 0.5)
        folder = tmp_path / f"run{len(losses)}"
        losses.append(learn_here("lora_finetune", folder, *flags, "--max_steps", 3, "--learning_rate", 0.01).each("loss"))
    assert losses[0] != losses[1] == losses[2] and len(losses[0]) > 1


@pytest.mark.slow
def test_a_run_writes_its_profile_and_learns_the_same(text_file, tiny_model, tmp_path, processes=2):
    flags = ("--train_file", text_file, "--model_name_or_path", tiny_model, "--seq_length", 32, "--max_steps", 10)
    flags = (*flags, "--eval_samples", 2, "--global_batch_size", 4, "--per_device_train_batch_size", 1)
    plain = run("pretrain", tmp_path / "plain", *flags, processes=processes)
    traced = run("pretrain", tmp_path / "traced", *flags, "--profile", processes=processes)
    assert traced.losses == plain.losses
    assert traced.output.count("profile of 3 steps") == 1 and "Self CPU time total" in traced.output
    assert "aten::mm" in traced.output or "aten::addmm" in traced.output
    trace = json.loads((tmp_path / "traced" / profiling.TRACE).read_text())
    assert sum("ProfilerStep" in str(event.get("name")) for event in trace["traceEvents"]) >= 3


def test_a_run_that_is_shorter_than_the_profile_says_so(text_file, tiny_model, tmp_path):
    flags = ("--train_file", text_file, "--model_name_or_path", tiny_model, "--seq_length", 32, "--max_steps", 4)
    done = run("pretrain", tmp_path / "run", *flags, "--global_batch_size", 4, "--eval_samples", 2, "--profile")
    assert "no profile: it needs 9 steps after the start; this run makes 4" in done.output
    assert not (tmp_path / "run" / profiling.TRACE).exists()
