"""Models from the Hub or a folder, safely."""

import hashlib
import json
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shared.process.collectives import on_main
from shared.process.errors import ConfigError, NotNow, first_line, is_of_the_network, reason_of
from shared.process.printing import note, print_main

_AN_ADAPTER = (
    "{name}: an adapter, not a model. lora_finetune goes on with it as --adapter_name_or_path "
    "beside its base as "
    "--model_name_or_path; elsewhere merge it first (--merge_adapter)"
)


def from_hub(auto_class: Any, name: str | Path, *, first: Any = None, **options: Any) -> Any:
    """`auto_class.from_pretrained` for what a user typed: no remote code, no pickled weights, one
    clear line.

    With `use_safetensors=True` all weights of the model are in its files: none starts at random
    unsaid.

    Args:
        first: the base model, where an adapter is loaded onto it.

    Raises:
        ConfigError: it is not there, is damaged, needs code of its own, has no safetensors weights,
            or has an attention that cannot be trained here.
        NotNow: the Hub does not answer.
    """
    folder = Path(name)
    is_folder = bool(name) and folder.is_dir()
    of_weights = bool(options.get("use_safetensors"))
    beside_weights = ("Tokenizer", "Processor", "GenerationConfig")
    is_beside = any(word in auto_class.__name__ for word in beside_weights)
    if first is None and not is_beside and (folder / "adapter_config.json").is_file():
        raise ConfigError(_AN_ADAPTER.format(name=name))
    if str(name).startswith(("/", ".")) and not is_folder:
        raise ConfigError(f"{name}: no such folder")
    final = folder / "final"
    if final.is_dir() and not (folder / "config.json").exists():
        raise ConfigError(f"{name}: a run's folder; what it trained is in {final}")
    if is_folder and (of_weights or first is not None):
        _refuse_pickles(folder)
    # PEFT's classes take the base model first
    arguments = [str(name)] if first is None else [first, str(name)]
    if first is None:
        options["trust_remote_code"] = False
    whole = of_weights and "output_loading_info" not in options
    if whole:
        options["output_loading_info"] = True
    if of_weights:
        print_main(f"loading {name}")
    try:
        # PEFT falls back to a pickle without being asked
        with (
            mock.patch.object(torch, "load", partial(_refuse_pickle, name)),
            register_module_parameter_registration_hook(_stay_frozen),
        ):
            loaded = auto_class.from_pretrained(*arguments, **options)
    except ConfigError:
        raise
    # these libraries raise nearly anything for a file that is not what they expect
    except Exception as error:
        reason = ("" if is_folder else "no such folder here, and ") + reason_of(error)
        if is_of_the_network(error):
            raise NotNow(f"{name}: {reason}") from error
        if "trust_remote_code" in str(error):
            reason = (
                "it needs code of its own, which is never run here: take an "
                "architecture that transformers has"
            )
        raise ConfigError(f"{name}: {reason}") from error
    if auto_class.__name__ == "AutoConfig":
        _refuse_weights_elsewhere(loaded, name)
    if not whole:
        return loaded
    model, info = loaded
    # from the Hub; new adapters would leave it aside
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(_AN_ADAPTER.format(name=name))
    if lost := sorted(info["missing_keys"]):
        raise ConfigError(
            f"{name}: {len(lost)} weights are missing in its files, such as {lost[0]}"
        )
    if left := sorted(info["unexpected_keys"]):  # other heads, mostly
        note(
            f"warning: {name}: {len(left)} weights in its files have no place in "
            f"this model, such as {left[0]}"
        )
    return model


def file_of(name: str | Path, file: str) -> str | None:
    """The path of a checkpoint's file, in its folder or in the Hub's cache; None if it has none."""
    from transformers.utils import cached_file

    missing = {
        f"_raise_exceptions_for_{what}": False
        for what in ("missing_entries", "gated_repo", "connection_errors")
    }
    return cached_file(str(name), file, **missing)


def attention_option(attn_implementation: str) -> dict[str, str]:
    """The option of `from_pretrained` for --attn_implementation; none for auto: transformers then
    takes what works.
    """
    return {} if attn_implementation == "auto" else {"attn_implementation": attn_implementation}


def from_architecture(auto_class: Any, architecture: Any, **options: Any) -> Any:
    """A model of a class, or of the one that an auto class chooses, with random weights.

    Raises:
        ConfigError: there is no such model, or it has an attention that cannot be trained here.
    """
    try:
        if hasattr(architecture, "validate"):
            architecture.validate()
        if hasattr(auto_class, "from_config"):
            return auto_class.from_config(architecture, trust_remote_code=False, **options)
        return auto_class._from_config(architecture, **options)
    except Exception as error:  # sizes of a wrong type or of none that fit can fail anywhere
        reason = reason_of(error.__cause__ or error)
        raise ConfigError(f"{type(architecture).__name__}: {reason}") from error


def _refuse_pickles(folder: Path) -> None:
    pickles = sorted(
        path for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt")
    )
    if pickles and not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{pickles[0]}: a pickle, which can run code when it is read, so it is not: take "
            "safetensors weights, which "
            "save_pretrained of transformers and PEFT writes"
        )


def _refuse_weights_elsewhere(config: Any, name: str | Path) -> None:
    """Refuse what a config asks timm to read when a model is made, even one with random weights:
    files and URLs.
    """
    given = getattr(config, "model_args", None) or {}
    named = [
        key
        for key in given
        if key.startswith("pretrained") or key in ("checkpoint_path", "cache_dir")
    ]
    if ":" in str(getattr(config, "architecture", "")):  # hf-hub:, local-dir:
        named.append("architecture")
    if named:
        raise ConfigError(
            f"{name}: its config.json names weights from elsewhere "
            f"({', '.join(named)}), which are not read"
        )


def _stay_frozen(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """Freeze a weight that takes the place of one that the model's class made frozen: transformers
    gives it to the model as one to train.
    """
    made = module._parameters.get(name)
    if made is not None and parameter is not None and not made.requires_grad:
        parameter.requires_grad_(False)


def _refuse_pickle(name: str | Path, file: Any, *_: Any, **__: Any) -> None:
    """Stands in for `torch.load`."""
    raise ConfigError(
        f"{name}: {file} is a pickle, which can run code when it is read: take safetensors weights"
    )


def override(config: Any, changes: str | None) -> None:
    """Apply `hidden_size=256,num_hidden_layers=4` to a model config.

    Raises:
        ConfigError: not of that form, or an attribute that the config does not have.
    """
    # but not in a list or object
    for change in re.split(r",(?![^\[]*\])(?![^{]*\})", changes or ""):
        if not change:
            continue
        key, equals, value = change.partition("=")
        part = config if hasattr(config, key) else config.get_text_config()
        if not equals or not hasattr(part, key):
            known = sorted(k for k in vars(config) if not k.startswith("_"))
            raise ConfigError(
                f"--config_overrides {change}: expected key=value with a key of {', '.join(known)}"
            )
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        try:
            setattr(part, key, parsed)
        except Exception as error:  # configs check the type themselves, with an error of their own
            raise ConfigError(
                f"--config_overrides {change}: {first_line(error.__cause__ or error)}"
            ) from error


def identity_of_frozen(name: str, model: nn.Module) -> str:
    """What frozen weights are known by: a Hub model's commit, or a digest of parts of a folder's
    files. Empty if none are frozen. Every rank calls this.

    Args:
        name: where the model was loaded from; empty for random weights, which the seed makes again.
    """
    if not name or all(parameter.requires_grad for parameter in model.parameters()):
        return ""
    return identity_of_weights(name, model)


def identity_of_weights(
    name: str, model: nn.Module | None = None, files: str = "*.safetensors"
) -> str:
    """What the weights at `name` are known by: a Hub model's commit, or a digest of parts of a
    folder's files. Every rank calls this.

    Args:
        model: was loaded from there. None: take the one file in the Hub's cache.
        files: their names in a folder.
    """
    from transformers.utils import cached_file

    folder = Path(name)
    if not folder.is_dir():
        if model is not None:
            return str(getattr(getattr(model, "config", None), "_commit_hash", None))
        folder = Path(str(cached_file(name, files))).parent

    def digest() -> str:
        found = hashlib.sha256()
        for path in sorted(folder.glob(files)):
            size = path.stat().st_size
            found.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                for i in range(64):  # training changes all of them
                    file.seek(i * max(0, size - 2**16) // 63)
                    found.update(file.read(2**16))
        return found.hexdigest()

    return on_main(digest)
