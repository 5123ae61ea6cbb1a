"""Ask a trained language model, and its base if it is an adapter.

python -m shared ask runs/chat "Where is my order?" --system "You answer customers of a shop."
python -m shared ask runs/digits "Which digit is this?" --image digit.png
python -m shared ask runs/completions --plain "Q: Where is my order? A:"

Each question stands alone. For a conversation: docs/after_training.md.
"""

import argparse
import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

from shared.process.errors import ConfigError
from shared.run.checkpoint_files import run_folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run",
        type=partial(run_folder, with_checkpoints=False),
        help="folder of a finished run, or its mirror, or of a model or an adapter",
    )
    parser.add_argument("question", nargs="+", help="one or several, each in quotes")
    parser.add_argument("--system", help="a system message before each question")
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        help="an image before each question; may be repeated",
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="without the chat template, for prompts and completions",
    )
    parser.add_argument(
        "--chat_template_kwargs",
        type=json.loads,
        default={},
        metavar="JSON",
        help="variables of the chat template, as the training records have them: "
        "'{\"enable_thinking\": false}'",
    )
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        default=200,
        help="tokens of an answer, at most (default: 200)",
    )
    options = parser.parse_args()
    if not isinstance(options.chat_template_kwargs, dict):
        parser.error("--chat_template_kwargs takes an object, such as '{\"name\": 1}'")
    folder = next(
        (
            place
            for place in (options.run / "final", options.run)
            if (place / "tokenizer_config.json").exists()
        ),
        None,
    )
    if folder is None:
        raise ConfigError(
            f"{options.run}: no finished run and no model: a run has final/ when it is done"
        )

    import torch
    from peft import PeftModel
    from transformers import AutoConfig, AutoProcessor, GenerationConfig

    from shared.data.notes import Notes
    from shared.models.checks import context_of
    from shared.models.hub import from_hub
    from shared.models.loading import class_of
    from shared.models.tokenizers import load_tokenizer
    from shared.run import launch
    from shared.text.encoder import Encoder
    from shared.text.forms import Example

    launch.quieten_libraries()
    tokenizer = load_tokenizer(folder)
    is_plain = options.plain or not tokenizer.chat_template
    if is_plain and (options.image or options.system or options.chat_template_kwargs):
        parser.error(
            "--image, --system and --chat_template_kwargs need a chat template: drop --plain, or "
            "these, if the model has none"
        )
    encoder = Encoder(tokenizer, "assistant")
    adapter = folder / "adapter_config.json"
    name = str(folder)
    if adapter.exists():
        name = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    model_class = class_of(from_hub(AutoConfig, name))
    model = from_hub(model_class, name, dtype="auto", device_map="auto", use_safetensors=True)
    if adapter.exists():
        model = from_hub(PeftModel, folder, first=model)
        if (folder / "generation_config.json").exists():  # the ends that it learned
            model.generation_config = from_hub(GenerationConfig, folder)
    model.eval()
    images: list[Any] = []
    inputs: Any
    if options.image:
        from shared.images.decoding import BadImage, decode

        try:
            images = [{"type": "image", "image": decode(path)} for path in options.image]
        except BadImage as error:
            raise ConfigError(f"--image: {error}") from None
    for question in options.question:
        turns = [{"role": "system", "content": options.system}] * bool(options.system)
        content = [*images, {"type": "text", "text": question}] if images else question
        turns += [{"role": "user", "content": content}]
        if images:
            inputs = from_hub(AutoProcessor, folder).apply_chat_template(
                turns,
                tokenize=True,
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
                **options.chat_template_kwargs,
            )
        else:  # as training has it
            asked = Example(turns, template_options=options.chat_template_kwargs)
            if is_plain:
                asked = Example(prompt=question)
            prompt = encoder.prompt(asked, "the question", Notes())
            rows = torch.tensor([prompt])
            inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        length = inputs["input_ids"].shape[1]
        room = context_of(model) + 1 - length  # the last token is not read again
        if room < 1:
            raise ConfigError(f"a question of {length} tokens is longer than the model's context")
        with_base = {"base": model.disable_adapter} if adapter.exists() else {}
        for who, as_it in ({**with_base, options.run.name: contextlib.nullcontext}).items():
            with as_it(), torch.no_grad():
                most = min(options.max_new_tokens, room)
                found = model.generate(**inputs, max_new_tokens=most)[0, length:]
            answer = tokenizer.decode(found, skip_special_tokens=True)
            print(f"--- {who}\n{answer}")
