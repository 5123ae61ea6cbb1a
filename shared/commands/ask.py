"""Ask a trained language model, and its base if it is an adapter.

python -m shared ask runs/chat "Where is my order?" --system "You answer customers of a shop."
python -m shared ask runs/digits "Which digit is this?" --image digit.png
python -m shared ask runs/completions --plain "Q: Where is my order? A:"

Each question stands alone. For a conversation: docs/after_training.md.
"""

import argparse
import contextlib
import json
from pathlib import Path
from typing import Any

from shared.process.errors import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run", type=Path, help="folder of a finished run, or of a model or an adapter"
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
        "--max_new_tokens",
        type=int,
        default=200,
        help="tokens of an answer, at most (default: 200)",
    )
    options = parser.parse_args()
    if options.image and options.plain:
        parser.error("--image needs the chat template: drop --plain")
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
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    from shared.models.hub import from_hub
    from shared.models.loading import class_of
    from shared.run import launch

    launch.quieten_libraries()
    tokenizer = from_hub(AutoTokenizer, folder)
    adapter = folder / "adapter_config.json"
    name = str(folder)
    if adapter.exists():
        name = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    model_class = class_of(from_hub(AutoConfig, name))
    model = from_hub(model_class, name, dtype="auto", device_map="auto", use_safetensors=True)
    if adapter.exists():
        model = from_hub(PeftModel, folder, first=model)
    model.eval()
    images: list[Any] = []
    template: Any = tokenizer
    if options.image:
        from shared.images.decoding import BadImage, decode

        template = from_hub(AutoProcessor, folder)
        try:
            images = [{"type": "image", "image": decode(path)} for path in options.image]
        except BadImage as error:
            raise ConfigError(f"--image: {error}") from None
    for question in options.question:
        if options.plain or not tokenizer.chat_template:
            ids: Any = tokenizer(question, return_tensors="pt")
        else:
            turns = [{"role": "system", "content": options.system}] * bool(options.system)
            content = [*images, {"type": "text", "text": question}] if images else question
            turns += [{"role": "user", "content": content}]
            ids = template.apply_chat_template(
                turns,
                tokenize=True,
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
        # what tokenizers of some decoders write, and no decoder takes
        unused = () if images else ("token_type_ids",)
        ids = {key: value.to(model.device) for key, value in ids.items() if key not in unused}
        with_base = {"base": model.disable_adapter} if adapter.exists() else {}
        for who, as_it in ({**with_base, options.run.name: contextlib.nullcontext}).items():
            with as_it(), torch.no_grad():
                found = model.generate(**ids, max_new_tokens=options.max_new_tokens)[
                    0, ids["input_ids"].shape[1] :
                ]
            answer = tokenizer.decode(found, skip_special_tokens=True).strip()
            print(f"--- {who}\n{answer}")
