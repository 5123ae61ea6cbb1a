r"""Classify images: fine-tune a pretrained model, train only its head, or train from scratch.

    accelerate launch templates/image_classification.py  # offline demo, any machine
    accelerate launch templates/image_classification.py --train_dir photos/ \
        --model_name_or_path microsoft/resnet-50
    accelerate launch --config_file accelerate_configs/ddp.yaml \
        templates/image_classification.py --dataset_name ORG/NAME
    docker run --gpus all IMAGE accelerate launch templates/image_classification.py

The augmentations are those of "ResNet strikes back" (Wightman et al., arXiv 2110.00476) and of
torchvision's references.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

# the shared/ beside this file, before one that is installed
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from shared.config import parse as configs
from shared.config.options import (
    BatchConfig,
    CheckpointConfig,
    EvaluationConfig,
    FullOptimConfig,
    FullSpeedConfig,
    LogConfig,
)
from shared.config.types import PositiveShare, within
from shared.images.options import ImageConfig, RecipeConfig
from shared.process.errors import ConfigError

DEMO = {"global_batch_size": 64, "num_train_epochs": 20}  # less than two minutes on two CPU cores
# For options left at None; DIGITS, the demo's, fill their pictures and must not be mirrored.
USUAL = {"crop_min_scale": 0.35, "horizontal_flip": 0.5, "label_smoothing": 0.1}
DIGITS = {"crop_min_scale": 0.6, "horizontal_flip": 0.0, "label_smoothing": 0.1}
OF_SMALL_RESNET = {"image_size": 32, "crop_pct": 1.0}


@dataclass(frozen=True)
class Config:
    """Train an image classifier."""

    # Model on the Hub or in a folder to fine-tune (timm's too, with timm installed)
    model_name_or_path: str | None = None
    # Architecture on the Hub or in a folder, with random weights; if not given, a ResNet of 0.3M
    # parameters
    config_name: str | None = None
    # Changes to the architecture, such as depths=[2,2,2,2],layer_type=basic
    config_overrides: str | None = None
    freeze_backbone: bool = False  # Train only the head of --model_name_or_path (linear probing)
    sync_batchnorm: bool = False  # BatchNorm normalises over the images of all ranks (GPUs only)
    # Height and width in pixels; if not given, those the model is for, else 224
    image_size: Annotated[int, within(at_least=8, at_most=4096)] | None = None
    # Share of the image that evaluation crops; if not given, that of the trained weights, or 0.875
    crop_pct: PositiveShare | None = None

    data: ImageConfig = ImageConfig()
    recipe: RecipeConfig = RecipeConfig()
    batch: BatchConfig = BatchConfig(
        per_device_train_batch_size=64, per_device_eval_batch_size=64, dataloader_num_workers=2
    )
    optim: FullOptimConfig = FullOptimConfig(weight_decay=0.05, adam_beta2=0.999, warmup_steps=0.05)
    speed: FullSpeedConfig = FullSpeedConfig()
    evaluation: EvaluationConfig = EvaluationConfig(eval_steps=None, metric_for_best_model=None)
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        if self.model_name_or_path and (self.config_name or self.config_overrides):
            raise ConfigError(
                "--config_name and --config_overrides cannot change a "
                "model whose weights are loaded"
            )
        if self.freeze_backbone and not self.model_name_or_path:
            raise ConfigError(
                "--freeze_backbone needs a trained backbone: give --model_name_or_path"
            )
        rows, _ = self.batch.micro_batch()  # refuses what does not divide
        if self.recipe.mixes and rows % 2:
            raise ConfigError(
                f"mixup and CutMix mix pairs, but a micro-batch has {rows} "
                "images: choose an even number"
            )

    @property
    def trained(self) -> str:
        """What is trained, which decides the learning rate."""
        if not self.model_name_or_path:
            return "random weights"
        return "head alone" if self.freeze_backbone else "trained weights"


# before torch is imported, so that --help and a mistyped flag answer at once
if __name__ == "__main__":
    CONFIG = configs.parse_or_exit(Config)

import torch
from torch import nn
from torch.utils.data import default_collate
from transformers import AutoConfig, ResNetConfig

from shared.data.labels import LabelledData
from shared.data.loader import Loader
from shared.data.order import IGNORED, Batch, training_order
from shared.evaluation.classify import evaluate, report
from shared.evaluation.evaluation import Evaluation
from shared.evaluation.kinds import SampleLosses
from shared.evaluation.loaders import labelled_loaders
from shared.images import files as images
from shared.images.augment import eval_row, mix, training_rows
from shared.images.processor import ToModel, processor_of, timm_settings
from shared.models import image_classifier
from shared.models.batch_norm import batch_norm_advice, has_batch_norm, synchronise_batch_norm
from shared.models.blocks import set_gradient_checkpointing
from shared.models.classifier import make_shardable, measure_on_device
from shared.models.hub import attention_option, from_hub
from shared.models.image_classifier import with_image_size
from shared.models.pooled_head import PooledHead
from shared.models.resolution import at_resolution
from shared.models.weights import gather_weights
from shared.process.files import whole_folder
from shared.run import exits
from shared.run.run import Run
from shared.run.setup import Setup
from shared.training import defaults, optim


def with_defaults(config: Config) -> Config:
    """The config with values for what was left open."""
    values: dict[str, Any] = USUAL | {"metric_for_best_model": "accuracy"}
    if config.data.is_multi_label:
        values |= {"metric_for_best_model": "map", "label_smoothing": 0.0}
    if config.data.is_demo:
        values |= DIGITS if config.model_name_or_path else DIGITS | OF_SMALL_RESNET
    given = configs.flatten(config)
    return configs.replace(config, **{k: v for k, v in values.items() if given[k] is None})


def build_loaders(
    setup: Setup, data: LabelledData, processor: Any, model: nn.Module
) -> tuple[Loader, Loader]:
    """(training, validation) micro-batches of uint8 images [rows, 3, size, size]. Chooses the
    learning rate, the global batch and the epochs that fit, where none are given.
    """
    count = len(data.train)
    epochs = 5 if setup.config.model_name_or_path else 30
    batch = setup.config.batch
    fitting = defaults.batch_and_epochs(batch, count, count, most=64, least=16, epochs=epochs)
    kind = setup.config.trained
    rate = defaults.IMAGE_RATES[kind]
    config = setup.set_defaults(f"{count:,} images, {kind}", learning_rate=rate, **fitting)
    batch = config.batch
    # A smaller last batch would spoil BatchNorm's statistics; other models learn from it.
    drop_last = has_batch_norm(model)
    order = training_order(data.train, batch, config.data, drop_last=drop_last)
    train, validation = labelled_loaders(
        setup,
        data,
        order,
        default_collate,
        transform=training_rows(data.train, config.recipe, processor),
        eval_transform=partial(eval_row, processor=processor),
    )
    train.one_shape = True
    train.multiple = 2 if config.recipe.mixes else 1  # mixup and CutMix mix pairs
    return train, validation


def build_model(
    config: Config, classes: tuple[str, ...], image_size: int
) -> tuple[nn.Module, tuple[str, ...]]:
    """(the model with fp32 weights, the classes in the order of its scores)."""
    options = attention_option(config.speed.attn_implementation)
    if config.model_name_or_path:
        model, classes = image_classifier.load_pretrained(
            config.model_name_or_path, classes, image_size=image_size, **options
        )
        if config.freeze_backbone:
            image_classifier.freeze_backbone(model)
        return model, classes
    architecture: Any = ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128], depths=[1, 1, 1], layer_type="basic"
    )
    if config.config_name:
        architecture = from_hub(AutoConfig, config.config_name)
    architecture = with_image_size(architecture, config.config_overrides, image_size)
    model = image_classifier.from_scratch(architecture, classes, **options)
    return at_resolution(model, image_size), classes


def prepare_model(setup: Setup, model: nn.Module, image_size: int, memory_format: Any) -> nn.Module:
    """The model ready to be sharded."""
    config = setup.config
    image = torch.zeros(1, 3, image_size, image_size)
    measure_on_device(setup, model, {"pixel_values": image}, memory_format)
    set_gradient_checkpointing(model, config.speed.gradient_checkpointing)
    make_shardable(model)
    if config.sync_batchnorm:
        model = synchronise_batch_norm(model, setup.device)
    processes = setup.accelerator.num_processes
    setup.about["BatchNorm"] = batch_norm_advice(model, config.batch, processes)
    return model


class ImageLoss:
    """The loss summed over a micro-batch's images. Rows that only fill it up have the label
    IGNORED.
    """

    def __init__(self, model: Any, to_model: ToModel, losses: SampleLosses) -> None:
        self.model = model
        self.to_model = to_model
        self.losses = losses

    def logits_of(self, batch: Batch) -> torch.Tensor:
        """[rows, classes]"""
        return self.model(pixel_values=self.to_model(batch["pixel_values"])).logits

    def __call__(self, batch: Batch) -> torch.Tensor:
        labels = targets = batch["labels"]
        pixels = self.to_model(batch["pixel_values"])
        if "mix" in batch:
            pixels, targets = mix(pixels, targets, batch["mix"], self.losses.num_classes)
        logits = self.model(pixel_values=pixels).logits
        losses = self.losses(logits, targets)
        return (losses * (labels != IGNORED)).sum()


def predict(run: Run, loss: ImageLoss, loader: Loader, data: LabelledData) -> Evaluation:
    """What the model says of the validation images, each counted once on any world size."""
    return evaluate(run, loss.model, loader, data, loss.logits_of)


def save_final(
    run: Run, model: nn.Module, processor: Any, data: LabelledData, evaluation: Evaluation
) -> None:
    """Write final/ (model, processor, card) and the pictures of the evaluation. Every rank calls
    this.
    """
    weights = gather_weights(run.accelerator, model)
    if not run.is_main:
        return
    with whole_folder(run.dir / "final") as folder:
        whole = run.unwrap(model)
        evaluation.update(whole.config)
        whole.config.update(timm_settings(processor, whole.config))
        whole.save_pretrained(folder, state_dict=weights)
        processor.save_pretrained(folder)
        task = "image-classification"
        own_code = ", trust_remote_code=True" * isinstance(whole, PooledHead)  # a file in final/
        load = evaluation.usage(f'pipeline("{task}", model="final"{own_code})')
        run.write_card(folder, "Image classifier", load=load, pipeline_tag=task)
    report(run, evaluation, data.validation)


def main(config: Config) -> None:
    config = with_defaults(config)
    setup = Setup(config, "image_classification", unit="images", demo=DEMO)
    data = images.prepare(config.data)
    setup.describe_data(data.train, data.validation)  # data.json; with --preprocess_only, the end
    processor = processor_of(config)
    size = processor.crop_size["height"]
    model, classes = build_model(config, data.classes, size)
    data = data.numbered_as(classes)
    channels_last = image_classifier.channels_last(model, setup.accelerator)
    to_model = ToModel(processor, setup.device, channels_last=channels_last)
    setup.details["images"] = config.recipe.describe(processor, to_model.order)
    train, validation = build_loaders(setup, data, processor, model)
    model = prepare_model(setup, model, size, to_model.memory_format)
    # on the device, sharded as the launch config says
    model, optimizers = setup.prepare(model, optim.build(model, setup.config.optim))
    image_classifier.training_mode(model)
    loss = ImageLoss(model, to_model, SampleLosses(setup, data, config.recipe))
    # compiled where that pays; from the newest checkpoint, if there is one
    run = setup.start(train, loss, fingerprint=data.identity)

    if run.should_evaluate():
        run.log_evaluation(predict(run, loss, validation, data).summary)
    for step in run.steps():
        for batch in step.micro_batches():
            step.backward(loss(batch))  # scaled from a sum to the mean over the global batch
        step.clip_gradients(config.optim.max_grad_norm)
        step.update(optimizers)  # skipped on all ranks if loss or gradient is not finite
        if run.should_evaluate():
            run.log_evaluation(predict(run, loss, validation, data).summary)
    run.load_best_weights()
    evaluation = predict(run, loss, validation, data)
    save_final(run, model, processor, data, evaluation)
    files = f"model in {run.dir}/final; evaluation.json, pictures and curves.png beside it"
    run.close(evaluation.headline, files)


if __name__ == "__main__":
    exits.run(main, CONFIG)
