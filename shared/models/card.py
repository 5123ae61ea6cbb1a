"""The model card."""

import os
import re
from typing import Any

import yaml

from shared.process.errors import shown
from shared.process.redaction import redact


def model_card(
    title: str,
    data: str,
    results: dict[str, float],
    settings: dict[str, Any],
    *,
    made_by: str,
    receipt: str = "",
    load: str,
    **front: str,
) -> str:
    """A model card: what it was trained on and how, with its results.

    Secrets in it are masked: cards are made to be published. Names in it, which may be others',
    stay text in their place.

    Args:
        settings: in YAML's types.
        made_by: the version of the code, and on what it ran.
        receipt: lines of digests, see extras/proofs/_receipt.py.
        load: the line of Python that loads it.
        front: metadata for the Hub.
    """
    values = {
        _text(name): str(value) if isinstance(value, int) else f"{value:.4f}"
        for name, value in results.items()
    }
    rows = "\n".join(
        [
            "| metric | value |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in values.items()),
        ]
    )
    base = front.setdefault("base_model", settings.get("model_name_or_path") or "")
    if not base or os.path.isdir(base):
        del front["base_model"]  # the Hub refuses a card that names a folder there
    one_line = {
        name: shown(value) for name, value in {"library_name": "transformers", **front}.items()
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return (
        f"---\n{_yaml(one_line)}---\n\n# {_text(title)}\n\nData: {_text(data)}\n\n"
        f"Made by {_text(made_by)}\n{receipt}\n\n"
        f"{_fenced('python', redact(load))}\n\n## Results\n\n{rows}\n\n## "
        f"Settings\n\n{_fenced('yaml', _yaml(given))}\n"
    )


def load_line(model: Any) -> str:
    """Lines of Python that load a whole model from final/."""
    return f"""import transformers

model = transformers.{type(model).__name__}.from_pretrained("final")"""


def usage(load: str, tokenizer: Any) -> str:
    """Lines of Python that answer a question, for the card of a language model.

    Args:
        load: lines that make `model`.
        tokenizer: with a chat template, or of plain text.
    """
    prompt = 'tokenizer("Once", return_tensors="pt")'
    if tokenizer.chat_template:
        prompt = """tokenizer.apply_chat_template(
    [{"role": "user", "content": "Hello"}],
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,
)"""
    return f"""{load}
tokenizer = transformers.AutoTokenizer.from_pretrained("final")
prompt = {prompt}
answer = model.generate(**prompt, max_new_tokens=100)[0, prompt["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))"""


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(redact(values), sort_keys=False, allow_unicode=True)


def _text(name: str) -> str:
    """One line of Markdown that shows this very text: no link, picture, HTML or code."""
    return re.sub(r"[\\`\[\]<>|]", r"\\\g<0>", shown(redact(name)))


def _fenced(language: str, text: str) -> str:
    fence = max(["``", *re.findall("`+", text)], key=len) + "`"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
