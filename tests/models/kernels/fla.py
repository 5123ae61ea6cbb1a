"""Stands for flash-linear-attention 0.6.0 on a CPU, with the arguments that transformers may give it."""

import torch
from torch.nn import functional as F


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):  # fmt: skip
    """Token after token. q, k: [batch, seq, heads, size]; v: [batch, seq, more heads, size]; beta: [batch, seq, heads of v];
    g: the same, or [..., size] too; cu_seqlens: documents' bounds in a batch of one row."""
    assert scale is None and initial_state is None and not output_final_state
    assert cu_seqlens is None or len(q) == 1
    starts = {0} if cu_seqlens is None else set(cu_seqlens.tolist())
    if use_qk_l2norm_in_kernel:
        q, k = (F.normalize(states.float(), dim=-1, eps=1e-6) for states in (q, k))
    q, k = (states.repeat_interleave(v.shape[2] // states.shape[2], 2) for states in (q, k))
    g = g if g.ndim == 4 else g[..., None]
    found = []
    for t in range(q.shape[1]):
        if t in starts:
            state = torch.zeros(len(v), v.shape[2], k.shape[3], v.shape[3])
        state = state * g[:, t, :, :, None].exp()
        change = (v[:, t] - (state * k[:, t, :, :, None]).sum(2)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * change[:, :, None]
        found.append((state * q[:, t, :, :, None]).sum(2) / q.shape[3] ** 0.5)
    return torch.stack(found, 1).to(v.dtype), None


chunk_kda = chunk_gated_delta_rule  # its g has a value for each of a head's numbers
