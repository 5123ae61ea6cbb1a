"""The loss of a language model, computed in chunks of tokens: all logits at once would dominate peak memory.

If a batch has `targets`, logits are computed only for them, not for prompts and padding. After `fuse_head`, the head itself
returns the loss, or the log-probability of each target. `causal_lm_loss` and `log_probabilities` hand it the labels in a
global, since the model in between cannot.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

from shared.data.order import IGNORED
from shared.models.attention import forward_rows
from shared.models.counts import experts_of
from shared.models.loading import without_adapters
from shared.parallel.gradients import end_step
from shared.process.errors import first_line, is_out_of_memory

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


class _HeadLoss(torch.autograd.Function):
    """Sum of -log softmax(logits)[label], or log softmax(logits)[label] of each token, chunk by chunk over the tokens.

    The forward pass also turns a chunk's logits into their gradient, so the backward pass recomputes nothing. With trained
    weights it gives the sum alone: the gradient of the weights is added up over tokens that count the same.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        logits_of: Callable[..., torch.Tensor],
        size: int,
        dtype: torch.dtype,
        by_target: bool,
        learning: bool,
        compiled: bool,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        """hidden: [tokens, width]; labels: [tokens]; weights: [vocab, width] and perhaps a bias, [vocab]. `logits_of` makes
        logits, [size, vocab], of a chunk's hidden states and the weights, both cast to `dtype`."""
        to_states, *to_weights = (learning and needed for needed in (ctx.needs_input_grad[0], *ctx.needs_input_grad[8:]))
        learning = to_states or any(to_weights)
        states = hidden.to(dtype)
        inputs = [w.detach().to(dtype).requires_grad_(needed) for w, needed in zip(weights, to_weights, strict=True)]
        states_grad = torch.empty_like(states) if to_states else None
        grads: list[torch.Tensor | None] = [None] * len(weights)
        found = torch.empty(len(labels), device=hidden.device)
        for start in range(0, max(1, len(states)), size):  # once even without tokens: DDP waits for each gradient
            here, label = slice(start, start + size), labels[start : start + size]
            place, left_out = label.clamp(min=0)[:, None], label[:, None] == IGNORED
            part = states[here].masked_fill(left_out, 0.0).requires_grad_(to_states)  # cheaper than masking the logits
            with torch.set_grad_enabled(learning):
                logits = logits_of(part, *inputs)
            edge: Any = get_gradient_edge(logits) if learning else None  # what needs no logits lets them go
            logits = logits.detach()
            if compiled and learning and len(label) > 1:
                for argument in (logits, place, left_out):
                    torch._dynamo.maybe_mark_dynamic(argument, 0)  # another number of tokens must not recompile
                found[here], gradient = _compiled()(logits, place, left_out)
                del logits
            else:
                log_probs = F.log_softmax(logits, -1, dtype=torch.float32)
                del logits
                found[here] = log_probs.gather(-1, place).masked_fill_(left_out, 0.0).squeeze(-1)
                gradient = log_probs.exp_() if learning else None
                if gradient is not None:
                    gradient.scatter_add_(-1, place, torch.full_like(place, -1, dtype=torch.float32))
                    gradient = gradient.to(dtype)
                del log_probs
            if gradient is not None:
                if len(weights) > 1:  # the gradient of the bias
                    gradient.masked_fill_(left_out, 0.0)
                wanted = [tensor for tensor in (part, *inputs) if tensor.requires_grad]
                products = list(torch.autograd.grad([edge], wanted, gradient))
                del gradient
                if states_grad is not None:
                    states_grad[here] = products.pop(0).masked_fill_(left_out, 0.0)
                for i, needed in enumerate(to_weights):
                    if needed:
                        product, before = products.pop(0), grads[i]
                        grads[i] = product.float() if before is None else before.add_(product)
        ctx.save_for_backward(states_grad, *grads)
        ctx.dtypes, ctx.by_target = (hidden.dtype, *(w.dtype for w in weights)), by_target
        return found if by_target else -found.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        """gradient: scalar or [tokens]"""
        gradient = -gradient[:, None] if ctx.by_target else gradient
        grads = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        states_grad, *others = (g.mul_(gradient).to(dtype) if g is not None else None for g, dtype in grads)
        return states_grad, None, None, None, None, None, None, None, *others


def _recomputed(
    hidden: torch.Tensor, labels: torch.Tensor, logits_of: Callable[[torch.Tensor], torch.Tensor], size: int
) -> torch.Tensor:
    """log softmax(logits)[label] of each token, chunk by chunk; the backward pass computes each chunk's logits again."""

    def chunk(part: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        left_out = label == IGNORED
        log_probs = F.log_softmax(logits_of(part.masked_fill(left_out[:, None], 0.0)), -1, dtype=torch.float32)
        return log_probs.gather(-1, label.clamp(min=0)[:, None]).squeeze(-1).masked_fill(left_out, 0.0)

    parts = zip(hidden.split(size), labels.split(size), strict=True)
    return torch.cat([checkpoint(chunk, part, label, use_reentrant=False) for part, label in parts])


def _loss_and_gradient(
    logits: torch.Tensor, place: torch.Tensor, left_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a chunk's targets, [tokens], and the gradient of the chunk's loss by the logits. Compiled, it
    stores no other tensor of the logits' size.

    Args:
        logits: [tokens, vocab].
        place: [tokens, 1], the target tokens.
        left_out: [tokens, 1] bool, tokens that the loss does not count.
    """
    log_probs = F.log_softmax(logits, -1, dtype=torch.float32)
    found = log_probs.gather(-1, place).masked_fill(left_out, 0.0).squeeze(-1)
    is_target = torch.arange(logits.shape[1], device=logits.device) == place
    return found, (log_probs.exp() - is_target.float()).to(logits.dtype)


@cache
def _compiled() -> Any:
    return torch.compile(_loss_and_gradient)


class _Noted:
    """Stands for a head's logits in the rest of a model's forward, and notes what is done to them: scales, caps, casts."""

    def __init__(self, value: torch.Tensor, steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()) -> None:
        self.value, self.steps = value, steps

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> "_Noted":
        if any(isinstance(argument, torch.Tensor) for argument in args):
            raise TypeError("its logits meet another tensor")  # which may have a gradient
        noted, named = next(argument for argument in args if isinstance(argument, cls)), kwargs or {}
        place, given = args.index(noted), [None if argument is noted else argument for argument in args]
        step = lambda logits: function(*given[:place], logits, *given[place + 1 :], **named)  # noqa: E731
        return cls(noted.value, (*noted.steps, step))

    def __getattr__(self, name: str) -> Any:
        method = getattr(torch.Tensor, name)
        return lambda *args, **named: self.__torch_function__(method, (), (self, *args), named)

    def __mul__(self, other: Any) -> "_Noted":
        return self.__torch_function__(torch.mul, (), (self, other))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> "_Noted":
        return self.__torch_function__(torch.div, (), (self, other))


# FSDP looks for tensors in what a module returns.
register_pytree_node(
    _Noted, lambda noted: ([noted.value], noted.steps), lambda value, steps: _Noted(next(iter(value)), steps)
)


class _Fused:
    """Lets a model's head compute the loss, or log-probabilities, while they are asked for; see `attach`."""

    def __init__(self, model: Any, *, compiled: bool, recompute: bool) -> None:
        self.compiled, self.recompute = compiled, recompute
        self.steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...] | None = None  # from the head's logits to the model's
        head = model.get_output_embeddings()
        # PEFT's `modules_to_save`: the wrapper chooses one of them.
        self.heads = [head.original_module, *head.modules_to_save.values()] if hasattr(head, "modules_to_save") else [head]
        for one in self.heads:
            one.forward = partial(self.forward, one)
        self.hook = model.register_forward_hook(self._take_out, prepend=True)  # before FSDP's own

    def detach(self) -> None:
        self.hook.remove()
        for one in self.heads:
            del one.forward

    def _take_out(self, model: nn.Module, args: Any, outputs: Any) -> Any:
        if isinstance(outputs.logits, _Noted):
            self.steps, outputs.logits = outputs.logits.steps, outputs.logits.value
        return outputs

    def _logits(self, head: nn.Module, states: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        logits = F.linear(states, *weights) if weights else type(head).forward(head, states)
        for step in self.steps or ():
            logits = step(logits)
        return logits

    def forward(self, head: Any, hidden: torch.Tensor) -> Any:
        """The head's logits, or the loss or log-probabilities while they are asked for."""
        if _pending is None:
            return type(head).forward(head, hidden)
        (labels, targets, by_target), states = _pending, hidden.flatten(0, -2)
        if targets is not None:
            labels, states = labels[targets], states.index_select(0, targets)
        device, learning = hidden.device.type, torch.is_grad_enabled()
        mixed = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if mixed else hidden.dtype
        weights = [w for w in (head.weight, head.bias) if w is not None] if is_linear(head) else []
        trained = any(parameter.requires_grad for parameter in head.parameters())
        again = not weights or (learning and (self.recompute or (by_target and trained)))
        size = max(MAX_LOGITS // head.out_features, MIN_TOKENS if trained else 1)
        size = max(1, size // (1 + again + bool(self.steps)))  # of more copies of the logits
        size *= 2 if self.compiled and dtype.itemsize == 2 and not again else 1  # no fp32 copy of 16-bit logits
        size -= size % 128 if size > 128 else 0  # a multiple of the tile size
        logits_of = partial(self._logits, head)
        if again:  # each chunk casts weights again, so that their gradients are added up in fp32
            with torch.autocast(device, dtype if mixed else None, enabled=mixed, cache_enabled=False):
                found = _recomputed(states, labels, logits_of, size)
                result = found if by_target else -found.sum()
        else:
            with torch.autocast(device, enabled=False):
                arguments = (labels, logits_of, size, dtype, by_target, learning, self.compiled)
                result = _HeadLoss.apply(states, *arguments, *weights)
        return result if self.steps == () else _Noted(result)


def is_linear(head: Any) -> bool:
    """Whether a head is one matrix, and perhaps a bias: no adapter, not quantised."""
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward


def attach(model: Any, *, compiled: bool = False, recompute: bool = False) -> _Fused:
    """Let a model's head compute the loss when `causal_lm_loss` asks for it; from the second time on it is right.

    The first time shows what the model does to its head's logits. Later, the head does that to each chunk of them.

    Args:
        model: not wrapped.
        compiled: see `fuse_head`.
        recompute: compute logits again in the backward pass, with the gradient that comes there, such as a loss scale.
    """
    return _Fused(model, compiled=compiled, recompute=recompute)


@torch.no_grad()
def fuse_head(accelerator: Accelerator, model: nn.Module, vocab_size: int, *, compiled: bool = False) -> str:
    """Let the model's head compute the loss, if the result is the same. Returns a line for the summary.

    Both losses are compared on a few tokens. Heads that are more than a matrix and a bias, and fp16, compute each chunk's
    logits twice. Every rank calls this, after the model is prepared: a sharded model's forward is a collective.

    Args:
        compiled: compile the operations between the matrix products where gradients are needed.
    """
    whole = without_adapters(accelerator.unwrap_model(model))
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, vocab_size, (2, 1, 16), generator=generator).to(accelerator.device)
    labels[0, 3] = IGNORED
    training = model.training
    model.eval()
    trial = {"input_ids": tokens, "labels": labels}
    # Compiled blocks must not see these few tokens: they would specialise on the size of their first input.
    why = f"{type(whole).__name__} changes what its head returns"
    with torch.compiler.set_stance("force_eager"):
        plain = causal_lm_loss(model, trial)
        fusion = attach(whole, compiled=compiled, recompute=accelerator.mixed_precision == "fp16")
        try:
            causal_lm_loss(model, trial)
            fused = causal_lm_loss(model, trial)
        except Exception as error:  # a model may raise anything if it gets a loss in place of logits
            end_step(model)
            if is_out_of_memory(error):
                raise
            fused, why = None, first_line(error)
    model.train(training)
    if fused is not None and fused.dtype == torch.float32 and torch.allclose(plain.float(), fused, rtol=1e-3):
        return "fused with the head, in chunks of tokens" + (", compiled" if compiled else "")
    fusion.detach()
    return f"not fused: {why}"
