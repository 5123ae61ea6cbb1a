"""How a checkpoint is loaded: by which class, and which of its parts text passes through.

A multimodal checkpoint is loaded whole, by the class that its `architectures` names: adapters and
weights then fit the checkpoint as others load it. Its towers of images and sound are frozen.
"""

import contextlib
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import extract_model_from_parallel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin

from shared.models.hub import attention_option, file_of, from_hub
from shared.parallel.shards import in_shards
from shared.process.errors import ConfigError

# What a processor and a tokenizer's save_pretrained leave in a folder, beside the tokenizer's own
# files.
OF_PROCESSORS = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


def class_of(config: Any) -> Any:
    """The class that loads a checkpoint with this config: the one that `architectures` names, if it
    writes text.
    """
    named = getattr(transformers, (config.architectures or [""])[0], None)
    writes = isinstance(named, type) and issubclass(named, GenerationMixin)
    return named if writes and not config.is_encoder_decoder else AutoModelForCausalLM


def load_causal_lm(
    name: str,
    *,
    attn_implementation: str,
    whole: bool = False,
    **options: Any,
) -> Any:
    """The language model at `name` with its weights, the parts that text does not pass through
    frozen.

    Args:
        attn_implementation: auto: SDPA if the model has it, else eager attention.
        whole: not in shards, whatever the launch config says. Otherwise, every rank calls this.
        options: of `from_pretrained`.

    Raises:
        ConfigError: see `hub.from_hub`.
    """
    options |= attention_option(attn_implementation)
    model_class = class_of(from_hub(AutoConfig, name))
    with contextlib.nullcontext() if whole else in_shards():
        model = from_hub(model_class, name, use_safetensors=True, **options)
    freeze_outer_parts(model)
    return model


def use_launch_precision(model: Any) -> None:
    """Let a model's fused experts, which know no autocast, compute in the launch's precision."""
    if any(hasattr(m, "has_gate") and hasattr(m, "is_transposed") for m in model.modules()):
        from shared.extras.experts import products

        products.use_launch_precision(model)


def without_adapters(model: Any) -> Any:
    """The model itself, out of the wrappers of the launch and of PEFT if it is in one."""
    model = extract_model_from_parallel(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _inside(model: Any) -> set[Any]:
    return {model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings()} - {
        None
    }


def outer_parts(model: Any) -> list[str]:
    """The names of the modules that text does not pass through, such as a multimodal model's vision
    tower.
    """
    if model.config.get_text_config() is model.config:
        return []
    inside = _inside(model)

    def outer(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in module.named_children():
            if child not in inside:
                around = not inside.isdisjoint(child.modules())
                yield from outer(child, f"{prefix}{name}.") if around else [prefix + name]

    return list(outer(model, ""))


def parts_that_choose(model: nn.Module) -> list[str]:
    """The names of modules that choose the tokens that sparse attention sees: their choice has no
    gradient.
    """
    return [
        name for name, module in model.named_modules() if type(module).__name__.endswith("Indexer")
    ]


def freeze_outer_parts(model: Any) -> None:
    """Freeze the parts that text gives no gradient: DDP would wait for one. And those that an
    evaluation would change.
    """
    if hasattr(model.config, "rescale_every"):  # RWKV would halve weights in place, adapters not
        model.config.rescale_every = 0
    for name in parts_that_choose(model):
        model.get_submodule(name).requires_grad_(False)
    if model.config.get_text_config() is not model.config:
        used = {parameter for module in _inside(model) for parameter in module.parameters()}
        for parameter in set(model.parameters()) - used:
            parameter.requires_grad_(False)


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Freeze the parameters in whose names one of the regular expressions is found.

    Raises:
        ConfigError: a pattern is no regular expression, or is found in no name.
    """
    for pattern in patterns:
        try:
            weights = [p for name, p in model.named_parameters() if re.search(pattern, name)]
        except re.error as error:
            raise ConfigError(f"--freeze {pattern}: no regular expression: {error}") from None
        if not weights:
            some = ", ".join(name for name, _ in islice(model.named_parameters(), 3))
            raise ConfigError(
                f"--freeze {pattern}: found in the name of no weight; they are {some}, ..."
            )
        for parameter in weights:
            parameter.requires_grad_(False)


def dtype_of(name: str) -> torch.dtype:
    """The precision of a checkpoint's weights, as its config says; else fp32."""
    config = from_hub(AutoConfig, name)
    return (
        getattr(config, "dtype", None)
        or getattr(config.get_text_config(), "dtype", None)
        or torch.float32
    )


def save_causal_lm(
    folder: Path,
    model: Any,
    weights: dict[str, torch.Tensor],
    tokenizer: Any,
    *,
    dtype: torch.dtype,
    base: str | None,
) -> None:
    """Write a model as `from_pretrained` loads it, with its tokenizer. Call it on the main rank.

    Args:
        model: not wrapped; its config and generation settings are written.
        weights: as `gather_weights` returns them, in `dtype`.
        base: the checkpoint that training began from, whose processor's files are added.
    """
    model.save_pretrained(folder, state_dict=weights)
    model.config.dtype = dtype  # save_pretrained notes that of the weights in training
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if base:
        copy_processor(base, folder)


def copy_processor(name: str, folder: Path) -> None:
    """Add the files of the processor of the checkpoint `name`, if it has one."""
    for file in OF_PROCESSORS:
        if found := file_of(name, file):
            shutil.copyfile(found, folder / file)
