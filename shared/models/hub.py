"""Models from the Hub or a folder, safely."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from huggingface_hub.errors import HFValidationError
from torch import nn

from shared.process.collectives import on_main
from shared.process.errors import ConfigError, NotNow, first_line, is_of_the_network, is_out_of_memory
from shared.process.printing import print_main

# What loaders read from a model's folder, each one JSON object.
_DESCRIPTIONS = (
    *("config.json", "generation_config.json", "adapter_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    "model.safetensors.index.json",
)
_CONVERT_MODEL = (
    "from transformers import {loader} as M; "
    "M.from_pretrained({folder!r}, use_safetensors=False).save_pretrained({folder!r})"
)
_CONVERT_ADAPTER = (
    "import torch, safetensors.torch as s; "
    "s.save_file(torch.load({file!r}, weights_only=True), {folder!r} + '/adapter_model.safetensors', {{'format': 'pt'}})"
)


_AN_ADAPTER = (
    "{name}: an adapter, not a model. lora_finetune goes on with it as --adapter_name_or_path beside its base as "
    "--model_name_or_path; elsewhere merge it first (--merge_adapter)"
)


def from_hub(auto_class: Any, name: str | Path, *, first: Any = None, **options: Any) -> Any:
    """`auto_class.from_pretrained` for what a user typed: no remote code, no pickled weights, one clear line.

    Weights are asked for with `use_safetensors=True`, and are all there: none starts at random unsaid.

    Raises:
        ConfigError: it is not there, is damaged, needs code of its own, has no safetensors weights, or is to attend in a
            way that cannot be trained here.
        NotNow: the Hub does not answer.
    """
    _refuse_flex_on_cpu(options)
    is_of_text = any(word in auto_class.__name__ for word in ("Tokenizer", "Processor"))
    if first is None and not is_of_text and os.path.isfile(os.path.join(name, "adapter_config.json")):
        raise ConfigError(_AN_ADAPTER.format(name=name))
    arguments = [str(name)] if first is None else [first, str(name)]  # PEFT's classes take the base model first
    if first is None:
        options["trust_remote_code"] = False
    whole = bool(options.get("use_safetensors")) and "output_loading_info" not in options
    if os.path.isfile(name):
        raise ConfigError(f"{name}: a file; a model is given as the folder that holds its config.json and weights")
    if os.path.isdir(name):
        _refuse_damaged(Path(name))
        if first is not None or options.get("use_safetensors"):
            _refuse_pickles(Path(name), auto_class.__name__)
    try:
        with _no_pickles(name):
            loaded = auto_class.from_pretrained(*arguments, **options, **({"output_loading_info": True} if whole else {}))
    except ConfigError:
        raise
    except Exception as error:  # these libraries raise nearly anything for a file that is not what they expect
        text = str(error)
        if is_out_of_memory(error):
            raise
        if is_of_the_network(error):
            here = "" if os.path.isdir(name) else "no such folder here, and "
            raise NotNow(f"{name}: {here}{first_line(error)}") from error
        if not os.path.isdir(name) and any(isinstance(e, HFValidationError) for e in (error, error.__cause__)):
            reason = "no such folder, and no name of a model on the Hub, which is OWNER/MODEL"
        elif "trust_remote_code" in text:
            reason = "it needs code of its own, which is never run here: take an architecture that transformers has"
        elif options.get("use_safetensors") and "safetensors" in text and not os.path.isdir(name):
            convert = _CONVERT_MODEL.format(loader=auto_class.__name__, folder=str(name))
            reason = f'{first_line(error)} Pickled weights are not loaded; to convert them: python -c "{convert}"'
        else:
            reason = first_line(error)
            reason = " ".join(text.split()) if reason.endswith(":") else reason
        raise ConfigError(f"{name}: {reason}") from error
    if not whole:
        return loaded
    model, info = loaded
    if getattr(model, "_hf_peft_config_loaded", False):  # of the Hub, which would be left aside when new ones are added
        raise ConfigError(_AN_ADAPTER.format(name=name))
    if getattr(model, "generation_config", None) is not None:
        try:  # here and not at the end of the training, when some versions find that they do not save such settings
            _try_to_save(model.generation_config)
        except ValueError as error:
            raise ConfigError(f"{name}: generation_config.json: {' '.join(str(error).split())}") from None
    if lost := sorted(info["missing_keys"]):
        raise ConfigError(f"{name}: {len(lost)} weights are missing in its files, such as {lost[0]}")
    if left := sorted(info["unexpected_keys"]):  # other heads, mostly, which nobody misses
        print_main(f"warning: {name}: {len(left)} weights in its files have no place in this model, such as {left[0]}")
    return model


def _try_to_save(generation_config: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        generation_config.save_pretrained(folder)


def from_architecture(auto_class: Any, architecture: Any, **options: Any) -> Any:
    """`auto_class.from_config`: a model with random weights.

    Raises:
        ConfigError: there is no such model, whether building it would tell or only saving it, hours later; or it is to
            attend in a way that cannot be trained here.
    """
    _refuse_flex_on_cpu(options)
    try:
        if hasattr(architecture, "validate"):
            architecture.validate()
        return auto_class.from_config(architecture, trust_remote_code=False, **options)
    except Exception as error:  # sizes of a wrong type or of none that fit can fail anywhere
        if is_out_of_memory(error):
            raise
        raise ConfigError(f"{type(architecture).__name__}: {first_line(error.__cause__ or error)}") from error


def _refuse_flex_on_cpu(options: dict[str, Any]) -> None:
    if options.get("attn_implementation") == "flex_attention" and PartialState().device.type == "cpu":
        raise ConfigError("--attn_implementation flex_attention has no gradient on a CPU: use sdpa")


def _refuse_damaged(folder: Path) -> None:
    """Raise a ConfigError that names the damaged file of a model's folder, which its loader's own error may not."""
    from safetensors import safe_open

    found = [folder / name for name in _DESCRIPTIONS if (folder / name).is_file()]
    if not found:
        raise ConfigError(f"{folder}: no model in the format of the Hub, there is no config.json")
    for file in found:
        try:
            if not isinstance(json.loads(file.read_text(encoding="utf-8")), dict):
                raise ValueError("expected one JSON object")
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: damaged, not valid JSON ({first_line(error)})") from None
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except Exception as error:  # safetensors' own type is not public
            raise ConfigError(f"{file}: damaged, not valid safetensors ({first_line(error)})") from None


def _refuse_pickles(folder: Path, loader: str) -> None:
    pickles = sorted(path for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if not pickles or any(folder.glob("*.safetensors")):
        return
    convert = _CONVERT_ADAPTER if pickles[0].name == "adapter_model.bin" else _CONVERT_MODEL
    command = convert.format(loader=loader, folder=str(folder), file=str(pickles[0]))
    raise ConfigError(
        f"{pickles[0]}: a pickle, which can run code when it is read, so it is not; to convert it to safetensors: "
        f'python -c "{command}"'
    )


@contextlib.contextmanager
def _no_pickles(name: str | Path) -> Iterator[None]:
    """Let nothing unpickle weights meanwhile: PEFT falls back to a pickle without being asked."""
    torch_load = torch.load

    def refuse(file: Any, *_: Any, **__: Any) -> None:
        raise ConfigError(f"{name}: {file} is a pickle, which can run code when it is read: take safetensors weights")

    torch.load = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.load = torch_load


def override(config: Any, changes: str | None) -> None:
    """Apply `hidden_size=256,num_hidden_layers=4` to a model config.

    Raises:
        ConfigError: not of that form, or an attribute that the config does not have.
    """
    for change in re.split(r",(?![^\[]*\])", changes or ""):  # but not within a list
        if not change:
            continue
        key, equals, value = change.partition("=")
        if not equals or not hasattr(config, key):
            known = sorted(k for k in vars(config) if not k.startswith("_"))
            raise ConfigError(f"--config_overrides {change}: expected key=value with a key of {', '.join(known)}")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        try:
            setattr(config, key, parsed)
        except Exception as error:  # configs check the type themselves, with an error of their own
            raise ConfigError(f"--config_overrides {change}: {first_line(error.__cause__ or error)}") from error


def identity_of_frozen(name: str, model: nn.Module) -> str:
    """Changes when weights that are not trained do; empty where all are. Every rank calls this.

    The commit of a model from the Hub, a digest of some of what the files of one in a folder hold.

    Args:
        name: where the model was loaded from; empty for random weights, which the seed makes again.
    """
    if not name or all(parameter.requires_grad for parameter in model.parameters()):
        return ""
    if not Path(name).is_dir():
        return str(getattr(getattr(model, "config", None), "_commit_hash", None))

    def digest() -> str:
        found = hashlib.sha256()
        for path in sorted(Path(name).glob("*.safetensors")):
            size = path.stat().st_size
            found.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                for i in range(64):  # training changes all of them
                    file.seek(i * max(0, size - 2**16) // 63)
                    found.update(file.read(2**16))
        return found.hexdigest()

    return on_main(digest)
