"""Models that a template accepts, and then trains as another."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

from shared.extras.pipeline import try_stages
from shared.models import adapters
from shared.models.checks import context_of
from shared.models.options import AdapterConfig
from shared.process.errors import ConfigError
from tests.conftest import slow
from tests.known_bugs.test_oracles import OWN, small

# What goes from block to block; what AFMoE does to its input in each stage.
REFUSED = {"glm_moe_dsa": "values to unpack", "zaya": "values to unpack", "afmoe": "logits differ"}
# The logits of gemma2 are capped, those of granite and cohere scaled.
CUT = ("llama", "qwen3_moe", "gemma2", "granite", "cohere")
CUT += (*map(slow, ("gpt_oss", "olmo3", "deepseek_v3", "qwen3_next", "kimi_linear", "mixtral")),)


def build(name: str, **changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = small(CONFIG_MAPPING[name], OWN.get(name, {}))
    config.update({"tie_word_embeddings": False, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("name", CUT)
def test_stages_in_a_row_are_the_whole_model(name):
    """Found here in 2026: the trial takes what a pipeline can cut, and leaves the model as it was."""
    model = build(name).train()
    logits_of = try_stages(model, [0, 1, 2, 4])
    assert model.training and not model.get_output_embeddings()._forward_hooks
    logits = torch.tensor([-40.0, 0.5, 9.0])
    assert torch.equal(logits_of(logits), logits) is (name not in ("gemma2", "granite", "cohere"))


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_stages_are_not_the_whole_is_refused(name):
    """Found here in 2026: only a list of settings was looked at."""
    with pytest.raises(ConfigError, match=f"ForCausalLM cannot be cut into pipeline stages .*{REFUSED[name]}"):
        try_stages(build(name, mup_enabled=True), [0, 2, 4])
    if name == "afmoe":
        try_stages(build(name, mup_enabled=False), [0, 2, 4])


SIZES = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
OFFSET = ("roberta", "xlm-roberta", "camembert", "mpnet", "data2vec-text", "longformer", "esm", "ibert", "bert", "opt")


@pytest.mark.parametrize("name", OFFSET)
def test_the_context_is_what_a_forward_takes(name):
    """Reported since 2019: RoBERTa has 514 positions for 512 tokens."""
    config = CONFIG_MAPPING[name](**SIZES, max_position_embeddings=20, pad_token_id=1)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    context = context_of(model)
    assert context == (20 if name in ("bert", "opt") else 18)
    model(input_ids=torch.full((1, context), 5))
    with pytest.raises(Exception):  # noqa: B017
        model(input_ids=torch.full((1, context + 1), 5))


@pytest.mark.parametrize("modules", [["embed_tokens"], ["lm_head"]])
def test_half_of_tied_weights_is_said(modules, capsys):
    """PEFT warns of it since 2025: one of the two is trained, and the other stays."""
    model = build("llama", tie_word_embeddings=True)
    adapters._new_adapters(model, AdapterConfig(modules_to_save=(*modules,)), "CAUSAL_LM")
    assert "name embed_tokens and lm_head to train both" in capsys.readouterr().err
    both = AdapterConfig(modules_to_save=("embed_tokens", "lm_head"))
    adapters._new_adapters(build("llama", tie_word_embeddings=True), both, "CAUSAL_LM")
    assert "to train both" not in capsys.readouterr().err
