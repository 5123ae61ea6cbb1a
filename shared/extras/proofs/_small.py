"""A small model in the place of a large one: the same architecture, few narrow layers."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from shared.commands.verify_resume import without_ours
from shared.models.hub import from_hub
from shared.process.errors import ConfigError, first_line

LARGE = 100_000_000  # parameters: a step of more takes a CPU a minute
# Values of config fields, wherever a config or a part of it has the field.
_NAMES: dict[int, str] = {
    1: "n_group topk_group n_shared_experts first_k_dense_replace",
    2: "num_hidden_layers n_layer n_layers num_layers depth num_key_value_heads "
    "num_experts_per_tok moe_k moe_topk top_k_experts linear_num_key_heads mamba_n_groups "
    "n_groups indexer_kv_heads",
    4: "num_attention_heads n_head n_heads num_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts linear_num_heads linear_num_value_heads",
    8: "mamba_n_heads mamba_num_heads mamba_d_state ssm_state_size state_size hc_lowrank "
    "hidden_size_per_layer_input",
    16: "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim linear_head_dim linear_key_head_dim "
    "linear_value_head_dim mamba_d_head mamba_head_dim index_n_heads index_head_dim",
    32: "moe_intermediate_size shared_intermediate_size q_lora_rank kv_lora_rank "
    "shared_expert_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size",
    64: "hidden_size n_embd d_model embed_dim dim word_embed_proj_dim out_hidden_size "
    "projector_hidden_size projection_hidden_size projector_input_dim projector_output_dim "
    "vision_output_dim output_proj_dims",
    128: "intermediate_size ffn_dim mlp_dim intermediate_size_mlp projection_intermediate_size "
    "mamba_d_ssm",
}
SIZES = {name: value for value, names in _NAMES.items() for name in names.split()}
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers")
STAGES = {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1]}
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def shrunk(config: Any) -> Any:
    """The values of a config, as `to_dict` gives them, with few narrow layers."""
    if isinstance(config, list):
        return [shrunk(value) for value in config]
    if not isinstance(config, dict):
        return config
    small = {name: shrunk(value) for name, value in config.items()}
    for name, value in config.items():
        if name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            small[name] = min(value, SIZES[name])
        elif name in STAGES and isinstance(value, list):
            small[name] = STAGES[name][: len(value)]
        elif name == "mrope_section" and isinstance(value, list):
            small[name] = [2, 3, 3]  # of half a head
    if (heads := config.get("num_key_value_heads")) and heads == config.get("num_attention_heads"):
        small["num_key_value_heads"] = small["num_attention_heads"]
    lists = [name for name in PER_LAYER if isinstance(config.get(name), list)]
    if lists:
        # layers of each kind, in their order
        kinds = [*zip(*(config[name] for name in lists), strict=True)]
        places = sorted(kinds.index(kind) for kind in {*kinds})
        places += [1] * (len(places) == 1)
        small |= {name: [config[name][place] for place in places] for name in lists}
        small |= {n: len(places) for n in ("num_hidden_layers", "n_layer") if n in config}
    return small


def build(path: str, folder: Path) -> int:
    """Write a small model like the one at `path`, with its tokenizer or processor, into `folder`.
    Returns the number of its parameters; 0, and writes nothing, where that one is small itself.

    Raises:
        ConfigError: it cannot be read, or its architecture cannot be made small.
    """
    import torch
    import transformers
    from huggingface_hub import snapshot_download

    config = from_hub(transformers.AutoConfig, path)
    names = config.architectures or []
    kind: Any = next((getattr(transformers, n) for n in names if hasattr(transformers, n)), None)
    if kind is None or type(config).__name__ == "TimmWrapperConfig":
        return 0
    with torch.device("meta"):
        large = sum(p.numel() for p in kind(config).parameters())
    if large < LARGE:
        return 0
    try:
        small = type(config).from_dict(shrunk(config.to_dict()))
        torch.manual_seed(0)
        model = kind(small).eval()
        if hasattr(small.get_text_config(), "vocab_size"):
            with torch.no_grad():
                model(input_ids=torch.arange(4)[None])
    except Exception as error:
        raise ConfigError(
            f"{path} cannot be made small ({first_line(error)}): give a small model of its kind "
            "with --model_name_or_path, or --no_shrink"
        ) from error
    patterns = [f"*{end}" for end in WEIGHTS]
    source = path if Path(path).is_dir() else snapshot_download(path, ignore_patterns=patterns)
    ignored = shutil.ignore_patterns(*patterns, "*.safetensors.index.json", "checkpoint-*")
    shutil.copytree(source, folder, ignore=ignored)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def flag_of(command: Sequence[str], name: str) -> str | None:
    """What the command, or the file of its --config, gives for a flag."""
    found = None
    for token, after in zip(command, [*command[1:], ""], strict=True):
        flag, _, value = token.partition("=")
        if flag in (f"--{name}", f"--{name.replace('_', '-')}"):
            return value or after
        if flag == "--config":
            try:
                settings = yaml.safe_load(Path(value or after).read_text(encoding="utf-8"))
                found = settings.get(name)
            except (OSError, AttributeError, yaml.YAMLError):
                continue  # the command says so
    return found


def with_small_model(command: Sequence[str], folder: Path) -> list[str]:
    """The command with a small model in the place of a large one; says so."""
    path = flag_of(command, "model_name_or_path")
    if not path:
        return [*command]
    count = build(path, folder / "small-model")
    if not count:
        return [*command]
    print(
        f"{path} is large: its architecture with few narrow layers and random weights "
        f"({count:,} parameters) takes its place; --no_shrink takes the model itself",
        file=sys.stderr,
    )
    kept = without_ours(command, folder, {"model_name_or_path"})
    return [*kept, "--model_name_or_path", str(folder / "small-model")]
