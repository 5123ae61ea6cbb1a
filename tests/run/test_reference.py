"""The reference's log-probabilities, which are kept for later runs."""

import shutil
from types import SimpleNamespace

import torch

from shared.models.options import AdapterConfig
from shared.run.reference import identity_of_start


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
