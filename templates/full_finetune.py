r"""Fine-tune all weights of a causal language model on conversations.

    accelerate launch templates/full_finetune.py                         # offline demo, any machine
    accelerate launch templates/full_finetune.py --model_name_or_path ORG/NAME \
        --train_file chats.jsonl
    accelerate launch --config_file accelerate_configs/fsdp2.yaml templates/full_finetune.py \
        --model_name_or_path ...
    accelerate launch --config_file accelerate_configs/fsdp2.yaml templates/full_finetune.py \
        --optim adamw_8bit
    docker run --gpus all IMAGE accelerate launch templates/full_finetune.py

Bf16 weights with stochastic rounding: Zamirai et al., arXiv 2010.06192.
"""

import sys
from dataclasses import dataclass
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
from shared.config.types import Count, CountOrZero, Free
from shared.process.errors import ConfigError
from shared.text.options import ChatConfig, FullVisionConfig

DEMO = {"global_batch_size": 16, "max_steps": 40}  # about two minutes on two CPU cores
DEMO_SAMPLES = 2000
WEIGHTS = {
    "fp32": "fp32, cast where mixed precision computes",
    "bf16": "bf16, as are their moments; rounded stochastically",
}


@dataclass(frozen=True)
class Config:
    """Fine-tune all weights of a causal language model."""

    model_name_or_path: str = str(demo.MODEL)  # Model on the Hub or in a folder
    # Precision of the weights in training; bf16: half the memory of weights, gradients and moments,
    # with stochastic rounding
    weights_dtype: Literal["fp32", "bf16"] = "fp32"
    # Precision of the weights in final/; auto: that of the model given
    final_dtype: Free[Literal["auto", "fp32", "bf16"]] = "auto"
    # Weights to freeze, by regular expressions found in their names, such as embed_tokens
    # 'layers\.[0-3]\.'
    freeze: tuple[str, ...] = ()
    # Validation prompts whose answers are printed before training and at its end
    show_answers: Free[CountOrZero] = 1
    # Validation prompts to answer and score at each evaluation; 0: none
    eval_answers: Free[CountOrZero] = 0
    max_new_tokens: Free[Count] = 48  # Tokens of an answer, at most
    data: ChatConfig = ChatConfig(seq_length=512, eval_samples=256)
    vision: FullVisionConfig = FullVisionConfig()
    batch: BatchConfig = BatchConfig(per_device_train_batch_size=2)
    optim: FullOptimConfig = FullOptimConfig(weight_decay=0.0, adam_beta2=0.999)
    speed: FullSpeedConfig = FullSpeedConfig()
    evaluation: EvaluationConfig = EvaluationConfig(eval_steps=0.05, metric_for_best_model="loss")
    checkpoint: CheckpointConfig = CheckpointConfig(save_steps=0.05)
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        self.batch.micro_batch()  # refuses what does not divide
        if self.weights_dtype == "bf16" and self.evaluation.ema_decay:
            raise ConfigError(
                "--ema_decay would lose small updates of bf16 weights: keep "
                "fp32 weights, or drop it"
            )


# before torch is imported, so that --help and a mistyped flag answer at once
if __name__ == "__main__":
    CONFIG = configs.parse_or_exit(Config)

import torch
from torch import nn

from shared.answers.evaluation import evaluate
from shared.answers.scores import like_reference
from shared.models.blocks import set_gradient_checkpointing
from shared.models.checks import learn_padding_token, require_fit
from shared.models.counts import flops_per_token
from shared.models.fused_head import TokenLoss
from shared.models.loading import dtype_of, freeze, load_causal_lm, use_launch_precision
from shared.models.tokenizers import load_tokenizer
from shared.models.weights import DTYPES
from shared.parallel.strategy import strategy_of_rows
from shared.run import exits
from shared.run.final import save_whole
from shared.run.setup import Setup
from shared.text.chat import Conversations
from shared.text.loaders import arrange, read_conversations
from shared.training import defaults, optim

# How good an answer is, for --eval_answers: (answer, record) -> numbers by name, logged as
# eval_NAME. Put your own function here: docs/logging.md, Scores of answers.
score = like_reference


def build_model(setup: Setup, tokenizer: Any, train: Conversations) -> nn.Module:
    """The model to train, with fp32 weights, or bf16 ones if asked. Mixed precision casts fp32
    where it computes.
    """
    config = setup.config
    kernel = config.speed.attn_implementation
    name = config.model_name_or_path
    model = load_causal_lm(name, attn_implementation=kernel, dtype=DTYPES[config.weights_dtype])
    if config.vision.train_vision != "none":
        from shared.extras.vision.towers import train_vision

        train_vision(model, train, config.vision)
    require_fit(model, tokenizer, config.data.seq_length)
    learn_padding_token(model)
    use_launch_precision(model)  # of experts, which know no autocast
    freeze(model, config.freeze)
    set_gradient_checkpointing(model, config.speed.gradient_checkpointing)
    setup.flops = flops_per_token(model, train.context)
    setup.details["weights"] = WEIGHTS[config.weights_dtype]
    return model.train()  # from_pretrained leaves dropout off


def final_dtype(config: Config) -> torch.dtype:
    """The precision of the weights in final/."""
    if config.final_dtype == "auto":
        return dtype_of(config.model_name_or_path)
    return DTYPES[config.final_dtype]


def main(config: Config) -> None:
    if config.vision.demo_images:
        from shared.extras.vision.digits import of_digits

        config = of_digits(config)
    setup = Setup(config, "full_finetune", demo=DEMO, strategy=strategy_of_rows)
    tokenizer = load_tokenizer(config.model_name_or_path)
    train, held_out = read_conversations(config, tokenizer, demo_samples=DEMO_SAMPLES)
    setup.describe_data(train, held_out, tokenizer)  # data.json; with --preprocess_only, the end
    model = build_model(setup, tokenizer, train)
    width = defaults.width(model)
    setup.set_defaults(f"all weights, width {width}", learning_rate=defaults.full_rate(width))
    # on the device, sharded as the launch config says
    model, optimizers = setup.prepare(model, optim.build(model, setup.config.optim))
    # several conversations in a row if the model keeps them apart; a batch and epochs that fit
    data = arrange(setup, model, train, held_out)
    loss = TokenLoss(model)  # cross-entropy, summed over a micro-batch's target tokens
    # compiled and fused where that pays; from the newest checkpoint, if there is one
    run = setup.start(data.train, loss, fingerprint=data.fingerprint)

    if run.should_evaluate():
        evaluate(run, model, data, tokenizer, score)
    for step in run.steps():
        for batch in step.micro_batches():
            step.backward(loss(batch, log=step.log))  # scaled to the mean over the global batch
        step.clip_gradients(config.optim.max_grad_norm)
        step.update(optimizers)  # skipped on all ranks if loss or gradient is not finite
        if run.should_evaluate():
            evaluate(run, model, data, tokenizer, score)
    run.load_best_weights()
    dtype = final_dtype(config)
    save_whole(run, model, tokenizer, title="fine-tuned", end=data.held_out.end, dtype=dtype)
    files = "curves.png, metrics.jsonl and config.yaml beside it"
    run.close(run.change_of("loss"), f"model in {run.dir}/final, in {dtype}; {files}")


if __name__ == "__main__":
    exits.run(main, CONFIG)
