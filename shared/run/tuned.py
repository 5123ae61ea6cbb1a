"""Language models that are tuned by adapters or, with --full, whole: loaded and saved."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shared import demo
from shared.models import adapters
from shared.models.blocks import set_gradient_checkpointing
from shared.models.checks import learn_padding_token, require_fit
from shared.models.loading import dtype_of, load_causal_lm, use_launch_precision
from shared.run.final import save_whole
from shared.run.final_adapter import save_adapter
from shared.run.run import Run
from shared.run.setup import Setup
from shared.training import defaults


def load_tuned(
    setup: Setup,
    tokenizer: Any,
    seq_length: int,
    flag: str = "--seq_length",
    rate_of: Callable[[int], float] | None = None,
) -> nn.Module:
    """The frozen base, quantised if asked, with trainable adapters in fp32; with --full all
    weights, trainable, in fp32. Chooses the learning rate, where none is given.

    It stays in the mode of an evaluation, without dropout and other noise, as where answers are
    sampled and the reference is computed: otherwise, probabilities would differ before any weight
    does.

    Args:
        setup: its config has the groups adapter and speed, `full` and `model_name_or_path`.
        seq_length: tokens of the longest row.
        flag: what makes it so long.
        rate_of: width of the model -> learning rate. None: that of preferences and rewards.

    Raises:
        ConfigError: the model does not take such rows, or such adapters.
    """
    config = setup.config
    name = config.model_name_or_path
    speed = config.speed
    if config.full:
        kernel = speed.attn_implementation
        base = load_causal_lm(name, attn_implementation=kernel, dtype=torch.float32)
    else:
        base = adapters.load_base(name, config.adapter, speed, setup.accelerator)
    width = defaults.width(base)
    rate = defaults.preference_rate(width, full=config.full)
    if name == str(demo.MODEL):  # tiny, and needs long steps
        rate = 1e-3
    if rate_of:
        rate = rate_of(width)
    what = "all weights" if config.full else "LoRA"
    setup.set_defaults(f"{what}, width {width}", learning_rate=rate)
    require_fit(base, tokenizer, seq_length, flag)
    set_gradient_checkpointing(base, speed.gradient_checkpointing)
    if not config.full:
        return adapters.add_adapters(base, config.adapter).eval()
    learn_padding_token(base)
    use_launch_precision(base)  # of experts, which know no autocast
    return base.eval()


def save_tuned(run: Run, model: nn.Module, tokenizer: Any, *, title: str, end: int | None) -> None:
    """Write final/: the adapter or the whole model. Every rank calls this.

    Args:
        title: of the card of a whole model, after its name.
        end: the token that ends a turn, if there is one.
    """
    if run.config.full:
        dtype = dtype_of(run.config.model_name_or_path)
        save_whole(run, model, tokenizer, title=title, end=end, dtype=dtype)
    else:
        save_adapter(run, model, tokenizer, end=end)
