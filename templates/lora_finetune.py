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

import sys
from dataclasses import dataclass
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
from shared.text.options import ChatConfig, VisionConfig

DEMO = {"global_batch_size": 16, "max_steps": 40}  # about two minutes on two CPU cores
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

from shared.answers.evaluation import evaluate
from shared.answers.scores import like_reference
from shared.models import adapters, targets
from shared.models.blocks import set_gradient_checkpointing
from shared.models.checks import require_fit, warn_of_untrained_tokens
from shared.models.counts import flops_per_token
from shared.models.fused_head import TokenLoss
from shared.models.tokenizers import load_tokenizer
from shared.parallel.strategy import strategy_of_rows
from shared.run import exits
from shared.run.final_adapter import save_adapter
from shared.run.setup import Setup
from shared.text.chat import Conversations
from shared.text.loaders import arrange, read_conversations
from shared.training import defaults, optim

# How good an answer is, for --eval_answers: (answer, record) -> numbers by name, logged as
# eval_NAME. Put your own function here: docs/logging.md, Scores of answers.
score = like_reference


def build_model(setup: Setup, tokenizer: Any, train: Conversations) -> nn.Module:
    """The base, frozen and quantised if asked, with trainable adapters in fp32."""
    config = setup.config
    base = adapters.load_base(
        config.model_name_or_path, config.adapter, config.speed, setup.accelerator
    )
    require_fit(base, tokenizer, config.data.seq_length)
    set_gradient_checkpointing(base, config.speed.gradient_checkpointing)
    model = adapters.add_adapters(base, config.adapter)
    warn_of_untrained_tokens(model, tokenizer, train.first_ids())
    setup.flops = flops_per_token(model, train.context)
    setup.details["adapters"] = targets.describe(model)
    return model


def main(config: Config) -> None:
    setup = Setup(config, "lora_finetune", demo=DEMO, strategy=strategy_of_rows)
    tokenizer = load_tokenizer(config.model_name_or_path)
    train, held_out = read_conversations(config, tokenizer, demo_samples=DEMO_SAMPLES)
    setup.describe_data(train, held_out, tokenizer)  # data.json; with --preprocess_only, the end
    model = build_model(setup, tokenizer, train)
    width = defaults.width(model)
    setup.set_defaults(f"LoRA, width {width}", learning_rate=defaults.lora_rate(width))
    # on the device, sharded as the launch config says
    model, optimizers = setup.prepare(model, optim.build(model, setup.config.optim))
    # several conversations in a row if the model keeps them apart; a batch and epochs that fit
    data = arrange(setup, model, train, held_out)
    loss = TokenLoss(model)  # cross-entropy, summed over a micro-batch's target tokens
    makes = "merged" if config.adapter.merge_adapter else "final"
    # compiled and fused where that pays; from the newest checkpoint, if there is one
    run = setup.start(data.train, loss, fingerprint=data.fingerprint, makes=makes)

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
    save_adapter(run, model, tokenizer, end=data.held_out.end)
    files = f"adapter in {run.dir}/final; curves.png, metrics.jsonl and config.yaml beside it"
    run.close(run.change_of("loss"), files)


if __name__ == "__main__":
    exits.run(main, CONFIG)
