"""Heads, resolutions, BatchNorm, preprocessing and mixed images, on tiny models made here."""

import json
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.transforms.v2.functional import pil_to_tensor
from transformers import (
    AutoModelForImageClassification,
    BitImageProcessor,
    ConvNextImageProcessor,
    ViTConfig,
    ViTImageProcessor,
)
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from shared.config.options import BatchConfig
from shared.data.order import IGNORED
from shared.images.augment import draw_mix, mix, training_rows
from shared.images.decoding import decode, decode_tensor
from shared.images.options import RecipeConfig
from shared.images.processor import ToModel, image_processor
from shared.models import image_classifier
from shared.models.batch_norm import batch_norm_advice, has_batch_norm, synchronise_batch_norm
from shared.models.blocks import heads
from shared.models.image_classifier import from_scratch, load_pretrained
from shared.models.resolution import at_resolution, resample
from shared.process.errors import ConfigError
from tests.small_models import of_images

CLASSES = ("ant", "bee", "cow")


def make(name):
    torch.manual_seed(0)
    return AutoModelForImageClassification.from_config(of_images(name, CLASSES))


NAMES = ("resnet", "vit", "convnext", "swin", "timm")


def head_names(model):
    own = {id(p) for module in heads(model) for p in module.parameters()}
    return {key for key, p in model.named_parameters() if id(p) in own}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """saved(name): the folder of a model with random weights, and its weights."""

    @cache
    def get(name):
        folder, model = tmp_path_factory.mktemp(name), make(name)
        model.save_pretrained(folder)
        return folder, {key: value.clone() for key, value in model.state_dict().items()}

    return get


@pytest.mark.parametrize("name", NAMES)
def test_the_same_labels_in_any_order_keep_the_head_and_the_models_order(name, saved, capsys):
    folder, weights = saved(name)
    model, classes = load_pretrained(str(folder), ("cow", "ant", "bee"), image_size=32)
    assert classes == CLASSES
    assert model.config.id2label == dict(enumerate(CLASSES))
    assert model.config.label2id == {"ant": 0, "bee": 1, "cow": 2}
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert "its head is kept" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("classes", [("x", "y", "z"), ("ant", "bee", "dog"), ("p", "q", "r", "s", "t")])
def test_other_labels_get_a_new_head_on_the_same_backbone(name, classes, saved, capsys):
    folder, weights = saved(name)
    torch.manual_seed(1)
    model, found = load_pretrained(str(folder), classes, image_size=32)
    assert found == classes
    assert model.config.id2label == dict(enumerate(classes))
    of_head = head_names(model)
    head = {"resnet": "classifier.1", "timm": "timm_model.fc"}.get(name, "classifier")
    assert of_head == {f"{head}.weight", f"{head}.bias"}
    for key, value in model.state_dict().items():
        if key not in of_head:
            assert torch.equal(value, weights[key]), key
        elif key.endswith("bias"):
            assert value.shape == (len(classes),)
            assert not value.any()
        else:
            assert value.shape == (len(classes), weights[key].shape[1])
            assert value.std().item() == pytest.approx(0.02, rel=0.5)
            assert value.shape != weights[key].shape or not torch.equal(value, weights[key])
    assert model(pixel_values=torch.zeros(1, 3, 32, 32)).logits.shape == (1, len(classes))
    assert f"a new head for {len(classes)} classes" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["missing", "shape"])
def test_a_backbone_with_missing_weights_is_refused_by_name(tmp_path, damage):
    make("resnet").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    key = "resnet.embedder.embedder.convolution.weight"
    if damage == "missing":
        del weights[key]
    else:
        weights[key] = torch.zeros(5, 3, 7, 7)
    save_file(weights, file, metadata={"format": "pt"})
    for classes in (CLASSES, ("x", "y")):
        expected = f"^{tmp_path}: 1 weights of the backbone are missing or of another shape: {key}$"
        with pytest.raises(ConfigError, match=expected):
            load_pretrained(str(tmp_path), classes, image_size=32)


def test_position_embeddings_are_resampled_as_timm_does():
    layers = pytest.importorskip("timm.layers")
    embeddings = torch.randn(1, 2 + 16, 8)
    expected = layers.resample_abs_pos_embed(embeddings, [6, 6], [4, 4], num_prefix_tokens=2)
    torch.testing.assert_close(resample(embeddings, torch.empty(1, 2 + 36, 8), 36), expected)
    torch.testing.assert_close(resample(embeddings[0], torch.empty(2 + 36, 8), 36), expected[0])


@pytest.mark.parametrize("name", ["vit", "deit", "clip", "timm's vit"])
def test_a_model_of_one_size_takes_another_and_is_saved_with_it(name, tmp_path, capsys):
    """All but the position embeddings stays, and what is saved is loaded by transformers as it was."""
    made = make(name)
    made.save_pretrained(tmp_path / "32")
    same, _ = load_pretrained(str(tmp_path / "32"), CLASSES, image_size=32)
    assert all(torch.equal(value, made.state_dict()[key]) for key, value in same.state_dict().items())
    assert "resampled" not in capsys.readouterr().err
    model, _ = load_pretrained(str(tmp_path / "32"), CLASSES, image_size=48)
    said = "the position embeddings are resampled for images of 48 x 48 pixels"
    assert name == "timm's vit" or said in capsys.readouterr().err
    before, after = made.state_dict(), model.state_dict()
    (changed,) = (key for key, value in after.items() if not torch.equal(value, before.get(key, value[:0])))
    assert "pos" in changed and after[changed].shape[-2] == 36 + (2 if name == "deit" else 1)
    model.save_pretrained(tmp_path / "48")
    again = AutoModelForImageClassification.from_pretrained(tmp_path / "48").eval()
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        torch.testing.assert_close(again(pixel_values=images).logits, model.eval()(pixel_values=images).logits)
        random = at_resolution(from_scratch(of_images(name, CLASSES), CLASSES), 48)
        assert random(pixel_values=images).logits.shape == (2, 3)


def test_a_model_that_cannot_take_another_size_is_refused_and_any_is_loaded_as_fp32(tmp_path):
    config = of_images("vit", CLASSES)
    config.image_size = [32, 32]  # as no repository of the Hub has it
    AutoModelForImageClassification.from_config(config).bfloat16().save_pretrained(tmp_path)
    model, _ = load_pretrained(str(tmp_path), CLASSES, image_size=32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with pytest.raises(ConfigError, match=r"^--image_size 48: ViTForImageClassification does not take it \(.*48\*48"):
        load_pretrained(str(tmp_path), CLASSES, image_size=48)


@pytest.mark.parametrize("prefix", ["", "vision_model."])  # of transformers now, and of published files
@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_a_vision_tower_gets_the_classifier_of_its_whole_model(kind, prefix, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = getattr(transformers, f"{kind}VisionConfig")(image_size=16, patch_size=4, **sizes)
    tower = getattr(transformers, f"{kind}VisionModel")(config)
    tower.save_pretrained(tmp_path)
    weights = {key.removeprefix("vision_model."): w for key, w in load_file(tmp_path / "model.safetensors").items()}
    save_file({prefix + key: w for key, w in weights.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    model, _ = load_pretrained(str(tmp_path), CLASSES, image_size=16)
    assert type(model).__name__ == f"{kind}ForImageClassification"
    found = model.vision_model.state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weight) for key, weight in weights.items())


def test_a_sharded_model_with_a_head_of_ours_is_saved_as_a_whole_one(tmp_path):
    """fully_shard gives the model a class of its own, in a module of PyTorch."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    model = from_scratch(transformers.DINOv3ViTConfig(patch_size=4, **sizes), CLASSES)
    model.__class__ = type(f"FSDP{type(model).__name__}", (type(model),), {"__module__": "torch.distributed.fsdp"})
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors", "pooled_head.py"}
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["auto_map"] == {"AutoModelForImageClassification": "pooled_head.DINOv3ViTForImageClassification"}


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_backbone_rests_and_its_statistics_do_not_move(name):
    model = make(name)
    assert has_batch_norm(model) is (name in ("resnet", "timm"))
    image_classifier.freeze_backbone(model)
    assert {key for key, p in model.named_parameters() if p.requires_grad} == head_names(model)
    image_classifier.training_mode(model)
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    model(pixel_values=torch.randn(4, 3, 32, 32)).logits.sum().backward()
    assert all(torch.equal(value, buffers[key]) for key, value in model.named_buffers())
    assert model.training
    assert all(module.training for module in heads(model))
    backbone = getattr(model, model.base_model_prefix)
    resting = [module for module in backbone.modules() if not module.training]
    assert len(resting) > 5
    assert not any(p.requires_grad for module in resting for p in module.parameters())
    assert not any(m.training for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    assert not has_batch_norm(model)


def test_a_model_without_a_head_cannot_be_probed():
    model = make("resnet")
    model.classifier = nn.Identity()
    with pytest.raises(ConfigError, match="ResNetForImageClassification has no head that could be trained alone"):
        image_classifier.freeze_backbone(model)
    del model.classifier
    with pytest.raises(ConfigError, match="ResNetForImageClassification has no head named classifier, "):
        image_classifier.freeze_backbone(model)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("whole", "at_once", "world_size", "quiet"),
    [(64, 32, 2, True), (64, 16, 4, False), (16, 16, 1, True), (16, 8, 2, False), (1024, 32, 32, True)],
)
def test_advice_is_given_when_batch_norm_sees_few_images(whole, at_once, world_size, quiet):
    batch = BatchConfig(global_batch_size=whole, per_device_train_batch_size=at_once)
    advice = batch_norm_advice(make("resnet"), batch, world_size)
    said = f"warning: BatchNorm takes its statistics from {at_once} images at a time, not from the global batch of {whole};"
    better = "Better: a larger --per_device_train_batch_size, --sync_batchnorm on several GPUs, or a"
    assert advice is None if quiet else advice.startswith(said) and better in advice
    assert batch_norm_advice(make("vit"), batch, world_size) is None
    with pytest.raises(ConfigError, match="--sync_batchnorm needs GPUs"):
        synchronise_batch_norm(make("resnet"), torch.device("cpu"))


# Preprocessing -------------------------------------------------------------------------------------------------------


def settings_of(processor):
    size, crop = dict(processor.size), dict(processor.crop_size)
    settings = size["shortest_edge"], crop["height"], list(processor.image_mean), list(processor.image_std)
    assert crop["height"] == crop["width"]
    return *settings, int(processor.resample)


IMAGENET = list(IMAGENET_DEFAULT_MEAN), list(IMAGENET_DEFAULT_STD), Image.Resampling.BICUBIC
COLOURS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.25] * 3, "resample": Image.Resampling.BILINEAR}


@pytest.mark.parametrize(
    ("saved", "size", "crop_pct", "edge", "pixels"),
    [
        (None, None, None, 256, 224),
        (None, 96, 0.75, 128, 96),
        (None, 32, 1.0, 32, 32),
        (ConvNextImageProcessor(size={"shortest_edge": 160}, crop_pct=0.8, **COLOURS), None, None, 200, 160),
        (ConvNextImageProcessor(size={"shortest_edge": 160}, crop_pct=0.8, **COLOURS), 80, None, 100, 80),
        (ConvNextImageProcessor(size={"shortest_edge": 160}, crop_pct=0.8, **COLOURS), None, 0.5, 320, 160),
        (ViTImageProcessor(size={"height": 192, "width": 192}, **COLOURS), None, None, round(192 / 0.875), 192),
    ],
)
def test_the_settings_of_a_models_processor_are_taken_and_else_imagenets(saved, size, crop_pct, edge, pixels, tmp_path):
    if saved:
        saved.save_pretrained(tmp_path)
    processor = image_processor(str(tmp_path) if saved else None, size, crop_pct)
    assert isinstance(processor, BitImageProcessor)
    assert settings_of(processor) == (edge, pixels, *(COLOURS.values() if saved else IMAGENET))


def test_what_a_processor_does_and_ours_does_not_is_a_warning_and_so_is_having_none(tmp_path, capsys):
    crop = {"size": {"shortest_edge": 24}, "crop_size": {"height": 32, "width": 32}}
    BitImageProcessor(**crop, do_resize=False).save_pretrained(tmp_path / "crops")
    assert settings_of(image_processor(str(tmp_path / "crops"), None, None))[:2] == (32, 32)  # no borders
    said = " ".join(capsys.readouterr().err.split())
    assert f"warning: {tmp_path}/crops sets do_resize: False, which is not done here" in said
    of_images("resnet", CLASSES).save_pretrained(tmp_path / "none")
    processor = image_processor(str(tmp_path / "none"), None, None)
    assert settings_of(processor) == settings_of(image_processor(None, None, None))
    assert f"warning: {tmp_path}/none has no image processor" in " ".join(capsys.readouterr().err.split())
    ViTConfig(image_size=48, patch_size=8).save_pretrained(tmp_path / "none")  # its positions are for that size
    assert settings_of(image_processor(str(tmp_path / "none"), None, None))[1] == 48
    with pytest.raises(ConfigError, match="give --image_size"):
        image_classifier.with_image_size(ViTConfig(), "image_size=32", 224)


def test_a_timm_models_own_settings_are_taken(tmp_path):
    model = make("timm")
    model.config.pretrained_cfg = {"input_size": [3, 176, 176], "crop_pct": 0.8, "interpolation": "bilinear"}
    model.config.pretrained_cfg |= {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.2]}
    model.save_pretrained(tmp_path)
    processor = image_processor(str(tmp_path), None, None)
    assert settings_of(processor) == (220, 176, [0.5, 0.4, 0.3], [0.2] * 3, Image.Resampling.BILINEAR)


@pytest.mark.parametrize("channels_last", [False, True])
def test_normalising_on_the_device_is_what_the_processor_does(channels_last):
    processor = image_processor(None, 32, 1.0)
    picture = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3)).astype(np.uint8)
    expected = processor([Image.fromarray(p) for p in picture], return_tensors="pt")["pixel_values"]
    pixels = torch.from_numpy(picture).permute(0, 3, 1, 2)
    result = ToModel(processor, torch.device("cpu"), channels_last=channels_last)(pixels)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-6)
    assert result.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


@pytest.mark.parametrize(("augment", "mixup"), [("none", 0.4), ("trivialaugment", 0.0)])
def test_training_images_are_crops_that_are_not_enlarged_and_erased_with_the_mean_colour(augment, mixup):
    images, processor = SimpleNamespace(decode=decode), image_processor(None, 24, None)
    recipe = RecipeConfig(0.25, horizontal_flip=0.3, auto_augment=augment, random_erasing=0.2, mixup_alpha=mixup)
    rows = training_rows(images, recipe, processor)
    crop, flip, *_, erase = rows.keywords["transform"].transforms
    assert (crop.scale, crop.ratio) == ((0.25, 1.0), (3 / 4, 4 / 3))
    assert (crop.size, crop.interpolation) == ((24, 24), processor.resample)
    assert (flip.p, erase.p, erase.value) == (0.3, 0.2, [124, 116, 104])
    assert images.at_least == 56  # of 56 x 56 pixels, a crop of 3 to 4 and a quarter of the area is 24.2 pixels wide
    assert images.decode is (decode_tensor if augment == "none" else decode)
    picture = Image.fromarray(np.full((40, 30, 3), 9, np.uint8))
    row = rows({"image": pil_to_tensor(picture) if augment == "none" else picture, "labels": 1})
    assert (row["pixel_values"].dtype, row["pixel_values"].shape, row["labels"]) == (torch.uint8, (3, 24, 24), 1)
    assert row.keys() - {"mix"} == {"pixel_values", "labels"} and ("mix" in row) is (mixup > 0)


# Mixing --------------------------------------------------------------------------------------------------------------


@st.composite
def batches(draw):
    """(images [batch, 2, h, w], labels, draws) of 1 to 8 rows, some of which do not count."""
    size = draw(st.integers(1, 8))
    height, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    labels = draw(st.lists(st.sampled_from([IGNORED, 0, 1, 2, 3]), min_size=size, max_size=size))
    draws = torch.rand(size, 4, generator=generator)
    draws[:, 0] = torch.tensor([float(c) for c in draw(st.lists(st.booleans(), min_size=size, max_size=size))])
    extreme = draw(st.sampled_from([None, 0.0, 1.0]))
    if extreme is not None:
        draws[0, 1] = extreme
    return torch.rand(size, 2, height, width, generator=generator), torch.tensor(labels), draws


@settings(deadline=None, max_examples=150)
@given(given_batch=batches(), data=st.data())
def test_targets_sum_to_1_in_rows_that_count_however_the_batch_was_divided(given_batch, data):
    images, labels, draws = given_batch
    mixed, targets = mix(images, labels, draws, 4)
    assert (mixed.shape, mixed.dtype, targets.shape) == (images.shape, images.dtype, (len(labels), 4))
    torch.testing.assert_close(targets.sum(1), (labels != IGNORED).float(), atol=1e-5, rtol=0)
    assert (targets >= 0).all()
    parts, start = [], 0
    while start < len(labels):
        stop = start + 2 * data.draw(st.integers(1, 4))
        parts.append(mix(images[start:stop], labels[start:stop], draws[start:stop], 4))
        start = stop
    assert torch.equal(torch.cat([p[0] for p in parts]), mixed)
    assert torch.equal(torch.cat([p[1] for p in parts]), targets)


@settings(deadline=None, max_examples=100)
@given(share=st.floats(0, 1), centre=st.tuples(*[st.floats(0, 0.999)] * 2), size=st.tuples(*[st.integers(1, 20)] * 2))
def test_cutmix_pastes_a_box_and_the_targets_are_the_shares_of_pixels(share, centre, size):
    images = torch.stack([torch.zeros(3, *size), torch.ones(3, *size)])
    draws = torch.tensor([[1.0, share, *centre], [1.0, 1.0, 0.5, 0.5]])
    mixed, targets = mix(images, torch.tensor([2, 0]), draws, 3)
    assert set(mixed[0].unique().tolist()) <= {0.0, 1.0}
    pasted = mixed[0, 0]
    assert torch.equal(mixed[0], pasted.expand(3, *size))
    rows, columns = pasted.any(1), pasted.any(0)
    assert torch.equal(pasted.bool(), rows[:, None] & columns[None, :])  # a rectangle
    for line in (rows, columns):
        where = line.nonzero().flatten()
        assert len(where) == 0 or where[-1] - where[0] + 1 == len(where)  # without a gap
    from_partner = pasted.mean().item()
    assert targets[0].tolist() == pytest.approx([from_partner, 0, 1 - from_partner], abs=1e-6)
    assert from_partner <= (1 - share) + (size[0] + size[1] + 1) / (size[0] * size[1])  # to whole pixels
    assert torch.equal(mixed[1], images[1])
    assert targets[1].tolist() == [1, 0, 0]


def test_mixup_and_cutmix_are_the_formulas_of_their_papers():
    torch.manual_seed(0)
    images, labels = torch.randn(4, 3, 5, 6), torch.tensor([0, 2, 2, 1])
    shares = torch.tensor([0.25, 0.5, 0.875, 0.0])
    draws = torch.stack([torch.zeros(4), shares, torch.rand(4), torch.rand(4)], dim=1)
    mixed, targets = mix(images, labels, draws, 3)
    eye = torch.eye(3)
    for row, partner in enumerate([1, 0, 3, 2]):
        share = shares[row]
        torch.testing.assert_close(mixed[row], share * images[row] + (1 - share) * images[partner])
        torch.testing.assert_close(targets[row], share * eye[labels[row]] + (1 - share) * eye[labels[partner]])
    # the box of CutMix lies where it was drawn: with 0.75 of the image kept it has half of its sides, up to the border
    images = torch.stack([torch.zeros(3, 10, 20), torch.ones(3, 10, 20)])
    draws = torch.tensor([[1.0, 0.75, 0.51, 0.1], [1.0, 1.0, 0.5, 0.5]])
    expected = torch.zeros(10, 20)
    expected[3:8, :7] = 1
    assert torch.equal(mix(images, torch.tensor([2, 0]), draws, 3)[0][0], expected.expand(3, 10, 20))


@pytest.mark.parametrize("cut", [0.0, 1.0])
def test_a_partner_that_does_not_count_leaves_the_image_alone(cut):
    images = torch.randn(5, 3, 4, 4)
    labels = torch.tensor([1, IGNORED, IGNORED, 0, 2])  # the last has no partner at all
    draws = torch.tensor([[cut, 0.1, 0.5, 0.5]]).repeat(5, 1)
    mixed, targets = mix(images, labels, draws, 3)
    for row in (0, 3, 4):
        assert torch.equal(mixed[row], images[row])
    assert targets.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize(("mixup", "cutmix", "cuts"), [(0.2, 0.0, 0.0), (0.0, 1.0, 1.0), (0.8, 1.0, 0.5)])
def test_draws_are_shares_from_the_beta_asked_for(mixup, cutmix, cuts):
    torch.manual_seed(0)
    draws = torch.stack([draw_mix(mixup, cutmix) for _ in range(1500)])
    assert (draws.shape, draws.dtype) == ((1500, 4), torch.float32)
    assert set(draws[:, 0].tolist()) == ({0.0, 1.0} if cuts == 0.5 else {cuts})
    assert draws[:, 0].mean().item() == pytest.approx(cuts, abs=0.05)
    assert (draws >= 0).all() and (draws <= 1).all()
    for cut, alpha in ((0.0, mixup), (1.0, cutmix)):
        shares = draws[draws[:, 0] == cut, 1]
        if len(shares):
            assert shares.mean().item() == pytest.approx(0.5, abs=0.04)
            assert shares.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.12)  # of Beta(alpha, alpha)
    assert draws[:, 2:].mean(0).tolist() == pytest.approx([0.5, 0.5], abs=0.03)
