"""Documents that share a row and cannot see each other, and what transformers is told of rows so that it need not look."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from shared.config import ConfigError, first_line
from shared.exits import is_out_of_memory

CLOSE = 0.02  # relative, of the kernel's results in 16 bits to those in fp32
_sdpa: Any = None  # transformers' own attention function, while `_attend` stands in its place


def cu_seqlens_of(position_ids: np.ndarray) -> np.ndarray:
    """Where each document begins in the flattened rows, and where the last one ends: [documents + 1] int32.

    Args:
        position_ids: [batch, seq], from 0 in each document.
    """
    return np.append(np.flatnonzero(position_ids == 0), position_ids.size).astype(np.int32)


@contextlib.contextmanager
def told_of_rows(*, packed: bool = False, cu_seqlens: torch.Tensor | None = None) -> Iterator[None]:
    """Tell transformers what the rows of the forwards in this block hold, which it would otherwise look up on the device
    as it makes their mask: the host would wait there for all that it has queued, and the device then for the host.

    Masks are those that it makes by itself. That of packed rows is given to SDPA as what it adds to the scores: of bools
    each block would make that for itself, and keep it for its backward. (Flash attention's kernels look up where documents
    begin in each block, which this leaves alone.) After `isolate_documents` has found a kernel, `cu_seqlens` take its
    place.

    Args:
        packed: some rows hold several documents, whose `position_ids` restart.
        cu_seqlens: see `cu_seqlens_of`; on the device.
    """
    from transformers import PreTrainedModel, masking_utils  # not before `launch.start` has silenced what that imports

    told: list[tuple[Any, str, Any]] = [
        (masking_utils, "find_packed_sequence_indices", _number_of_document if packed else _nothing),
        (PreTrainedModel, "warn_if_padding_and_no_attention_mask", _nothing),  # nobody sees it, and it looks, too
    ]
    told = [entry for entry in told if hasattr(*entry[:2])]  # where a version has no such question, nothing is answered
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in told]
    masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    for entry in told:
        setattr(*entry)
    if packed:
        masks["sdpa"] = partial(_mask, cu_seqlens if _sdpa is not None else None)
    try:
        yield
    finally:
        for entry in before:
            setattr(*entry)
        if packed:
            del masks["sdpa"]


def _nothing(*_arguments: Any, **_named: Any) -> None:
    """No documents; no warning."""


def _number_of_document(position_ids: torch.Tensor) -> torch.Tensor:
    """The number, from 0, of each position's document in its row: [batch, seq]."""
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def _mask(cu_seqlens: torch.Tensor | None, *args: Any, dtype: torch.dtype, **named: Any) -> torch.Tensor | None:
    """`sdpa_mask` of transformers, [batch, 1, seq, seq], as 0 and -inf in the type that attention is computed in; or
    `cu_seqlens`, where they say all that the mask would, and that type has a kernel for them."""
    from transformers.masking_utils import sdpa_mask

    dtype = _computed_in(torch.device(named["device"]), dtype)
    is_plain = not named.get("use_vmap") and "allow_is_bidirectional_skip" not in named
    if cu_seqlens is not None and is_plain and named.get("local_size") is None and dtype.itemsize == 2:
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)  # the documents' number varies: no reason to compile blocks anew
        return cu_seqlens
    allowed = sdpa_mask(*args, dtype=dtype, **named)
    return None if allowed is None else torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -torch.inf)


def _computed_in(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


# The kernel ------------------------------------------------------------------------------------------------------------


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, scale: float | None
) -> torch.Tensor:
    """Causal attention within each document, by PyTorch's own flash attention: [tokens, heads, head_dim], 16 bits.

    cuDNN's kernel, faster on some GPUs, would make a plan for each number of documents that comes.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        found: Any = varlen_attn(
            *(query, key, value, cu_seqlens, cu_seqlens, longest, longest), scale=scale, window_size=(-1, 0), **grouped
        )
    return found


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda"


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' SDPA, [batch, heads, seq, head_dim] -> [batch, seq, heads, head_dim], that also takes `cu_seqlens` for a
    mask. They come as the mask does, so a block that is computed again for its gradient gets them again, too."""
    if attention_mask is None or attention_mask.ndim != 1:
        return _sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **named)
    rows, _, length, _ = query.shape
    if dropout:  # which the kernel has not
        mask = _mask_of(attention_mask, rows, length)
        return _sdpa(module, query, key, value, mask, dropout=dropout, scaling=scaling, **named)
    dtype = _computed_in(query.device, value.dtype)
    query, key, value = (states.transpose(1, 2).flatten(0, 1).to(dtype) for states in (query, key, value))
    return _kernel(query, key, value, attention_mask, length, scaling).unflatten(0, (rows, length)), None


def _mask_of(cu_seqlens: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """[rows, 1, length, length] bool: same document, and not later."""
    number = torch.bucketize(torch.arange(rows * length, device=cu_seqlens.device), cu_seqlens, right=True)
    number = number.view(rows, 1, length)
    return (number[..., :, None] == number[..., None, :]).tril()


def _use_kernel(used: bool) -> None:
    """Put `_attend` in the place of transformers' function, or that back."""
    global _sdpa
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if used and _sdpa is None:
        torch.compiler.allow_in_graph(_kernel)  # compiled blocks call it as it is
        _sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        ALL_ATTENTION_FUNCTIONS["sdpa"] = _attend
    elif not used and _sdpa is not None:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
        _sdpa = None


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))


@torch.enable_grad()
def _require_sound(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compare the kernel with a mask in fp32: what it returns, and its gradients.

    Raises:
        ArithmeticError: they differ by more than rounding. Whatever the kernel raises on a device that it does not know.
    """
    rows, length = 2, 192
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, heads, length, head_dim), *[(rows, kv_heads, length, head_dim)] * 2, (rows, length, heads, head_dim)]
    *states, gradient = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    cu_seqlens = torch.tensor([0, 60, 61, length, rows * length], dtype=torch.int32, device=device)
    ours = [tensor.clone().requires_grad_() for tensor in states]
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in ours)
    found = _kernel(query, key, value, cu_seqlens, length, None).unflatten(0, (rows, length))
    found.backward(gradient)
    exact = [tensor.float().requires_grad_() for tensor in states]
    wide_query, wide_key, wide_value = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in exact)
    mask = _mask_of(cu_seqlens, rows, length)
    with torch.autocast(device.type, enabled=False):
        expected = F.scaled_dot_product_attention(wide_query, wide_key, wide_value, attn_mask=mask).transpose(1, 2)
        expected.backward(gradient.float())
    pairs = [(found.detach(), expected.detach()), *[(one.grad, other.grad) for one, other in zip(ours, exact, strict=True)]]
    worst = max(_relative(one, other) for one, other in pairs)  # type: ignore[arg-type]
    if not worst <= CLOSE:
        raise ArithmeticError(f"the kernel is off by {worst:.2g}")


# Choosing --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def isolate_documents(model: nn.Module, device: torch.device, vocab_size: int, rows: int = 1) -> str:
    """Check that documents packed in one row cannot see each other, and find the fastest way to that; a word about it.

    On a GPU, PyTorch's attention of variable lengths takes the place of SDPA's mask, whose cost grows with the square of
    the row, where it gives the same: its results and gradients are compared with a mask's on this very device, and the
    model's logits are. Where anything is in its way, the mask stays.

    With as many rows as in training: some attention kernels look at the positions of a single row only. Every rank
    calls this, after the model is prepared: a sharded model's forward is a collective.

    Raises:
        ConfigError: the model ignores restarting `position_ids`, or its attention kernel does.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (rows, 16), generator=generator).to(device)
    other = tokens.clone()
    other[:, :8] = (tokens[:, :8] + 1) % vocab_size  # the second document must not notice
    position_ids = (torch.arange(16, device=device) % 8).expand(rows, -1)
    cu_seqlens = torch.from_numpy(cu_seqlens_of(position_ids.cpu().numpy())).to(device)

    def logits() -> tuple[torch.Tensor, torch.Tensor]:
        with told_of_rows(packed=True, cu_seqlens=cu_seqlens):
            first, second = (model(input_ids=t, position_ids=position_ids, use_cache=False).logits for t in (tokens, other))
        return first.float(), second.float()

    def are_apart(first: torch.Tensor, second: torch.Tensor) -> bool:
        return torch.allclose(first[:, 8:], second[:, 8:], atol=1e-3, rtol=1e-3)

    _use_kernel(False)
    with _as_in_an_evaluation(model):
        masked = logits()
        if not are_apart(*masked):
            raise ConfigError(
                f"{type(model).__name__} lets packed documents attend to each other: use --no_packing, or another "
                "--attn_implementation"
            )
        if not _has_kernel(device):
            return "documents kept apart by their attention's mask"
        why = "without one the model's logits differ"
        try:
            shapes: set[tuple[int, int, int, torch.dtype]] = set()
            with _seen_by_the_kernel(shapes.add):
                by_kernel = logits()
            if not shapes:
                return "documents kept apart by the model's own attention"
            for shape in shapes:
                _require_sound(*shape, device)
            if are_apart(*by_kernel) and _relative(by_kernel[0], masked[0]) <= 4 * CLOSE:
                _use_kernel(True)
                return "documents kept apart by attention of variable lengths, without a mask"
        except Exception as error:  # whatever a model, or a device, does with what it does not know
            if is_out_of_memory(error):
                raise
            why = first_line(error)
    return f"documents kept apart by their attention's mask: {why}"


@contextlib.contextmanager
def _as_in_an_evaluation(model: nn.Module) -> Iterator[None]:
    """Without dropout, compiled code, which takes the sizes that it meets first for constants, or fp8, whose scales depend
    on all tokens of a batch: every token would notice any other."""
    training = model.training
    model.eval()
    scaled = [m for m in model.modules() if isinstance(m, nn.Linear) and type(m).__name__ == "Float8Linear"]
    for module in scaled:
        module.forward = partial(nn.Linear.forward, module)  # type: ignore[method-assign]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in scaled:
            del module.forward
        model.train(training)


@contextlib.contextmanager
def _seen_by_the_kernel(note: Callable[[tuple[int, int, int, torch.dtype]], None]) -> Iterator[None]:
    """Use the kernel in this block, and note for which (heads, heads of keys, head_dim, dtype)."""
    global _kernel
    kernel = _kernel

    def noting(query: torch.Tensor, key: torch.Tensor, *others: Any) -> torch.Tensor:
        note((query.shape[1], key.shape[1], query.shape[2], query.dtype))
        return kernel(query, key, *others)

    _use_kernel(True)
    _kernel = noting  # type: ignore[assignment]
    try:
        yield
    finally:
        _kernel = kernel
        _use_kernel(False)
