"""The check of an argument that is a whole number."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["whole_number"]


def whole_number(name: str, value: Any, least: int | None = 1) -> int:
    """Return an argument as an ``int``, also if it is of NumPy or a tensor.

    Args:
        name: the argument's name, for errors.
        value: its value.
        least: the smallest value allowed; None if there is none.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is below the smallest value.

    Example:
        >>> whole_number("num_samples", 2.5)
        Traceback (most recent call last):
        TypeError: num_samples must be a whole number, got 2.5
        >>> whole_number("epochs", -1, 0)
        Traceback (most recent call last):
        ValueError: epochs must be at least 0, got -1
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} must be a whole number, got {value!r}") from error
    if isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number
