"""Pairs and prompts with images, beside plain transformers: the processor's own chat template, the model's forward pass."""

import json
import random
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from shared.config.options import BatchConfig
from shared.data.loader import Share
from shared.models.loading import load_causal_lm
from shared.models.tokenizers import load_tokenizer
from shared.rollouts.options import PromptConfig
from shared.rollouts.prompts import read_prompts
from shared.rollouts.rollouts import Rollouts
from shared.text.options import VisionConfig
from tests.conftest import continued, instead, learn_here, load_template, refusal, run, slow, write_lines
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
        if number == 8:  # as TRL's data
            prompt[0]["content"][0] = {"type": "image"}
        records.append(record | {"images": names if number % 2 or number == 8 else []})
    return write_lines(folder / "pairs.jsonl", records)


def plain(record, folder, answers=("chosen", "rejected")):
    """The messages of a prompt as the processor takes them, images opened, with those of each answer."""
    messages = [record["prompt"] + record[name] for name in answers]
    names = iter(record["images"] * 2)
    for conversation in messages:
        for place, message in enumerate(conversation):
            content = message["content"]
            if isinstance(content, str):
                texts = content.split(MARK)
                content = [{"type": "image", "path": next(names)} for _ in texts[1:]] + [{"type": "text", "text": texts[-1]}]
            opened = [
                {"type": "image", "image": Image.open(folder / (part.get("path") or next(names))).convert("RGB")}
                if part["type"] == "image"
                else part
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
    flags += ("--max_steps", 3, "--global_batch_size", 10, "--beta", 0.5, "--eval_steps", 2, "--save_steps", 1)
    return (*flags, "--audit_data")


@pytest.fixture(scope="module")
def one_process(base, tmp_path_factory):
    """A function: flags -> what one process learns with them."""
    flags = ("--per_device_train_batch_size", 5)
    return cache(lambda *more: learn_here("dpo", tmp_path_factory.mktemp("one") / "run", *base, *flags, *more))


def load(folder):
    return load_causal_lm(str(folder), attn_implementation="auto", dtype=torch.float32).eval()


def test_losses_are_those_of_a_plain_loop(models, pairs, one_process):
    """A second model, which sees the images, is the reference; one answer goes forward at a time."""
    ours = one_process("--full")
    folder = models("qwen2_5_vl")
    processor = AutoProcessor.from_pretrained(folder)
    model, reference = (load(folder) for _ in range(2))
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
    for step in range(3):
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
    assert alone.each("loss")[-1] < 0.6
    for name in ("loss", "eval_loss", "rewards/margins", "logps/rejected"):
        assert whole.each(name) == pytest.approx(alone.each(name), rel=1e-5, abs=1e-5), name
    assert_same_bits(whole, continued("dpo", tmp_path / "run", "update:kill@2", *flags, processes=2, config=config))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Prompts with no, one or two images, texts and messages, whose answers are digits."""
    folder = tmp_path_factory.mktemp("prompts")
    rng = random.Random(1)
    records = []
    for number in range(8):
        names = [f"{number}-{i}.png" for i in range((1, 0, 2, 1)[number % 4])]
        for name in names:
            noise(folder / name, rng.randint(20, 90), rng.randint(20, 90), number)
        question = f"{number} {' '.join(rng.choices(WORDS, k=rng.randint(1, 6)))}"
        record = {"prompt": [turn("user", *map(picture, names), question)], "images": []}
        if number % 2:
            record = {"prompt": MARK * len(names) + question, "images": names}
        records.append(record | {"answer": str(number % 3), "place": number})
    return write_lines(folder / "prompts.jsonl", records)


@pytest.fixture(scope="module")
def of_digits(models, prompts, tmp_path_factory):
    """A model that answers with a digit, mostly: otherwise, all rewards would be 0."""
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    chats = [[as_turn(row), turn("assistant", str(digit))] for row in rows for digit in range(3)]
    rows = [{"messages": chat, "images": rows[number // 3]["images"]} for number, chat in enumerate(chats)]
    flags = ("--train_file", write_lines(prompts.parent / "chats.jsonl", rows), "--learning_rate", 1e-2, "--max_steps", 24)
    flags += ("--model_name_or_path", models("qwen2_5_vl"), "--global_batch_size", 8, "--seq_length", 256)
    flags += ("--show_answers", 0)
    return learn_here("full_finetune", tmp_path_factory.mktemp("digits") / "run", *flags).folder / "final"


def as_turn(record):
    prompt = record["prompt"]
    return {"role": "user", "content": prompt} if isinstance(prompt, str) else prompt[0]


def asked(record, folder, processor):
    """The processor's inputs for a prompt."""
    (messages,) = plain({"prompt": [as_turn(record)], "chosen": [], "images": record["images"]}, folder, ["chosen"])
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    return processor.apply_chat_template(messages, add_generation_prompt=True, **options)


def after(model, inputs, answer):
    """Logits of a model after a prompt and each token of an answer but the last: [tokens, vocab]."""
    answer = torch.tensor([answer], dtype=torch.int64)
    inputs = dict(inputs)
    count = inputs["input_ids"].shape[1]
    for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
        if name in inputs:
            more = {"input_ids": answer, "attention_mask": torch.ones_like(answer)}.get(name, torch.zeros_like(answer))
            inputs[name] = torch.cat([inputs[name], more], 1)
    return model(**inputs).logits[0, count - 1 :]


def test_answers_and_their_loss_are_those_of_a_plain_loop(of_digits, prompts):
    """One answer, one token at a time. Also of several updates, and of the batch that takes the most memory."""
    template = load_template("grpo")
    data = PromptConfig(train_file=(str(prompts),), validation_file=(str(prompts),), preprocessing_num_workers=0)
    config = template.Config(
        model_name_or_path=str(of_digits), data=data, group_size=4, max_new_tokens=3, updates_per_rollout=2,
        batch=BatchConfig(global_batch_size=4, per_device_train_batch_size=3, per_device_eval_batch_size=5),
    )  # fmt: skip
    tokenizer = load_tokenizer(str(of_digits))
    train, _ = read_prompts(config, tokenizer)
    model, before = (load(of_digits) for _ in range(2))
    rollouts = Rollouts(config, train, tokenizer, Share(0, 1, torch.device("cpu")))
    state = SimpleNamespace(state=SimpleNamespace(step=1), is_main=False)
    totals, _ = rollouts.sample(state, model, template.rewards)
    rollouts.tensors["advantages"].copy_(template.advantages_of(config, totals).flatten())
    batches, tokens, _ = rollouts.micro_batches(1, "token")
    rollouts.note_old(model, batches)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)  # ratios are no longer 1
    loss = sum(template.PolicyLoss(config, model)(batch) for batch in batches).item() / tokens

    processor = AutoProcessor.from_pretrained(of_digits)
    records = [json.loads(line) for line in prompts.read_text().splitlines()]
    terms = []
    ends = {processor.tokenizer.eos_token_id, processor.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    with torch.no_grad():
        for row, index in enumerate(np.repeat(rollouts.order.indices(0), 4)):
            record = records[index]
            assert train.prompt(index)[2] == {"answer": record["answer"], "place": index}  # no image
            inputs = asked(record, prompts.parent, processor)
            assert inputs["input_ids"][0].tolist() == train.prompt(index)[0]
            answer = []
            for draw in np.random.default_rng((rollouts.order.seed, 0, row)).random(3):
                likely = after(before, inputs, answer)[-1].double().softmax(-1).cumsum(-1)
                answer.append(int(torch.searchsorted(likely, draw * likely[-1:], right=True)))
                if answer[-1] in ends:
                    break
            sampled = rollouts.tensors["answers"][row]
            assert sampled[sampled >= 0].tolist() == answer
            group = totals[row // 4]
            if group.max() == group.min():
                continue
            labels = torch.tensor(answer)[:, None]
            new, old = (after(of, inputs, answer)[:-1].log_softmax(-1).gather(-1, labels)[:, 0] for of in (model, before))
            advantage = (group[row % 4] - group.mean()) / (group.std() + 1e-4)
            ratio = (new - old).exp()
            terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))
    terms = torch.cat(terms)
    assert len(terms) == tokens and (terms.abs() > 0.1).any()
    assert loss == pytest.approx(terms.mean().item(), rel=1e-5, abs=1e-6)
    assert template.PolicyLoss(config, model)(rollouts.longest(2)).isfinite()


@pytest.fixture(scope="module")
def rewarded(of_digits, prompts):
    return (
        *("--model_name_or_path", of_digits, "--train_file", prompts, "--validation_file", prompts, "--max_new_tokens", 3),
        *("--global_batch_size", 4, "--group_size", 4, "--per_device_train_batch_size", 2, "--learning_rate", 5e-3),
        *("--per_device_eval_batch_size", 5, "--max_steps", 3, "--eval_steps", 2, "--save_steps", 1, "--lora_r", 4),
        *("--updates_per_rollout", 2, "--eval_answers", 5, "--show_answers", 1, "--audit_data", "--save_total_limit", 9),
    )


@pytest.mark.parametrize("config", ["ddp", slow("fsdp2")])
def test_rewards_teach_the_same_on_each_launch_and_a_kill_changes_nothing(rewarded, tmp_path, config):
    """Between two updates of a rollout; with a divergence from the model without adapters, which sees the images."""
    flags = (*rewarded, "--kl_coef", 0.1)
    alone = learn_here("grpo", tmp_path / "one", *flags)
    assert min(alone.each("equal_groups")) < 1 and max(alone.each("kl")) > 0 and max(alone.each("grad_norm")) > 1e-3
    whole = run("grpo", tmp_path / "whole", *flags, processes=2, config=config)
    for name in ("loss", "kl", "reward", "grad_norm", "eval_reward", "answer_tokens"):
        assert whole.each(name) == pytest.approx(alone.each(name), abs=2e-4), name
    assert_same_bits(whole, continued("grpo", tmp_path / "run", "update:kill@2", *flags, processes=2, config=config))
    AutoProcessor.from_pretrained(whole.folder / "final")


def test_a_model_that_does_not_see_is_refused_in_one_line(base, rewarded, tiny_model, tmp_path):
    for template, flags in (("dpo", base), ("grpo", rewarded)):
        flags = instead(flags, "--model_name_or_path", tiny_model)
        said = refusal(template, *flags, "--output_dir", tmp_path / template)
        assert "does not see images, and the data have some" in said


def test_last_answers_in_parts_are_texts_of_reference(models, tmp_path):
    """A file of chats with images, as it is for fine-tuning."""
    noise(tmp_path / "a.png", 40, 30)
    chat = [turn("user", picture("a.png"), "How many?"), turn("assistant", "Two: ", "2")]
    file = str(write_lines(tmp_path / "chats.jsonl", [{"messages": chat}]))
    data = PromptConfig(train_file=(file,), validation_file=(file,), preprocessing_num_workers=0)
    folder = str(models("qwen2_5_vl"))
    config = SimpleNamespace(data=data, vision=VisionConfig(), model_name_or_path=folder)
    train, _ = read_prompts(config, load_tokenizer(folder))
    assert train.prompt(0)[2] == {"reference": "Two: 2"} and len(train.pictures(0)) == 1
