r"""Tune a causal language model on pairs of answers, one better than the other: DPO and relatives.

    accelerate launch templates/dpo.py                                   # offline demo, any machine
    accelerate launch templates/dpo.py --model_name_or_path ORG/NAME --train_file pairs.jsonl \
        --load_in_4bit
    accelerate launch templates/dpo.py --model_name_or_path ORG/NAME \
        --adapter_name_or_path runs/sft/final
    accelerate launch --config_file accelerate_configs/fsdp2.yaml templates/dpo.py --full \
        --model_name_or_path ...

The reference is the model before the first step. Its log-probabilities are computed once and kept,
so that no second model is in memory. DPO: Rafailov et al., arXiv 2305.18290. IPO: Azar et al.,
arXiv 2310.12036. Robust DPO: Chowdhury et al., arXiv 2403.00409. SimPO: Meng et al., arXiv
2405.14734. ORPO: Hong et al., arXiv 2403.07691.
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

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
from shared.config.types import Count, CountOrZero, Free, Positive, PositiveOrZero, within
from shared.models.options import AdapterConfig
from shared.process.errors import ConfigError
from shared.text.options import PreferenceConfig

DEMO_STEPS = 40  # about two minutes on two CPU cores
DEMO_SAMPLES = 800
ADAPTER = AdapterConfig(lora_r=16, lora_alpha=32)
REFERENCE_FREE = ("simpo", "orpo")


@dataclass(frozen=True)
class Config:
    """Tune a causal language model on preferences."""

    model_name_or_path: str = str(demo.MODEL)  # Model on the Hub or in a folder
    full: bool = False  # Train all weights, in fp32, in place of adapters
    # sigmoid: DPO; robust: DPO with a share of wrong labels (label_smoothing); simpo, orpo: no
    # reference
    loss_type: Literal["sigmoid", "robust", "ipo", "simpo", "orpo"] = "sigmoid"
    # Factor of the rewards; ipo: its tau; orpo: weight of its odds ratio; simpo: usually 2 to 10
    beta: Positive = 0.1
    # robust: share of pairs whose chosen answer is the worse one
    label_smoothing: Annotated[float, within(at_least=0, below=0.5)] = 0.0
    simpo_gamma: PositiveOrZero = 0.5  # simpo: target margin between the rewards
    # Validation prompts whose answers are printed before training and at its end
    show_answers: Free[CountOrZero] = 1
    # Validation prompts to answer and score at each evaluation; 0: none
    eval_answers: Free[CountOrZero] = 0
    max_new_tokens: Free[Count] = 48  # Tokens of an answer, at most
    adapter: AdapterConfig = ADAPTER
    data: PreferenceConfig = PreferenceConfig(
        seq_length=512, eval_samples=256, validation_split_percentage=10.0
    )
    batch: BatchConfig = BatchConfig(per_device_train_batch_size=4)
    optim: OptimConfig = OptimConfig(weight_decay=0.0)
    speed: SpeedConfig = SpeedConfig()
    evaluation: EvaluationConfig = EvaluationConfig(eval_steps=0.05, metric_for_best_model="loss")
    checkpoint: CheckpointConfig = CheckpointConfig(save_steps=0.05)
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        self.batch.micro_batch()  # refuses what does not divide
        self.adapter.refuse_changes_to_a_given_adapter(ADAPTER)
        self.adapter.refuse_dropout()
        if self.label_smoothing and self.loss_type != "robust":
            raise ConfigError(f"--label_smoothing is for --loss_type robust, not {self.loss_type}")
        if self.full and self.adapter != ADAPTER:
            raise ConfigError(
                "--full trains all weights: drop the flags of adapters and "
                "of quantisation, or --full"
            )


# before torch is imported, so that --help and a mistyped flag answer at once
if __name__ == "__main__":
    CONFIG = configs.parse_or_exit(Config)

import torch
from torch import nn
from torch.nn import functional as F

from shared.answers.answers import log_answers
from shared.answers.scores import exact_match, token_f1
from shared.models import attention, sequence_parallel
from shared.models.counts import count_parameters, flops_per_token
from shared.models.loss import fuse_head, log_probabilities
from shared.models.tokenizers import load_tokenizer
from shared.run import exits
from shared.run.reference import add_reference, identity_of_start
from shared.run.run import Run
from shared.run.setup import Setup
from shared.run.tuned import load_tuned, save_tuned
from shared.text.loaders import ChatData, choose_packing
from shared.text.preferences import build_loaders, read_pairs
from shared.training import defaults, optim


def build_model(setup: Setup, tokenizer: Any) -> nn.Module:
    """The frozen base with trainable adapters; with --full all weights. Without dropout."""
    return load_tuned(setup, tokenizer, setup.config.data.seq_length)


def losses_and_rewards(
    config: Config, policy: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each pair, [pairs], and what the loss takes for the rewards of its two answers,
    [pairs, 2].

    Args:
        policy, reference: log-probabilities of the chosen and the rejected answers, [pairs, 2].
        lengths: their numbers of tokens, [pairs, 2].
    """
    beta = config.beta
    smoothing = config.label_smoothing
    if config.loss_type in REFERENCE_FREE:
        mean = (policy / lengths).clamp(max=-1e-7)
        rewards = beta * mean
        if config.loss_type == "simpo":  # arXiv 2405.14734, equation 6
            return -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - config.simpo_gamma), rewards
        log_odds = mean - torch.where(
            mean < -0.7, torch.log1p(-mean.exp()), torch.log(-torch.expm1(mean))
        )
        odds_ratio = F.logsigmoid(log_odds[:, 0] - log_odds[:, 1])
        return -mean[:, 0] - beta * odds_ratio, rewards  # arXiv 2403.07691, equation 6
    ratios = policy - reference
    rewards = beta * ratios
    margins = rewards[:, 0] - rewards[:, 1]
    if config.loss_type == "ipo":  # arXiv 2310.12036, equation 17, with means over tokens
        mean = ratios / lengths
        return (mean[:, 0] - mean[:, 1] - 1 / (2 * beta)) ** 2, rewards
    if config.loss_type == "robust":  # arXiv 2403.00409, equation 12
        clean = -F.logsigmoid(margins)
        flipped = -F.logsigmoid(-margins)
        return ((1 - smoothing) * clean - smoothing * flipped) / (1 - 2 * smoothing), rewards
    return -F.logsigmoid(margins), rewards  # arXiv 2305.18290, equation 7


def preference_loss(
    config: Config, model: nn.Module, batch: dict[str, torch.Tensor], log: Any = None
) -> torch.Tensor:
    """The loss summed over this micro-batch's pairs. Both answers of all pairs go forward
    together.
    """
    lengths = batch["lengths"]
    policy = log_probabilities(model, batch, batch["answers"], lengths.numel()).view(-1, 2)
    losses, rewards = losses_and_rewards(config, policy, batch["reference"], lengths.clamp(min=1))
    counts = lengths[:, 0] > 0  # not the rows that fill up a smaller last batch
    if log is not None:
        margins = rewards[:, 0] - rewards[:, 1]
        values = {
            "rewards/chosen": rewards[:, 0],
            "rewards/rejected": rewards[:, 1],
            "rewards/margins": margins,
        }
        # a tie counts half, as before the first step
        values |= {"rewards/accuracies": (margins.sign() + 1) / 2}
        values |= {"logps/chosen": policy[:, 0], "logps/rejected": policy[:, 1]}
        log(**{name: (value.detach() * counts).sum() for name, value in values.items()})
    return (losses * counts).sum()


def score(answer: str, record: dict[str, Any]) -> dict[str, float]:
    """How good an answer is: numbers by name. With --eval_answers, their means are logged as
    eval_NAME. Edit it for your task.

    Args:
        record: the texts `prompt` and `reference` (the chosen answer), and the columns of the data
            that are not learned.
    """
    reference = record["reference"]
    return {
        "exact_match": exact_match(answer, reference),
        "token_f1": token_f1(answer, reference),
    }


def evaluate(run: Run, model: nn.Module, data: ChatData, tokenizer: Any) -> None:
    """Log loss, accuracy (the chosen answer has the higher reward) and margin of the validation
    pairs, each counted once, and the scores of answers to some prompts.
    """
    config = run.config
    sums: dict[str, Any] = {}

    def add(**values: torch.Tensor) -> None:
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value

    with run.evaluating(model):
        loss = run.mean_loss(data.validation, partial(preference_loss, config, model, log=add))
        pairs = len(data.validation.samples)
        accuracy, margin = (
            run.sum(sums[f"rewards/{name}"]).item() / pairs for name in ("accuracies", "margins")
        )
        values = {"eval_loss": loss, "eval_accuracy": accuracy, "eval_margin": margin}
        scores = log_answers(run, model, data.held_out, tokenizer, score)
        run.log_evaluation(values | scores)


def main(config: Config) -> None:
    setup = Setup(config, "dpo", unit="pairs", strategy=sequence_parallel.strategy_of)
    if config.data.is_demo:
        config = setup.set_defaults("the demo", global_batch_size=16, max_steps=DEMO_STEPS)
    if config.model_name_or_path == str(demo.MODEL):  # tiny, and needs long steps
        config = setup.set_defaults("the demo's model", learning_rate=1e-3)
    tokenizer = load_tokenizer(config.model_name_or_path)
    train, held_out = read_pairs(config.data, tokenizer, demo_samples=DEMO_SAMPLES)
    model = build_model(setup, tokenizer)
    width = defaults.width(model)
    what = "all weights" if config.full else "LoRA"
    rate = defaults.preference_rate(width, full=config.full)
    config = setup.set_defaults(f"preferences, {what}, width {width}", learning_rate=rate)
    (trained, parameters) = count_parameters(model)
    flops = flops_per_token(model, train.samples.context)
    start = identity_of_start(config.model_name_or_path, model, config.adapter)

    # on the device, sharded
    model, optimizers = setup.prepare(model, optim.build(model, config.optim))
    packed, packing = choose_packing(model, tokenizer, config.data, config.batch, setup.device)
    fitting = defaults.batch_and_epochs(
        config.batch, len(train), len(train), most=16, least=8, epochs=1
    )
    config = setup.set_defaults(f"{len(train):,} pairs", **fitting)
    data = build_loaders(
        train, held_out, config.data, config.batch, setup.accelerator, packed=packed
    )
    steps = config.batch.total_steps(data.train.steps_per_epoch)
    config = setup.compile(model, steps, one_shape=False)  # by flag, or where it saves time
    head = fuse_head(setup.accelerator, model, len(tokenizer), compiled=config.speed.torch_compile)
    reference = "none"
    # the model is at its start here, also in a run that continues
    if config.loss_type not in REFERENCE_FREE:
        options = {
            "seq_length": config.data.seq_length,
            "per_device": config.batch.per_device_eval_batch_size,
        }
        told = [
            add_reference(setup.accelerator, model, pairs, start, **options)
            for pairs in (train, held_out)
        ]
        whose = config.adapter.adapter_name_or_path or "the model"
        reference = (
            f"{whose} before training; log-probabilities {told[0]}, no second model in memory"
        )
    loss_of = partial(preference_loss, config, model)
    config = setup.rehearse(data.train, loss_of)  # --find_batch_size, --dress_rehearsal
    about = {
        "data": data.about,
        "model": f"{config.model_name_or_path}, {parameters:,} parameters"
        + ", base in 4 bits" * config.adapter.load_in_4bit,
        "reference": reference,
    }
    about |= {
        "attention": attention.describe(setup.accelerator.unwrap_model(model)),
        "packing": packing,
        "log-probabilities": head,
        "trained": f"{trained:,} parameters ({trained / parameters:.2%})",
    }
    # from the newest checkpoint, if there is one
    run = setup.start(
        data.train,
        fingerprint=f"{data.fingerprint} {start.weights}",
        total_steps=steps,
        makes="merged" if config.adapter.merge_adapter else "final",
        samples="pairs",
        flops=flops,
        **about,
    )

    if run.should_evaluate():
        evaluate(run, model, data, tokenizer)
    for step in run.steps():
        for batch in step.micro_batches():
            # scaled from a sum to the mean over the global batch's pairs
            step.backward(loss_of(batch, log=step.log))
        step.clip_gradients(config.optim.max_grad_norm)
        step.update(optimizers)  # skipped on all ranks if loss or gradient is not finite
        if run.should_evaluate():
            evaluate(run, model, data, tokenizer)
    run.load_best_weights()
    title = "tuned on preferences"
    end = data.held_out.end
    save_tuned(run, model, tokenizer, title=title, about=data.about, end=end)
    both = run.state.before, run.state.results
    before, after = (
        [values.get(f"eval_{name}", math.nan) for name in ("loss", "accuracy")] for values in both
    )
    run.close(
        f"validation loss {before[0]:.4f} before, {after[0]:.4f} after training; accuracy "
        f"{before[1]:.1%}, {after[1]:.1%}",
        f"{'model' if config.full else 'adapter'} in {run.dir}/final; curves.png, metrics.jsonl "
        "and config.yaml beside it",
    )


if __name__ == "__main__":
    exits.run(main, CONFIG)
