"""Pairs with a number that says by how much one answer is better: --margin_column."""

import math
from typing import Any

import numpy as np

from shared.data.notes import Notes
from shared.data.store import Encoded
from shared.process.errors import ConfigError
from shared.text.preferences import ToPairs


class ToPairsWithMargins(ToPairs):
    """As `ToPairs`; the table has each sample's `margin`."""

    code = (*ToPairs.code, "extras/reward_model/margins.py")

    def __init__(self, tokenizer: Any, config: Any) -> None:
        super().__init__(tokenizer, config)
        self.column = config.margin_column

    def identity(self) -> Any:
        return super().identity() | {"margin": self.column}

    def __call__(self, items: list[tuple[str, str, dict[str, Any]]], notes: Notes) -> Encoded:
        encoded = super().__call__(items, notes)
        margins = [columns[self.column] for columns in encoded.lines["columns"]]
        encoded.table["margin"] = np.array(margins, np.float32)
        notes.counts.pop(f"unused {self.column}", None)
        return encoded

    def samples(
        self, record: dict[str, Any], form: str, where: str, notes: Notes
    ) -> list[tuple[list[int], np.ndarray]]:
        """Raises ConfigError if the margin is no number."""
        given = record.get(self.column)
        try:
            is_number = math.isfinite(float(given))  # type: ignore[arg-type]
        except (TypeError, ValueError):
            is_number = False
        if not is_number:
            raise ConfigError(f"{where}: {self.column!r} is {given!r}, expected a number")
        return super().samples(record, form, where, notes)
