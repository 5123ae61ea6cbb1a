r"""Label the words of texts: names, parts of speech, personal data; all weights, LoRA or the head.

    accelerate launch templates/token_classification.py  # offline demo, any machine
    accelerate launch templates/token_classification.py --model_name_or_path ORG/BERT \
        --train_file names.jsonl
    accelerate launch templates/token_classification.py --model_name_or_path ORG/BERT \
        --train_file train.conll --validation_file valid.conll --class_weights balanced
    accelerate launch --config_file accelerate_configs/ddp.yaml templates/token_classification.py \
        --dataset_name ORG/NAME --model_name_or_path ORG/LLAMA --lora_r 16
    docker run --gpus all IMAGE accelerate launch templates/token_classification.py

Tagging by encoders: Devlin et al., arXiv 1810.04805. Spans count as in CoNLL-2003: Tjong Kim Sang
and De Meulder, arXiv cs/0306050.
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
from shared.extras.tagging.options import TaggedTextConfig
from shared.process.errors import ConfigError

DEMO = {"global_batch_size": 16, "num_train_epochs": 2}  # about a minute on two CPU cores


@dataclass(frozen=True)
class Config:
    """Train a model that labels words."""

    model_name_or_path: str = str(demo.MODEL)  # Model on the Hub or in a folder, encoder or decoder
    # Rank of the adapters, which are trained together with the head; 0: train all weights
    lora_r: CountOrZero = 0
    lora_alpha: Count = 32  # Scale of the adapters: updates are multiplied by alpha / r
    freeze_backbone: bool = False  # Train only the head
    # Tokens of a word that are learned; if not given, the first, and of decoders all. A word is
    # read at its first token; after `all`, pipelines find the same spans
    label_pieces: Literal["first", "all"] | None = None
    # balanced: weigh words inversely to the frequency of their tag
    class_weights: Literal["none", "balanced"] = "none"
    label_smoothing: Share = 0.0  # Share of each target spread over all tags
    data: TaggedTextConfig = TaggedTextConfig()
    batch: BatchConfig = BatchConfig(
        per_device_train_batch_size=16, per_device_eval_batch_size=32, dataloader_num_workers=0
    )
    optim: FullOptimConfig = FullOptimConfig(
        weight_decay=0.01, adam_beta2=0.999, lr_scheduler_type="linear", warmup_steps=0.06
    )
    speed: FullSpeedConfig = FullSpeedConfig()
    evaluation: EvaluationConfig = EvaluationConfig(eval_steps=None, metric_for_best_model="f1")
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        self.batch.micro_batch()  # refuses what does not divide
        if self.freeze_backbone and self.lora_r:
            raise ConfigError("--freeze_backbone and --lora_r say what is trained: drop one")


# before torch is imported, so that --help and a mistyped flag answer at once
if __name__ == "__main__":
    CONFIG = configs.parse_or_exit(Config)

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForTokenClassification

from shared.data.loader import Loader
from shared.data.order import IGNORED, Batch, training_order
from shared.evaluation.classify import report
from shared.evaluation.evaluation import Evaluation
from shared.evaluation.kinds import SampleLosses
from shared.evaluation.loaders import labelled_loaders
from shared.extras.tagging import tagged
from shared.extras.tagging.score import evaluate
from shared.extras.tagging.tagged import TaggedData
from shared.models import adapters
from shared.models.attention import forward_rows
from shared.models.blocks import set_gradient_checkpointing
from shared.models.checks import require_tokens_fit
from shared.models.classifier import make_shardable, measure_on_device
from shared.models.hub import attention_option
from shared.models.loading import without_adapters
from shared.models.text_classifier import load_text_classifier, with_adapters
from shared.models.tokenizers import load_tokenizer
from shared.models.weights import gather_weights
from shared.process.files import whole_folder
from shared.run import exits
from shared.run.run import Run
from shared.run.setup import Setup
from shared.training import defaults, optim


def load_model(config: Config, data: TaggedData) -> tuple[Any, tuple[str, ...]]:
    """(the model with fp32 weights, without adapters; the tags in the order of its scores)."""
    return load_text_classifier(
        config.model_name_or_path,
        data.classes,
        data.problem_type,
        data.train.tokenizer.pad_token_id,
        auto_class=AutoModelForTokenClassification,
        **attention_option(config.speed.attn_implementation),
    )


def prepare_model(setup: Setup, model: Any, data: TaggedData, sample: Batch) -> nn.Module:
    """The model ready to be sharded. Its FLOPs are those for a text such as the `sample`. Chooses
    the learning rate, where none is given.
    """
    config = setup.config
    require_tokens_fit(model, data.train.tokenizer, config.data.seq_length)
    set_gradient_checkpointing(model, config.speed.gradient_checkpointing)
    width = defaults.width(model)
    rate = defaults.text_classification_rate(width, lora=config.lora_r > 0)
    if config.freeze_backbone:
        model.base_model.requires_grad_(False)
        rate = 1e-3
    setup.set_defaults(f"classifier of words, width {width}", learning_rate=rate)
    if config.lora_r:
        model = with_adapters(model, config.lora_r, config.lora_alpha, "TOKEN_CLS")
    make_shardable(without_adapters(model), of_text=True)
    measure_on_device(setup, model, {name: x for name, x in sample.items() if name != "labels"})
    if setup.flops is not None:
        setup.flops /= sample["labels"].numel()  # of a token
    return model.train()


def build_loaders(setup: Setup, data: TaggedData) -> tuple[Loader, Loader, Batch]:
    """(training and validation micro-batches of windows of similar lengths, a batch of one usual
    window). Chooses the global batch and the epochs that fit, where none are given.
    """
    count = len(data.train)
    fitting = defaults.batch_and_epochs(setup.config.batch, count, count, most=16, least=8)
    config = setup.set_defaults(f"{count:,} windows", **fitting)
    collate = partial(
        tagged.collate,
        pad_token_id=data.train.tokenizer.pad_token_id,
        at_most=config.data.seq_length,
    )
    order = training_order(data.train, config.batch, config.data, is_padded=True)
    usual = data.train[int(np.argsort(data.train.lengths)[count // 2])]
    return *labelled_loaders(setup, data, order, collate), collate([usual])


class TagLoss:
    """The loss summed over a micro-batch's words, each at the tokens that count for it. All other
    tokens have the label IGNORED.
    """

    def __init__(self, model: Any, losses: SampleLosses) -> None:
        self.model = model
        self.losses = losses

    def logits_of(self, batch: Batch) -> torch.Tensor:
        """[rows, tokens, classes]"""
        return forward_rows(self.model, batch).logits

    def __call__(self, batch: Batch) -> torch.Tensor:
        labels = batch["labels"].flatten()
        losses = self.losses(self.logits_of(batch).flatten(0, 1), labels)
        return (losses * (labels != IGNORED)).sum()


def predict(run: Run, loss: TagLoss, loader: Loader, data: TaggedData) -> Evaluation:
    """What the model says of the validation words, each counted once on any world size."""
    return evaluate(run, loss.model, loader, data, loss.logits_of)


def save_final(run: Run, model: nn.Module, data: TaggedData, evaluation: Evaluation) -> None:
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
        whole.save_pretrained(folder, state_dict=None if config.lora_r else weights)
        tokenizer.model_max_length = config.data.seq_length
        tokenizer.save_pretrained(folder)
        task = "token-classification"
        # only tokens that were learned can be joined
        how = "simple" if data.train.every else "first"
        load = (
            "from transformers import pipeline\n\n"
            f'tag = pipeline("{task}", model="final", aggregation_strategy="{how}")'
        )
        run.write_card(folder, "Classifier of words", load=load, pipeline_tag=task)
    report(run, evaluation, data.validation, as_table=True)


def main(config: Config) -> None:
    setup = Setup(config, "token_classification", demo=DEMO)
    # strings of special tokens in a text are text, also after training
    tokenizer = load_tokenizer(config.model_name_or_path, split_special_tokens=True)
    data = tagged.open_texts(config.data, tokenizer)
    # data.json in the run's folder; with --preprocess_only, the end
    setup.describe_data(data.train, data.validation, tokenizer)
    model, classes = load_model(config, data)
    data = data.numbered_as(classes)
    setup.about["learned"] = f"{data.count(config.label_pieces, model)} of each word"
    train, validation, sample = build_loaders(setup, data)
    model = prepare_model(setup, model, data, sample)
    # on the device, sharded as the launch config says
    model, optimizers = setup.prepare(model, optim.build(model, setup.config.optim))
    loss = TagLoss(model, SampleLosses(setup, data, config))
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
    save_final(run, model, data, evaluation)
    files = f"model in {run.dir}/final; evaluation.json, pictures and curves.png beside it"
    run.close(evaluation.headline, files)


if __name__ == "__main__":
    exits.run(main, CONFIG)
