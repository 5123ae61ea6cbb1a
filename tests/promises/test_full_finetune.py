"""full_finetune.py, launched for real. On several processes: tests/answers, and test_sequences.py."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.run.tensors import read_tensors
from tests.conftest import learn_here, make_model, refusal, run
from tests.plain_loop import loss_of_chats, losses_of, number_of_rows, padded_chats
from tests.same import assert_goes_on


@pytest.fixture(scope="module")
def base(tiny_model, chat_file):
    return (
        *("--model_name_or_path", tiny_model, "--train_file", chat_file, "--seq_length", 96, "--learning_rate", 1e-2),
        *("--global_batch_size", 4, "--per_device_train_batch_size", 2, "--max_steps", 6, "--save_steps", 3),
        *("--save_total_limit", 9, "--eval_steps", 3, "--show_answers", 0),
    )


def test_equals_a_plain_loop_with_frozen_layers(tiny_model, tokenizer, chat_file, tmp_path):
    """A hand-written padded loop with none of shared/; all samples in each batch, so order plays no part.

    Packed rows must give the very same, since packed documents do not see each other. Blocks are recomputed.
    """
    steps, rate = 5, 1e-2
    size = number_of_rows(tokenizer, chat_file, 96)
    ours = learn_here(
        *("full_finetune", tmp_path / "ours", "--model_name_or_path", tiny_model, "--train_file", chat_file),
        *("--validation_file", chat_file, "--seq_length", 96, "--packing", "--learning_rate", rate, "--show_answers", 0),
        *("--lr_scheduler_type", "constant", "--warmup_steps", 0, "--max_steps", steps, "--max_grad_norm", 0),
        *("--global_batch_size", size, "--per_device_train_batch_size", size, "--freeze", r"layers\.0\.", "embed_tokens"),
        *("--gradient_checkpointing", "full"),
    )

    rows = [json.loads(line)["messages"] for line in chat_file.read_text().splitlines()]
    batch = padded_chats(tokenizer, rows)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    frozen = {name for name, _ in model.named_parameters() if "layers.0." in name or "embed_tokens" in name}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    expected = losses_of(model, lambda: loss_of_chats(model, *batch), steps, rate)
    assert ours.each("loss") == pytest.approx([*expected], rel=1e-5)
    final = tmp_path / "ours/final"
    loaded = AutoModelForCausalLM.from_pretrained(final, dtype="auto")
    assert loaded.dtype == torch.float32  # as the checkpoint that was given
    before = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=1e-3, atol=1e-4)
        assert torch.equal(loaded.state_dict()[name], before[name]) == (name in frozen or "lm_head" in name)
    saved = read_tensors(tmp_path / f"ours/checkpoint-{steps:06d}")
    assert not any(name in key for key in saved for name in frozen)  # weights that do not change are not saved
    assert "### Assistant" in AutoTokenizer.from_pretrained(final).apply_chat_template(rows[0], tokenize=False)


@pytest.mark.slow
def test_8_bit_moments_are_the_same_on_shards_and_resume_on_another_number(base, tmp_path):
    model = make_model(tmp_path / "model", hidden_size=128, intermediate_size=256)
    given = (*base, "--model_name_or_path", model, "--learning_rate", 1e-3, "--optim", "adamw_8bit")
    given = (*given, "--per_device_train_batch_size", 1)
    one = learn_here("full_finetune", tmp_path / "one", *given)
    spread = {"processes": 2, "config": "fsdp2"}
    several = run("full_finetune", tmp_path / "several", *given, **spread)
    assert several.losses == pytest.approx(one.losses, rel=1e-4)  # a code may round to the other side
    saved = read_tensors(several.folder / "checkpoint-000003")
    codes = [key for key, value in saved.items() if key.endswith(".codes") and value.dtype == torch.uint8]
    assert len(codes) == 2 * (1 + 2 * 7)  # two moments of the embeddings and of the matrices of two blocks
    assert all(len(saved[key].unique()) > 9 for key in codes)
    start = ("--resume_from_checkpoint", several.folder / "checkpoint-000003")
    again = run("full_finetune", tmp_path / "again", *given, *start, **spread)
    assert_goes_on(several, again, 3)
    alone = learn_here("full_finetune", tmp_path / "alone", *given, *start)
    assert alone.losses == pytest.approx({step: loss for step, loss in several.losses.items() if step > 3}, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("config", "precision"), [("fsdp2", "bf16"), ("ddp", "no")])
def test_bf16_weights_stay_so_learn_as_fp32_ones_do_and_resume(base, tmp_path, config, precision):
    given = (*base, "--learning_rate", 3e-3, "--max_steps", 16, "--save_steps", 8)
    how = {"processes": 2, "config": config, "precision": precision}
    exact = learn_here("full_finetune", tmp_path / "fp32", *given)
    ours = run("full_finetune", tmp_path / "bf16", *given, "--weights_dtype", "bf16", **how)
    assert "rounded stochastically" in ours.summary
    saved = read_tensors(ours.folder / "checkpoint-000016")
    assert {v.dtype for key, v in saved.items() if not key.endswith(".step")} == {torch.bfloat16}
    assert ours.losses == pytest.approx(exact.losses, rel=2e-2)
    assert ours.last("eval_loss") == pytest.approx(exact.last("eval_loss"), rel=2e-2)
    start = ("--resume_from_checkpoint", ours.folder / "checkpoint-000008")
    assert_goes_on(ours, run("full_finetune", tmp_path / "again", *given, "--weights_dtype", "bf16", *start, **how), 8)


def test_final_has_the_precision_asked_for(base, tmp_path):
    done = learn_here("full_finetune", tmp_path, *base, "--max_steps", 1, "--final_dtype", "bf16")
    assert {value.dtype for value in done.weights().values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "final/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--freeze", "layer.0"), "--freeze layer.0: found in the name of no weight; they are model.embed_tokens.weight"),
        (("--freeze", "("), "--freeze (: no regular expression"),
        (("--freeze", "."), "no parameter of the model is trainable"),
        (("--weights_dtype", "bf16", "--ema_decay", 0.9), "--ema_decay would lose small updates of bf16 weights"),
    ],
)
def test_what_cannot_be_is_one_line(base, tmp_path, flags, message):
    assert message in refusal("full_finetune", *base, *flags, "--output_dir", tmp_path / "run")
