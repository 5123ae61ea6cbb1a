"""Checkpoints of many model families with small random weights, as the Hub holds them.

make("qwen3_5", folder)  # returns the class that the family's real checkpoints name in `architectures`
"""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

SEED = 0
# Values of config fields, wherever a config or a part of it has the field.
_NAMES: dict[Any, str] = {
    0.1: "initializer_range init_std",  # enough for each token to change what comes after it
    1: "n_group topk_group n_shared_experts",
    2: "num_hidden_layers n_layer n_layers depth num_key_value_heads num_experts_per_tok moe_k",
    4: "num_attention_heads n_head n_heads num_heads num_experts num_local_experts n_routed_experts moe_num_experts "
    "linear_num_heads linear_num_value_heads pos_emb_height pos_emb_width",
    8: "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim "
    "mamba_n_heads mamba_num_heads mamba_d_head mamba_head_dim mamba_d_state ssm_state_size state_size",
    14: "patch_size",
    # index_n_heads: of few heads, many scores are the same zero, and which of them is chosen depends on the row's length
    16: "index_n_heads sliding_window attention_chunk_size moe_intermediate_size shared_intermediate_size q_lora_rank "
    "kv_lora_rank shared_expert_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size "
    "num_position_embeddings mamba_chunk_size chunk_size index_head_dim index_topk",
    28: "image_size",
    32: "hidden_size n_embd d_model embed_dim dim word_embed_proj_dim out_hidden_size projector_hidden_size "
    "projection_hidden_size projector_input_dim projector_output_dim vision_output_dim output_proj_dims",
    48: "intermediate_size ffn_dim mlp_dim intermediate_size_mlp projection_intermediate_size",
    64: "mamba_d_ssm position_embedding_size",
    1024: "n_positions",
    16384: "max_position_embeddings",
}
SIZES = {name: value for value, names in _NAMES.items() for name in names.split()}
SIZES |= {"linear_num_key_heads": 2, "mamba_n_groups": 2, "n_groups": 2}

WINDOWS = ["sliding_attention", "full_attention"]
HYBRID = ["linear_attention", "full_attention"]
TEXT, VISION = "text_config", "vision_config"
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}}
GEMMA4 = {TEXT: {"layer_types": WINDOWS, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 4096}}
GEMMA4[TEXT] |= {"enable_moe_block": True, "top_k_experts": 2}
QWEN4: dict[str, Any] = {"layer_types": ["linear_attention", "indexed_attention"], "hc_lowrank": 8, "ple_layer_ids": [1]}
QWEN4 |= {"heads_per_ngram": 2, "ngram_vocab_size_base": 100, "split_ngram_parts": 1, "indexer_n_heads": 16}
QWEN4 |= {"indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4}
DEEPSEEK4: dict[str, Any] = {"layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"]}
DEEPSEEK4 |= {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}
GLM4 = MROPE | {"first_k_dense_replace": 1, "head_dim": 16}
GLM5: dict[str, Any] = {"layer_types": QWEN4["layer_types"], "mlp_layer_types": ["dense", "sparse"], "qk_rope_head_dim": 0}
LONGCAT = {"num_layers": 1, "zero_expert_num": 1, "moe_topk": 2}


def _plain(ending: str = "ForCausalLM", **names: str) -> dict[str, tuple[str, dict[str, Any], str | None]]:
    """Families whose config needs only `SIZES`, with the beginnings of their classes."""
    return {family: (name + ending, {}, None) for family, name in names.items()}


# family: (class in `architectures`, changes to its config, a weight that its class leaves in the file: of extra blocks)
FAMILIES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    # dense
    "gpt2": ("GPT2LMHeadModel", {}, None),
    **_plain(llama="Llama", mistral="Mistral", qwen2="Qwen2", qwen3="Qwen3", gemma2="Gemma2"),
    "gemma3_text": ("Gemma3ForCausalLM", {"layer_types": WINDOWS}, None),
    **_plain(phi3="Phi3", gpt_neox="GPTNeoX", opt="OPT", falcon="Falcon", olmo2="Olmo2"),
    "olmo3": ("Olmo3ForCausalLM", {"layer_types": WINDOWS}, None),
    **_plain(granite="Granite", glm4="Glm4", cohere="Cohere"),
    "cohere2": ("Cohere2ForCausalLM", {"layer_types": WINDOWS}, None),
    **_plain(ministral3="Ministral3"),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, None),
    **_plain(nanochat="NanoChat", ernie4_5="Ernie4_5", seed_oss="SeedOss"),
    "exaone4": ("Exaone4ForCausalLM", {"layer_types": WINDOWS}, None),
    **_plain(apertus="Apertus", hunyuan_v1_dense="HunYuanDenseV1", nemotron="Nemotron", arcee="Arcee"),
    **_plain(starcoder2="Starcoder2"),
    # sparse
    **_plain(mixtral="Mixtral", qwen3_moe="Qwen3Moe"),
    "gpt_oss": ("GptOssForCausalLM", {"layer_types": WINDOWS}, None),
    **_plain(mistral4="Mistral4"),
    "glm4_moe": ("Glm4MoeForCausalLM", {"first_k_dense_replace": 1}, "model.layers.46.eh_proj.weight"),
    **_plain(minimax_m2="MiniMaxM2"),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {"first_k_dense_replace": 1}, "model.layers.61.eh_proj.weight"),
    "dots1": ("Dots1ForCausalLM", {"first_k_dense_replace": 1}, None),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {}, "model.mtp_block.0.weight"),
    **_plain(hunyuan_v1_moe="HunYuanMoEV1", olmoe="Olmoe"),
    "exaone_moe": ("ExaoneMoeForCausalLM", {"layer_types": WINDOWS}, "mtp.fc.weight"),
    **_plain(granitemoe="GraniteMoe", qwen2_moe="Qwen2Moe"),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", {}, "model.mtp.layers.0.eh_proj.weight"),
    "longcat_flash": ("LongcatFlashForCausalLM", LONGCAT, "model.mtp.layers.0.eh_proj.weight"),
    "deepseek_v4": ("DeepseekV4ForCausalLM", DEEPSEEK4, "mtp.0.eh_proj.weight"),
    **_plain(hy_v4="HYV4"),
    # of several kinds of layers
    "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, None),
    "lfm2_moe": ("Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}, None),
    "lfm3": ("Lfm3ForCausalLM", {"num_hidden_layers": 3, "layer_types": ["conv", *WINDOWS[::-1]]}, None),
    **_plain(mamba="Mamba"),
    "mamba2": ("Mamba2ForCausalLM", {"head_dim": 8, "num_heads": 8}, None),
    "qwen3_next": ("Qwen3NextForCausalLM", {"layer_types": HYBRID}, "mtp.fc.weight"),
    "nemotron_h": ("NemotronHForCausalLM", {}, "mtp.layers.0.eh_proj.weight"),
    **_plain(falcon_h1="FalconH1"),
    "bamba": ("BambaForCausalLM", {"attn_layer_indices": [1]}, None),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba", "attention"]}, None),
    "jamba": ("JambaForCausalLM", {"attn_layer_period": 2, "attn_layer_offset": 1}, None),
    "kimi_linear": ("KimiLinearForCausalLM", {"layer_types": HYBRID}, None),
    "olmo_hybrid": ("OlmoHybridForCausalLM", {"layer_types": HYBRID}, None),
    # multimodal
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", {TEXT: {"layer_types": HYBRID}}, "mtp.fc.weight"),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", {TEXT: {"layer_types": HYBRID}}, "mtp.fc.weight"),
    "qwen4_exp": ("Qwen4ExpForConditionalGeneration", {TEXT: QWEN4}, "mtp.fc.weight"),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", {TEXT: MROPE}, None),
    **_plain("ForConditionalGeneration", qwen3_vl="Qwen3VL", qwen3_vl_moe="Qwen3VLMoe"),
    "gemma3": ("Gemma3ForConditionalGeneration", {TEXT: {"layer_types": WINDOWS}}, None),
    "gemma4": ("Gemma4ForConditionalGeneration", GEMMA4, None),
    **_plain("ForConditionalGeneration", mistral3="Mistral3"),
    # It sees all tokens of a sample: scores of a random indexer tie, and which token is chosen depends on the padding.
    "mistral_large4": ("MistralLarge4ForConditionalGeneration", {TEXT: {"index_topk": 128}}, None),
    **_plain("ForConditionalGeneration", internvl="InternVL", smolvlm="SmolVLM"),
    "glm4v": ("Glm4vForConditionalGeneration", {TEXT: MROPE}, None),
    "glm4v_moe": ("Glm4vMoeForConditionalGeneration", {TEXT: GLM4}, "model.layers.46.eh_proj.weight"),
    "glm5_next": ("Glm5NextForConditionalGeneration", {TEXT: GLM5}, "model.language_model.layers.45.eh_proj.weight"),
    "llama4": ("Llama4ForConditionalGeneration", {TEXT: {"no_rope_layers": [1, 0]}}, None),
    "lfm3_vl": ("Lfm3VlForConditionalGeneration", {TEXT: {"layer_types": ["conv", "full_attention"]}}, None),
    **_plain("ForConditionalGeneration", minimax_m3_vl="MiniMaxM3Sparse"),
    "step3p7": ("Step3p7ForConditionalGeneration", {TEXT: {"mlp_layer_types": ["dense", "sparse"]}}, None),
    **_plain("ForConditionalGeneration", llava_onevision="LlavaOnevision", muse_glimmer="MuseGlimmer"),
    "kimi_k25": ("Kimi_K25ForConditionalGeneration", {TEXT: {"first_k_dense_replace": 1}}, None),
}

# Families of tests/vision_models.py alone: what they learn of text is that of another here.
MORE_THAT_SEE = _plain("ForConditionalGeneration", idefics3="Idefics3", paligemma="PaliGemma")
MORE_THAT_SEE |= _plain(phi4_multimodal="Phi4Multimodal")


def shape(config_class: Any, changes: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Arguments of a small config: `SIZES` and the tokenizer's ids where it has such fields, its parts, and `changes`."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    ids |= {"pad_token_id": tokenizer.pad_token_id, "vocab_size": len(tokenizer)}
    if "kv_lora_rank" in fields:  # latent attention: each head has its own keys
        ids["num_key_value_heads"] = SIZES["num_attention_heads"]
    values = {key: value for key, value in (SIZES | ids).items() if key in fields}
    for name, part in config_class.sub_configs.items():
        inner = dict(changes.get(name, {}))
        if "model_type" in inner:
            from transformers import CONFIG_MAPPING

            part = CONFIG_MAPPING[inner["model_type"]]
        elif part.__name__ == "AutoConfig":
            part = type(getattr(config_class(), name))
            inner["model_type"] = part.model_type
        values[name] = shape(part, inner, tokenizer)
    return values | {key: value for key, value in changes.items() if key not in config_class.sub_configs}


def make(family: str, folder: Path, *, more_weights: bool = False, **changes: Any) -> type:
    """Write a checkpoint of `family` to `folder`. Returns its class.

    Args:
        more_weights: add the family's weight that its class does not load.
        changes: to its config.
    """
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    from shared import demo

    name, own, extra = copy.deepcopy(FAMILIES.get(family) or MORE_THAT_SEE[family])  # configs change what they are given
    model_class = getattr(transformers, name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.MODEL)
    config = model_class.config_class(**shape(model_class.config_class, own | changes, tokenizer))
    torch.manual_seed(SEED)
    model = model_class(config)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model.generation_config = transformers.GenerationConfig(**ids, temperature=0.7, do_sample=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if hasattr(config, VISION):  # what the parts of a processor leave
        (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "CLIPImageProcessor"}))
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": f"{family}Processor"}))
    if more_weights and extra:
        file = folder / "model.safetensors"
        weights = load_file(file) | {extra: torch.randn(4, 4)}
        save_file(weights, file, metadata={"format": "pt"})
    return model_class
