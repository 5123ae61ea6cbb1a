"""The evaluation of a language model that is fine-tuned on conversations."""

import math
from typing import Any

from torch import nn

from shared.answers.answers import Score, log_answers
from shared.models.fused_head import TokenLoss
from shared.run.run import Run
from shared.text.loaders import ChatData


def evaluate(run: Run, model: nn.Module, data: ChatData, tokenizer: Any, score: Score) -> None:
    """Log the loss per target token and the perplexity of the validation samples and, with
    --eval_answers, the scores of the answers that the model gives to some of them. Every rank calls
    this.

    Args:
        score: see `answers.log_answers`.
    """
    with run.evaluating(model):
        loss = run.mean_loss(data.validation, TokenLoss(model))
        values = {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 100))}
        scores = log_answers(run, model, data.held_out, tokenizer, score)
        run.log_evaluation(values | scores)
