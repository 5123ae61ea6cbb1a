"""pretrain.py, launched for real."""

import json
import math
import shutil
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config

from tests.conftest import learn_here, refusal, run, run_here, slow
from tests.same import assert_same_learning

learn = partial(learn_here, "pretrain")

SHAPE = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,intermediate_size=128"


@pytest.fixture(scope="module")
def base(text_file):
    """Flags of a tiny run whose epochs end in a ragged global batch."""
    return (
        *("--train_file", text_file, "--vocab_size", 320, "--seq_length", 32, "--config_overrides", SHAPE),
        *("--optim", "adamw", "--learning_rate", 3e-3, "--weight_decay", 0.1, "--global_batch_size", 8, "--max_steps", 12),
        *("--eval_steps", 6, "--eval_samples", 7, "--save_steps", 6, "--save_total_limit", 5),
    )


@pytest.fixture(scope="module")
def one_process(base, tmp_path_factory):
    return run("pretrain", tmp_path_factory.mktemp("one"), *base, "--per_device_train_batch_size", 8)


def test_equals_a_plain_loop(text_file, tiny_model, tmp_path):
    """A hand-written loop with none of shared/'s training code; all sequences in each batch, so order plays no part."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    # Its own reading of the documented split and layout: documents ended by eos, in order, cut into windows.
    documents = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in documents]
    stream = torch.tensor([token for document in ids for token in document])
    length = 32
    windows = torch.stack([stream[i : i + length + 1] for i in range(0, len(stream) - length, length)])
    steps, peak, warmup = 6, 3e-3, 2
    theirs = run(
        *("pretrain", tmp_path / "run", "--model_name_or_path", tiny_model, "--train_file", text_file),
        *(
            "--validation_file",
            shutil.copy(text_file, tmp_path),
            "--seq_length",
            length,
            "--optim",
            "adamw",
            "--learning_rate",
            peak,
        ),
        *("--weight_decay", 0.1, "--warmup_steps", warmup / steps, "--max_steps", steps, "--max_grad_norm", 0.5),
        *("--global_batch_size", len(windows), "--per_device_train_batch_size", len(windows)),
        *("--eval_samples", 8),
    )

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    decayed = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    plain = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n or "lm_head" in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), eps=1e-8)
    for step in range(steps):
        rate = peak * (step + 1) / warmup
        if step >= warmup:
            rate = peak * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        logits = model(input_ids=windows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert theirs.losses[step + 1] == pytest.approx(loss.item(), rel=1e-5)
    spread = windows[np.linspace(0, len(windows) - 1, 8).round().astype(int)]
    with torch.no_grad():
        logits = model.eval()(input_ids=spread[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), spread[:, 1:].flatten()).item()
    per_token = sum(len(document.encode()) for document in documents) / len(stream)
    assert theirs.last("eval_loss") == pytest.approx(loss, rel=1e-5)
    assert theirs.last("eval_perplexity") == pytest.approx(math.exp(loss), rel=1e-4)
    assert theirs.last("eval_bits_per_byte") == pytest.approx(loss / math.log(2) / per_token, rel=1e-4)
    weights = theirs.weights()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-3, atol=2e-5)


def test_final_loads_with_from_pretrained(one_process):
    model = AutoModelForCausalLM.from_pretrained(one_process.folder / "final")
    tokenizer = AutoTokenizer.from_pretrained(one_process.folder / "final")
    assert model.config.num_hidden_layers == 2 and len(tokenizer) == model.config.vocab_size
    files = {p.name for p in one_process.folder.iterdir() if p.name != ".run.lock"}
    named = {"config.yaml", "metrics.jsonl", "summary.txt", "exit.json", "curves.png", "final"}
    assert files == named | {"checkpoint-000006", "checkpoint-000012"}


@pytest.mark.parametrize(
    "extra",
    [
        ("--gradient_checkpointing", "2", "--attn_implementation", "eager", "--dataloader_num_workers", "2"),
        slow(("--gradient_checkpointing", "full", "--torch_compile")),
    ],
    ids=lambda e: e[0].strip("-"),
)
def test_speed_and_memory_flags_do_not_change_what_is_learned(one_process, base, tmp_path, extra):
    other = run("pretrain", tmp_path / "run", *base, "--per_device_train_batch_size", 8, *extra)
    assert_same_learning(one_process, other, rel=1e-4, atol=2e-5)


def test_8_bit_adamw_learns_and_resumes(base, tmp_path):
    flags = (*base, "--per_device_train_batch_size", 8, "--optim", "adamw_8bit")
    whole = learn(tmp_path / "whole", *flags).each("loss")
    assert whole[-1] < whole[0] - 0.3
    start = ("--resume_from_checkpoint", tmp_path / "whole/checkpoint-000006")
    assert learn(tmp_path / "resumed", *flags, *start).each("loss") == whole[6:]


@pytest.mark.slow
def test_streaming_sees_the_same_on_any_world_size_and_after_a_kill(text_file, tiny_model, tmp_path):
    flags = (
        *("--shuffle_window", 6),
        *("--train_file", text_file, "--streaming", "--model_name_or_path", tiny_model, "--seq_length", 32),
        *("--global_batch_size", 4, "--per_device_train_batch_size", 2, "--max_steps", 6, "--save_steps", 3),
        *("--optim", "adamw", "--eval_samples", 4, "--save_total_limit", 5),
    )
    one = run("pretrain", tmp_path / "one", *flags)
    start = tmp_path / "one" / "checkpoint-000003"
    resumed = run("pretrain", tmp_path / "resumed", *flags, "--resume_from_checkpoint", start)
    assert resumed.losses == {step: loss for step, loss in one.losses.items() if step > 3}
    for name, weight in one.weights().items():
        assert torch.equal(resumed.weights()[name], weight)
    kill = {"TEMPLATES_FAULT": "update:kill@5"}
    killed = run("pretrain", tmp_path / "killed", *flags, check=False, env=kill, processes=2)
    assert killed.returncode and killed.losses == pytest.approx({step: one.losses[step] for step in (1, 2, 3, 4)}, rel=1e-5)
    moved = run("pretrain", tmp_path / "killed", *flags)
    assert "text.jsonl: read from its start on to step 3, where the run continues" in moved.output
    assert_same_learning(one, moved)


def test_tokens_are_prepared_once(text_file, tmp_path, monkeypatch):
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path / "cache"))
    flags = ("--train_file", text_file, "--vocab_size", 320, "--seq_length", 32, "--preprocess_only")
    written = []
    for _ in range(2):
        run_here("pretrain", *flags)
        written.append({path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.bin")})
    assert written[0] == written[1] and written[0]
    assert not list(tmp_path.glob("outputs*"))


def test_budget_in_tokens_and_epochs(text_file, tmp_path, tiny_model):
    flags = ("--train_file", text_file, "--model_name_or_path", tiny_model, "--seq_length", 32, "--optim", "adamw")
    sizes = ("--global_batch_size", 8, "--per_device_train_batch_size", 8, "--eval_samples", 2)
    assert len(learn(tmp_path / "tokens", *flags, *sizes, "--max_tokens", 3 * 8 * 32 + 5).losses) == 3
    epoch = learn(tmp_path / "epoch", *flags, *sizes, "--num_train_epochs", 1)
    assert len(epoch.losses) == math.ceil(epoch.last("tokens") // 32 / 8)


def test_other_data_is_refused_and_a_damaged_newest_checkpoint_passed_over(base, tmp_path, capsys):
    flags = (*base, "--per_device_train_batch_size", 8)
    learn(tmp_path, *flags)
    refused = refusal("pretrain", *flags, "--seed", 1, "--output_dir", tmp_path)
    assert "seed was 0, now 1" in refused and " if its weights fit this model" in refused
    (tmp_path / "checkpoint-000012" / "rank-0.safetensors").write_bytes(b"x")
    learn(tmp_path, *flags)
    said = capsys.readouterr().err
    assert "checkpoint-000012: rank-0.safetensors is damaged; the one before it is used" in said
    assert "at step 6" in said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model_name_or_path", "/nowhere"), "/nowhere"),
        (("--config_overrides", "hiden_size=3"), "hidden_size"),
        (("--global_batch_size", "4000", "--per_device_train_batch_size", "4000"), "fewer than one --global_batch_size"),
        (("--text_column", "body"), "no column 'body' (has: text)"),
        (("--report_to", "nonesuch"), "nonesuch"),
        (("--streaming",), "--tokenizer_name"),
    ],
)
def test_bad_input_is_one_config_error(base, tmp_path, flags, message):
    given = (*base, "--per_device_train_batch_size", 2, "--output_dir", tmp_path, *flags)
    assert message in refusal("pretrain", *given)


@pytest.mark.slow
def test_the_demo_runs_with_no_argument(tmp_path):
    done = run("pretrain", tmp_path, "--max_steps", 1, "--eval_samples", 2)
    assert "the Python standard library" in done.output
    assert done.last("eval_loss") < 9


def test_a_resumed_run_trains_a_loaded_model_with_its_dropout(text_file, tiny_model, tmp_path):
    """`from_pretrained` leaves dropout off, and a resumed run makes no evaluation that would turn it on."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"attention_dropout": 0.3}))
    flags = ("--train_file", text_file, "--model_name_or_path", model, "--seq_length", 32, "--max_steps", 4)
    flags += ("--eval_samples", 2)
    whole = learn(tmp_path / "whole", *flags, "--save_steps", 2)
    start = tmp_path / "whole/checkpoint-000002"
    resumed = learn(tmp_path / "resumed", *flags, "--resume_from_checkpoint", start)
    assert resumed.each("loss") == whole.each("loss")[2:]


@pytest.mark.slow
def test_the_eyes_of_a_model_stay_as_they_are(text_file, tiny_model, tmp_path):
    """No gradient reaches them through text, which DDP would wait for."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    text = sizes | {"vocab_size": len(tokenizer), "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": None}
    eyes = sizes | {"image_size": 16, "patch_size": 8}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Gemma3Config(text_config=text, vision_config=eyes))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    flags = ("--train_file", text_file, "--model_name_or_path", tmp_path / "model", "--seq_length", 32)
    flags += ("--global_batch_size", 8, "--eval_steps", 9, "--learning_rate", 1e-3, "--optim", "adamw", "--max_steps", 4)
    flags += ("--save_steps", 2)
    done = run("pretrain", tmp_path / "run", *flags, processes=2)
    assert done.manifest(4)["strategy"] == "DDP x 2 on cpu, fp32"
    before, after = model.state_dict(), AutoModelForCausalLM.from_pretrained(done.folder / "final").state_dict()
    assert after.keys() == before.keys()
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {name for name in before if "vision" in name or "multi_modal_projector" in name}
