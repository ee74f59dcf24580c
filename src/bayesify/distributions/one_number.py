"""The check of an argument that is one number."""

from __future__ import annotations

from typing import Any

__all__ = ["one_number"]


def one_number(name: str, value: Any, hint: str = "") -> float:
    """Return an argument that is one number, as a Python number also if it is of NumPy or a tensor.

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
    if isinstance(value, int | float):
        return value
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, RuntimeError):  # of several numbers, or of what is no number
        pass
    shape = getattr(value, "shape", None)
    got = repr(value) if shape is None else f"shape {tuple(shape)}"
    raise TypeError(f"{name} must be one number, got {got}{hint}")
