"""What a run that tunes all weights of a language model leaves: final/."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from shared.models.card import load_line, usage
from shared.models.generation import end_generation_at
from shared.models.loading import save_causal_lm
from shared.models.weights import gather_weights
from shared.process.files import whole_folder
from shared.run.run import Run


def save_whole(
    run: Run,
    model: nn.Module,
    tokenizer: Any,
    *,
    title: str,
    end: int | None,
    dtype: torch.dtype,
) -> None:
    """Write final/: the whole model in `dtype`, the tokenizer with its chat template, a card. Every
    rank calls this.

    Args:
        title: of the card, after the model's name.
        end: the token that ends a turn, if there is one.
    """
    name = run.config.model_name_or_path
    whole = run.unwrap(model)
    weights = gather_weights(run.accelerator, model, dtype=dtype)
    if not run.is_main:
        return
    end_generation_at(whole, tokenizer, end)
    with whole_folder(run.dir / "final") as folder:
        save_causal_lm(folder, whole, weights, tokenizer, dtype=dtype, base=name)
        load = usage(load_line(whole), tokenizer)
        run.write_card(folder, f"{Path(name).name}, {title}", load=load)
