"""Priors over single weights: p(w) is the product over all random weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.layout import ParameterLayout

__all__ = ["Blocks", "Gaussian", "Laplace", "Prior", "ScaleMixture", "StudentT"]


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

    def for_layout(self, layout: ParameterLayout) -> Prior:  # noqa: ARG002
        """The same prior over the flat weight vector of a network, shape (D,).

        Args:
            layout: which parameter lies where in the vector.

        Returns:
            This prior itself, where it is one density for all weights.

        Raises:
            ValueError: the prior names parameters, and they are not the network's.
        """
        return self


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
        check_positive(self, "std")

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
        check_positive(self, "std1", "std2")
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
        check_positive(self, "scale")

    def log_prob(self, weights: Tensor) -> Tensor:
        """-|w| / scale - log(2 scale), in nats, elementwise."""
        return -weights.abs() / self.scale - math.log(2.0 * self.scale)


@dataclass(frozen=True)
class StudentT(Prior):
    """Student's t distribution about zero: heavier tails than a Gaussian, for any ``df``.

    Weights of trained networks have such tails (Fortuin et al. 2022, Bayesian Neural Network Priors
    Revisited). Its standard deviation is scale sqrt(df / (df - 2)), infinite for df of at most 2.

    Args:
        df: degrees of freedom, positive; 1 is the Cauchy density, and for large ones it tends to
            ``Gaussian(scale)``.
        scale: width of the density, positive.

    Raises:
        ValueError: an argument is not positive and finite.

    Example:
        >>> StudentT(df=3.0, scale=1.0).log_prob(torch.tensor([0.0, 1e15]))
        tensor([  -1.0009, -136.9588])
    """

    df: float = 3.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, "df", "scale")

    def log_prob(self, weights: Tensor) -> Tensor:
        """-(df + 1) / 2 log(1 + (w / scale)^2 / df) + a constant, in nats, elementwise."""
        ratio = weights.abs() / (self.scale * math.sqrt(self.df))
        # log(1 + r^2) = log(1 + min(r, 1 / r)^2) + 2 log max(r, 1), where no square overflows.
        far = ratio > 1.0
        large = torch.where(far, ratio, 1.0)
        small = torch.where(far, 1.0, ratio) / large
        tail = torch.log1p(small.square()) + 2.0 * torch.log(large)
        return -0.5 * (self.df + 1.0) * tail + (_log_student_peak(self.df) - math.log(self.scale))


@dataclass(frozen=True)
class Blocks(Prior):
    """A flat weight vector cut into blocks, each with one of several priors.

    What ``for_layout`` of a prior that differs between parameters returns.

    Args:
        sizes: the number of weights of each block, in the order of the vector, D in all.
        priors: the priors.
        owners: for each block the index of its prior; by default block i has prior i.

    Raises:
        ValueError: the three do not fit together.

    Example:
        >>> blocks = Blocks((2, 1), (Gaussian(1.0), Laplace(0.5)))
        >>> blocks.log_prob(torch.tensor([0.0, 0.5, 1.0]))
        tensor([-0.9189, -1.0439, -2.0000])
    """

    sizes: tuple[int, ...]
    priors: tuple[Prior, ...]
    owners: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.owners:
            object.__setattr__(self, "owners", tuple(range(len(self.priors))))
        if len(self.owners) != len(self.sizes) or set(self.owners) != set(range(len(self.priors))):
            raise ValueError(
                f"Blocks needs one owner for each of {len(self.sizes)} sizes and a block for each "
                f"of {len(self.priors)} priors, got owners={self.owners}"
            )

    def log_prob(self, weights: Tensor) -> Tensor:
        """log p of each weight under its block's prior, in nats; last axis D.

        Raises:
            TypeError: a block's prior has no density of its own.
            ValueError: the last axis is of another length.
        """
        blocks = zip(self.owners, self._split(weights), strict=True)
        return torch.cat([self.priors[owner].log_prob(block) for owner, block in blocks], dim=-1)

    def parts(self, vector: Tensor) -> list[Tensor]:
        """For each prior its part of the last axis of ``vector``, shape (..., D).

        Raises:
            ValueError: the last axis is of another length.
        """
        owned: list[list[Tensor]] = [[] for _ in self.priors]
        for owner, block in zip(self.owners, self._split(vector), strict=True):
            owned[owner].append(block)
        return [blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1) for blocks in owned]

    def _split(self, vector: Tensor) -> Sequence[Tensor]:
        if vector.shape[-1] != sum(self.sizes):
            raise ValueError(
                f"this prior was made for {sum(self.sizes)} weights, got {vector.shape[-1]}; make "
                "one for this network with prior.for_layout(bnn.layout)"
            )
        # split, never slices: the backward of D-sized slices allocates a zero vector for each.
        blocks: Sequence[Tensor] = vector.split(self.sizes, dim=-1)
        return blocks


_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
#: Where the widths of priors lie: their squares are numbers in float32.
PRIOR_LIMITS = (1e-15, 1e15)


def _log_student_peak(df: float) -> float:
    """log of Gamma((df + 1) / 2) / (Gamma(df / 2) sqrt(pi df)), the density at zero of scale 1."""
    if df > 1e3:  # Stirling's series: the difference of two large lgamma loses its digits.
        return -_HALF_LOG_2PI - 0.25 / df + 1.0 / (24.0 * df**3)
    return math.lgamma(0.5 * (df + 1.0)) - math.lgamma(0.5 * df) - 0.5 * math.log(math.pi * df)


def check_positive(prior: Prior, *names: str) -> None:
    """Turn the named fields into Python floats, positive, whose squares are numbers in float32."""
    low, high = PRIOR_LIMITS
    for name in names:
        value = float(getattr(prior, name))
        if not (value > 0.0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive and finite, got {value}")
        if not low <= value <= high:
            raise ValueError(f"{name} must lie between 1e-15 and 1e15, got {value}")
        object.__setattr__(prior, name, value)
