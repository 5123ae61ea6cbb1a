"""Models of a few thousand random weights."""

from types import SimpleNamespace

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

VOCAB = 64


def llama(**changes):
    options = {"vocab_size": VOCAB, "num_key_value_heads": 1, "num_hidden_layers": 2, "intermediate_size": 48} | changes
    return LlamaForCausalLM(LlamaConfig(hidden_size=32, num_attention_heads=2, **options))


def make(name, attention="sdpa"):
    torch.manual_seed(0)
    if name == "llama":
        return llama(attn_implementation=attention).eval()
    if name in ("qwen2", "windows", "windows of a row"):
        options = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "intermediate_size": 48}
        if name != "qwen2":  # in the second block
            options |= {"use_sliding_window": True, "sliding_window": 4 if name == "windows" else 20, "max_window_layers": 1}
        config = Qwen2Config(vocab_size=VOCAB, hidden_size=32, attn_implementation=attention, **options)
        return Qwen2ForCausalLM(config).eval()
    options = {"n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = GPT2Config(vocab_size=VOCAB, n_embd=32, n_positions=64, attn_implementation=attention, **options)
    return GPT2LMHeadModel(config).eval()


def tokens(*shape, seed=0):
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def words(count: int) -> SimpleNamespace:
    """What the checks of a model ask of a tokenizer: its ids, here from 0 without gaps."""
    return SimpleNamespace(get_vocab=lambda: {str(number): number for number in range(count)})
