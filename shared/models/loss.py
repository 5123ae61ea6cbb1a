"""The loss of a language model, computed in chunks of tokens: all logits at once would dominate peak memory.

If a batch has `targets`, logits are computed only for them, not for prompts and padding. After `fuse_head`, the head itself
returns the loss, or the log-probability of each target. `causal_lm_loss` and `log_probabilities` hand it the labels in a
global, since the model in between cannot.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.nn import functional as F

from shared.data.order import IGNORED
from shared.models.attention import forward_rows
from shared.models.counts import experts_of
from shared.models.loading import without_adapters
from shared.parallel.gradients import end_step
from shared.process.errors import first_line, is_out_of_memory
from shared.process.ranks import data_parallel_size, world_size

MAX_LOGITS = 2**26  # of a chunk: 256 MB in fp32
MIN_TOKENS = (
    1024  # of a chunk if the head is trained, even above MAX_LOGITS: each chunk adds to a gradient of the head's size
)
NOT_BALANCED = ("doge", "llama4_text")  # routes by pairs of keys; does not return its router's logits
# While the head computes the loss: labels, targets, and whether each target's log-probability is asked for
_pending: tuple[torch.Tensor, torch.Tensor | None, bool] | None = None


def causal_lm_loss(
    model: nn.Module, batch: dict[str, torch.Tensor], *, log: Callable[..., None] | None = None
) -> torch.Tensor:
    """Cross-entropy summed over this micro-batch's target tokens. The caller divides by the global batch's number of them.

    In training, its gradient includes that of `balancing_loss` times `router_aux_loss_coef`, if the model's config asks for
    that (`output_router_logits`). Its value does not.

    Args:
        model: returns logits, [batch, seq, vocab], or the loss itself after `fuse_head`.
        batch: `input_ids`, and `labels`: [batch, seq], the next token of each position or -100. Has `position_ids` only if
            rows hold several documents. May have `targets`: [any], the indices of the flattened labels that are not -100,
            ascending; and `cu_seqlens`, see `data.cu_seqlens_of`.
        log: called with aux_loss, the balancing loss, if there is one.

    Returns:
        Scalar, fp32.
    """
    labels = batch["labels"].flatten()
    outputs = _forward_with_labels(model, batch, by_target=False)
    loss = outputs.logits
    if loss.ndim > 0:
        loss = F.cross_entropy(loss.flatten(0, 1).float(), labels, ignore_index=IGNORED, reduction="sum")
    if torch.is_grad_enabled() and getattr(outputs, "router_logits", None):
        config = extract_model_from_parallel(model).config.get_text_config()
        if can_balance(config):
            aux_loss = balancing_loss(outputs.router_logits, batch["labels"], experts_of(config)[1])
            loss = loss + config.router_aux_loss_coef * (aux_loss - aux_loss.detach())
            if log is not None:
                log(aux_loss=aux_loss)
    return loss


def _forward_with_labels(model: nn.Module, batch: dict[str, torch.Tensor], *, by_target: bool) -> Any:
    global _pending
    _pending = batch["labels"].flatten(), batch.get("targets"), by_target
    try:
        return forward_rows(model, batch)
    finally:
        _pending = None


def log_probabilities(model: nn.Module, batch: dict[str, torch.Tensor], groups: torch.Tensor, count: int) -> torch.Tensor:
    """Log-probabilities of a batch's target tokens, summed over groups of them.

    Args:
        model, batch: as for `causal_lm_loss`.
        groups: [batch, seq] int64, the group of each position, such as the number of its answer.
        count: of groups.

    Returns:
        [count], fp32; 0 for a group without targets.
    """
    labels, targets, groups = batch["labels"].flatten(), batch.get("targets"), groups.flatten()
    found = _forward_with_labels(model, batch, by_target=True).logits
    if targets is not None:
        labels, groups = labels[targets], groups[targets]
    if found.ndim > 1:  # logits
        found = found.flatten(0, 1)
        found = found if targets is None else found.index_select(0, targets)
        found = F.log_softmax(found, -1, dtype=torch.float32).gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1)
        found = found.masked_fill(labels == IGNORED, 0.0)
    return found.new_zeros(count).index_add(0, groups, found)


def can_balance(config: Any) -> bool:
    """Whether `balancing_loss` works for a model with this config."""
    text = config.get_text_config()
    has_settings = hasattr(text, "output_router_logits") and getattr(text, "router_aux_loss_coef", None) is not None
    return has_settings and all(experts_of(text)) and text.model_type not in NOT_BALANCED


def balancing_loss(router_logits: tuple[torch.Tensor, ...], labels: torch.Tensor, top_k: int) -> torch.Tensor:
    """The auxiliary loss of Switch Transformer (arXiv 2101.03961, equations 4-6): experts x sum of share x probability.

    It is computed for each row and layer, so it does not depend on how the global batch is divided into micro-batches. It is
    the mean over layers, summed over rows; a row counts as often as it has targets. If all experts are used equally, it is
    `top_k` for each target. transformers pools the rows of a micro-batch, and all layers.

    Args:
        router_logits: of each layer, [batch * seq, experts].
        labels: [batch, seq]. Tokens after a row's last target are padding.
        top_k: experts that a token is sent to.

    Returns:
        Scalar, fp32.
    """
    is_target = labels != IGNORED
    used = (is_target.flip(1).cumsum(1).flip(1) > 0).float()
    weights = (used / used.sum(1, keepdim=True).clamp(min=1))[..., None]
    by_row = torch.zeros(len(labels), device=labels.device)
    for logits in router_logits:
        probabilities = logits.float().reshape(*labels.shape, -1).softmax(-1)
        sent = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k).indices, 1.0)
        share, probability = (sent * weights).sum(1), (probabilities * weights).sum(1)  # [batch, experts]
        by_row = by_row + logits.shape[-1] * (share * probability).sum(1)
    return (by_row * is_target.sum(1)).sum() / len(router_logits)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(hidden @ weight.T)[label], chunk by chunk over the tokens.

    The forward pass also turns a chunk's logits into their gradient, so the backward pass recomputes nothing.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        dtype: torch.dtype,
        learning: bool,
        compiled: bool,
    ) -> torch.Tensor:
        """hidden: [tokens, width], weight: [vocab, width], labels: [tokens]; dtype of the matrix products."""
        states, matrix = hidden.to(dtype), weight.to(dtype)
        to_states, to_matrix = (learning and needed for needed in ctx.needs_input_grad[:2])
        states_grad = torch.empty_like(states) if to_states else None
        matrix_grad: torch.Tensor | None = None
        total = torch.zeros((), device=hidden.device, dtype=torch.float32)
        chunk = max(1, MAX_LOGITS // weight.shape[0], MIN_TOKENS if to_matrix else 0)
        chunk *= 2 if compiled and dtype.itemsize == 2 else 1  # compiled, a chunk keeps no fp32 copy of 16-bit logits
        chunk -= chunk % 128 if chunk > 128 else 0  # a multiple of the tile size
        for start in range(0, max(1, len(states)), chunk):  # once even without tokens: DDP waits for each gradient
            here, label = slice(start, start + chunk), labels[start : start + chunk]
            place, left_out = label.clamp(min=0)[:, None], label[:, None] == IGNORED
            part = states[here].masked_fill(left_out, 0.0)  # cheaper than masking the logits
            if compiled and (to_states or to_matrix) and len(label) > 1:
                arguments = part @ matrix.T, place, left_out
                for argument in arguments:
                    torch._dynamo.maybe_mark_dynamic(argument, 0)  # another number of tokens must not recompile
                loss, gradient = _compiled()(*arguments)
                total += loss
            else:
                log_probs = F.log_softmax(part @ matrix.T, -1, dtype=torch.float32)
                total -= log_probs.gather(-1, place).masked_fill_(left_out, 0.0).sum()
                gradient = log_probs.exp_() if to_states or to_matrix else None
                if gradient is not None:
                    gradient.scatter_add_(-1, place, torch.full_like(place, -1, dtype=torch.float32))
                    gradient = gradient.to(dtype)
                del log_probs
            if gradient is not None:
                if states_grad is not None:
                    torch.mm(gradient, matrix, out=states_grad[here]).masked_fill_(left_out, 0.0)
                if to_matrix:
                    product = gradient.T @ part
                    matrix_grad = product.float() if matrix_grad is None else matrix_grad.add_(product)
                del gradient
        ctx.save_for_backward(states_grad, matrix_grad)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        grads = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(g.mul_(gradient).to(dtype) if g is not None else None for g, dtype in grads), None, None, None, None


class _LinearLogProbabilities(torch.autograd.Function):
    """log softmax(hidden @ weight.T)[label] of each token, chunk by chunk.

    If the weight is frozen, the forward pass also computes each token's gradient, and the backward pass recomputes nothing.
    Otherwise the backward pass computes each chunk's logits again.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype, learning: bool
    ) -> torch.Tensor:
        """hidden: [tokens, width], weight: [vocab, width], labels: [tokens]; dtype of the products. [tokens], fp32."""
        to_states, to_matrix = (learning and needed for needed in ctx.needs_input_grad[:2])
        states, matrix = hidden.to(dtype), weight.to(dtype)
        found = torch.empty(len(labels), device=hidden.device)
        states_grad = torch.empty_like(states) if to_states and not to_matrix else None
        for here in _chunks_of(labels, weight):
            log_probs = F.log_softmax(states[here] @ matrix.T, -1, dtype=torch.float32)
            found[here] = log_probs.gather(-1, labels[here].clamp(min=0)[:, None]).squeeze(-1)
            if states_grad is not None:
                torch.mm(_gradient_of(log_probs, labels[here], dtype), matrix, out=states_grad[here])
        ctx.dtype, ctx.hidden_dtype = dtype, hidden.dtype
        ctx.save_for_backward(labels, states_grad, *((hidden, weight) if to_matrix else ()))
        return found.masked_fill_(labels == IGNORED, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        """gradient: [tokens]"""
        labels, states_grad, *inputs = ctx.saved_tensors
        gradient = gradient.masked_fill(labels == IGNORED, 0.0)[:, None]
        if not inputs:
            return (states_grad * gradient).to(ctx.hidden_dtype), None, None, None, None
        hidden, weight = inputs
        states, matrix = hidden.to(ctx.dtype), weight.to(ctx.dtype)
        states_grad, matrix_grad = torch.empty_like(states), torch.zeros_like(weight, dtype=torch.float32)
        for here in _chunks_of(labels, weight):
            log_probs = F.log_softmax(states[here] @ matrix.T, -1, dtype=torch.float32)
            part = _gradient_of(log_probs, labels[here], torch.float32).mul_(gradient[here]).to(ctx.dtype)
            torch.mm(part, matrix, out=states_grad[here])
            matrix_grad += part.T @ states[here]
        return states_grad.to(hidden.dtype), matrix_grad.to(weight.dtype), None, None, None


def _chunks_of(labels: torch.Tensor, weight: torch.Tensor) -> Iterator[slice]:
    size = max(1, MAX_LOGITS // weight.shape[0])
    size -= size % 128 if size > 128 else 0
    for start in range(0, len(labels), size):
        yield slice(start, start + size)


def _gradient_of(log_probs: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of each label's log-probability by the logits, [tokens, vocab]. Overwrites `log_probs`."""
    place = labels.clamp(min=0)[:, None]
    gradient = log_probs.exp_().neg_()
    return gradient.scatter_add_(-1, place, torch.ones_like(place, dtype=torch.float32)).to(dtype)


def _loss_and_gradient(
    logits: torch.Tensor, place: torch.Tensor, left_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk's loss, and its gradient with respect to the logits. Compiled, it stores no other tensor of the logits' size.

    Args:
        logits: [tokens, vocab].
        place: [tokens, 1], the target tokens.
        left_out: [tokens, 1] bool, tokens that the loss does not count.
    """
    log_probs = F.log_softmax(logits, -1, dtype=torch.float32)
    loss = -log_probs.gather(-1, place).masked_fill(left_out, 0.0).sum()
    is_target = torch.arange(logits.shape[1], device=logits.device) == place
    return loss, (log_probs.exp() - is_target.float()).to(logits.dtype)


@cache
def _compiled() -> Any:
    return torch.compile(_loss_and_gradient)


def _forward(head: nn.Linear, compiled: bool, hidden: torch.Tensor) -> torch.Tensor:
    """The head's logits, or the loss or log-probabilities while they are asked for."""
    if _pending is None:
        return F.linear(hidden, head.weight)
    (labels, targets, by_target), states = _pending, hidden.flatten(0, -2)
    if targets is not None:
        labels, states = labels[targets], states.index_select(0, targets)
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        if by_target:
            return _LinearLogProbabilities.apply(states, head.weight, labels, dtype, torch.is_grad_enabled())
        return _LinearCrossEntropy.apply(states, head.weight, labels, dtype, torch.is_grad_enabled(), compiled)


def is_plain(head: Any) -> bool:
    """Whether a head is one matrix and no more: no bias, no adapter, not quantised."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and head.bias is None


def attach(head: Any, *, compiled: bool = False) -> None:
    """Let a plain head compute the loss when `causal_lm_loss` asks for it."""
    head.forward = partial(_forward, head, compiled)


@torch.no_grad()
def fuse_head(accelerator: Accelerator, model: nn.Module, vocab_size: int, *, compiled: bool = False) -> str:
    """Let the model's head compute the loss, if the result is the same. Returns a line for the summary.

    Both losses are compared on a few tokens. Models that change the head's logits (soft caps, scales) keep the plain one.
    Every rank calls this, after the model is prepared: a sharded model's forward is a collective.

    Args:
        compiled: compile the operations between the matrix products where gradients are needed.
    """
    head = accelerator.unwrap_model(model).get_output_embeddings()
    if not is_plain(head):
        return "not fused: the head is not a plain matrix"
    if accelerator.mixed_precision == "fp16":  # the loss scale must be applied before gradients are computed
        return "not fused, for fp16"
    if data_parallel_size() < world_size():  # tensor parallelism
        return "not fused: tensor parallelism splits the logits"
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, vocab_size, (2, 1, 16), generator=generator).to(accelerator.device)
    labels[0, 3] = IGNORED
    training = model.training
    model.eval()
    trial = {"input_ids": tokens, "labels": labels}
    # Compiled blocks must not see these few tokens: they would specialise on the size of their first input.
    why = f"{type(without_adapters(accelerator.unwrap_model(model))).__name__} changes what its head returns"
    with torch.compiler.set_stance("force_eager"):
        plain = causal_lm_loss(model, trial)
        attach(head, compiled=compiled)
        try:
            fused = causal_lm_loss(model, trial)
        except Exception as error:  # a model may raise anything if it gets a loss in place of logits
            end_step(model)
            if is_out_of_memory(error):
                raise
            fused, why = None, first_line(error)
    model.train(training)
    if fused is not None and fused.dtype == torch.float32 and torch.allclose(plain.float(), fused, rtol=1e-3):
        return "fused with the head, in chunks of tokens" + (", compiled" if compiled else "")
    del head.forward
    return f"not fused: {why}"
