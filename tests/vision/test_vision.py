"""Images in conversations: the forms of data, the model's own processor, and runs on several launches.

The references are plain transformers: the processor's own chat template, and the model's forward pass.
"""

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from transformers import AutoProcessor

from shared.data.order import IGNORED
from shared.models.loading import load_causal_lm
from shared.models.loss import causal_lm_loss
from shared.models.tokenizers import load_tokenizer
from shared.text import chat
from shared.text.options import ChatConfig
from shared.vision.conversations import ToImageSamples
from shared.vision.options import VisionConfig
from shared.vision.processing import ImageProcessor
from tests.conftest import run, slow
from tests.vision_models import FAMILIES, make

SIZES = [(60, 40), (30, 90), (112, 112)]


def noise(path: Path, width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng((seed, width, height)).integers(0, 255, (height, width, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(pixels)
    image.save(path)
    return image


def turn(role, *parts):
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "content": parts}


def picture(path):
    return {"type": "image", "path": path}


def write(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A file of three conversations: with one image, with two and two answers, and without any."""
    folder = tmp_path_factory.mktemp("three")
    for number, size in enumerate(SIZES):
        noise(folder / f"{number}.png", *size)
    records = [
        [turn("user", picture("0.png"), "What is this?"), turn("assistant", "A picture of noise.")],
        [
            turn("user", "Compare ", picture("1.png"), " and ", picture("2.png")),
            turn("assistant", "The second is larger."),
            turn("user", "Sure?"),
            turn("assistant", "Yes."),
        ],
        [turn("user", "No image here."), turn("assistant", "Right.")],
    ]
    return write(folder / "three.jsonl", [{"messages": messages} for messages in records])


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A file of 46 conversations with no, one or two images of many sizes, text first or last."""
    folder = tmp_path_factory.mktemp("many")
    rng = random.Random(0)
    records = []
    for number in range(46):
        names = [f"images/{number}-{i}.png" for i in range((1, 0, 2, 0, 0, 1)[number % 6])]
        for name in names:
            noise(folder / name, rng.randint(20, 90), rng.randint(20, 90), number)
        question = f"{number} " + " ".join(rng.choices(["what", "is", "red", "green", "small", "large"], k=rng.randint(1, 9)))
        answer = " ".join(rng.choices(["a", "picture", "of", "noise", "and", "more"], k=rng.randint(1, 12)))
        records.append({"messages": [turn("user", *map(picture, names), question), turn("assistant", answer)]})
    return write(folder / "many.jsonl", records)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function: family -> folder of its tiny model."""
    root = tmp_path_factory.mktemp("vision-models")

    def folder(family):
        if not (root / family).exists():
            make(family, root / family)
        return root / family

    return folder


def opened(file, model, **settings):
    tokenizer = load_tokenizer(model)
    vision = {name: settings.pop(name) for name in VisionConfig.__dataclass_fields__ if name in settings}
    kind = partial(ToImageSamples, processor=ImageProcessor(str(model), tokenizer), vision=VisionConfig(**vision))
    options = ChatConfig(train_file=(str(file),), **{"validation_file": (str(file),), "seq_length": 512} | settings)
    return chat.open_samples(options, tokenizer, kind)[0]


def marked(samples, tokenizer, index):
    return chat.marked(samples, tokenizer, index)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm", *map(slow, FAMILIES.keys() - {"qwen2_5_vl", "smolvlm"})])
def test_tokens_inputs_and_losses_are_those_of_plain_transformers(models, three, family):
    """The same ids as the processor's own chat template, the answers alone in the loss, padded batches as single rows."""
    folder = models(family)
    samples = opened(three, folder)
    model = load_causal_lm(str(folder), attn_implementation="auto", dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    losses = []
    for index, line in enumerate(three.read_text().splitlines()):
        messages = json.loads(line)["messages"]
        for message in messages:
            for part in message["content"]:
                if part["type"] == "image":
                    part["image"] = Image.open(three.parent / part.pop("path"))
        inputs = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        ids, learned = samples.tokens(index)
        assert inputs["input_ids"][0].tolist() == ids.tolist()
        answers = [message["content"][0]["text"] for message in messages if message["role"] == "assistant"]
        assert processor.tokenizer.decode(ids[learned]).replace("<|im_end|>", "|").split("|")[:-1] == answers
        floats = {name: v.float() if v.is_floating_point() else v for name, v in inputs.items()}
        with torch.no_grad():
            logits = model(**floats).logits[0, :-1].float()
        labels = torch.from_numpy(np.where(learned, ids, IGNORED)[1:]).long()
        losses.append(F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum").item())
    with torch.no_grad():
        for index, plain in enumerate(losses):
            assert causal_lm_loss(model, samples.collate([samples[index]])).item() == pytest.approx(plain, rel=1e-5)
        batch = samples.collate([samples[index] for index in range(3)], multiple_of=16)
        assert causal_lm_loss(model, batch).item() == pytest.approx(sum(losses), rel=1e-5)
    assert len(samples.collate([samples[2]])["labels"]) == 2  # a small image stands in


BASE = ("--max_steps", 6, "--global_batch_size", 8, "--per_device_train_batch_size", 2, "--seq_length", 256)
BASE += ("--eval_samples", 5, "--num_generations", 0, "--save_steps", 3, "--dataloader_num_workers", 1)


@pytest.fixture(scope="module")
def base(models, many):
    return (*BASE, "--train_file", many, "--model_name_or_path", models("qwen2_5_vl"), "--learning_rate", 1e-3)


@pytest.fixture(scope="module")
def one_process(base, tmp_path_factory):
    return run("full_finetune", tmp_path_factory.mktemp("one") / "run", *base)


@pytest.mark.parametrize(
    ("processes", "config", "flags", "strategy"),
    [
        (4, "fsdp2", ("--per_device_train_batch_size", 1), "FSDP"),  # ranks without an image at many steps
        slow(2, "ddp", (), "MULTI_CPU"),
        slow(2, "ddp", ("--per_device_train_batch_size", 4), "MULTI_CPU"),
        slow(1, None, ("--per_device_train_batch_size", 8), "NO"),
        slow(2, "deepspeed_zero3", ("--per_device_train_batch_size", 1), "DEEPSPEED"),
        slow(4, "hsdp", ("--per_device_train_batch_size", 1), "FSDP"),
        slow(2, "tensor_parallel", (), "MULTI_CPU"),
    ],
)
def test_every_launch_learns_the_same(one_process, base, tmp_path, processes, config, flags, strategy):
    result = run("full_finetune", tmp_path / "run", *base, *flags, processes=processes, config=config)
    print(result.output)
    for step, loss in one_process.losses.items():
        assert result.losses[step] == pytest.approx(loss, rel=1e-5)
    assert result.last("eval_loss") == pytest.approx(one_process.last("eval_loss"), rel=1e-5)


def test_answers_to_prompts_with_images_are_those_of_plain_transformers(models, many, tmp_path):
    """Two ranks answer prompts with and without images; final/ loads with its processor, `ask` takes an image."""
    base = models("qwen2_5_vl")
    flags = (*BASE, "--train_file", many, "--validation_file", many, "--model_name_or_path", base)
    flags += ("--eval_answers", 5, "--max_new_tokens", 6, "--max_steps", 2, "--learning_rate", 1e-3)
    result = run("lora_finetune", tmp_path / "run", *flags, "--merge_adapter", processes=2, config="fsdp2")
    print(result.output)
    rows = [json.loads(line) for line in (result.folder / "answers.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] == 2]
    assert len(rows) == 5 and (result.folder / "answers.png").stat().st_size > 10_000
    processor = AutoProcessor.from_pretrained(result.folder / "final")
    merged = AutoProcessor.from_pretrained(result.folder / "merged")
    assert merged.to_dict() == processor.to_dict() == AutoProcessor.from_pretrained(base).to_dict()
    model = load_causal_lm(str(result.folder / "merged"), attn_implementation="auto", dtype=torch.float32).eval()
    records = [json.loads(line)["messages"] for line in many.read_text().splitlines()]
    for row in rows:
        question = row["prompt"].split("<|im_start|>user\n")[1].split("<|im_end|>")[0].split("<|vision_end|>")[-1]
        (messages,) = [m for m in records if m[0]["content"][-1]["text"] == question]
        parts = [p if p["type"] == "text" else {"type": "image", "image": Image.open(many.parent / p["path"])}
                 for p in messages[0]["content"]]  # fmt: skip
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": parts}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
        found = model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=[0, end], pad_token_id=0)
        text = processor.tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
        assert row["answer"] == text
