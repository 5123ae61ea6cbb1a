"""Mixture-of-experts models are trained with the loss that balances their experts."""

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV3Config, MixtralConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from shared.data.order import IGNORED
from shared.extras.pipeline import Pipeline
from shared.models.checks import require_fit
from shared.models.loss import causal_lm_loss
from shared.models.options import ModelConfig
from shared.models.pretraining import build_causal_lm
from shared.process.errors import ConfigError
from tests.conftest import learn_here
from tests.small_models import VOCAB, tokens, words

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
MIXTRAL = SIZES | {"num_key_value_heads": 1, "num_local_experts": 4, "router_aux_loss_coef": 0.5, "vocab_size": VOCAB}


@pytest.fixture(scope="module")
def architecture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtral")
    MixtralConfig(**MIXTRAL).save_pretrained(folder)
    return folder


def test_experts_are_balanced_when_they_are_trained_from_scratch(architecture, text_file, tmp_path, capsys):
    """Automodel#1408 (2025): the auxiliary loss was left out. Here also: it is the same in micro-batches of any size."""
    flags = ("--config_name", architecture, "--train_file", text_file, "--vocab_size", 320, "--seq_length", 32)
    flags = (*flags, "--global_batch_size", 8, "--max_steps", 2, "--eval_samples", 2)
    rows = "--per_device_train_batch_size"
    at_once, in_parts = (learn_here("pretrain", tmp_path / str(n), *flags, rows, n) for n in (8, 2))
    assert "aux_loss balances the experts, times the config's router_aux_loss_coef 0.5" in capsys.readouterr().err
    assert len(at_once.each("aux_loss")) == 2 and min(at_once.each("aux_loss")) > 0
    for key in ("loss", "aux_loss"):
        assert in_parts.each(key) == pytest.approx(at_once.each(key), rel=1e-5)


def test_the_balancing_loss_is_that_of_each_row_without_its_padding(tmp_path):
    """As transformers computes it for the row's tokens alone, in each layer. In the gradient, not in the value."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MixtralConfig(**MIXTRAL, output_router_logits=True))
    batch = {"input_ids": tokens(4, 12), "labels": tokens(4, 12, seed=1)}
    batch["labels"][0, 7:] = batch["labels"][3, 1:] = IGNORED  # padding
    batch["labels"][1] = IGNORED  # a row that counts for nothing
    logged = {}
    loss = causal_lm_loss(model, batch, log=logged.update)
    found = torch.autograd.grad(loss, list(model.parameters()))
    plain, balance = torch.zeros(()), torch.zeros(())
    for row, length in ((0, 7), (2, 12), (3, 1)):
        outputs = model(batch["input_ids"][row : row + 1, :length])
        plain = plain + F.cross_entropy(outputs.logits[0], batch["labels"][row, :length], reduction="sum")
        balance = balance + length * sum(load_balancing_loss_func((layer,), 4, 2) for layer in outputs.router_logits) / 2
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(logged["aux_loss"], balance)
    for one, other in zip(found, torch.autograd.grad(plain + 0.5 * balance, list(model.parameters())), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_fine_tuning_balances_experts_as_the_config_says_and_says_so(capsys):
    """Automodel#1408 (2025): nobody was told."""
    sizes = SIZES | {"vocab_size": VOCAB, "n_routed_experts": 4, "moe_intermediate_size": 8, "first_k_dense_replace": 0}
    told = {
        "aux_loss balances the experts": MixtralConfig(**MIXTRAL, output_router_logits=True),
        "no loss balances the experts: output_router_logits is off": MixtralConfig(**MIXTRAL),
        "no loss balances the experts: there is none for DeepseekV3ForCausalLM": DeepseekV3Config(**sizes),
    }
    for expected, config in told.items():
        with torch.device("meta"):
            require_fit(AutoModelForCausalLM.from_config(config), words(VOCAB), 8)
        assert expected in capsys.readouterr().err


def test_a_pipeline_does_not_leave_the_balancing_loss_out_in_silence(architecture, tiny_model, monkeypatch):
    """Automodel#1408 (2025), for pipelines."""
    from accelerate import Accelerator, DistributedType

    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.MULTI_CPU)
    options = {"seq_length": 8, "attn_implementation": "sdpa", "tie_word_embeddings": False}
    config = ModelConfig(config_name=str(architecture))
    model = build_causal_lm(config, AutoTokenizer.from_pretrained(tiny_model), **options)
    with pytest.raises(ConfigError, match="leaves out the loss that balances experts"):
        Pipeline(Accelerator(cpu=True), model, ranks=2, micro_batches=2)
