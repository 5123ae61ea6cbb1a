"""Keep packed documents apart in attention, without a read from the device in each forward."""

import contextlib
import inspect
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.nn import functional as F

from shared.data.loader import cu_seqlens_of
from shared.parallel.gradients import end_step
from shared.process.errors import ConfigError, first_line, is_out_of_memory

MAX_ERROR = 0.02  # relative, of the kernel's results in 16 bits, against fp32; of logits, errors of many blocks, 4 times
# Arguments of attention functions that do not change the result if `cu_seqlens` are given. A window that is shorter than
# the row gets a mask instead: see `_is_plain`.
HARMLESS = {"is_causal", "sliding_window", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
HARMLESS |= {"output_attentions", "output_hidden_states", "use_cache", "cache_position", "return_dict"}
DROPOUT = ("attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # names in model configs

Heads = tuple[int, int, int, int, torch.dtype]  # query heads, key and value heads, query size, value size, compute dtype

_rows: tuple[bool, torch.Tensor | None] | None = None  # (packed, cu_seqlens) of the current forward
_sdpa: Any = None  # transformers' own attention function
_kernel: Any = None  # variable-length attention, if it is used in place of masks
_calls: list[tuple[Heads, bool]] | None = None  # for `isolate_documents`: each call's (heads, by the kernel)


@contextlib.contextmanager
def row_layout(*, packed: bool = False, cu_seqlens: torch.Tensor | None = None) -> Iterator[None]:
    """State whether the rows of the forwards in this block are packed.

    Otherwise transformers reads the position_ids back from the device to find out, and the host waits for all queued work.
    The masks allow the same positions. For packed rows, SDPA gets one additive float mask: of a bool mask, each block would
    make its own and keep it for backward. After `isolate_documents` has found a kernel, `cu_seqlens` replace the mask.

    Args:
        packed: some rows hold several documents. `position_ids` restart with each document.
        cu_seqlens: see `data.cu_seqlens_of`; on the device.
    """
    global _rows
    _register()
    before, _rows = _rows, (packed, cu_seqlens)
    try:
        yield
    finally:
        _rows = before


@cache
def _register() -> None:
    """Register the functions below in transformers. Outside of `row_layout`, they do the same as the originals."""
    global _sdpa
    from transformers import PreTrainedModel, masking_utils  # late, after `launch.start` has silenced its warnings
    from transformers.modeling_utils import AttentionInterface

    _sdpa = AttentionInterface._global_mapping["sdpa"]
    AttentionInterface.register("sdpa", _attend)
    masking_utils.AttentionMaskInterface.register("sdpa", _mask)
    find, warn = masking_utils.find_packed_sequence_indices, PreTrainedModel.warn_if_padding_and_no_attention_mask

    def find_documents(position_ids: torch.Tensor) -> torch.Tensor | None:
        if _rows is None:
            return find(position_ids)
        return _number_of_document(position_ids) if _rows[0] else None

    def warn_of_padding(*args: Any, **named: Any) -> None:  # the original reads the tokens from the device
        if _rows is None:
            warn(*args, **named)

    masking_utils.find_packed_sequence_indices = find_documents
    PreTrainedModel.warn_if_padding_and_no_attention_mask = warn_of_padding  # type: ignore[method-assign]


def _number_of_document(position_ids: torch.Tensor) -> torch.Tensor:
    """The number, from 0, of each position's document in its row: [batch, seq]."""
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def _mask(*args: Any, dtype: torch.dtype = torch.float32, **named: Any) -> torch.Tensor | None:
    """`sdpa_mask` of transformers, [batch, 1, seq, seq]. For packed rows: 0 and -inf in the dtype of attention.

    With the kernel, it returns `cu_seqlens`, 1-D, in place of a mask. `_attend` knows them by their dimension.
    """
    from transformers.masking_utils import sdpa_mask

    if _rows is None or not _rows[0]:
        return _without_cudnn(sdpa_mask(*args, dtype=dtype, **named))
    dtype, cu_seqlens = _computed_in(torch.device(named["device"]), dtype), _rows[1]
    if _kernel is not None and cu_seqlens is not None and dtype.itemsize == 2 and _is_plain(**named):
        torch._dynamo.maybe_mark_dynamic(cu_seqlens, 0)  # another number of documents must not recompile the blocks
        return cu_seqlens
    allowed = _without_cudnn(sdpa_mask(*args, dtype=dtype, **named))
    return None if allowed is None else torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, -torch.inf)


def _without_cudnn(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Turn cuDNN's attention off for good once there is a mask.

    Its backward may give NaN then, for row lengths like 64 and 192 (github.com/pytorch/pytorch/issues/196678).
    """
    if mask is not None:
        torch.backends.cuda.enable_cudnn_sdp(False)
    return mask


def _is_plain(*, q_length: int, config: Any, local_size: int | None = None, use_vmap: bool = False, **named: Any) -> bool:
    """Whether a mask is only causal within documents, and the model has no attention dropout."""
    if use_vmap or "allow_is_bidirectional_skip" in named:  # an addition of the model, or a mask that is not causal
        return False
    drops = any(getattr(config, name, 0.0) for name in DROPOUT)
    return not drops and (local_size is None or local_size >= q_length)


def _computed_in(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


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
    """transformers' SDPA, [batch, heads, seq, head_dim] -> [batch, seq, heads, head_dim]. Takes `cu_seqlens` or a mask."""
    rows, heads, length, size = query.shape
    dtype = _computed_in(query.device, value.dtype)
    is_mask = attention_mask is None or attention_mask.ndim != 1
    # A bias, a soft cap or sinks change the result, and the kernel does not support them.
    more = any(given is not None and given is not False and name not in HARMLESS for name, given in named.items())
    by_kernel = not (is_mask or dropout or more)
    if _calls is not None:
        _calls.append(((heads, key.shape[1], size, value.shape[-1], dtype), by_kernel))
    if not by_kernel:
        mask = attention_mask if is_mask else _mask_of(attention_mask, rows, length)  # type: ignore[arg-type]
        return _sdpa(module, query, key, value, mask, dropout=dropout, scaling=scaling, **named)
    query, key, value = (states.transpose(1, 2).flatten(0, 1).to(dtype) for states in (query, key, value))
    # The row length is an upper bound of the longest document. The exact length would cost a device sync and recompiles.
    return _kernel(query, key, value, attention_mask, length, scaling).unflatten(0, (rows, length)), None


def _mask_of(cu_seqlens: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """[rows, 1, length, length] bool: the same document, and not a later token."""
    number = torch.bucketize(torch.arange(rows * length, device=cu_seqlens.device), cu_seqlens, right=True)
    number = number.view(rows, 1, length)
    return (number[..., :, None] == number[..., None, :]).tril()


def find_kernel(device: torch.device) -> Any:
    """PyTorch's variable-length flash attention; None if the device has none.

    It takes query, key, value: [tokens, heads, head_dim] in 16 bits; cu_seqlens; a bound for document lengths; scale.
    """
    if device.type != "cuda":
        return None
    from torch.nn.attention.varlen import varlen_attn  # this import takes seconds

    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def kernel(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, scale: Any
    ) -> torch.Tensor:
        bounds = (cu_seqlens, cu_seqlens, longest, longest)
        return varlen_attn(query, key, value, *bounds, scale=scale, window_size=(-1, 0), **grouped)  # type: ignore[return-value]

    return kernel


def _use(kernel: Any) -> None:
    """Use `kernel`, or masks if None. Both without cuDNN: each number of documents would cost it a new plan."""
    global _kernel
    _kernel = kernel
    torch.backends.cuda.enable_cudnn_sdp(False)


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30))


@torch.enable_grad()
def error_of(kernel: Any, heads: Heads, device: torch.device) -> float:
    """The largest relative error of the kernel's result and gradients, against attention with a mask in fp32."""
    rows, length = 2, 192
    of_queries, of_keys, size, value_size, dtype = heads
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, of_queries, length, size), (rows, of_keys, length, size), (rows, of_keys, length, value_size)]
    shapes.append((rows, length, of_queries, value_size))
    *states, gradient = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    cu_seqlens = torch.tensor([0, 60, 61, length, rows * length], dtype=torch.int32, device=device)
    ours = [tensor.clone().requires_grad_() for tensor in states]
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in ours)
    found = kernel(query, key, value, cu_seqlens, length, None).unflatten(0, (rows, length))
    found.backward(gradient)
    exact = [tensor.float().requires_grad_() for tensor in states]
    query, key, value = (tensor.repeat_interleave(of_queries // tensor.shape[1], 1) for tensor in exact)
    with torch.autocast(device.type, enabled=False):
        mask = _mask_of(cu_seqlens, rows, length)
        expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)
        expected.backward(gradient.float())
    gradients: list[tuple[Any, Any]] = [(one.grad, other.grad) for one, other in zip(ours, exact, strict=True)]
    errors = [_relative(one, other) for one, other in [(found.detach(), expected.detach()), *gradients]]
    return float(torch.tensor(errors).max())  # unlike max(), NaN if one is


def _why_not(kernel: Any, kinds: set[Heads], device: torch.device) -> str:
    """Why blocks with these heads cannot use the kernel; "" if they can."""
    kinds = {heads for heads in kinds if heads[-1].itemsize == 2}
    if not kinds:
        return "attention in fp32 has no kernel for variable lengths"
    try:
        worst = max(error_of(kernel, heads, device) for heads in kinds)
    except Exception as error:  # a kernel may raise anything on a device that it does not support
        if is_out_of_memory(error):
            raise
        return first_line(error)
    return "" if worst <= MAX_ERROR else f"the kernel is off by {worst:.2g}"


@torch.no_grad()
def isolate_documents(model: nn.Module, device: torch.device, vocab_size: int, rows: int = 1) -> str:
    """Check that packed documents do not attend to each other, and use the fastest attention. Returns a summary line.

    On a GPU, PyTorch's variable-length attention replaces SDPA's mask, because the mask's cost grows with the square of the
    row length. It must give the same as the mask: results, gradients and the model's logits are compared on this device.
    Otherwise the mask stays.

    `rows` is the number of rows in training: some attention kernels look at positions only if the batch is a single row.
    Every rank calls this, after the model is prepared: a sharded model's forward is a collective.

    Raises:
        ConfigError: the model ignores restarting `position_ids`, or its attention kernel does.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (rows, 16), generator=generator).to(device)
    other = tokens.clone()
    other[:, :8] = (tokens[:, :8] + 1) % vocab_size  # must not change the second document's logits
    position_ids = (torch.arange(16, device=device) % 8).expand(rows, -1)
    cu_seqlens = torch.from_numpy(cu_seqlens_of(position_ids.cpu().numpy())).to(device)

    def logits() -> tuple[torch.Tensor, bool, list[tuple[Heads, bool]]]:
        """(logits, whether documents are apart, calls of attention)"""
        global _calls
        calls: list[tuple[Heads, bool]] = []
        _calls = calls
        try:
            with _as_in_an_evaluation(model), row_layout(packed=True, cu_seqlens=cu_seqlens):
                both = [model(input_ids=t, position_ids=position_ids, use_cache=False).logits for t in (tokens, other)]
        finally:
            _calls = None
        first, second = (found.float() for found in both)
        return first, torch.allclose(first[:, 8:], second[:, 8:], atol=1e-3, rtol=1e-3), calls

    _use(None)
    masked, apart, calls = logits()
    if not apart:
        raise ConfigError(
            f"{type(model).__name__} lets packed documents attend to each other: use --no_packing (in pretraining, drop "
            "--isolate_documents), or another --attn_implementation"
        )
    if not calls:
        return "documents kept apart by the model's own attention"
    by_mask = "documents kept apart by an attention mask"
    kernel = find_kernel(device)
    if kernel is None:
        return by_mask
    # The kernel has to work on all ranks, because they run the forward together.
    if why := next(filter(None, gather_object([_why_not(kernel, {heads for heads, _ in calls}, device)])), ""):
        return f"{by_mask}: {why}"
    _use(kernel)
    try:
        found, apart, calls = logits()
        if not any(by_kernel for _, by_kernel in calls):
            why = "every block needs one (window, bias, dropout)"
        elif not apart or _relative(found, masked) > 4 * MAX_ERROR:
            why = "without one the model's logits differ"
    except Exception as error:  # a model may raise anything if it gets `cu_seqlens` as the mask
        end_step(model)
        if is_out_of_memory(error):
            _use(None)
            raise
        why = first_line(error)
    if not why:
        return "documents kept apart by attention of variable lengths, without a mask"
    _use(None)
    return f"{by_mask}: {why}"


@contextlib.contextmanager
def _as_in_an_evaluation(model: nn.Module) -> Iterator[None]:
    """Run without dropout, compiled code and fp8. Compiled code would specialise on these sizes. fp8's scales depend on all
    tokens of a batch, so every token would affect all others."""
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
