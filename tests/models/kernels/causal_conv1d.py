"""Stands for causal-conv1d 1.7.0 on a CPU, with its arguments."""

import torch
from torch.nn import functional as F


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
    activation=None,
):  # fmt: skip
    """x: [batch, dim, seq]; seq_idx: [batch, seq] int32, the number of each position's document, in channels-last order."""
    assert initial_states is None and not return_final_states and final_states_out is None
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.shape == (len(x), x.shape[2]) and x.stride(1) == 1)
    width = weight.shape[1]
    result = torch.zeros_like(x)
    for back in range(width):
        earlier = F.pad(x, (back, 0))[..., : x.shape[2]]
        if seq_idx is not None:
            earlier = earlier * (F.pad(seq_idx, (back, 0), value=-1)[:, None, : x.shape[2]] == seq_idx[:, None])
        result = result + earlier * weight[:, width - 1 - back, None]
    result = result if bias is None else result + bias[:, None]
    return F.silu(result) if activation in ("silu", "swish") else result
