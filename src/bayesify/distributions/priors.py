"""Priors: densities of a single weight; p(w) is their product over all random weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.distributions.layout import ParameterLayout
from bayesify.distributions.softplus import softplus
from bayesify.noise.arguments import one_number, positive_number
from bayesify.prediction.student_t import log1p_square

__all__ = [
    "PRIOR_LIMITS",
    "BlockPrior",
    "Gaussian",
    "Laplace",
    "Prior",
    "ScaleMixture",
    "StudentT",
    "check_positive",
]


class Prior(ABC):
    """A density of one weight, applied to every random weight independently.

    To add a prior, write a frozen dataclass with ``log_prob`` in this file, add its name to
    ``__all__`` here and in ``bayesify/__init__.py``, and add it to the list of priors in
    ``tests/cases.py``. If KL(q || p) has a closed form, register it in ``distributions/kl.py``;
    otherwise the KL is estimated by Monte Carlo.

    Example:
        >>> class Cauchy(Prior):
        ...     def log_prob(self, weights: Tensor) -> Tensor:
        ...         return -torch.log1p(weights.square()) - math.log(math.pi)
        >>> Cauchy().log_prob(torch.zeros(1))
        tensor([-1.1447])
    """

    @abstractmethod
    def log_prob(self, weights: Tensor) -> Tensor:
        """Return log p(w_i) of each weight, in nats, with the shape of ``weights``."""

    def for_layout(self, layout: ParameterLayout) -> Prior:  # noqa: ARG002
        """Return the prior of the flat weight vector of a network, shape (D,).

        Args:
            layout: the position of each parameter in the vector.

        Returns:
            This prior itself if it is one density for all weights; otherwise a ``BlockPrior``.

        Raises:
            ValueError: the prior depends on parameter names that do not fit the network.
        """
        return self

    def for_parameter(self, shape: Sequence[int]) -> Prior:  # noqa: ARG002
        """Return the prior of the weights of one parameter of this shape, flattened."""
        return self

    @property
    def is_proper(self) -> bool:
        """Whether the density has a finite integral; if not, a KL is known up to a constant."""
        return True

    @property
    def is_learned(self) -> bool:
        """Whether the density depends on the posterior, and so on the data."""
        return False


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
        """Compute -w^2 / (2 std^2) - log std - log(2 pi) / 2, in nats, elementwise."""
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
        object.__setattr__(self, "pi", float(one_number("pi", self.pi)))  # JSON knows no NumPy
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
        """Compute the log density of the mixture by log-sum-exp, in nats, elementwise."""
        squared = weights.square()
        slab = math.log(self.pi) - math.log(self.std1) - squared * (0.5 / self.std1**2)
        odds = math.log1p(-self.pi) - math.log(self.pi) + math.log(self.std1) - math.log(self.std2)
        ratio = odds - squared * (0.5 / self.std2**2 - 0.5 / self.std1**2)  # of spike to slab
        # Second derivatives of torch.logaddexp are NaN where the two differ much.
        return slab + softplus(ratio) - _HALF_LOG_2PI


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
        """Compute -|w| / scale - log(2 scale), in nats, elementwise."""
        return -weights.abs() / self.scale - math.log(2.0 * self.scale)


@dataclass(frozen=True)
class StudentT(Prior):
    """Student's t distribution centred at zero, with heavier tails than a Gaussian.

    Weights of trained networks have such tails (Fortuin et al. 2022, Bayesian Neural Network Priors
    Revisited). Its standard deviation is scale sqrt(df / (df - 2)), infinite for df of at most 2.

    Args:
        df: degrees of freedom, positive; 1 is the Cauchy density, and as df grows the density
            tends to ``Gaussian(scale)``.
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
        """Compute -(df + 1) / 2 log(1 + (w / scale)^2 / df) + const, in nats, elementwise."""
        tail = log1p_square(weights.abs() / (self.scale * math.sqrt(self.df)))
        return -0.5 * (self.df + 1.0) * tail + (_log_student_peak(self.df) - math.log(self.scale))


@dataclass(frozen=True)
class BlockPrior(Prior):
    """The prior of a flat weight vector whose blocks have different priors.

    ``for_layout`` of a prior that differs between parameters returns it.

    Args:
        sizes: the number of weights of each block, in the order of the vector; they sum to D.
        priors: the distinct priors.
        owners: the index of the prior of each block; by default block i has prior i.

    Raises:
        ValueError: ``owners`` does not have one index per block, or leaves a prior unused.

    Example:
        >>> blocks = BlockPrior((2, 1), (Gaussian(1.0), Laplace(0.5)))
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
                f"BlockPrior needs one owner for each of {len(self.sizes)} sizes and a block for "
                f"each of {len(self.priors)} priors, got owners={self.owners}"
            )

    def log_prob(self, weights: Tensor) -> Tensor:
        """Return log p of each weight under its block's prior, in nats, shape (..., D).

        Raises:
            TypeError: the prior of a block has no density of its own (``EmpiricalGaussian``).
            ValueError: the last axis does not have length D.
        """
        blocks = zip(self.owners, self._split(weights), strict=True)
        return torch.cat([self.priors[owner].log_prob(block) for owner, block in blocks], dim=-1)

    @property
    def is_proper(self) -> bool:
        """Whether the priors of all blocks are proper."""
        return all(prior.is_proper for prior in self.priors)

    @property
    def is_learned(self) -> bool:
        """Whether the prior of a block depends on the posterior."""
        return any(prior.is_learned for prior in self.priors)

    def parts(self, vector: Tensor) -> list[Tensor]:
        """Return for each prior its weights, taken from the last axis of ``vector`` (..., D).

        Raises:
            ValueError: the last axis does not have length D.
        """
        owned: list[list[Tensor]] = [[] for _ in self.priors]
        for owner, block in zip(self.owners, self._split(vector), strict=True):
            owned[owner].append(block)
        return [blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1) for blocks in owned]

    def _split(self, vector: Tensor) -> Sequence[Tensor]:
        if vector.shape[-1] != sum(self.sizes):
            raise ValueError(
                f"this prior is for {sum(self.sizes)} weights, got {vector.shape[-1]}; create one "
                "for this network with prior.for_layout(bnn.layout)"
            )
        # split instead of slices: the backward of each slice would allocate a zero vector of
        # length D.
        blocks: Sequence[Tensor] = vector.split(self.sizes, dim=-1)
        return blocks


_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_BY_GROUP = "; for priors that differ between parameters use ByGroup"
#: Range of the widths of priors, chosen so that their squares are finite and positive in float32.
PRIOR_LIMITS = (1e-15, 1e15)


def _log_student_peak(df: float) -> float:
    """Compute the log density of Student's t of scale 1 at zero.

    It is log(Gamma((df + 1) / 2) / (Gamma(df / 2) sqrt(pi df))).
    """
    if df > 1e3:  # Stirling's series, as the difference of two large lgamma loses digits.
        return -_HALF_LOG_2PI - 0.25 / df + 1.0 / (24.0 * df**3)
    return math.lgamma(0.5 * (df + 1.0)) - math.lgamma(0.5 * df) - 0.5 * math.log(math.pi * df)


def check_positive(prior: Prior, *names: str) -> None:
    """Convert the named fields to floats and check that they lie within ``PRIOR_LIMITS``.

    Raises:
        TypeError: a field is not one number.
        ValueError: it is not positive and finite, or beyond these limits.
    """
    low, high = PRIOR_LIMITS
    for name in names:
        value = float(positive_number(name, getattr(prior, name), _BY_GROUP))
        if not low <= value <= high:
            raise ValueError(f"{name} must lie between 1e-15 and 1e15, got {value}")
        object.__setattr__(prior, name, value)
