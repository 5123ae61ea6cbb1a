"""The demo of images in conversations: a small model learns to say which digit it sees.

It is LLaVA's architecture: the demo's Llama, a vision tower of three random blocks, a projector.
The images are scikit-learn's handwritten digits.
"""

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from shared import demo
from shared.config import parse as configs
from shared.data import prepared
from shared.images.digits import write_digits
from shared.process.errors import ConfigError
from shared.process.files import cache_dir
from shared.process.printing import quieten_imports

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HELD_OUT = 297  # the last digits, by other people than most of the first
SIZE = 32  # pixels of height and width
STEPS = 240  # about two minutes on two CPU cores
TEMPLATE = (
    "{% for message in messages %}{{ '### ' + message['role'].capitalize() + ':\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}"
    "{{ (eos_token if message['role'] == 'assistant' else '') + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)


def of_digits(config: Any) -> Any:
    """The config of a template with the model, the data and the budget of the demo. Every rank
    calls this.

    Raises:
        ConfigError: it names data.
    """
    if not config.data.is_demo:
        raise ConfigError("--demo_images has a model and data of its own: name no other data")
    folder = prepared.build_once(cache_dir() / "demo-digits-2", write_demo)
    return configs.replace(
        config,
        demo_images=False,  # from here on these are data and a model like any others
        model_name_or_path=str(folder / "model"),
        train_file=(str(folder / "train.jsonl"),),
        validation_file=(str(folder / "validation.jsonl"),),
        seq_length=64,
        global_batch_size=config.batch.global_batch_size or 32,
        per_device_train_batch_size=16,
        max_steps=config.batch.max_steps or STEPS,
        learning_rate=config.optim.learning_rate or 1e-3,
        train_vision="all",
        vision_lr_scale=1.0,
        eval_answers=config.eval_answers or 64,
        show_answers=2,
        max_new_tokens=4,
    )


def write_demo(folder: Path) -> None:
    """Write model/, train.jsonl, validation.jsonl and the images that they name."""
    write_model(folder / "model")
    write_digits(folder / "images")
    lines = []
    for file in sorted(folder.glob("images/*/*.png"), key=attrgetter("name")):
        asked = [
            {"type": "image", "path": str(file.relative_to(folder))},
            {"type": "text", "text": "Which digit is this?"},
        ]
        turns = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": NAMES[int(file.parent.name)]},
        ]
        lines.append(json.dumps({"messages": turns}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines[:-HELD_OUT]))
    (folder / "validation.jsonl").write_text("".join(lines[-HELD_OUT:]))


def write_model(folder: Path) -> None:
    """Write a checkpoint whose language model is the demo's, and whose vision tower is random."""
    quieten_imports()
    import transformers as t

    t.logging.disable_progress_bar()
    t.logging.set_verbosity_error()  # that the embeddings grow
    tokenizer = t.AutoTokenizer.from_pretrained(demo.MODEL)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    text = t.AutoModelForCausalLM.from_pretrained(demo.MODEL, dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text.resize_token_embeddings(len(tokenizer))
        tower = t.CLIPVisionConfig(
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=SIZE,
            patch_size=8,
        )
        config = t.LlavaConfig(
            text_config=text.config,
            vision_config=tower,
            image_token_index=len(tokenizer) - 1,
            image_seq_length=(SIZE // 8) ** 2,
            vision_feature_layer=-1,
            tie_word_embeddings=True,
        )
        model = t.LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.tie_weights()
    model.generation_config = text.generation_config
    model.save_pretrained(folder)
    processor = t.LlavaProcessor(
        t.CLIPImageProcessor(size={"height": SIZE, "width": SIZE}, do_center_crop=False),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    )
    processor.chat_template = tokenizer.chat_template = TEMPLATE
    processor.save_pretrained(folder)
