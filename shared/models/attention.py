"""Keep packed documents apart in attention, without a read from the device in each forward."""

import contextlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from accelerate.utils import extract_model_from_parallel, gather_object
from torch import nn
from torch.nn import functional as F

from shared.data.loader import cu_seqlens_of
from shared.models.loading import parts_that_choose, without_adapters
from shared.parallel.gradients import end_step
from shared.process.errors import ConfigError, first_line, is_out_of_memory

MAX_ERROR = 0.02  # relative, of the kernel's results in 16 bits, against fp32; of logits, errors of many blocks, 4 times
# Arguments of attention functions that do not change the result if `cu_seqlens` are given. A window that is shorter than
# the row gets a mask instead: see `_is_plain`.
HARMLESS = {"is_causal", "sliding_window", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
HARMLESS |= {"output_attentions", "output_hidden_states", "use_cache", "cache_position", "return_dict"}
DROPOUT = ("attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob")  # names in model configs

Heads = tuple[int, int, int, int, torch.dtype]  # query heads, key and value heads, query size, value size, compute dtype

# (positions of packed rows, their cu_seqlens, whether a padding mask is kept unread) in the current forward
_rows: tuple[torch.Tensor | None, torch.Tensor | None, bool] | None = None
_sdpa: Any = None  # transformers' own attention function
_kernel: Any = None  # variable-length attention, if it is used in place of masks
_calls: list[tuple[Heads, bool]] | None = None  # for `isolate_documents`: each call's (heads, by the kernel)


@contextlib.contextmanager
def row_layout(
    position_ids: torch.Tensor | None = None, cu_seqlens: torch.Tensor | None = None, *, padded: bool = False
) -> Iterator[None]:
    """State whether the rows of the forwards in this block are packed.

    Otherwise transformers reads the position_ids back from the device to find out, and the host waits for all queued work.
    The masks allow the same positions. For packed rows, SDPA gets one additive float mask: of a bool mask, each block would
    make its own and keep it for backward. After `isolate_documents` has found a kernel, `cu_seqlens` replace the mask.

    Args:
        position_ids: given if some rows hold several documents: they restart with each document.
        cu_seqlens: see `data.cu_seqlens_of`; on the device.
        padded: a padding mask masks something. Otherwise transformers reads it from the device, to drop one that does not.
    """
    global _rows
    _register()
    before, _rows = _rows, (position_ids, cu_seqlens, padded)
    try:
        yield
    finally:
        _rows = before


def watch_masks(model: nn.Module) -> None:
    """Have cuDNN's attention turned off at the first mask, see `_without_cudnn`; for timm, whose masks are not seen, now."""
    _register()
    if any(type(part).__module__.startswith("timm.") for part in model.modules()):
        torch.backends.cuda.enable_cudnn_sdp(False)


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
        return None if _rows[0] is None else _number_of_document(position_ids)

    def warn_of_padding(*args: Any, **named: Any) -> None:  # the original reads the tokens from the device
        if _rows is None:
            warn(*args, **named)

    masking_utils.find_packed_sequence_indices = find_documents
    PreTrainedModel.warn_if_padding_and_no_attention_mask = warn_of_padding  # type: ignore[method-assign]


def _give_positions_to_masks(model: nn.Module) -> None:
    """Let a model's masks know where documents begin, if its code does not hand on the positions (GPT-OSS, OPT, Falcon)."""
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        for name in ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"):
            if (create := getattr(module, name, None)) and not hasattr(create, "is_told"):
                setattr(module, name, partial(_with_positions, create))
                getattr(module, name).is_told = True


def _with_positions(create: Any, *arguments: Any, **named: Any) -> Any:
    if _rows is not None and _rows[0] is not None and len(arguments) < 5 and named.get("position_ids") is None:
        named["position_ids"] = _rows[0]
    return create(*arguments, **named)


def _number_of_document(position_ids: torch.Tensor) -> torch.Tensor:
    """The number, from 0, of each position's document in its row: [batch, seq]."""
    return (torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def _mask(*args: Any, dtype: torch.dtype = torch.float32, **named: Any) -> torch.Tensor | None:
    """`sdpa_mask` of transformers, [batch, 1, seq, seq]. For packed rows: 0 and -inf in the dtype of attention.

    With the kernel, it returns `cu_seqlens`, 1-D, in place of a mask. `_attend` knows them by their dimension.
    """
    from transformers.masking_utils import sdpa_mask

    if _rows is not None and _rows[2]:
        named |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    if _rows is None or _rows[0] is None:
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
    if mask is not None and not torch.compiler.is_compiling():  # `counts.measure` has met it before
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
        mask = _without_cudnn(attention_mask if is_mask else _mask_of(attention_mask, rows, length))  # type: ignore[arg-type]
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


class Form(NamedTuple):
    """How the rows of packed documents are handed to a model."""

    flat: bool = False  # all in one row
    bounds: bool = False  # with the bounds of documents, for kernels of recurrent layers
    axes: int = 1  # copies of the positions: text, time, height, width


_form = Form()  # of the model in training: see `isolate_documents`


def forward_rows(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    """A model's outputs for a batch of rows, packed or not: see `loss.causal_lm_loss`."""
    inputs: dict[str, torch.Tensor] = {k: v for k, v in batch.items() if k in ("input_ids", "position_ids")}
    positions = inputs.get("position_ids")
    if positions is not None:
        if _form.flat:
            inputs = {key: value.reshape(1, -1) for key, value in inputs.items()}
            positions = inputs["position_ids"]
        if _form.bounds:
            inputs["cu_seq_lens_q"], inputs["seq_idx"] = batch["cu_seqlens"], _number_of_document(positions).int()
        if _form.axes > 1:
            inputs["position_ids"] = positions.expand(_form.axes, *positions.shape)
    with row_layout(positions, batch.get("cu_seqlens")):
        return model(**inputs, use_cache=False)


def forward_texts(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    """A model's outputs for a batch of texts, which have an attention_mask if they are of several lengths."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    with row_layout(padded="attention_mask" in inputs):
        return model(**inputs)


def describe(model: Any) -> str:
    """The attention that a model computes, for the summary."""
    model = without_adapters(model)
    used = model.config.get_text_config()._attn_implementation
    return f"{used}: {type(model).__name__} has no sdpa" if used == "eager" and not model._supports_sdpa else used


@torch.no_grad()
def isolate_documents(
    model: nn.Module, device: torch.device, vocab_size: int, rows: int = 1, *, required: bool = False
) -> tuple[bool, str]:
    """Check that packed documents do not see each other, and use the fastest attention.

    A document must have the logits that it has alone, wherever it lies in a row and whatever lies before it. The rows are
    tried in each `Form` that the model may take. Layers that choose tokens for sparse attention are not packed: a trial of
    few tokens, all of which they choose, shows nothing.

    On a GPU, PyTorch's variable-length attention replaces SDPA's mask, because the mask's cost grows with the square of the
    row length. It must give the same as the mask: results, gradients and the model's logits are compared on this device.
    Otherwise the mask stays.

    Every rank calls this, after the model is prepared: a sharded model's forward is a collective.

    Args:
        rows: the number of rows in training: some attention kernels look at positions only if the batch is a single row.
        required: raise an error if documents see each other.

    Returns:
        Whether documents are apart, and a line for the summary.

    Raises:
        ConfigError: see `required`.
    """
    global _form
    whole = without_adapters(extract_model_from_parallel(model))
    name, settings = type(whole).__name__, whole.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (rows, 16), generator=generator).to(device)
    other = torch.cat([(tokens[:, :8] + 1) % vocab_size, tokens[:, 8:]], 1)  # another document before the second
    alone = tokens.roll(8, 1)  # the second document comes first, and sees nothing of what follows
    position_ids = (torch.arange(16, device=device) % 8).expand(rows, -1)
    cu_seqlens = torch.from_numpy(cu_seqlens_of(position_ids.cpu().numpy())).to(device)

    def packed(ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input_ids": ids, "position_ids": position_ids, "cu_seqlens": cu_seqlens}

    autocasts = False

    def look(*_: Any) -> None:
        nonlocal autocasts
        autocasts = torch.is_autocast_enabled(device.type)

    def logits(*batches: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[tuple[Heads, bool]]]:
        """(logits of each batch, calls of attention)"""
        global _calls
        calls: list[tuple[Heads, bool]] = []
        _calls = calls
        hook = whole.get_decoder().register_forward_pre_hook(look)
        try:
            with _as_in_an_evaluation(model):
                found = [forward_rows(model, batch).logits for batch in batches]
        finally:
            _calls = None
            hook.remove()
        return [part.reshape(rows, 16, -1) for part in found], calls

    def apart(before: torch.Tensor, changed: torch.Tensor) -> bool:
        return torch.allclose(before[:, 8:].float(), changed[:, 8:].float(), atol=1e-3, rtol=1e-3)

    def as_alone(masked: torch.Tensor, unpacked: torch.Tensor, alone: torch.Tensor) -> bool:
        """Whether the second document has the logits that it has alone, up to what 16 bits do to the first one's."""
        in_16_bits = masked.dtype.itemsize == 2 or autocasts  # Accelerate hands autocast's logits on in fp32
        rounding = _relative(masked[:, :8], unpacked[:, :8]) if in_16_bits else 0.0
        return _relative(masked[:, 8:], alone[:, :8]) < max(MAX_ERROR, min(2 * rounding, 4 * MAX_ERROR))

    _give_positions_to_masks(whole)
    _use(None)
    is_flat = str(settings._attn_implementation).startswith("flash")
    axes = (4, 1) if "mrope_section" in (getattr(settings, "rope_parameters", None) or {}) else (1,)
    if parts_that_choose(whole):
        forms, hint = [], ": it chooses the tokens that it sees from the whole row"
    else:
        hint = ""
        forms = [Form(flat, bounds, n) for flat, bounds in ((is_flat, False), (True, True)) for n in axes]
    for form in forms:
        _form = form
        try:
            plain = ({"input_ids": tokens}, {"input_ids": alone})
            (masked, changed, *unpacked), calls = logits(packed(tokens), packed(other), *plain)
        except Exception as error:  # a model may raise anything if it does not take this form
            end_step(model)
            if is_out_of_memory(error):
                raise
            hint = f": {first_line(error)}" if isinstance(error, ValueError) else ""
            continue
        if apart(masked, changed) and as_alone(masked, *unpacked):
            break
    else:
        _form = Form()
        if not hint and any(isinstance(module, nn.Conv1d) for module in whole.get_decoder().modules()):
            hint = ": its recurrent layers carry a state from one to the next"
        why = f"{name} lets documents of one row see each other{hint}"
        if required:
            raise ConfigError(f"{why}: use --packing auto or off (in pretraining, drop --isolate_documents)")
        return False, f"off: {why}"
    if not calls:
        return True, "documents kept apart by the model's own attention"
    by_mask = "documents kept apart by an attention mask"
    kernel = find_kernel(device)
    if kernel is None:
        return True, by_mask
    # The kernel has to work on all ranks, because they run the forward together.
    if why := next(filter(None, gather_object([_why_not(kernel, {heads for heads, _ in calls}, device)])), ""):
        return True, f"{by_mask}: {why}"
    _use(kernel)
    try:
        (found, changed), calls = logits(packed(tokens), packed(other))
        if not any(by_kernel for _, by_kernel in calls):
            why = "every block needs one (window, bias, dropout)"
        elif not apart(found, changed) or _relative(found, masked) > 4 * MAX_ERROR:
            why = "without one the model's logits differ"
    except Exception as error:  # a model may raise anything if it gets `cu_seqlens` as the mask
        end_step(model)
        if is_out_of_memory(error):
            _use(None)
            raise
        why = first_line(error)
    if not why:
        return True, "documents kept apart by attention of variable lengths, without a mask"
    _use(None)
    return True, f"{by_mask}: {why}"


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
