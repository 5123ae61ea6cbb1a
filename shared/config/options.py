"""The groups of flags that templates compose their `Config` from. The comment of each field is its
--help.

A field's type has its bounds, and `Free` if a run may resume with another value: see types.py.

This module and its imports stay clear of torch, so that --help and a mistyped flag answer at once.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from shared.config.types import (
    WHOLE_OR_SHARE,
    BelowOne,
    Count,
    CountOrZero,
    Free,
    Positive,
    PositiveOrZero,
    PositiveShare,
    Rule,
    Share,
    Steps,
    within,
)
from shared.process import ranks
from shared.process.errors import ConfigError
from shared.process.printing import note


@dataclass(frozen=True)
class BatchConfig:
    """Batch and budget."""

    # Samples in one optimizer step over all devices (rows, if samples are packed); if not given,
    # chosen by the size of the data, see docs/quality.md
    global_batch_size: Count | None = None
    # Samples in one forward and backward of one device, at most; accumulation follows from it
    per_device_train_batch_size: Free[Count] = 2
    # Before training, halve per_device_train_batch_size until a step fits into memory
    find_batch_size: Free[bool] = False
    # Samples that a device evaluates at once; grpo.py: answers that it samples at once
    per_device_eval_batch_size: Free[Count] = 8
    # Optimizer steps to train, in place of num_train_epochs; 0: only evaluate
    max_steps: CountOrZero | None = None
    # Passes over the training data; if not given, chosen by the task and the size of the data
    num_train_epochs: Positive | None = None
    # Processes of each rank that read samples; 0: the training process reads. If not given: 0, or 2
    # for conversations with images
    dataloader_num_workers: Free[CountOrZero | None] = None
    # Seed of initial weights, sample order, augmentation and dropout
    seed: Annotated[int, within(at_least=0, below=2**32)] = 0

    def __post_init__(self) -> None:
        if self.max_steps is not None and self.num_train_epochs is not None:
            raise ConfigError(
                "--max_steps and --num_train_epochs both give the budget: drop one of them"
            )

    @property
    def size(self) -> int:
        """The global batch, which is given or chosen by now."""
        if self.global_batch_size is None:
            raise RuntimeError(
                "no global batch: call setup.set_defaults(..., global_batch_size=...) "
                "before data are loaded"
            )
        return self.global_batch_size

    def micro_batch(self) -> tuple[int, int]:
        """(samples at once, micro-batches accumulated) of one rank in one optimizer step of this
        launch.

        As long as the global batch is not chosen: as many at once as may be, accumulated once.

        Raises:
            ConfigError: the global batch does not divide by the processes that read data.
        """
        if self.global_batch_size is None:
            return self.per_device_train_batch_size, 1
        processes = ranks.data_parallel_size()
        share, rest = divmod(self.global_batch_size, processes)
        if rest:
            raise ConfigError(
                f"--global_batch_size {self.global_batch_size} is not a multiple of the "
                f"{processes} processes that read "
                f"data: {' or '.join(str(n * processes) for n in (share, share + 1) if n)} would be"
            )
        most = min(share, self.per_device_train_batch_size)
        # an even one stays even: mixup mixes pairs
        step = 1 if share % 2 or self.per_device_train_batch_size % 2 else 2
        rows = max(n for n in range(step, most + 1, step) if share % n == 0)
        return rows, share // rows

    def require_full_batch(self, count: int, what: str, advice: str = "") -> None:
        """Refuse fewer samples than one global batch.

        Args:
            count: of the samples.
            what: names them.
            advice: what to choose instead; empty: a smaller global batch.
        """
        if count < self.size:
            advice = advice or f"choose {count} or less"
            raise ConfigError(
                f"{count:,} {what} are fewer than one --global_batch_size of {self.size}: {advice}"
            )

    def total_steps(self, steps_per_epoch: int | None) -> int:
        """Optimizer steps of the whole run; one epoch when no budget is given or chosen.

        Raises:
            ConfigError: the budget is in epochs and their length (None) is not known.
        """
        if self.max_steps is not None:
            return self.max_steps
        if steps_per_epoch is None:
            raise ConfigError("a stream has no known length: give the budget as --max_steps")
        steps = math.ceil(steps_per_epoch * (self.num_train_epochs or 1.0))
        if steps < 30:
            note(
                f"only {steps} optimizer steps: if the validation loss still falls at the end, "
                "give more samples, more --num_train_epochs, or a smaller "
                f"--global_batch_size than {self.global_batch_size}"
            )
        return steps


STEPS = Rule(
    "takes steps and ranges of them, such as 7 1200-1210",
    lambda text: re.fullmatch(r"\d+(-\d+)?", text) is not None,
)


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    # Optimizer. adamw: fused if available; muon: momentum 0.95, for weight matrices, AdamW for the
    # rest; adamw_8bit: 8-bit moments; sgd: Nesterov momentum 0.9, usually with weight_decay 1e-4 or
    # less. In pretraining, if not given: muon for random weights, else adamw
    optim: Literal["adamw", "muon", "adamw_8bit", "sgd"] | None = "adamw"
    # Peak learning rate; if not given, chosen by task and model size, see docs/quality.md
    learning_rate: Positive | None = None
    # Decay of weight matrices, decoupled (sgd: L2); norms, biases and embeddings never decay
    weight_decay: PositiveOrZero = 0.1
    # Global L2 norm that gradients are clipped to; 0: no clipping
    max_grad_norm: PositiveOrZero = 1.0
    # Schedule after warm-up; wsd: constant, then linear decay over the last fifth
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    # Optimizer steps in which the rate rises linearly to its peak; below 1: a share of the run
    warmup_steps: Annotated[int | float, within(at_least=0), WHOLE_OR_SHARE] = 0.03
    # Steps that are not learned, such as 1200-1210; all others keep their samples and draws
    skip_steps: Free[Annotated[tuple[str, ...], STEPS]] = ()

    # Not fields, but what adapters train with. FullOptimConfig makes flags of them.
    adam_beta1 = 0.9
    adam_beta2 = 0.999
    min_lr_ratio = 0.0
    max_skipped_steps = 5
    layer_decay = 1.0

    @property
    def peak(self) -> float:
        """The learning rate, which is given or chosen by now."""
        if self.learning_rate is None:
            raise RuntimeError(
                "no learning rate: call setup.set_defaults(..., learning_rate=...) "
                "before the optimizer is built"
            )
        return self.learning_rate

    def skips(self, step: int) -> bool:
        """Whether a step, from 1, is one that is not learned."""
        ranges = ([*map(int, text.split("-"))] for text in self.skip_steps)
        return any(bounds[0] <= step <= bounds[-1] for bounds in ranges)

    def describe(self) -> str:
        """A line of the summary."""
        steps = self.warmup_steps
        warmup = f"{steps:,} steps" if steps >= 1 else f"{steps:.0%} of the run"
        decay = f", layer_decay {self.layer_decay:g}" * (self.layer_decay < 1)
        line = f"{self.optim}, {self.lr_scheduler_type} from {self.peak:g}, warm-up {warmup}"
        return line + decay


@dataclass(frozen=True)
class FullOptimConfig(OptimConfig):
    """Optimizer and learning-rate schedule, where all weights are trained."""

    adam_beta1: BelowOne = 0.9  # Decay of the first moment
    adam_beta2: BelowOne = 0.95  # Decay of the second moment
    min_lr_ratio: Share = 0.0  # Final learning rate as a share of the peak
    # Updates to skip because loss or gradient is not finite; one more ends the run
    max_skipped_steps: Free[CountOrZero] = 5
    # Factor on the learning rate from each block to the one before it; 1: the same rate
    layer_decay: PositiveShare = 1.0


RECOMPUTED = Rule(
    "is none, full, offload or a number of blocks",
    lambda text: text in ("none", "full", "offload") or (text.isdecimal() and int(text) >= 1),
)


@dataclass(frozen=True)
class SpeedConfig:
    """Memory and speed."""

    # Recompute activations in the backward pass: none, full, or N for every N-th block; offload:
    # full, with the inputs of blocks in host memory, for rows of 100,000 tokens
    gradient_checkpointing: Free[Annotated[str, RECOMPUTED]] = "none"
    # Compile blocks and loss, which needs a C compiler; if not given, done on GPUs in long runs
    # whose batches have one length
    torch_compile: Free[bool | None] = None
    # Repeat and resume bit for bit on GPUs, too; some kernels are slower
    deterministic: Free[bool] = False
    # Seconds that a process waits for the others before it ends the run
    ddp_timeout: Free[Annotated[float, within(at_least=1, below=10**7)]] = 1800.0
    # Attention kernel; auto: sdpa, or eager if the model has no sdpa; flash_attention_* need their
    # own packages
    attn_implementation: Free[
        Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]
    ] = "auto"

    # Not fields, but what adapters have. FullSpeedConfig makes flags of them.
    async_save = False


@dataclass(frozen=True)
class FullSpeedConfig(SpeedConfig):
    """Memory and speed, where all weights are trained."""

    # Write checkpoints in the background; training waits only for a copy to host memory
    async_save: Free[bool] = False


def _steps_between(every: float, total_steps: int) -> int:
    """Optimizer steps from one evaluation or checkpoint to the next, where a flag says `every`."""
    return int(every) if every >= 1 else max(round(1 / every), round(every * total_steps))


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation and best weights."""

    # Optimizer steps between evaluations; None: an epoch. Below 1, a share of the run: 0.05
    # evaluates every 20 steps, or 20 times in a run of more than 400 steps, and at least twice. One
    # more comes before training and one at its end.
    eval_steps: Free[Steps[int | float | None]] = 0.02
    # final/ holds the weights with the best value of this metric: any eval_* value of the log;
    # none: the last weights. Lower is better if a word of its name is loss, perplexity, ppl,
    # entropy, error, errors, distance, bits, nll, mae, mse, rmse, wer, cer, brier or ece; else
    # higher. If not given, images take accuracy, or map (mean average precision) with several
    # labels
    metric_for_best_model: str | None = "loss"
    # Stop after so many evaluations without improvement; 0: never
    early_stopping_patience: CountOrZero = 0
    # Evaluate and save a moving average of the weights with this decay a step; 0: off
    ema_decay: BelowOne = 0.0

    def __post_init__(self) -> None:
        if (self.metric_for_best_model or "").startswith("eval_"):  # as the Trainer has it
            name = str(self.metric_for_best_model).removeprefix("eval_")
            object.__setattr__(self, "metric_for_best_model", name)
        if self.early_stopping_patience and self.metric_for_best_model == "none":
            raise ConfigError("--early_stopping_patience needs a --metric_for_best_model, not none")

    def every(self, total_steps: int, steps_per_epoch: int | None) -> int:
        """Optimizer steps between evaluations."""
        every = self.eval_steps or steps_per_epoch or total_steps or 1
        steps = _steps_between(every, total_steps)
        return min(steps, math.ceil(total_steps / 2) or 1) if every < 1 else steps


@dataclass(frozen=True)
class CheckpointConfig:
    """Output and checkpoints."""

    # Folder of the run; a run in it continues. If not given, a new outputs/<template>/<time>
    output_dir: Free[Path | None] = None
    # Optimizer steps between checkpoints. Below 1, a share of the run: 0.05 saves every 20 steps,
    # or 20 times in a run of more than 400 steps. One more comes at the end.
    save_steps: Free[Steps[int | float]] = 0.01
    # Checkpoints to keep, besides the best; the oldest goes once a new one is safe on disk
    save_total_limit: Free[Count] = 2
    # Checkpoint of another folder to start from, while output_dir has none of its own
    resume_from_checkpoint: Free[Path | None] = None
    # Copy checkpoints, logs and final/ to this place in the background, and continue from there: a
    # folder, or a URL by s3, gs or abfss
    mirror_to: Free[str | None] = None
    # Seconds to wait at the end until everything is copied
    mirror_timeout: Free[PositiveOrZero] = 600.0
    # Names of settings that may differ from the checkpoint although they affect learning; also
    # data and base
    allow_changed: Free[tuple[str, ...]] = ()
    # Before the first step, try the longest batch, a save and a load
    dress_rehearsal: Free[bool] = False

    def every(self, total_steps: int) -> int:
        """Optimizer steps between checkpoints."""
        return _steps_between(self.save_steps, total_steps)


@dataclass(frozen=True)
class LogConfig:
    """Logging."""

    # Tracker that Accelerate knows (wandb, tensorboard, mlflow, trackio, ...), or none;
    # metrics.jsonl is always written
    report_to: Free[str] = "wandb"
    # Project in the tracker; if not given, the template's name
    project_name: Free[str | None] = None
    run_name: Free[str | None] = None  # Name of the run in W&B; if not given, the run folder's name
    # Optimizer steps between log lines, whose values are means over them; if not given, 10, or
    # fewer in a run of under 200 steps
    logging_steps: Free[Count | None] = None
    # Record the samples of each step, for `python -m shared audit OUTPUT_DIR`
    audit_data: Free[bool] = False
    # Trace three steps after the first six, write profile.json, and print what took long
    profile: Free[bool] = False

    def every(self, total_steps: int) -> int:
        """Optimizer steps between logged values."""
        return self.logging_steps or min(10, max(1, total_steps // 20))
