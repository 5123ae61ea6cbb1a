"""LoRA adapters: making, saving and merging them; their precision; quantised bases."""

import math
import re
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from safetensors.torch import load_file
from torch import nn

from shared.config.options import SpeedConfig
from shared.models.checks import learn_padding_token
from shared.models.counts import experts_of
from shared.models.hub import from_hub
from shared.models.loading import load_causal_lm
from shared.models.options import AdapterConfig
from shared.models.targets import find_targets, not_to_quantise
from shared.parallel import shards
from shared.process.errors import ConfigError, first_line
from shared.process.printing import note


def load_base(
    name: str,
    adapter: AdapterConfig,
    speed: SpeedConfig,
    accelerator: Accelerator,
    device: torch.device,
    *,
    whole: bool = False,
) -> Any:
    """The frozen base model, in the launch config's precision, quantised if asked; `whole`: see
    `load_causal_lm`.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
        accelerator.mixed_precision, torch.float32
    )
    options: dict[str, Any] = {"dtype": dtype}
    # These adapters begin with numbers that whole weights give.
    whole = (
        whole
        or adapter.use_dora
        or adapter.init_lora_weights != "default"
        or bool(adapter.adapter_name_or_path)
    )
    if adapter.load_in_4bit or adapter.load_in_8bit:
        whole = True
        sharded = accelerator.distributed_type == DistributedType.FSDP
        if adapter.load_in_8bit and sharded:
            raise ConfigError(
                "--load_in_8bit cannot be sharded: use --load_in_4bit, or "
                "accelerate_configs/ddp.yaml"
            )
        options["device_map"] = {"": device}
        options["quantization_config"] = _quantisation(name, adapter)(
            load_in_4bit=adapter.load_in_4bit,
            load_in_8bit=adapter.load_in_8bit,
            llm_int8_skip_modules=not_to_quantise(name),  # for 4 bits, too
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            # FSDP2 shards 4-bit weights only if they are stored as the floating type that it
            # communicates in.
            bnb_4bit_quant_storage=dtype if sharded else torch.uint8,
        )
    base = load_causal_lm(
        name, attn_implementation=speed.attn_implementation, whole=whole, **options
    )
    keep_4bit_layout(base)
    return base


def _quantisation(name: str, adapter: AdapterConfig) -> Any:
    """The class of the settings that quantise the checkpoint `name`."""
    from transformers import AutoConfig, BitsAndBytesConfig

    config = from_hub(AutoConfig, name)
    given = getattr(config, "quantization_config", None)  # a checkpoint that is quantised already
    if given and "bitsandbytes" not in str(given):
        raise ConfigError(
            f"{name} is quantised already, as its config.json says: drop --load_in_4bit or "
            "--load_in_8bit, or take a copy of the model in 16 bits"
        )
    if adapter.load_in_4bit and experts_of(config)[0] and not given:
        from shared.experts.quantised import ExpertsConfig

        return ExpertsConfig
    return BitsAndBytesConfig


def add_adapters(base: nn.Module, adapter: AdapterConfig, task_type: str = "CAUSAL_LM") -> Any:
    """`base` with trainable adapters in fp32: new ones, or those of --adapter_name_or_path. In
    training mode.

    Args:
        task_type: PEFT's name of what new ones are for.

    Raises:
        ConfigError: the flags name modules that the model does not have, or that cannot take
            adapters, or the given adapter does not fit the model.
    """
    from shared.experts.adapted import attach, in_full_shape

    learn_padding_token(base)
    given = adapter.adapter_name_or_path
    with in_full_shape(base):
        model = _given_adapters(base, given) if given else _new_adapters(base, adapter, task_type)
    attach(model)
    if adapter.merge_adapter or adapter.init_lora_weights == "pissa":
        refuse_tied_embeddings(
            model, "--merge_adapter" if adapter.merge_adapter else "--init_lora_weights pissa"
        )
    return trained_in_fp32(model)


def _given_adapters(base: Any, name: str) -> Any:
    from peft import PeftModel

    missing: list[str] = []
    unused: list[str] = []

    def collect(_: nn.Module, keys: Any) -> None:  # PEFT does not pass on what did not fit
        missing.extend(keys.missing_keys)
        unused.extend(keys.unexpected_keys)

    hook = base.register_load_state_dict_post_hook(collect)
    # PEFT's classes take the base first
    model = from_hub(PeftModel, name, first=base, is_trainable=True)
    hook.remove()
    # shared ones are there once
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    lost = [key.replace(".default", "") for key in missing if key in trained]
    wrong = {"missing in its file": lost, "unused in its file": unused}
    if found := [
        f"{len(keys)} weights are {what}, such as {keys[0]}" for what, keys in wrong.items() if keys
    ]:
        raise ConfigError(
            f"{name}: {'; '.join(found)}: rename them, or take the base that "
            "the adapter was made for"
        )
    note(f"the adapter of {name} is trained further")
    lora = model.peft_config["default"]
    if (before := lora.base_model_name_or_path) and before != base.name_or_path:
        note(f"warning: {name}: made for the base {before}, goes on with {base.name_or_path}")
        lora.base_model_name_or_path = base.name_or_path
        lora.revision = None
    return model


def _new_adapters(base: nn.Module, adapter: AdapterConfig, task_type: str) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = find_targets(base, adapter)
    lora = LoraConfig(
        task_type=task_type,
        r=adapter.lora_r,
        lora_alpha=adapter.lora_alpha,
        lora_dropout=adapter.lora_dropout,
        target_modules=targets.target_modules,
        target_parameters=targets.target_parameters or None,
        modules_to_save=list(adapter.modules_to_save) or None,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        init_lora_weights=True
        if adapter.init_lora_weights == "default"
        else adapter.init_lora_weights,
    )
    tied = (
        getattr(base, "get_output_embeddings", lambda: None)() if adapter.modules_to_save else None
    )
    embeddings: Any = base.get_input_embeddings()  # type: ignore[operator]
    if tied is not None and tied.weight is embeddings.weight:
        pair = [name for name, module in base.named_modules() if module in (tied, embeddings)]
        copied = [name for name in pair if name.rpartition(".")[2] in adapter.modules_to_save]
        if len(copied) == 1:
            (other,) = {name.rpartition(".")[2] for name in pair if name not in copied}
            note(
                "warning: embedding and head share their weights, and --modules_to_save trains a "
                "copy for one of them: "
                f"name {other}, too, to train both"
            )
    if targets.left_out:
        note(f"no adapters on {'; '.join(targets.left_out)}")
    try:
        return get_peft_model(base, lora)  # type: ignore[arg-type]
    except (AttributeError, ValueError) as error:
        raise ConfigError(
            f"--lora_target_modules {' '.join(adapter.lora_target_modules)}: {first_line(error)}"
        ) from None


def load_line(model: Any) -> str:
    """The lines of Python that load the saved adapter, for the model card."""
    base = model.get_base_model()
    return f"""import peft, transformers

base = transformers.{type(base).__name__}.from_pretrained({base.name_or_path!r})
model = peft.PeftModel.from_pretrained(base, "final")
model.generation_config = transformers.GenerationConfig.from_pretrained("final")"""


def pissa_start(model: nn.Module, adapter: AdapterConfig) -> dict[str, torch.Tensor]:
    """A copy of the initial adapters on the CPU if they are PiSSA's, else {}. Call before
    training.
    """
    if adapter.init_lora_weights != "pissa":
        return {}
    return {
        name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad
    }


def save_adapter(
    folder: Path, model: Any, weights: dict[str, torch.Tensor], initial: dict[str, torch.Tensor]
) -> None:
    """Write an adapter as PEFT loads it; one that began as PiSSA's becomes an ordinary one. The
    main rank calls this.

    Args:
        model: the PEFT model, not wrapped.
        weights: the trained ones, as `gather_weights` returns them.
        initial: the result of `pissa_start`.
    """
    if initial:
        weights = pissa_to_lora(weights, initial)
        lora = model.peft_config["default"]
        lora.r = 2 * lora.r
        lora.init_lora_weights = True
        # the scale stays: alpha / r, with rsLoRA alpha / sqrt(r)
        lora.lora_alpha *= math.sqrt(2) if lora.use_rslora else 2
    model.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)


def merge(
    name: str,
    adapter: AdapterConfig,
    speed: SpeedConfig,
    accelerator: Accelerator,
    adapter_folder: Path,
) -> Any:
    """The base, loaded again on the CPU and dequantised, with the saved adapter merged in. The GPU
    still holds the model.
    """
    # one rank is here
    base = load_base(name, adapter, speed, accelerator, torch.device("cpu"), whole=True)
    if adapter.load_in_4bit or adapter.load_in_8bit:
        base = base.dequantize()
    return merge_into(base, adapter_folder)


def merge_into(base: nn.Module, adapter_folder: Path) -> Any:
    """`base` with a saved adapter merged in. Raises ConfigError if PEFT would leave weights of it
    out.
    """
    from peft import PeftModel

    model: Any = PeftModel.from_pretrained(base, str(adapter_folder))
    saved = load_file(adapter_folder / "adapter_model.safetensors")
    loaded = {key.replace(".default", ""): value for key, value in model.state_dict().items()}
    if lost := [
        key
        for key, value in saved.items()
        if re.search(r"\.lora_[AB]\.", key) and not torch.equal(loaded[key].cpu(), value)
    ]:
        raise ConfigError(
            f"{adapter_folder}: PEFT does not load {len(lost)} of its weights, "
            f"such as {lost[0]}: not merged"
        )
    return model.merge_and_unload()


def pissa_to_lora(
    weights: dict[str, torch.Tensor], initial: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """An adapter trained from PiSSA's start, as an ordinary one of twice the rank on the unchanged
    base.

    PiSSA subtracts the initial product from the base, so the update is B A - B0 A0 = [B, -B0] [A;
    A0] (appendix C of arXiv 2404.02948). Other tensors pass through.
    """

    def convert(name: str, value: torch.Tensor) -> torch.Tensor:
        if ".lora_A." in name:
            return torch.cat([value, initial[name]], dim=0)
        if ".lora_B." in name:
            return torch.cat([value, -initial[name]], dim=1)
        return value

    return {name: convert(name, value) for name, value in weights.items()}


def refuse_tied_embeddings(model: Any, why: str) -> None:
    """Refuse an adapter on a tied embedding: merged, it would change the input and the output
    matrix.

    Args:
        why: the flag that adds them.

    Raises:
        ConfigError: names the module.
    """
    ends = [
        getattr(end, "base_layer", end)
        for end in (model.get_input_embeddings(), model.get_output_embeddings())
    ]
    for name, module in model.named_modules():
        if (
            getattr(module, "base_layer", None) in ends
            and hasattr(module, "lora_A")
            and ends[0].weight is ends[1].weight
        ):
            raise ConfigError(
                f"{why} adds the adapter of {name.rpartition('.')[2]} to a matrix that the model's "
                "input and output share: "
                "name it in --modules_to_save in place of --lora_target_modules"
            )


def trained_in_fp32(model: nn.Module) -> nn.Module:
    """Give trained parameters fp32 weights, also `modules_to_save` of a 16-bit base: small updates
    would be rounded away.
    """
    shards.trained_in_fp32(model)
    skip_input_casts(model)
    return model.train()  # from_pretrained returns the model in eval mode


def skip_input_casts(model: nn.Module) -> None:
    """Let adapters take their inputs as they are. PEFT casts them to fp32, autocast casts them
    back, both copies are kept.

    The numbers stay the same (with lora_dropout, up to rounding). DoRA and similar variants are
    left alone: they also use the cast input elsewhere.
    """
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled") and not getattr(
            module, "lora_variant", None
        ):
            module.cast_input_dtype_enabled = False  # type: ignore[assignment]


def keep_4bit_layout(model: nn.Module) -> None:
    """Stop bitsandbytes from rearranging 4-bit weights in an evaluation, as it does on CPUs with
    AVX512-BF16.

    It rounds the scales to bf16 for good: later steps would differ from a run that never evaluated,
    and FSDP would misread the weights.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
