"""Metrics of predictive distributions of numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesify.prediction import GaussianPredictive, NumericPredictive, Predictive
from bayesify.prediction.checks import check_tensors

__all__ = ["crps", "interval_coverage", "interval_width", "regression_metrics"]

_LEVELS = (0.5, 0.8, 0.9, 0.95)
#: Draws from each predictive distribution where the CRPS has no closed form.
_NUM_DRAWS = 1000
#: Numbers that these draws hold at a time.
_MAX_HELD = 10_000_000


@torch.no_grad()
def crps(predictive: NumericPredictive, targets: Tensor) -> float:
    """Return the mean continuous ranked probability score in the target's unit.

    The integral over z of (cdf(z) - [z >= y])^2, averaged over examples and parts of the target. 0
    is perfect; for a point prediction it is the absolute error.

    For a mixture of Gaussians it is computed in closed form (Grimit, Gneiting, Berrocal and Johnson
    2006, eq. 3), in a time that grows with the square of the number of weight samples. For other
    distributions it is E|Y - y| - E|Y - Y'| / 2, estimated without bias from 1000 draws for each
    example.

    Args:
        predictive: predictive distribution of N examples.
        targets: true values, of the shape of the mean, (N, ...).

    Raises:
        TypeError: the predictive distribution is not over numbers, or ``targets`` no tensor.
        ValueError: the shapes do not match, or a target is nan.

    Example:
        >>> p = GaussianPredictive(torch.zeros(1, 1, dtype=torch.float64), torch.tensor(1.0))
        >>> round(crps(p, torch.zeros(1, dtype=torch.float64)), 4)
        0.2337
    """
    found = _check(predictive, targets)
    if not isinstance(found, GaussianPredictive):
        return _sampled_crps(found, targets.detach())
    means = found.means.detach().double()
    std = found.noise_std.detach().to(means).expand_as(means)
    first = _expected_distance(targets.detach().double() - means, std).mean(0)
    count, pairs = len(means), torch.zeros_like(first)
    for index in range(count):
        pairs += std[index] / math.sqrt(math.pi)  # half of the pair of a sample with itself
        if index + 1 < count:
            spread = torch.hypot(std[index], std[index + 1 :])
            pairs += _expected_distance(means[index] - means[index + 1 :], spread).sum(0)
    return float((first - pairs / count**2).mean())


def _sampled_crps(predictive: NumericPredictive, targets: Tensor) -> float:
    count = min(_NUM_DRAWS, max(2, _MAX_HELD // targets.numel()))
    rounds = -(-_NUM_DRAWS // count)
    total = 0.0
    for number in range(rounds):
        draws = predictive.simulate(count, seed=number).double().sort(0).values
        distance = (draws - targets).abs().mean()
        # Of sorted draws the sum of all distances is sum (2 i - n - 1) y_i, for i = 1..n.
        ranks = torch.arange(1 - count, count, 2, dtype=draws.dtype, device=draws.device)
        spread = torch.tensordot(ranks, draws, dims=1).mean() / (count * (count - 1))
        total += float(distance - spread)
    return total / rounds


def _expected_distance(difference: Tensor, std: Tensor) -> Tensor:
    """Return E|X| of X ~ N(difference, std^2)."""
    # Without noise and difference, 0 / 0 counts as 0.
    ratio = torch.where(difference == 0.0, difference, difference / std)
    density = torch.exp(-0.5 * ratio.square()) * math.sqrt(2.0 / math.pi)
    distance: Tensor = std * density + difference * torch.erf(ratio * math.sqrt(0.5))
    return distance


def interval_coverage(predictive: NumericPredictive, targets: Tensor, level: float) -> float:
    """Return the share of the targets in their equal-tailed interval, in percent.

    Args:
        predictive: predictive distribution of N examples.
        targets: true values, of the shape of the mean, (N, ...).
        level: level of the interval, strictly between 0 and 1; a calibrated interval holds
            100 * level % of the targets.

    Raises:
        TypeError: the predictive distribution is not over numbers, or ``targets`` no tensor.
        ValueError: the shapes do not match, a target is nan, or ``level`` is out of its range.

    Example:
        >>> p = GaussianPredictive(torch.zeros(1, 4), torch.tensor(1.0))
        >>> interval_coverage(p, torch.tensor([-2.0, -0.5, 0.5, 1.0]), 0.9)
        75.0
    """
    _check(predictive, targets)
    return _covered(predictive.interval(level), targets)


@torch.no_grad()
def interval_width(predictive: NumericPredictive, level: float) -> float:
    """Return the mean width of the equal-tailed intervals in the target's unit.

    Args:
        predictive: predictive distribution of N examples.
        level: level of the interval, strictly between 0 and 1.

    Raises:
        ValueError: ``level`` is out of its range.

    Example:
        >>> p = GaussianPredictive(torch.zeros(1, 4), torch.tensor(1.0))
        >>> round(interval_width(p, 0.95), 3)
        3.92
    """
    return _width(predictive.interval(level))


@torch.no_grad()
def regression_metrics(predictive: Predictive, targets: Tensor) -> dict[str, float]:
    """Return the metrics that every regression reports.

    Args:
        predictive: predictive distribution of N examples, from ``bnn.predict(x)``.
        targets: true values, of the shape of the mean, (N, ...).

    Returns:
        In the target's unit ``rmse``, ``crps``, ``mean_std`` (root of the mean variance) and the
        intervals' mean widths ``width_50``, ``width_80``, ``width_90``, ``width_95``; ``nll`` in
        nats per example; the intervals' coverages ``coverage_50`` to ``coverage_95`` in percent.

    Raises:
        TypeError: the predictive distribution is not over numbers, or ``targets`` no tensor.
        ValueError: the shapes do not match, or a target is nan.

    Example:
        >>> p = GaussianPredictive(torch.zeros(1, 4), torch.tensor(1.0))
        >>> found = regression_metrics(p, torch.tensor([-2.0, -0.5, 0.5, 1.0]))
        >>> round(found["rmse"], 3), round(found["nll"], 3), found["coverage_80"]
        (1.173, 1.606, 75.0)
    """
    numbers = _check(predictive, targets)
    found = {
        "rmse": float((numbers.mean - targets).double().square().mean().sqrt()),
        "nll": -float(numbers.log_prob(targets).double().mean()),
        "crps": crps(numbers, targets),
        "mean_std": float(numbers.total.double().mean().sqrt()),
    }
    for level in _LEVELS:
        interval = numbers.interval(level)
        found[f"coverage_{100 * level:.0f}"] = _covered(interval, targets)
        found[f"width_{100 * level:.0f}"] = _width(interval)
    return found


def _covered(interval: tuple[Tensor, Tensor], targets: Tensor) -> float:
    low, high = interval
    return 100.0 * float(((low <= targets) & (targets <= high)).double().mean())


def _width(interval: tuple[Tensor, Tensor]) -> float:
    low, high = interval
    return float((high - low).double().mean())


def _check(predictive: Predictive, targets: Tensor) -> NumericPredictive:
    if not isinstance(predictive, NumericPredictive):
        raise TypeError(
            "regression metrics need a predictive distribution of numbers, such as a "
            "GaussianPredictive, from a network with a GaussianLikelihood, got "
            f"{type(predictive).__name__}"
        )
    check_tensors(targets=targets)
    shape = predictive.mean.shape
    if targets.shape != shape or targets.numel() < 1:
        raise ValueError(
            f"targets must have the shape of the mean, {tuple(shape)}, and hold at least one "
            f"number, got shape {tuple(targets.shape)}; nothing is broadcast"
        )
    if bool(targets.isnan().any()):
        raise ValueError(
            f"targets must not be nan, got {int(targets.isnan().sum())} of {targets.numel()}; "
            "leave those examples out"
        )
    return predictive
