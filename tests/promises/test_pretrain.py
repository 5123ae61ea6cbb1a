"""pretrain.py, launched for real."""

import json
import math
import shutil
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.conftest import SHAPE, learn_here, refusal, run, slow, with_fault
from tests.plain_loop import losses_of
from tests.same import assert_goes_on, assert_same_learning

learn = partial(learn_here, "pretrain")


@pytest.fixture(scope="module")
def base(text_file):
    """Flags of a tiny run of 12 steps, whose epochs end in a ragged global batch."""
    return (
        *("--train_file", text_file, "--vocab_size", 320, "--seq_length", 32, "--config_overrides", SHAPE),
        *("--optim", "adamw", "--learning_rate", 3e-3, "--weight_decay", 0.1, "--global_batch_size", 8),
        *("--max_tokens", 12 * 8 * 32 + 5, "--eval_steps", 6, "--eval_samples", 7, "--save_steps", 6),
    )


@pytest.fixture(scope="module")
def one_process(base, tmp_path_factory):
    return learn(tmp_path_factory.mktemp("one"), *base, "--per_device_train_batch_size", 8)


def test_equals_a_plain_loop(text_file, tiny_model, tokenizer, tmp_path):
    """A hand-written loop with none of shared/'s training code; all sequences in each batch, so order plays no part."""
    # Its own reading of the documented split and layout: documents ended by eos, in order, cut into windows.
    documents = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in documents]
    stream = torch.tensor([token for document in ids for token in document])
    length = 32
    windows = torch.stack([stream[i : i + length + 1] for i in range(0, len(stream) - length, length)])
    steps, peak, warmup = 6, 3e-3, 2
    theirs = learn(
        *(tmp_path / "run", "--model_name_or_path", tiny_model, "--train_file", text_file, "--optim", "adamw"),
        *("--validation_file", shutil.copy(text_file, tmp_path), "--seq_length", length, "--learning_rate", peak),
        *("--weight_decay", 0.1, "--warmup_steps", warmup / steps, "--max_steps", steps, "--max_grad_norm", 0.5),
        *("--global_batch_size", len(windows), "--per_device_train_batch_size", len(windows), "--eval_samples", 8),
    )

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def loss_of(rows):
        return F.cross_entropy(model(input_ids=rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())

    def decays(name, p):
        return p.ndim == 2 and "embed" not in name and "lm_head" not in name

    losses = losses_of(model, lambda: loss_of(windows), steps, peak, warmup=warmup, clip=0.5, decays=decays, beta=0.95)
    assert theirs.each("loss") == pytest.approx([*losses], rel=1e-5)
    with torch.no_grad():
        model.eval()
        loss = loss_of(windows[np.linspace(0, len(windows) - 1, 8).round().astype(int)]).item()
    per_token = sum(len(document.encode()) for document in documents) / len(stream)
    assert theirs.last("eval_loss") == pytest.approx(loss, rel=1e-5)
    assert theirs.last("eval_perplexity") == pytest.approx(math.exp(loss), rel=1e-4)
    assert theirs.last("eval_bits_per_byte") == pytest.approx(loss / math.log(2) / per_token, rel=1e-4)
    weights = theirs.weights()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    "extra",
    [
        ("--gradient_checkpointing", "2", "--attn_implementation", "eager", "--dataloader_num_workers", "2"),
        slow(("--gradient_checkpointing", "full", "--torch_compile")),
    ],
    ids=lambda e: e[0].strip("-"),
)
def test_speed_and_memory_flags_do_not_change_what_is_learned(one_process, base, tmp_path, extra):
    other = learn(tmp_path / "run", *base, "--per_device_train_batch_size", 8, *extra)
    assert_same_learning(one_process, other, rel=1e-4, atol=2e-5)


@pytest.mark.slow
def test_streaming_sees_the_same_on_any_world_size_and_after_a_kill(text_file, tiny_model, tmp_path):
    flags = (
        *("--train_file", text_file, "--streaming", "--shuffle_window", 6, "--model_name_or_path", tiny_model),
        *("--global_batch_size", 4, "--per_device_train_batch_size", 2, "--max_steps", 6, "--save_steps", 3),
        *("--optim", "adamw", "--eval_samples", 4, "--save_total_limit", 5, "--seq_length", 32),
    )
    one = run("pretrain", tmp_path / "one", *flags)
    start = tmp_path / "one" / "checkpoint-000003"
    assert_goes_on(one, run("pretrain", tmp_path / "resumed", *flags, "--resume_from_checkpoint", start), 3)
    killed = with_fault("pretrain", tmp_path / "killed", "update:kill@5", *flags, processes=2)
    assert killed.returncode and killed.losses == pytest.approx({step: one.losses[step] for step in (1, 2, 3, 4)}, rel=1e-5)
    moved = run("pretrain", tmp_path / "killed", *flags)
    assert "text.jsonl: read from its start on to step 3, where the run continues" in moved.output
    assert_same_learning(one, moved)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model_name_or_path", "/nowhere"), "/nowhere"),
        (("--global_batch_size", "4000", "--per_device_train_batch_size", "4000"), "fewer than one --global_batch_size"),
        (("--text_column", "body"), "no column 'body' (has: text)"),
        (("--report_to", "nonesuch"), "nonesuch"),
        (("--streaming",), "--tokenizer_name"),
    ],
)
def test_bad_input_is_one_config_error(base, tmp_path, flags, message):
    given = (*base, "--per_device_train_batch_size", 2, "--output_dir", tmp_path, *flags)
    assert message in refusal("pretrain", *given)


def test_a_resumed_run_trains_a_loaded_model_with_its_dropout(text_file, tiny_model, tmp_path):
    """`from_pretrained` leaves dropout off, and a resumed run makes no evaluation that would turn it on."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"attention_dropout": 0.3}))
    flags = ("--train_file", text_file, "--model_name_or_path", model, "--seq_length", 32, "--max_steps", 4)
    flags += ("--eval_samples", 2)
    whole = learn(tmp_path / "whole", *flags, "--save_steps", 2)
    start = ("--resume_from_checkpoint", tmp_path / "whole/checkpoint-000002")
    assert_goes_on(whole, learn(tmp_path / "resumed", *flags, *start), 2)
