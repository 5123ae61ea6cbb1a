"""Types of flags, which carry bounds and whether a run may resume with another value."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

T = TypeVar("T")
FREE = object()
COMPARE = {
    "above": operator.gt,
    "at_least": operator.ge,
    "below": operator.lt,
    "at_most": operator.le,
}


@dataclass(frozen=True)
class Rule:
    """What each given value of a flag has to be. Defaults are not asked."""

    says: str  # as in "--seed must be at least 0, not -1", without flag and value
    holds: Callable[[Any], bool]


def within(**limits: float) -> Rule:
    """The rule `within(at_least=0, below=1)`; also above and at_most."""
    words = " and ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in limits.items())
    return Rule(
        f"must be {words}",
        lambda value: all(COMPARE[name](value, limit) for name, limit in limits.items()),
    )


WHOLE_OR_SHARE = Rule(
    "is a whole number of steps or, below 1, a share of the run",
    lambda steps: steps <= 1 or steps % 1 == 0,
)

# A flag that does not change what the model learns: a run resumes with another value. Any other
# flag that differs from the checkpoint's is refused unless --allow_changed names it.
Free = Annotated[T, FREE]
Count = Annotated[int, within(at_least=1)]
CountOrZero = Annotated[int, within(at_least=0)]
Positive = Annotated[float, within(above=0)]
PositiveOrZero = Annotated[float, within(at_least=0)]
Share = Annotated[float, within(at_least=0, at_most=1)]
PositiveShare = Annotated[float, within(above=0, at_most=1)]
BelowOne = Annotated[float, within(at_least=0, below=1)]
# tyro wants None inside: Steps[int | float | None]
Steps = Annotated[T, within(above=0), WHOLE_OR_SHARE]
