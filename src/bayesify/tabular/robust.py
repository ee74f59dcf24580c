"""Statistics of a column of numbers that a few wild values do not move."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.cells import Floats

__all__ = [
    "MOST",
    "WILD",
    "bounds",
    "correlation",
    "extremes",
    "interpolated_quantiles",
    "moderated",
    "normal_scores",
    "quantile",
    "quantiles",
    "standardised_scores",
]

#: Central parts of the values whose width measures the spread: the first that is not empty.
_PARTS = (0.25, 0.1, 0.05, 0.025, 0.01)
#: Numbers farther from their central part than so many sigmas are wild.
WILD = 4.0
#: A larger share of the values is not wild.
_MOST_WILD = 0.05
#: Moderated numbers stay below this multiple of the size up to which they are left as they are.
MOST = 5.0 / 3.0
_NORMAL = NormalDist()
#: Probabilities of the knots of a map to the scores of a normal, but for smallest and largest.
_KNOTS = np.array([_NORMAL.cdf(place / 4.0) for place in range(-10, 11)])


def bounds(values: Floats, weights: Floats, reach: float) -> tuple[float, float]:
    """Return the ends of a range around the central part of the values.

    The central part is between the quartiles. Where these coincide, as in a column of mostly zeros,
    or more than 5 % of the values are beyond the range, it is between the 10 % and 90 % quantiles,
    and so on. Its width is that of sigmas of a normal.

    Args:
        values: shape (N,), finite, at least one.
        weights: the number of times that each counts, shape (N,).
        reach: by how many sigmas the range is longer than the central part, on either side.

    Example:
        >>> low, high = bounds(np.append(np.arange(40.0), 1e9), np.ones(41), 4.0)
        >>> round(low, 1), round(high, 1)
        (-49.3, 89.3)
    """
    order = np.argsort(values, kind="stable")
    ordered, heights = values[order], np.cumsum(weights[order])
    for part in _PARTS:
        low, high = _quantiles(ordered, heights, np.array([part, 1.0 - part])).tolist()
        if low < high:
            # Divided first: the width of a range can overflow.
            sigma = (high / 2.0 - low / 2.0) / -_NORMAL.inv_cdf(part)
            low, high = low - reach * sigma, high + reach * sigma
            if weights[(values < low) | (values > high)].sum() <= _MOST_WILD * heights[-1]:
                return low, high
    return float(ordered[0]), float(ordered[-1])


def extremes(values: Floats, weights: Floats, place: float) -> tuple[float, float]:
    """Return the ``place``-th smallest and the ``place``-th largest value, the same one at most.

    Args:
        values: shape (N,), at least one.
        weights: the number of times that each counts, shape (N,).
        place: from 1.

    Example:
        >>> extremes(np.array([3.0, 1.0, 2.0]), np.array([1.0, 2.0, 2.0]), 2)
        (1.0, 2.0)
    """
    order = np.argsort(values, kind="stable")
    ordered, counts = values[order], weights[order]
    least = min(place, counts.sum() / 2.0) * (1.0 - 1e-12)
    low = np.searchsorted(np.cumsum(counts), least)
    high = np.searchsorted(np.cumsum(counts[::-1]), least)
    return float(ordered[low]), float(ordered[::-1][high])


def interpolated_quantiles(values: Floats, weights: Floats, q: Floats) -> Floats:
    """Return quantiles as ``np.quantile`` of each value as many times as it counts, shape of ``q``.

    Example:
        >>> values, weights = np.array([4.0, 1.0]), np.array([1.0, 3.0])
        >>> interpolated_quantiles(values, weights, np.array([0.5, 0.75]))
        array([1.  , 1.75])
    """
    order = np.argsort(values, kind="stable")
    ordered, heights = values[order], np.cumsum(weights[order])
    last = max(heights[-1] - 1.0, 0.0)
    places = last * q
    below = np.floor(places)
    ends = np.searchsorted(heights, [below, np.minimum(below + 1.0, last)], side="right")
    low, high = ordered[np.minimum(ends, len(ordered) - 1)]
    found: Floats = low + (places - below) * (high - low)
    return found


def moderated(scaled: Floats, plain: float) -> Floats:
    """Return numbers with those beyond ``plain`` moved smoothly to below 5/3 of it.

    Example:
        >>> moderated(np.array([-1.0, 3.0, 4.0, 1e9]), 3.0).round(2).tolist()
        [-1.0, 3.0, 3.92, 5.0]
    """
    size = np.abs(scaled)
    span = (MOST - 1.0) * plain
    far = plain + span * np.tanh((size - plain) / span)
    return np.where(size <= plain, scaled, np.copysign(far, scaled))


def quantile(values: Floats, weights: Floats, q: float) -> float:
    """Return a quantile, which is one of the values.

    Example:
        >>> quantile(np.array([3.0, 1.0, 2.0]), np.ones(3), 0.5)
        2.0
    """
    return float(quantiles(values, weights, np.array([q]))[0])


def quantiles(values: Floats, weights: Floats, q: Floats) -> Floats:
    """Return several quantiles, each one of the values, shape of ``q``.

    Example:
        >>> quantiles(np.array([3.0, 1.0, 2.0]), np.ones(3), np.array([0.0, 0.5, 1.0])).tolist()
        [1.0, 2.0, 3.0]
    """
    order = np.argsort(values, kind="stable")
    return _quantiles(values[order], np.cumsum(weights[order]), q)


def normal_scores(values: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Return knots of an increasing, piecewise linear map from values to scores of a normal.

    Equal values share the score of their middle rank. The scores have mean 0 and variance 1.

    Args:
        values: shape (N,), finite, with at least two different ones.
        weights: the number of times that each counts, shape (N,).

    Example:
        >>> knots, scores = normal_scores(np.array([1.0, 10.0, 100.0, 1000.0]), np.ones(4))
        >>> np.interp([1.0, 10.0, 1e9], knots, scores).round(2).tolist()
        [-1.36, -0.38, 1.36]
    """
    order = np.argsort(values, kind="stable")
    ordered, heights = values[order], np.cumsum(weights[order])
    inner = _quantiles(ordered, heights, _KNOTS)
    knots = np.unique(np.concatenate([ordered[:1], inner, ordered[-1:]]))
    padded = np.concatenate([[0.0], heights])
    below, up_to = (padded[np.searchsorted(ordered, knots, side)] for side in ("left", "right"))
    middle = (below + up_to) / (2.0 * heights[-1])
    scores = torch.special.ndtri(torch.from_numpy(middle)).numpy()
    return knots, standardised_scores(values, weights, knots, scores)


def standardised_scores(values: Floats, weights: Floats, knots: Floats, scores: Floats) -> Floats:
    """Return the scores of knots, shifted and scaled to mean 0 and variance 1 over the values.

    Example:
        >>> values = np.array([1.0, 2.0, 3.0])
        >>> standardised_scores(values, np.ones(3), values[::2], np.array([0.0, 1.0])).round(3)
        array([-1.225,  1.225])
    """
    found = np.interp(values, knots, scores)
    mean = np.average(found, weights=weights)
    deviation = math.sqrt(np.average((found - mean) ** 2, weights=weights))
    return np.asarray((scores - mean) / deviation)


def correlation(one: Floats, other: Floats, weights: Floats) -> float:
    """Return the correlation of two columns of variance above 0.

    Example:
        >>> round(correlation(np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]), np.ones(3)), 3)
        0.982
    """
    table = np.cov(one, other, aweights=weights)
    return float(table[0, 1] / math.sqrt(table[0, 0] * table[1, 1]))


def _quantiles(ordered: Floats, heights: Floats, q: Floats) -> Floats:
    """Return quantiles, each one of the values: the first whose share with those below is q."""
    places = np.searchsorted(heights, q * heights[-1] * (1.0 - 1e-12))
    found: Floats = ordered[np.minimum(places, len(ordered) - 1)]
    return found
