"""Checks of arguments that are numbers."""

from __future__ import annotations

import math
import operator
from typing import Any

__all__ = ["number_from_0", "one_number", "positive_number", "whole_number"]


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


def one_number(name: str, value: Any, hint: str = "") -> float:
    """Return an argument that is one number, as a Python number also if it is of NumPy or a tensor.

    JSON, and so a file or a checkpoint, knows no other numbers.

    Args:
        name: the argument's name, for errors.
        value: its value.
        hint: what to do instead, for errors.

    Raises:
        TypeError: it is not one number.

    Example:
        >>> import torch
        >>> one_number("std", torch.tensor(0.5))
        0.5
        >>> one_number("std", torch.ones(3))
        Traceback (most recent call last):
        TypeError: std must be one number, got shape (3,)
    """
    is_other = isinstance(value, str | bytes | bool)
    if isinstance(value, int | float) and not is_other:
        return value
    try:
        if not is_other:
            return float(value)
    except (TypeError, ValueError, RuntimeError):  # of several numbers, or of what is no number
        pass
    shape = getattr(value, "shape", None)
    got = f"a number, got {value!r}" if shape is None else f"one number, got shape {tuple(shape)}"
    raise TypeError(f"{name} must be {got}{hint}")


def positive_number(name: str, value: Any, hint: str = "") -> float:
    """Return an argument that is one number above 0 and below infinity; see :func:`one_number`.

    Raises:
        TypeError: it is not one number.
        ValueError: it is not in the range.

    Example:
        >>> positive_number("lr", float("nan"))
        Traceback (most recent call last):
        ValueError: lr must be positive and finite, got nan
    """
    number = one_number(name, value, hint)
    if not (number > 0.0 and math.isfinite(number)):
        raise ValueError(f"{name} must be positive and finite, got {number}")
    return number


def number_from_0(name: str, value: Any) -> float:
    """Return an argument that is one number from 0, not infinite; see :func:`one_number`.

    Raises:
        TypeError: it is not one number.
        ValueError: it is not in the range.

    Example:
        >>> number_from_0("temperature", -1)
        Traceback (most recent call last):
        ValueError: temperature must be at least 0 and finite, got -1
    """
    number = one_number(name, value)
    if not (number >= 0.0 and math.isfinite(number)):
        raise ValueError(f"{name} must be at least 0 and finite, got {number}")
    return number
