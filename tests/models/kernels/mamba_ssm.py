"""Stands for mamba-ssm 2.3.2 on a CPU, with the arguments that transformers may give it."""

import torch
from causal_conv1d import causal_conv1d_fn
from torch.nn import functional as F

INFINITE = (0.0, float("inf"))


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=INFINITE, return_final_states=False, return_varlen_states=False,
):  # fmt: skip
    """Token after token. x: [batch, seq, heads, size]; dt: [batch, seq, heads]; A, D: [heads]; B, C: [batch, seq, groups,
    state]; seq_idx: [batch, seq], the number of each position's document."""
    assert z is None and initial_states is None and not return_final_states and not return_varlen_states
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    B, C = (states.repeat_interleave(x.shape[2] // states.shape[2], 2) for states in (B, C))
    seq_idx = torch.zeros(x.shape[:2]) if seq_idx is None else seq_idx
    state = torch.zeros(*x.shape[0:1], *x.shape[2:], B.shape[-1])
    found = []
    for t in range(x.shape[1]):
        goes_on = (seq_idx[:, t] == seq_idx[:, max(t - 1, 0)])[:, None, None, None]
        state = state * goes_on * (dt[:, t] * A).exp()[..., None, None]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        found.append((state * C[:, t, :, None]).sum(-1) + x[:, t] * D[:, None])
    return torch.stack(found, 1).to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None, dt_limit=INFINITE,
    return_final_states=False, activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6, outproj_weight=None,
    outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True,
):  # fmt: skip
    """A whole layer, which training calls: zxbcdt: [batch, seq, gate, states, B, C and dt]."""
    assert initial_states is None and not return_final_states and not norm_before_gate
    width = len(D) * headdim
    z, states, dt = zxbcdt.split([width, zxbcdt.shape[2] - width - len(D), len(D)], -1)
    states = causal_conv1d_fn(states.mT, conv1d_weight, conv1d_bias, seq_idx, activation=activation).mT
    x, B, C = (part.unflatten(2, (count, -1)) for part, count in zip(
        states.split([width, *[(states.shape[2] - width) // 2] * 2], -1), (len(D), ngroups, ngroups), strict=True
    ))  # fmt: skip
    y = mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D, dt_bias=dt_bias, seq_idx=seq_idx, dt_softplus=True, dt_limit=dt_limit
    )
    y = y.flatten(2) * F.silu(z)
    if rmsnorm_weight is not None:
        groups = y.unflatten(2, (ngroups, -1))
        y = (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + rmsnorm_eps)).flatten(2) * rmsnorm_weight
    return F.linear(y.to(outproj_weight.dtype), outproj_weight, outproj_bias)
