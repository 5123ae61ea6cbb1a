"""A rank's part of rows whose tokens several ranks share: see `parallel.sequence`."""

import torch
from torch.nn import functional as F

from shared.data.loader import cu_seqlens_of
from shared.data.order import IGNORED, Batch
from shared.process import ranks


def cut(batch: Batch) -> Batch:
    """This rank's stretch of each row.

    Args:
        batch: tensors of the shape of `labels`, [rows, length], are divided; others stay.

    Returns:
        [rows, length / ranks], with `position_ids` in any case, and `targets` and `cu_seqlens` if
        the batch has them; also `row_labels` and `row_positions`: those of whole rows, [rows,
        length], padded to a multiple of the ranks.
    """
    shape = batch["labels"].shape
    missing = -shape[1] % ranks.sequence_ranks()
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(shape[1], device=batch["labels"].device).expand(shape)
    follow = positions[:, -1:].expand(-1, missing)  # not beyond a learned table of positions
    whole = {
        "row_labels": F.pad(batch["labels"], (0, missing), value=IGNORED),
        "row_positions": torch.cat([positions, follow], 1),
    }
    stretch = {
        name: own_part(F.pad(tensor, (0, missing)))
        for name, tensor in batch.items()
        if tensor.shape == shape
    }
    stretch["labels"] = own_part(whole["row_labels"])
    stretch["position_ids"] = own_part(whole["row_positions"])
    if "targets" in batch:
        stretch["targets"] = (stretch["labels"].flatten() != IGNORED).nonzero().flatten()
    if "position_ids" in batch:
        stretch["cu_seqlens"] = torch.from_numpy(cu_seqlens_of(whole["row_positions"].numpy()))
    return batch | stretch | whole


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, length, ...] -> this rank's part, [rows, length / ranks, ...]."""
    count = ranks.sequence_ranks()
    return tensor.chunk(count, 1)[ranks.rank() % count].contiguous()
