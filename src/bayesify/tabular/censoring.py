"""Numbers that are recorded only between two limits: their bounds, and the recorded number."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from bayesify.prediction import GaussianPredictive, NumericPredictive

__all__ = ["Limits", "RecordedPredictive"]


@dataclass(frozen=True)
class Limits:
    """Limits of what is recorded: a number beyond one of them is recorded as the limit.

    Of a number that is recorded at a limit, or beyond it, only the bound is known. Without limits
    every number is known.

    Args:
        below: the lower limit, or -inf.
        above: the upper limit, or inf.

    Raises:
        ValueError: one is NaN, or the lower one is not below the upper one.

    Example:
        >>> limits = Limits(above=10.0)
        >>> bounds = limits.bounds(torch.tensor([3.0, 10.0, 12.0]))
        >>> bounds
        tensor([[ 3.,  3.],
                [10., inf],
                [10., inf]])
        >>> limits.recorded(bounds)
        tensor([ 3., 10., 10.])
    """

    below: float = -math.inf
    above: float = math.inf

    def __post_init__(self) -> None:
        """Check the limits."""
        if not self.below < self.above:
            raise ValueError(
                "the lower limit must be below the upper one, and both must be numbers, got "
                f"{self.below} and {self.above}"
            )

    @classmethod
    def between(cls, below: float | None, above: float | None) -> Self:
        """Return the limits, where None is an open one.

        Example:
            >>> Limits.between(None, 10)
            Limits(below=-inf, above=10.0)
        """
        return cls(
            -math.inf if below is None else float(below),
            math.inf if above is None else float(above),
        )

    @property
    def are_open(self) -> bool:
        """Whether every number is recorded as it is."""
        return math.isinf(self.below) and math.isinf(self.above)

    def is_exact(self, values: Tensor) -> Tensor:
        """Return which numbers lie strictly between the limits, and so are known."""
        return (self.below < values) & (values < self.above)

    def bounds(self, values: Tensor) -> Tensor:
        """Return lower and upper bound of each number on a new last axis, equal if it is known."""
        lower = torch.where(values <= self.below, -math.inf, values.clamp(max=self.above))
        upper = torch.where(values >= self.above, math.inf, values.clamp(min=self.below))
        return torch.stack([lower, upper], dim=-1)

    @staticmethod
    def recorded(bounds: Tensor) -> Tensor:
        """Return the recorded numbers of bounds (..., 2): the finite bound of those at a limit."""
        lower, upper = bounds.unbind(-1)
        return torch.where(lower.isinf(), upper, lower)


@dataclass(frozen=True, eq=False)
class RecordedPredictive(NumericPredictive):
    """Distribution of the recorded number min(max(y, below), above), for a mixture of Gaussians y.

    It has a density between the limits, and a probability at each of them. By it a prediction of y
    is measured where only recorded numbers are known.

    Args:
        means: the mean of y under each weight sample, shape (S, N, ...).
        noise_std: standard deviation of the noise of y, broadcastable to ``means``.
        limits: the limits.

    Example:
        >>> y = GaussianPredictive(torch.zeros(1, 1), torch.tensor(1.0))
        >>> p = RecordedPredictive.of(y, Limits(below=0.0))
        >>> p.mean, p.log_prob(torch.tensor([0.0])).exp(), p.interval(0.9)
        (tensor([0.3989]), tensor([0.5000]), (tensor([0.]), tensor([1.6449])))
    """

    means: Tensor
    noise_std: Tensor
    limits: Limits

    _fields: ClassVar = ("means", "noise_std")

    @classmethod
    def of(cls, predictive: GaussianPredictive, limits: Limits) -> RecordedPredictive:
        """Return the distribution of the recorded number for that of y."""
        return cls(predictive.means, predictive.noise_std, limits)

    @property
    def _latent(self) -> GaussianPredictive:
        return GaussianPredictive(self.means, self.noise_std)

    def _moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance under each weight sample, from the offsets to the mean of y."""
        std = self.noise_std.to(self.means).expand_as(self.means)
        first, second = torch.zeros_like(std), std.square()
        for limit, sign in ((self.limits.below, -1.0), (self.limits.above, 1.0)):
            if math.isinf(limit):
                continue
            offset = limit - self.means
            z = offset / std
            density = std * torch.exp(-0.5 * z.square()) / math.sqrt(2.0 * math.pi)
            beyond = 0.5 * torch.erfc(sign * z * math.sqrt(0.5))
            first = first + offset * beyond - sign * density
            second = second + (offset.square() - std.square()) * beyond - sign * offset * density
        return self.means + first, (second - first.square()).clamp_min(0.0)

    @property
    def _means(self) -> Tensor:
        return self._moments()[0]

    @property
    def _noise_variance(self) -> Tensor:
        return self._moments()[1]

    def _log_probs(self, targets: Tensor) -> Tensor:
        std = self.noise_std.to(self.means).expand_as(self.means)
        z = (targets - self.means) / std
        density = -0.5 * z.square() - std.log() - 0.5 * math.log(2.0 * math.pi)
        below, above = torch.special.log_ndtr(z), torch.special.log_ndtr(-z)
        found = torch.where(targets <= self.limits.below, below, density)
        return torch.where(targets >= self.limits.above, above, found)

    def cdf(self, targets: Tensor) -> Tensor:
        """See ``NumericPredictive.cdf``; it jumps at the limits."""
        inner = self._latent.cdf(targets)
        inner = torch.where(targets < self.limits.below, 0.0, inner)
        return torch.where(targets >= self.limits.above, 1.0, inner)

    def quantile(self, q: float) -> Tensor:
        """Return the q-quantile: that of y, between the limits, shape (N, ...)."""
        return self._latent.quantile(q).clamp(self.limits.below, self.limits.above)

    def simulate(self, num_draws: int, *, seed: int = 0) -> Tensor:
        """See ``NumericPredictive.simulate``."""
        draws = self._latent.simulate(num_draws, seed=seed)
        return draws.clamp(self.limits.below, self.limits.above)
