"""Checkpoints of model families that see images: small random weights, a processor and a chat template.

make("qwen2_5_vl", folder)  # loads as the Hub's do: AutoProcessor, the class in `architectures`
"""

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
SMALL = {"height": 28, "width": 28}
IDEFICS = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
PINPOINTS = [[28, 56], [56, 28], [56, 56]]


def processor_of(family: str, t: Any, tokenizer: Any) -> Any:
    """Of small images; `t` is transformers."""
    match family:
        case "qwen2_5_vl" | "qwen3_vl" | "qwen3_5":
            name, kind = ("Qwen2_5_VL", "Qwen2VL") if family == "qwen2_5_vl" else ("Qwen3VL", "Qwen3VL")
            pixels = {"patch_size": 14, "merge_size": 2, "min_pixels": 4 * 14**2, "max_pixels": 64 * 14**2}
            video = getattr(t, f"{kind}VideoProcessor")(patch_size=14, merge_size=2)
            return getattr(t, f"{name}Processor")(t.Qwen2VLImageProcessor(**pixels), tokenizer, video)
        case "smolvlm":
            sampling = {"fps": 1, "max_frames": 2, "video_size": {"longest_edge": 28}}
            video = t.SmolVLMVideoProcessor(**IDEFICS, video_sampling=sampling)
            return t.SmolVLMProcessor(t.SmolVLMImageProcessor(**IDEFICS), tokenizer, video, image_seq_len=1)
        case "idefics3":
            return t.Idefics3Processor(t.Idefics3ImageProcessor(**IDEFICS), tokenizer, image_seq_len=1)
        case "gemma3":
            images = t.Gemma3ImageProcessor(size={"height": 56, "width": 56})
            return t.Gemma3Processor(images, tokenizer, image_seq_length=4)
        case "mistral3":
            images = t.PixtralImageProcessor(patch_size=14, size={"longest_edge": 112})
            return t.PixtralProcessor(images, tokenizer, patch_size=14, spatial_merge_size=2)
        case "internvl":
            images = t.GotOcr2ImageProcessor(size=SMALL, min_patches=1, max_patches=4, crop_to_patches=True)
            return t.InternVLProcessor(images, tokenizer, t.InternVLVideoProcessor(size=SMALL), image_seq_length=1)
        case "glm4v":
            pixels = {"size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 112 * 112}, "patch_size": 14, "merge_size": 2}
            return t.Glm4vProcessor(t.Glm4vImageProcessor(**pixels), tokenizer, t.Glm4vVideoProcessor(patch_size=14))
        case "llava_onevision":
            images = t.LlavaOnevisionImageProcessor(size=SMALL, image_grid_pinpoints=PINPOINTS)
            options = {"num_image_tokens": 4, "vision_feature_select_strategy": "full", "patch_size": 14}
            return t.LlavaOnevisionProcessor(images, tokenizer, t.LlavaOnevisionVideoProcessor(size=SMALL), **options)
        case "llama4":
            images = t.Llama4ImageProcessor(size=SMALL, max_patches=4)
            return t.Llama4Processor(images, tokenizer, patch_size=14, pixel_shuffle_ratio=0.5)
        case "paligemma":
            images = t.SiglipImageProcessor(size=SMALL)
            images.image_seq_length = 4
            return t.PaliGemmaProcessor(images, tokenizer)
        case "phi4_multimodal":  # it counts an image's tokens for 32 x 32 patches alone
            images = t.Phi4MultimodalImageProcessor(size={"height": 448, "width": 448}, patch_size=14, dynamic_hd=2)
            return t.Phi4MultimodalProcessor(images, t.Phi4MultimodalFeatureExtractor(), tokenizer)


QWEN = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
QWEN |= {f"{name}_token_id": f"<|{name}|>" for name in ("vision_start", "vision_end")}
IN_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
AROUND = {"image_token_id": "<image>", "_": "<fake_token_around_image>", "__": "<global-img>"}
PIXTRAL = {"image_token_id": "[IMG]", "_": "[IMG_BREAK]", "__": "[IMG_END]"}
INTERN = {"image_token_id": "<IMG_CONTEXT>", "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>"}
INTERN |= {"end_image_token": "</img>", "video_token": "<video>"}
GLM = {"image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": "<|begin_of_image|>"}
GLM |= {"image_end_token_id": "<|end_of_image|>", "video_start_token_id": "<|begin_of_video|>"}
GLM |= {"video_end_token_id": "<|end_of_video|>"}
LLAVA = {"image_token_id": "<image>", "video_token_id": "<video>"}
LLAMA = {"image_token_id": "<|patch|>", "_": "<|image|>", "__": "<|image_start|>", "___": "<|image_end|>"}
PHI = {"image_token": "<|endoftext10|>", "audio_token": "<|endoftext11|>"}
# a window of 16 tokens would not reach an image from its answer
OF_PHI = {"vision_config": {"image_size": 448, "crop_size": 448}, "sliding_window": None}
# family: (how its chat template writes an image; its special tokens, by their names in tokenizer and config; changes)
FAMILIES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "qwen2_5_vl": (IN_QWEN, QWEN, {}),
    "qwen3_vl": (IN_QWEN, QWEN, {"text_config": model_families.MROPE}),
    "qwen3_5": (IN_QWEN, QWEN, {}),
    "gemma3": ("<start_of_image>", GEMMA, {"mm_tokens_per_image": 4, "vision_config": {"image_size": 56}}),
    "smolvlm": ("<image>", AROUND, {"scale_factor": 2}),
    "idefics3": ("<image>", AROUND, {"scale_factor": 2}),
    "mistral3": ("[IMG]", PIXTRAL, {"spatial_merge_size": 2}),
    "internvl": ("<IMG_CONTEXT>", INTERN, {"downsample_ratio": 0.5}),
    "glm4v": ("<|begin_of_image|><|image|><|end_of_image|>", GLM, {}),
    "llava_onevision": ("<image>", LLAVA, {"vision_feature_select_strategy": "full", "image_grid_pinpoints": PINPOINTS}),
    "llama4": ("<|image|>", LLAMA, {"vision_config": {"intermediate_size": 128}}),
    "phi4_multimodal": (PHI["image_token"], PHI, OF_PHI),
    "paligemma": ("<image>", {"image_token": "<image>"}, {}),
}


def make(family: str, folder: Path) -> type:
    """Write a checkpoint with its processor to `folder`. Returns the model's class."""
    import torch
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    image, tokens, changes = FAMILIES[family]
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
    processor = processor_of(family, transformers, tokenizer)  # which may add tokens
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
