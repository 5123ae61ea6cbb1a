r"""Fine-tune a causal language model with LoRA or QLoRA.

    accelerate launch templates/lora_finetune.py                         # offline demo, any machine
    accelerate launch templates/lora_finetune.py --model_name_or_path ORG/NAME \
        --train_file chats.jsonl --load_in_4bit
    accelerate launch --config_file accelerate_configs/ddp.yaml templates/lora_finetune.py \
        --model_name_or_path ...
    accelerate launch --config_file accelerate_configs/fsdp2.yaml templates/lora_finetune.py \
        --model_name_or_path ...
    docker run --gpus all IMAGE accelerate launch templates/lora_finetune.py

LoRA: Hu et al., arXiv 2106.09685. QLoRA: Dettmers et al., arXiv 2305.14314. rsLoRA: Kalajdzievski,
arXiv 2312.03732. DoRA: Liu et al., arXiv 2402.09353.
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

# the shared/ beside this file, before one that is installed
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from shared import demo
from shared.config import parse as configs
from shared.config.options import (
    BatchConfig,
    CheckpointConfig,
    EvaluationConfig,
    LogConfig,
    OptimConfig,
    SpeedConfig,
)
from shared.config.types import Count, CountOrZero, Free
from shared.models.options import AdapterConfig
from shared.text.options import ChatConfig
from shared.vision.options import VisionConfig

DEMO_STEPS = 40  # about two minutes on two CPU cores
DEMO_SAMPLES = 2000
ADAPTER = AdapterConfig(lora_r=16, lora_alpha=32)


@dataclass(frozen=True)
class Config:
    """Fine-tune a causal language model with LoRA or QLoRA."""

    model_name_or_path: str = str(demo.MODEL)  # Model on the Hub or in a folder
    # Validation prompts whose answers are printed before training and at its end
    show_answers: Free[CountOrZero] = 1
    # Validation prompts to answer and score at each evaluation; 0: none
    eval_answers: Free[CountOrZero] = 0
    max_new_tokens: Free[Count] = 48  # Tokens of an answer, at most
    adapter: AdapterConfig = ADAPTER
    data: ChatConfig = ChatConfig(seq_length=512, eval_samples=256)
    vision: VisionConfig = VisionConfig()
    batch: BatchConfig = BatchConfig(per_device_train_batch_size=2)
    optim: OptimConfig = OptimConfig(weight_decay=0.0)
    speed: SpeedConfig = SpeedConfig()
    evaluation: EvaluationConfig = EvaluationConfig(eval_steps=0.05, metric_for_best_model="loss")
    checkpoint: CheckpointConfig = CheckpointConfig(save_steps=0.05)
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        self.batch.micro_batch()  # refuses what does not divide
        self.adapter.refuse_changes_to_a_given_adapter(ADAPTER)


# before torch is imported, so that --help and a mistyped flag answer at once
if __name__ == "__main__":
    CONFIG = configs.parse_or_exit(Config)

from torch import nn

from shared.answers.answers import log_answers
from shared.answers.scores import exact_match, token_f1
from shared.models import adapters, attention, sequence_parallel, targets
from shared.models.blocks import set_gradient_checkpointing
from shared.models.checks import require_fit, warn_of_untrained_tokens
from shared.models.counts import count_parameters, flops_per_token
from shared.models.loss import causal_lm_loss, fuse_head
from shared.models.tokenizers import load_tokenizer
from shared.run import exits
from shared.run.final_adapter import save_adapter
from shared.run.run import Run
from shared.run.setup import Setup
from shared.text import chat
from shared.text.loaders import ChatData, build_loaders, choose_packing
from shared.text.packing import Packed
from shared.training import defaults, optim
from shared.vision.loaders import read_conversations


def build_model(setup: Setup, tokenizer: Any, train: chat.Conversations) -> nn.Module:
    """The base, frozen and quantised if asked, with trainable adapters in fp32."""
    config = setup.config
    base = adapters.load_base(
        config.model_name_or_path, config.adapter, config.speed, setup.accelerator
    )
    require_fit(base, tokenizer, config.data.seq_length)
    set_gradient_checkpointing(base, config.speed.gradient_checkpointing)
    model = adapters.add_adapters(base, config.adapter)
    warn_of_untrained_tokens(model, tokenizer, train.first_ids())
    return model


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
    setup = Setup(config, "lora_finetune", strategy=sequence_parallel.strategy_of)
    if config.data.is_demo:
        config = setup.set_defaults("the demo", global_batch_size=16, max_steps=DEMO_STEPS)
    tokenizer = load_tokenizer(config.model_name_or_path)
    train, held_out = read_conversations(config, tokenizer, demo_samples=DEMO_SAMPLES)
    if config.data.preprocess_only:
        return
    model = build_model(setup, tokenizer, train)
    trained, parameters = count_parameters(model)
    flops = flops_per_token(model, train.context)
    carriers = targets.describe(model)

    width = defaults.width(model)
    config = setup.set_defaults(f"LoRA, width {width}", learning_rate=defaults.lora_rate(width))
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
    about = {
        "data": data.about,
        "model": f"{config.model_name_or_path}, {parameters:,} parameters"
        + ", base in 4 bits" * config.adapter.load_in_4bit,
        "adapters": carriers,
    }
    whole = setup.accelerator.unwrap_model(model)
    about |= {"attention": attention.describe(whole), "packing": packing, "loss": head}
    about["trained"] = f"{trained:,} parameters ({trained / parameters:.2%})"
    # from the newest checkpoint, if there is one
    run = setup.start(
        data.train,
        fingerprint=data.fingerprint,
        total_steps=steps,
        makes="merged" if config.adapter.merge_adapter else "final",
        flops=flops,
        **about,
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
    save_adapter(run, model, tokenizer, about=data.about, end=data.held_out.end)
    before, after = (
        values.get("eval_loss", math.nan) for values in (run.state.before, run.state.results)
    )
    run.close(
        f"validation loss {before:.4f} before, {after:.4f} after training",
        f"adapter in {run.dir}/final; curves.png, metrics.jsonl and config.yaml beside it",
    )


if __name__ == "__main__":
    exits.run(main, CONFIG)
