"""Mean and standard error over seeds, as numbers and as text for tables."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

__all__ = ["mean_and_error", "standard_error"]


def mean_and_error(values: Sequence[float], digits: int) -> str:
    """Format the mean and its standard error; one value has no error, and none gives a dash.

    Example:
        >>> mean_and_error([1.0, 2.0], 2), mean_and_error([1.0], 1), mean_and_error([], 1)
        ('1.50 +- 0.50', '1.0', '-')
    """
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} +- {standard_error(values):.{digits}f}"


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of at least two values.

    Example:
        >>> standard_error([1.0, 3.0])
        1.0
    """
    return float(stdev(values) / len(values) ** 0.5)
