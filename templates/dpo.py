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
from shared.text.options import PreferenceConfig, VisionConfig

DEMO = {"global_batch_size": 16, "max_steps": 40}  # about two minutes on two CPU cores
DEMO_SAMPLES = 800
ADAPTER = AdapterConfig(lora_r=16, lora_alpha=32)
REFERENCE_FREE = ("simpo", "orpo")
NOT_OF_SCORES = ("load_in_4bit", "adapter_name_or_path", "merge_adapter")


@dataclass(frozen=True)
class Config:
    """Tune a causal language model on preferences."""

    model_name_or_path: str = str(demo.MODEL)  # Model on the Hub or in a folder
    full: bool = False  # Train all weights, in fp32, in place of adapters
    # sigmoid: DPO; robust: DPO with a share of wrong labels (label_smoothing); simpo, orpo: no
    # reference; reward: a head that scores answers, for rewards (Bradley-Terry)
    loss_type: Literal["sigmoid", "robust", "ipo", "simpo", "orpo", "reward"] = "sigmoid"
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
    vision: VisionConfig = VisionConfig()
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
        if self.data.margin_column and self.loss_type != "reward":
            raise ConfigError(f"--margin_column is for --loss_type reward, not {self.loss_type}")
        of_answers = self.eval_answers or any(getattr(self.adapter, name) for name in NOT_OF_SCORES)
        if of_answers and self.loss_type == "reward":
            names = ", ".join(f"--{name}" for name in NOT_OF_SCORES)
            raise ConfigError(f"--loss_type reward: drop {names} and --eval_answers")
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
from shared.answers.scores import like_reference
from shared.data.order import Batch
from shared.models.counts import flops_per_token
from shared.models.fused_head import TokenLoss
from shared.models.loss import log_probabilities
from shared.models.tokenizers import load_tokenizer
from shared.parallel.strategy import strategy_of_rows
from shared.run import exits
from shared.run.reference import Start, add_reference, identity_of_start
from shared.run.run import Run
from shared.run.setup import Setup
from shared.run.tuned import load_tuned, save_tuned
from shared.text.loaders import ChatData
from shared.text.preferences import Pairs, arrange, read_pairs
from shared.training import optim

# How good an answer is, for --eval_answers: (answer, record) -> numbers by name, logged as
# eval_NAME. Put your own function here: docs/logging.md, Scores of answers.
score = like_reference


def build_model(setup: Setup, tokenizer: Any, train: Pairs) -> nn.Module:
    """The frozen base with trainable adapters; with --full all weights. Without dropout. With
    --loss_type reward, its head scores.
    """
    if setup.config.loss_type == "reward":
        from shared.extras.reward_model import training

        model = training.load(setup, tokenizer, train)
    else:
        model = load_tuned(setup, tokenizer, setup.config.data.seq_length)
    setup.flops = flops_per_token(model, train.samples.context)
    return model


def losses_and_rewards(
    config: Config, policy: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each pair, [pairs], and what the loss takes for the rewards of its two answers,
    [pairs, 2].

    Args:
        policy, reference: log-probabilities of the chosen and the rejected answers, [pairs, 2];
            reward: their scores, and the margin that they should differ by.
        lengths: their numbers of tokens, [pairs, 2].
    """
    beta = config.beta
    smoothing = config.label_smoothing
    if config.loss_type == "reward":  # arXiv 2203.02155, equation 1; margin: 2307.09288, equation 2
        return -F.logsigmoid(policy[:, 0] - policy[:, 1] - reference[:, 0]), policy
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


def log_probabilities_of_answers(model: Any, batch: Batch) -> torch.Tensor:
    """[answers], each the sum over an answer's tokens."""
    return log_probabilities(model, batch, batch["answers"], batch["lengths"].numel())


class PreferenceLoss(TokenLoss):
    """The loss summed over a micro-batch's pairs.

    Args:
        config: the template's.
        model: prepared.
        start: of the model, see `identity_of_start`.
        pairs: to train on, and to validate on.
    """

    def __init__(self, config: Config, model: Any, start: Start, *pairs: Pairs) -> None:
        super().__init__(model)
        self.config = config
        self.start = start
        self.pairs = pairs
        self.of_answers = log_probabilities_of_answers

    def begin(self, setup: Setup) -> None:
        """Fuse the head, and compute what the reference says: the model has its first weights."""
        if self.config.loss_type == "reward":
            from shared.extras.reward_model import training

            self.of_answers = training.begin(self.config.data, *self.pairs)
            return
        super().begin(setup)
        if self.config.loss_type in REFERENCE_FREE:
            return
        told = [add_reference(setup, self.model, pairs, self.start) for pairs in self.pairs]
        whose = self.config.adapter.adapter_name_or_path or "the model"
        setup.details["reference"] = (
            f"{whose} before training; log-probabilities {told[0]}, no second model in memory"
        )

    def __call__(self, batch: Batch, *, log: Any = None) -> torch.Tensor:
        """Both answers of all pairs go forward together."""
        lengths = batch["lengths"]
        policy = self.of_answers(self.model, batch).view(-1, 2)
        losses, rewards = losses_and_rewards(
            self.config, policy, batch["reference"], lengths.clamp(min=1)
        )
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
            if policy is not rewards:
                values |= {"logps/chosen": policy[:, 0], "logps/rejected": policy[:, 1]}
            log(**{name: (value.detach() * counts).sum() for name, value in values.items()})
        return (losses * counts).sum()


def evaluate(run: Run, loss: PreferenceLoss, data: ChatData, tokenizer: Any) -> None:
    """Log loss, accuracy (the chosen answer has the higher reward) and margin of the validation
    pairs, each counted once, and the scores of answers to some prompts.
    """
    sums: dict[str, Any] = {}

    def add(**values: torch.Tensor) -> None:
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value

    with run.evaluating(loss.model):
        mean = run.mean_loss(data.validation, partial(loss, log=add))
        pairs = len(data.validation.samples)
        accuracy, margin = (
            run.sum(sums[f"rewards/{name}"]).item() / pairs for name in ("accuracies", "margins")
        )
        values = {"eval_loss": mean, "eval_accuracy": accuracy, "eval_margin": margin}
        scores = log_answers(run, loss.model, data.held_out, tokenizer, score)
        run.log_evaluation(values | scores)


def save(run: Run, model: nn.Module, tokenizer: Any, end: int | None) -> None:
    """Write final/. Every rank calls this."""
    if run.config.loss_type == "reward":
        from shared.extras.reward_model import training

        training.save(run, model, tokenizer)
    else:
        save_tuned(run, model, tokenizer, title="tuned on preferences", end=end)


def main(config: Config) -> None:
    setup = Setup(config, "dpo", unit="pairs", demo=DEMO, strategy=strategy_of_rows)
    tokenizer = load_tokenizer(config.model_name_or_path)
    train, held_out = read_pairs(config, tokenizer, demo_samples=DEMO_SAMPLES)
    setup.describe_data(train, held_out, tokenizer)  # data.json; with --preprocess_only, the end
    model = build_model(setup, tokenizer, train)
    start = identity_of_start(config.model_name_or_path, model, config.adapter)
    # on the device, sharded as the launch config says
    model, optimizers = setup.prepare(model, optim.build(model, setup.config.optim))
    # both answers of a pair in a row if the model keeps them apart; a batch and epochs that fit
    data = arrange(setup, model, train, held_out)
    loss = PreferenceLoss(config, model, start, train, held_out)
    makes = "merged" if config.adapter.merge_adapter else "final"
    # compiled and fused where that pays; from the newest checkpoint, if there is one
    fingerprint = f"{data.fingerprint} {start.weights}"
    run = setup.start(data.train, loss, fingerprint=fingerprint, makes=makes)

    if run.should_evaluate():
        evaluate(run, loss, data, tokenizer)
    for step in run.steps():
        for batch in step.micro_batches():
            step.backward(loss(batch, log=step.log))  # scaled to the mean over the global batch
        step.clip_gradients(config.optim.max_grad_norm)
        step.update(optimizers)  # skipped on all ranks if loss or gradient is not finite
        if run.should_evaluate():
            evaluate(run, loss, data, tokenizer)
    run.load_best_weights()
    save(run, model, tokenizer, data.held_out.end)
    files = f"wrote {run.dir}/final; curves.png, metrics.jsonl and config.yaml beside it"
    run.close(run.change_of("loss", "accuracy"), files)


if __name__ == "__main__":
    exits.run(main, CONFIG)
