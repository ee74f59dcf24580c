"""Map the values of a skewed column to scores without skew: a logarithm, else ranks."""

from __future__ import annotations

from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from bayesify.tabular import robust

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.cells import Floats

__all__ = ["scores_without_skew", "symmetric_log"]

#: Correlation with the quantiles of a normal or a uniform below which no logarithm fits.
_FITS = 0.98
#: Linear parts of the logarithms that are tried, in halves of the interquartile range.
_LINEAR = 2.0 ** np.arange(-24.0, 4.0, 0.5)
#: Scores are clipped to so many standard deviations.
_REACH = 4.0
#: Stands for infinity; it and its inverse are finite.
_LARGEST = 1e307
_NORMAL = NormalDist()
#: Probabilities of the quantiles to which logarithms are fitted; wild values are not among them.
_SHARES = (np.arange(100.0) + 0.5) / 100.0
#: Standardised quantiles of a normal and of a uniform at these, shape (100, 2).
_SHAPES = np.stack([[_NORMAL.inv_cdf(share) for share in _SHARES.tolist()], _SHARES], axis=1)
_SHAPES = (_SHAPES - _SHAPES.mean(axis=0)) / _SHAPES.std(axis=0)
#: Probabilities of the knots of the map.
_KNOTS = np.array([0.0, *(_NORMAL.cdf(place / 4.0) for place in range(-16, 17)), 1.0])


def symmetric_log(values: Floats, centre: Floats | float, linear: Floats | float) -> Floats:
    """Return sign(v - centre) log(1 + |v - centre| / linear) of values v.

    Example:
        >>> symmetric_log(np.array([-98.0, 1.0, 2.0, 100.0]), 1.0, 1.0).round(2).tolist()
        [-4.61, 0.0, 0.69, 4.61]
    """
    with np.errstate(over="ignore"):
        offset = (values / 2.0 - centre / 2.0) / (linear / 2.0)  # differences do not overflow
    offset = np.clip(offset, -_LARGEST, _LARGEST)
    return np.asarray(np.copysign(np.log1p(np.abs(offset)), offset))


def scores_without_skew(values: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Return knots of an increasing, piecewise linear map from values to scores without skew.

    The scores are a symmetric logarithm around a small value, the median or a large value, with the
    width of its linear part chosen by the probability plot correlation coefficient (Filliben 1975,
    Technometrics 17) with a normal or a uniform distribution, whichever fits better. They are the
    normal scores of the ranks where that coefficient is below 0.98. A logarithm is smoother than
    ranks, and leaves a column uniform that was uniform before exp.

    Args:
        values: shape (N,), finite, with at least two different ones.
        weights: the number of times that each counts, shape (N,).

    Returns:
        Increasing knots (K,), and their scores (K,), which have mean 0 and variance 1 over the
        values.

    Example:
        >>> values = np.exp(np.linspace(0.0, 5.0, 101))
        >>> knots, scores = scores_without_skew(values, np.ones(101))
        >>> np.interp([1.0, np.exp(5.0), 1e9], knots, scores).round(1).tolist()
        [-1.7, 1.7, 1.7]
    """
    central = robust.quantiles(values, weights, _SHARES)
    low, quarter, median, three, high = central[[0, 25, 50, 75, -1]]
    widths = min(three / 2.0 - quarter / 2.0, 0.01 * _LARGEST) * _LINEAR
    widths = widths[widths > 1.0 / _LARGEST]
    centres, widths = (part.reshape(-1, 1) for part in np.meshgrid([low, median, high], widths))
    logs = symmetric_log(central, centres, widths)  # shape (number of logarithms, 100)
    deviations = logs.std(axis=1, keepdims=True)
    centred = (logs - logs.mean(axis=1, keepdims=True)) / np.where(deviations, deviations, 1.0)
    coefficients = (centred @ _SHAPES).max(axis=1) / len(_SHARES)
    if not len(coefficients) or coefficients.max() < _FITS:
        return robust.normal_scores(values, weights)
    best = coefficients.argmax()
    knots = np.unique(robust.quantiles(values, weights, _KNOTS))
    scores = symmetric_log(knots, float(centres[best, 0]), float(widths[best, 0]))
    scores = (scores - logs[best].mean()) / logs[best].std()
    # A wild value has no score far beyond the others.
    clipped = np.clip(scores, -_REACH, _REACH)
    return knots, robust.standardised_scores(values, weights, knots, clipped)
