"""Priors that differ between the parameters of a network, or learn their width from it."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby

import torch
from torch import Tensor

from bayesify.layout import ParameterLayout, shortened
from bayesify.priors import PRIOR_LIMITS, Blocks, Gaussian, Prior, check_positive

__all__ = ["ByGroup", "EmpiricalGaussian", "variances"]


@dataclass(frozen=True, init=False)
class ByGroup(Prior):
    """Different priors for different parameters, chosen by name.

    Args:
        groups: shell patterns over parameter names with the prior of each, as a mapping or as
            pairs. The first pattern that matches any of a parameter's names decides.

    Raises:
        ValueError: there is no pattern.
        TypeError: a pattern is no text, or its value no prior that a group can have.

    Example:
        >>> from torch import nn
        >>> from bayesify.priors import Laplace
        >>> prior = ByGroup({"*.bias": Laplace(0.5), "*": Gaussian(0.3)})
        >>> layout = ParameterLayout.of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
        >>> prior.for_layout(layout).sizes
        (6, 2, 2, 1)
    """

    groups: tuple[tuple[str, Prior], ...]

    def __init__(self, groups: Mapping[str, Prior] | Iterable[tuple[str, Prior]]) -> None:
        try:
            pairs = tuple(groups.items() if isinstance(groups, Mapping) else groups)
            checked = tuple((pattern, prior) for pattern, prior in pairs)
        except (TypeError, ValueError):
            raise TypeError(
                f"ByGroup must be given patterns with their priors, got {groups!r}; write "
                'ByGroup({"*.bias": Laplace(0.5), "*": Gaussian(0.3)})'
            ) from None
        if not checked:
            raise ValueError(
                'ByGroup must have at least one pattern, got none; write {"*": Gaussian(0.3)} for '
                "one prior over all parameters"
            )
        for pattern, prior in checked:
            if not isinstance(pattern, str):
                raise TypeError(
                    "ByGroup must hold patterns of parameter names such as '*.bias', got "
                    f"{pattern!r}"
                )
            if not isinstance(prior, Prior) or isinstance(prior, ByGroup | Blocks):
                raise TypeError(
                    f"ByGroup must hold priors such as Gaussian(0.3), got {prior!r} for "
                    f"{pattern!r}; list the patterns of a nested ByGroup in the outer one"
                )
        object.__setattr__(self, "groups", checked)

    def log_prob(self, weights: Tensor) -> Tensor:  # noqa: ARG002
        """Raises TypeError: which weight has which prior depends on the network."""
        raise TypeError(
            "a ByGroup prior must know which parameter each weight belongs to; use "
            "prior.for_layout(bnn.layout).log_prob(weights)"
        )

    def for_layout(self, layout: ParameterLayout) -> Prior:
        """The prior of each weight of the flat vector: ``Blocks``, or the only prior that is left.

        Neighbours that have equal priors form one block, save where each learns a width of its own.

        Raises:
            ValueError: a pattern decides no random parameter, or a parameter has no pattern.
        """
        deciding = self._deciding(layout)
        covered = [0] * len(self.groups)
        for size, number in zip(layout.sizes, deciding, strict=True):
            covered[number] += size
        priors: list[Prior] = []
        owners: list[int] = []
        learned: dict[int, int] = {}  # of a pattern whose weights share one width: its prior
        for size, number in zip(layout.sizes, deciding, strict=True):
            prior = self.groups[number][1]
            shared = isinstance(prior, EmpiricalGaussian) and not prior.per_parameter
            if isinstance(prior, EmpiricalGaussian):
                prior = prior.over(covered[number] if shared else size)
            owner = len(priors)
            if not isinstance(prior, EmpiricalGaussian):
                if owners and _equal(priors[owners[-1]], prior):
                    owner = owners[-1]
            elif shared:
                owner = learned.setdefault(number, owner)
            if owner == len(priors):
                priors.append(prior)
            owners.append(owner)
        if len(priors) == 1:
            return priors[0]
        runs = groupby(zip(owners, layout.sizes, strict=True), key=lambda block: block[0])
        blocks = [(owner, sum(size for _, size in run)) for owner, run in runs]
        return Blocks(
            sizes=tuple(size for _, size in blocks),
            priors=tuple(priors),
            owners=tuple(owner for owner, _ in blocks),
        )

    def _deciding(self, layout: ParameterLayout) -> list[int]:
        """For each parameter the number of the pattern that decides its prior."""
        matching = [
            [
                number
                for number, (pattern, _) in enumerate(self.groups)
                if any(fnmatchcase(name, pattern) for name in names)
            ]
            for names in layout.ties
        ]
        for name, numbers in zip(layout.names, matching, strict=True):
            if not numbers:
                raise ValueError(
                    f"ByGroup must give every random parameter a prior, but no pattern matches "
                    f'{name!r}; add "*" with the prior of all others as the last pattern'
                )
        for number, (pattern, _) in enumerate(self.groups):
            if any(numbers[0] == number for numbers in matching):
                continue
            taken = [
                name
                for name, numbers in zip(layout.names, matching, strict=True)
                if number in numbers
            ]
            raise ValueError(
                f"every pattern of ByGroup must decide a random parameter, but {pattern!r} "
                + (
                    f"matches only {shortened(taken)}, which earlier patterns decide; move it "
                    "before them or leave it out"
                    if taken
                    else f"matches none of {shortened(layout.names)}; mend it or leave it out"
                )
            )
        return [numbers[0] for numbers in matching]


@dataclass(frozen=True)
class EmpiricalGaussian(Prior):
    """N(0, s^2) with the s under which the evidence lower bound is largest, at every step.

    Empirical Bayes: for a group of weights, s^2 is the mean of mean^2 + std^2 of the posterior
    (Graves 2011, section 4.2, with the prior's mean at zero). Nothing is stored and nothing has a
    learning rate: s is a function of the posterior, and the gradient that reaches the posterior is
    that of the bound already maximised over s. Weights that were pruned do not count.

    Args:
        min_size: a group of fewer weights has ``Gaussian(small_std)``, since few weights cannot
            tell their width.
        small_std: standard deviation of the prior of such a group, positive.
        per_parameter: whether each parameter of the network is a group of its own; else all
            weights together that the prior covers.

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
        object.__setattr__(self, "min_size", operator.index(self.min_size))
        if self.min_size < 1:
            raise ValueError(f"min_size must be at least 1, got {self.min_size}")

    def log_prob(self, weights: Tensor) -> Tensor:  # noqa: ARG002
        """Raises TypeError: without a posterior there is no standard deviation."""
        raise TypeError(
            "an EmpiricalGaussian prior takes its std from the spread of the posterior and has no "
            "density without it, nor beside a point estimate; use kl_divergence with "
            "posterior=MeanFieldGaussian, or a prior of fixed width such as Gaussian(std=0.3)"
        )

    def for_layout(self, layout: ParameterLayout) -> Prior:
        """One group for each parameter, or one for all; see ``ByGroup.for_layout``."""
        return ByGroup({"*": self}).for_layout(layout)

    def over(self, num_weights: int) -> Prior:
        """The prior of one group of so many weights."""
        if num_weights < self.min_size:
            return Gaussian(self.small_std)
        return replace(self, per_parameter=False)

    def std_of(self, mean: Tensor, std: Tensor, kept: Tensor | None = None) -> Tensor:
        """The standard deviation that a group with this posterior gives the prior.

        Args:
            mean: the posterior's means, shape (n,), less the prior's mean where it has one.
            std: its standard deviations, shape (n,).
            kept: False where a weight was pruned, shape (n,).

        Returns:
            A scalar in float32 at least, differentiable in mean and std, between 1e-15 and 1e15.
        """
        if mean.numel() < self.min_size:
            dtype = torch.promote_types(mean.dtype, torch.float32)
            return torch.full((), self.small_std, dtype=dtype, device=mean.device)
        return variances(mean, std, kept)[1].sqrt()


def variances(mean: Tensor, std: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mean of mean^2 + std^2 over the weights that are left, and what a prior makes of it.

    Returns:
        Two scalars in float32 at least: the mean itself, and the prior's variance, which is the
        same within the limits of a prior's width.

    Example:
        >>> variances(torch.zeros(2), torch.tensor([2.0, 5.0]), torch.tensor([True, False]))
        (tensor(4.), tensor(4.))
    """
    dtype = torch.promote_types(mean.dtype, torch.float32)
    squares = mean.to(dtype).square() + std.to(dtype).square()
    if kept is None:
        average = squares.mean()
    else:
        average = torch.where(kept, squares, 0.0).sum() / kept.sum().clamp_min(1)
    low, high = PRIOR_LIMITS
    return average, average.clamp(low**2, high**2)


def _equal(one: Prior, other: Prior) -> bool:
    # By hash first: the fields of a prior from elsewhere may be tensors.
    return one is other or (hash(one) == hash(other) and one == other)
