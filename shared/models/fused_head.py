"""A model's head that computes the loss in chunks of tokens: all logits at once would dominate peak
memory.

`fuse_head` gives a model a `FusedHead`, if the result is the same.
"""

import contextlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from shared.data.order import IGNORED, Batch
from shared.models.attention import computed_in, forward_rows
from shared.models.blocks import as_in_an_evaluation
from shared.models.loading import without_adapters
from shared.models.loss import MIN_TOKENS, causal_lm_loss, log_probabilities_in_chunks
from shared.parallel.gradients import end_step
from shared.process.errors import reason_of

MAX_LOGITS = 2**26  # of a chunk: 256 MB in fp32
KNOWN_LOGITS = (1e-6, 1.0, 1e30, -3.0, 40.0, -700.0, 0.0)  # see `measure_head`


class TokenLoss:
    """`causal_lm_loss` of a model, computed by its head where that gives the same.

    Args:
        model: prepared.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def begin(self, setup: Any) -> None:
        """Called by `Setup.start`: see `fuse_head`."""
        compiled = setup.config.speed.torch_compile
        setup.details["loss"] = fuse_head(setup.accelerator, self.model, compiled=compiled)

    def __call__(self, batch: Batch, *, log: Callable[..., None] | None = None) -> torch.Tensor:
        return causal_lm_loss(self.model, batch, log=log)


class _InOnePass(torch.autograd.Function):
    """log softmax(logits)[label] of each token, chunk by chunk. The backward pass recomputes
    nothing: the forward pass has turned each chunk's logits into their gradient.

    With trained weights it is for the sum alone: their gradient is added up over tokens that count
    the same.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        states: torch.Tensor,
        labels: torch.Tensor,
        logits_of: Callable[[torch.Tensor], torch.Tensor],
        sources: list[torch.Tensor],
        size: int,
        compiled: bool,
        *trained: torch.Tensor,
    ) -> torch.Tensor:
        """states: [tokens, width]; labels: [tokens]. `logits_of` makes logits, [size, vocab], of a
        chunk's states and of `sources`: casts of the `trained` weights. Gradients by the sources
        are added up in fp32.
        """
        to_states = ctx.needs_input_grad[0]
        states_grad = torch.empty_like(states) if to_states else None
        sums: list[torch.Tensor] = []
        result = torch.empty(len(labels), device=states.device)
        # once even without tokens: DDP waits for each gradient
        for start in range(0, max(1, len(states)), size):
            chunk = slice(start, start + size)
            label = labels[start : start + size]
            target = label.clamp(min=0)[:, None]
            left_out = label[:, None] == IGNORED
            # cheaper than masking the logits
            part = states[chunk].masked_fill(left_out, 0.0).requires_grad_(to_states)
            with torch.enable_grad():
                logits = logits_of(part)
            edge: Any = get_gradient_edge(logits)  # what needs no logits lets them go
            logits = logits.detach()
            if compiled and len(label) > 1:
                for argument in (logits, target, left_out):
                    # another number of tokens must not recompile
                    torch._dynamo.maybe_mark_dynamic(argument, 0)
                result[chunk], gradient = _compiled()(logits, target, left_out)
                del logits
            else:
                dtype = logits.dtype
                gradient = F.log_softmax(logits, -1, dtype=torch.float32)
                del logits
                result[chunk] = gradient.gather(-1, target).masked_fill_(left_out, 0.0).squeeze(-1)
                gradient.exp_().scatter_add_(
                    -1, target, torch.full_like(target, -1, dtype=torch.float32)
                )
                gradient = gradient.to(dtype)
            # a bias, whose gradient does not vanish with the states
            if any(source.ndim == 1 for source in sources):
                gradient.masked_fill_(left_out, 0.0)
            wanted = [part, *sources] if to_states else sources
            products = list(torch.autograd.grad([edge], wanted, gradient))
            del gradient
            if states_grad is not None:
                states_grad[chunk] = products.pop(0).masked_fill_(left_out, 0.0)
            sums = [a.add_(b) for a, b in zip(sums, products, strict=False)] or [
                product.float() for product in products
            ]
        ctx.save_for_backward(states_grad, *sums)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        states_grad, *sums = ctx.saved_tensors
        if states_grad is not None:
            states_grad.mul_(-gradient[:, None])
        return (
            states_grad,
            None,
            None,
            None,
            None,
            None,
            *(product.mul_(-gradient[:1].sum()) for product in sums),
        )


def _loss_and_gradient(
    logits: torch.Tensor, place: torch.Tensor, left_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a chunk's targets, [tokens], and the gradient of the chunk's loss by the
    logits. Compiled, it stores no other tensor of the logits' size.

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


class FusedHead:
    """Lets a model's head compute the loss, or log-probabilities, while they are `asked` for:
    `model.fused_head`.

    Args:
        model: not wrapped.
        function: what the model computes of its head's logits; None: nothing.
        compiled: see `fuse_head`.
    """

    def __init__(self, model: Any, function: Any, compiled: bool | None = False) -> None:
        self.function = function
        self.compiled = compiled
        # Labels, targets, and whether each target's log-probability is asked for
        self.asked: tuple[torch.Tensor, torch.Tensor | None, bool] | None = None
        self.result: torch.Tensor | None = None
        head = model.get_output_embeddings()
        # PEFT's `modules_to_save`: the wrapper chooses one of them.
        heads = (
            [head.original_module, *head.modules_to_save.values()]
            if hasattr(head, "modules_to_save")
            else [head]
        )
        for one in heads:
            # a hook could not keep it from computing all logits
            one.forward = partial(self.forward, one)
        model.register_forward_hook(self._give_result, prepend=True)  # before FSDP's own

    def _give_result(self, model: nn.Module, args: Any, outputs: Any) -> None:
        # not what the model makes of it; but hooks of FSDP and DeepSpeed are in its gradient
        if self.result is not None:
            outputs.logits = self.result + 0 * outputs.logits

    def forward(self, head: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The head's logits, or the loss or log-probabilities while they are asked for."""
        if self.asked is None:
            return type(head).forward(head, hidden)
        (labels, targets, by_target) = self.asked
        states = hidden.flatten(0, -2)
        if targets is not None:
            labels = labels[targets]
            states = states.index_select(0, targets)
        device = hidden.device.type
        mixed = torch.is_autocast_enabled(device)
        dtype = computed_in(hidden.device, hidden.dtype)
        # no adapter, not quantised
        is_matrix = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
        trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
        learning = torch.is_grad_enabled() and (states.requires_grad or bool(trained))
        # In fp16, the gradient of the logits needs the loss scale, which comes with the backward
        # pass. And ZeRO-3 has an adapter's weights only while the adapter runs.
        again = learning and (
            dtype == torch.float16 or (bool(trained) and (by_target or not is_matrix))
        )
        size = max(MAX_LOGITS // head.out_features, MIN_TOKENS if trained else 1)
        # of more copies of the logits
        size = max(1, size // (1 + (again or not is_matrix) + (self.function is not None)))
        # no fp32 copy
        size *= 2 if self.compiled and dtype.itemsize == 2 and is_matrix and not again else 1
        size -= size % 128 if size > 128 else 0  # a multiple of the tile size
        casts: list[torch.Tensor] = []
        # cast once for all chunks, whose products are added up in fp32
        if is_matrix and not (again and trained):
            casts = [
                p.detach().to(dtype).requires_grad_(p.requires_grad) for p in head.parameters()
            ]

        def logits_of(part: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device, enabled=mixed, cache_enabled=False):
                logits = F.linear(part, *casts) if casts else type(head).forward(head, part)
            return logits if self.function is None else self.function(logits)

        with torch.autocast(device, enabled=False):
            states = states.to(dtype)
            if learning and not again:
                sources = [cast for cast in casts if cast.requires_grad]
                log_probs = _InOnePass.apply(
                    states, labels, logits_of, sources, size, self.compiled, *trained
                )
            else:
                log_probs = log_probabilities_in_chunks(states, labels, logits_of, size)
        self.result = log_probs if by_target else -log_probs.sum()
        return self.result


@torch.enable_grad()
def measure_head(model: nn.Module, whole: Any, batch: Batch) -> Any:
    """What a model computes of its head's logits x: cap * tanh(factor * x / cap), or None if it
    leaves them as they are.

    The head is made to return known numbers in fp64. The model's logits show factor and cap.

    Raises:
        ValueError: the model computes something else, or a trained weight takes part.
    """
    known: list[torch.Tensor] = []

    def give_known(module: nn.Module, args: Any, logits: torch.Tensor) -> torch.Tensor:
        row = torch.tensor(
            (KNOWN_LOGITS * logits.shape[-1])[: logits.shape[-1]], dtype=torch.float64
        )
        known.append(row.to(logits.device).repeat(*logits.shape[:-1], 1))
        return known[0]

    # Without a backward pass after it, DDP would reduce the first micro-batch's gradients by
    # themselves.
    no_sync = (
        model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()
    )
    with whole.get_output_embeddings().register_forward_hook(give_known), no_sync:
        logits = forward_rows(model, batch).logits
    small, one, large = logits.flatten()[:3].tolist()
    is_capped = abs(large) < 1e20

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return torch.tanh(x * (small / KNOWN_LOGITS[0] / large)) * large if is_capped else x * one

    same = logits.shape == known[0].shape and torch.allclose(
        logits.float(), function(known[0]).float(), rtol=1e-5
    )
    if logits.requires_grad or not same:
        raise ValueError(f"{type(whole).__name__} changes what its head returns")
    return function if is_capped or one != 1 else None


@torch.no_grad()
def fuse_head(
    accelerator: Accelerator, model: Any, *, compiled: bool | None = False, kind: Any = FusedHead
) -> str:
    """Let the model's head compute the loss, if the result is the same. Returns a line for the
    summary.

    Both losses are compared on a few tokens. Each chunk's logits are computed twice with fp16, by
    adapters of the head, and for log-probabilities by a trained head.
    Every rank calls this, after the model is prepared: a sharded model's forward is a collective.

    Args:
        compiled: compile the operations between the matrix products where gradients are needed.
        kind: `FusedHead`, or what does more.
    """
    whole = without_adapters(model)
    generator = torch.Generator().manual_seed(0)
    vocab_size = whole.config.get_text_config().vocab_size
    tokens, labels = torch.randint(0, vocab_size, (2, 1, 16), generator=generator).to(
        accelerator.device
    )
    labels[0, 3] = IGNORED
    trial = {"input_ids": tokens, "labels": labels}
    summary = "fused with the head, in chunks of tokens" + (", compiled" if compiled else "")
    with as_in_an_evaluation(model):
        try:
            plain = causal_lm_loss(model, trial)
            function = measure_head(model, whole, trial)
            model.fused_head = kind(whole, function, compiled)
            loss = causal_lm_loss(model, trial)
            if loss.dtype != torch.float32 or not torch.allclose(plain.float(), loss, rtol=1e-3):
                raise ValueError(f"{type(whole).__name__} changes what its head returns")
        # a model may raise anything if it gets a loss in place of logits
        except Exception as error:
            summary = f"not fused: {reason_of(error)}"
            model.fused_head = None
        finally:
            end_step(model)
    return summary
