"""Settings that depend on model and data, for runs that give none: learning rates, batch and
budget.

A template hands them to `Setup.set_defaults`, which leaves alone what the user gave and says in the
summary what it chose. docs/quality.md has the measurements behind the numbers.
"""

import math
from typing import Any

from torch import nn

from shared.config.options import BatchConfig
from shared.parallel.strategy import Strategy
from shared.process import ranks

# Compiling takes as long as it saves in so many steps. Measured on one H200: 150 (pretraining 125M
# and 1.2B), 285 (LoRA, 8B), 2,100 (ResNet-50). Twice that, for slower hosts and larger models
STEPS_TO_COMPILE = 500
STEPS_TO_COMPILE_IMAGES = 3_000

STEPS = 100  # the batch is made smaller for so many optimizer steps
# and for so many there are more epochs: further ones mostly learn the samples by heart
FEWEST_STEPS = 30


def width(model: nn.Module) -> int:
    """The size of a language model's hidden states."""
    config: Any = model.config
    return int(config.get_text_config().hidden_size)


def lora_rate(width: int) -> float:
    """The peak rate of LoRA adapters on a language model; hardly depends on their rank.

    Ten times that of all weights, and lower for wider models: "LoRA Without Regret" (Thinking
    Machines, 2025), with the exponent of its cookbook for Llama.
    """
    return _rounded(min(2e-3, 5e-4 * (2000 / width) ** 0.781))


def full_rate(width: int) -> float:
    """The peak rate when all weights of a trained language model are trained on conversations."""
    return _rounded(lora_rate(width) / 10)


def preference_rate(width: int, *, full: bool) -> float:
    """The peak rate for DPO and its relatives: a thirtieth of that for conversations.

    With all weights of an 8B model that is 1e-6, as TRL has it; Zephyr (Tunstall et al., arXiv
    2310.16944) and Tulu 3 (Lambert et al., arXiv 2411.15124) took 5e-7.
    """
    return _rounded((full_rate(width) if full else lora_rate(width)) / 30)


def text_classification_rate(width: int, *, lora: bool) -> float:
    """The peak rate of a trained model that gets a head for texts.

    5e-5 for BERT's width of 768, the highest that its paper tried (arXiv 1810.04805), and in
    inverse proportion for others; ten times that for LoRA.
    """
    rate = min(2e-4, 5e-5 * 768 / width)
    return _rounded(rate * 10 if lora else rate)


# The peak rate of an image classifier by what is trained.
IMAGE_RATES = {"random weights": 1e-3, "trained weights": 3e-4, "head alone": 1e-3}


def pretraining_optimizer(strategy: Strategy, *, trained: bool) -> str:
    """Muon for random weights, which learn most of all settings from it; AdamW for weights that
    AdamW has trained, and for DeepSpeed, which takes no other.
    """
    return "adamw" if trained or "Muon" in strategy.lacks else "muon"


def pretraining_rate(parameters: int, *, trained: bool) -> float:
    """The peak rate of AdamW and Muon for pretraining.

    From random weights it falls with the root of the parameters, through the 6e-4 of GPT-3's 125M
    (Brown et al., arXiv 2005.14165), and is at most 5e-3. Weights that are trained get a third of
    it.
    """
    rate = min(5e-3, 6e-4 * math.sqrt(125e6 / parameters))
    return _rounded(rate / 3 if trained else rate)


def batch_and_epochs(
    batch: BatchConfig, samples: int, rows: int, *, most: int, least: int, epochs: float = 3
) -> dict[str, Any]:
    """`global_batch_size` and `num_train_epochs` of a fine-tuning run that gives none.

    A step has `most` rows. Where a run of `epochs` then has fewer than 100 steps, the batch is
    halved, as long as it holds `least` samples. Where fewer than 30 steps remain, there are more
    epochs, at most 10.

    Args:
        batch: the user's, which may give a batch size or epochs.
        samples: to train on.
        rows: that they fill: fewer than `samples` where rows are packed.
    """
    epochs = batch.num_train_epochs or epochs
    size = batch.global_batch_size or most
    if batch.global_batch_size is None:
        while size > rows or (size * STEPS > epochs * rows and size // 2 * samples >= least * rows):
            size //= 2
        readers = ranks.data_parallel_size()
        size = max(1, math.ceil(size / readers)) * readers
    enough = math.ceil(size * FEWEST_STEPS / rows)
    return {"global_batch_size": size, "num_train_epochs": float(max(epochs, min(enough, 10)))}


def for_conversations(batch: BatchConfig, samples: int, rows: int) -> dict[str, Any]:
    """`batch_and_epochs` for conversations: three epochs, which show a few of them often enough, or
    one of many.
    """
    return batch_and_epochs(
        batch, samples, rows, most=16, least=8, epochs=3 if samples < 10_000 else 1
    )


def for_prompts(batch: BatchConfig, prompts: int) -> dict[str, Any]:
    """`batch_and_epochs` for prompts whose answers are sampled: one pass."""
    return batch_and_epochs(batch, prompts, prompts, most=32, least=8, epochs=1)


def _rounded(rate: float) -> float:
    """To two digits, as people write rates."""
    return float(f"{rate:.1e}")
