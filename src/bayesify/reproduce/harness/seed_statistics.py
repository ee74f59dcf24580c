"""Statistics over seeds: mean and standard error for tables, and tests of differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

__all__ = [
    "holm_adjusted",
    "mean_and_error",
    "paired_p_value",
    "standard_error",
    "welch_p_value",
    "with_cost",
]


def with_cost(
    table: Callable[[Sequence[Mapping[str, Any]]], str],
) -> Callable[[Sequence[Mapping[str, Any]]], str]:
    """Return a table that ends with the measured seconds and load of its results.

    Example:
        >>> results = [{"seconds": 900.0, "load": 0.5}, {"seconds": 1100.0, "load": 2.0}]
        >>> print(with_cost(lambda _: "a table")(results))
        a table
        <BLANKLINE>
        2 runs, 2,000 s in total, at a load of 0.5 to 2.0.
        <BLANKLINE>
    """

    def with_line(results: Sequence[Mapping[str, Any]]) -> str:
        text = table(results)
        if not results or any("seconds" not in result for result in results):
            return text
        seconds = sum(float(result["seconds"]) for result in results)
        loads = [float(r["load"]) for r in results if r.get("load") is not None]
        load = f", at a load of {min(loads):.1f} to {max(loads):.1f}" if loads else ""
        return f"{text.rstrip()}\n\n{len(results)} runs, {seconds:,.0f} s in total{load}.\n"

    return with_line


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


def welch_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p-value of Welch's t-test that two means are equal.

    The samples must be independent, with at least two values each; 1 if all values are equal.

    Example:
        >>> round(welch_p_value([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]), 4)
        0.2879
    """
    from scipy.stats import ttest_ind

    if len({*first, *second}) == 1:
        return 1.0
    return float(ttest_ind(first, second, equal_var=False).pvalue)


def paired_p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p-value of the paired t-test that the mean difference is 0.

    For samples whose values belong together by place, such as those of one seed. At least two are
    needed; 1 if all differences are 0.

    Example:
        >>> round(paired_p_value([1.0, 2.0, 3.0], [2.0, 3.5, 3.5]), 4)
        0.0742
    """
    from scipy.stats import ttest_rel

    if all(one == other for one, other in zip(first, second, strict=True)):
        return 1.0
    return float(ttest_rel(first, second).pvalue)


def holm_adjusted(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number by Holm's method, in the given order.

    Rejecting where the adjusted value is below .05 is wrong anywhere with probability 5 % at most.

    Example:
        >>> holm_adjusted([0.03, 0.01, 0.04])
        [0.06, 0.03, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted
