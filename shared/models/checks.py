"""Whether a model can be trained on text."""

import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from shared.models.counts import experts_of
from shared.models.loss import can_balance
from shared.models.tokenizers import vocabulary_size
from shared.parallel import shards
from shared.process.errors import ConfigError
from shared.process.printing import note


def context_of(model: Any) -> int:
    """Tokens that a model, without wrappers, can see at once; sys.maxsize if any number."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    # RoBERTa's positions begin after that of the padding token
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if "position_embeddings" in name and padding is not None and len(module.weight) == context:
            return int(context - padding - 1)
    return context or sys.maxsize


def require_fit(model: Any, tokenizer: Any, seq_length: int, flag: str = "--seq_length") -> None:
    """Refuse sequences longer than the model's context, tokens without an embedding, and models
    that see later tokens.

    Args:
        flag: what makes sequences so long.

    Raises:
        ConfigError: with both numbers, or what is wrong.
    """
    text = model.config.get_text_config()
    if getattr(text, "cross_attention_layers", None):  # DDP would wait for their gradients
        raise ConfigError(
            f"{type(model).__name__} has blocks that only images reach: text cannot train them"
        )
    # Encoders can be made decoders, by a setting that GPT-NeoX has, too, and never looks at.
    sees_all = getattr(text, "is_decoder", True) is False and "gpt_neox" not in text.model_type
    if sees_all or text.model_type in ("cpmant", "prophetnet", "xlm", "xlnet"):
        raise ConfigError(
            f"{type(model).__name__} sees the tokens that it is to predict "
            "(its config says is_decoder: "
            f"{str(getattr(text, 'is_decoder', 'nothing')).lower()}): take a causal model"
        )
    if experts_of(text)[0]:
        if not can_balance(text):
            note(f"no loss balances the experts: there is none for {type(model).__name__}")
        elif not text.output_router_logits:
            note("no loss balances the experts: output_router_logits is off in the model's config")
        else:
            coefficient = text.router_aux_loss_coef
            note(
                "aux_loss balances the experts, times the config's "
                f"router_aux_loss_coef {coefficient:g}"
            )
    require_tokens_fit(model, tokenizer, seq_length, flag)


def require_tokens_fit(
    model: Any, tokenizer: Any, seq_length: int, flag: str = "--seq_length"
) -> None:
    """Refuse sequences longer than the model's context, and tokens without an embedding. Raises
    ConfigError.
    """
    if seq_length > (context := context_of(model)):
        raise ConfigError(
            f"{flag} {seq_length} is longer than the model's context of {context} "
            "tokens: give at most that"
        )
    embeddings = model.get_input_embeddings().num_embeddings
    if (tokens := vocabulary_size(tokenizer)) > embeddings:
        raise ConfigError(
            f"the tokenizer has {tokens} tokens, the model only {embeddings} embeddings: "
            "they do not belong together, or one of them was extended alone"
        )


def learn_padding_token(model: Any) -> None:
    """Let the token that pads have a gradient: it may end texts, too. Padding itself gets none, no
    target sees it.
    """
    if isinstance(embedding := model.get_input_embeddings(), nn.Embedding):
        embedding.padding_idx = None


def warn_of_untrained_tokens(model: Any, tokenizer: Any, ids: np.ndarray) -> None:
    """Warn of special tokens among `ids` whose embeddings are frozen and all zero, or the same as
    another's.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    weight = getattr(ends[0], "weight", None)
    if weight is None or any(p.requires_grad for p in ends[0].parameters()):
        return
    added = torch.tensor(
        sorted(i for i in tokenizer.added_tokens_decoder if i < len(weight)), dtype=torch.long
    )
    rows = shards.whole(weight)[added.to(weight.device)].detach().float().cpu()
    # enough to tell rows apart, fast
    _, place, count = rows[:, :64].unique(dim=0, return_inverse=True, return_counts=True)
    idle = added[(count[place] > 1) | (rows.abs().amax(1) < 1e-16)]
    if used := tokenizer.convert_ids_to_tokens(np.intersect1d(idle, ids).tolist()):
        names = " ".join(
            name.rpartition(".")[2] for name, module in model.named_modules() if module in ends
        )
        note(
            f"warning: the embeddings of {', '.join(used)} were never trained (all zeros, or the "
            "same as another's): "
            f"add --modules_to_save {names}"
        )
