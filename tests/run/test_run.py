"""What `Run` does for every template: best weights, early stopping, moving averages, also over a kill and a resume."""

import re

import pytest
import torch
from safetensors.torch import load_file

from shared.run.tensors import read_tensors
from tests.conftest import run, slow

# Rates at which the validation loss soon rises again, so that the best evaluation is not the last.
SMALL = {
    "pretrain": ["--vocab_size", 300, "--seq_length", 32, "--learning_rate", 0.3, "--metric_for_best_model", "loss"],
    "lora_finetune": ["--seq_length", 64, "--learning_rate", 0.5, "--max_new_tokens", 2],
    "image_classification": ["--image_size", 16, "--learning_rate", 0.05, "--dataloader_num_workers", 0],
}
COMMON = ["--global_batch_size", 8, "--per_device_train_batch_size", 4, "--eval_steps", 2, "--save_steps", 3]


def flags_of(template, text_file, chat_file, tiny_model, image_folder):
    data = {
        "pretrain": ["--train_file", text_file],
        "lora_finetune": ["--train_file", chat_file, "--model_name_or_path", tiny_model],
        "image_classification": ["--train_dir", image_folder],
    }
    return [*SMALL[template], *data[template], *COMMON, "--max_steps", 10]


@pytest.fixture(params=[slow("pretrain"), "lora_finetune", slow("image_classification")])
def small(request, text_file, chat_file, tiny_model, image_folder):
    return request.param, flags_of(request.param, text_file, chat_file, tiny_model, image_folder)


def comparable(rows):
    return [{k: v for k, v in row.items() if not re.search("per_second|memory|wait", k)} for row in rows]


def test_final_holds_the_average_of_the_best_evaluation_also_after_a_kill(small, tmp_path):
    template, flags = small
    flags = [*flags, "--ema_decay", 0.5, "--early_stopping_patience", 3]
    straight = run(template, tmp_path / "straight", *flags)
    killed = run(template, tmp_path / "killed", *flags, check=False, env={"TEMPLATES_FAULT": "update:kill@5"})
    assert killed.returncode != 0 and not (tmp_path / "killed" / "final").exists()
    resumed = run(template, tmp_path / "killed", *flags)
    assert "resumed from" in resumed.output
    assert comparable(resumed.rows) == comparable(straight.rows)
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
