"""Fused experts: products in the launch's precision, adapters, 4 bits. The references are plain transformers and PEFT."""

import gc
import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch.utils._python_dispatch import TorchDispatchMode

from shared.config.options import SpeedConfig
from shared.extras.experts.adapted import attach
from shared.extras.experts.products import NAME, use_launch_precision
from shared.models import adapters
from shared.models.counts import count_parameters, flops_per_token
from shared.models.options import AdapterConfig
from shared.process.errors import ConfigError
from tests.conftest import slow
from tests.model_families import make

IDS = torch.arange(5, 45)[None] * 7
FUSED = ["qwen3_moe", "gpt_oss", "nemotron_h", *map(slow, ("mixtral", "glm4_moe", "granitemoe", "gemma4", "minimax_m3_vl"))]
QLORA = AdapterConfig(lora_r=4, lora_alpha=8, load_in_4bit=True)


def loss_and_gradients(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(found, wanted, tolerance):
    assert found[0] == pytest.approx(wanted[0], rel=tolerance)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() <= tolerance * gradient.norm() + 1e-7, name


class Products(TorchDispatchMode):
    """Counts products of matrices of all experts, and their precision."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.overloadpacket.__name__
        if name == "_grouped_mm":
            self.count[name, args[0].dtype] += 1
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FUSED)
def test_products_are_those_of_transformers_in_the_precision_of_the_launch(tmp_path, family):
    """pytorch#174763: grouped_mm ignores autocast, and fp32 weights gave fp32 products."""
    model = make(family, tmp_path).from_pretrained(tmp_path, dtype=torch.float32).train()
    model.set_experts_implementation("eager")
    wanted = loss_and_gradients(model)
    use_launch_precision(model)
    assert_near(loss_and_gradients(model), wanted, 1e-5)
    with torch.autocast("cpu", torch.bfloat16), Products() as products:
        rounded = loss_and_gradients(model)
    assert {dtype for _, dtype in products.count} == {torch.bfloat16}
    assert rounded[0] == pytest.approx(wanted[0], rel=4e-3)
    assert all(gradient.dtype == torch.float32 for gradient in rounded[1].values())
    layers = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    assert products.count.total() >= 6 * sum(hasattr(model.get_submodule(name), "down_proj") for name in layers)
    model.save_pretrained(tmp_path / "saved")
    assert NAME not in (tmp_path / "saved" / "config.json").read_text()


def test_experts_of_any_width(tmp_path):
    """The kernel wants multiples of 16 bytes."""
    model = make("qwen3_moe", tmp_path, moe_intermediate_size=13).from_pretrained(tmp_path, dtype=torch.float32).train()
    model.set_experts_implementation("eager")
    with torch.autocast("cpu", torch.bfloat16):
        wanted = loss_and_gradients(model)
        use_launch_precision(model)
        assert loss_and_gradients(model)[0] == pytest.approx(wanted[0], rel=2e-3)


@pytest.mark.parametrize("family", FUSED)
def test_adapters_give_what_peft_gives_and_small_updates_count_in_16_bits(tmp_path, family):
    model_class = make(family, tmp_path)

    def adapted(dtype, **options):
        torch.manual_seed(0)
        base = model_class.from_pretrained(tmp_path, dtype=dtype, **options)
        weights = [name for name, p in base.named_parameters() if ".experts." in name and p.ndim == 3]
        model = get_peft_model(base, LoraConfig(r=3, lora_alpha=6, target_modules=[], target_parameters=weights))
        for name, p in model.named_parameters():
            if ".lora_" in name:
                p.data = torch.randn(p.shape) * (1e-3 if "lora_B" in name else 1)
        return model

    plain = adapted(torch.float32)
    wanted = loss_and_gradients(plain)
    exact = loss_and_gradients(adapted(torch.float32, experts_implementation="eager").double())[1]
    # of some models and on some processors, the rounding of fp32 alone is more than 1e-5
    tolerance = max(1e-5, *(2 * ((wanted[1][n] - g).norm() / g.norm()).item() for n, g in exact.items() if g.norm() > 1e-6))
    ours = adapted(torch.float32)
    use_launch_precision(ours.get_base_model())
    attach(ours)
    assert tolerance < 1e-4
    assert_near(loss_and_gradients(ours), wanted, tolerance)
    with ours.disable_adapter(), plain.disable_adapter():
        torch.testing.assert_close(ours(input_ids=IDS).logits, plain(input_ids=IDS).logits, rtol=1e-5, atol=1e-5)
    assert_near(loss_and_gradients(ours), wanted, tolerance)

    change = {}
    for name, model in {"exact": plain, "peft": adapted(torch.bfloat16), "ours": adapted(torch.bfloat16)}.items():
        if name == "ours":
            use_launch_precision(model.get_base_model())
            attach(model)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=name != "exact"):
            experts = next(m for m in model.modules() if hasattr(m, "parameter_name"))
            while hasattr(getattr(experts, "base_layer", None), "parameter_name"):
                experts = experts.base_layer
            width = model.config.get_text_config().hidden_size
            states = torch.randn(40, width, generator=torch.Generator().manual_seed(1))
            chosen = torch.arange(80).view(40, 2) % experts.num_experts
            given = (states.to(model.dtype), chosen, torch.full((40, 2), 0.5, dtype=model.dtype))
            outer = next(m for m in model.modules() if hasattr(m, "parameter_name"))
            with_adapters = outer(*given).float()
            with model.disable_adapter():
                change[name] = with_adapters - outer(*given).float()
    error = {name: (value - change["exact"]).norm().item() for name, value in change.items()}
    assert error["ours"] < error["peft"]


def test_layers_that_peft_takes_for_experts_have_adapters_in_4_bits_and_small_updates_count_in_16(tmp_path):
    """Dense and shared layers: PEFT adds the update to their weight, in the weight's precision."""
    make("glm4_moe", tmp_path)
    change, names = {}, {}
    for kind, precision in {"exact": "no", "4 bits": "no", "16 bits": "bf16", "peft": "bf16"}.items():
        torch.manual_seed(0)
        options = AdapterConfig(lora_r=3, lora_alpha=6, load_in_4bit=kind == "4 bits")
        launch = SimpleNamespace(mixed_precision=precision, distributed_type=None, device=torch.device("cpu"))
        base = adapters.load_base(str(tmp_path), options, SpeedConfig(attn_implementation="sdpa"), launch)
        model = adapters.add_adapters(base, options)
        names[kind] = sorted(name for name, p in model.named_parameters() if p.requires_grad)
        layer = model.get_submodule("base_model.model.model.layers.1.mlp.shared_experts.up_proj")
        if kind == "peft":
            layer.__class__ = ParamWrapper
        generator = torch.Generator().manual_seed(1)
        for matrices, size in ((layer.lora_A, 1), (layer.lora_B, 1e-4)):
            matrices["default"].weight.data = torch.randn(matrices["default"].weight.shape, generator=generator) * size
        states = torch.randn(40, 32, generator=generator)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            change[kind] = layer(states).float()
            with model.disable_adapter():
                change[kind] -= layer(states).float()
    assert names["exact"] == names["4 bits"] == names["16 bits"]
    torch.testing.assert_close(change["4 bits"], change["exact"], rtol=0.01, atol=1e-6)
    error = {kind: float((found - change["exact"]).norm() / change["exact"].norm()) for kind, found in change.items()}
    assert error["16 bits"] < error["peft"]


@pytest.mark.parametrize("family", FUSED)
def test_4_bits(tmp_path, family):
    """Sizes, counts, adapters, merging; in each layer the products are those of the weights that merging unpacks."""
    model_class = make(family, tmp_path / "base")
    whole = model_class.from_pretrained(tmp_path / "base", dtype=torch.float32)
    accelerator = Accelerator(cpu=True)
    load = (str(tmp_path / "base"), QLORA, SpeedConfig(), accelerator)
    base = adapters.load_base(*load)
    fused = [name for name, p in whole.named_parameters() if ".experts." in name and p.ndim == 3]
    assert fused
    for name in fused:
        packed, numel = base.get_parameter(name), whole.get_parameter(name).numel()
        assert packed.numel() * packed.element_size() == numel / 2
    assert count_parameters(base)[1] == count_parameters(whole)[1]
    flops = [flops_per_token(model.requires_grad_(False), 64) for model in (base, whole)]
    assert flops[0] == pytest.approx(flops[1])

    model = adapters.add_adapters(base, QLORA)
    before, gradients = loss_and_gradients(model)
    assert before == pytest.approx(loss_and_gradients(whole.requires_grad_(True))[0], rel=0.05)
    with torch.no_grad():
        for name, gradient in gradients.items():
            assert "lora_A" in name or gradient.any(), name
            model.get_parameter(name).sub_(gradient)
    assert any("experts" in name for name in gradients)
    model.save_pretrained(tmp_path / "final")
    merged = adapters.merge(*load, tmp_path / "final")
    merged.save_pretrained(tmp_path / "merged")
    saved = model_class.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    saved.set_experts_implementation("eager")
    with torch.no_grad():
        wanted, *found = (each.eval()(input_ids=IDS).logits for each in (model, merged, saved))
        torch.testing.assert_close(found, [wanted, wanted], rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config


def test_loading_in_4_bits_never_holds_two_layers_of_whole_experts(tmp_path):
    sizes = {"num_hidden_layers": 6, "num_experts": 8, "moe_intermediate_size": 64}
    make("qwen3_moe", tmp_path, **sizes)
    layer = 8 * 3 * 64 * 32  # weights of the experts of a layer

    class Largest(TorchDispatchMode):
        """The most numbers that tensors of the size of a layer's experts hold at once."""

        numbers = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            result = operator(*args, **(kwargs or {}))
            if "quantize" in operator.name():
                alive = {
                    t.untyped_storage().data_ptr(): t.numel()
                    for t in gc.get_objects()
                    if isinstance(t, torch.Tensor) and t.device.type == "cpu" and t.is_floating_point() and t.ndim == 3
                }
                self.numbers = max(self.numbers, sum(alive.values()))
            return result

    load = (str(tmp_path), QLORA, SpeedConfig(), Accelerator(cpu=True))
    gc.freeze()  # what is there already is not looked at
    with Largest() as largest:
        adapters.load_base(*load)
    gc.unfreeze()
    assert 0 < largest.numbers <= layer


@pytest.mark.parametrize("family", ["step3p7", slow("llama4"), slow("longcat_flash")])
def test_experts_that_4_bits_leave_out_are_counted(tmp_path, family, capsys):
    whole = make(family, tmp_path).from_pretrained(tmp_path)
    fused = sum(p.numel() for name, p in whole.named_parameters() if ".experts." in name and p.ndim == 3)
    base = adapters.load_base(str(tmp_path), QLORA, SpeedConfig(), Accelerator(cpu=True))
    adapters.add_adapters(base, QLORA)
    assert f"the fused experts, {fused:,} parameters, stay in 16 bits: no option quantises them" in capsys.readouterr().err


def test_a_model_that_is_quantised_already_is_not_quantised_again(tmp_path):
    make("gpt_oss", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"is quantised already.*: drop --load_in_4bit, or take a copy"):
        adapters.load_base(str(tmp_path), QLORA, SpeedConfig(), Accelerator(cpu=True))
