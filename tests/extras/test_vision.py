"""Images in conversations, beside plain transformers: the processor's own chat template, the model's forward pass."""

import base64
import io
import json
import os
import random
import shutil
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageOps
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoConfig, AutoProcessor

from shared.data.order import IGNORED
from shared.extras.vision.conversations import ToImageSamples
from shared.extras.vision.processing import ImageProcessor
from shared.models.loading import class_of, load_causal_lm
from shared.models.loss import causal_lm_loss
from shared.models.tokenizers import load_tokenizer
from shared.process.errors import ConfigError
from shared.text import chat
from shared.text.images import see_images
from shared.text.options import ChatConfig, VisionConfig
from tests.conftest import instead, learn_here, run, slow, write_lines
from tests.run.test_evaluate import evaluated
from tests.same import assert_goes_on
from tests.vision_models import FAMILIES, make
from tools import audit


def noise(path: Path, width: int, height: int, seed: int = 0) -> None:
    pixels = np.random.default_rng((seed, width, height)).integers(0, 255, (height, width, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def turn(role, *parts):
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "content": parts}


def picture(path):
    return {"type": "image", "path": path}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A file of three conversations: with one image, with two and two answers, and without any."""
    folder = tmp_path_factory.mktemp("three")
    for number, size in enumerate([(60, 40), (30, 90), (112, 112)]):
        noise(folder / f"{number}.png", *size)
    one = [turn("user", picture("0.png"), "What is this?"), turn("assistant", "A picture of noise.")]
    two = [turn("user", "Compare ", picture("1.png"), " and ", picture("2.png")), turn("assistant", "The second is larger.")]
    two += [turn("user", "Sure?"), turn("assistant", "Yes.")]
    none = [turn("user", "No image here."), turn("assistant", "Right.")]
    return write_lines(folder / "three.jsonl", [{"messages": messages} for messages in (one, two, none)])


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
        words = rng.choices(["what", "is", "red", "green", "small", "large"], k=rng.randint(1, 9))
        question = " ".join([str(number), *words])
        answer = " ".join(rng.choices(["a", "picture", "of", "noise", "and", "more"], k=rng.randint(1, 12)))
        records.append({"messages": [turn("user", *map(picture, names), question), turn("assistant", answer)]})
    return write_lines(folder / "many.jsonl", records)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function: family -> folder of its tiny model."""
    root = tmp_path_factory.mktemp("vision-models")

    @cache
    def folder(family):
        make(family, root / family)
        return root / family

    return folder


def opened(file, model, **settings):
    tokenizer = load_tokenizer(model)
    vision = {name: settings.pop(name) for name in VisionConfig.__dataclass_fields__ if name in settings}
    kind = partial(ToImageSamples, processor=ImageProcessor(str(model), tokenizer), vision=VisionConfig(**vision))
    # in this process: one that refuses data leaves its workers to the garbage collector, which waits 5 s for each
    usual = {"validation_file": (str(file),), "seq_length": 1024, "preprocessing_num_workers": 0}
    options = ChatConfig(train_file=(str(file),), **usual | settings)
    return chat.open_samples(options, tokenizer, kind)[0]


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", "smolvlm", *map(slow, sorted(FAMILIES.keys() - {"qwen2_5_vl", "smolvlm", "paligemma"}))]
)
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
        template = samples.processor.tokenizer.chat_template  # Phi-4's processor has none of its own
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "chat_template": template}
        inputs = processor.apply_chat_template(messages, **options)
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
        for index, place in [(0, 0), (1, 0), (1, 1)]:
            row = samples[index]
            row["images"][place] = ImageOps.invert(row["images"][place])
            # the model sees, or what follows shows nothing
            assert abs(causal_lm_loss(model, samples.collate([row])).item() - losses[index]) > 1e-3
        for index, plain in enumerate(losses):
            assert causal_lm_loss(model, samples.collate([samples[index]])).item() == pytest.approx(plain, rel=1e-5)
        batch = samples.collate([samples[index] for index in range(3)], multiple_of=16)
        assert causal_lm_loss(model, batch).item() == pytest.approx(sum(losses), rel=1e-5)
    assert len(samples.collate([samples[2]])["labels"]) == 2  # a small image stands in


BASE = ("--max_steps", 4, "--global_batch_size", 8, "--per_device_train_batch_size", 2, "--seq_length", 256)
BASE += ("--eval_samples", 5, "--show_answers", 0, "--save_steps", 2, "--dataloader_num_workers", 1)
BASE += ("--metric_for_best_model", "none")


@pytest.fixture(scope="module")
def base(models, many):
    return (*BASE, "--train_file", many, "--model_name_or_path", models("qwen2_5_vl"), "--learning_rate", 1e-3)


EACH_ONE = ("--per_device_train_batch_size", 1)
SEES = ("--train_vision", "all", "--vision_lr_scale", 0.5)


@pytest.fixture(scope="module")
def one_process(base, tmp_path_factory):
    """A function: flags -> what one process learns with them."""
    return cache(lambda *flags: run("full_finetune", tmp_path_factory.mktemp("one") / "run", *base, *flags))


@pytest.mark.parametrize(
    ("processes", "config", "flags"),
    [
        (2, "fsdp2", EACH_ONE),  # ranks without an image at many steps
        slow(2, "ddp", SEES),
        slow(1, None, ("--per_device_train_batch_size", 8)),
        slow(4, "fsdp2", (*SEES, *EACH_ONE)),
    ],
)
def test_every_launch_learns_the_same(one_process, base, tmp_path, processes, config, flags):
    """Half of the micro-batches of single rows have no image; of the tower, what images reach is trained on all ranks.

    Every other launch: test_support.py.
    """
    reference = one_process(*(SEES if "--train_vision" in flags else ()))
    result = run("full_finetune", tmp_path / "run", *base, *flags, processes=processes, config=config)
    assert result.losses == pytest.approx(reference.losses, rel=1e-5)
    assert result.last("eval_loss") == pytest.approx(reference.last("eval_loss"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"paligemma"}))
def test_adapters_and_merged_weights_of_each_family_load_elsewhere(models, three, tmp_path, family):
    """As plain PEFT and transformers load them, both give the losses of the run's last evaluation."""
    from peft import PeftModel

    folder = models(family)
    flags = ("--train_file", three, "--validation_file", three, "--model_name_or_path", folder, "--merge_adapter")
    flags += ("--max_steps", 2, "--global_batch_size", 2, "--seq_length", 1024, "--show_answers", 0)
    wanted = learn_here("lora_finetune", tmp_path / "run", *flags, "--learning_rate", 1e-2).each("eval_loss")
    assert abs(wanted[-1] - wanted[0]) > 1e-3  # the adapter does something
    samples = opened(three, folder)
    batch = samples.collate([samples[index] for index in range(3)])
    model_class = class_of(AutoConfig.from_pretrained(folder))
    base = model_class.from_pretrained(folder, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "run" / "final")
    for model in (adapted, model_class.from_pretrained(tmp_path / "run" / "merged", dtype=torch.float32)):
        with torch.no_grad():
            loss = causal_lm_loss(model.eval(), batch).item() / len(batch["targets"])
        assert loss == pytest.approx(wanted[-1], rel=1e-4)


@pytest.mark.slow
def test_the_tower_is_trained_if_asked_alone(models, one_process):
    before = load_file(models("qwen2_5_vl") / "model.safetensors")
    for result, moves in ((one_process(), False), (one_process(*SEES), True)):
        tower = {name for name in before if ".visual." in f".{name}" or name.startswith("visual.")}
        moved = {name for name in tower if not torch.equal(before[name], result.weights()[name])}
        assert tower and (moved == tower if moves else not moved)


def test_answers_to_prompts_with_images_are_those_of_plain_transformers(models, many, tmp_path):
    """Two ranks answer prompts with and without images; final/ loads with its processor, `ask` takes an image."""
    base = models("qwen2_5_vl")
    flags = (*BASE, "--train_file", many, "--validation_file", many, "--model_name_or_path", base)
    flags += ("--eval_answers", 5, "--max_new_tokens", 6, "--max_steps", 2, "--learning_rate", 1e-3, "--merge_adapter")
    result = run("lora_finetune", tmp_path / "run", *flags, processes=2, config="fsdp2", env={"TESTS_PAINT": "1"})
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
        asked = [{"role": "user", "content": parts}]
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        inputs = processor.apply_chat_template(asked, **options)
        end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
        found = model.generate(**inputs, max_new_tokens=6, do_sample=False, eos_token_id=[0, end], pad_token_id=0)
        text = processor.tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert row["answer"] == text


def png(width=40, height=30) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), 9, np.uint8)).save(file, "PNG")
    return file.getvalue()


ANSWER = turn("assistant", "Grey.")
COLOUR = "Which colour?"


def asks(*parts):
    return {"messages": [turn("user", *parts), ANSWER]}


IN_TEXT = [{"role": "user", "content": f"<image>{COLOUR}"}, {"role": "assistant", "content": "Grey."}]
SHARED = [{"from": "human", "value": f"<image>{COLOUR}"}, {"from": "gpt", "value": "Grey."}]


def test_all_forms_of_data_read_to_the_same_tokens(models, tmp_path):
    """Parts, OpenAI's image_url, columns with marks, ShareGPT, Alpaca, bytes in Parquet, data: URLs."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = models("qwen2_5_vl")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(png())
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    as_bytes = {"bytes": png(), "path": None}
    records = {
        "path": asks(picture("a/x.png"), COLOUR),
        "absolute": asks(picture(str(tmp_path / "a/x.png")), COLOUR),
        "image_url": asks({"type": "image_url", "image_url": {"url": url}}, COLOUR),
        "next of the column": {"images": ["a/x.png"], "messages": [turn("user", {"type": "image"}, COLOUR), ANSWER]},
        "column": {"image": "a/x.png", "messages": IN_TEXT},
        "ShareGPT": {"images": ["a/x.png"], "conversations": SHARED},
        "Alpaca": {"images": "a/x.png", "instruction": f"<image>{COLOUR}", "output": "Grey."},
        "prompt": {"image": "a/x.png", "prompt": IN_TEXT[:1], "completion": IN_TEXT[1:]},
        "bytes": {"images": [as_bytes], "messages": IN_TEXT},
    }
    wanted = None
    for name, record in records.items():
        file = tmp_path / f"{name}.jsonl"
        if name == "bytes":
            file = tmp_path / "bytes.parquet"
            pq.write_table(pa.Table.from_pylist([record]), file)
        else:
            write_lines(file, [record])
        assert see_images(ChatConfig(train_file=(str(file),))), name
        samples = opened(file, folder)
        pixels = np.asarray(samples.images(samples.pictures(0))[0]).tolist()
        found = [values.tolist() for values in samples.tokens(0)], pixels
        wanted = wanted or found
        assert found == wanted, name
    assert not see_images(ChatConfig(train_file=(str(file),), allow_unused_columns=("images",)))


@pytest.mark.parametrize(
    ("record", "settings", "message"),
    [
        (asks(picture("../x.png"), COLOUR), {}, r"bad.jsonl:1: the image '../x.png' is outside"),
        (asks(picture("/etc/hostname"), COLOUR), {}, "is outside of"),
        (asks(picture("gone.png"), COLOUR), {}, "bad.jsonl:1: image 1: no such file: repair it"),
        (asks(picture("text.png"), COLOUR), {}, r"image 1: not an image .*--skip_bad_images"),
        (asks(picture("pipe.png"), COLOUR), {}, "bad.jsonl:1: image 1: no such file: repair it"),
        (asks(picture("data:image/png;base64,iVB*"), COLOUR), {}, "image 1: Only base64 data is allowed: repair it"),
        (asks(picture("cut.png"), COLOUR), {}, "bad.jsonl:1: image 1: "),
        (asks(picture("thin.png"), COLOUR), {}, r"bad.jsonl:1: image 1: the model's processor refuses 2 x 500 pixels \(abs"),
        (asks(picture("https://a.b/c.png"), COLOUR), {}, "is not a local file; --fetch_images downloads"),
        ({"images": ["a.png"] * 2, "messages": IN_TEXT}, {}, r"jsonl:1: 2 image\(s\) in the column 'images', but 1 place"),
        ({"images": ["a.png"], "messages": [turn("user", COLOUR), ANSWER]}, {}, "but 0 place"),
        (asks(picture("a.png"), "<|image_pad|>?"), {}, r"has 1 image\(s\), but 2 mark"),
        (asks(picture("a.png"), COLOUR), {"seq_length": 8}, "none of its 1 samples"),
        (asks({"type": "image", "image": 3}, COLOUR), {}, "an image is int, not a path"),
        (asks(picture("file:///etc/hostname"), COLOUR), {"fetch_images": True}, "is not a local file; --fetch"),
        (asks(picture("a" * 5000), COLOUR), {}, "image 1: .*File name too long"),
        ({"image": "a.png", "images": ["a.png"], "messages": IN_TEXT}, {}, "in both columns images and image"),
        ({"image": "a.png", "prompt": "<image>?", "completion": "b"}, {}, "images need messages"),
    ],
)  # fmt: skip
def test_bad_images_are_one_line_with_their_place(models, tmp_path, record, settings, message):
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "x.png").write_bytes(png())
    (folder / "a.png").write_bytes(png())
    (folder / "text.png").write_text("no picture")
    os.mkfifo(folder / "pipe.png")
    (folder / "thin.png").write_bytes(png(2, 500))
    (folder / "cut.png").write_bytes(png(200, 200)[:90])
    with pytest.raises(ConfigError, match=message):
        opened(write_lines(folder / "bad.jsonl", [record]), models("qwen2_5_vl"), **settings)


def test_bad_and_long_samples_are_left_out_and_said(models, tmp_path, capsys):
    """What is left out does not move the images of the others; --image_max_pixels makes a long one fit."""
    (tmp_path / "small.png").write_bytes(png())
    (tmp_path / "large.png").write_bytes(png(112, 112))
    (tmp_path / "thin.png").write_bytes(png(2, 500))
    names = ["gone.png", "thin.png", "large.png", "small.png"]
    records = [asks(picture(name), f"{COLOUR} {name}") for name in names]
    file = write_lines(tmp_path / "some.jsonl", [*records, asks("No image.")])
    samples = opened(file, models("qwen2_5_vl"), seq_length=34, skip_bad_images=True)
    assert [[picture.width for picture in samples.pictures(i)] for i in range(len(samples))] == [[40], []]
    said = capsys.readouterr().err
    assert "2 samples have an image that cannot be read, and are left out (after" in said
    assert "1 samples are longer than --seq_length, and left out: raise it; the first is" in said
    shrunk = opened(file, models("qwen2_5_vl"), seq_length=34, skip_bad_images=True, image_max_pixels=40 * 30)
    assert [image.size for i in range(3) for image in shrunk[i]["images"]] == [(34, 34), (40, 30)]
    (tmp_path / "small.png").write_bytes(png(50, 50))
    with pytest.raises(ConfigError, match=r"small.png: it is 50 x 50 pixels now, and was 40 x 30"):
        shrunk[1]


def test_adapters_stand_on_the_tower_if_named(base, tmp_path):
    """By names that the language model does not have; they are trained, and saved."""
    flags = ("--lora_target_modules", "q_proj", "visual.blocks.0.attn.qkv", "--max_steps", 2)
    weights = learn_here("lora_finetune", tmp_path / "run", *base, *flags).weights()
    tower = {name: weight for name, weight in weights.items() if "visual" in name}
    assert len(tower) == 2 and len(weights) == 6  # of two layers of text
    assert all(weight.abs().max() > 0 for weight in weights.values())


def test_images_are_mixed_with_texts_in_any_order(base, many, tmp_path):
    rows = [asks(f"No image {number}.") for number in range(12)]
    place = base.index(many) + 1
    flags = (*base[:place], write_lines(tmp_path / "texts.jsonl", rows), *base[place:], "--mix_weights", 3, 1)
    flags = (*instead(flags, "--max_steps", 3), "--order", "file", "--audit_data")
    learn_here("lora_finetune", tmp_path / "run", *flags)
    records = audit.records_of_steps(tmp_path / "run")
    first = records[1][1][many.name]
    assert [sum(sample < first for sample in samples) for _, _, samples in records.values()] == [6, 6, 6]
    parts = json.loads((tmp_path / "run/data.json").read_text())["parts"]
    assert parts[str(tmp_path / "texts.jsonl")]["samples"] == 12
    assert parts["in all"]["found"].keys() <= {"duplicates", "overlap"}


def with_template(model, folder, change):
    """A copy of a model whose chat template is changed."""
    shutil.copytree(model, folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(change(template))
    return folder


@pytest.mark.parametrize("family", ["llava_onevision", slow("qwen2_5_vl")])
@pytest.mark.parametrize("end", ["<|im_end|>", ""])
def test_turns_with_images_after_the_last_learned_one_are_left_out(models, tmp_path, family, end):
    """LLaVA-OneVision divides an image that is alone. The digest of an image, not its place, tells samples apart."""
    folder = with_template(models(family), tmp_path / "model", lambda text: text.replace("<|im_end|>", end))
    (tmp_path / "moved").mkdir()
    for name, size in {"a.png": (40, 30), "b.png": (70, 30), "moved/a.png": (40, 30), "moved/b.png": (70, 30)}.items():
        (tmp_path / name).write_bytes(png(*size))
    messages = [turn("user", picture("a.png"), COLOUR), ANSWER, turn("user", picture("b.png"), "And now?")]
    messages.append(turn("assistant", "Grey.") | {"weight": 0})
    files = [write_lines(tmp_path / place / "two.jsonl", [{"messages": messages}]) for place in (".", "moved")]
    samples, moved = (opened(file, folder) for file in files)
    processor = AutoProcessor.from_pretrained(folder)
    image = {"type": "image", "image": Image.open(tmp_path / "a.png")}
    first = [turn("user", image, COLOUR), ANSWER]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    plain = processor.apply_chat_template(first, **options)
    ids = plain.pop("input_ids")[0].tolist()
    learned_last = samples.tokens(0)[0].tolist()
    if not end:  # what follows the answer is cut, and a text has an end
        ids = [*ids[: len(learned_last) - 1], processor.tokenizer.eos_token_id]
    assert learned_last == ids
    batch = samples.collate([samples[0]])
    prompt = samples.prompt(0)[0]
    asked = processor.apply_chat_template(first[:1], add_generation_prompt=True, **options)
    assert prompt == asked["input_ids"][0].tolist()
    beside = samples.images_of([0]).inputs([0], torch.tensor([prompt]))
    for name in plain.keys() & beside.keys() - {"mm_token_type_ids"}:
        torch.testing.assert_close(batch[f"image.{name}"], plain[name])
        torch.testing.assert_close(beside[name], asked[name])
    model = load_causal_lm(str(folder), attn_implementation="auto", dtype=torch.float32).eval()
    with torch.no_grad():
        assert causal_lm_loss(model, batch).isfinite()
    assert samples.fingerprint == moved.fingerprint and samples.pictures(0) != moved.pictures(0)


def test_the_template_of_the_processor_writes_images_where_the_tokenizer_has_that_of_the_text_model(models, three, tmp_path):
    """As published LLaVA-OneVisions have them: in tokenizer_config.json, and in chat_template.json."""
    folder = with_template(models("llava_onevision"), tmp_path / "model", str)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    samples, wanted = opened(three, folder), opened(three, models("llava_onevision"))
    for index in range(3):
        assert samples.tokens(index)[0].tolist() == wanted.tokens(index)[0].tolist()


def test_a_model_that_does_not_see_or_sees_otherwise_is_refused(tiny_model, models, three):
    with pytest.raises(ConfigError, match="does not see images, and the data have some"):
        opened(three, tiny_model)
    with pytest.raises(ConfigError, match=r"PaliGemmaProcessor \(it gives token_type_ids another meaning\)"):
        opened(three, models("paligemma"))


def test_a_resumed_run_repeats_the_rest_bit_for_bit(base, one_process, tmp_path):
    """With worker processes."""
    straight = one_process()
    start = straight.folder / "checkpoint-000002"
    assert_goes_on(straight, run("full_finetune", tmp_path / "run", *base, "--resume_from_checkpoint", start), 2)


@pytest.mark.slow
def test_the_demo_learns_to_read_digits(tmp_path):
    flags = ("--demo_images", "--max_steps", 120, "--metric_for_best_model", "none")
    result = run("full_finetune", tmp_path / "run", *flags)
    assert result.last("eval_exact_match") > 0.3, result.output
    assert "--train_vision all trains 300,384 parameters" in result.output
    (held_out,) = yaml.safe_load((result.folder / "config.yaml").read_text())["validation_file"]
    again = evaluated(result.folder, "--test_file", held_out, "full_finetune", "--eval_answers", 64)
    assert again["exact_match"] == [pytest.approx(result.last("eval_exact_match"), abs=2e-4)]
