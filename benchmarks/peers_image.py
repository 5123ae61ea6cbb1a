"""templates/image_classification.py beside Trainer, a torchvision loop and a timm-style one; loaders and model alone.

    python benchmarks/peers_image.py                                 # writes benchmarks/peers_image.json
    python benchmarks/peers_image.py --rounds 5 --steps 160 --output results.json
    python benchmarks/peers_image.py --only loaders --image_size 224 --images 1000 --steps 160
    python benchmarks/peers_image.py --model_folder resnet-50/ --image_size 224 --batch_size 256 --images 8000 \\
        --workers 14 --mixed_precision bf16          # on a GPU; the folder holds a config.json

- template: templates/image_classification.py, started with `accelerate launch`.
- plain: a loop that uses nothing of shared/: ImageFolder, transforms v2, DataLoader, autocast, clip, fused AdamW.
- timm: timm's data set, loader with its prefetcher, optimizer factory and clipping, in the steps of timm's train.py.
- Trainer: transformers.Trainer on a `datasets` image folder, as in transformers' run_image_classification.py.
- model alone: plain's loop on one batch that is ready on the device: what a perfect loader would reach.
- loaders: images decoded, augmented, collated, put on the device and normalised, with no model. plain's is Pillow with
  torchvision's transforms v2.

All train the same architecture from random weights on the same JPEGs, which are made here, at the same constant rate
without weight decay, with RandomResizedCrop (bicubic, at least 0.35 of the area) and horizontal flip, as many workers
(which stay for all epochs) and threads, and pinned memory on a GPU. The rest is as each program has it: cuDNN's
autotuning (plain and timm), where images are normalised, when the loss is read, what happens between epochs.
Augmentation is random, so losses cannot be equal: they must fall, and all must process equally many images, or the
script ends with an error.

A figure is the median over intervals of an eighth of the steps, without the first, which warms up, and the last, in
which workers that have nothing left to read free their cores: on CPU take at least 32 steps a worker (the template's
read 4 batches ahead each). Start-up, compilation, evaluation and saving are not timed.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import rounds
import torch
from pictures import CLASSES, make_images, make_resnet_18
from rounds import DEVICE, Clock, Row
from torch import nn
from torch.nn import functional as F

CROP = (0.35, 1.0)  # the crop's share of the area: the template's default
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LOOPS, LOADERS = (
    ("template", "plain", "timm", "Trainer", "model alone"),
    ("template's loader", "plain's loader", "timm's loader"),
)


# What all are given ----------------------------------------------------------------------------------------------------


def build_model(options: argparse.Namespace) -> Any:
    """The architecture in the model folder, with random weights."""
    from transformers import AutoConfig, AutoModelForImageClassification

    torch.manual_seed(0)
    architecture = AutoConfig.from_pretrained(options.model_folder, num_labels=CLASSES)
    if hasattr(architecture, "image_size"):
        architecture.image_size = options.image_size
    model = AutoModelForImageClassification.from_config(architecture, dtype=torch.float32)
    return model.to(DEVICE).to(memory_format=memory_format(options))


def memory_format(options: argparse.Namespace) -> torch.memory_format:
    """As the template chooses it for convolutions."""
    on_gpu = DEVICE.type == "cuda" and options.mixed_precision == "bf16"
    return torch.channels_last if on_gpu else torch.contiguous_format


def endless(loader: Iterable) -> Iterator[Any]:
    while True:
        yield from loader


# The loops -------------------------------------------------------------------------------------------------------------


def plain_loader(options: argparse.Namespace) -> Iterable:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(options.image_size, scale=CROP, interpolation=v2.InterpolationMode.BICUBIC)
    to_float = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    images = ImageFolder(f"{options.folder}/images/train", v2.Compose([crop, v2.RandomHorizontalFlip(), *to_float]))
    loading: Row = {"num_workers": options.workers, "persistent_workers": True, "pin_memory": DEVICE.type == "cuda"}
    return DataLoader(images, options.batch_size, shuffle=True, drop_last=True, **loading)


def plain_loop(options: argparse.Namespace) -> list[Row]:
    torch.backends.cudnn.benchmark = True
    model, loader = build_model(options).train(), plain_loader(options)
    if options.work == "model alone":
        loader = repeat([tensor.to(DEVICE) for tensor in next(iter(loader))])
    if options.torch_compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0, fused=True)
    total: Any = torch.zeros((), device=DEVICE)
    clock = Clock(options.steps)
    for step, (images, labels) in enumerate(islice(endless(loader), options.steps), 1):
        images = images.to(DEVICE, non_blocking=True).contiguous(memory_format=memory_format(options))
        labels = labels.to(DEVICE, non_blocking=True)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=options.mixed_precision == "bf16"):
            logits = model(pixel_values=images).logits
        loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        clock.count(images=len(labels))
        if clock.due(step):
            clock.mark(step, total.item() / (step - clock.step))
            total.zero_()
    return clock.intervals


def timm_loader(options: argparse.Namespace) -> Iterable:
    from timm.data import create_dataset, create_loader

    data = create_dataset("", root=f"{options.folder}/images", split="train", is_training=True)
    augmenting: Row = {"scale": CROP, "hflip": 0.5, "color_jitter": None, "interpolation": "bicubic"}
    loading: Row = {"num_workers": options.workers, "pin_memory": DEVICE.type == "cuda", "device": DEVICE}
    size = (3, options.image_size, options.image_size)
    return create_loader(data, size, options.batch_size, is_training=True, **augmenting, **loading)


def timm_loop(options: argparse.Namespace) -> list[Row]:
    from timm.optim import create_optimizer_v2
    from timm.utils import AverageMeter, dispatch_clip_grad

    torch.backends.cudnn.benchmark = True
    model, loader = build_model(options), timm_loader(options)
    optimizer = create_optimizer_v2(model, "adamw", lr=options.learning_rate, weight_decay=0.0, fused=True)
    run_model: Any = torch.compile(model) if options.torch_compile else model
    model.train()
    optimizer.zero_grad()
    losses, step_seconds, data_seconds = AverageMeter(), AverageMeter(), AverageMeter()
    clock = Clock(options.steps)
    before = time.time()
    for step, (images, targets) in enumerate(islice(endless(loader), options.steps), 1):
        images = images.contiguous(memory_format=memory_format(options))
        data_seconds.update(time.time() - before)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=options.mixed_precision == "bf16"):
            loss = F.cross_entropy(run_model(images).logits, targets)
        loss.backward()
        dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
        optimizer.step()
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        step_seconds.update(time.time() - before)
        clock.count(images=len(targets))
        if clock.due(step):
            clock.mark(step, losses.avg)
            losses.reset()
        before = time.time()
    return clock.intervals


def trainer_loop(options: argparse.Namespace) -> list[Row]:
    from datasets import load_dataset
    from torchvision import transforms as v1
    from transformers import Trainer, TrainingArguments

    crop = v1.RandomResizedCrop(options.image_size, scale=CROP, interpolation=v1.InterpolationMode.BICUBIC)
    transform = v1.Compose([crop, v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)])

    def transforms(rows: dict) -> dict:
        return rows | {"pixel_values": [transform(image.convert("RGB")) for image in rows["image"]]}

    def collate(rows: list[dict]) -> dict:
        labels = torch.tensor([row["label"] for row in rows])
        return {"pixel_values": torch.stack([row["pixel_values"] for row in rows]), "labels": labels}

    cache = f"{options.folder}/datasets"
    data: Any = load_dataset("imagefolder", data_dir=f"{options.folder}/images/train", split="train", cache_dir=cache)
    data.set_transform(transforms)
    clock = Clock(options.steps)
    values = rounds.trainer_settings(options.steps, precision=options.mixed_precision)
    values |= {"per_device_train_batch_size": options.batch_size, "learning_rate": options.learning_rate}
    values |= {"torch_compile": options.torch_compile, "remove_unused_columns": False, "dataloader_drop_last": True}
    values |= {"dataloader_num_workers": options.workers, "dataloader_persistent_workers": True}
    arguments, model = TrainingArguments(f"{options.folder}/trainer", **values), build_model(options)
    counted = clock.counted(Trainer, lambda inputs: {"images": len(inputs["labels"])})
    counted(model, arguments, data_collator=collate, train_dataset=data, callbacks=[clock.callback()]).train()
    return clock.intervals


# The template, and the loaders alone -----------------------------------------------------------------------------------


def template_flags(options: argparse.Namespace) -> list[str]:
    values: Row = {"train_dir": f"{options.folder}/images", "config_name": options.model_folder}
    values |= {"image_size": options.image_size, "label_smoothing": 0, "report_to": "none"}
    values |= {"global_batch_size": options.batch_size, "per_device_train_batch_size": options.batch_size}
    values |= {"dataloader_num_workers": options.workers, "max_steps": options.steps, "learning_rate": options.learning_rate}
    values |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "weight_decay": 0}
    values |= {
        "logging_steps": rounds.every(options.steps),
        "eval_steps": options.steps + 1,
        "save_steps": options.steps + 1,
    }
    return rounds.flags(values | {"torch_compile": options.torch_compile})


def run_template(options: argparse.Namespace, environment: dict, number: int) -> list[Row]:
    folder = rounds.run_dir(options, number)
    given = [*template_flags(options), "--output_dir", str(folder)]
    rounds.launch("templates/image_classification.py", given, environment, precision=options.mixed_precision)
    intervals = rounds.template_intervals(folder, "images")
    for before, interval in zip([{"step": 0}, *intervals], intervals, strict=False):
        interval["images"] = (interval["step"] - before["step"]) * options.batch_size
    return intervals


def template_loader(options: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    from shared.config import parse as configs
    from shared.images import files as images
    from shared.images.processor import ToModel, image_processor
    from shared.run.setup import Setup

    template: Any = importlib.import_module("templates.image_classification")
    flags = [*template_flags(options), "--output_dir", f"{options.folder}/loader"]
    setup = Setup(template.with_defaults(configs.parse(template.Config, flags)), "image_classification", unit="images")
    processor = image_processor(None, options.image_size, None)
    to_model = ToModel(processor, setup.device)
    loader, _ = template.build_loaders(setup, images.prepare(setup.config.data), processor, nn.Identity())
    for window in loader.windows(0, options.steps):
        for batch in window.micro_batches:
            yield to_model(batch["pixel_values"]), batch["labels"]


def loader_alone(options: argparse.Namespace) -> list[Row]:
    loader: Any = dict(zip(LOADERS, (template_loader, plain_loader, timm_loader), strict=True))[options.work](options)
    clock = Clock(options.steps)
    for step, (images, labels) in enumerate(islice(endless(loader), options.steps), 1):
        images, labels = images.to(DEVICE, non_blocking=True), labels.to(DEVICE, non_blocking=True)
        clock.count(images=len(labels))
        if clock.due(step):
            clock.mark(step)
    return clock.intervals


def check(name: str, intervals: list[Row], options: argparse.Namespace) -> None:
    """End this process if a program did not do what it is compared for."""
    images, due = sum(interval["images"] for interval in intervals), options.steps * options.batch_size
    if images != due:
        sys.exit(f"{name}: processed {images} images, not {due}")
    losses = [interval["loss"] for interval in intervals]
    if name in LOOPS and not losses[-1] < losses[0]:
        sys.exit(f"{name}: the loss has not come down: {losses}")


def main() -> None:
    parser = rounds.parser(__doc__, __file__, rounds=2, steps=80, least=3)
    parser.add_argument("--images", type=int, default=2000, help="training images, rounded down to whole batches")
    parser.add_argument("--model_folder", help="config.json of a transformers model (default: a ResNet-18)")
    parser.add_argument("--image_size", type=int, default=64, help="pixels")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--workers", type=rounds.at_least(1), default=2, help="processes that read images")
    parser.add_argument("--mixed_precision", choices=list(rounds.PRECISIONS), default="no")
    parser.add_argument("--torch_compile", action="store_true")
    parser.add_argument("--only", choices=["loops", "loaders"], help="leave the others out")
    work = {"plain": plain_loop, "model alone": plain_loop, "timm": timm_loop, "Trainer": trainer_loop}
    options = rounds.parse(parser, work | dict.fromkeys(LOADERS, loader_alone))
    options.images -= options.images % options.batch_size
    if options.images < CLASSES:
        parser.error(f"as many --images as one batch, and at least {CLASSES}")
    options.steps -= options.steps % rounds.every(options.steps)
    absent = rounds.absent("timm", ("timm", "timm's loader"))
    asked = {"loops": LOOPS, "loaders": LOADERS}.get(options.only, LOOPS + LOADERS)
    present = [name for name in asked if not any(row["contender"] == name for row in absent)]

    with rounds.folder(options) as environment:
        make_images(Path(options.folder), options.images, options.image_size)
        options.model_folder = Path(options.model_folder or make_resnet_18(Path(options.folder, "ResNet-18"))).resolve()

        def measure(name: str, number: int) -> Row:
            if name == "template":
                intervals = run_template(options, environment, number)
            else:
                intervals = rounds.worker(__file__, name, options, environment)
            check(name, intervals, options)
            return {"images_per_second": rounds.steady(intervals, "images_per_second", last=-1), "intervals": intervals}

        rows = rounds.alternate(present, options.rounds, measure)
    absent = [row for row in absent if row["contender"] in asked]
    rounds.pair(rows, "images_per_second", lambda name: "plain's loader" if name in LOADERS else "plain")
    rounds.pair([row for row in rows if row["contender"] in LOOPS], "images_per_second", "model alone", ratio="of_model")
    columns = {"images/s": ("images_per_second", ".4g"), "ratio to plain, or its loader": ("ratio", ".3f")}
    columns["ratio to the model alone"] = ("of_model", ".3f")
    what = [options.model_folder.name, f"{options.image_size} pixels", rounds.PRECISIONS[options.mixed_precision]]
    what += [name for name in ("torch_compile",) if getattr(options, name)]
    notes = [
        f"Medians (and ranges) of {options.rounds} rounds of {options.steps} steps of {options.batch_size} images. "
        f"{', '.join(what)}, {options.workers} workers. Ratios are paired by round."
    ]
    table = rounds.table("program", rows + absent, columns)
    rounds.report(options, rows, table, notes, ("torchvision", "timm", "datasets", "pillow"))


if __name__ == "__main__":
    main()
