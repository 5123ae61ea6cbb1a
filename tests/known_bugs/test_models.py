"""Models that a template accepts, and then trains as another."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from shared.models.pipeline import require_same
from shared.process.errors import ConfigError
from tests.conftest import slow
from tests.known_bugs.test_oracles import OWN, small

# From the decoder's input or output, from the logits, and from block to block.
REFUSED = {
    "granite": "logits differ by",
    "gemma2": "logits differ by",
    "cohere": "logits differ by",
    "glm_moe_dsa": "values to unpack",
    "zaya": "values to unpack",
}
CUT = ("llama", "qwen3_moe", *map(slow, ("gpt_oss", "olmo3", "deepseek_v3", "qwen3_next", "kimi_linear", "mixtral")))


def build(name: str, **changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = small(CONFIG_MAPPING[name], OWN.get(name, {}))
    config.update({"tie_word_embeddings": False, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("name", CUT)
def test_stages_in_a_row_are_the_whole_model(name):
    """Found here in 2026: the trial takes what a pipeline can cut, and leaves the model as it was."""
    model = build(name).train()
    require_same(model, [0, 1, 2, 4])
    assert model.training and not model.get_output_embeddings()._forward_hooks


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_whose_stages_are_not_the_whole_is_refused(name):
    """Found here in 2026: only a list of settings was looked at."""
    with pytest.raises(ConfigError, match=f"ForCausalLM cannot be cut into pipeline stages .*{REFUSED[name]}"):
        require_same(build(name), [0, 2, 4])


def test_a_decoder_that_scales_its_input_in_each_stage_is_refused():
    """Found here in 2026: AFMoE with `mup_enabled` multiplied its input by the root of the width in each stage."""
    require_same(build("afmoe", mup_enabled=False), [0, 2, 4])
    with pytest.raises(ConfigError, match=r"AfmoeForCausalLM cannot be cut into pipeline stages .*logits differ"):
        require_same(build("afmoe", mup_enabled=True), [0, 2, 4])
