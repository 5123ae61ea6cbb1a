"""Adapters are loaded whole and end their turns; every token in use has an embedding that is learned."""

import re
import shutil
import sys

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma3Config, GenerationMixin

from shared.commands import ask
from shared.models.adapters import add_adapters
from shared.models.checks import warn_of_untrained_tokens
from shared.models.generation import ends_of
from shared.models.options import AdapterConfig, ModelConfig
from shared.models.pretraining import build_causal_lm
from shared.process.errors import ConfigError
from tests.conftest import ROOT, run_here
from tests.small_models import llama, tokens

NOTHING = {"base_model.model.model.layers.0.mlp.up_proj.lora_C.weight": torch.zeros(1)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {f"_orig_mod.{n}": v for n, v in w.items()}, "28 weights are missing .*; 28 weights are unused .*_orig"),
        (lambda w: dict(list(w.items())[1:]), "1 weights are missing in its file, such as base_model.model.model.layers.0"),
        (lambda w: w | NOTHING, "1 weights are unused in its file, such as base_model.model.model.layers.0"),
    ],
    ids=["prefix", "missing", "unused"],
)
def test_an_adapter_that_does_not_fit_is_refused(tmp_path, change, message):
    """peft#2118 (2024), transformers#46766 (2026): weights under other names were left aside, new ones trained."""
    get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")).save_pretrained(tmp_path)
    given = AdapterConfig(adapter_name_or_path=str(tmp_path))
    add_adapters(llama(), given)
    file = tmp_path / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(tmp_path))}: {message}"):
        add_adapters(llama(), given)


def test_an_adapter_of_another_base_is_named(tmp_path, capsys):
    """peft#2699 (2025): an adapter that was made for another base was taken without a word."""
    base = llama()
    base.name_or_path = "first"
    get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")).save_pretrained(tmp_path)
    for name in ("first", "second"):
        base = llama()
        base.name_or_path = name
        model = add_adapters(base, AdapterConfig(adapter_name_or_path=str(tmp_path)))
        assert model.peft_config["default"].base_model_name_or_path == name
        expected = f"warning: {tmp_path}: made for the base first, goes on with second\n" if name == "second" else ""
        assert capsys.readouterr().err == f"the adapter of {tmp_path} is trained further\n" + expected


def test_an_adapter_loaded_by_its_card_ends_where_turns_do(tmp_path, tiny_model, tokenizer, chat_file, capsys, monkeypatch):
    """Qwen3#1064 (2025), LLaMA-Factory#7943 (2025): a base model with an adapter never stopped after its turn.

    Also merged, by the Python of the page, by `ask`, and trained further.
    """
    shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|pad|>\\n' }}{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    tokenizer.save_pretrained(tmp_path / "model")
    flags = ("--model_name_or_path", tmp_path / "model", "--train_file", chat_file, "--max_steps", 1, "--seq_length", 96)
    flags += ("--show_answers", 0, "--merge_adapter", "--output_dir", tmp_path / "runs/chat")
    run_here("lora_finetune", *flags, "--global_batch_size", 4)
    end = tokenizer.convert_tokens_to_ids("<|pad|>")
    ends = [tokenizer.eos_token_id, end]
    assert f"generation ends at the tokens {ends}, as in training" in capsys.readouterr().err
    asked = []

    def generate(model, **inputs):
        asked.append(model.generation_config.eos_token_id)
        return torch.cat([inputs["input_ids"], torch.tensor([[5]])], 1)

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    monkeypatch.chdir(tmp_path / "runs/chat")  # as the cards say
    for name in ("final", "merged"):
        load = re.search("```python\n(.*?)```", (tmp_path / "runs/chat" / name / "README.md").read_text(), re.DOTALL)
        exec(load[1], {})
    monkeypatch.chdir(tmp_path)
    exec(re.search("```python\n(.*?)```", (ROOT / "docs/after_training.md").read_text(), re.DOTALL)[1], {})
    for folder in ("runs/chat", "runs/chat/merged"):
        monkeypatch.setattr(sys, "argv", ["ask", folder, "Hello"])
        ask.main()
    assert asked == [ends] * 7  # twice beside the base
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    trained_on = add_adapters(base, AdapterConfig(adapter_name_or_path=str(tmp_path / "runs/chat/final")))
    assert ends_of(trained_on, tokenizer, None) == ends


@pytest.mark.parametrize("save", [False, True], ids=["pretraining", "modules_to_save"])
def test_the_end_of_text_token_is_learned_where_it_pads_too(tmp_path, tokenizer, save):
    """h2o-llmstudio#298 (2023): the embedding of the token that pads got no gradient, though it ends every text."""
    end = tokenizer.eos_token_id
    if save:
        model = add_adapters(llama(pad_token_id=end, eos_token_id=end), AdapterConfig(modules_to_save=("embed_tokens",)))
    else:
        llama(pad_token_id=end, eos_token_id=end, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
        config = ModelConfig(model_name_or_path=str(tmp_path))
        model = build_causal_lm(config, tokenizer, seq_length=8, attn_implementation="sdpa", tie_word_embeddings=False)
    model(input_ids=torch.tensor([[end, 5, 6]])).logits.square().sum().backward()
    (embedding,) = (p for n, p in model.named_parameters() if "embed_tokens" in n and p.requires_grad)
    assert embedding.grad[end].abs().sum() > 0


def test_a_composite_models_text_config_gets_the_tokenizers_settings(tmp_path, tokenizer):
    """The same bug: the outer config of Gemma 3 got the vocabulary and the padding token, which nothing reads there."""
    shape = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    text = {"num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 4, "vocab_size": 99, "layer_types": None}
    vision = {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    Gemma3Config(text_config=shape | text, vision_config=shape | vision).save_pretrained(tmp_path)
    config = ModelConfig(config_name=str(tmp_path), config_overrides="intermediate_size=40")
    model = build_causal_lm(config, tokenizer, seq_length=8, attn_implementation="sdpa", tie_word_embeddings=False)
    embedding, text = model.get_input_embeddings(), model.config.text_config
    assert (embedding.num_embeddings, embedding.padding_idx) == (len(tokenizer), None)
    assert text.intermediate_size == 40
    expected = (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert (text.vocab_size, text.eos_token_id, text.pad_token_id) == expected


def test_tokens_that_were_never_trained_are_named(tokenizer, capsys):
    """unsloth#658 (2024): a base's rows of chat tokens are zero, or all alike, and LoRA leaves them so."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|a|>", "<|b|>", "<|c|>", "<|d|>"]})
    a, b, c, d = tokenizer.convert_tokens_to_ids(["<|a|>", "<|b|>", "<|c|>", "<|d|>"])
    model = llama(vocab_size=len(tokenizer))
    rows = model.get_input_embeddings().weight.data
    rows[a], rows[c] = 0, rows[b]
    used = np.array([5, 5, a, b, d, 7], np.int32)
    warn_of_untrained_tokens(add_adapters(model, AdapterConfig()), tokenizer, used)
    message = "the embeddings of <|a|>, <|b|> were never trained (all zeros, or the same as another's): "
    assert capsys.readouterr().err == f"warning: {message}add --modules_to_save embed_tokens lm_head\n"
    for changes, text in (({}, tokens(9).numpy()), ({"modules_to_save": ("embed_tokens",)}, used)):
        base = llama(vocab_size=len(tokenizer))
        base.get_input_embeddings().weight.data[a] = 0
        warn_of_untrained_tokens(add_adapters(base, AdapterConfig(**changes)), tokenizer, text)
        assert capsys.readouterr().err == ""
