"""Cells of tables: our numbers as mean and standard error over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

__all__ = ["cell", "standard_error"]


def cell(values: Sequence[float], digits: int) -> str:
    """Mean +- standard error; of one value no error, of none a dash.

    Example:
        >>> cell([1.0, 2.0], 2), cell([1.0], 1), cell([], 1)
        ('1.50 +- 0.50', '1.0', '-')
    """
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} +- {standard_error(values):.{digits}f}"


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of at least two values.

    Example:
        >>> standard_error([1.0, 3.0])
        1.0
    """
    return float(stdev(values) / len(values) ** 0.5)
