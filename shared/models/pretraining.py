"""The model that a pretraining run starts from."""

import torch
from transformers import AutoConfig, LlamaConfig, PreTrainedModel, PreTrainedTokenizerBase

from shared.models.checks import learn_padding_token, require_fit
from shared.models.hub import attention_option, from_architecture, from_hub, override
from shared.models.loading import class_of, freeze_outer_parts, load_causal_lm, use_launch_precision
from shared.models.loss import can_balance
from shared.models.options import PRESETS, ModelConfig
from shared.models.tokenizers import vocabulary_size
from shared.process.errors import ConfigError


def preset(name: str, *, seq_length: int = 2048, tie_word_embeddings: bool = True) -> LlamaConfig:
    """The architecture of a --model_preset, a key of PRESETS, for a vocabulary of 32,000."""
    hidden, blocks, heads, kv_heads, feed_forward = PRESETS[name]
    return LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=feed_forward,
        max_position_embeddings=max(2048, seq_length),
        tie_word_embeddings=tie_word_embeddings,
    )


def build_causal_lm(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seq_length: int,
    attn_implementation: str,
    tie_word_embeddings: bool,
) -> PreTrainedModel:
    """A model with fp32 weights, random or loaded; mixed precision casts where it computes.

    Args:
        tie_word_embeddings: of a preset: the input and output embeddings are one matrix.

    Raises:
        ConfigError: there is no such model, or it does not fit the tokenizer or `seq_length`.
    """
    if config.model_name_or_path:
        if config.config_overrides:
            raise ConfigError("--config_overrides cannot change a model whose weights are loaded")
        model = load_causal_lm(
            config.model_name_or_path, attn_implementation=attn_implementation, dtype=torch.float32
        )
    else:
        architecture = preset(
            config.model_preset, seq_length=seq_length, tie_word_embeddings=tie_word_embeddings
        )
        if config.config_name:
            architecture = from_hub(AutoConfig, config.config_name)
        text = architecture.get_text_config()  # of a multimodal model: its own part of the config
        text.vocab_size = vocabulary_size(tokenizer)
        text.bos_token_id = tokenizer.bos_token_id
        text.eos_token_id = tokenizer.eos_token_id
        text.pad_token_id = None  # transformers would begin with zeros as this token's embedding
        if can_balance(text):  # before the overrides, which may turn it off
            text.output_router_logits = True
        override(architecture, config.config_overrides)
        options = attention_option(attn_implementation)
        model = from_architecture(
            class_of(architecture), architecture, dtype=torch.float32, **options
        )
        freeze_outer_parts(model)
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    require_fit(model, tokenizer, seq_length)
    learn_padding_token(model)
    use_launch_precision(model)
    return model
