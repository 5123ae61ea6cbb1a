"""What templates/image_classification.py costs: its steady-state images/s beside three other ways to write the loop.

    python benchmarks/image_loops.py                                  # writes benchmarks/image_loops.json
    python benchmarks/image_loops.py --rounds 5 --steps 160 --channels_last --output results.json
    python benchmarks/image_loops.py --model_folder resnet-50/ --image_size 224 --batch_size 256 --images 8000 \\
        --workers 14 --mixed_precision bf16 --channels_last           # on a GPU; the folder holds a config.json

Needs timm. Each round starts four programs one after the other, each in a process of its own, and a ratio pairs a
program with the plain loop of its round, so that a machine that is slow for a while is slow for all:

- template: templates/image_classification.py, started with `accelerate launch`.
- plain: a loop that uses nothing of shared/: ImageFolder, transforms v2, DataLoader, autocast, clip, fused AdamW.
- timm: timm's data set, loader with its prefetcher, optimizer factory and clipping, in the steps of timm's train.py.
- trainer: transformers.Trainer on a `datasets` image folder, as in transformers' run_image_classification.py.

All train the same architecture from random weights on the same JPEGs, which are made here, at the same constant rate
without weight decay, with RandomResizedCrop (bicubic, at least 0.35 of the area) and horizontal flip, as many workers
(which stay for all epochs) and threads, and pinned memory on a GPU. The rest is as each program has it: cuDNN's
autotuning (plain and timm), where images are normalised, when the loss is read, what happens between epochs (the
template reads on, the others begin anew). Losses must fall, and all must process equally many images, or the script
ends with an error.

A figure is the median over intervals of an eighth of the steps. The first interval, which warms up, is left out, and
so is the last, in which workers that have nothing left to read free their cores; it must be long enough for that, so on
CPU take at least 32 steps a worker (the template's read 4 batches ahead each). Start-up, compilation, evaluation and
saving are not timed. Each round then runs the loaders alone: images decoded, augmented, collated, put on the device and
normalised, with no model.
"""

import argparse
import importlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from about import about, cores, line
from PIL import Image
from plain_loop import ROOT, run
from torch import nn
from torch.nn import functional as F

CLASSES, CROP = 10, (0.35, 1.0)  # the crop's share of the area: the template's default
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PACKAGES = ("torch", "torchvision", "transformers", "accelerate", "timm", "datasets", "pillow")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# What all are given ----------------------------------------------------------------------------------------------------


def make_images(folder: Path, images: int, image_size: int) -> None:
    """JPEGs in images/train/<class>/, one or two of each class in images/validation/: 1.6 to 2.5 times `image_size` wide.

    Noise with a natural image's spectrum, about 1/f, and the class in its colour and in the number of its stripes.
    """

    def make(number: int) -> None:
        rng, label = np.random.default_rng([0, number]), number % CLASSES
        width, height = rng.integers(round(1.6 * image_size), round(2.5 * image_size), 2).tolist()
        pixels = 128 + 40 * np.cos(2 * np.pi * (label / CLASSES + np.arange(3) / 3)) + rng.normal(0, 5, (height, width, 3))
        pixels += 20 * np.sin(2 * np.pi * ((3 + label) * np.arange(height) / height + rng.random()))[:, None, None]
        for octave in range(6):
            cells = Image.fromarray(rng.integers(0, 256, (3 << octave, 3 << octave, 3), dtype=np.uint8))
            smooth = np.asarray(cells.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
            pixels += (smooth - 128) * 0.6 / 2**octave
        place = folder / "images" / ("train" if number < images else "validation") / f"class-{label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{number:06}.jpg", quality=90)

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(make, range(math.ceil(images / CLASSES) * CLASSES + CLASSES)))


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
    return torch.channels_last if options.channels_last else torch.contiguous_format


class Clock:
    """Times the intervals of a run: count into `images`, and `mark` the steps that are `due`."""

    def __init__(self, steps: int) -> None:
        self.steps, self.every = steps, max(1, steps // 8)
        self.intervals: list[dict] = []
        self.images = self.step = 0
        self.start = time.perf_counter()

    def due(self, step: int) -> bool:
        return step % self.every == 0 or step == self.steps

    def mark(self, step: int, loss: float | None = None) -> None:
        """End an interval with this mean loss."""
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.intervals.append({"step": step, "loss": loss, "images": self.images})
        self.intervals[-1]["images_per_second"] = self.images / (now - self.start)
        self.images, self.step, self.start = 0, step, now


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
    loading: dict[str, Any] = {"num_workers": options.workers, "persistent_workers": True}
    loading |= {"pin_memory": DEVICE.type == "cuda", "drop_last": True}
    return DataLoader(images, options.batch_size, shuffle=True, **loading)


def plain_loop(options: argparse.Namespace) -> Clock:
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high" if DEVICE.type == "cuda" else "highest")
    model, loader = build_model(options).train(), plain_loader(options)
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
        clock.images += len(labels)
        if clock.due(step):
            clock.mark(step, total.item() / (step - clock.step))
            total.zero_()
    return clock


def timm_loader(options: argparse.Namespace) -> Iterable:
    from timm.data import create_dataset, create_loader

    data = create_dataset("", root=f"{options.folder}/images", split="train", is_training=True)
    augmenting: dict[str, Any] = {"scale": CROP, "hflip": 0.5, "color_jitter": None, "interpolation": "bicubic"}
    loading: dict[str, Any] = {"num_workers": options.workers, "pin_memory": DEVICE.type == "cuda", "device": DEVICE}
    size = (3, options.image_size, options.image_size)
    return create_loader(data, size, options.batch_size, is_training=True, **augmenting, **loading)


def timm_loop(options: argparse.Namespace) -> Clock:
    from timm.optim import create_optimizer_v2
    from timm.utils import AverageMeter, dispatch_clip_grad

    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    model, loader = build_model(options), timm_loader(options)
    optimizer = create_optimizer_v2(model, "adamw", lr=options.learning_rate, weight_decay=0.0, fused=True)
    run_model: Any = torch.compile(model) if options.torch_compile else model
    model.train()
    optimizer.zero_grad()
    losses, step_seconds, data_seconds = AverageMeter(), AverageMeter(), AverageMeter()
    clock = Clock(options.steps)
    before = time.time()
    for step, (images, targets) in enumerate(islice(endless(loader), options.steps), 1):
        if options.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        data_seconds.update(time.time() - before)
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=options.mixed_precision == "bf16"):
            loss = F.cross_entropy(run_model(images).logits, targets)
        loss.backward()
        dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
        optimizer.step()
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        step_seconds.update(time.time() - before)
        clock.images += len(targets)
        if clock.due(step):
            clock.mark(step, losses.avg)
            losses.reset()
        before = time.time()
    return clock


def trainer_loop(options: argparse.Namespace) -> Clock:
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

    class Timed(Trainer):
        def training_step(self, model, inputs, *arguments):
            clock.images += len(inputs["labels"])
            return super().training_step(model, inputs, *arguments)

        def log(self, logs, *arguments):
            super().log(logs, *arguments)
            if "loss" in logs:  # not the summary at the end
                clock.mark(self.state.global_step, logs["loss"])

    settings: dict[str, Any] = {"per_device_train_batch_size": options.batch_size, "max_steps": options.steps}
    settings |= {"learning_rate": options.learning_rate, "lr_scheduler_type": "constant", "weight_decay": 0.0}
    settings |= {"max_grad_norm": 1.0, "optim": "adamw_torch_fused", "bf16": options.mixed_precision == "bf16"}
    settings |= {"tf32": DEVICE.type == "cuda" or None, "use_cpu": DEVICE.type == "cpu"}
    settings |= {"torch_compile": options.torch_compile, "remove_unused_columns": False, "dataloader_drop_last": True}
    settings |= {"dataloader_num_workers": options.workers, "dataloader_persistent_workers": True}
    settings |= {"logging_steps": clock.every, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments(f"{options.folder}/trainer", **settings)
    Timed(build_model(options), arguments, data_collator=collate, train_dataset=data).train()
    return clock


# The loaders alone -----------------------------------------------------------------------------------------------------


def template_flags(options: argparse.Namespace) -> list[str]:
    flags = {"train_dir": f"{options.folder}/images", "config_name": options.model_folder, "image_size": options.image_size}
    flags |= {"global_batch_size": options.batch_size, "per_device_train_batch_size": options.batch_size}
    flags |= {"dataloader_num_workers": options.workers, "max_steps": options.steps, "label_smoothing": 0}
    flags |= {"learning_rate": options.learning_rate, "lr_scheduler_type": "constant", "warmup_ratio": 0, "weight_decay": 0}
    flags |= {"logging_steps": Clock(options.steps).every, "report_to": "none"}
    flags |= {"eval_steps": options.steps + 1, "save_steps": options.steps + 1}
    switches = [f"--{name}" for name in ("channels_last", "torch_compile") if getattr(options, name)]
    return [*(part for name, value in flags.items() for part in (f"--{name}", str(value))), *switches]


def template_loader(options: argparse.Namespace) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    from shared import classifier, config, images, launch

    template: Any = importlib.import_module("templates.image_classification")
    settings = config.replace(config.parse(template.Config, template_flags(options)), **template.USUAL)
    accelerator = launch.start(0)
    processor = classifier.image_processor(None, options.image_size, None)
    to_model = classifier.ToModel(processor, accelerator.device)
    loader, _ = template.build_loaders(settings, images.prepare(settings.images), processor, nn.Identity(), accelerator)
    for window in loader.windows(0, options.steps):
        for batch in window.micro_batches:
            yield to_model(batch["pixel_values"]), batch["labels"]


def loader_alone(options: argparse.Namespace) -> Clock:
    loaders: dict[str, Any] = {"template": template_loader, "plain": plain_loader, "timm": timm_loader}
    loader = loaders[options.worker_name.removesuffix("_loader")](options)
    clock = Clock(options.steps)
    for step, (images, labels) in enumerate(islice(endless(loader), options.steps), 1):
        images, labels = images.to(DEVICE, non_blocking=True), labels.to(DEVICE, non_blocking=True)
        clock.images += len(labels)
        if clock.due(step):
            clock.mark(step)
    return clock


LOOPS = {"plain": plain_loop, "timm": timm_loop, "trainer": trainer_loop}
PROGRAMS = ("template", *LOOPS)
LOADERS = ("template_loader", "plain_loader", "timm_loader")


# Runs ------------------------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> dict:
    """What a process of its own does: one of the loops, or a loader alone."""
    if DEVICE.type == "cpu":
        torch.set_num_threads(cores())
    clock = LOOPS.get(options.worker_name, loader_alone)(options)
    memory = torch.cuda.max_memory_allocated() / 1e9 if DEVICE.type == "cuda" else None
    return {"intervals": clock.intervals, "peak_memory_gb": memory}


def run_worker(name: str, options: argparse.Namespace, environment: dict) -> dict:
    values = json.dumps(vars(options) | {"worker_name": name}, default=str)
    return json.loads(run([str(Path(__file__).resolve()), "--worker", values], environment).splitlines()[-1])


def run_template(run_dir: Path, options: argparse.Namespace, environment: dict) -> dict:
    """Launch the template for real; what its metrics.jsonl says."""
    launch = ROOT / "accelerate_configs" / ("single_gpu.yaml" if DEVICE.type == "cuda" else "cpu.yaml")
    command = [*("-m", "accelerate.commands.accelerate_cli", "launch"), *("--config_file", str(launch))]
    command += ["--mixed_precision", options.mixed_precision, str(ROOT / "templates" / "image_classification.py")]
    run([*command, *template_flags(options), "--output_dir", str(run_dir)], environment)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "processed_images_per_second" in row]
    intervals, images = [], 0
    for row in rows:
        intervals.append({"step": row["step"], "loss": row["loss"], "images": row["images"] - images})
        intervals[-1]["images_per_second"] = row["processed_images_per_second"]
        images = row["images"]
    result: dict[str, Any] = {"intervals": intervals, "peak_memory_gb": None}
    if DEVICE.type == "cuda":
        result["peak_memory_gb"] = rows[-1]["peak_memory_gb"]
    if "mfu" in rows[-1]:
        result["mfu_of_one_image_per_second"] = rows[-1]["mfu"] / rows[-1]["processed_images_per_second"]
    return result


def steady(intervals: list[dict]) -> float:
    """Images a second: the median interval, without the first and the last."""
    return statistics.median(interval["images_per_second"] for interval in intervals[1:-1])


def check(name: str, intervals: list[dict], options: argparse.Namespace) -> None:
    """End this process if a program did not do what it is compared for."""
    images, due = sum(interval["images"] for interval in intervals), options.steps * options.batch_size
    if images != due:
        sys.exit(f"{name}: processed {images} images, not {due}")
    losses = [interval["loss"] for interval in intervals]
    if name in PROGRAMS and not losses[-1] < losses[0]:
        sys.exit(f"{name}: the loss has not come down: {losses}")


def measure(options: argparse.Namespace) -> list[dict]:
    """One {"program", "round", "images_per_second", "ratio", ...} for each run."""
    environment = os.environ | {"TEMPLATES_CACHE": f"{options.folder}/cache", "PYTHONPATH": str(ROOT)}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": f"{options.folder}/huggingface"}
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # or Trainer takes all
    environment["OMP_NUM_THREADS"] = str(cores())  # of which `accelerate launch` would take the physical ones, or one
    results: list[dict] = []
    for number in range(1, options.rounds + 1):
        rows: dict[str, dict] = {}
        for name in (*PROGRAMS, *LOADERS):
            started = time.perf_counter()
            if name == "template":
                done = run_template(Path(options.folder) / f"run-{number}", options, environment)
            else:
                done = run_worker(name, options, environment)
            check(name, done["intervals"], options)
            rows[name] = {"program": name, "round": number, "images_per_second": steady(done["intervals"]), **done}
            line = f"{rows[name]['images_per_second']:,.0f} images/s ({time.perf_counter() - started:.0f} s)"
            print(f"round {number}/{options.rounds} {name}: {line}", file=sys.stderr, flush=True)
        unit = rows["template"].pop("mfu_of_one_image_per_second", None)  # the same model, so it holds for all
        for name, row in rows.items():
            base = rows["plain_loader" if name in LOADERS else "plain"]
            row["ratio"] = row["images_per_second"] / base["images_per_second"]
            row["mfu"] = row["images_per_second"] * unit if unit and name in PROGRAMS else None
        results += rows.values()
    return results


# Report ----------------------------------------------------------------------------------------------------------------


def table(results: list[dict], names: Iterable[str], title: str) -> str:
    """A Markdown table: medians over the rounds, and ranges. Columns that have no values are left out."""
    columns = [("images_per_second", "images/s", ",.0f"), ("ratio", "ratio to plain", ".3f")]
    columns += [("peak_memory_gb", "peak memory, GB", ".2f"), ("mfu", "MFU", ".1%")]
    rows = {name: [row for row in results if row["program"] == name] for name in names}
    columns = [column for column in columns if all(row[column[0]] is not None for each in rows.values() for row in each)]
    lines = [f"| {title} | " + " | ".join(column[1] for column in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, each in rows.items():
        cells = [f"`{name.removesuffix('_loader')}`"]
        for key, _, form in columns:
            values = [row[key] for row in each]
            cells.append(f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each program")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of a run, timed in eighths, at least 3")
    parser.add_argument("--images", type=int, default=2000, help="training images, rounded down to whole batches")
    parser.add_argument("--model_folder", type=Path, help="config.json of a transformers model (default: a ResNet-18)")
    parser.add_argument("--image_size", type=int, default=64, help="pixels")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=3e-4)
    parser.add_argument("--workers", type=int, default=2, help="processes that read images (at least 1)")
    parser.add_argument("--mixed_precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--torch_compile", action="store_true")
    parser.add_argument("--channels_last", action="store_true")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"), help="all figures, as JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(argparse.Namespace(**json.loads(options.worker)))))
        return
    if min(options.steps - 2, options.rounds, options.workers, options.images // options.batch_size) < 1:
        parser.error("at least 3 steps, 1 round, 1 worker and as many images as one batch")
    options.images -= options.images % options.batch_size
    options.steps -= options.steps % Clock(options.steps).every
    options.output.parent.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(options).items() if key not in ("output", "worker")}
    settings["model_folder"] = options.model_folder.name if options.model_folder else "ResNet-18"
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        make_images(Path(folder), options.images, options.image_size)
        if options.model_folder is None:
            from transformers import ResNetConfig

            sizes: dict[str, Any] = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
            options.model_folder = Path(folder) / "model"
            ResNetConfig(**sizes, layer_type="basic").save_pretrained(options.model_folder)
        options.model_folder = options.model_folder.resolve()
        results = measure(options)
    facts = about(PACKAGES)
    options.output.write_text(json.dumps({"about": facts, "settings": settings, "results": results}, indent=1) + "\n")
    print(f"{table(results, PROGRAMS, 'program')}\n\n{table(results, LOADERS, 'loader alone')}\n")
    precision = {"no": "fp32"}.get(options.mixed_precision, options.mixed_precision)
    size, switches = options.image_size, [name for name in ("channels_last", "torch_compile") if settings[name]]
    print(f"Medians (and ranges) of {options.rounds} rounds of {options.steps} steps of {options.batch_size} images.")
    what = ", ".join([settings["model_folder"], f"{size} x {size} pixels", precision, *switches])
    print(f"{what}, {options.workers} workers. Ratios are paired by round.")
    print(line(facts))


if __name__ == "__main__":
    main()
