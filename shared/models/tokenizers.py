"""Facts about tokenizers."""

from typing import Any


def leading_bos(tokenizer: Any) -> list[int]:
    """The token that a tokenizer puts before each text, or an empty list."""
    ids = tokenizer("a")["input_ids"]
    return [tokenizer.bos_token_id] if ids[:1] == [tokenizer.bos_token_id] and len(ids) > 1 else []


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the highest token id: a vocabulary may have gaps."""
    return 1 + max(tokenizer.get_vocab().values())
