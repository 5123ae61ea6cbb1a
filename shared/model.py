"""What needs to know a model's inside: gradient checkpointing, regional compilation, FLOPs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from accelerate.utils import broadcast, extract_model_from_parallel
from huggingface_hub.errors import HFValidationError
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shared.config import ConfigError, NotNow, first_line, is_of_the_network, redact
from shared.exits import is_out_of_memory
from shared.launch import on_main, say

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
        say(f"warning: {name}: {len(left)} weights in its files have no place in this model, such as {left[0]}")
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


def _context(model: Any) -> int | None:
    """Tokens that a model can see at once; None if any number."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def require_fit(model: Any, tokenizer: Any, seq_length: int) -> None:
    """Refuse a sequence longer than the model's context, tokens that the model has no embedding for, and models that do not
    predict the next token from those before it alone.

    Raises:
        ConfigError: with both numbers, or what is wrong.
    """
    text = model.config.get_text_config()
    if getattr(text, "cross_attention_layers", None):
        raise ConfigError(f"{type(model).__name__} has blocks that only images reach: text alone cannot train them")
    # Encoders can be made decoders, by a setting that GPT-NeoX has, too, and never looks at.
    sees_all = getattr(text, "is_decoder", True) is False and "gpt_neox" not in text.model_type
    if sees_all or text.model_type in ("xlm", "xlnet"):
        raise ConfigError(
            f"{type(model).__name__} sees the tokens that it is to predict (its config says is_decoder: "
            f"{str(getattr(text, 'is_decoder', 'nothing')).lower()}): take a causal model"
        )
    if getattr(text, "output_router_logits", False):
        say("warning: the loss that balances experts, which the model's config asks for (output_router_logits), is left out")
    context = _context(model)
    if context is not None and seq_length > context:
        raise ConfigError(f"--seq_length {seq_length} is longer than the model's context of {context} tokens")
    embeddings = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > embeddings:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, the model only {embeddings} embeddings: "
            "they do not belong together, or one of them was extended alone"
        )


def pissa_to_lora(weights: dict[str, torch.Tensor], initial: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An adapter trained from PiSSA's start as an ordinary one, of twice the rank, on the unchanged base.

    PiSSA subtracts the initial product from the base, so what was learned is B A - B0 A0 = [B, -B0] [A; A0]
    (appendix C of arXiv 2404.02948). Other tensors pass through.
    """

    def convert(name: str, value: torch.Tensor) -> torch.Tensor:
        if ".lora_A." in name:
            return torch.cat([value, initial[name]], dim=0)
        if ".lora_B." in name:
            return torch.cat([value, -initial[name]], dim=1)
        return value

    return {name: convert(name, value) for name, value in weights.items()}


def card(title: str, data: str, results: dict[str, float], settings: dict[str, Any], *, load: str, **front: str) -> str:
    """A model card: what it was trained on and how, with its results.

    Secrets in it are masked: cards are made to be published.

    Args:
        settings: in YAML's types.
        load: the line of Python that loads it.
        front: metadata for the Hub.
    """
    front = {"library_name": "transformers", **front}
    lines = [
        "---",
        *(f"{k}: {v}" for k, v in front.items()),
        "---",
        "",
        f"# {title}",
        "",
        f"Data: {data}",
        "",
        "```python",
        load,
        "```",
        "",
        "## Results",
        "",
    ]
    lines += ["| metric | value |", "|---|---|", *(f"| {k} | {v:.4f} |" for k, v in results.items())]
    given = yaml.safe_dump(redact({k: v for k, v in settings.items() if v is not None}), sort_keys=False, allow_unicode=True)
    lines += ["", "## Settings", "", f"```yaml\n{given}```", ""]
    return redact("\n".join(lines))


def outside_of_text(model: Any) -> str | None:
    """A pattern of the names of modules that text does not pass through: the vision tower of a multimodal model."""
    inside = {model.get_decoder(), model.get_output_embeddings()}

    def outer(module: nn.Module, prefix: str) -> Iterator[str]:
        for name, child in module.named_children():
            if child not in inside:
                around = not inside.isdisjoint(child.modules())
                yield from outer(child, f"{prefix}{name}.") if around else [re.escape(prefix + name)]

    names = [] if model in inside else list(outer(model, ""))
    return rf"({'|'.join(names)})(\..*)?" if names else None


def freeze_outside_of_text(model: Any) -> None:
    """Leave what text does not pass through as it is: no gradient reaches it, and DDP would wait for one."""
    if model.config.get_text_config() is model.config:
        return
    inside = {model.get_decoder(), model.get_output_embeddings()}
    used = {parameter for module in inside if module is not None for parameter in module.parameters()}
    unused = [parameter for parameter in model.parameters() if parameter not in used]
    for parameter in unused:
        parameter.requires_grad_(False)
    if unused:
        say(f"{sum(map(_numel, unused)):,} parameters, which text does not pass through, stay as they are")


def require_own_embeddings(model: Any, why: str) -> None:
    """Refuse adapters on an embedding that input and output share: added to it, they change both.

    Raises:
        ConfigError: which one it is, and `why` it is added.
    """
    ends = [getattr(end, "base_layer", end) for end in (model.get_input_embeddings(), model.get_output_embeddings())]
    for name, module in model.named_modules():
        if getattr(module, "base_layer", None) in ends and hasattr(module, "lora_A") and ends[0].weight is ends[1].weight:
            raise ConfigError(
                f"{why} adds the adapter of {name.rpartition('.')[2]} to a matrix that the model's input and output share: "
                "name it in --modules_to_save in place of --lora_target_modules"
            )


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


def end_generation_at(model: Any, end: int | None) -> None:
    """Let `generate` end at the token `end`, too: what ends a turn need not be what ends a base model's text."""
    settings = model.generation_config
    before = settings.eos_token_id
    ends = [] if before is None else [before] if isinstance(before, int) else list(before)
    if end is None or end in ends:
        return
    settings.eos_token_id = [*ends, end] if ends else end
    try:
        _try_to_save(settings)
    except ValueError:  # settings that contradict each other are saved only as they were
        settings.eos_token_id = before
        say(f"warning: the model's generation settings cannot be changed, so that they do not end a text at token {end}")


@contextlib.contextmanager
def eagerly(model: nn.Module) -> Iterator[None]:
    """Compute without the compiled forwards of a model's modules: an evaluation.

    Sizes that come and go are compiled as variables, slower ones, and from then on for the training, too.
    """
    compiled = {module: call for module in model.modules() if (call := module._compiled_call_impl) is not None}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


def first_lines(text: str, most: int = 8) -> str:
    """What a log needs of a text: a model that has not learned yet repeats itself."""
    lines = text.splitlines()
    return text if len(lines) <= most else "\n".join([*lines[:most], f"... and {len(lines) - most} more lines"])


@torch.no_grad()
def continuations(
    model: nn.Module,
    tokenizer: Any,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    end: int | None = None,
    sample: bool = False,
    seed: int = 0,
) -> list[str]:
    """Continue each prompt (token ids) up to the end-of-text token or the token `end`, greedily or by sampling.

    Goes through the prepared model's own forward, without a cache, so that it works under every strategy. What fills a
    row up comes after all that is looked at; without it each token would be a new length to choose kernels for. Every
    rank calls this with the same prompts.
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    context = _context(extract_model_from_parallel(model)) or sys.maxsize
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(max_new_tokens):
            seen = ids[-context:]
            row = [*seen, *[0] * (min(-len(seen) % 64, context - len(seen)))]
            with torch.compiler.set_stance("force_eager"):
                logits = model(input_ids=torch.tensor([row], device=device), use_cache=False).logits
            logits = logits[0, len(seen) - 1].float().cpu()
            choice = torch.multinomial(logits.softmax(-1), 1, generator=generator)[0] if sample else logits.argmax()
            # One rank's choice for all: kernels that differ in the last bit would have them end at different lengths.
            ids.append(int(broadcast(choice.to(PartialState().device))))
            if ids[-1] in (tokenizer.eos_token_id, end):
                break
        texts.append(tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True))
    model.train(training)
    return texts


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: the entries of its largest `ModuleList` of one class.

    Raises:
        ConfigError: the model has none.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(b) for b in m}) == 1]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of equal blocks to checkpoint or compile")
    return max(([*modules] for modules in lists), key=lambda found: sum(p.numel() for b in found for p in b.parameters()))


HEADS = ("classifier", "cls_classifier", "distillation_classifier", "head", "dist_head", "head_dist", "score", "fc")


def heads(model: Any) -> list[nn.Module]:
    """The modules that turn an image's features into scores. Raises ConfigError where they have none of the usual names."""
    if hasattr(model, "timm_model"):
        found = model.timm_model.get_classifier()
        return list(found) if isinstance(found, tuple) else [found]
    found = [module for name, module in model.named_children() if name in HEADS]
    if not found:
        raise ConfigError(f"{type(model).__name__} has no head named {', '.join(HEADS[:-1])} or {HEADS[-1]}")
    return found


def set_gradient_checkpointing(model: nn.Module, setting: str) -> None:
    """Recompute the activations of all (`full`) or every N-th block in the backward pass; `none` changes nothing.

    Numerically the same as without: non-reentrant checkpointing restores the generator states. Call it before the
    model is prepared. For blocks of transformers' models (`GradientCheckpointingLayer`).
    """
    if setting == "none":
        return
    if any(isinstance(m, _BatchNorm) and m.track_running_stats for m in model.modules()):
        raise ConfigError("--gradient_checkpointing would count each batch twice in the statistics of BatchNorm")
    if hasattr(model, "timm_model") and setting == "full":
        try:
            model.timm_model.set_grad_checkpointing(True)  # type: ignore[operator, union-attr]
        except (AssertionError, AttributeError):
            raise ConfigError("this timm model does not support --gradient_checkpointing") from None
        return
    every = 1 if setting == "full" else int(setting)

    def recompute(function, *args):
        return checkpoint(function, *args, use_reentrant=False)

    chosen = blocks(model)
    if not all(hasattr(block, "gradient_checkpointing") for block in chosen):
        raise ConfigError(f"{type(model).__name__} does not support --gradient_checkpointing")
    for block in chosen[every - 1 :: every]:
        block.gradient_checkpointing = True  # type: ignore[assignment]
        block._gradient_checkpointing_func = recompute  # type: ignore[assignment]


def compile_blocks(model: nn.Module) -> None:
    """Compile each block in place. Call it before the model is prepared.

    Regional: the compile time does not grow with depth, since equal blocks share the code; and the attention mask is
    chosen outside, so that SDPA keeps `is_causal` and the kernels for it, which compiling the whole model loses.
    """
    # DDP would cut each into graphs of its buckets, to reduce one while the next is computed; between blocks it does anyway.
    torch._dynamo.config.optimize_ddp = False
    for block in blocks(model):
        block.compile()


def _numel(parameter: nn.Parameter) -> int:
    state = getattr(parameter, "quant_state", None)  # 4-bit weights are packed
    return state.shape.numel() if state is not None else parameter.numel()


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(trainable, all) parameters; packed 4-bit weights count by their unpacked number."""
    counts = [(_numel(p), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trained in counts if trained), sum(n for n, _ in counts)


def measure(model: nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """Run `inputs` forward and backward once, freeze what takes no part in it, and return the FLOPs.

    A parameter without a gradient (a mask token that only pretraining used, say) would make DDP wait for it. Call it
    before the model is prepared, compiled or checkpointed.

    Raises:
        ConfigError: the model cannot take these inputs.
    """
    training = model.training
    model.eval()
    with FlopCounterMode(display=False) as counter:
        try:
            logits = model(**inputs).logits
        except (ValueError, RuntimeError, IndexError) as error:
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
            raise ConfigError(f"{type(model).__name__} cannot take {shapes}: {first_line(error)}") from None
        logits.sum().backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.requires_grad_(False)
        parameter.grad = None
    model.train(training)
    return float(counter.get_total_flops())


def flops_per_token(model: nn.Module, seq_length: float) -> float | None:
    """Floating-point operations of forward and backward a token, as MFU counts them (recomputation left out).

    6 N for trained matrices, 4 N for frozen ones that gradients pass through, plus 12 x layers x width x length for
    attention (PaLM, arXiv 2204.02311, appendix B). The input embedding is a look-up and counts nothing; the head counts for
    each token, also where only the targets' logits are computed. Of experts those count that a token is sent to; None where
    the config does not say how many of how many.

    Args:
        seq_length: tokens that see each other; of documents of several lengths the mean over their tokens.
    """
    text: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = next((n for name in names if (n := getattr(text, name, None))), None)
    active = next((n for name in ("num_experts_per_tok", "moe_k", "moe_topk") if (n := getattr(text, name, None))), None)
    embedding = model.get_input_embeddings().weight  # type: ignore[operator, union-attr]
    head = model.get_output_embeddings()  # type: ignore[operator]
    tied = head is not None and head.weight is embedding
    total = 0.0
    for name, parameter in model.named_parameters():
        share = 1.0
        if "experts" in name.split(".") or (experts and parameter.ndim == 3 and parameter.shape[0] == experts):
            if not isinstance(experts, int) or not isinstance(active, int):
                return None
            share = active / experts
        if parameter is not embedding or tied:
            total += (6 if parameter.requires_grad else 4) * share * _numel(parameter)
    width = text.hidden_size
    if getattr(text, "qk_head_dim", None):  # latent attention: keys are wider than values
        width = text.num_attention_heads * (text.qk_head_dim + text.v_head_dim) / 2
    elif getattr(text, "head_dim", None):
        width = text.num_attention_heads * text.head_dim
    return total + 12.0 * text.num_hidden_layers * width * seq_length


def trained_in_fp32(model: nn.Module) -> nn.Module:
    """What is trained gets fp32 weights, also `modules_to_save` of a 16-bit base: small updates would be rounded away."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    spare_input_casts(model)
    return model.train()  # from_pretrained leaves dropout off


def spare_input_casts(model: nn.Module) -> None:
    """Let adapters take what their layers are given: PEFT makes it fp32, autocast the type that it was, and both are kept.

    The same numbers in fewer bytes (with lora_dropout to the rounding of its scale). Not for DoRA and the like, which
    compute more than two products with it.
    """
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled") and not getattr(module, "lora_variant", None):
            module.cast_input_dtype_enabled = False  # type: ignore[assignment]


def keep_quantized(model: nn.Module) -> None:
    """Forbid bitsandbytes to rearrange 4-bit weights in an evaluation, which it does on CPUs with AVX512-BF16.

    It rounds their scales to bf16 and leaves them so: what is trained afterwards would differ, a resumed run from one
    left alone for example, and weights that FSDP has cut would be misread.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
