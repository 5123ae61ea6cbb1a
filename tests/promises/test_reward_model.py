"""A reward model: dpo.py --loss_type reward trains it on pairs, grpo.py --reward_model learns from its scores."""

import json
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from shared.extras.reward_model import rewards
from shared.extras.reward_model.training import padding_token
from shared.process.errors import ConfigError
from shared.text.corpus import train_tokenizer
from tests.conftest import continued, instead, learn_here, refusal, run, sentence, slow, write_lines
from tests.plain_loop import padded_chats, turn
from tests.same import assert_same_bits, assert_same_learning

learn = partial(learn_here, "dpo")
LOGGED = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "grad_norm")


@pytest.fixture(scope="module")
def records():
    rng = random.Random(5)
    answers = [[turn("assistant", sentence(rng, rng.choice([1, 2, 5, 20])))] for _ in range(28)]
    asked = [[turn("user", sentence(rng, rng.randint(1, 9)))] for _ in range(14)]
    both = zip(asked, answers[::2], answers[1::2], strict=True)
    return [{"prompt": p, "chosen": c, "rejected": r, "by": rng.choice([0, 0.5, 2])} for p, c, r in both]


@pytest.fixture(scope="module")
def pairs_file(records, tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", records)


@pytest.fixture(scope="module")
def scorer(tiny_model, tmp_path_factory):
    """With a head already, which is kept: the random start of a new one is nobody's promise."""
    folder = tmp_path_factory.mktemp("scorer")
    torch.manual_seed(1)
    labels = {"id2label": {0: "score"}, "label2id": {"score": 0}}
    AutoModelForSequenceClassification.from_pretrained(tiny_model, **labels).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tiny_model, pairs_file):
    return (
        *("--model_name_or_path", tiny_model, "--train_file", pairs_file, "--validation_file", pairs_file),
        *("--loss_type", "reward", "--margin_column", "by", "--seq_length", 96, "--learning_rate", 1e-2, "--audit_data"),
        *("--global_batch_size", 4, "--max_steps", 6, "--eval_steps", 3, "--save_steps", 3, "--save_total_limit", 9),
    )


def padded_pairs(tokenizer, records):
    """(ids padded by a token that ends none, mask): each up to the end-of-text token, which is scored."""
    chats = [(*record["prompt"], *record[name]) for record in records for name in ("chosen", "rejected")]
    ids, labels, _ = padded_chats(tokenizer, chats)
    mask = (labels != -100).flip(1).cummax(1).values.flip(1)
    return ids.masked_fill(~mask, tokenizer.pad_token_id), mask.long()


@pytest.mark.parametrize("full", [True, False])
def test_equals_a_plain_loop_and_final_gives_the_same_scores(scorer, records, pairs_file, base, tmp_path, full):
    """Read at the place of the last token, by hand; all pairs in each batch."""
    steps, rate = 4, 1e-3
    flags = instead(instead(instead(base, "--model_name_or_path", scorer), "--learning_rate", rate), "--max_steps", steps)
    flags = (*instead(flags, "--global_batch_size", 14), "--per_device_train_batch_size", 7, "--max_grad_norm", 0)
    flags = (*flags, "--lr_scheduler_type", "constant", "--warmup_steps", 0, "--metric_for_best_model", "none")
    ours = learn(tmp_path / "run", *flags, *(("--full",) if full else ("--lora_r", 4, "--lora_alpha", 8)))
    assert "off: a score is read at the end of an answer" in ours.summary and "not used" not in ours.summary

    tokenizer = AutoTokenizer.from_pretrained(ours.folder / "final")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id and tokenizer.padding_side == "right"
    ids, mask = padded_pairs(tokenizer, records)
    assert set(ids.gather(1, mask.sum(1, keepdim=True) - 1).flatten().tolist()) == {tokenizer.eos_token_id}
    margin = torch.tensor([record["by"] for record in records]).double()
    set_seed(0)  # which decides the adapters' random start
    model = AutoModelForSequenceClassification.from_pretrained(scorer, dtype=torch.float32)
    if not full:
        lora = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules="all-linear", modules_to_save=["score"])
        model = get_peft_model(model, lora)
    inside = model if full else model.get_base_model()

    def scores():
        states = inside.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return inside.score(states[torch.arange(len(ids)), mask.sum(1) - 1]).double().view(-1, 2)

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    rows = [row for row in ours.rows if "loss" in row]
    for step in range(steps):
        found = scores()
        difference = found[:, 0] - found[:, 1]
        loss = -F.logsigmoid(difference - margin).mean()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        optimizer.step()
        optimizer.zero_grad()
        expected = (loss, *found.mean(0), difference.mean(), (difference > 0).double().mean(), norm)
        for name, value in zip(LOGGED, expected, strict=True):
            assert rows[step][name] == pytest.approx(value.item(), rel=1e-6, abs=1e-6), (name, step)
    with torch.no_grad():
        found = scores()
        saved = AutoModelForSequenceClassification.from_pretrained(ours.folder / "final", dtype=torch.float32)
        assert saved.config.num_labels == 1
        # as anybody would: transformers finds the last token itself
        again = saved(input_ids=ids, attention_mask=mask).logits.view(-1, 2).double()
    torch.testing.assert_close(again, found, rtol=0, atol=1e-5)  # four steps of AdamW later
    assert ours.last("eval_margin") == pytest.approx((again[:, 0] - again[:, 1]).mean().item(), abs=1e-6)
    assert ours.last("eval_accuracy") == pytest.approx((again[:, 0] > again[:, 1]).double().mean().item())
    goes_on = learn(tmp_path / "on", *instead(flags, "--model_name_or_path", ours.folder / "final"), "--full")
    assert goes_on.rows[0]["eval_margin"] == pytest.approx(ours.last("eval_margin"), abs=1e-6)


@pytest.fixture(scope="module")
def one(base, tmp_path_factory):
    return learn(tmp_path_factory.mktemp("one") / "run", *base, "--per_device_train_batch_size", 4)


@pytest.mark.parametrize(("at_once", "config"), [(2, "fsdp2"), (1, "ddp"), slow(2, "tensor_parallel")])
def test_learns_the_same_however_launched_and_a_kill_changes_nothing(one, base, tmp_path, at_once, config):
    flags = (*base, "--per_device_train_batch_size", at_once)
    other = run("dpo", tmp_path / "run", *flags, processes=2, config=config)
    assert one.last("eval_loss") < one.rows[0]["eval_loss"] and one.last("eval_accuracy") > 0.7
    for row, expected in zip(other.rows, one.rows, strict=True):
        for name in {*LOGGED, "eval_margin"} & expected.keys():
            assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), (name, row["step"])
    assert_same_learning(one, other, rel=1e-4, atol=2e-4)
    if config != "ddp":  # of which test_faults.py has enough
        assert_same_bits(other, continued("dpo", tmp_path / "killed", "update:kill@5", *flags, processes=2, config=config))


@pytest.fixture(scope="module")
def sums(tiny_model, tmp_path_factory):
    records = [{"prompt": f"{a} + {b} = ", "answer": str(a + b)} for a in range(6) for b in range(4)]
    file = write_lines(tmp_path_factory.mktemp("sums") / "sums.jsonl", records)
    return (
        *("--model_name_or_path", tiny_model, "--train_file", file, "--validation_file", file, "--max_new_tokens", 8),
        *("--global_batch_size", 4, "--group_size", 4, "--per_device_train_batch_size", 3, "--learning_rate", 5e-3),
        *("--per_device_eval_batch_size", 5, "--max_steps", 3, "--eval_steps", 3, "--eval_answers", 7),
    )


def test_its_scores_are_rewards(one, sums, tmp_path, monkeypatch):
    """Of prompt and answer, in training and in evaluations, on one process and on two."""
    final = one.folder / "final"
    flags = (*sums, "--reward_model", final)
    seen: list[tuple[list[int], float]] = []
    asked = rewards.RewardModel.__call__

    def note(self, texts):
        found = asked(self, texts)
        seen.extend(zip(texts, found, strict=True))
        return found

    monkeypatch.setattr(rewards.RewardModel, "__call__", note)
    alone = learn_here("grpo", tmp_path / "alone", *flags)
    model = AutoModelForSequenceClassification.from_pretrained(final, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(final)
    kept = [json.loads(line) for line in (alone.folder / "rollouts.jsonl").read_text().splitlines()]
    assert len(seen) == 3 * 16 + 2 * 7 and len(kept) == 3 * 4
    known = {(tokenizer.decode(ids), round(score, 5)) for ids, score in seen}
    for row in kept:  # prompt and answer, with the token that ends it
        assert (row["prompt"] + row["answer"], round(row["rewards"]["reward_model"], 5)) in known
    for ids, score in seen:
        with torch.no_grad():
            assert score == pytest.approx(model(torch.tensor([ids])).logits.item(), abs=1e-5)
    for place in ("reward", "eval_reward"):
        of_model = "reward/reward_model" if place == "reward" else "eval_reward_model"
        assert alone.each(place) == pytest.approx(alone.each(of_model), abs=1e-6) and len({*alone.each(place)}) > 1
    assert not alone.each("reward/correct") and min(alone.each("equal_groups")) == 0
    assert f"{final}, in torch.float32" in alone.summary
    other = run("grpo", tmp_path / "two", *flags, processes=2, config="fsdp2")
    for name in ("reward", "loss", "grad_norm", "eval_reward"):
        assert other.each(name) == pytest.approx(alone.each(name), abs=2e-4), name


def test_texts_are_scored_in_batches_as_alone(one, tiny_model):
    batch = SimpleNamespace(per_device_eval_batch_size=3)
    config = SimpleNamespace(reward_model=str(one.folder / "final"), batch=batch)
    setup = SimpleNamespace(config=config, device=torch.device("cpu"), about={})
    asked = rewards.RewardModel(setup, AutoTokenizer.from_pretrained(tiny_model), 64)
    rng = random.Random(0)
    texts = [[rng.randrange(5, 300) for _ in range(rng.randint(1, 40))] for _ in range(8)]
    assert asked(texts) == pytest.approx([asked([text])[0] for text in texts], abs=1e-6)


def test_bad_input_is_one_line(base, sums, tiny_model, records, tmp_path):
    other = tmp_path / "other"
    train_tokenizer(["quite another text of other words"] * 9, vocab_size=320).save_pretrained(other)
    head = tmp_path / "two"
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=2).save_pretrained(head)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(head)
    for name, message in (
        (tiny_model, "has 2 labels, a reward model has one"),
        (head, "has 2 labels, a reward model has one"),
        (other, "take a model with the policy's tokenizer"),
    ):
        assert message in refusal("grpo", *sums, "--reward_model", name, "--output_dir", tmp_path / "run"), name
    pairs = write_lines(tmp_path / "pairs.jsonl", [{**records[0], "by": "much"}, *records[1:]])
    for flags, message in (
        ((*base, "--eval_answers", 2), "--loss_type reward: drop --load_in_4bit, "),
        ((*base, "--packing"), "--packing on: a score is read at the end of an answer"),
        (instead(base, "--loss_type", "ipo"), "--margin_column is for --loss_type reward, not ipo"),
        (instead(base, "--train_file", pairs), ":1: 'by' is 'much', expected a number"),
        (instead(base, "--margin_column", "gap"), ":1: 'gap' is None, expected a number"),
    ):
        assert message in refusal("dpo", *flags, "--output_dir", tmp_path / "run"), message


def test_what_pads_ends_no_answer(tokenizer):
    """As of Qwen's base, which names one token alone and ends turns with another; and of GPT-2, which has no other."""
    assert padding_token(tokenizer) == tokenizer.convert_tokens_to_ids("<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]})
    tokenizer.pad_token = tokenizer.eos_token
    end = tokenizer.convert_tokens_to_ids("<|pad|>")
    assert padding_token(tokenizer, end) == tokenizer.pad_token_id == tokenizer.convert_tokens_to_ids("<x>")
    one = SimpleNamespace(pad_token_id=0, bos_token_id=0, unk_token_id=None, eos_token_id=0, added_tokens_decoder={0: "a"})
    with pytest.raises(ConfigError, match="no token for padding but the one that ends answers"):
        padding_token(one)
