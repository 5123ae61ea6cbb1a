"""What a student predicts beside its teacher, chunk by chunk of tokens: all logits of both at once
would dominate peak memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shared.data.order import IGNORED, Batch
from shared.models.attention import forward_rows
from shared.models.fused_head import MAX_LOGITS, FusedHead
from shared.models.loading import without_adapters
from shared.models.loss import over_ranks

COPIES = 4  # of a chunk's logits, of each model
MIN_CHUNK = 256  # tokens: each adds to a gradient of the head's size
LOGGED = ("kl", "cross_entropy", "teacher_cross_entropy", "agreement")


class Compared(NamedTuple):
    """Predictions for a chunk of target tokens, fp32. Where the teacher's were kept, the classes
    are its most likely tokens, and all others together as the last.
    """

    student: torch.Tensor  # log-probabilities at the temperature, [tokens, classes]
    teacher: torch.Tensor  # likewise
    cross_entropy: torch.Tensor  # of the student by the labels, at temperature 1, [tokens]
    teacher_cross_entropy: torch.Tensor  # likewise
    agreement: torch.Tensor  # whether both find the same token most likely, [tokens] bool


class OpenHead(FusedHead):
    """Hands the states before a model's head to `use`, with what makes logits of them, while that
    is set. The model then returns what `use` does.
    """

    use: Any = None

    def forward(self, head: Any, hidden: torch.Tensor) -> torch.Tensor:
        if self.use is None:
            return super().forward(head, hidden)

        def logits_of(part: torch.Tensor) -> torch.Tensor:
            logits = type(head).forward(head, part)
            return (logits if self.function is None else self.function(logits)).float()

        self.result = self.use(hidden, logits_of)
        return self.result


def at_head(model: Any, batch: Batch, use: Any) -> torch.Tensor:
    """What `use` makes of the states of a batch's targets, [targets, width], of their labels, and
    of a function that turns states into logits, fp32. A model whose head cannot be opened gives its
    logits as states.
    """
    labels = batch["labels"].flatten()
    if (targets := batch.get("targets")) is None:
        targets = (labels != IGNORED).nonzero().squeeze(-1)

    def of_targets(hidden: torch.Tensor, logits_of: Any = torch.Tensor.float) -> torch.Tensor:
        return use(hidden.flatten(0, -2).index_select(0, targets), labels[targets], logits_of)

    head = model.fused_head
    if head is None:
        return of_targets(forward_rows(model, batch).logits)
    head.use = of_targets
    try:
        return forward_rows(model, batch).logits
    finally:
        head.use = head.result = None


def width_of(model: Any) -> int:
    """How many logits a model gives."""
    return int(without_adapters(model).config.get_text_config().vocab_size)


def chunk_size(model: Any) -> int:
    """Tokens of a chunk."""
    return max(MIN_CHUNK, MAX_LOGITS // width_of(model) // COPIES)


def scored(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probabilities at the temperature, [tokens, vocab]; cross-entropy at 1, [tokens])."""
    loss = F.cross_entropy(logits, labels, reduction="none")
    return (logits / temperature).log_softmax(-1), loss


def compare(
    model: Any,
    teacher: Any,
    batch: Batch,
    loss: Callable[[Compared], torch.Tensor],
    temperature: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(the loss, and values for the log by name), summed over a batch's targets.

    Args:
        model: the student, prepared.
        teacher: `teacher.Live` or `kept.Kept`.
        loss: `Compared` -> [tokens].
    """
    taught, predict = teacher(batch)
    size = chunk_size(model)

    def use(states: torch.Tensor, labels: torch.Tensor, logits_of: Any) -> torch.Tensor:
        def part(begin: int) -> torch.Tensor:
            places = slice(begin, begin + size)
            logits = logits_of(states[places])
            p = predict(taught[places], logits, labels[places], temperature)
            divergence = F.kl_div(p.student, p.teacher, reduction="sum", log_target=True)
            return torch.stack([value.sum() for value in (loss(p), divergence, *p[2:])])

        begins = range(0, max(1, len(labels)), size)  # once without targets, too: DDP waits
        return torch.stack([checkpoint(part, n, use_reentrant=False) for n in begins]).sum(0)

    total, *sums = over_ranks(batch, at_head(model, batch, use)).unbind()
    return total, {name: value.detach() for name, value in zip(LOGGED, sums, strict=True)}
