r"""Classify texts or pairs of texts: one class, several, or a number; all weights or LoRA.

    accelerate launch templates/text_classification.py  # offline demo, any machine
    accelerate launch templates/text_classification.py --model_name_or_path ORG/BERT \
        --train_file reviews.csv
    accelerate launch templates/text_classification.py --model_name_or_path ORG/LLAMA \
        --dataset_name ORG/NAME --lora_r 16
    accelerate launch --config_file accelerate_configs/ddp.yaml templates/text_classification.py \
        --train_file pairs.jsonl --text_column premise --text_pair_column hypothesis \
        --model_name_or_path ORG/BERT
    docker run --gpus all IMAGE accelerate launch templates/text_classification.py

Fine-tuning of encoders: Devlin et al., arXiv 1810.04805. LoRA: Hu et al., arXiv 2106.09685.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

# the shared/ beside this file, before one that is installed
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from shared import demo
from shared.config import parse as configs
from shared.config.options import (
    BatchConfig,
    CheckpointConfig,
    EvaluationConfig,
    FullOptimConfig,
    FullSpeedConfig,
    LogConfig,
)
from shared.config.types import Count, CountOrZero, Share
from shared.models.options import AdapterConfig
from shared.process.errors import ConfigError
from shared.text.options import LabelledTextConfig

DEMO_EPOCHS = 3  # about a minute on two CPU cores


@dataclass(frozen=True)
class Config:
    """Train a classifier of texts."""

    model_name_or_path: str = str(demo.MODEL)  # Model on the Hub or in a folder, encoder or decoder
    # Rank of the adapters, which are trained together with the head; 0: train all weights
    lora_r: CountOrZero = 0
    lora_alpha: Count = 32  # Scale of the adapters: updates are multiplied by alpha / r
    # balanced: weigh texts inversely to the frequency of their class; multi_label: weigh a yes by
    # the ratio of texts without the class to those with it
    class_weights: Literal["none", "balanced"] = "none"
    label_smoothing: Share = 0.0  # Share of each target spread over all classes
    data: LabelledTextConfig = LabelledTextConfig()
    batch: BatchConfig = BatchConfig(
        per_device_train_batch_size=16, per_device_eval_batch_size=32, dataloader_num_workers=0
    )
    optim: FullOptimConfig = FullOptimConfig(
        weight_decay=0.01, adam_beta2=0.999, lr_scheduler_type="linear", warmup_steps=0.06
    )
    speed: FullSpeedConfig = FullSpeedConfig()
    evaluation: EvaluationConfig = EvaluationConfig(eval_steps=None, metric_for_best_model="loss")
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        self.batch.micro_batch()  # refuses what does not divide


# before torch is imported, so that --help and a mistyped flag answer at once
if __name__ == "__main__":
    CONFIG = configs.parse_or_exit(Config)

import numpy as np
import torch
from accelerate import DistributedType
from torch import nn

from shared.data.labels import LabelledData
from shared.data.loader import Loader
from shared.data.order import IGNORED, Batch
from shared.evaluation.evaluation import SHOWN, Evaluation, of_batch
from shared.evaluation.kinds import binary_cross_entropy, cross_entropy, evaluation_of
from shared.evaluation.loaders import labelled_loaders
from shared.models import adapters
from shared.models.attention import forward_rows
from shared.models.blocks import set_gradient_checkpointing
from shared.models.checks import require_tokens_fit
from shared.models.classifier import make_shardable
from shared.models.counts import count_parameters, measure
from shared.models.hub import attention_option
from shared.models.loading import without_adapters
from shared.models.text_classifier import load_text_classifier, text_heads
from shared.models.tokenizers import load_tokenizer
from shared.models.weights import gather_weights
from shared.process.files import whole_folder
from shared.run import exits
from shared.run.run import Run
from shared.run.setup import Setup
from shared.text import labelled
from shared.text.packing import grouped_order
from shared.training import defaults, optim

# By --problem_type: transformers' name of it.
PROBLEM_TYPES = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}


def load_model(config: Config, data: LabelledData) -> tuple[Any, tuple[str, ...]]:
    """(the model with fp32 weights, without adapters; the classes in the order of its scores)."""
    problem_type = PROBLEM_TYPES[data.problem_type]
    options = attention_option(config.speed.attn_implementation)
    padding = data.train.tokenizer.pad_token_id
    return load_text_classifier(
        config.model_name_or_path, data.classes, problem_type, padding, **options
    )


def prepare_model(
    setup: Setup, model: Any, data: LabelledData, sample: Batch
) -> tuple[nn.Module, float]:
    """(the model ready to be sharded, FLOPs of forward and backward for a text such as the
    `sample`).
    """
    config = setup.config
    sharded = setup.accelerator.distributed_type == DistributedType.FSDP
    require_tokens_fit(model, data.train.tokenizer, config.data.seq_length)
    set_gradient_checkpointing(model, config.speed.gradient_checkpointing)
    if config.lora_r:
        whole = (
            *text_heads(model),
            *(name for name, _ in model.named_modules() if name.endswith("pooler")),
        )
        adapter = AdapterConfig(
            lora_r=config.lora_r, lora_alpha=config.lora_alpha, modules_to_save=whole
        )
        model = adapters.add_adapters(model, adapter, "SEQ_CLS")
    make_shardable(without_adapters(model), of_text=True)
    device = torch.device("cpu") if sharded else setup.device  # on which it may not fit whole
    model.to(device)
    with setup.accelerator.autocast():
        flops = measure(
            model, {key: value.to(device) for key, value in sample.items() if key != "labels"}
        )
    return model.train(), flops


def build_loaders(setup: Setup, data: LabelledData) -> tuple[Loader, Loader, Batch]:
    """(training and validation micro-batches of texts of similar lengths, a batch of one usual
    text).
    """
    config = setup.config
    batch = config.batch
    collate = partial(
        labelled.collate,
        pad_token_id=data.train.tokenizer.pad_token_id,
        at_most=config.data.seq_length,
    )
    order = grouped_order(data.train, batch.global_batch_size, batch.seed, config.data.mix_weights)
    usual = int(np.argsort(data.train.lengths)[len(data.train) // 2])
    return (
        *labelled_loaders(setup, data, order, collate),
        collate([data.train[usual]]),
    )


def text_loss(model: nn.Module, batch: Batch, **options: Any) -> torch.Tensor:
    """The loss summed over this micro-batch's texts. Rows that only fill it up have the label
    IGNORED.

    Cross-entropy for class numbers, [rows] int64; a yes or no for each class, [rows, classes];
    squared error for numbers. `options` are `weight`, [classes], and `label_smoothing`.
    """
    labels = batch["labels"]
    logits = forward_rows(model, batch).logits.float()
    if labels.ndim == 2:
        losses = binary_cross_entropy(logits, labels, **options)
    elif labels.is_floating_point():
        losses = (logits[:, 0] - labels) ** 2
    else:
        losses = cross_entropy(logits, labels, **options)
    return (losses * (labels != IGNORED)).sum()


def predict(run: Run, model: nn.Module, loader: Loader, data: LabelledData) -> Evaluation:
    """What the model says of the validation texts, each counted once on any world size."""
    batches = []
    with run.evaluating(model):
        for window in run.read(loader):
            (batch,) = window.micro_batches
            batches.append(of_batch(forward_rows(model, batch).logits, batch["labels"]))
    kept = getattr(run.unwrap(model).config, "thresholds", None)  # a test must not choose them
    return evaluation_of(run.accelerator, batches, data, "texts", None if run.total_steps else kept)


def save_final(run: Run, model: nn.Module, data: LabelledData, evaluation: Evaluation) -> None:
    """Write final/ (model, tokenizer, card; with LoRA also adapter/) and what an evaluation found.
    Every rank calls this.
    """
    config = run.config
    tokenizer = data.train.tokenizer
    weights = gather_weights(run.accelerator, model, trainable_only=config.lora_r > 0)
    if not run.is_main:
        return
    whole = run.unwrap(model)
    if config.lora_r:
        with whole_folder(run.dir / "adapter") as folder:
            whole.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
        whole = adapters.merge_into(load_model(config, data)[0], run.dir / "adapter")
    with whole_folder(run.dir / "final") as folder:
        evaluation.update(whole.config)
        whole.save_pretrained(folder, state_dict=None if config.lora_r else weights)
        # pipelines cut longer texts, as training did
        tokenizer.model_max_length = config.data.seq_length
        tokenizer.save_pretrained(folder)
        task = "text-classification"
        load = evaluation.usage(f'pipeline("{task}", model="final", truncation=True)')
        run.write_card(folder, "Text classifier", data.about, load=load, pipeline_tag=task)
    for picture in evaluation.write(run.dir, data.validation):
        run.logger.tracker.log_picture(picture.stem, picture)
    mistakes = evaluation.mistakes(data.validation, SHOWN)
    run.logger.tracker.log_table(
        "mistakes",
        [*mistakes[0]] if mistakes else [],
        [[*map(str, row.values())] for row in mistakes],
    )


def main(config: Config) -> None:
    setup = Setup(config, "text_classification", unit="texts")
    if config.data.is_demo:
        config = setup.set_defaults("the demo", global_batch_size=16, num_train_epochs=DEMO_EPOCHS)
    # strings of special tokens in a text are text, also after training
    tokenizer = load_tokenizer(config.model_name_or_path, split_special_tokens=True)
    data = labelled.open_texts(config.data, tokenizer)
    model, classes = load_model(config, data)
    data = data.numbered_as(classes)
    if data.problem_type == "regression" and (
        config.label_smoothing or config.class_weights != "none"
    ):
        raise ConfigError("--label_smoothing and --class_weights are for classes, not for numbers")
    fitting = defaults.batch_and_epochs(
        config.batch, len(data.train), len(data.train), most=16, least=8
    )
    config = setup.set_defaults(f"{len(data.train):,} texts", **fitting)
    width = defaults.width(model)
    what = "LoRA" if config.lora_r else "all weights"
    rate = defaults.text_classification_rate(width, lora=config.lora_r > 0)
    config = setup.set_defaults(f"classifier of texts, {what}, width {width}", learning_rate=rate)
    train, validation, sample = build_loaders(setup, data)
    model, flops = prepare_model(setup, model, data, sample)
    trained, parameters = count_parameters(model)

    # on the device, sharded
    model, optimizers = setup.prepare(model, optim.build(model, config.optim))
    steps = config.batch.total_steps(train.steps_per_epoch)
    config = setup.compile(model, steps, one_shape=False)  # by flag, or where it saves time
    class_weights = None
    if config.class_weights == "balanced":
        class_weights = data.class_weights(config.data.mix_weights).to(setup.device)
    smoothing = config.label_smoothing
    loss_of = partial(text_loss, model, weight=class_weights, label_smoothing=smoothing)
    config = setup.rehearse(train, loss_of)  # --find_batch_size, --dress_rehearsal
    about = {
        "data": data.about,
        "model": f"{config.model_name_or_path}, {trained:,} of {parameters:,} parameters trained",
        "labels": f"class_weights {config.class_weights}, label_smoothing {smoothing:g}",
    }
    # from the newest checkpoint, if there is one
    run = setup.start(
        train,
        fingerprint=data.identity,
        total_steps=steps,
        samples="texts",
        flops=flops,
        **about,
    )

    if run.should_evaluate():
        run.log_evaluation(predict(run, model, validation, data).summary)
    for step in run.steps():
        for batch in step.micro_batches():
            # summed over the micro-batch, scaled to the mean of the global batch
            step.backward(loss_of(batch))
        step.clip_gradients(config.optim.max_grad_norm)
        step.update(optimizers)  # skipped on all ranks if loss or gradient is not finite
        if run.should_evaluate():
            run.log_evaluation(predict(run, model, validation, data).summary)
    run.load_best_weights()
    evaluation = predict(run, model, validation, data)
    save_final(run, model, data, evaluation)
    files = f"model in {run.dir}/final; evaluation.json, pictures and curves.png beside it"
    run.close(evaluation.headline, files)


if __name__ == "__main__":
    exits.run(main, CONFIG)
