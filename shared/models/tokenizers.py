"""Tokenizers: loaded, and facts about them."""

import hashlib
import json
from pathlib import Path
from typing import Any

from shared.models.hub import file_of, from_hub
from shared.process.errors import ConfigError
from shared.process.printing import note


def load_tokenizer(name: str | Path, **options: Any) -> Any:
    """The tokenizer of a model, with its own chat template, or else the one in the files of the
    model's processor.

    Args:
        options: of `from_pretrained`.

    Raises:
        ConfigError: it cannot be loaded, or its files are missing.
    """
    from transformers import AutoTokenizer

    tokenizer = from_hub(AutoTokenizer, name, **options)
    # without files, some classes have their special tokens alone, and make nothing of a text
    if len(tokenizer) < len(tokenizer.added_tokens_decoder) + 2:
        raise ConfigError(f"{name}: a tokenizer without words: copy the model's tokenizer files")
    for file in ("chat_template.json", "processor_config.json"):
        if not tokenizer.chat_template and (path := file_of(name, file)):
            template = json.loads(Path(path).read_text(encoding="utf-8")).get("chat_template")
            tokenizer.chat_template = template if isinstance(template, str) else None
    return tokenizer


def serialised(tokenizer: Any) -> str:
    """All that a tokenizer does with a text. Raises ConfigError for a slow one, which has no such
    form, and does not say where its tokens stand in a text.
    """
    if not tokenizer.is_fast:
        raise ConfigError("the tokenizer is a slow one (Python alone): take another one")
    return str(tokenizer.backend_tokenizer.to_str())


def identity_of(tokenizer: Any) -> list[Any]:
    """JSON-like: changes when what the tokenizer makes of a text or of a conversation does."""
    digest = hashlib.sha256(serialised(tokenizer).encode()).hexdigest()
    special = [tokenizer.bos_token_id, leading_bos(tokenizer), tokenizer.eos_token_id]
    return [digest, special, tokenizer.model_input_names, str(tokenizer.chat_template)]


def end_of_text(tokenizer: Any) -> int:
    """The token that ends texts. Raises ConfigError if there is none."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no end-of-text token: take another one")
    return int(tokenizer.eos_token_id)


def leading_bos(tokenizer: Any) -> list[int]:
    """The token that a tokenizer puts before each text, or an empty list."""
    ids = tokenizer("a")["input_ids"]
    return [tokenizer.bos_token_id] if ids[:1] == [tokenizer.bos_token_id] and len(ids) > 1 else []


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the highest token id: a vocabulary may have gaps."""
    return 1 + max(tokenizer.get_vocab().values())


def require_same_tokens(tokenizer: Any, other: Any, name: str, whose: str) -> None:
    """Raise a ConfigError if two tokenizers give a number to different tokens.

    Args:
        name: of the model with the other one.
        whose: what the first one is of.
    """
    ours, theirs = (
        {number: token for token, number in one.get_vocab().items()} for one in (tokenizer, other)
    )
    both = ours.keys() & theirs.keys()
    if wrong := [number for number in sorted(both) if ours[number] != theirs[number]]:
        number = wrong[0]
        raise ConfigError(
            f"{name}: token {number} is {theirs[number]!r}, the {whose}'s is {ours[number]!r}: "
            f"take a model with the {whose}'s tokenizer"
        )
    if ours.keys() != theirs.keys():
        note(f"{name}: {len(theirs):,} tokens, the {whose} {len(ours):,}; only both's count")
