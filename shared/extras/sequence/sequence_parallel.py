"""Sequence parallelism as a strategy: DDP or FSDP2, whose neighbouring ranks share rows."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from shared.config.options import OptimConfig
from shared.data.loader import cu_seqlens_of
from shared.data.order import Batch
from shared.extras.sequence import sequence
from shared.extras.sequence.stretches import cut, own_part
from shared.models import angles
from shared.models.attention import forward_rows
from shared.models.blocks import as_in_an_evaluation
from shared.models.isolation import FP32_ERROR, MAX_ERROR, relative_error
from shared.models.loading import parts_that_choose, without_adapters
from shared.parallel.strategy import Strategy
from shared.process import ranks
from shared.process.errors import ConfigError, reason_of


class SequenceParallel(Strategy):
    """Each group of `sp_size` neighbouring ranks computes the same rows, each a stretch of tokens.

    To Accelerate they are more ranks of DDP or FSDP2, which average all ranks' gradients.
    """

    title = "sp_size in the launch config"
    lacks = frozenset(("--on_policy", "--teacher_logits", "--loss_type reward"))

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        sequence.group()

    def prepare(
        self, model: nn.Module, optimizers: list[Any], options: OptimConfig
    ) -> tuple[Any, list[Any]]:
        model, optimizers = super().prepare(model, optimizers, options)
        self.require_equal_logits(model)
        return model, optimizers

    def backward(self, loss: torch.Tensor, scale: float) -> None:
        # The loss is of whole rows, its gradient of this rank's tokens, and reduction averages.
        super().backward(loss, scale * ranks.sequence_ranks())

    def require_equal_logits(self, model: Any) -> None:
        """Compare the logits of divided rows, of one document and of two, with those of whole rows.
        Every rank calls this, with the prepared model.

        Raises:
            ConfigError: they differ, or would in longer rows than those of the trial.
        """
        # the first rank's part may be right where those of others are not
        if why := next(filter(None, gather_object([self._why_not(model)])), ""):
            kind = type(without_adapters(model)).__name__
            raise ConfigError(f"{kind} does not work with {self.title}: {why}; use fsdp2.yaml")

    @torch.no_grad()
    def _why_not(self, model: Any) -> str:
        whole: Any = without_adapters(model)
        config = whole.config.get_text_config()
        count = ranks.sequence_ranks()
        if parts_that_choose(whole):
            return "it chooses the tokens that it sees from the whole row"
        if getattr(config, "attn_temperature_tuning", False):  # by the local place
            return "its attention is scaled by a token's place in the row"
        if kind := angles.kind_of(whole):  # of which each rank has a part
            return f"its {kind} positions depend on a row's length"
        if config._attn_implementation != "sdpa":
            return f"its attention is {config._attn_implementation}, not sdpa"
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, config.vocab_size, (2, 8 * count), generator=generator)
        one = {"input_ids": tokens, "labels": tokens}
        positions = torch.arange(8 * count).expand(2, -1) % (4 * count + 1)
        bounds = torch.from_numpy(cu_seqlens_of(positions.numpy()))
        two = one | {"position_ids": positions, "cu_seqlens": bounds}
        try:
            with as_in_an_evaluation(model):
                errors = [self._error(model, batch) for batch in (one, two)]
        except Exception as error:  # a model may raise anything
            return reason_of(error)
        in_16_bits = self.accelerator.mixed_precision != "no"
        in_16_bits |= next(whole.parameters()).dtype.itemsize == 2
        limit = 4 * MAX_ERROR if in_16_bits else FP32_ERROR
        if all(error < limit for error in errors):  # NaN is in no order
            return ""
        return "its logits differ from those of whole rows, as with recurrent layers"

    def _error(self, model: Any, batch: Batch) -> float:
        expected, found = (
            forward_rows(model, {name: t.to(self.accelerator.device) for name, t in rows.items()})
            for rows in (batch, cut(batch))
        )
        expected = own_part(expected.logits)
        return relative_error(found.logits, expected)
