"""Models of a few thousand random weights."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from shared.models.classifier import name_classes
from tests.conftest import WORDS

VOCAB = 64

WIDE = {"vocab_size": 256, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}
HEADS = WIDE | {"head_dim": 32}
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}


def architectures():
    """Configs of small models of each kind, by name: dense, mixture of experts, hybrid, multimodal."""
    latent = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 32, "qk_nope_head_dim": 32}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    mamba = {"mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 16}
    mamba |= {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"]}
    jamba = {"attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False}
    vision = {"hidden_size": 32, "intermediate_size": 64}
    siglip = vision | {"num_hidden_layers": 5, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    qwen = vision | {"num_heads": 2, "depth": 2, "out_hidden_size": 128, "deepstack_visual_indexes": [0]}
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6]}
    routed = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1}
    return {
        "llama": transformers.LlamaConfig(**HEADS, num_hidden_layers=4),
        "gemma2": transformers.Gemma2Config(**HEADS, num_hidden_layers=6, sliding_window=64),
        "gemma3_text": transformers.Gemma3TextConfig(**HEADS, num_hidden_layers=12, sliding_window=64),
        "gpt_oss": transformers.GptOssConfig(
            **HEADS, num_experts_per_tok=2, num_local_experts=8, num_hidden_layers=4, sliding_window=64
        ),
        "deepseek_v3": transformers.DeepseekV3Config(
            **(WIDE | EXPERTS | latent | routed | {"num_key_value_heads": 4}), num_hidden_layers=6, first_k_dense_replace=2
        ),
        "qwen3_next": transformers.Qwen3NextConfig(
            **HEADS, **EXPERTS, **linear, num_hidden_layers=8, num_experts=8, shared_expert_intermediate_size=64
        ),
        "nemotron_h": transformers.NemotronHConfig(
            **HEADS, **EXPERTS, **mamba, **routed, moe_shared_expert_intermediate_size=64
        ),
        "jamba": transformers.JambaConfig(**WIDE, **jamba, num_experts=4, num_experts_per_tok=2, num_hidden_layers=8),
        "lfm2": transformers.Lfm2Config(**WIDE, num_hidden_layers=6, full_attn_idxs=[2, 4]),
        "mamba": transformers.MambaConfig(vocab_size=256, hidden_size=128, num_hidden_layers=4, state_size=4),
        "gemma3": transformers.Gemma3Config(text_config=HEADS | {"num_hidden_layers": 4}, vision_config=siglip),
        "qwen3_vl": transformers.Qwen3VLConfig(
            text_config=HEADS | {"num_hidden_layers": 4, "rope_scaling": rope},
            vision_config=qwen,
            architectures=["Qwen3VLForConditionalGeneration"],
        ),
    }


def llama(**changes):
    options = {"vocab_size": VOCAB, "num_key_value_heads": 1, "num_hidden_layers": 2, "intermediate_size": 48} | changes
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(hidden_size=32, num_attention_heads=2, **options))


def make(name, attention="sdpa"):
    torch.manual_seed(0)
    if name == "llama":
        return llama(attn_implementation=attention).eval()
    if name in ("qwen2", "windows", "windows of a row"):
        options = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "intermediate_size": 48}
        if name != "qwen2":  # in the second block
            options |= {"use_sliding_window": True, "sliding_window": 4 if name == "windows" else 20, "max_window_layers": 1}
        config = transformers.Qwen2Config(vocab_size=VOCAB, hidden_size=32, attn_implementation=attention, **options)
        return transformers.Qwen2ForCausalLM(config).eval()
    options = {"n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_positions=64, attn_implementation=attention, **options)
    return transformers.GPT2LMHeadModel(config).eval()


def tokens(*shape, seed=0):
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def words(count: int) -> SimpleNamespace:
    """What the checks of a model ask of a tokenizer: its ids, here from 0 without gaps."""
    return SimpleNamespace(get_vocab=lambda: {str(number): number for number in range(count)})


def of_images(name, classes):
    """The config of a small classifier of images."""
    if "timm" in name:
        pytest.importorskip("timm")
    patches = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    patches |= {"image_size": 32, "patch_size": 8}
    windows = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
    stages = {"hidden_sizes": [8, 16], "depths": [2, 1]}
    of_timm = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 16, "num_heads": 2}
    kind, options = {
        "vit": (transformers.ViTConfig, patches),
        "deit": (transformers.DeiTConfig, patches | {"architectures": ["DeiTForImageClassification"]}),
        "clip": (transformers.CLIPConfig, {"vision_config": patches}),
        "swin": (transformers.SwinConfig, windows | {"image_size": 32, "patch_size": 4}),
        "convnext": (transformers.ConvNextConfig, stages | {"num_stages": 2}),
        "resnet": (transformers.ResNetConfig, stages | {"embedding_size": 8, "layer_type": "basic"}),
        "timm": (transformers.TimmWrapperConfig, {"architecture": "resnet10t"}),
        "timm's vit": (transformers.TimmWrapperConfig, {"architecture": "vit_tiny_patch16_224", "model_args": of_timm}),
    }[name]
    config = kind(**options, num_labels=len(classes))
    name_classes(config, classes)
    return config


def save_bert(folder, head, *, cut=False, dropout=0.0, **options):
    """A tiny BERT of this class beside a tokenizer of words, which may cut those of more than three letters in two."""
    special, mask = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"], ["[MASK]"] * (head is transformers.BertForMaskedLM)
    pieces = {word[:3] for word in WORDS} | {f"##{word[3:]}" for word in WORDS if len(word) > 3} if cut else {*WORDS}
    vocabulary = {piece: number for number, piece in enumerate([*special, *sorted(pieces), *mask])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    names |= {"mask_token": "[MASK]"} if mask else {}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    shape |= {"max_position_embeddings": 96, "initializer_range": 0.2, "vocab_size": len(vocabulary)}
    shape |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    head(transformers.BertConfig(**shape, **options)).save_pretrained(folder)
    return folder


def on_meta(config, auto_class=transformers.AutoModelForCausalLM):
    with torch.device("meta"):
        return auto_class.from_config(config)
