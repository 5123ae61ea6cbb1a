r"""Let a small causal language model learn what a larger one predicts: distillation.

    accelerate launch templates/distill.py                               # offline demo, any machine
    accelerate launch templates/distill.py --model_name_or_path ORG/SMALL \
        --teacher_name_or_path ORG/LARGE --train_file chats.jsonl

The student learns the teacher's probabilities of all tokens, not only which one the text has: on
given conversations or, with --on_policy, on its own answers. Hinton et al., arXiv 1503.02531.
Generalised knowledge distillation: Agarwal et al., arXiv 2306.13649. Reverse KL: Gu et al., arXiv
2306.08543.
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

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
from shared.config.types import Count, CountOrZero, Free, Positive, Share, within
from shared.models.options import AdapterConfig
from shared.process.errors import ConfigError
from shared.text.options import ChatConfig

DEMO = {"global_batch_size": 16, "max_steps": 40}  # about three minutes on two CPU cores
DEMO_SAMPLES = 2000
ADAPTER = AdapterConfig(lora_r=16, lora_alpha=32)


@dataclass(frozen=True)
class Config:
    """Let a causal language model learn what another one predicts."""

    model_name_or_path: str = str(demo.MODEL)  # The student: model on the Hub or in a folder
    # The teacher: model on the Hub or in a folder, with the student's tokenizer
    teacher_name_or_path: str | None = None
    teacher_load_in_4bit: bool = False  # Quantise the teacher to 4 bits (NF4)
    # In place of a teacher: an adapter of the student's own base, in a folder; with no_full
    teacher_adapter: str | None = None
    # Keep what the teacher predicts in this folder; where it is there, no teacher is needed
    teacher_logits: str | None = None
    top_k: Count = 64  # With teacher_logits: tokens whose probabilities are kept for each target
    full: bool = True  # Train all weights, in fp32; no_full: adapters
    # forward_kl: cover all that the teacher may say; reverse_kl: only what it may say; jsd: between
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    beta: Annotated[float, within(above=0, below=1)] = 0.5  # jsd: weight of the teacher in the mean
    temperature: Positive = 1.0  # Divides the logits of both before they are compared
    # Share of the cross-entropy in the loss, of given texts only; the rest is the divergence
    cross_entropy: Share = 0.0
    # Share of the steps that learn from answers of the student, as it is then
    on_policy: Share = 0.0
    # Validation prompts whose answers are printed before training and at its end
    show_answers: Free[CountOrZero] = 1
    # Validation prompts to answer and score at each evaluation; 0: none
    eval_answers: Free[CountOrZero] = 0
    max_new_tokens: Count = 128  # Tokens of an answer, at most
    adapter: AdapterConfig = ADAPTER
    data: ChatConfig = ChatConfig(seq_length=512, eval_samples=256)
    batch: BatchConfig = BatchConfig(per_device_train_batch_size=2)
    optim: OptimConfig = OptimConfig(weight_decay=0.0)
    speed: SpeedConfig = SpeedConfig()
    evaluation: EvaluationConfig = EvaluationConfig(eval_steps=0.05, metric_for_best_model="loss")
    checkpoint: CheckpointConfig = CheckpointConfig(save_steps=0.05)
    log: LogConfig = LogConfig()

    # of `Rollouts`: one answer to each prompt, learned once
    group_size: ClassVar[int] = 1
    updates_per_rollout: ClassVar[int] = 1
    dynamic_sampling: ClassVar[int] = 0

    def __post_init__(self) -> None:
        self.batch.micro_batch()  # refuses what does not divide
        self.adapter.refuse_changes_to_a_given_adapter(ADAPTER)
        self.adapter.refuse_dropout()
        if self.full and (self.adapter != ADAPTER or self.teacher_adapter):
            raise ConfigError("an adapter is trained with --no_full: add it, or drop its flags")
        if self.teacher_adapter and self.teacher_name_or_path:
            raise ConfigError("--teacher_adapter and --teacher_name_or_path: there is one teacher")
        if bool(self.on_policy) + bool(self.teacher_logits) + self.data.streaming > 1:
            raise ConfigError("--on_policy, --teacher_logits and --streaming: keep one of them")
        if self.on_policy and (self.batch.find_batch_size or self.data.order == "length"):
            raise ConfigError("--on_policy: drop --find_batch_size and --order length")


# before torch is imported, so that --help and a mistyped flag answer at once
if __name__ == "__main__":
    CONFIG = configs.parse_or_exit(Config)

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from shared.answers.answers import log_answers
from shared.answers.scores import like_reference
from shared.data.order import Batch
from shared.extras.distillation.compared import Compared, OpenHead, compare
from shared.extras.distillation.teacher import build_teacher
from shared.models.fused_head import TokenLoss, fuse_head
from shared.models.tokenizers import load_tokenizer
from shared.parallel import sharding
from shared.parallel.strategy import strategy_of_rows
from shared.rollouts.rollouts import Rollouts
from shared.run import exits
from shared.run.run import Run
from shared.run.setup import Setup
from shared.run.tuned import load_tuned, save_tuned
from shared.text.chat import Conversations
from shared.text.loaders import ChatData, arrange, read_conversations
from shared.training import defaults, optim
from shared.training.step import Step

# How good an answer is, for --eval_answers: (answer, record) -> numbers by name, logged as
# eval_NAME. Put your own function here: docs/logging.md, Scores of answers.
score = like_reference


def build_model(setup: Setup, tokenizer: Any, train: Conversations) -> nn.Module:
    """The student: all weights, or with --no_full adapters on a frozen base. Without dropout."""
    config = setup.config
    longest = config.data.seq_length + (config.max_new_tokens if config.on_policy else 0)
    rate_of = defaults.full_rate if config.full else defaults.lora_rate
    return load_tuned(setup, tokenizer, longest, rate_of=rate_of)


def divergence(config: Config, p: Compared, *, own: bool = False) -> torch.Tensor:
    """The loss of each token, [tokens].

    Args:
        p: log-probabilities of student and teacher, [tokens, classes].
        own: of the student's own answers, which are no example.
    """
    if config.divergence == "jsd":  # arXiv 2306.13649, equation 1
        beta = config.beta
        weighted = [p.teacher + math.log(beta), p.student + math.log(1 - beta)]
        mean = torch.stack(weighted).logsumexp(0)
        loss = beta * kl(p.teacher, mean) + (1 - beta) * kl(p.student, mean)
    elif config.divergence == "reverse_kl":
        loss = kl(p.student, p.teacher)
    else:
        loss = kl(p.teacher, p.student)
    share = 0.0 if own else config.cross_entropy
    return (1 - share) * loss + share * p.cross_entropy


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of log-probabilities, over the last dimension."""
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


class DistillationLoss(TokenLoss):
    """The divergence of a prepared model from its teacher, summed over a micro-batch's targets."""

    def __init__(self, config: Config, model: Any, teacher: Any, data: ChatData) -> None:
        super().__init__(model)
        self.config = config
        self.teacher = teacher
        self.data = data

    def begin(self, setup: Setup) -> None:
        """Open the student's head, and keep what the teacher predicts if asked."""
        compiled = self.config.speed.torch_compile
        opened = fuse_head(setup.accelerator, self.model, compiled=compiled, kind=OpenHead)
        setup.details["loss"] = opened
        self.teacher.begin(setup, self.model, self.data)

    def __call__(self, batch: Batch, *, own: bool = False, log: Any = None) -> torch.Tensor:
        loss = partial(divergence, self.config, own=own)
        total, values = compare(self.model, self.teacher, batch, loss, self.config.temperature)
        if log is not None:
            log(**values)
        return total


def evaluate(run: Run, loss: DistillationLoss, data: ChatData, tokenizer: Any) -> None:
    """Log the loss of the validation samples, how far the student is from the teacher, and scores
    of answers; before training the teacher's, too.
    """
    sums: dict[str, Any] = {}

    def add(**values: torch.Tensor) -> None:
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value

    with run.evaluating(loss.model):
        values = {"eval_loss": run.mean_loss(data.validation, partial(loss, log=add))}
        samples = data.validation.samples
        targets = samples.num_targets(np.arange(len(samples)))
        values |= {f"eval_{name}": run.sum(sums[name]).item() / targets for name in sums}
        if run.state.step == 0:
            values |= loss.teacher.answer(run, data.held_out, tokenizer, score)
        values |= log_answers(run, loss.model, data.held_out, tokenizer, score)
        run.log_evaluation(values)


def use_own_answers(run: Run, loss: DistillationLoss, rollouts: Rollouts, step: Step) -> bool:
    """In a share of the steps, let the student answer prompts, and take these answers in place of
    the given ones. Returns whether it did.
    """
    share = run.config.on_policy
    if int(step.number * share) == int((step.number - 1) * share):
        return False
    _, means = rollouts.sample(run, loss.model, lambda answer, record: {})
    step.log_means(**{name: value for name, value in means.items() if name != "reward"})
    step.use(*rollouts.micro_batches(step.number, "token"))
    return True


def main(config: Config) -> None:
    setup = Setup(config, "distill", demo=DEMO, strategy=strategy_of_rows)
    tokenizer = load_tokenizer(config.model_name_or_path)
    train, held_out = read_conversations(config, tokenizer, demo_samples=DEMO_SAMPLES)
    setup.describe_data(train, held_out, tokenizer)  # data.json; with --preprocess_only, the end
    model = build_model(setup, tokenizer, train)
    teacher = build_teacher(setup, tokenizer, model, train, held_out)
    # on the device, sharded as the launch config says
    model, optimizers = setup.prepare(model, optim.build(model, setup.config.optim))
    # several conversations in a row if both models keep them apart; a batch and epochs that fit
    data = arrange(setup, model, train, held_out)
    loss = DistillationLoss(config, model, teacher, data)
    makes = "merged" if config.adapter.merge_adapter else "final"
    # compiled and fused where that pays; from the newest checkpoint, if there is one
    fingerprint = f"{data.fingerprint} {teacher.identity}"
    run = setup.start(data.train, loss, fingerprint=fingerprint, makes=makes)
    rollouts = None
    if config.on_policy:
        rollouts = Rollouts(run.config, train, tokenizer, sharding.share(setup.accelerator))

    if run.should_evaluate():
        evaluate(run, loss, data, tokenizer)
    for step in run.steps():
        own = rollouts is not None and use_own_answers(run, loss, rollouts, step)
        for batch in step.micro_batches():
            step.backward(loss(batch, own=own, log=step.log))
        step.clip_gradients(config.optim.max_grad_norm)
        step.update(optimizers)  # skipped on all ranks if loss or gradient is not finite
        if run.should_evaluate():
            evaluate(run, loss, data, tokenizer)
    run.load_best_weights()
    save_tuned(run, model, tokenizer, title="distilled", end=data.held_out.end)
    files = f"wrote {run.dir}/final; curves.png, metrics.jsonl and config.yaml beside it"
    run.close(run.change_of("loss", "kl", "agreement"), files)


if __name__ == "__main__":
    exits.run(main, CONFIG)
