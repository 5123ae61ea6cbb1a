"""Which parts of a model carry LoRA adapters."""

import inspect
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

from shared.models.counts import experts_of
from shared.models.hub import from_architecture, from_hub
from shared.models.loading import class_of, outer_parts, parts_that_choose
from shared.models.options import AdapterConfig
from shared.process.errors import ConfigError
from shared.process.printing import note


@dataclass(frozen=True)
class Targets:
    """Arguments of PEFT's `LoraConfig`, with names as short as they can be: an adapter then fits other classes, too."""

    target_modules: list[str]
    target_parameters: list[str]
    exclude_modules: str | None
    left_out: list[str]  # what carries none although it was to, with the reason


def find_targets(base: Any, adapter: AdapterConfig) -> Targets:
    """The modules and parameters that get adapters.

    all-linear: every linear layer that text passes through but the head and routers, and the fused weights of experts.
    Layers that PEFT cannot adapt are left out.

    Raises:
        ConfigError: the flags name what the model does not have.
    """
    outer = outer_parts(base)
    modules = {name: module for name, module in base.named_modules() if name}
    parameters = dict(base.named_parameters())
    for flag, names in (("lora_target_modules", adapter.lora_target_modules), ("modules_to_save", adapter.modules_to_save)):
        for name in names if names != ("all-linear",) else ():  # PEFT skips unknown names if one matches
            if not _matches(modules, [name]) and not (flag == "lora_target_modules" and _matches(parameters, [name])):
                raise ConfigError(f"--{flag} {name}: the model has no module of that name")
    towers = "|".join(rf"{re.escape(name)}(\..*)?" for name in outer)
    if adapter.lora_target_modules != ("all-linear",):
        named = [name for name in adapter.lora_target_modules if _matches(modules, [name])]
        rest = [name for name in adapter.lora_target_modules if name not in named]
        return Targets(named, rest, towers or None, [])
    left_out: dict[str, list[str]] = {}
    experts, _ = experts_of(base.config)
    choosers = parts_that_choose(base)
    whole = _matches(modules, adapter.modules_to_save)  # trained whole, so without adapters
    chosen = []
    for name, module in modules.items():
        is_linear = isinstance(module, nn.Linear | Conv1D) and module is not base.get_output_embeddings()
        if not is_linear or any(name == part or name.startswith(f"{part}.") for part in (*outer, *whole)):
            continue
        parent, _, child = name.rpartition(".")
        if _is_router(name, module, experts):
            why = "routers"
        elif "experts" in parent.split(".") and not adapter.lora_experts:
            why = "--no_lora_experts"
        elif any(name.startswith(f"{part}.") for part in choosers):
            why = "they choose tokens, and get no gradient"
        elif not _is_one_product(module):
            why = "more than one matrix product"
        elif _reads_weight(modules.get(parent, base), child) or not _peft_takes(base, child):
            why = "the weight is read past the adapter"
        else:
            chosen.append(name)
            continue
        left_out.setdefault(why, []).append(name)
    # PEFT takes some names for fused experts'. By their parameters these layers can be named all the same.
    kept = _names_that_peft_keeps(base, {_end(name) for name in chosen})
    by_parameter = [f"{name}.weight" for name in chosen if _end(name) not in kept]
    chosen = [name for name in chosen if _end(name) in kept]
    if fused := _fused_experts(modules, outer, experts):
        if adapter.lora_experts:
            by_parameter += fused
        else:
            left_out.setdefault("--no_lora_experts", []).extend(fused)
    is_quantised = adapter.load_in_4bit or adapter.load_in_8bit
    if is_quantised and fused:
        size = sum(parameters[name].numel() for name in fused)
        note(f"the fused experts, {size:,} parameters, stay in 16 bits: bitsandbytes quantises linear layers only")
    if adapter.lora_dropout or adapter.use_dora or adapter.init_lora_weights == "pissa":
        why, cannot = "not with --lora_dropout, --use_dora or --init_lora_weights pissa", by_parameter
    else:
        why, cannot = "quantised", [name for name in by_parameter if is_quantised and name not in fused]
    if lost := _lost_by_peft(base, [*chosen, *(name.removesuffix(".weight") for name in by_parameter)]):
        left_out["PEFT would not load them"] = lost
        chosen = [name for name in chosen if name not in lost]
        by_parameter = [name for name in by_parameter if name.removesuffix(".weight") not in lost]
    if cannot:
        left_out[why], by_parameter = cannot, [name for name in by_parameter if name not in cannot]
    target_parameters = _shortest(set(by_parameter), [name for name in parameters if name not in by_parameter], parts=2)
    short = {_end(name) for name in chosen}
    inside = [name for name in modules if not re.fullmatch(towers, name)] if outer else list(modules)
    others = _shortest(set(_matches(inside, short)) - set(chosen), chosen)
    exclude = "|".join([*([towers] if towers else []), *(rf"(.*\.)?{re.escape(name)}" for name in others)])
    about = [f"{', '.join(_shortest(set(names), [], parts=2))} ({why})" for why, names in left_out.items()]
    return Targets(sorted(short), target_parameters, exclude or None, about)


def not_to_quantise(name: str, text_only: bool) -> list[str] | None:
    """The modules of the checkpoint `name` that stay in 16 bits; None: as the library chooses, all but the head.

    These are parts that text does not pass through, which are saved as they were, and layers whose weight is read as it is.
    """
    config = from_hub(AutoConfig, name)
    with torch.device("meta"):
        model = from_architecture(class_of(config, text_only), config)
    modules = dict(model.named_modules())
    linear = [(name, module) for name, module in modules.items() if isinstance(module, nn.Linear)]
    kept = outer_parts(model)
    for name, module in linear:
        parent, _, child = name.rpartition(".")
        if _reads_weight(modules[parent], child, also_dtype=True) or not _is_one_product(module):
            kept.append(name)
    head = [name for name, module in linear if module is model.get_output_embeddings()]
    return [*kept, *head] if kept else None


def describe(model: nn.Module) -> str:
    """The trained parts of a model with adapters and their numbers of parameters, for the summary."""
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            names = name.split(".")
            place = next((i for i, part in enumerate(names) if part.startswith("lora_") or part == "modules_to_save"), -1)
            holder: Any = model.get_submodule(".".join(names[:place]))
            part = next(n for n in reversed(names[:place]) if n != "base_layer")
            counts[f"{part}.{p}" if (p := getattr(holder, "parameter_name", "")) else part] += parameter.numel()
    return ", ".join(f"{name} {number:,}" for name, number in counts.items())


def _matches(names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Those that PEFT takes for one of the wanted: the same, or one ends with it after a dot."""
    wanted = tuple(wanted)
    ends = tuple(f".{name}" for name in wanted)
    return [name for name in names if name in wanted or name.endswith(ends)]


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _shortest(names: set[str], others: list[str], parts: int = 1) -> list[str]:
    """Ends of `names`, of at least so many parts, that none of the others has."""
    found = set()
    for name in names:
        words = name.split(".")
        ends = (".".join(words[-n:]) for n in range(parts, len(words) + 1))
        found.add(next((end for end in ends if not _matches(others, [end])), name))
    return sorted(found)


def _is_router(name: str, module: Any, experts: int | None) -> bool:
    """Whether a linear layer scores experts, or is the gate of a shared one."""
    parts = name.split(".")
    is_named = any("router" in part or part.endswith("gate") for part in parts)
    return experts is not None and is_named and getattr(module, "out_features", None) in (1, experts)


def _fused_experts(modules: dict[str, Any], outer: list[str], experts: int | None) -> list[str]:
    """Names of parameters with the weights of all experts, [experts, ...]; some models count idle ones, too."""
    return [
        f"{name}.{own}"
        for name, module in modules.items()
        if experts and not any(name.startswith(f"{part}.") for part in outer)
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
        and (parameter.shape[0] == experts or name.endswith(".experts"))
        and not isinstance(module, nn.Conv1d)
    ]


def _is_one_product(module: Any) -> bool:
    """Whether a linear layer of a class of the model's own, as routers are, still maps [..., in] to [..., out]."""
    if not type(module).__module__.startswith("transformers.models."):
        return True
    try:
        found = module(module.weight.new_zeros(2, 3, module.in_features))
    except (TypeError, ValueError, RuntimeError):
        return False
    return isinstance(found, torch.Tensor) and found.shape == (2, 3, module.out_features)


def _reads_weight(parent: Any, child: str, also_dtype: bool = False) -> bool:
    """Whether a module's code uses a layer's weight itself, as kernels of whole Mamba blocks do: no adapter would count."""
    try:
        source = inspect.getsource(type(parent))
    except (OSError, TypeError):
        return False
    harmless = r"(?!\.(device|shape|size))" if also_dtype else r"(?!\.(dtype|device|shape|size))"
    return bool(re.search(rf"self\.{re.escape(child)}\.weight\b{harmless}", source))


def _peft_takes(base: Any, child: str) -> bool:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    try:
        _check_lora_target_modules_mamba(LoraConfig(), base, child)
    except ValueError:
        return False
    return True


def _lost_by_peft(base: Any, names: list[str]) -> list[str]:
    """The adapters whose weights PEFT would look for under another name: it renames keys as those of old checkpoints."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    @cache
    def is_lost(name: str) -> bool:
        key = f"base_model.model.{name}.lora_A.weight"
        try:
            return key not in convert_peft_adapter_state_dict_for_transformers(base, LoraConfig(), {key: torch.zeros(1, 1)})
        except Exception:  # as for weights that it would join: they keep their names
            return False

    return [name for name in names if is_lost(re.sub(r"\.\d+\.", ".0.", name))]  # one block stands for all


def _names_that_peft_keeps(base: Any, names: set[str]) -> set[str]:
    """PEFT turns names of experts before transformers 5, such as gate_proj, into those of fused weights."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=sorted(names))
    try:
        convert_peft_config_for_transformers(config, base, None)
    except ValueError:  # it knows one of two names
        return names
    return set(config.target_modules or ())
