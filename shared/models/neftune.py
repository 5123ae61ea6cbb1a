"""Noise on the embeddings in training: NEFTune (Jain et al., arXiv 2310.05914)."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from shared.data.order import IGNORED, Batch
from shared.parallel.sequence import over_rows


def document_lengths(batch: Batch) -> torch.Tensor:
    """[rows, positions]: how many tokens the document of each position has. What follows a row's
    last target is padding.
    """
    labels = batch["labels"]
    places = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
    positions = batch.get("position_ids", places)
    document = (positions == 0).cumsum(1)
    is_read = places <= places.masked_fill(labels == IGNORED, 0).amax(1, keepdim=True)
    lengths = torch.zeros(len(labels), labels.shape[1] + 1, dtype=torch.long, device=labels.device)
    lengths.scatter_add_(1, document, is_read.long())
    return lengths.gather(1, document).clamp(min=1)


@contextlib.contextmanager
def noisy_embeddings(model: Any, batch: Batch, alpha: float) -> Iterator[None]:
    """In this block, add uniform noise of at most alpha / sqrt(tokens x width) to the embeddings of
    each document.

    Rows may hold several documents. transformers' Trainer takes the length of the padded row
    instead.

    Args:
        model: not wrapped.
        batch: the one that goes forward, with `input_ids` and `labels`, [rows, positions].
        alpha: 0: no noise. The paper's are 5 to 15.
    """
    if not alpha:
        yield
        return
    scale = alpha / over_rows(batch, document_lengths).sqrt()[..., None]

    def add_noise(_: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(embedded).uniform_(-1, 1)
        return embedded + noise * (scale / math.sqrt(embedded.shape[-1])).to(embedded.dtype)

    hook = model.get_input_embeddings().register_forward_hook(add_noise)
    try:
        yield
    finally:
        hook.remove()
