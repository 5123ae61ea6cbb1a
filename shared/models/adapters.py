"""LoRA adapters: making, saving and merging them; their precision; quantised bases."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn

from shared.config.options import SpeedConfig
from shared.models.checks import learn_padding_token
from shared.models.counts import experts_of
from shared.models.hub import file_of, from_hub
from shared.models.loading import load_causal_lm, use_launch_precision
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
    *,
    to_merge: bool = False,
) -> Any:
    """The frozen base model, in the launch config's precision, quantised if asked.

    Args:
        to_merge: whole and on the CPU, on one rank. Otherwise, every rank calls this.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
        accelerator.mixed_precision, torch.float32
    )
    options: dict[str, Any] = {"dtype": dtype}
    # The last two begin with numbers that whole weights give.
    whole = to_merge or adapter.load_in_4bit or adapter.use_dora or adapter.adapter_name_or_path
    if adapter.load_in_4bit:
        sharded = accelerator.distributed_type == DistributedType.FSDP
        options["device_map"] = {"": torch.device("cpu") if to_merge else accelerator.device}
        options["quantization_config"] = _quantisation(name)(
            load_in_4bit=True,
            llm_int8_skip_modules=not_to_quantise(name),  # for 4 bits, too
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            # FSDP2 shards 4-bit weights only if they are stored as the floating type that it
            # communicates in.
            bnb_4bit_quant_storage=dtype if sharded else torch.uint8,
        )
    base = load_causal_lm(
        name, attn_implementation=speed.attn_implementation, whole=bool(whole), **options
    )
    keep_4bit_layout(base)
    return base


def _quantisation(name: str) -> Any:
    """The class of the settings that quantise the checkpoint `name`."""
    from transformers import AutoConfig, BitsAndBytesConfig

    config = from_hub(AutoConfig, name)
    given = getattr(config, "quantization_config", None)  # a checkpoint that is quantised already
    if given and "bitsandbytes" not in str(given):
        raise ConfigError(
            f"{name} is quantised already, as its config.json says: drop --load_in_4bit, or take a "
            "copy of the model in 16 bits"
        )
    if experts_of(config)[0] and not given:
        from shared.extras.experts.quantised import ExpertsConfig

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
    learn_padding_token(base)
    use_launch_precision(base)
    given = adapter.adapter_name_or_path
    shape: Any = contextlib.nullcontext()
    if any("quant_states" in vars(module) for module in base.modules()):  # experts in 4 bits
        from shared.extras.experts.adapted import in_full_shape

        shape = in_full_shape(base)
    with shape:
        model = _given_adapters(base, given) if given else _new_adapters(base, adapter, task_type)
    if any(type(module).__name__ == "ParamWrapper" for module in model.modules()):
        from shared.extras.experts.adapted import attach

        attach(model)
    if adapter.merge_adapter:
        refuse_tied_embeddings(model)
    return trained_in_fp32(model)


def _given_adapters(base: Any, name: str) -> Any:
    from peft import PeftModel
    from transformers import GenerationConfig

    missing: list[str] = []
    unused: list[str] = []

    def collect(_: nn.Module, keys: Any) -> None:  # PEFT does not pass on what did not fit
        missing.extend(keys.missing_keys)
        unused.extend(keys.unexpected_keys)

    hook = base.register_load_state_dict_post_hook(collect)
    # PEFT's classes take the base first
    model = from_hub(PeftModel, name, first=base, is_trainable=True)
    hook.remove()
    if file_of(name, "generation_config.json"):  # where its answers end
        base.generation_config = from_hub(GenerationConfig, name)
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
    )
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]  # type: ignore[operator]
    is_tied = ends[1] is not None and ends[0].weight is ends[1].weight
    names = [name.rpartition(".")[2] for name, module in base.named_modules() if module in ends]
    if is_tied and len(set(names) & set(adapter.modules_to_save)) == 1:
        note(
            "warning: embedding and head share their weights, and --modules_to_save trains a copy "
            f"for one of them: name {' and '.join(names)} to train both"
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
    base = load_base(name, adapter, speed, accelerator, to_merge=True)
    if adapter.load_in_4bit:
        base = base.dequantize()
    return merge_into(base, adapter_folder)


def merge_into(base: nn.Module, adapter_folder: Path) -> Any:
    """`base` with a saved adapter merged in."""
    from peft import PeftModel

    model: Any = PeftModel.from_pretrained(base, str(adapter_folder))
    return model.merge_and_unload()


def refuse_tied_embeddings(model: Any) -> None:
    """Refuse an adapter on a tied embedding: merged, it would change the input and the output
    matrix.

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
                f"--merge_adapter adds the adapter of {name.rpartition('.')[2]} to a matrix that "
                "the model's input and output share: "
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
