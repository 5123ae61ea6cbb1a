"""Pairs and prompts with images, beside plain transformers: the processor's own chat template, the model's forward pass."""

import json
import random
from functools import cache

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from shared.models.loading import load_causal_lm
from tests.conftest import learn_here, refusal, run, slow, with_fault, write_lines
from tests.extras.test_vision import models, noise, picture, turn
from tests.same import assert_same_bits

__all__ = ["models"]
WORDS = ["what", "is", "red", "green", "small", "large", "noise", "a"]
MARK = "<image>"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Pairs whose prompts have no, one or two images, as parts or in a column; one is two whole conversations."""
    folder = tmp_path_factory.mktemp("pairs")
    rng = random.Random(0)
    records = []
    for number in range(10):
        names = [f"images/{number}-{i}.png" for i in range((1, 0, 2, 1, 0)[number % 5])]
        for name in names:
            noise(folder / name, rng.randint(20, 90), rng.randint(20, 90), number)
        question, *answers = (" ".join(rng.choices(WORDS, k=rng.randint(1, most))) for most in (9, 12, 5))
        chosen, rejected = ([turn("assistant", answer)] for answer in answers)
        prompt = [turn("user", *map(picture, names), question)]
        if number % 2:
            prompt = [{"role": "user", "content": MARK * len(names) + question}]
        record = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        if number == 3:
            record = {"prompt": [], "chosen": prompt + chosen, "rejected": prompt + rejected}
        records.append(record | {"images": names if number % 2 else []})
    return write_lines(folder / "pairs.jsonl", records)


def plain(record, folder):
    """The messages of a prompt as the processor takes them, images opened, and those of both answers."""
    messages = [record["prompt"] + record[name] for name in ("chosen", "rejected")]
    names = iter(record["images"] * 2)
    for conversation in messages:
        for place, message in enumerate(conversation):
            content = message["content"]
            if isinstance(content, str):
                texts = content.split(MARK)
                content = [{"type": "image", "path": next(names)} for _ in texts[1:]] + [{"type": "text", "text": texts[-1]}]
            opened = [
                {"type": "image", "image": Image.open(folder / part["path"]).convert("RGB")} if "path" in part else part
                for part in content
            ]
            conversation[place] = {"role": message["role"], "content": opened}
    return messages


def answered(processor, messages):
    """(the inputs of a conversation, which tokens are its answer): the processor's, with and without the last turn."""
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template(messages, **options)
    asked = processor.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)["input_ids"]
    stop = inputs["input_ids"].shape[1] - processor.tokenizer("\n", return_tensors="pt")["input_ids"].shape[1]
    return inputs, slice(asked.shape[1], stop)


BASE = ("--seq_length", 512, "--show_answers", 0, "--learning_rate", 1e-3, "--lr_scheduler_type", "constant")
BASE += ("--max_grad_norm", 0, "--warmup_steps", 0, "--metric_for_best_model", "none", "--save_total_limit", 9)


@pytest.fixture(scope="module")
def base(models, pairs):
    flags = (*BASE, "--model_name_or_path", models("qwen2_5_vl"), "--train_file", pairs, "--validation_file", pairs)
    return (
        *flags,
        "--max_steps",
        4,
        "--global_batch_size",
        10,
        "--beta",
        0.5,
        "--eval_steps",
        2,
        "--save_steps",
        1,
        "--audit_data",
    )


@pytest.fixture(scope="module")
def one_process(base, tmp_path_factory):
    """A function: flags -> what one process learns with them."""
    flags = ("--per_device_train_batch_size", 5)
    return cache(lambda *more: learn_here("dpo", tmp_path_factory.mktemp("one") / "run", *base, *flags, *more))


def test_losses_are_those_of_a_plain_loop(models, pairs, one_process):
    """A second model, which sees the images, is the reference; one answer goes forward at a time."""
    ours = one_process("--full")
    folder = models("qwen2_5_vl")
    processor = AutoProcessor.from_pretrained(folder)
    model, reference = (
        load_causal_lm(str(folder), attn_implementation="auto", dtype=torch.float32).eval() for _ in range(2)
    )
    records = [json.loads(line) for line in pairs.read_text().splitlines()]
    both = [[answered(processor, messages) for messages in plain(record, pairs.parent)] for record in records]

    def log_prob(of, inputs, answer):
        ids = inputs["input_ids"][0]
        found = of(**inputs).logits[0].log_softmax(-1)
        return found[answer.start - 1 : answer.stop - 1].gather(-1, ids[answer, None]).sum()

    with torch.no_grad():
        fixed = [[log_prob(reference, *each) for each in pair] for pair in both]
        blind = {name: value for name, value in both[0][0][0].items() if name in ("input_ids", "attention_mask")}
        assert abs(log_prob(reference, blind, both[0][0][1]) - fixed[0][0]) > 1e-3  # it sees
    language = [parameter for name, parameter in model.named_parameters() if "visual" not in name]
    optimizer = torch.optim.AdamW(language, lr=1e-3, weight_decay=0.0)
    for step in range(4):
        losses = []
        for pair, at_first in zip(both, fixed, strict=True):
            chosen, rejected = (log_prob(model, *each) - old for each, old in zip(pair, at_first, strict=True))
            losses.append(-torch.nn.functional.logsigmoid(0.5 * (chosen - rejected)))
        loss = torch.stack(losses).mean()
        assert ours.each("loss")[step] == pytest.approx(loss.item(), rel=1e-5)
        if step == 0:
            assert ours.each("rewards/chosen")[0] == pytest.approx(0, abs=1e-4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    AutoProcessor.from_pretrained(ours.folder / "final")


@pytest.mark.parametrize("config", ["ddp", slow("fsdp2")])
def test_each_launch_learns_the_same_and_a_kill_changes_nothing(one_process, base, tmp_path, config):
    """Micro-batches of a pair: some have no image. With adapters, which are off for the reference."""
    alone = one_process("--lora_r", 4)
    flags = (*base, "--lora_r", 4, "--per_device_train_batch_size", 1, "--dataloader_num_workers", 1)
    whole = run("dpo", tmp_path / "whole", *flags, processes=2, config=config)
    assert whole.manifest(4)["world_size"] == 2 and alone.each("loss")[-1] < 0.6
    for name in ("loss", "eval_loss", "rewards/margins", "logps/rejected"):
        assert whole.each(name) == pytest.approx(alone.each(name), rel=1e-5, abs=1e-5), name
    assert with_fault("dpo", tmp_path / "run", "update:kill@3", *flags, processes=2, config=config).returncode
    assert_same_bits(whole, run("dpo", tmp_path / "run", *flags, processes=2, config=config))


def test_a_model_that_does_not_see_is_refused_in_one_line(base, tiny_model, tmp_path):
    said = refusal("dpo", *base, "--model_name_or_path", tiny_model, "--output_dir", tmp_path / "run")
    assert "does not see images, and the data have some" in said
