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

import math
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
from shared.config.types import Count, CountOrZero, Free
from shared.process.errors import ConfigError
from shared.text.options import ChatConfig
from shared.vision.options import FullVisionConfig

DEMO_STEPS = 40  # about two minutes on two CPU cores
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

from torch import nn

from shared.answers.answers import log_answers
from shared.answers.scores import exact_match, token_f1
from shared.experts.products import use_launch_precision
from shared.models import attention, sequence_parallel
from shared.models.blocks import set_gradient_checkpointing
from shared.models.checks import learn_padding_token, require_fit
from shared.models.counts import count_parameters, flops_per_token
from shared.models.loading import dtype_of, freeze, load_causal_lm
from shared.models.loss import causal_lm_loss, fuse_head
from shared.models.tokenizers import load_tokenizer
from shared.models.weights import DTYPES
from shared.run import exits
from shared.run.final import save_whole
from shared.run.run import Run
from shared.run.setup import Setup
from shared.text.chat import Conversations
from shared.text.loaders import ChatData, build_loaders, choose_packing
from shared.text.packing import Packed
from shared.training import defaults, optim
from shared.vision.digits import of_digits
from shared.vision.loaders import read_conversations
from shared.vision.towers import train_vision


def build_model(config: Config, tokenizer: Any, train: Conversations) -> nn.Module:
    """The model to train, with fp32 weights, or bf16 ones if asked. Mixed precision casts fp32
    where it computes.
    """
    kernel = config.speed.attn_implementation
    name = config.model_name_or_path
    model = load_causal_lm(name, attn_implementation=kernel, dtype=DTYPES[config.weights_dtype])
    train_vision(model, train, config.vision)
    require_fit(model, tokenizer, config.data.seq_length)
    learn_padding_token(model)
    use_launch_precision(model)  # of experts, which know no autocast
    freeze(model, config.freeze)
    set_gradient_checkpointing(model, config.speed.gradient_checkpointing)
    return model.train()  # from_pretrained leaves dropout off


def score(answer: str, record: dict[str, Any]) -> dict[str, float]:
    """How good an answer is: numbers by name. With --eval_answers, their means are logged as
    eval_NAME. Edit it for your task.

    Args:
        record: the texts `prompt` and `reference`, and the columns of the data that are not
            learned.
    """
    reference = record["reference"]
    return {
        "exact_match": exact_match(answer, reference),
        "token_f1": token_f1(answer, reference),
    }


def evaluate(run: Run, model: nn.Module, data: ChatData, tokenizer: Any) -> None:
    """Log the loss per target token and the perplexity of the validation samples and, with
    --eval_answers, the scores of the answers that the model gives to some of them.
    """
    with run.evaluating(model):
        loss = run.mean_loss(data.validation, partial(causal_lm_loss, model))
        values = {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 100))}
        scores = log_answers(run, model, data.held_out, tokenizer, score)
        run.log_evaluation(values | scores)


def main(config: Config) -> None:
    if config.vision.demo_images:
        config = of_digits(config)
    setup = Setup(config, "full_finetune", strategy=sequence_parallel.strategy_of)
    if config.data.is_demo:
        config = setup.set_defaults("the demo", global_batch_size=16, max_steps=DEMO_STEPS)
    tokenizer = load_tokenizer(config.model_name_or_path)
    train, held_out = read_conversations(config, tokenizer, demo_samples=DEMO_SAMPLES)
    if config.data.preprocess_only:
        return
    model = build_model(config, tokenizer, train)
    trained, parameters = count_parameters(model)
    flops = flops_per_token(model, train.context)

    width = defaults.width(model)
    config = setup.set_defaults(
        f"all weights, width {width}", learning_rate=defaults.full_rate(width)
    )
    # on the device, sharded
    model, optimizers = setup.prepare(model, optim.build(model, config.optim))
    packed, packing = choose_packing(
        model, tokenizer, config.data, config.batch, setup.device, why_not=train.why_not_packed
    )
    rows = Packed(train, config.data.seq_length) if packed else train
    fitting = defaults.for_conversations(config.batch, len(train), len(rows))
    config = setup.set_defaults(f"{len(train):,} samples in {len(rows):,} rows", **fitting)
    data = build_loaders(rows, held_out, config.data, config.batch, setup.accelerator)
    steps = config.batch.total_steps(data.train.steps_per_epoch)
    config = setup.compile(model, steps, one_shape=packed)  # by flag, or where it saves time
    head = fuse_head(setup.accelerator, model, len(tokenizer), compiled=config.speed.torch_compile)
    # --find_batch_size, --dress_rehearsal
    config = setup.rehearse(data.train, partial(causal_lm_loss, model))
    whole = setup.accelerator.unwrap_model(model)
    about = {"data": data.about, "model": f"{config.model_name_or_path}, {parameters:,} parameters"}
    about |= {
        "weights": WEIGHTS[config.weights_dtype],
        "attention": attention.describe(whole),
        "packing": packing,
        "loss": head,
        "trained": f"{trained:,} parameters ({trained / parameters:.2%})",
    }
    # from the newest checkpoint, if there is one
    run = setup.start(
        data.train, fingerprint=data.fingerprint, total_steps=steps, flops=flops, **about
    )

    if run.should_evaluate():
        evaluate(run, model, data, tokenizer)
    for step in run.steps():
        for batch in step.micro_batches():
            # summed over this micro-batch's target tokens
            loss = causal_lm_loss(model, batch, log=step.log)
            step.backward(loss)  # scaled to the mean over the global batch
        step.clip_gradients(config.optim.max_grad_norm)
        step.update(optimizers)  # skipped on all ranks if loss or gradient is not finite
        if run.should_evaluate():
            evaluate(run, model, data, tokenizer)
    run.load_best_weights()
    dtype = (
        dtype_of(config.model_name_or_path)
        if config.final_dtype == "auto"
        else DTYPES[config.final_dtype]
    )
    title = f"{Path(config.model_name_or_path).name}, fine-tuned"
    save_whole(
        run, model, tokenizer, title=title, about=data.about, end=data.held_out.end, dtype=dtype
    )
    before, after = (
        values.get("eval_loss", math.nan) for values in (run.state.before, run.state.results)
    )
    run.close(
        f"validation loss {before:.4f} before, {after:.4f} after training",
        f"model in {run.dir}/final, in {dtype}; curves.png, metrics.jsonl "
        "and config.yaml beside it",
    )


if __name__ == "__main__":
    exits.run(main, CONFIG)
