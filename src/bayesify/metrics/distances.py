"""Distances between two predictive distributions of the same examples."""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.metrics.checks import check_probabilities
from bayesify.noise.arguments import whole_number
from bayesify.prediction import NumericPredictive
from bayesify.prediction.checks import check_tensors

__all__ = [
    "agreement",
    "quantile_grid",
    "total_variation",
    "wasserstein",
    "wasserstein_of_samples",
]


def agreement(probs: Tensor, other: Tensor) -> float:
    """Return the share of examples with the same most probable class, in percent.

    Izmailov, Vikram, Hoffman and Wilson (2021), section 6.

    Args:
        probs: class probabilities, shape (N, K).
        other: class probabilities of the same examples, shape (N, K).

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes differ, or rows do not hold probabilities.

    Example:
        >>> p, q = torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([[0.6, 0.4], [0.7, 0.3]])
        >>> agreement(p, q)
        50.0
    """
    _check_pair(probs, other)
    return 100.0 * float((probs.argmax(-1) == other.argmax(-1)).double().mean())


@torch.no_grad()
def total_variation(probs: Tensor, other: Tensor) -> float:
    """Return half the L1 distance of class probabilities, averaged over examples, from 0 to 1.

    Args:
        probs: class probabilities, shape (N, K).
        other: class probabilities of the same examples, shape (N, K).

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes differ, or rows do not hold probabilities.

    Example:
        >>> p, q = torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([[0.6, 0.4], [0.7, 0.3]])
        >>> round(total_variation(p, q), 4)
        0.3
    """
    _check_pair(probs, other)
    return 0.5 * float((probs.double() - other.double()).abs().sum(-1).mean())


def wasserstein_of_samples(samples: Tensor, other: Tensor) -> Tensor:
    """Return the Wasserstein-1 distance of two empirical distributions, for each component.

    The integral of |F - G| over the line, exact for any two numbers of samples.

    Args:
        samples: shape (S, ...).
        other: shape (T, ...), with the same components.

    Returns:
        Shape (...), in the unit of the samples, float64.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: there is no sample, the shapes of the components differ, or a sample is not
            finite.

    Example:
        >>> wasserstein_of_samples(torch.tensor([0.0, 1.0]), torch.tensor([2.0, 2.0, 3.0, 3.0]))
        tensor(2., dtype=torch.float64)
    """
    check_tensors(samples=samples, other=other)
    has_axes = samples.dim() > 0 and other.dim() > 0
    if not (has_axes and samples.shape[1:] == other.shape[1:] and len(samples) * len(other)):
        raise ValueError(
            "samples must have shapes (S, ...) and (T, ...) with S and T of at least 1 and the "
            f"same components, got {tuple(samples.shape)} and {tuple(other.shape)}"
        )
    both = torch.cat([samples.double(), other.double()])
    wrong = ~both.isfinite()
    if bool(wrong.any()):
        raise ValueError(
            f"samples must be finite, got {both[wrong][0].item()} for {int(wrong.sum())} of "
            f"{both.numel()}; leave them out"
        )
    ordered, order = both.sort(0)
    # The steps of F - G at the ordered samples; its value is constant between two of them.
    weights = both.new_full((len(both),), -1.0 / len(other))
    weights[: len(samples)] = 1.0 / len(samples)
    return (weights[order].cumsum(0)[:-1].abs() * ordered.diff(dim=0)).sum(0)


@torch.no_grad()
def wasserstein(
    predictive: NumericPredictive, other: NumericPredictive, *, num_quantiles: int = 100
) -> float:
    """Return the Wasserstein-1 distance of two predictive distributions, averaged over examples.

    The integral over q of the distance of their q-quantiles, by the midpoint rule: the tails beyond
    the outermost of ``num_quantiles`` quantiles count as these do.

    Args:
        predictive: predictive distribution of N examples.
        other: predictive distribution of the same examples.
        num_quantiles: number of quantiles, at least 1.

    Returns:
        The distance in the target's unit.

    Raises:
        TypeError: a distribution is not over numbers, or ``num_quantiles`` no whole number.
        ValueError: they are not of the same shape, or ``num_quantiles`` is below 1.

    Example:
        >>> from bayesify.prediction import GaussianPredictive
        >>> p = GaussianPredictive(torch.zeros(1, 4), torch.tensor(1.0))
        >>> round(wasserstein(p, p.rescaled(shift=0.5, scale=1.0)), 4)
        0.5
    """
    grids = quantile_grid(predictive, num_quantiles), quantile_grid(other, num_quantiles)
    if grids[0].shape != grids[1].shape:
        raise ValueError(
            "the two must be of the same examples, got means of shape "
            f"{tuple(predictive.mean.shape)} and {tuple(other.mean.shape)}"
        )
    return float((grids[0] - grids[1]).abs().mean())


def quantile_grid(predictive: NumericPredictive, num_quantiles: int) -> Tensor:
    """Return the quantiles at (i + 1/2) / num_quantiles, shape (num_quantiles, N, ...), float64.

    Args:
        predictive: predictive distribution over numbers of N examples, shape (N, ...).
        num_quantiles: the number of quantiles, at least 1; they are in the target's unit.

    Raises:
        TypeError: the distribution is not over numbers, or ``num_quantiles`` no whole number.
        ValueError: ``num_quantiles`` is below 1.

    Example:
        >>> from bayesify.prediction import GaussianPredictive
        >>> p = GaussianPredictive(torch.zeros(1, 1), torch.tensor(1.0))
        >>> quantile_grid(p, 2).flatten().tolist()
        [-0.674..., 0.674...]
    """
    if not isinstance(predictive, NumericPredictive):
        raise TypeError(
            "quantiles need a predictive distribution of numbers, such as a GaussianPredictive, "
            f"got {type(predictive).__name__}"
        )
    num_quantiles = whole_number("num_quantiles", num_quantiles)
    levels = [(place + 0.5) / num_quantiles for place in range(num_quantiles)]
    return torch.stack([predictive.quantile(level).double() for level in levels])


def _check_pair(probs: Tensor, other: Tensor) -> None:
    check_tensors(probs=probs, other=other)
    if probs.shape != other.shape:
        raise ValueError(
            f"the probabilities must have one shape (N, K), got {tuple(probs.shape)} and "
            f"{tuple(other.shape)}"
        )
    for name, each in (("probs", probs), ("other", other)):
        check_probabilities(each, each.argmax(-1), name=name)
