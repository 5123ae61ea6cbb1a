"""Checkpoints of model families that see images: small random weights, a processor and a chat template.

make("qwen2_5_vl", folder)  # loads as the Hub's do: AutoProcessor, the class in `architectures`
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import model_families

TEMPLATE = (
    "{{% for message in messages %}}{{{{ '<|im_start|>' + message['role'] + '\n' }}}}"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}"
    "{{% for part in message['content'] %}}{{% if part['type'] == 'image' %}}{{{{ '{image}' }}}}"
    "{{% else %}}{{{{ part['text'] }}}}{{% endif %}}{{% endfor %}}{{% endif %}}{{{{ '<|im_end|>\n' }}}}{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\n' }}}}{{% endif %}}"
)
BEGIN_AT_ZERO = ("mm_input_projection_weight", "img_feature_extensor")  # with which a model would see nothing


def _qwen(name: str, patch: int) -> Callable[[Any, Any], Any]:
    def make(t: Any, tokenizer: Any) -> Any:
        pixels = {"patch_size": patch, "merge_size": 2, "min_pixels": 4 * patch**2, "max_pixels": 64 * patch**2}
        kind = "Qwen3VL" if name == "Qwen3VL" else "Qwen2VL"
        video = getattr(t, f"{kind}VideoProcessor")(patch_size=patch, merge_size=2)
        return getattr(t, f"{name}Processor")(t.Qwen2VLImageProcessor(**pixels), tokenizer, video)

    return make


def _smolvlm(t: Any, tokenizer: Any) -> Any:
    size = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
    video = t.SmolVLMVideoProcessor(**size, video_sampling={"fps": 1, "max_frames": 2, "video_size": {"longest_edge": 28}})
    return t.SmolVLMProcessor(t.SmolVLMImageProcessor(**size), tokenizer, video, image_seq_len=1)


def _idefics3(t: Any, tokenizer: Any) -> Any:
    size = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
    return t.Idefics3Processor(t.Idefics3ImageProcessor(**size), tokenizer, image_seq_len=1)


def _gemma3(t: Any, tokenizer: Any) -> Any:
    images = t.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    return t.Gemma3Processor(images, tokenizer, image_seq_length=4)


def _mistral3(t: Any, tokenizer: Any) -> Any:
    images = t.PixtralImageProcessor(patch_size=14, size={"longest_edge": 112})
    return t.PixtralProcessor(images, tokenizer, patch_size=14, spatial_merge_size=2)


def _internvl(t: Any, tokenizer: Any) -> Any:
    images = t.GotOcr2ImageProcessor(size={"height": 28, "width": 28}, min_patches=1, max_patches=4, crop_to_patches=True)
    video = t.InternVLVideoProcessor(size={"height": 28, "width": 28})
    return t.InternVLProcessor(images, tokenizer, video, image_seq_length=1)


def _glm4v(t: Any, tokenizer: Any) -> Any:
    pixels = {"size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 112 * 112}, "patch_size": 14, "merge_size": 2}
    return t.Glm4vProcessor(t.Glm4vImageProcessor(**pixels), tokenizer, t.Glm4vVideoProcessor(patch_size=14))


def _llava_onevision(t: Any, tokenizer: Any) -> Any:
    size = {"height": 28, "width": 28}
    images = t.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]])
    video = t.LlavaOnevisionVideoProcessor(size=size)
    options = {"num_image_tokens": 4, "vision_feature_select_strategy": "full", "patch_size": 14}
    return t.LlavaOnevisionProcessor(images, tokenizer, video, **options)


def _llama4(t: Any, tokenizer: Any) -> Any:
    images = t.Llama4ImageProcessor(size={"height": 28, "width": 28}, max_patches=4)
    return t.Llama4Processor(images, tokenizer, patch_size=14, pixel_shuffle_ratio=0.5)


def _paligemma(t: Any, tokenizer: Any) -> Any:
    images = t.SiglipImageProcessor(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    return t.PaliGemmaProcessor(images, tokenizer)


def _phi4(t: Any, tokenizer: Any) -> Any:
    # it counts an image's tokens for 32 x 32 patches alone
    images = t.Phi4MultimodalImageProcessor(size={"height": 448, "width": 448}, patch_size=14, dynamic_hd=2)
    return t.Phi4MultimodalProcessor(images, t.Phi4MultimodalFeatureExtractor(), tokenizer)


# family: (what makes its processor; how its chat template writes an image; its special tokens, and their names in
# tokenizer and config)
QWEN = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
IN_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
AROUND = {"image_token_id": "<image>", "_": "<fake_token_around_image>", "__": "<global-img>"}
IN_IDEFICS = ("<image>", AROUND, {"scale_factor": 2})
IN_PIXTRAL = {"image_token_id": "[IMG]", "_": "[IMG_BREAK]", "__": "[IMG_END]"}
FAMILIES: dict[str, tuple[Callable[[Any, Any], Any], str, dict[str, str], dict[str, Any]]] = {
    "qwen2_5_vl": (_qwen("Qwen2_5_VL", 14), IN_QWEN, QWEN, {}),
    "qwen3_vl": (_qwen("Qwen3VL", 14), IN_QWEN, QWEN, {"text_config": model_families.MROPE}),
    "qwen3_5": (_qwen("Qwen3VL", 14), IN_QWEN, QWEN, {}),
    "gemma3": (
        _gemma3,
        "<start_of_image>",
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        {"mm_tokens_per_image": 4, "vision_config": {"image_size": 56}},
    ),
    "smolvlm": (_smolvlm, *IN_IDEFICS),
    "idefics3": (_idefics3, *IN_IDEFICS),
    "mistral3": (_mistral3, "[IMG]", IN_PIXTRAL, {"spatial_merge_size": 2}),
    "internvl": (
        _internvl,
        "<IMG_CONTEXT>",
        {
            "image_token_id": "<IMG_CONTEXT>",
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
        {"downsample_ratio": 0.5},
    ),
    "glm4v": (
        _glm4v,
        "<|begin_of_image|><|image|><|end_of_image|>",
        {
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
            "video_start_token_id": "<|begin_of_video|>",
            "video_end_token_id": "<|end_of_video|>",
        },
        {},
    ),
    "llava_onevision": (
        _llava_onevision,
        "<image>",
        {"image_token_id": "<image>", "video_token_id": "<video>"},
        {"vision_feature_select_strategy": "full", "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
    ),
    "llama4": (
        _llama4,
        "<|image|>",
        {"image_token_id": "<|patch|>", "_": "<|image|>", "__": "<|image_start|>", "___": "<|image_end|>"},
        {"vision_config": {"intermediate_size": 128}},
    ),
    "phi4_multimodal": (
        _phi4,
        "<|endoftext10|>",
        {"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"},
        # a window of 16 tokens would not reach an image from its answer
        {"vision_config": {"image_size": 448, "crop_size": 448}, "sliding_window": None},
    ),
    "paligemma": (_paligemma, "<image>", {"image_token": "<image>"}, {}),
}


def make(family: str, folder: Path) -> type:
    """Write a checkpoint with its processor to `folder`. Returns the model's class."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    processor_of, image, tokens, changes = FAMILIES[family]
    model_class = model_families.make(family, folder)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", "<|im_end|>", *dict.fromkeys(tokens.values())]})
    named = {name: token for name, token in tokens.items() if name.endswith("_token")}
    tokenizer.chat_template = TEMPLATE.format(image=image)
    tokenizer.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, **({"extra_special_tokens": named} if named else {}))
    tokenizer.save_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items() if name.endswith("_id")}
    if family == "gemma3":
        ids = {"image_token_id": tokenizer.convert_tokens_to_ids("<image_soft_token>")}
        ids |= {"boi_token_index": tokenizer.boi_token_id, "eoi_token_index": tokenizer.eoi_token_id}
    config = AutoConfig.from_pretrained(folder)
    if family == "phi4_multimodal":
        config.vision_config.image_token_id = tokenizer.convert_tokens_to_ids(tokens["image_token"])
        config.audio_config.audio_token_id = tokenizer.convert_tokens_to_ids(tokens["audio_token"])
    for name, value in (ids | changes).items():
        of = getattr(config, name) if isinstance(value, dict) else config
        for key, part in value.items() if isinstance(value, dict) else [(name, value)]:
            setattr(of, key, part)
    if "image_token_id" in ids:
        config.image_token_index = ids["image_token_id"]
    processor = processor_of(transformers, tokenizer)  # which may add tokens
    text = config.get_text_config()
    text.vocab_size = len(tokenizer)
    transformers.set_seed(model_families.SEED)
    model = model_class(config)
    for name, parameter in model.named_parameters():
        if name.endswith(BEGIN_AT_ZERO):
            torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config = transformers.GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    processor.chat_template = tokenizer.chat_template
    processor.save_pretrained(folder)
    return model_class
