"""dpo.py, launched for real."""

import contextlib
import math
import random
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.utils import set_seed
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from shared.models.tokenizers import load_tokenizer
from shared.process.errors import ConfigError
from shared.text import chat, preferences
from shared.text.options import PreferenceConfig
from tests.conftest import instead, learn_here, refusal, run, sentence, slow, write_lines
from tests.plain_loop import padded_chats, turn
from tests.same import assert_goes_on, assert_same_learning

learn = partial(learn_here, "dpo")

LOGGED = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "grad_norm")
SETTINGS = {"sigmoid": 0.5, "robust": 0.5, "ipo": 0.2, "simpo": 2.0, "orpo": 0.4}  # beta


@pytest.fixture(scope="module")
def records():
    rng = random.Random(3)
    return [
        {
            "prompt": [turn("user", sentence(rng, rng.randint(1, 9)))],
            "chosen": [turn("assistant", sentence(rng, rng.choice([1, 2, 5, 20])))],
            "rejected": [turn("assistant", sentence(rng, rng.choice([1, 3, 6, 16])))],
        }
        for _ in range(14)
    ]


@pytest.fixture(scope="module")
def pairs_file(records, tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", records)


@pytest.fixture(scope="module")
def base(tiny_model, pairs_file):
    """Epochs that end in a ragged global batch: 14 pairs, 4 a step."""
    return (
        *("--model_name_or_path", tiny_model, "--train_file", pairs_file, "--validation_file", pairs_file),
        *("--seq_length", 96, "--learning_rate", 1e-2, "--global_batch_size", 4, "--max_steps", 6, "--eval_steps", 3),
        *("--save_steps", 3, "--save_total_limit", 9, "--show_answers", 1, "--max_new_tokens", 4),
    )


def plain_losses(kind, policy, reference, lengths, beta):
    """[pairs] and rewards, by the papers' formulas, in double precision, one pair after the other."""
    found, rewards = [], []
    for (c, r), (rc, rr), (nc, nr) in zip(policy, reference, lengths, strict=True):
        margin = beta * ((c - rc) - (r - rr))
        rewards.append((beta * (c - rc), beta * (r - rr)))
        if kind == "sigmoid":
            loss = torch.log1p(torch.exp(-margin))
        elif kind == "robust":
            loss = (0.8 * torch.log1p(torch.exp(-margin)) - 0.2 * torch.log1p(torch.exp(margin))) / 0.6
        elif kind == "ipo":
            loss = ((c - rc) / nc - (r - rr) / nr - 1 / (2 * beta)) ** 2
        else:
            rewards[-1] = (beta * c / nc, beta * r / nr)
            if kind == "simpo":
                loss = torch.log1p(torch.exp(0.5 - beta * (c / nc - r / nr)))
            else:
                p, q = torch.exp(c / nc), torch.exp(r / nr)
                loss = -c / nc + beta * torch.log1p((q / (1 - q)) / (p / (1 - p)))
        found.append(loss)
    return torch.stack(found), torch.stack([torch.stack(pair) for pair in rewards])


@pytest.mark.parametrize("kind", SETTINGS)
def test_equals_a_plain_loop(tiny_model, tokenizer, records, pairs_file, tmp_path, kind):
    """A padded loop with a second model as the reference and none of shared/; all pairs in each batch."""
    full = kind in ("sigmoid", "orpo")
    steps, rate, beta, packing = 4, 1e-3, SETTINGS[kind], "--packing" if kind in ("sigmoid", "simpo") else "--no_packing"
    flags = ("--model_name_or_path", tiny_model, "--train_file", pairs_file, "--validation_file", pairs_file, packing)
    flags = (*flags, "--lr_scheduler_type", "constant", "--warmup_steps", 0, "--max_grad_norm", 0, "--show_answers", 0)
    flags = (*flags, "--max_steps", steps, "--global_batch_size", 14, "--per_device_train_batch_size", 7)
    flags = (*flags, "--loss_type", kind, "--beta", beta, "--learning_rate", rate, "--seq_length", 96)
    flags = (*flags, "--label_smoothing", 0.2) if kind == "robust" else flags
    ours = learn(tmp_path, *flags, *(("--full",) if full else ("--lora_r", 4, "--lora_alpha", 8)))

    chats = [(*record["prompt"], *record[name]) for record in records for name in ("chosen", "rejected")]
    ids, labels, mask = padded_chats(tokenizer, chats)
    set_seed(0)  # which decides the adapters' random start
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    if not full:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear"))
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)

    def log_probs(of):
        found = of(input_ids=ids, attention_mask=mask).logits[:, :-1].double().log_softmax(-1)
        kept = labels[:, 1:] != -100
        chosen = found.gather(-1, labels[:, 1:].clamp(min=0)[..., None]).squeeze(-1)
        return (chosen * kept).sum(1).view(-1, 2), kept.sum(1).view(-1, 2)

    with torch.no_grad():
        fixed, lengths = log_probs(reference)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    rows = [row for row in ours.rows if "loss" in row]
    for step in range(steps):
        policy, _ = log_probs(model)
        found, rewards = plain_losses(kind, policy, fixed, lengths, beta)
        found.mean().backward()
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        optimizer.step()
        optimizer.zero_grad()
        expected = (found.mean(), *rewards.mean(0), (rewards[:, 0] - rewards[:, 1]).mean(), *policy.mean(0), norm)
        for name, value in zip(LOGGED, expected, strict=True):
            assert rows[step][name] == pytest.approx(value.item(), rel=1e-5, abs=1e-5), (name, step)
        if step:
            assert rows[step]["rewards/accuracies"] == pytest.approx((rewards[:, 0] > rewards[:, 1]).double().mean().item())
    saved = ours.weights()
    for name, value in model.named_parameters():
        if value.requires_grad:
            torch.testing.assert_close(saved[name.replace(".default", "")], value.detach(), rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def one(base, tmp_path_factory):
    """One process, padded, 4 pairs at once."""
    folder = tmp_path_factory.mktemp("one")
    return learn(folder, *base, "--no_packing", "--per_device_train_batch_size", 4)


@pytest.mark.parametrize(
    ("packing", "at_once", "config"),
    [
        ("--packing", 1, "ddp"),
        ("--no_packing", 2, "fsdp2"),
        slow("--no_packing", 1, "tensor_parallel"),
        slow("--packing", 2, "sequence_parallel"),
        slow("--no_packing", 1, "deepspeed_zero3"),
    ],
)
def test_learns_the_same_however_launched(one, base, tmp_path, packing, at_once, config):
    flags = (*base, packing, "--per_device_train_batch_size", at_once)
    other = run("dpo", tmp_path, *flags, processes=2, config=config)
    assert one.last("eval_loss") < one.rows[0]["eval_loss"] and one.last("eval_accuracy") > 0.7
    for row, expected in zip(other.rows, one.rows, strict=True):
        for name in {*LOGGED, "eval_margin"} & expected.keys():
            assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), (name, row["step"])
    assert_same_learning(one, other, rel=1e-4, atol=2e-4)


@pytest.mark.slow
def test_a_run_that_continues_is_the_same_without_the_kept_reference(base, tmp_path):
    env = {"TEMPLATES_CACHE": str(tmp_path / "cache")}
    flags = (*base, "--no_packing", "--per_device_train_batch_size", 1, "--metric_for_best_model", "none")
    whole = run("dpo", tmp_path / "whole", *flags, processes=2, env=env)
    kept = sorted((tmp_path / "cache/reference").rglob("*.npy"))
    assert kept and "log-probabilities computed" in whole.summary
    before = [file.read_bytes() for file in kept]
    shutil.rmtree(tmp_path / "cache")
    start = ("--resume_from_checkpoint", tmp_path / "whole/checkpoint-000003")
    again = run("dpo", tmp_path / "again", *flags, *start, processes=2, env=env)
    assert [file.read_bytes() for file in kept] == before  # of the start, not of the checkpoint
    assert_goes_on(whole, again, 3)
    third = run("dpo", tmp_path / "third", *flags, *start, processes=2, env=env)
    assert "log-probabilities read" in third.summary and third.losses == again.losses


def test_a_given_adapter_is_the_reference_and_the_results_load(base, tiny_model, pairs_file, tmp_path):
    flags = (*base, "--per_device_train_batch_size", 4)
    first = ("--merge_adapter", "--metric_for_best_model", "accuracy", "--lora_r", 4)
    before = learn(tmp_path / "first", *flags, *first)
    second = learn(tmp_path / "second", *flags, "--adapter_name_or_path", tmp_path / "first/final")
    assert abs(second.rows[0]["eval_margin"]) < 1e-4 < abs(before.last("eval_margin"))
    assert second.rows[0]["eval_loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert second.each("rewards/chosen")[0] == pytest.approx(0, abs=1e-4)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    PeftModel.from_pretrained(model, str(tmp_path / "second/final"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "first/merged")
    card = (tmp_path / "second/final/README.md").read_text()
    assert "eval_accuracy" in card and "loss_type: sigmoid" in card


def pairs_of(records, tokenizer, tmp_path, **options):
    path = write_lines(tmp_path / f"{random.random()}.jsonl", records)
    options = {"seq_length": 96, "preprocessing_num_workers": 1} | options
    config = PreferenceConfig(train_file=(str(path),), validation_file=(str(path),), **options)
    train, _ = preferences.read_pairs(SimpleNamespace(data=config), tokenizer, demo_samples=1)
    print(chat.describe(train.samples, config, 2), file=sys.stderr)  # as the summary does
    return train


def test_all_forms_read_to_the_same_tokens(tiny_model, records, tmp_path, capsys):
    tokenizer = load_tokenizer(str(tiny_model))
    names = {"user": "human", "assistant": "gpt"}

    def shared(record, name):
        return [*record["prompt"], *record[name]]

    def sharegpt(messages):
        return [{"from": names[m["role"]], "value": m["content"]} for m in messages]

    both = ("chosen", "rejected")
    forms = [
        records,
        [{**r, "prompt": r["prompt"][0]["content"]} for r in records],
        [{"prompt": r["prompt"], **{n: r[n][0]["content"] for n in both}} for r in records],
        [{"prompt": r["prompt"][0]["content"], **{n: shared(r, n) for n in both}} for r in records],
        [{n: shared(r, n) for n in both} for r in records],
        [{"conversations": sharegpt(r["prompt"]), **{n: sharegpt(r[n])[0] for n in both}} for r in records],
        [{"conversations": sharegpt(r["prompt"]), **{n: sharegpt(r[n]) for n in both}} for r in records],
    ]
    expected = pairs_of(forms[0], tokenizer, tmp_path)
    assert len(expected) == 14
    for form in forms[1:]:
        found = pairs_of(form, tokenizer, tmp_path)
        for array in ("ids", "learned"):
            assert np.array_equal(found.samples.stores[0][array], expected.samples.stores[0][array])
    plain = [{"prompt": "Say: ", **{n: r[n][0]["content"] for n in both}, "why": 1} for r in records]
    found = pairs_of(plain, tokenizer, tmp_path)
    ids, learned = found.samples.tokens(1)
    assert tokenizer.decode(ids) == "Say: " + records[0]["rejected"][0]["content"] + tokenizer.eos_token
    assert tokenizer.decode(ids[learned]).strip() == records[0]["rejected"][0]["content"] + tokenizer.eos_token
    assert "not used: why" in capsys.readouterr().err

    mixed = [{**records[0], "rejected": records[0]["chosen"]}, *records[1:], {**records[0], "prompt": "the " * 200}]
    found = pairs_of(mixed, tokenizer, tmp_path)
    said = capsys.readouterr().err
    assert len(found) == 13 and "15 read, 1 cut to 96 tokens, 2 dropped" in said
    assert "1 pairs are dropped: their two answers are the same" in said and "rejected; the loss counts" in said
    turns = [turn("user", "the"), turn("assistant", "model"), turn("user", "reads")]  # an earlier answer is not learned
    deep = [{n: [*turns, *r[n], turn("user", "says"), *r[n]] for n in both} for r in records]
    found = pairs_of(deep, tokenizer, tmp_path, seq_length=200)
    ids, learned = found.samples.tokens(0)
    answer = records[0]["chosen"][0]["content"] + tokenizer.eos_token
    assert tokenizer.decode(ids[learned]).split() == (answer + answer).split()


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
SYSTEM, ASKED, BEFORE = turn("system", "Be brief."), turn("user", "2 + 2?"), [turn("user", "Hi"), turn("assistant", "Hi.")]


@pytest.mark.parametrize(
    ("prompt", "begins", "read"),
    [
        ([SYSTEM, ASKED], [ASKED], [SYSTEM, ASKED]),
        ([SYSTEM], [ASKED], [SYSTEM, ASKED]),
        (" 2 + 2?", [SYSTEM, ASKED], [SYSTEM, ASKED]),
        ([SYSTEM, BEFORE[0]], [*BEFORE, ASKED], [SYSTEM, *BEFORE, ASKED]),
        (BEFORE, [ASKED], [*BEFORE, ASKED]),
        ("Hi", [*BEFORE, ASKED], [*BEFORE, ASKED]),
        ("3 + 3?", [ASKED], None),
    ],
)
def test_the_column_of_the_prompt_counts_where_answers_begin_with_a_question(prompt, begins, read):
    record = {"prompt": prompt, **{name: [*begins, turn("assistant", name)] for name in ("chosen", "rejected")}}
    refused = pytest.raises(ConfigError, match="begin with other turns than those of 'prompt'")
    with contextlib.nullcontext() if read else refused:
        _, both = preferences.two_records(record, "prompt with chosen and rejected", "here")
        assert [each["prompt"] for each in both] == [read, read]
        assert [each["completion"] for each in both] == [[turn("assistant", name)] for name in ("chosen", "rejected")]


@pytest.mark.parametrize(
    ("record", "flags", "message"),
    [
        ({"messages": []}, (), ":1: columns messages are of no known form"),
        ({**PAIR, "rejected": None}, (), ":1: 'rejected' is null, expected a list of objects"),
        ({"chosen": "a", "rejected": "b"}, (), ":1: 'chosen' is a str, expected a list of objects"),
        ({**PAIR, "rejected": "b"}, (), "none of its 1 samples has a token to learn"),
        ({**PAIR, "image": "d.png"}, (), "does not see images"),
        ({"conversations": [], "chosen": [{"from": "human"}], "rejected": []}, (), ":1: chosen and rejected begin with a"),
        ({"conversations": "a", "chosen": "b", "rejected": "c"}, (), "'conversations' is a str, expected a list of objects"),
        (PAIR, (), "1 pairs are fewer than one --global_batch_size of 4"),
        (PAIR, ("--label_smoothing", 0.1), "--label_smoothing is for --loss_type robust, not sigmoid"),
        (PAIR, ("--full", "--lora_r", 4), "--full trains all weights: drop the flags of adapters"),
    ],
)
def test_bad_input_is_one_config_error(base, tmp_path, record, flags, message):
    path = write_lines(tmp_path / "pairs.jsonl", [record])
    given = instead(instead(base, "--train_file", path), "--validation_file", path)
    assert message in refusal("dpo", *given, *flags, "--output_dir", tmp_path / "run")


def test_a_4_bit_base_learns(base, tmp_path):
    done = learn(tmp_path, *base, "--load_in_4bit")
    assert done.last("eval_loss") < done.rows[0]["eval_loss"]
