"""What a template's own function says of an answer."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

from shared.process.errors import ConfigError


def numbers_of(
    function: Callable[[str, dict[str, Any]], Any], answer: str, record: dict[str, Any]
) -> dict[str, float]:
    """The numbers by name that `rewards` or `score` returns, whole ones, bools and those of NumPy
    and torch included.

    Raises:
        ConfigError: it returns anything else; with the function's place and the answer.
    """
    returned = function(answer, record)
    with contextlib.suppress(Exception):  # no dict; texts, None, tensors of several numbers
        if all(map(math.isfinite, returned.values())):
            return {name: float(value) for name, value in returned.items()}
    code = getattr(function, "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}: {code.co_name}" if code else repr(function)
    raise ConfigError(
        f"{place} of the answer {answer!r} returns {' '.join(repr(returned).split())}, expected "
        "finite numbers by name, such as {'right': 1.0}"
    )


def with_total(
    rewards: Callable[[str, dict[str, Any]], dict[str, float]],
) -> Callable[[str, dict[str, Any]], dict[str, float]]:
    """A score that is the sum of what `rewards` returns, named reward, and its parts."""

    def score(answer: str, record: dict[str, Any]) -> dict[str, float]:
        parts = numbers_of(rewards, answer, record)
        total = {"reward": sum(parts.values())}
        return total | parts | total  # reward is the sum, also where a part has its name

    return score
