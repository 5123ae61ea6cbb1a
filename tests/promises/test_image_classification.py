"""image_classification.py, launched for real."""

import copy
import json
import os
import shutil
import subprocess
import sys
import tarfile
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification, pipeline

from shared.run.tensors import saved_tensors
from tests.conftest import instead, learn_here, load_template, paint, refusal, run, save_classifier, slow
from tests.plain_loop import losses_of, pixels_of
from tests.same import assert_goes_on, assert_same_learning

learn = partial(learn_here, "image_classification")

AUGMENTED = (
    *("--auto_augment", "randaugment", "--random_erasing", 0.3, "--mixup_alpha", 0.3, "--cutmix_alpha", 1.0),
    *("--crop_min_scale", 0.5),
)
MEMORY = ("--gradient_checkpointing", "full")


@pytest.fixture(scope="module")
def base(image_folder, architectures):
    """Flags of a tiny run with every augmentation, whose epochs end in a ragged global batch."""
    return (
        *("--train_dir", image_folder, "--config_name", architectures / "convnext", "--image_size", 16, *AUGMENTED),
        *("--learning_rate", 3e-3, "--global_batch_size", 8, "--per_device_eval_batch_size", 4, "--ema_decay", 0.7),
        *("--max_steps", 12, "--eval_steps", 6, "--save_steps", 6, "--save_total_limit", 5, "--dataloader_num_workers", 0),
    )


@pytest.fixture(scope="module")
def one_process(base, tmp_path_factory):
    return learn(tmp_path_factory.mktemp("one"), *base, "--per_device_train_batch_size", 8)


@pytest.mark.parametrize(("config", "per_device"), [("ddp", 2), ("fsdp2", 4)])
def test_learns_the_same_however_launched(one_process, base, image_folder, tmp_path, config, per_device):
    """DDP also reads tar files of the same images, FSDP2 in worker processes."""
    flags = (*base, "--per_device_train_batch_size", per_device)
    flags += ("--dataloader_num_workers", 1) if config == "fsdp2" else ()
    if config == "ddp":
        for split in ("train", "val"):
            with tarfile.open(tmp_path / f"{split}.tar", "w") as tar:
                for path in sorted(image_folder.glob(f"{split}/*/*"), key=str):
                    tar.add(path, f"{path.parent.name}/{path.name}")
        assert base[0] == "--train_dir"
        flags = ("--train_file", tmp_path / "train.tar", "--validation_file", tmp_path / "val.tar", *flags[2:])
    other = run("image_classification", tmp_path / "run", *flags, processes=2, config=config)
    assert_same_learning(one_process, other, atol=None)
    assert {*np.diff([0, *one_process.each("images")]).tolist()} == {8, 5}  # a ragged batch ends an epoch
    ours, theirs = other.evaluation, one_process.evaluation
    assert ours["images"] == 17  # on any number of processes, of which it is no multiple
    assert ours["classes"] == theirs["classes"] and ours["accuracy"] == theirs["accuracy"]


def test_crops_of_tensors_are_those_of_pictures(image_folder):
    """Training crops uint8 tensors, faster than Pillow and (bicubic) rounded differently: on average by half a level."""
    from torchvision.transforms import v2

    from shared.config import parse as configs
    from shared.data.order import seed_all
    from shared.images import files as images
    from shared.images.decoding import decode
    from shared.images.processor import processor_of
    from shared.run import launch

    template = load_template("image_classification")
    flags = ["--train_dir", str(image_folder), "--image_size", "24", "--global_batch_size", "4"]
    settings = template.with_defaults(configs.parse(template.Config, flags))
    found, processor = images.prepare(settings.data), processor_of(settings)
    run = SimpleNamespace(config=settings, accelerator=launch.start(0), about={}, set_defaults=lambda *_, **__: settings)
    loader, _ = template.build_loaders(run, found, processor, torch.nn.Identity())
    crop = v2.RandomResizedCrop(24, scale=(settings.recipe.crop_min_scale, 1.0), interpolation=processor.resample)
    plain = v2.Compose([crop, v2.RandomHorizontalFlip(settings.recipe.horizontal_flip), v2.PILToTensor()])
    for window in loader.windows(0, 3):
        ours = torch.cat([batch["pixel_values"] for batch in window.micro_batches])
        for index, pixels in zip(window.indices.flatten().tolist(), ours, strict=True):
            (files,) = found.train.files
            picture = decode(files[found.train.index[index, 1]])
            seed_all(settings.batch.seed, window.epoch, index, 1, devices=False)
            difference = (plain(picture).int() - pixels.int()).abs()
            assert difference.max() <= 8 and difference.float().mean() < 0.5, (difference.max(), difference.float().mean())


@pytest.mark.slow
def test_batchnorm_is_sharded(base, architectures, tmp_path):
    """Under FSDP2 as under DDP: moving average and best weights, too. Few steps: BatchNorm of 4 magnifies rounding."""
    flags = (*base, "--config_name", architectures / "timm", "--per_device_train_batch_size", 4, "--image_size", 32)
    flags = (*flags, "--max_steps", 4, "--eval_steps", 2, "--learning_rate", 1e-4)
    sharded = run("image_classification", tmp_path / "fsdp2", *flags, processes=2, config="fsdp2")
    ddp = run("image_classification", tmp_path / "ddp", *flags, processes=2)
    assert_same_learning(ddp, sharded, rel=1e-4, atol=None)


def test_two_processes_tell_of_batchnorm_and_skip_the_same_damaged_images(base, image_folder, architectures, tmp_path):
    folder = shutil.copytree(image_folder, tmp_path / "images")
    (folder / "train/cat/0.png").write_bytes(b"")
    (folder / "train/dog/1.png").write_bytes((folder / "train/dog/1.png").read_bytes()[:300])
    (folder / "val/owl/2.png").write_text("not a picture")
    flags = (*instead(base, "--train_dir", folder), "--skip_bad_images", "--config_name", architectures / "resnet")
    flags = (*flags, "--per_device_train_batch_size", 4, "--metric_for_best_model", "none", "--ema_decay", 0)
    apart = run("image_classification", tmp_path / "run", *flags, processes=2)
    assert "skipped 3 of 70 images" in apart.output and apart.evaluation["images"] == 16
    assert ": 51 images of 3 classes; validation: 16" in apart.summary
    assert "BatchNorm takes its statistics from 4 images" in apart.summary and "--sync_batchnorm" in apart.summary
    # What a run logs is measured with the statistics of all processes, as what it saves afterwards has them.
    assert apart.evaluation["loss"] == pytest.approx(apart.last("eval_loss"), rel=1e-6)


def test_equals_a_plain_loop(architectures, tmp_path):
    """A hand-written loop with none of shared/; all images in each batch, in three parts, so order plays no part.

    The model has its own order of the classes, and keeps it.
    """
    names = ("dog", "owl", "cat")
    counts = (4, 7, 10)
    kinds = [kind for kind in range(3) for _ in range(counts[kind])]
    pictures = [(kind, tmp_path / "data/train" / names[kind] / f"{number:02}.png") for number, kind in enumerate(kinds)]
    held_out = [(number % 3, tmp_path / "data/val" / names[number % 3] / f"{number:02}.png") for number in range(7)]
    for number, (kind, path) in enumerate(pictures + held_out):
        paint(path, kind, number, (24, 24))
    steps, peak, warmup, ema_decay = 6, 3e-3, 2, 0.3
    model_folder = save_classifier(architectures / "convnext", tmp_path / "model", names)
    (model_folder / "preprocessor_config.json").unlink()  # so that the usual one is used, which resizes as the loop below
    theirs = learn(
        *(tmp_path / "run", "--train_dir", tmp_path / "data", "--image_size", 16, "--model_name_or_path", model_folder),
        *("--crop_min_scale", 1, "--horizontal_flip", 0, "--crop_pct", 1, "--label_smoothing", 0.1),
        *("--learning_rate", peak, "--weight_decay", 0.1, "--warmup_steps", warmup / steps, "--max_steps", steps),
        *("--max_grad_norm", 0.5, "--global_batch_size", 21, "--per_device_train_batch_size", 7),
        *("--class_weights", "balanced", "--metric_for_best_model", "none", "--dataloader_num_workers", 0),
        *("--ema_decay", ema_decay, "--eval_steps", steps),
    )

    model = AutoModelForImageClassification.from_pretrained(tmp_path / "model", dtype=torch.float32)
    pixels, labels = pixels_of(path for _, path in pictures), torch.tensor(kinds)
    weights = torch.tensor([21 / 3 / count for count in counts])[labels]
    average = copy.deepcopy(model)

    def loss_of():
        logits = model(pixel_values=pixels).logits
        return (weights * F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")).mean()

    how = {"warmup": warmup, "clip": 0.5, "decays": lambda _, p: p.ndim >= 2}
    for step, loss in enumerate(losses_of(model, loss_of, steps, peak, **how)):
        assert theirs.losses[step + 1] == pytest.approx(loss, rel=1e-5)
        decay = min(ema_decay, (1 + step) / (10 + step))
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 1 - decay)
    saved = theirs.weights()
    for name, parameter in average.named_parameters():
        # where a gradient is nearly zero, Adam takes its rounding for a step
        torch.testing.assert_close(saved[name], parameter.detach(), rtol=1e-3, atol=1e-4)
    assert json.loads((theirs.folder / "final/config.json").read_text())["label2id"] == {"dog": 0, "owl": 1, "cat": 2}
    logits = average.eval()(pixel_values=pixels_of(path for _, path in held_out)).logits
    expected = F.cross_entropy(logits, torch.tensor([kind for kind, _ in held_out])).item()
    assert theirs.last("eval_loss") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("architecture", ["convnext", slow("timm")])
def test_final_gives_the_same_answers_in_a_pipeline(image_folder, architectures, base, tmp_path, architecture):
    config = transformers.AutoConfig.from_pretrained(architectures / architecture)
    if architecture == "timm":  # whose own size is another
        config.pretrained_cfg = {"input_size": [3, 64, 64], "crop_pct": 0.95, "mean": [0.5] * 3, "std": [0.5] * 3}
    config.save_pretrained(tmp_path / "config")
    flags = (*base, "--config_name", tmp_path / "config", "--per_device_train_batch_size", 8, "--image_size", 32)
    report = learn(tmp_path, *flags).evaluation
    classify = pipeline("image-classification", model=str(tmp_path / "final"), device="cpu")
    paths = sorted((image_folder / "val").glob("*/*.png"))
    answers = {str(path): classify(str(path))[0] for path in paths}
    right = [answers[str(path)]["label"] == path.parent.name for path in paths]
    assert sum(right) / len(paths) == report["accuracy"]
    for mistake in report["mistakes"]:
        assert answers[mistake["image"]]["label"] == mistake["predicted"]
        assert answers[mistake["image"]]["score"] == pytest.approx(mistake["confidence"], abs=1e-3)
    assert classify.model.config.label2id == {"cat": 0, "dog": 1, "owl": 2}
    files = {path.name for path in tmp_path.iterdir()}
    assert {"confusion_matrix.png", "evaluation.json", "curves.png", "final", "config.yaml", "metrics.jsonl"} <= files


def vision_models() -> dict[str, tuple]:
    """Models as they are published, none of them a classifier, and their processors."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    of_images = {"patch_size": 4, **sizes}
    stages = {"hidden_sizes": [8, 8, 16, 24], "depths": [1, 1, 1, 1]}
    squares = transformers.SiglipImageProcessor(size={"height": 16, "width": 16})
    return {
        "dinov3": (transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**of_images)), squares),
        "convnext": (transformers.DINOv3ConvNextModel(transformers.DINOv3ConvNextConfig(**stages)), squares),
        "clip": (transformers.CLIPVisionModel(transformers.CLIPVisionConfig(image_size=16, **of_images)), squares),
    }


@pytest.mark.slow
def test_a_model_without_a_head_gets_one_and_the_line_of_its_card_loads_it(tmp_path):
    """In another process, with transformers alone."""
    for kind in range(3):
        for number in range(12):
            paint(tmp_path / f"data/{'train' if number < 8 else 'val'}/{kind}/{number}.png", kind, number, (40, 40))
    flags = ("--train_dir", tmp_path / "data", "--global_batch_size", 8, "--per_device_train_batch_size", 4, "--crop_pct", 1)
    flags += ("--max_steps", 2, "--learning_rate", 0.01, "--dataloader_num_workers", 0, "--metric_for_best_model", "none")
    torch.manual_seed(0)
    expected = {}
    for name, (model, processor) in vision_models().items():
        folder = tmp_path / name
        model.save_pretrained(folder / "model")
        processor.save_pretrained(folder / "model")
        args = (*flags, "--model_name_or_path", folder / "model", "--image_size", 32 if name == "convnext" else 16)
        expected[name] = learn(folder, *args).last("eval_loss")
        before, after = (load_file(folder / part / "model.safetensors") for part in ("model", "final"))
        same = [torch.equal(weight, after[key]) for key, weight in before.items() if key in after]
        assert name == "clip" or (same and not all(same)), name
        if name == "dinov3":  # goes on from there without the code in that folder
            again = (*args, "--model_name_or_path", folder / "final", "--learning_rate", 1e-9)
            assert learn(folder / "again", *again).last("eval_loss") == pytest.approx(expected[name], rel=1e-5)
    paths = sorted(map(str, tmp_path.glob("data/val/*/*.png")))
    code = f"""import json, os
answers = {{}}
for name in {list(expected)}:
    os.chdir({str(tmp_path)!r} + "/" + name)
    usage = open("final/README.md").read().split("```python")[1].split("```")[0]
    exec(usage)
    answers[name] = classify({paths}, top_k=3)
print(json.dumps(answers))"""
    env = {**os.environ, "PYTHONPATH": "", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name, answers in json.loads(done.stdout).items():
        by_label = [{answer["label"]: answer["score"] for answer in of_one} for of_one in answers]
        scores = [of_one[path.split("/")[-2]] for path, of_one in zip(paths, by_label, strict=True)]
        assert -np.log(scores).mean() == pytest.approx(expected[name], rel=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "extra"), [("convnext", ["--torch_compile"]), ("vit", MEMORY)])
def test_speed_and_memory_flags_do_not_change_what_is_learned(base, architectures, tmp_path, architecture, extra):
    flags = (*base, "--per_device_train_batch_size", 8, "--config_name", architectures / architecture)
    reference = learn(tmp_path / "reference", *flags)
    assert_same_learning(reference, learn(tmp_path / "run", *flags, *extra), rel=1e-4, atol=None)


@pytest.mark.parametrize("optimizer", ["sgd", slow("muon")])
def test_other_optimizers_and_layer_decay_learn_and_resume(base, architectures, tmp_path, optimizer):
    flags = (*base, "--per_device_train_batch_size", 8, "--optim", optimizer, "--layer_decay", 0.7)
    flags = (*flags, "--learning_rate", 0.05 if optimizer == "sgd" else 5e-3, "--config_name", architectures / "vit")
    whole = learn(tmp_path / "whole", *flags)
    assert whole.last("eval_loss") < whole.each("eval_loss")[0]
    start = ("--resume_from_checkpoint", tmp_path / "whole/checkpoint-000006")
    assert_goes_on(whole, learn(tmp_path / "resumed", *flags, *start), 6)


def test_linear_probing_changes_the_head_alone(base, architectures, tmp_path):
    """The head is new, since the classes differ; weights and statistics of the backbone stay what they were."""
    model = save_classifier(architectures / "resnet", tmp_path / "model", classes=("x", "y", "z"))
    before = AutoModelForImageClassification.from_pretrained(model).state_dict()
    flags = [flag for flag in base if flag not in ("--config_name", architectures / "convnext")]
    flags += ["--model_name_or_path", model, "--freeze_backbone", "--per_device_train_batch_size", 4]
    after = learn(tmp_path / "run", *flags).weights()
    head = ("classifier.1.weight", "classifier.1.bias")
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(head)
    saved = saved_tensors(tmp_path / "run/checkpoint-000012")
    moments = {name for name in saved if name.startswith("optimizer") and name.endswith("exp_avg")}
    assert moments == {f"optimizer.{name}.exp_avg" for name in head}
    assert not [name for name in saved if "convolution" in name]


def test_final_is_the_best_and_training_stops_early(base, image_folder, tmp_path):
    """A learning rate that ruins the model: the best evaluation is an early one."""
    flags = (*base, "--per_device_train_batch_size", 8, "--ema_decay", 0.2, "--max_grad_norm", 0, "--eval_steps", 2)
    flags = (*flags, "--max_steps", 60, "--learning_rate", 0.3, "--early_stopping_patience", 3, "--warmup_steps", 0.2)
    flags = (*flags, "--metric_for_best_model", "loss")
    folder = tmp_path / "run"
    done = learn(folder, *flags)
    # the one before training is never the best
    evaluations = {row["step"]: row["eval_loss"] for row in done.rows if "eval_loss" in row and row["step"]}
    best, last = min(evaluations, key=evaluations.get), max(evaluations)
    assert last == best + 6 < 60
    assert done.evaluation["loss"] == pytest.approx(evaluations[best], rel=1e-5)
    assert done.evaluation["loss"] != pytest.approx(evaluations[last], rel=1e-2)
    classify = pipeline("image-classification", model=str(folder / "final"), device="cpu")
    paths = sorted((image_folder / "val").glob("*/*.png"))
    scores = [{a["label"]: a["score"] for a in classify(str(path))}[path.parent.name] for path in paths]
    assert -np.log(scores).mean() == pytest.approx(evaluations[best], rel=1e-3)
    assert done.manifest(last)["state"]["best_step"] == best and done.manifest(last)["state"]["stopped_early"]
    before = (folder / "metrics.jsonl").read_bytes()
    learn(folder, *flags)  # says that it is finished
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_the_best_of_another_resolution_is_no_best(base, tmp_path, capsys):
    flags = (*base, "--per_device_train_batch_size", 8, "--ema_decay", 0, "--eval_steps", 2)
    learn(tmp_path / "run", *flags, "--max_steps", 2)
    more = ("--image_size", 24, "--max_steps", 4, "--allow_changed", "image_size", "max_steps")
    done = learn(tmp_path / "run", *flags, *more)
    assert "the best score, of step 2, came from another metric, other data or settings" in capsys.readouterr().err
    assert f"| eval_loss | {done.evaluation['loss']:.4f} |" in (done.folder / "final/README.md").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--per_device_train_batch_size", "1"), "choose an even number"),
        (("--global_batch_size", "64", "--per_device_train_batch_size", "64"), "53 training samples are fewer"),
        (("--freeze_backbone",), "--model_name_or_path"),
        (("--early_stopping_patience", "2", "--metric_for_best_model", "none"), "--metric_for_best_model"),
        (("--dress_rehearsal", "--metric_for_best_model", "kappa"), "kappa: an evaluation of this run measures loss, acc"),
    ],
)
def test_bad_input_is_one_config_error(base, tmp_path, flags, message):
    flags = (*base, "--per_device_train_batch_size", 2, "--output_dir", tmp_path, *flags)
    assert message in refusal("image_classification", *flags)


def test_the_demo_learns_digits_with_no_argument(tmp_path):
    done = run("image_classification", tmp_path, "--max_steps", 40, "--dataloader_num_workers", 0)
    assert "scikit-learn's handwritten digits: 1,528 images of 10 classes; validation: 269" in done.summary
    assert done.evaluation["accuracy"] > 0.8
