"""Documents that share a row and cannot see each other, and what transformers is told of rows so that it need not look."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.nn import functional as F

from shared.data.loader import cu_seqlens_of
from shared.parallel.gradients import end_step
from shared.process.errors import ConfigError, first_line, is_out_of_memory

CLOSE = 0.02  # relative, of the kernel's results in 16 bits to those in fp32
# What attention functions are given besides, and may ignore: documents and their mask say the same.
HARMLESS = {"is_causal", "sliding_window", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
HARMLESS |= {"output_attentions", "output_hidden_states", "use_cache", "cache_position", "return_dict"}
DROPOUT = ("attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # in configs of models

_sdpa: Any = None  # transformers' own attention function, while `_attend` stands in its place
_varlen_attn: Any = None  # PyTorch's, from then on: importing it takes seconds


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
        cu_seqlens: see `data.cu_seqlens_of`; on the device.
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
    `cu_seqlens`, where they say all that the mask would, and attention has a kernel for them."""
    from transformers.masking_utils import sdpa_mask

    dtype = _computed_in(torch.device(named["device"]), dtype)
    if cu_seqlens is not None and dtype.itemsize == 2 and _is_plain(**named):
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)  # the documents' number varies: no reason to compile blocks anew
        return cu_seqlens
    allowed = sdpa_mask(*args, dtype=dtype, **named)
    return None if allowed is None else torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -torch.inf)


def _is_plain(*, q_length: int, config: Any, local_size: int | None = None, use_vmap: bool = False, **named: Any) -> bool:
    """Whether a mask only keeps documents apart and tokens from looking ahead, and nothing is dropped at random."""
    if use_vmap or "allow_is_bidirectional_skip" in named:  # the model's own additions; a mask that looks ahead
        return False
    drops = any(getattr(config, name, 0.0) for name in DROPOUT)
    return not drops and (local_size is None or local_size >= q_length)


def _computed_in(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


# The kernel ------------------------------------------------------------------------------------------------------------


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda"


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, scale: float | None
) -> torch.Tensor:
    """Causal attention within each document, by PyTorch's own flash attention: [tokens, heads, head_dim], 16 bits.

    Args:
        longest: at least the tokens of the longest document.
    """
    return _varlen_attn(query, key, value, cu_seqlens, cu_seqlens, longest, longest, scale=scale)


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
    if dropout or _more_than_a_mask(named):  # which the kernel has not
        mask = _mask_of(attention_mask, rows, length)
        return _sdpa(module, query, key, value, mask, dropout=dropout, scaling=scaling, **named)
    dtype = _computed_in(query.device, value.dtype)
    query, key, value = (states.transpose(1, 2).flatten(0, 1).to(dtype) for states in (query, key, value))
    # A whole row for the longest document: its length would be one more number to fetch, and to compile for.
    return _kernel(query, key, value, attention_mask, length, scaling).unflatten(0, (rows, length)), None


def _more_than_a_mask(named: dict[str, Any]) -> list[str]:
    """What attention is given that changes its result, by name: biases, caps, sinks."""
    return [name for name, value in named.items() if value is not None and value is not False and name not in HARMLESS]


def _mask_of(cu_seqlens: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """[rows, 1, length, length] bool: same document, and not later."""
    number = torch.bucketize(torch.arange(rows * length, device=cu_seqlens.device), cu_seqlens, right=True)
    number = number.view(rows, 1, length)
    return (number[..., :, None] == number[..., None, :]).tril()


def _use_kernel(used: bool) -> None:
    """Put `_attend` in the place of transformers' function, or that back.

    Without cuDNN's attention, which would make a plan for each number of documents, and each length of a row, that comes.
    """
    global _sdpa, _varlen_attn
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if used and _sdpa is None:
        from torch.nn.attention.varlen import varlen_attn

        grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
        _varlen_attn = partial(varlen_attn, window_size=(-1, 0), **grouped)
        _sdpa, ALL_ATTENTION_FUNCTIONS["sdpa"] = ALL_ATTENTION_FUNCTIONS["sdpa"], _attend
        torch.backends.cuda.enable_cudnn_sdp(False)
    elif not used and _sdpa is not None:
        ALL_ATTENTION_FUNCTIONS["sdpa"], _sdpa = _sdpa, None
        torch.backends.cuda.enable_cudnn_sdp(True)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))


Heads = tuple[int, int, int, int, torch.dtype]  # of queries; of keys and values; their two sizes; computed in


@torch.enable_grad()
def _require_sound(heads: Heads, device: torch.device) -> None:
    """Compare the kernel with a mask in fp32: what it returns, and its gradients.

    Raises:
        ArithmeticError: they differ by more than rounding. Whatever the kernel raises on a device that it does not know.
    """
    rows, length = 2, 192
    of_queries, of_keys, size, value_size, dtype = heads
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, of_queries, length, size), (rows, of_keys, length, size), (rows, of_keys, length, value_size)]
    shapes.append((rows, length, of_queries, value_size))
    *states, gradient = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    cu_seqlens = torch.tensor([0, 60, 61, length, rows * length], dtype=torch.int32, device=device)
    ours = [tensor.clone().requires_grad_() for tensor in states]
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in ours)
    found = _kernel(query, key, value, cu_seqlens, length, None).unflatten(0, (rows, length))
    found.backward(gradient)
    exact = [tensor.float().requires_grad_() for tensor in states]
    query, key, value = (tensor.repeat_interleave(of_queries // tensor.shape[1], 1) for tensor in exact)
    with torch.autocast(device.type, enabled=False):
        mask = _mask_of(cu_seqlens, rows, length)
        expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
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
    with _as_in_an_evaluation(model), _calls_of_sdpa() as calls:
        masked = logits()
    if not are_apart(*masked):
        raise ConfigError(
            f"{type(model).__name__} lets packed documents attend to each other: use --no_packing, or another "
            "--attn_implementation"
        )
    if not calls:
        return "documents kept apart by the model's own attention"
    by_mask = "documents kept apart by their attention's mask"
    if not _has_kernel(device):
        return by_mask
    # Before a forward, which ranks do together: on all of them the kernel has to work.
    if why := next(filter(None, gather_object([_in_the_way(calls, device)])), ""):
        return f"{by_mask}: {why}"
    _use_kernel(True)
    try:
        with _as_in_an_evaluation(model), _calls_of_the_kernel() as count:
            by_kernel = logits()
        if not count:
            why = "no block can do without"
        elif not are_apart(*by_kernel) or _relative(by_kernel[0], masked[0]) > 4 * CLOSE:
            why = "without it the model's logits differ"
    except Exception as error:  # whatever a model does with what is no mask
        end_step(model)
        if is_out_of_memory(error):
            _use_kernel(False)
            raise
        why = first_line(error)
    if not why:
        return "documents kept apart by attention of variable lengths, without a mask"
    _use_kernel(False)
    return f"{by_mask}: {why}"


def _in_the_way(calls: list[tuple[Heads, list[str]]], device: torch.device) -> str:
    """Why blocks that attend like this cannot use the kernel; "" if they can."""
    if more := sorted({name for _, names in calls for name in names}):
        return f"attention is given {', '.join(more)}, too"
    kinds = {heads for heads, _ in calls if heads[-1].itemsize == 2}
    if not kinds:
        return "attention in fp32 has no kernel for variable lengths"
    _use_kernel(True)
    try:
        for heads in kinds:
            _require_sound(heads, device)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return first_line(error)
    finally:
        _use_kernel(False)
    return ""


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
def _calls_of_sdpa() -> Iterator[list[tuple[Heads, list[str]]]]:
    """Collects how blocks call transformers' SDPA: heads, and what they give it besides."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa, calls = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def noting(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **named: Any
    ) -> Any:
        dtype = _computed_in(query.device, value.dtype)
        heads = (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], dtype)
        besides = {key: value for key, value in named.items() if key not in ("attention_mask", "dropout", "scaling")}
        calls.append((heads, _more_than_a_mask(besides)))
        return sdpa(module, query, key, value, *args, **named)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = noting
    try:
        yield calls
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa


@contextlib.contextmanager
def _calls_of_the_kernel() -> Iterator[list[None]]:
    """As many entries as calls of the kernel in this block."""
    global _kernel
    kernel = _kernel
    calls: list[None] = []

    def counted(*arguments: Any) -> torch.Tensor:
        calls.append(None)
        return kernel(*arguments)

    _kernel = counted  # type: ignore[assignment]
    try:
        yield calls
    finally:
        _kernel = kernel
