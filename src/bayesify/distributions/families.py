"""Families of posteriors under which weights depend on each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from bayesify.distributions.correlations import Independent, LowRank, Triangular
from bayesify.distributions.kronecker import Kronecker
from bayesify.distributions.layout import ParameterLayout, pattern_pairs
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.distributions.structured import Group, PosteriorFamily
from bayesify.noise.arguments import whole_number

__all__ = [
    "FullGaussian",
    "LowRankGaussian",
    "MatrixGaussian",
    "PosteriorByGroup",
    "PosteriorName",
    "named_posterior",
]

#: Posteriors that are known by name to the command line and to the estimators of tables.
PosteriorName = Literal["mean-field", "low-rank", "matrix"]


@dataclass(frozen=True)
class LowRankGaussian(PosteriorFamily):
    """A diagonal plus a covariance of low rank over all weights (Ong, Nott and Smith 2018).

    The covariance is diag(scale) (I + F F^T) diag(scale) with F of shape (D, rank). A weight sample
    costs ``rank`` multiplications for each weight more than under a mean field, and there are
    ``rank`` parameters for each weight more.

    Args:
        rank: the number of directions in which all weights may vary together, at least 1.

    Raises:
        ValueError: the rank is below 1.

    Example:
        >>> from torch import nn
        >>> from bayesify import BayesianModule
        >>> bnn = BayesianModule(nn.Linear(3, 2), posterior=LowRankGaussian(rank=2))
        >>> bnn.posterior.correlations[0].factor.shape
        torch.Size([8, 2])
    """

    rank: int = 4

    def __post_init__(self) -> None:
        _check_positive(self)

    def divide(
        self, layout: ParameterLayout, names: Sequence[str], like: Tensor, seed: int
    ) -> list[Group]:
        """See :meth:`PosteriorFamily.divide`."""
        weights = torch.cat([like[layout.slice_of(name)] for name in names])
        return [Group(tuple(names), LowRank.of_rank(self.rank, weights, seed))]


@dataclass(frozen=True)
class MatrixGaussian(PosteriorFamily):
    """By layer, W - mean = A (scale * E) B^T: outputs and inputs of a layer are correlated.

    A and B are triangular with ones on their diagonals. With a scale of rank one it would be the
    matrix normal distribution of Louizos and Welling (2016); with a scale for each weight it
    contains the mean field too. The biases of a layer are a further column of its weights.
    Parameters of one axis without such a layer are independent.

    Args:
        max_side: a layer with more outputs than this keeps these uncorrelated, and so for its
            inputs (with the bias): a matrix of side n has n^2 parameters, and a sample multiplies
            by it.

    Raises:
        ValueError: ``max_side`` is below 1.

    Example:
        >>> from torch import nn
        >>> from bayesify import BayesianModule
        >>> bnn = BayesianModule(nn.Linear(3, 2), posterior=MatrixGaussian())
        >>> [(name, tuple(p.shape)) for name, p in bnn.posterior.correlations[0].named_parameters()]
        [('rows', (2, 2)), ('columns', (4, 4))]
    """

    max_side: int = 1024

    def __post_init__(self) -> None:
        _check_positive(self)

    def divide(
        self,
        layout: ParameterLayout,
        names: Sequence[str],
        like: Tensor,
        seed: int,  # noqa: ARG002
    ) -> list[Group]:
        """See :meth:`PosteriorFamily.divide`."""
        found: list[Group] = []
        left = list(names)
        while left:
            name = left.pop(0)
            shape = layout.shapes[layout.names.index(name)]
            with_bias = _is_bias_of(layout, left[:1], name)
            rows, columns = shape[:1].numel(), shape[1:].numel() + with_bias
            # A vector without its layer has no second axis along which it could be correlated.
            is_matrix = len(shape) > 1 and rows * columns > 0
            sides = [self._zeros(n, like) if is_matrix else None for n in (rows, columns)]
            own = (name, left.pop(0)) if with_bias else (name,)
            correlated = sides[0] is not None or sides[1] is not None
            found.append(
                Group(own, Kronecker((rows, columns), *sides, bias=with_bias))
                if correlated
                else Group(own, Independent(rows * columns))
            )
        return found

    def _zeros(self, side: int, like: Tensor) -> Tensor | None:
        return like.new_zeros(side, side) if 1 < side <= self.max_side else None


@dataclass(frozen=True)
class FullGaussian(PosteriorFamily):
    """Any covariance over all weights, by its Cholesky factor of shape (D, D).

    Args:
        max_weights: the largest D that is accepted, since memory and time grow with D^2.

    Raises:
        ValueError: ``max_weights`` is below 1, or there are more weights.

    Example:
        >>> from torch import nn
        >>> from bayesify import BayesianModule
        >>> BayesianModule(nn.Linear(3, 2), posterior=FullGaussian(max_weights=7))
        Traceback (most recent call last):
            ...
        ValueError: FullGaussian must be for at most max_weights=7 weights, got 8; ...
    """

    max_weights: int = 3000

    def __post_init__(self) -> None:
        _check_positive(self)

    def divide(
        self,
        layout: ParameterLayout,
        names: Sequence[str],
        like: Tensor,
        seed: int,  # noqa: ARG002
    ) -> list[Group]:
        """See :meth:`PosteriorFamily.divide`."""
        size = _size(layout, names)
        if size > self.max_weights:
            raise ValueError(
                f"FullGaussian must be for at most max_weights={self.max_weights:,} weights, got "
                f"{size:,}; take LowRankGaussian(rank=4), PosteriorByGroup for a few layers, or "
                f"FullGaussian(max_weights={size}), whose factor holds {size**2:,} numbers"
            )
        return [Group(tuple(names), Triangular(like.new_zeros(size, size)))]


@dataclass(frozen=True, init=False)
class PosteriorByGroup(PosteriorFamily):
    """Different families for different parameters, chosen by name: for example a full last layer.

    Parameters of different patterns are independent of each other.

    Args:
        groups: shell patterns over parameter names, and for each a family or ``MeanFieldGaussian``,
            as a mapping or as pairs. The first pattern that matches decides.

    Raises:
        ValueError: there is no pattern.
        TypeError: a pattern is not a string, or its value is not a family.

    Example:
        >>> from torch import nn
        >>> from bayesify import BayesianModule
        >>> net = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 1))
        >>> family = PosteriorByGroup({"2.*": FullGaussian(), "*": MeanFieldGaussian})
        >>> BayesianModule(net, posterior=family).posterior.correlations
        ModuleList(
          (0): Triangular()
          (1): Independent()
        )
    """

    groups: tuple[tuple[str, PosteriorFamily | type[MeanFieldGaussian]], ...]

    def __init__(
        self,
        groups: Mapping[str, PosteriorFamily | type[MeanFieldGaussian]]
        | Iterable[tuple[str, PosteriorFamily | type[MeanFieldGaussian]]],
    ) -> None:
        pairs = pattern_pairs(
            "PosteriorByGroup", groups, 'PosteriorByGroup({"*": LowRankGaussian()})'
        )
        for pattern, family in pairs:
            nested = isinstance(family, PosteriorByGroup)
            if nested or not (family is MeanFieldGaussian or isinstance(family, PosteriorFamily)):
                raise TypeError(
                    "PosteriorByGroup must hold MeanFieldGaussian or families such as "
                    f"FullGaussian(), got {family!r} for {pattern!r}; a deterministic parameter is "
                    "excluded by BayesianModule(..., exclude=[...])"
                )
        object.__setattr__(self, "groups", pairs)

    def divide(
        self, layout: ParameterLayout, names: Sequence[str], like: Tensor, seed: int
    ) -> list[Group]:
        """See :meth:`PosteriorFamily.divide`."""
        patterns = [pattern for pattern, _ in self.groups]
        numbers = layout.first_matches(patterns, "PosteriorByGroup", "a family")
        deciding = dict(zip(layout.names, numbers, strict=True))
        found: list[Group] = []
        for number, (_, family) in enumerate(self.groups):
            own = [name for name in names if deciding[name] == number]
            if isinstance(family, PosteriorFamily):
                found += family.divide(layout, own, like, seed + number)
            else:
                found.append(Group(tuple(own), Independent(_size(layout, own))))
        return found


def named_posterior(name: PosteriorName) -> type[MeanFieldGaussian] | PosteriorFamily:
    """Return the posterior of a name, with the defaults of its family.

    Raises:
        ValueError: there is none of this name.

    Example:
        >>> named_posterior("low-rank")
        LowRankGaussian(rank=4)
    """
    found: dict[str, type[MeanFieldGaussian] | PosteriorFamily] = {
        "mean-field": MeanFieldGaussian,
        "low-rank": LowRankGaussian(),
        "matrix": MatrixGaussian(),
    }
    if name not in found:
        raise ValueError(
            f"posterior must be one of {', '.join(map(repr, found))}, got {name!r}; other families "
            "are given to BayesianModule(..., posterior=...)"
        )
    return found[name]


def _check_positive(family: PosteriorFamily) -> None:
    """Convert the fields of a family to integers, and raise ValueError for one below 1."""
    for each in fields(family):  # type: ignore[arg-type]
        value = whole_number(each.name, getattr(family, each.name))
        object.__setattr__(family, each.name, value)


def _size(layout: ParameterLayout, names: Sequence[str]) -> int:
    places = [layout.slice_of(name) for name in names]
    return sum(place.stop - place.start for place in places)


def _is_bias_of(layout: ParameterLayout, following: Sequence[str], name: str) -> bool:
    """Return whether the next parameter is the bias of a layer's weight."""
    owner, _, last = name.rpartition(".")
    expected = f"{owner}.bias" if owner else "bias"
    if last != "weight" or list(following) != [expected]:
        return False
    weight, bias = (layout.shapes[layout.names.index(each)] for each in (name, expected))
    return bool(len(weight) > 1 and bias == weight[:1])
