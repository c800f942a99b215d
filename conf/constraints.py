"""The values that a key of the config, or a parameter of a transform, may have.

The names are those of torch.distributions.constraints; importing torch would delay an answer.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

FLOAT32_MAX = 3.4e38  # torch refuses a larger number


class Constraint(NamedTuple):
    """`POSITIVE | NULL` is met by the values of either."""

    check: Callable[[Any], Any]
    description: str  # continues "give ..."
    choices: tuple[str, ...] = ()  # names, one of which a misspelt one may mean

    def __or__(self, other: "Constraint") -> "Constraint":
        description = f"{self.description} or {other.description}"
        choices = self.choices + other.choices
        return Constraint(lambda v: self.check(v) or other.check(v), description, choices)


def choice(*choices: str) -> Constraint:
    return Constraint(lambda value: value in choices, " or ".join(choices), choices)


def interval(lower: float, upper: float = FLOAT32_MAX) -> Constraint:
    return _numbers(lower, upper, f"a number >= {lower:g}", int, float)


def greater_than(lower: float, upper: float = FLOAT32_MAX) -> Constraint:
    return _numbers(math.nextafter(lower, upper), upper, f"a number > {lower:g}", int, float)


def integer_interval(lower: int, upper: float = FLOAT32_MAX) -> Constraint:
    return _numbers(lower, upper, f"a whole number >= {lower}", int)


def _numbers(lower: float, upper: float, description: str, *types: type) -> Constraint:
    if upper < FLOAT32_MAX:
        description = f"{description} and <= {upper:.10g}"
    return Constraint(lambda value: type(value) in types and lower <= value <= upper, description)


def list_of(item: Constraint, shortest: int = 1, longest: float = math.inf) -> Constraint:
    """A list of `shortest` to `longest` values."""

    def check(values: Any) -> bool:
        is_list = isinstance(values, list | tuple) and shortest <= len(values) <= longest
        return is_list and all(map(item.check, values))

    count = f"{shortest}" if shortest == longest else f"{shortest} or more"
    return Constraint(check, f"{count} values in brackets, each {item.description}")


def ordered_pair(upper: float) -> Constraint:
    """Two numbers with 0 < low <= high <= upper."""
    pair = list_of(greater_than(0, upper), 2, 2)
    description = f"two numbers, 0 < low <= high <= {upper:g}"
    return Constraint(lambda values: pair.check(values) and values[0] <= values[1], description)


BOOLEAN = Constraint(lambda value: type(value) is bool, "true or false")
NULL = Constraint(lambda value: value is None, "null")
AUTO = choice("auto")
POSITIVE = greater_than(0)
POSITIVE_INTEGER = integer_interval(1)
UNIT_INTERVAL = interval(0, 1)
