"""Special tokens, such as </s>, whose strings are in a text.

A text that is tokenised alone is text: see `Special.to_unknown`. Where a chat template, or a
person, has written texts and special tokens into one, they cannot be told apart: such strings are
tokens, and are counted.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Special:
    """The special tokens of a tokenizer: `ids`, and a `pattern` that finds their strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        strings = {i: token.content for i, token in added.items() if token.special}
        strings |= zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        self.ids = set(strings)
        longest_first = sorted(filter(None, strings.values()), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        means_more = (
            tokenizer.bos_token_id,
            tokenizer.eos_token_id,
            tokenizer.cls_token_id,
            tokenizer.sep_token_id,
        )
        self.unknown = None if tokenizer.unk_token_id in means_more else tokenizer.unk_token_id
        self._control = np.array(sorted(self.ids - {self.unknown}), np.int64)

    def to_unknown(self, ids: np.ndarray, added: np.ndarray) -> np.ndarray:
        """`ids` of texts in which the strings of special tokens were tokenised as text.

        Some vocabularies have these strings as words. Such a token becomes the unknown one, if
        there is one.

        Args:
            added: [tokens] bool, the tokens that do not stand for text.
        """
        if self.unknown is None:
            return ids
        return np.where(np.isin(ids, self._control) & ~added, self.unknown, ids).astype(ids.dtype)
