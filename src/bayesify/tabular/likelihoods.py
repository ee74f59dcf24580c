"""Likelihoods of a table's target by their names, checks of targets, and statistics of counts."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from bayesify.distributions.likelihoods import (
    CategoricalLikelihood,
    CensoredGaussianLikelihood,
    GaussianLikelihood,
    Likelihood,
    NegativeBinomialLikelihood,
    OrdinalLikelihood,
    PoissonLikelihood,
    StudentTLikelihood,
)

__all__ = [
    "COUNTS",
    "LARGEST_COUNT",
    "CountStatistics",
    "NumberLikelihood",
    "check_are_numbers",
    "check_unchanged",
    "has_classes",
    "number_likelihood",
    "wrong_count",
]

#: Likelihoods of numbers, in the estimators and on the command line.
NumberLikelihood = Literal["gaussian", "student-t", "poisson", "negative-binomial", "censored"]
#: Those of counts, whose targets are not standardised.
COUNTS = ("poisson", "negative-binomial")
#: Above it the likelihoods of counts bend the mean, so that nothing overflows.
LARGEST_COUNT = 1e12


def number_likelihood(name: str) -> Likelihood:
    """Return a likelihood of numbers whose noise, if it has any of its own, the network predicts.

    Raises:
        ValueError: there is no such likelihood.

    Example:
        >>> number_likelihood("poisson")
        PoissonLikelihood()
    """
    if name not in get_args(NumberLikelihood):
        *most, last = map(repr, get_args(NumberLikelihood))
        raise ValueError(f"likelihood must be {', '.join(most)} or {last}, got {name!r}")
    if name == "poisson":
        return PoissonLikelihood()
    if name == "negative-binomial":
        return NegativeBinomialLikelihood()
    if name == "student-t":
        return StudentTLikelihood(input_dependent=True)
    if name == "censored":
        return CensoredGaussianLikelihood(input_dependent=True)
    return GaussianLikelihood(input_dependent=True)


def check_unchanged(fitted: Likelihood, name: str) -> None:
    """Check that the likelihood of a trained estimator is still the one in its settings.

    Raises:
        ValueError: it is another one.

    Example:
        >>> check_unchanged(PoissonLikelihood(), "poisson")
    """
    if type(fitted) is not type(number_likelihood(name)):
        names = get_args(NumberLikelihood)
        own = next(each for each in names if type(number_likelihood(each)) is type(fitted))
        raise ValueError(
            f"likelihood must be {own!r}, as in training, got {name!r}; set it back, or call fit"
        )


def has_classes(likelihood: Likelihood) -> bool:
    """Return whether the targets of a likelihood are indices of classes.

    Example:
        >>> has_classes(CategoricalLikelihood()), has_classes(PoissonLikelihood())
        (True, False)
    """
    return isinstance(likelihood, CategoricalLikelihood | OrdinalLikelihood)


class CountStatistics(NamedTuple):
    """Statistics of training counts; they take the place of a scaling.

    Example:
        >>> found = CountStatistics.of(torch.tensor([[0.0], [2.0], [4.0]]))
        >>> found.log_rates.exp().round(decimals=2), found.spread.round(decimals=2)
        (tensor([2.1700], dtype=torch.float64), tensor([0.5100], dtype=torch.float64))
    """

    #: Logarithm of the mean, shape (K,): where the network's outputs start. It is that of one half
    #: more than the sum of the counts, so that counts of 0 alone have one.
    log_rates: Tensor
    #: log(1 + variance / mean^2), shape (K,): the variance of the logarithm of a log-normal
    #: variable with their mean and variance.
    spread: Tensor

    @classmethod
    def of(cls, counts: Tensor, weights: Tensor | None = None) -> CountStatistics:
        """Return the statistics of counts (N, K), with the number of times that each counts."""
        values = counts.to(torch.float64)
        times = values.new_ones(len(values)) if weights is None else weights.to(values)
        total = times.sum()
        share = (times / total).unsqueeze(-1)
        mean = (share * values).sum(0)
        variance = (share * (values - mean).square()).sum(0)
        relative = variance / mean.square().where(mean > 0.0, 1.0)
        return cls((mean + 0.5 / total).log(), relative.log1p())


def wrong_count(values: Any) -> float | None:
    """Return the first number of an array that is no count, or too large; None if all are.

    Example:
        >>> wrong_count(np.array([0.0, 3.0])), wrong_count(np.array([1.0, -2.0, 0.5]))
        (None, -2.0)
    """
    fine = (values >= 0.0) & (values <= LARGEST_COUNT) & (values % 1.0 == 0.0)
    wrong = values[~fine]
    return float(wrong[0]) if wrong.size else None


def check_are_numbers(y: Any) -> None:
    """Check that targets are no texts, dates or durations, which scikit-learn takes.

    Raises:
        ValueError: they are.

    Example:
        >>> check_are_numbers([1.5, 2])
    """
    try:
        values = np.asarray(y)
    except ValueError:  # rows of different lengths
        return
    wrong = None
    if values.dtype.kind in "mM":
        wrong = str(values.flat[0]) if values.size else None
    elif values.dtype.kind in "OUS":
        texts = (str(each) for each in values.flat if isinstance(each, str | bytes))
        wrong = next((text for text in texts if not _is_number(text)), None)
    if wrong is not None:
        raise ValueError(
            f"y must hold numbers, got {wrong!r}; use BayesianMLPClassifier for classes, and "
            "convert dates and durations to numbers"
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
