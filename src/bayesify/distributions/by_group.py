"""Priors that differ between the parameters of a network, or learn their width from q."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NoReturn

import torch
from torch import Tensor

from bayesify.distributions.layout import ParameterLayout, pattern_pairs
from bayesify.distributions.priors import PRIOR_LIMITS, BlockPrior, Gaussian, Prior, check_positive
from bayesify.noise.arguments import whole_number

__all__ = ["ByGroup", "EmpiricalGaussian", "UnitBlock", "empirical_variance"]


@dataclass(frozen=True, init=False)
class ByGroup(Prior):
    """Different priors for different parameters, chosen by name.

    Args:
        groups: shell patterns over parameter names and the prior of each, as a mapping or as
            pairs. The first pattern that matches any of a parameter's names decides.

    Raises:
        ValueError: there is no pattern.
        TypeError: a pattern is not a string, or its value is not a prior that a group can have.

    Example:
        >>> from torch import nn
        >>> from bayesify.distributions.priors import Laplace
        >>> prior = ByGroup({"*.bias": Laplace(0.5), "*": Gaussian(0.3)})
        >>> layout = ParameterLayout.of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
        >>> prior.for_layout(layout).sizes
        (6, 2, 2, 1)
    """

    groups: tuple[tuple[str, Prior], ...]

    def __init__(self, groups: Mapping[str, Prior] | Iterable[tuple[str, Prior]]) -> None:
        example = 'ByGroup({"*.bias": Laplace(0.5), "*": Gaussian(0.3)})'
        checked = pattern_pairs("ByGroup", groups, example)
        for pattern, prior in checked:
            if not isinstance(prior, Prior) or isinstance(prior, ByGroup | BlockPrior):
                raise TypeError(
                    f"ByGroup must hold priors such as Gaussian(0.3), got {prior!r} for "
                    f"{pattern!r}; list the patterns of a nested ByGroup in the outer one"
                )
        object.__setattr__(self, "groups", checked)

    def log_prob(self, weights: Tensor) -> Tensor:  # noqa: ARG002
        """Raise TypeError: the prior of a weight depends on the layout of the network."""
        raise TypeError(
            "a ByGroup prior must know which parameter each weight belongs to; use "
            "prior.for_layout(bnn.layout).log_prob(weights)"
        )

    @property
    def is_proper(self) -> bool:
        """Whether the priors of all groups are proper."""
        return all(prior.is_proper for _, prior in self.groups)

    @property
    def is_learned(self) -> bool:
        """Whether the prior of a group depends on the posterior, if the group is large enough."""
        return any(prior.is_learned for _, prior in self.groups)

    def for_layout(self, layout: ParameterLayout) -> Prior:
        """Return the prior of each weight of the flat vector.

        This is a ``BlockPrior``, or a single prior if one covers all weights. Consecutive
        parameters with equal priors form one block, unless each learns its own width or has
        units of its own.

        Raises:
            ValueError: a pattern decides no random parameter, or no pattern matches a parameter.
        """
        patterns = layout.first_matches(
            [pattern for pattern, _ in self.groups], "ByGroup", "a prior"
        )
        pattern_sizes = [0] * len(self.groups)
        for size, pattern in zip(layout.sizes, patterns, strict=True):
            pattern_sizes[pattern] += size
        priors: list[Prior] = []
        owners: list[int] = []
        shared_priors: dict[int, int] = {}  # pattern whose weights share one learned width -> prior
        for shape, pattern in zip(layout.shapes, patterns, strict=True):
            prior = self.groups[pattern][1]
            shared = isinstance(prior, EmpiricalGaussian) and not prior.per_parameter
            sizes = (pattern_sizes[pattern],) if shared else shape
            prior = prior.for_parameter(sizes)
            owner = len(priors)
            if not isinstance(prior, EmpiricalGaussian | UnitBlock):
                if owners and _are_equal(priors[owners[-1]], prior):
                    owner = owners[-1]
            elif shared:
                owner = shared_priors.setdefault(pattern, owner)
            if owner == len(priors):
                priors.append(prior)
            owners.append(owner)
        if len(priors) == 1:
            return priors[0]
        runs = groupby(zip(owners, layout.sizes, strict=True), key=lambda block: block[0])
        blocks = [(owner, sum(size for _, size in run)) for owner, run in runs]
        return BlockPrior(
            sizes=tuple(size for _, size in blocks),
            priors=tuple(priors),
            owners=tuple(owner for owner, _ in blocks),
        )


@dataclass(frozen=True)
class EmpiricalGaussian(Prior):
    """N(0, s^2) with s chosen at every step to maximise the evidence lower bound.

    Empirical Bayes: for a group of weights, s^2 is the mean of mean^2 + std^2 of the posterior
    (Graves 2011, section 4.2, with the prior's mean at zero). s is a function of the posterior, so
    that it is not stored and has no learning rate. The gradient with respect to the posterior is
    that of the bound maximised over s. Pruned weights do not count.

    Args:
        min_size: a group of fewer weights has the prior ``Gaussian(small_std)``, since a few
            weights do not determine a width.
        small_std: standard deviation of the prior of such a group, positive.
        per_parameter: whether each parameter of the network is a group of its own. If False, all
            weights that the prior covers form one group.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> prior = EmpiricalGaussian(min_size=2)
        >>> prior.std_of(torch.tensor([1.0, -7.0]), torch.tensor([1.0, 7.0]))
        tensor(7.0711)
    """

    min_size: int = 100
    small_std: float = 1.0
    per_parameter: bool = True

    def __post_init__(self) -> None:
        check_positive(self, "small_std")
        object.__setattr__(self, "min_size", whole_number("min_size", self.min_size))

    def log_prob(self, weights: Tensor) -> Tensor:  # noqa: ARG002
        """Raise TypeError: without a posterior the standard deviation is not known."""
        raise TypeError(
            "an EmpiricalGaussian prior takes its std from the spread of the posterior and has no "
            "density without one, as for a point estimate; use kl_divergence with "
            "posterior=MeanFieldGaussian, or a prior of fixed width such as Gaussian(std=0.3)"
        )

    def for_layout(self, layout: ParameterLayout) -> Prior:
        """Return the priors of one group per parameter, or of one group of all weights."""
        return ByGroup({"*": self}).for_layout(layout)

    def for_parameter(self, shape: Sequence[int]) -> Prior:
        """Return the prior of a parameter that is one group."""
        if math.prod(shape) < self.min_size:
            return Gaussian(self.small_std)
        return replace(self, per_parameter=False)

    @property
    def is_learned(self) -> bool:
        """True: s is a function of the posterior."""
        return True

    def std_of(self, mean: Tensor, std: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return s for a group of n weights with this posterior.

        Args:
            mean: the means of the posterior minus the prior's mean, shape (n,).
            std: the standard deviations of the posterior, shape (n,).
            mask: False for pruned weights, shape (n,); None if no weight is pruned.

        Returns:
            A scalar in float32 or wider, differentiable in mean and std, between 1e-15 and 1e15.
        """
        if mean.numel() < self.min_size:
            dtype = torch.promote_types(mean.dtype, torch.float32)
            return torch.full((), self.small_std, dtype=dtype, device=mean.device)
        return empirical_variance(mean, std, mask)[1].sqrt()


@dataclass(frozen=True)
class UnitBlock(Prior):
    """The prior of one parameter whose weights belong to units, on its flattened weights.

    Its KL is computed from sums over the weights of each unit.

    Args:
        shape: the parameter's shape as (before, units, after): the second axis counts the units.

    Example:
        >>> block = UnitBlock((2, 3, 1))
        >>> block.sum_by_unit(torch.arange(6.0), mask=None)
        tensor([3., 5., 7.])
        >>> block.spread(torch.tensor([3.0, 5.0, 7.0]))
        tensor([3., 5., 7., 3., 5., 7.])
    """

    shape: tuple[int, int, int]

    def log_prob(self, weights: Tensor) -> NoReturn:  # noqa: ARG002
        """Raise TypeError: a single weight has no density of its own."""
        raise TypeError(
            f"a {type(self).__name__.removesuffix('Block')} prior is one of whole units and has no "
            "density of a single weight, as a Monte Carlo KL or a point estimate needs; use "
            'posterior=MeanFieldGaussian with kl="auto", or a prior of single weights such as '
            "ScaleMixture()"
        )

    def sum_by_unit(self, values: Tensor, mask: Tensor | None) -> Tensor:
        """Sum over the unpruned weights of each unit, from shape (n,) to (units,)."""
        kept = values if mask is None else torch.where(mask, values, 0.0)
        return kept.view(self.shape).sum(dim=(0, 2))

    def count_by_unit(self, like: Tensor, mask: Tensor | None) -> Tensor:
        """Count the unpruned weights of each unit, at least 1, shape (units,), as ``like``."""
        return self.sum_by_unit(torch.ones_like(like), mask).clamp_min(1.0)

    def spread(self, by_unit: Tensor) -> Tensor:
        """Copy a number of each unit to its weights, from shape (units,) to (n,)."""
        return by_unit.view(1, -1, 1).expand(self.shape).reshape(-1)


def empirical_variance(mean: Tensor, std: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Average mean^2 + std^2 over the unpruned weights, shapes (n,).

    Returns:
        Two scalars in float32 or wider: the average itself, and the variance of the prior, which is
        the average clamped to the range of a prior's width.

    Example:
        >>> mask = torch.tensor([True, False])
        >>> empirical_variance(torch.zeros(2), torch.tensor([2.0, 5.0]), mask)
        (tensor(4.), tensor(4.))
    """
    dtype = torch.promote_types(mean.dtype, torch.float32)
    squares = mean.to(dtype).square() + std.to(dtype).square()
    if mask is None:
        average = squares.mean()
    else:
        average = torch.where(mask, squares, 0.0).sum() / mask.sum().clamp_min(1)
    low, high = PRIOR_LIMITS
    return average, average.clamp(low**2, high**2)


def _are_equal(one: Prior, other: Prior) -> bool:
    # Hashes are compared first: == fails where the fields of a user's prior are tensors.
    try:
        return one is other or (hash(one) == hash(other) and one == other)
    except TypeError:  # a dataclass that is not frozen has no hash
        return False
