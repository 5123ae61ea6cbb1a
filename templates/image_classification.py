"""Classify images: fine-tune a pretrained model, train only its head, or train from scratch.

    accelerate launch templates/image_classification.py                         # offline demo, any machine
    accelerate launch templates/image_classification.py --train_dir photos/ --model_name_or_path microsoft/resnet-50
    accelerate launch --config_file accelerate_configs/ddp.yaml templates/image_classification.py --dataset_name ORG/NAME
    accelerate launch --config_file accelerate_configs/fsdp2.yaml templates/image_classification.py --train_dir photos/
    docker run --gpus all IMAGE accelerate launch templates/image_classification.py

The recipes are those of "ResNet strikes back" (Wightman et al., arXiv 2110.00476) and of torchvision's references.
"""

import contextlib
import importlib.util
import io
import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from shared.config import parse as configs
from shared.config.options import BatchConfig, CheckpointConfig, LogConfig, OptimConfig, SpeedConfig
from shared.images.options import ImageConfig, RecipeConfig
from shared.process.errors import ConfigError

DEMO_EPOCHS = 20  # less than two minutes on two CPU cores
# For options that are left at None: DEMO for the digits, which fill their pictures and must not be mirrored, else USUAL.
DEMO = {"image_size": 32, "crop_pct": 1.0, "crop_min_scale": 0.6, "horizontal_flip": 0.0}
USUAL = {"crop_min_scale": 0.35, "horizontal_flip": 0.5}


@dataclass(frozen=True)
class Config:
    """Train an image classifier."""

    # What may differ from the checkpoint on resume, because it does not change what is learned.
    FREE: ClassVar = frozenset({"channels_last", "export_onnx"})

    model_name_or_path: str | None = None
    """Model on the Hub or in a folder to fine-tune (timm's, too, where timm is installed)."""
    config_name: str | None = None
    """Architecture on the Hub or in a folder, with random weights; if not given, a ResNet of 0.3M parameters."""
    config_overrides: str | None = None
    """Changes to that architecture: depths=[2,2,2,2],layer_type=basic."""
    freeze_backbone: bool = False
    """Train the head alone (linear probing)."""
    sync_batchnorm: bool = False
    """Let BatchNorm see the images of all ranks, not those of each."""
    image_size: int | None = None
    """Height and width in pixels; if not given, the model's own, else 224."""
    crop_pct: float | None = None
    """Share of the image that evaluation crops; if not given, the model's own, else 0.875."""
    eval_steps: int | None = None
    """Optimizer steps between evaluations; if not given, an epoch; one is always made at the end."""
    metric_for_best_model: Literal["accuracy", "macro_f1", "loss", "none"] = "accuracy"
    """final/ holds the weights of the evaluation that was best by this; none: those of the last step."""
    early_stopping_patience: int = 0
    """Stop after this many evaluations without a better one; 0: never."""
    channels_last: bool = False
    """Keep images and filters in NHWC order, which convolutions like in bf16 on GPUs and in fp32 on CPUs."""
    export_onnx: bool = False
    """Also write final/model.onnx."""
    images: ImageConfig = field(default_factory=ImageConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    batch: BatchConfig = field(
        default_factory=lambda: BatchConfig(
            global_batch_size=64,
            per_device_train_batch_size=64,
            per_device_eval_batch_size=64,
            dataloader_num_workers=2,
        )
    )
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(learning_rate=1e-3, weight_decay=0.05, adam_beta2=0.999, warmup_ratio=0.05)
    )
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if self.config_name and self.model_name_or_path:
            raise ConfigError("--config_name and --model_name_or_path both name the model: drop one of them")
        if self.model_name_or_path and self.config_overrides:
            raise ConfigError("--config_overrides cannot change a model whose weights are loaded")
        if self.freeze_backbone and not self.model_name_or_path:
            raise ConfigError("--freeze_backbone needs a trained backbone: give --model_name_or_path")
        rows, _ = self.batch.micro_batch()  # refuses what does not divide
        if self.recipe.mixes and rows % 2:
            raise ConfigError(f"mixup and CutMix mix pairs: the images of one forward must be even in number, not {rows}")
        if self.image_size is not None and not 8 <= self.image_size <= 4096:
            raise ConfigError(f"--image_size is between 8 and 4096 pixels, not {self.image_size}")
        if self.crop_pct is not None and not 0 < self.crop_pct <= 1:
            raise ConfigError(f"--crop_pct is a share above 0 and at most 1, not {self.crop_pct}")
        configs.require_at_least_one(self, "eval_steps")
        if self.early_stopping_patience < 0:
            raise ConfigError(f"--early_stopping_patience must not be negative, not {self.early_stopping_patience}")
        if self.early_stopping_patience and self.metric_for_best_model == "none":
            raise ConfigError("--early_stopping_patience needs a --metric_for_best_model")
        if self.export_onnx and not importlib.util.find_spec("onnxscript"):
            raise ConfigError("--export_onnx needs onnxscript: pip install onnxscript")


if __name__ == "__main__":  # before torch is imported, so that --help and a mistyped flag answer at once
    CONFIG = configs.parse_or_exit(Config)

import torch
from accelerate import Accelerator, DistributedType
from PIL import ExifTags, Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor
from transformers import AutoConfig, AutoModelForImageClassification, ResNetConfig

from shared.data.loader import Loader
from shared.data.order import IGNORED, Order, Row
from shared.images import files as images
from shared.images.decoding import decode
from shared.images.files import ImageData
from shared.images.mixing import draw_mix, mix
from shared.images.processor import ToModel, image_processor
from shared.images.report import Predictions, scores
from shared.models import classifier
from shared.models.batch_norm import batch_norm_advice, has_batch_norm, synchronise_batch_norm
from shared.models.blocks import compile_blocks, set_gradient_checkpointing, uncompiled
from shared.models.card import model_card
from shared.models.counts import count_parameters, measure
from shared.models.hub import from_architecture, from_hub, identity_of_frozen, override
from shared.models.weights import WeightCopy, average_buffers, gather_weights, persistent_buffers
from shared.parallel import sharding
from shared.process.files import whole_folder
from shared.process.printing import print_main, summary
from shared.run import exits, launch, metrics
from shared.run.checkpoint import Checkpointer
from shared.run.folder import open_run
from shared.run.guard import Guard
from shared.run.rehearsal import dress_rehearsal, largest_that_fits, warm_up
from shared.training import optim, step


def with_defaults(config: Config) -> Config:
    """The config with values for what was left open."""
    values: dict[str, Any] = USUAL
    if config.images.is_demo:
        values = {k: v for k, v in DEMO.items() if k in USUAL or not config.model_name_or_path}
    given = configs.flatten(config)
    return configs.replace(config, **{k: v for k, v in values.items() if given[k] is None})


def decode_pixels(source: Path | bytes, at_least: int | None = None) -> torch.Tensor:
    """What `images.decode` gives, as uint8 [3, height, width]: upright JPEGs by torchvision, bit for bit the same, faster.

    torchvision's decoder complains of damage that both get over with a line of its own on stderr.

    Raises:
        images.BadImage: as `images.decode` does.
    """
    with contextlib.suppress(Exception):  # which `images.decode` meets again, and names
        with Image.open(source if isinstance(source, Path) else io.BytesIO(source)) as image:  # reads its header alone
            shrinks = at_least is not None and min(image.size) >= 2 * at_least
            upright = image.format == "JPEG" and image.getexif().get(ExifTags.Base.Orientation, 1) == 1
        if upright and not shrinks:
            content = source.read_bytes() if isinstance(source, Path) else source
            return decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), mode=ImageReadMode.RGB)
    return pil_to_tensor(decode(source, at_least))


def train_row(row: Row, transform: v2.Compose, recipe: RecipeConfig) -> Row:
    """An augmented image, uint8 [3, size, size]. All that is drawn here depends on (seed, epoch, sample) alone."""
    row = {"pixel_values": transform(row["image"]), "labels": row["labels"]}
    return {**row, "mix": draw_mix(recipe.mixup_alpha, recipe.cutmix_alpha)} if recipe.mixes else row


def eval_row(row: Row, processor: Any) -> Row:
    """The image as final/'s own processor prepares it, still uint8: normalising is done on the device."""
    made = processor(row["image"], do_rescale=False, do_normalize=False, return_tensors="pt")
    return {"pixel_values": made["pixel_values"][0], "labels": row["labels"]}


def build_loaders(config: Config, data: ImageData, processor, model: nn.Module, accelerator: Accelerator):
    """(training windows, validation windows) of uint8 images."""
    size = processor.crop_size["height"]
    crop = v2.RandomResizedCrop(size, scale=(config.recipe.crop_min_scale, 1.0), interpolation=processor.resample)
    flip = v2.RandomHorizontalFlip(config.recipe.horizontal_flip)
    augment = {
        "none": [],
        "randaugment": [v2.RandAugment(), v2.PILToTensor()],
        "trivialaugment": [v2.TrivialAugmentWide(), v2.PILToTensor()],
    }
    erase = v2.RandomErasing(config.recipe.random_erasing, value=[round(255 * mean) for mean in processor.image_mean])
    transform = v2.Compose([crop, flip, *augment[config.recipe.auto_augment], erase])
    if config.recipe.auto_augment == "none":  # decoding and cropping are faster on tensors, the others on PIL images
        data.train.decode = decode_pixels
    assert config.recipe.crop_min_scale is not None
    narrowest = 3 / 4  # width to height of a crop by RandomResizedCrop
    data.train.at_least = math.ceil(size / math.sqrt(narrowest * config.recipe.crop_min_scale))  # no crop is below `size`
    batch = config.batch
    if len(data.train) < batch.global_batch_size:
        raise ConfigError(f"{len(data.train)} training images are fewer than one --global_batch_size: choose a smaller one")
    # A smaller last batch would spoil BatchNorm's statistics; other models learn from it.
    drop_last = has_batch_norm(model)
    order = Order(len(data.train), batch.global_batch_size, batch.seed, drop_last=drop_last)
    loading = sharding.share(accelerator) | {"num_workers": batch.dataloader_num_workers}
    at_once = batch.per_device_eval_batch_size * loading["world_size"]
    mixed = partial(train_row, transform=transform, recipe=config.recipe)
    prepared = partial(eval_row, processor=processor)
    eval_order = Order(len(data.validation), at_once, 0, shuffle=False)
    sizes = batch.micro_batch()[0], batch.per_device_eval_batch_size
    return (
        Loader(data.train, default_collate, order, per_device=sizes[0], transform=mixed, **loading),
        Loader(data.validation, default_collate, eval_order, per_device=sizes[1], transform=prepared, **loading),
    )


def build_model(config: Config, classes: tuple[str, ...], image_size: int) -> tuple[nn.Module, tuple[str, ...]]:
    """(the model with fp32 weights, the classes in the order of its scores)."""
    attention = config.speed.attn_implementation
    options = {} if attention == "sdpa" else {"attn_implementation": attention}  # which is the default where it exists
    if config.model_name_or_path:
        model, classes = classifier.load_pretrained(config.model_name_or_path, classes, **options)
        if config.freeze_backbone:
            classifier.freeze_backbone(model)
        return model, classes
    architecture: Any = ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128], depths=[1, 1, 1], layer_type="basic")
    if config.config_name:
        architecture = from_hub(AutoConfig, config.config_name)
    if hasattr(architecture, "image_size"):
        architecture.image_size = image_size
    override(architecture, config.config_overrides)
    classifier.name_classes(architecture, classes)
    return from_architecture(AutoModelForImageClassification, architecture, dtype=torch.float32, **options), classes


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: nn.Module, loader: Loader, to_model: ToModel, classes, guard: Guard
) -> Predictions:
    """What the model says of the validation images, each counted once on any world size."""
    average_buffers(accelerator, [persistent_buffers(model)])  # BatchNorm's statistics
    model.eval()
    batches = []
    with uncompiled(model):
        for window in guard.watch(loader.windows(0, loader.order.steps_per_epoch)):
            (batch,) = window.micro_batches
            batches.append(scores(model(pixel_values=to_model(batch["pixel_values"])).logits, batch["labels"]))
    classifier.training_mode(model)
    return Predictions.gather(accelerator, batches, loader.order.num_samples, classes)


def main(config: Config) -> None:
    # Setup -------------------------------------------------------------------------------------------------------
    config = with_defaults(config)
    tracker = metrics.tracker_name(config.log.report_to)
    accelerator = launch.start(config.batch.seed, log_with=tracker, timeout=config.speed.ddp_timeout)
    sharded = accelerator.distributed_type == DistributedType.FSDP
    if sharded and config.channels_last:
        raise ConfigError("--channels_last does not work with FSDP, which shards contiguous weights only")
    run_dir = open_run(accelerator, config.checkpoint.output_dir, "image_classification")

    # Data --------------------------------------------------------------------------------------------------------
    data = images.prepare(config.images)
    processor = image_processor(config.model_name_or_path, config.image_size, config.crop_pct)
    to_model = ToModel(processor, accelerator.device, channels_last=config.channels_last)
    image_size = processor.crop_size["height"]

    # Model and optimizer -----------------------------------------------------------------------------------------
    model, classes = build_model(config, data.classes, image_size)
    data = data.numbered_as(classes)
    device = torch.device("cpu") if sharded else accelerator.device  # on which it may not fit whole
    model.to(device).to(memory_format=to_model.memory_format)
    with accelerator.autocast():
        flops = measure(model, {"pixel_values": torch.zeros(1, 3, image_size, image_size, device=device)})
    set_gradient_checkpointing(model, config.speed.gradient_checkpointing)
    train_loader, eval_loader = build_loaders(config, data, processor, model, accelerator)
    steps_per_epoch = train_loader.order.steps_per_epoch
    default_steps = DEMO_EPOCHS * steps_per_epoch if config.images.is_demo else None
    total_steps = config.batch.total_steps(steps_per_epoch, default=default_steps)
    eval_steps = config.eval_steps or steps_per_epoch
    left_out = len(data.train) - train_loader.order.samples_per_epoch
    classifier.make_shardable(model)
    if config.sync_batchnorm:
        model = synchronise_batch_norm(model, accelerator.device)
    advice = batch_norm_advice(model, config.batch, accelerator.num_processes)
    trainable, total = count_parameters(model)
    if config.speed.torch_compile and sharded:
        compile_blocks(model)  # which FSDP gathers one by one
    elif config.speed.torch_compile:
        model.compile()
    optimizers = optim.build(model, config.optim)
    model, optimizers = sharding.prepare(
        *(accelerator, model, optimizers), max_grad_norm=config.optim.max_grad_norm, comm_hook=config.speed.ddp_comm_hook
    )
    classifier.training_mode(model)
    class_weights = data.class_weights().to(accelerator.device) if config.recipe.class_weights == "balanced" else None
    ema = WeightCopy(accelerator, model) if config.recipe.ema_decay else None
    best = WeightCopy(accelerator, model) if config.metric_for_best_model != "none" else None

    def batch_loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Cross-entropy summed over this micro-batch's images; what fills up a batch has the label IGNORED."""
        pixels, targets = to_model(batch["pixel_values"]), batch["labels"]
        if "mix" in batch:
            pixels, targets = mix(pixels, targets, batch["mix"], len(classes))
        logits = model(pixel_values=pixels).logits.float()
        smoothing = config.recipe.label_smoothing
        losses = F.cross_entropy(logits, targets, weight=class_weights, label_smoothing=smoothing, reduction="none")
        return (losses * (batch["labels"] != IGNORED)).sum()

    # Resume ------------------------------------------------------------------------------------------------------
    copies = {name: copy for name, copy in (("ema", ema), ("best", best)) if copy is not None}
    base = identity_of_frozen(config.model_name_or_path or "", accelerator.unwrap_model(model))
    saver = Checkpointer(accelerator, model, optimizers, run_dir, config, data=data.identity, base=base, copies=copies)
    state = saver.resume(config.checkpoint.resume_from_checkpoint, total_steps=total_steps)
    scored_by = [config.metric_for_best_model, data.identity]
    if state.notes.setdefault("scored_by", scored_by) != scored_by:  # other scores are not to be compared
        for key in ("best_score", "best_among_equals", "improved_step"):
            state.notes.pop(key, None)
        state.notes["scored_by"], state.evaluated = scored_by, min(state.evaluated, state.step - 1)
    limits = [total_steps, config.early_stopping_patience]
    if state.notes.pop("stopped_early", None) == limits:  # and not with other limits now
        state.notes["stopped_early"], total_steps = limits, state.step
    if state.step >= total_steps and (run_dir / "final").exists():
        launch.say_finished(run_dir, state.step, config)
        return
    if config.batch.find_batch_size:
        pairs = 2 if config.recipe.mixes else 1
        rows = largest_that_fits(accelerator, model, optimizers, train_loader, batch_loss, multiple=pairs)
        config = configs.replace(config, per_device_train_batch_size=rows)
    if accelerator.is_main_process:
        configs.save(configs.replace(config, output_dir=run_dir), run_dir / "config.yaml")
    summary(
        "image_classification",
        {
            "run on": launch.strategy(accelerator),
            "each process holds": sharding.sharding_summary(accelerator, model, optimizers),
            "data": data.about,
            "model": f"{type(accelerator.unwrap_model(model)).__name__}, {trainable:,} of {total:,} parameters trained",
            "images": f"{image_size} x {image_size} pixels",
            "batch": launch.batch_line(config.batch, accelerator, "images"),
            "budget": f"{total_steps:,} steps, {total_steps / steps_per_epoch:.1f} epochs",
            "left out": f"{left_out:,} images an epoch, others each time: BatchNorm gets whole batches"
            if left_out
            else None,
            "optimizer": f"{config.optim.optim}, {config.optim.lr_scheduler_type} from {config.optim.learning_rate:g}",
            "output": run_dir,
        },
    )
    if advice:
        print_main(advice)

    # Train -------------------------------------------------------------------------------------------------------
    settings = configs.flatten(config)
    logger = metrics.Logger(
        *(accelerator, config.log, run_dir, state, total_steps, settings),
        template="image_classification",
        unit="images",
        flops=flops,
    )
    guard = Guard(accelerator, model, state, max_skipped=config.optim.max_skipped_steps)

    def evaluate_and_log() -> None:
        with ema.swapped_in() if ema else contextlib.nullcontext():
            values = evaluate(accelerator, model, eval_loader, to_model, classes, guard).summary()
            score = values.get(f"eval_{config.metric_for_best_model}", 0.0)
            score = -score if config.metric_for_best_model == "loss" else score
            rank = [-math.inf if math.isnan(v) else float(v) for v in (score, -values["eval_loss"])]  # equals go by loss
            before = [state.notes[key] for key in ("best_score", "best_among_equals") if key in state.notes]
            if rank[:1] > before[:1]:
                state.notes["improved_step"] = state.step
            if best is not None and rank > before:
                best.take()
                state.notes |= {"best_score": rank[0], "best_among_equals": rank[1], "best_step": state.step}
        waited = state.step - state.notes.get("improved_step", state.step)
        if config.early_stopping_patience and waited >= config.early_stopping_patience * eval_steps:
            state.notes["stopped_early"] = limits
            print_main(f"stopped early: no better {config.metric_for_best_model} for {waited} steps")
        logger.log_evaluation(values)

    warm_up(accelerator, model, optimizers, train_loader, batch_loss)
    if config.checkpoint.dress_rehearsal and state.step == 0:
        dress_rehearsal(accelerator, model, optimizers, train_loader, batch_loss, saver, state)
        evaluate(accelerator, model, eval_loader, to_model, classes, guard)
    try:
        if state.step > 0 and state.owes_evaluation(eval_steps, total_steps):
            with logger.pause():
                evaluate_and_log()
            total_steps = state.step if "stopped_early" in state.notes else total_steps
        for window in logger.waiting(train_loader.windows(state.step, total_steps)):
            launch.seed_step(config.batch.seed, state.step, sharding.data_rank(accelerator))
            learning_rate = optim.set_learning_rate(optimizers, config.optim, state.step, total_steps)
            scale = step.loss_scale(window.num_targets)
            losses = []
            for batch in step.accumulate(accelerator, model, window.micro_batches):
                loss = batch_loss(batch)
                step.backward(accelerator, loss, scale)
                losses.append(loss.detach())
            grad_norm = step.clip_gradients(accelerator, model, config.optim.max_grad_norm)
            finite = guard.finite(losses, grad_norm, window)
            step.update(accelerator, optimizers, finite, grad_norm)
            if ema:
                ema.average_in(min(config.recipe.ema_decay, (1 + state.step) / (10 + state.step)))

            state.advance(window)
            logger.step(losses, finite, window, grad_norm=grad_norm, learning_rate=learning_rate)
            last = state.step == total_steps
            evaluating = state.owes_evaluation(eval_steps, total_steps)
            saving = state.step % config.checkpoint.save_steps == 0
            guard.stop_if_asked(now=last or evaluating or saving)
            with logger.pause():
                if evaluating:
                    evaluate_and_log()
                    logger.draw()
                    last = last or "stopped_early" in state.notes
                if saving or last:
                    saver.save(state)
            if last:
                break
    except exits.Stopped:  # by a signal, on all ranks
        saver.save(state)
        saver.wait()
        logger.close()
        raise
    saver.wait()
    guard.release()

    # Finish ------------------------------------------------------------------------------------------------------
    chosen = best or ema
    with chosen.swapped_in() if chosen else contextlib.nullcontext():
        predictions = evaluate(accelerator, model, eval_loader, to_model, classes, guard)
        weights = gather_weights(accelerator, model)
    values = predictions.summary()
    print_main(f"best by {config.metric_for_best_model}: step {state.notes['best_step']}" if best else "weights of the end")
    pictures = predictions.write(run_dir, data.validation) if accelerator.is_main_process else []
    if accelerator.is_main_process:
        for picture in pictures:
            logger.log_picture(picture.stem, picture)
        with whole_folder(run_dir / "final") as folder:
            accelerator.unwrap_model(model).save_pretrained(folder, state_dict=weights)
            processor.save_pretrained(folder)
            task, load = "image-classification", 'transformers.pipeline("image-classification", model="final")'
            card = model_card("Image classifier", data.about, values, settings, load=load, pipeline_tag=task)
            (folder / "README.md").write_text(card, encoding="utf-8")
            if config.export_onnx:
                print_main(classifier.export_onnx(folder, image_size))
    logger.close()
    print_main(f"{values['eval_accuracy']:.2%} of {len(data.validation):,} validation images are classified right")
    beside = ", ".join([*(picture.name for picture in pictures), "evaluation.json", "curves.png"])
    print_main(f"model in {run_dir}/final; {beside} beside it")


if __name__ == "__main__":
    exits.run(main, CONFIG)
