"""Priors over single weights: p(w) is the product over all random weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Gaussian", "Laplace", "Prior", "ScaleMixture"]


class Prior(ABC):
    """A density over one weight, applied to every random weight independently.

    To add one: a frozen dataclass here with ``log_prob``, its name in ``__all__`` and in
    ``bayesify/__init__.py``, and a row in the tests' list of priors. Where KL(q || p) has a closed
    form, register it in ``divergence.py``; else Monte Carlo is used.

    Example:
        >>> class Cauchy(Prior):
        ...     def log_prob(self, weights: Tensor) -> Tensor:
        ...         return -torch.log1p(weights.square()) - math.log(math.pi)
        >>> Cauchy().log_prob(torch.zeros(1))
        tensor([-1.1447])
    """

    @abstractmethod
    def log_prob(self, weights: Tensor) -> Tensor:
        """log p(w_i) of each weight, in nats; the shape of ``weights``."""


@dataclass(frozen=True)
class Gaussian(Prior):
    """N(0, std^2).

    Args:
        std: standard deviation, positive.

    Raises:
        ValueError: std is not positive and finite.

    Example:
        >>> Gaussian(std=1.0).log_prob(torch.zeros(1))
        tensor([-0.9189])
    """

    std: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "std")

    def log_prob(self, weights: Tensor) -> Tensor:
        """-w^2 / (2 std^2) - log std - log(2 pi) / 2, in nats, elementwise."""
        return -0.5 * (weights / self.std).square() - math.log(self.std) - _HALF_LOG_2PI


@dataclass(frozen=True)
class ScaleMixture(Prior):
    """pi N(0, std1^2) + (1 - pi) N(0, std2^2): a wide slab and a narrow spike.

    Blundell et al. 2015, eq. 7. The paper searches pi in {1/4, 1/2, 3/4}, -log std1 in {0, 1, 2}
    and -log std2 in {6, 7, 8}.

    Args:
        pi: weight of the component with ``std1``, strictly between 0 and 1.
        std1: standard deviation of the first component, larger than ``std2``.
        std2: standard deviation of the second component, positive.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> prior = ScaleMixture(pi=0.5, std1=1.0, std2=0.01)
        >>> prior.log_prob(torch.tensor([0.0, 50.0]))
        tensor([    3.0030, -1251.6121])
    """

    pi: float = 0.75
    std1: float = 1.0
    std2: float = math.exp(-8.0)

    def __post_init__(self) -> None:
        _check_positive(self, "std1", "std2")
        if not 0.0 < self.pi < 1.0:
            raise ValueError(
                f"pi must lie strictly between 0 and 1, got {self.pi}; for a single component use "
                "Gaussian"
            )
        if not self.std1 > self.std2:
            raise ValueError(
                f"std1 must be larger than std2, got std1={self.std1} and std2={self.std2}; swap "
                "them and use 1 - pi"
            )

    def log_prob(self, weights: Tensor) -> Tensor:
        """The logarithm of the mixture, by log-sum-exp, in nats, elementwise."""
        squared = weights.square()
        slab = math.log(self.pi) - math.log(self.std1) - squared * (0.5 / self.std1**2)
        spike = math.log1p(-self.pi) - math.log(self.std2) - squared * (0.5 / self.std2**2)
        return torch.logaddexp(slab, spike) - _HALF_LOG_2PI


@dataclass(frozen=True)
class Laplace(Prior):
    """exp(-|w| / scale) / (2 scale); its standard deviation is sqrt(2) scale.

    Args:
        scale: mean absolute value of a weight, positive.

    Raises:
        ValueError: scale is not positive and finite.

    Example:
        >>> Laplace(scale=0.5).log_prob(torch.tensor([1.0]))
        tensor([-2.])
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "scale")

    def log_prob(self, weights: Tensor) -> Tensor:
        """-|w| / scale - log(2 scale), in nats, elementwise."""
        return -weights.abs() / self.scale - math.log(2.0 * self.scale)


_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


def _check_positive(prior: Prior, *names: str) -> None:
    """Turn the named fields into Python floats, positive, whose squares are numbers in float32."""
    for name in names:
        value = float(getattr(prior, name))
        if not (value > 0.0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive and finite, got {value}")
        if not 1e-15 <= value <= 1e15:
            raise ValueError(f"{name} must lie between 1e-15 and 1e15, got {value}")
        object.__setattr__(prior, name, value)
