"""Which parts of a model carry LoRA adapters."""

import inspect
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
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
    """Arguments of PEFT's `LoraConfig`."""

    target_modules: list[str]  # full names, which PEFT shortens
    target_parameters: list[str]
    left_out: list[str]  # what carries none although it was to, with the reason


def find_targets(base: Any, adapter: AdapterConfig) -> Targets:
    """The modules and parameters that get adapters.

    all-linear: every linear layer that text passes through but the head and routers, and the fused
    weights of experts. Layers that PEFT cannot adapt are left out.

    Raises:
        ConfigError: the flags name what the model does not have.
    """
    modules = {name: module for name, module in base.named_modules() if name}
    parameters = dict(base.named_parameters())
    outer = outer_parts(base)
    inside = {name: module for name, module in modules.items() if not _is_in(name, outer)}
    _require_names("modules_to_save", adapter.modules_to_save, [*modules])
    if adapter.lora_target_modules != ("all-linear",):
        _require_names("lora_target_modules", adapter.lora_target_modules, [*modules, *parameters])
        wanted = adapter.lora_target_modules
        rest = [name for name in wanted if not _matches(modules, [name])]
        # of a vision tower only by a name that text's modules do not have
        found = [_matches(inside, [name]) or _matches(modules, [name]) for name in wanted]
        names = [*dict.fromkeys(chain(*found))]
        for name in [*names, *_matches(parameters, rest)]:
            if _is_lost_by_peft(base, name.removesuffix(".weight")):
                raise ConfigError(f"--lora_target_modules: PEFT would not load that of {name}")
        return Targets(names, rest, [])
    whole = _matches(modules, adapter.modules_to_save)  # trained whole, so without adapters
    inside = {name: module for name, module in inside.items() if not _is_in(name, whole)}
    head = base.get_output_embeddings()
    reasons = {
        name: _why_not(name, module, base, adapter)
        for name, module in inside.items()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    chosen = [name for name, reason in reasons.items() if not reason]
    # PEFT takes some names for fused experts'. By their parameters these layers can be named all
    # the same.
    as_module = _names_that_peft_keeps(base, chosen)
    fused = _fused_experts(inside, experts_of(base.config)[0])
    by_parameter = [*(f"{name}.weight" for name in chosen if name not in as_module), *fused]
    reasons |= {name: _why_not_by_parameter(name, fused, adapter) for name in by_parameter}
    for name in [*as_module, *by_parameter]:
        if not reasons[name] and _is_lost_by_peft(base, name.removesuffix(".weight")):
            reasons[name] = "PEFT would not load them"
    in_16_bits = [
        name for name in fused if not hasattr(modules[name.rpartition(".")[0]], "quant_states")
    ]
    if in_16_bits and adapter.load_in_4bit:
        size = sum(parameters[name].numel() for name in in_16_bits)
        note(f"the fused experts, {size:,} parameters, stay in 16 bits: no option quantises them")
    targets = [name for name in by_parameter if not reasons[name]]
    left_out = []
    for reason in dict.fromkeys(filter(None, reasons.values())):
        names = _shortest([name for name in reasons if reasons[name] == reason], [])
        left_out.append(f"{', '.join(names)} ({reason})")
    return Targets(
        target_modules=[name for name in as_module if not reasons[name]],
        target_parameters=_shortest(targets, [name for name in parameters if name not in targets]),
        left_out=left_out,
    )


def _require_names(flag: str, wanted: tuple[str, ...], names: list[str]) -> None:
    for name in wanted:  # PEFT skips unknown names if one matches
        if not _matches(names, [name]):
            raise ConfigError(f"--{flag} {name}: the model has no module of that name")


def _why_not(name: str, module: Any, base: Any, adapter: AdapterConfig) -> str:
    """Why a linear layer carries no adapter; "" if it does."""
    experts = experts_of(base.config)[0]
    # one for each expert, or the gate of a shared one
    has_scores = getattr(module, "out_features", None) in (1, experts)
    if experts and has_scores and re.search(r"router|gate(\.|$)", name):
        return "routers"
    if "experts" in name.split(".")[:-1] and not adapter.lora_experts:
        return "--no_lora_experts"
    if _is_in(name, parts_that_choose(base)):
        return "they choose tokens, and get no gradient"
    if not _is_one_product(module):
        return "more than one matrix product"
    if _reads_weight(base, name):
        return "the weight is read past the adapter"
    return ""


def _why_not_by_parameter(name: str, fused: list[str], adapter: AdapterConfig) -> str:
    """Why a weight that PEFT would have to adapt as a parameter carries no adapter; "" if it
    does.
    """
    if name in fused and not adapter.lora_experts:
        return "--no_lora_experts"
    if adapter.lora_dropout or adapter.use_dora:
        return "not with --lora_dropout or --use_dora"
    return ""


def not_to_quantise(checkpoint: str) -> list[str] | None:
    """The modules of a checkpoint that stay in 16 bits; None: as the library chooses, all but the
    head.

    These are parts that text does not pass through, which are saved as they were, and layers whose
    weight is read as it is.
    """
    config = from_hub(AutoConfig, checkpoint)
    with torch.device("meta"):
        model = from_architecture(class_of(config), config)
    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    kept = outer_parts(model)
    for name, module in linear.items():
        if _reads_weight(model, name, also_dtype=True) or not _is_one_product(module):
            kept.append(name)
    head = [name for name, module in linear.items() if module is model.get_output_embeddings()]
    return [*kept, *head] if kept else None


def describe(model: nn.Module) -> str:
    """The trained parts of a model with adapters and their numbers of parameters, for the
    summary.
    """
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            place = re.split(r"\.lora_|\.modules_to_save", name)[0]
            names = [place.replace(".base_layer", "").rpartition(".")[2]]
            # PEFT's wrapper of a weight that is no layer of its own
            if weight := getattr(model.get_submodule(place), "parameter_name", ""):
                names.append(weight)
            counts[".".join(names)] += parameter.numel()
    return ", ".join(f"{name} {number:,}" for name, number in counts.items())


def _matches(names: Iterable[str], wanted: Iterable[str]) -> list[str]:
    """Those that PEFT takes for one of the wanted: the same, or one ends with it after a dot."""
    wanted = tuple(wanted)
    ends = tuple(f".{name}" for name in wanted)
    return [name for name in names if name in wanted or name.endswith(ends)]


def _is_in(name: str, parts: list[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def _shortest(names: list[str], others: list[str]) -> list[str]:
    """Ends of `names`, of two parts or more, that none of the others has: they fit other classes of
    the model, too.
    """
    ends = set()
    for name in names:
        words = name.split(".")
        candidates = (".".join(words[-count:]) for count in range(2, len(words) + 1))
        ends.add(next((end for end in candidates if not _matches(others, [end])), name))
    return sorted(ends)


def _fused_experts(modules: dict[str, Any], experts: int | None) -> list[str]:
    """Names of parameters with the weights of all experts, [experts, ...]; some models count idle
    ones, too.
    """
    return [
        f"{name}.{parameter_name}"
        for name, module in modules.items()
        if experts and not isinstance(module, nn.Conv1d)
        for parameter_name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and (parameter.shape[0] == experts or name.endswith(".experts"))
    ]


def _is_one_product(module: Any) -> bool:
    """Whether a linear layer of a class of the model's own, as routers are, still maps [..., in] to
    [..., out].
    """
    if not type(module).__module__.startswith("transformers.models."):
        return True
    try:
        found = module(module.weight.new_zeros(2, 3, module.in_features))
    except (TypeError, ValueError, RuntimeError):
        return False
    return isinstance(found, torch.Tensor) and found.shape == (2, 3, module.out_features)


def _reads_weight(model: Any, name: str, also_dtype: bool = False) -> bool:
    """Whether the code of the module around a layer uses its weight itself, as kernels of whole
    Mamba blocks do: no adapter would count.
    """
    parent, _, child = name.rpartition(".")
    try:
        source = inspect.getsource(type(model.get_submodule(parent)))
    except (OSError, TypeError):
        return False
    harmless = r"(?!\.(device|shape|size))" if also_dtype else r"(?!\.(dtype|device|shape|size))"
    return bool(re.search(rf"self\.{re.escape(child)}\.weight\b{harmless}", source))


def _is_lost_by_peft(base: Any, name: str) -> bool:
    """Whether PEFT would look for an adapter's weights under another name: it renames keys as those
    of old checkpoints.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import (
        convert_peft_adapter_state_dict_for_transformers,
    )

    key = f"base_model.model.{name}.lora_A.weight"
    try:
        return key not in convert_peft_adapter_state_dict_for_transformers(
            base, LoraConfig(), {key: torch.zeros(1, 1)}
        )
    except Exception:  # as for weights that it would join: they keep their names
        return False


def _names_that_peft_keeps(base: Any, names: list[str]) -> list[str]:
    """PEFT turns names of experts before transformers 5, such as gate_proj, into those of fused
    weights.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=names)
    try:
        convert_peft_config_for_transformers(config, base, None)
    except ValueError:  # it knows one of two names
        return names
    return [name for name in names if name in (config.target_modules or ())]
