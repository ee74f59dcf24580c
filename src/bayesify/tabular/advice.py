"""Warn of training tables that teach something else than was meant, and name the mend."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from bayesify.tabular import robust

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.cells import Floats

__all__ = [
    "FEWEST_TARGETS",
    "TableWarning",
    "check_repeats",
    "check_sum",
    "ordinary_range",
    "repeats_of",
    "without_wild",
]

#: Weights that sum to fewer or more rows than so many times theirs are most likely relative.
_RATIO = 2.0
#: Distinct rows that tell a table given several times from one of few possible rows.
_FEWEST_DISTINCT = 50
#: Variance of the number of times that a row occurs, relative to its mean, below which a table was
#: given several times. That of rows drawn at random is about 1.
_EVEN = 0.3
#: Targets farther from the central part than so many sigmas, 10 interquartile ranges of a normal,
#: are wild; so few rows tell nothing.
_REACH, FEWEST_TARGETS = 13.49, 20


class TableWarning(UserWarning):
    """A training table has properties that most likely nobody wants; the message has the mend."""


def check_sum(weights: Floats) -> None:
    """Warn if given weights sum to far less or far more than their rows.

    Args:
        weights: shape (N,), at least 0; rows of weight 0 are none.
    """
    rows, total = int((weights > 0.0).sum()), float(weights.sum())
    if not rows / _RATIO <= total <= rows * _RATIO:
        warnings.warn(
            f"sample_weight sums to {total:.4g} for {rows:,} rows: a weight is the number of times "
            f"that a row counts, so the model learns as from {total:.4g} of them; if the weights "
            "are relative, multiply them by len(w) / w.sum()",
            TableWarning,
            stacklevel=5,
        )


def check_repeats(counts: Floats) -> None:
    """Warn if every row was given about the same number of times, at least twice.

    Args:
        counts: how often each distinct row occurs, shape (M,).
    """
    if repeats := _repeats(counts):
        mend = "give each row once, for example by DataFrame.drop_duplicates()"
        warnings.warn(f"{repeats}; {mend}", TableWarning, stacklevel=5)


def repeats_of(columns: Iterable[Floats]) -> list[str]:
    """Return a remark if every row of a file occurs about equally often, at least twice.

    Args:
        columns: the values of the columns and the target, of shape (N,) each.

    Example:
        >>> repeats_of([np.arange(60.0)])
        []
        >>> repeats_of([np.tile(np.arange(60.0), 5)])[0]
        'every row occurs about 5 times: of 300 rows only 60 differ; each counts as new evidence...'
    """
    import pandas as pd

    hashes = np.zeros(1, np.uint64)  # of rows; column by column, to hold no second table
    for column in columns:
        # Adding 0 turns -0 into 0.
        hashes = hashes * np.uint64(1_000_003) + pd.util.hash_array(column + 0.0)
    _, counts = np.unique(hashes, return_counts=True)
    repeats = _repeats(counts.astype(np.float64)) if len(counts) else ""
    mend = "and any rows held out are among those of training too; keep each row once"
    return [f"{repeats}, {mend}"] if repeats else []


def _repeats(counts: Floats) -> str:
    mean = float(counts.mean())
    if len(counts) < _FEWEST_DISTINCT or mean < 2.0 or float(counts.var()) > _EVEN * mean:
        return ""
    return (
        f"every row occurs about {mean:.3g} times: of {counts.sum():,.0f} rows only "
        f"{len(counts):,} differ; each counts as new evidence, so that the intervals come out too "
        "narrow"
    )


def ordinary_range(
    values: Floats, weights: Floats
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the range beyond which values are wild; and the smallest and largest within it.

    Args:
        values: shape (N,), finite, at least one.
        weights: the number of times that each counts, shape (N,).

    Example:
        >>> limits, ends = ordinary_range(np.append(np.arange(30.0), 1e6), np.ones(31))
        >>> limits[1] < 1e6, tuple(map(float, ends))
        (True, (0.0, 29.0))
    """
    low, high = robust.bounds(values, weights, _REACH)
    ordinary = values[(low <= values) & (values <= high)]
    return (low, high), (float(ordinary.min()), float(ordinary.max()))


def without_wild(targets: Floats, weights: Floats | None = None) -> tuple[Floats, str | None]:
    """Return targets with the wild ones replaced by the nearest of the others, and a note of them.

    Wild is a target farther from the quartiles than 10 interquartile ranges, of at least 20 rows;
    where the quartiles coincide, a wider part of the targets counts instead of that between them.

    Args:
        targets: shape (M, K), finite.
        weights: the number of times that each row counts, shape (M,); None for once.

    Example:
        >>> tamed, note = without_wild(np.append(np.arange(30.0), 1e6)[:, None])
        >>> tamed.max().item(), note[:44]
        (29.0, '1 target lies more than 10 interquartile ran')
    """
    if len(targets) < FEWEST_TARGETS:
        return targets, None
    counts = np.ones(len(targets)) if weights is None else weights
    tamed = targets.copy()
    for column in tamed.T:
        _, ends = ordinary_range(column, counts)
        np.clip(column, *ends, out=column)
    changed = tamed != targets
    wild = changed.any(axis=1)
    if not wild.any():
        return targets, None
    count = float(counts[wild].sum())
    lie, counted = ("target lies", "counts") if count == 1 else ("targets lie", "count")
    return tamed, (
        f"{count:,.4g} {lie} more than 10 interquartile ranges away from the quartiles, such as "
        f"{targets[changed][0]:.6g}, and {counted} as the nearest of the others; correct or remove "
        "such rows, or predict the logarithm of the target if such values are real"
    )
