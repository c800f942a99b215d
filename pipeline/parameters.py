"""Checks of a transform's parameters.

`augment.build` puts the config key and the transform's name before the message of a ValueError.
"""

from collections.abc import Sequence
from typing import Any


def whole(name: str, value: Any, low: int, high: int) -> int:
    """Return `value` if it is a whole number in [low, high]."""
    if not (isinstance(value, int) and low <= value <= high):
        raise ValueError(f"{name}={value}: give a whole number from {low} to {high}")
    return value


def number(name: str, value: Any, low: float, high: float) -> float:
    """Return `value` if it is a number in [low, high]."""
    if not (isinstance(value, (int, float)) and low <= value <= high):
        raise ValueError(f"{name}={value}: give a number from {low:g} to {high:g}")
    return value


def choice(name: str, value: Any, allowed: Sequence[str]) -> str:
    """Return `value` if it is allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value}: give {' or '.join(allowed)}")
    return str(value)


def span(name: str, values: Any, most: float) -> tuple[float, float]:
    """Return `values` if they are two numbers with 0 < low <= high <= most."""
    pair = isinstance(values, (list, tuple)) and len(values) == 2
    numbers = pair and all(isinstance(v, (int, float)) for v in values)
    if not (numbers and 0 < values[0] <= values[1] <= most):
        raise ValueError(f"{name}={values}: give two numbers, 0 < low <= high <= {most:g}")
    return values[0], values[1]
