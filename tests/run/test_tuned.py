"""Models of dpo.py and grpo.py, as they are loaded, and the reference's log-probabilities, which later runs read."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import OPTConfig, OPTForCausalLM

from shared.config.options import SpeedConfig
from shared.models.blocks import in_eval_mode, repeated_blocks
from shared.models.loading import without_adapters
from shared.models.loss import target_log_probabilities
from shared.models.options import AdapterConfig
from shared.run.reference import identity_of_start
from shared.run.tuned import load_tuned
from tests.small_models import tokens, words


@pytest.mark.parametrize("recomputed", ["none", "full"])
@pytest.mark.parametrize("kind", ["full", "adapters", "given adapter"])
def test_probabilities_that_are_learned_are_those_of_an_evaluation(tmp_path, kind, recomputed):
    """OPT has dropout in modules and in functions, and leaves out whole blocks."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_attention_heads": 4, "num_hidden_layers": 3}
    dropout = {"dropout": 0.3, "attention_dropout": 0.3, "layerdrop": 0.5}
    base = OPTForCausalLM(OPTConfig(vocab_size=64, max_position_embeddings=32, **sizes, **dropout))
    base.save_pretrained(tmp_path / "base")
    given = None
    if kind == "given adapter":
        given = tmp_path / "adapter"
        lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["fc1"], lora_dropout=0.5, init_lora_weights=False)
        get_peft_model(base, lora).save_pretrained(given)
    adapter, speed = AdapterConfig(adapter_name_or_path=given and str(given)), SpeedConfig(gradient_checkpointing=recomputed)
    facts = {"model_name_or_path": str(tmp_path / "base"), "full": kind == "full"}
    config = SimpleNamespace(**facts, adapter=adapter, speed=speed)
    setup = SimpleNamespace(config=config, accelerator=Accelerator(cpu=True), set_defaults=lambda *_, **__: config)
    model = load_tuned(setup, words(64), 12)
    calls = []
    for block in repeated_blocks(without_adapters(model)):
        block.fc1.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = {"input_ids": tokens(2, 12), "labels": tokens(2, 12, seed=1)}
    learned = target_log_probabilities(model, batch)
    learned.sum().backward()
    assert len(calls) == (6 if recomputed == "full" else 3)
    with in_eval_mode(model), torch.no_grad():
        torch.testing.assert_close(target_log_probabilities(model, batch), learned.detach(), rtol=0, atol=0)
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_another_config_of_the_model_or_adapter_or_another_precision_is_another_start(tiny_model, tmp_path):
    base, given = shutil.copytree(tiny_model, tmp_path / "base"), tmp_path / "adapter"
    given.mkdir()
    (given / "adapter_model.safetensors").write_bytes(b"weights")
    (given / "adapter_config.json").write_text('{"lora_alpha": 32}')

    def start(dtype=torch.float32, **adapter):
        return identity_of_start(str(base), SimpleNamespace(dtype=dtype), AdapterConfig(**adapter))

    seen = [start(), start(dtype=torch.bfloat16), start(adapter_name_or_path=str(given))]
    (given / "adapter_config.json").write_text('{"lora_alpha": 8}')
    seen.append(start(adapter_name_or_path=str(given)))
    assert start(lora_r=2) == seen[0] and start(adapter_name_or_path=str(given)) == seen[3]
    config = base / "config.json"
    config.write_text(config.read_text().replace('"hidden_act": "silu"', '"hidden_act": "gelu"'))
    seen.append(start())
    assert len(set(seen)) == 5 and len({weights for weights, _ in seen}) == 2
