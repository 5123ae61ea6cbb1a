"""What a template's own function says of an answer."""

import contextlib
import math
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.process.errors import CleanExit, ConfigError, reason_of

# Where code lies that is not the user's: Python's, that of packages, and shared/.
_OTHERS = (
    *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
    "<frozen",
)


def called(function: Callable[..., Any], answer: str, *arguments: Any) -> Any:
    """What a function of the user returns.

    Raises:
        ConfigError: it raises an error; with the place in the user's code, and the answer.
    """
    try:
        return function(*arguments)
    except CleanExit:
        raise
    except Exception as error:
        reason_of(error)  # raises one of memory again, which has its own advice
        frames = traceback.extract_tb(error.__traceback__)
        frame = ([f for f in frames if not f.filename.startswith(_OTHERS)] or frames)[-1]
        said = traceback.format_exception_only(error)[-1].strip()
        raise ConfigError(
            f"{frame.filename}:{frame.lineno}: {frame.line}: {said}; the answer is {answer!r}"
        ) from error


def numbers_of(
    function: Callable[[str, dict[str, Any]], Any], answer: str, record: dict[str, Any]
) -> dict[str, float]:
    """The numbers by name that `rewards` or `score` returns, whole ones, bools and those of NumPy
    and torch included.

    Raises:
        ConfigError: it returns anything else, or raises an error; with the place in the user's code
            and the answer.
    """
    returned = called(function, answer, answer, record)
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
