r"""Let a causal language model learn from rewards for its own answers: GRPO and relatives.

    accelerate launch templates/grpo.py                                  # offline demo, any machine
    accelerate launch templates/grpo.py --model_name_or_path ORG/NAME --train_file problems.jsonl
    accelerate launch --config_file accelerate_configs/fsdp2.yaml templates/grpo.py --full

Each step samples answers to some prompts and rewards them by `rewards` below. Answers that did
better than others to the same prompt become more likely. GRPO: Shao et al., arXiv 2402.03300.
Dr. GRPO: Liu et al., arXiv 2503.20783. DAPO: Yu et al., arXiv 2503.14476. Here, groups of equal
rewards are left out, or with --dynamic_sampling replaced, and by default there is no KL penalty. An
answer that --max_new_tokens cuts is rewarded for what is there.
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
    LogConfig,
    OptimConfig,
    SpeedConfig,
)
from shared.config.types import Count, CountOrZero, Free, Positive, PositiveOrZero
from shared.models.options import AdapterConfig
from shared.process.errors import ConfigError
from shared.rollouts.options import PromptConfig
from shared.text.options import VisionConfig

DEMO = {"global_batch_size": 16, "max_steps": 60, "max_new_tokens": 3}
ADAPTER = AdapterConfig(lora_r=16, lora_alpha=32)


@dataclass(frozen=True)
class Config:
    """Let a causal language model learn from rewards for its answers."""

    model_name_or_path: str = str(demo.MODEL)  # Model on the Hub or in a folder
    full: bool = False  # Train all weights, in fp32, in place of adapters
    group_size: Count = 16  # Answers to sample for each prompt
    max_new_tokens: Count | None = None  # Tokens of an answer, at most; if not given, 512
    # Mean of the loss. token: over all tokens (DAPO); answer: over answers, each a mean over its
    # tokens (GRPO); constant: over max_new_tokens tokens an answer (Dr. GRPO)
    normalise: Literal["token", "answer", "constant"] = "token"
    # Divide advantages by the standard deviation of the group's rewards (GRPO); Dr. GRPO does not
    scale_rewards: bool = True
    updates_per_rollout: Count = 1  # Optimizer steps on the same answers
    # Where all rewards of a group are equal, sample another prompt, at most so often (DAPO)
    dynamic_sampling: CountOrZero = 0
    # What samples: transformers, generate on the weights in training, exact; continuous, its
    # batching with a paged cache; vllm, a server at rollout_server
    rollout_engine: Literal["transformers", "continuous", "vllm"] = "transformers"
    rollout_server: Free[str] = "http://127.0.0.1:8000"  # Address of a vLLM server
    importance_cap: Positive = 2.0  # Cut weights of tokens at this, if another engine samples (TIS)
    epsilon_low: Positive = 0.2  # From two updates on, clip probability ratios at 1 - epsilon_low
    # From two updates on, clip them at 1 + epsilon_high (DAPO 0.28, GRPO 0.2)
    epsilon_high: Positive = 0.28
    # Validation prompts whose answers are printed before training and at its end
    show_answers: Free[CountOrZero] = 2
    # Validation prompts to answer and score at each evaluation, without sampling
    eval_answers: Free[Count] = 128
    # Model that scores each answer, in a folder or on the Hub, with this model's tokenizer: its
    # score is the reward, unless you edit `rewards`
    reward_model: str | None = None
    kl_coef: PositiveOrZero = 0.0  # Weight of the KL divergence from the model without adapters
    adapter: AdapterConfig = ADAPTER
    data: PromptConfig = PromptConfig()
    vision: VisionConfig = VisionConfig()
    batch: BatchConfig = BatchConfig(per_device_train_batch_size=8, per_device_eval_batch_size=64)
    optim: OptimConfig = OptimConfig(weight_decay=0.0, lr_scheduler_type="constant")
    speed: SpeedConfig = SpeedConfig()
    evaluation: EvaluationConfig = EvaluationConfig(eval_steps=0.1, metric_for_best_model="reward")
    checkpoint: CheckpointConfig = CheckpointConfig(save_steps=0.05)
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        self.adapter.refuse_changes_to_a_given_adapter(ADAPTER)
        self.adapter.refuse_dropout()
        if self.full and self.adapter != ADAPTER:
            raise ConfigError("--full trains all weights: drop the flags of adapters, or --full")
        if self.kl_coef and (self.full or self.adapter.modules_to_save):
            raise ConfigError("--kl_coef needs adapters alone: drop --full and --modules_to_save")
        if self.group_size < 2:
            raise ConfigError("--group_size: answers are compared, so at least 2")


# before torch is imported, so that --help and a mistyped flag answer at once
if __name__ == "__main__":
    CONFIG = configs.parse_or_exit(Config)

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from shared.answers.answers import log_answers
from shared.answers.numbers import with_total
from shared.answers.scores import numbers_in, solves
from shared.data.order import Batch
from shared.models.fused_head import TokenLoss
from shared.models.loss import target_log_probabilities
from shared.models.tokenizers import load_tokenizer
from shared.rollouts.prompts import describe, fingerprint, read_prompts
from shared.rollouts.rollouts import Rollouts, prepare_rollouts
from shared.run import exits
from shared.run.run import Run
from shared.run.setup import Setup
from shared.run.tuned import load_tuned, save_tuned
from shared.text.chat import Conversations
from shared.training import optim
from shared.training.step import Step


def rewards(answer: str, record: dict[str, Any]) -> dict[str, float]:
    """How good an answer is: numbers whose sum is the reward, each logged by its name.

    Edit it for your task. `record` has the text `prompt`, the other columns of the data and, with
    --reward_model, its score.
    """
    if "reward_model" in record:
        return {"reward_model": record["reward_model"]}
    right = record.get("answer", record.get("reference"))
    return {"correct": solves(answer, right), "format": 0.1 * bool(numbers_in(answer))}


def turn(messages: list[dict[str, Any]], record: dict[str, Any]) -> list[dict[str, Any]] | None:
    """With --max_turns: messages of tools or a user that follow the last answer, which are not
    learned; None where it ends. `rewards` gets the last answer; `prompt` is all before it."""
    return None


def build_model(setup: Setup, tokenizer: Any, train: Conversations) -> nn.Module:
    """The frozen base with trainable adapters; with --full all weights. Without dropout."""
    longest = int(train.lengths.max()) + 1 + setup.config.max_new_tokens
    return load_tuned(setup, tokenizer, longest, "--max_new_tokens and the longest prompt:")


def advantages_of(config: Config, totals: torch.Tensor) -> torch.Tensor:
    """How much better each answer's reward is than its group's: [prompts, group], as `totals`."""
    differences = totals - totals.mean(1, keepdim=True)
    if config.scale_rewards:
        differences = differences / (totals.std(1, keepdim=True) + 1e-4)
    return torch.where(totals.amax(1, True) > totals.amin(1, True), differences, 0.0)


class PolicyLoss(TokenLoss):
    """The loss summed over a micro-batch's tokens, weighted as --normalise says.

    Args:
        config: the template's.
        model: prepared.
    """

    def __init__(self, config: Config, model: Any) -> None:
        super().__init__(model)
        self.config = config

    def __call__(self, batch: Batch, *, log: Any = None) -> torch.Tensor:
        config = self.config
        model = self.model
        reference = None
        if config.kl_coef:  # first: it switches the adapters off and on again
            with torch.no_grad(), extract_model_from_parallel(model).disable_adapter():
                reference = target_log_probabilities(model, batch)
        policy = target_log_probabilities(model, batch)
        old = batch["old"] if config.updates_per_rollout > 1 else policy.detach()
        ratio = (policy - old).exp()  # 1 in the first update, but with a gradient
        gain = ratio * batch["advantages"]
        least = ratio.clamp(1 - config.epsilon_low, 1 + config.epsilon_high) * batch["advantages"]
        losses = -torch.minimum(gain, least)
        # the mean of minus log p over sampled tokens estimates the entropy
        values = {"entropy": -old, "clipped": (gain > least).float()}
        if reference is not None:
            difference = reference - policy
            values["kl"] = difference.exp() - difference - 1  # k3, Schulman 2020
            # times the ratio, for an unbiased gradient: DeepSeek-V3.2, arXiv 2512.02556
            losses = losses + config.kl_coef * ratio * values["kl"]
        if "sampled" in batch:  # by another engine: truncated importance sampling
            weight = (old - batch["sampled"]).exp()
            losses = losses * weight.clamp(max=config.importance_cap)
            values["truncated"] = (weight > config.importance_cap).float()
            values["sampler_difference"] = (old - batch["sampled"]).abs()
        if log is not None:
            log(**{name: value.detach().sum() for name, value in values.items()})
        return (losses * batch["weights"]).sum()


def evaluate(run: Run, model: nn.Module, held_out: Conversations, rollouts: Rollouts) -> None:
    """Log the rewards of answers to validation prompts, decoded greedily."""
    asked = (held_out, rollouts.tokenizer, with_total(rewards), rollouts)
    with run.evaluating(model):
        run.log_evaluation(log_answers(run, model, *asked))


def train_step(run: Run, loss: PolicyLoss, rollouts: Rollouts, step: Step) -> None:
    """Sample and reward answers, unless those of the step before still count. Then one update."""
    config = run.config
    means: dict[str, float] = {}
    if rollouts.needs_answers(step.number):
        totals, means = rollouts.sample(run, loss.model, rewards)
        advantages = advantages_of(config, totals)
        means["equal_groups"] = (~advantages.any(1)).float().mean().item()
        rollouts.tensors["advantages"].copy_(advantages.flatten())
    batches, tokens, prompts = rollouts.micro_batches(step.number, config.normalise)
    if config.updates_per_rollout > 1 and rollouts.needs_answers(step.number):
        rollouts.note_old(loss.model, batches)
    step.use(batches, tokens, prompts)
    step.log_means(**means)
    for batch in step.micro_batches():
        step.backward(loss(batch, log=step.log))
    step.clip_gradients(config.optim.max_grad_norm)
    step.update(run.optimizers)  # skipped on all ranks if loss or gradient is not finite


def main(config: Config) -> None:
    setup = Setup(config, "grpo", demo=DEMO)
    setup.set_defaults("answers", max_new_tokens=512)
    tokenizer = load_tokenizer(config.model_name_or_path)
    train, held_out = read_prompts(config, tokenizer)
    setup.about["data"] = describe(train, held_out, config.data)
    setup.describe_data(train, held_out, tokenizer)  # data.json; with --preprocess_only, the end
    model = build_model(setup, tokenizer, train)
    rollouts = prepare_rollouts(setup, train, tokenizer, turn)  # take the place of a loader
    # on the device, sharded as the launch config says
    model, _ = setup.prepare(model, optim.build(model, setup.config.optim))
    loss = PolicyLoss(config, model)
    makes = "merged" if config.adapter.merge_adapter else "final"
    # compiled and fused where that pays; from the newest checkpoint, if there is one
    data = fingerprint(train, held_out, rollouts.reward_model)
    run = setup.start(rollouts, loss, fingerprint=data, makes=makes)

    if run.should_evaluate():
        evaluate(run, model, held_out, rollouts)
    for step in run.steps():
        train_step(run, loss, rollouts, step)
        if run.should_evaluate():
            evaluate(run, model, held_out, rollouts)
    run.load_best_weights()
    save_tuned(run, model, tokenizer, title="tuned by rewards", end=train.end)
    files = f"wrote {run.dir}/final; curves.png, metrics.jsonl and rollouts.jsonl beside it"
    run.close(run.change_of("reward"), files)


if __name__ == "__main__":
    exits.run(main, CONFIG)
