"""A Gaussian posterior under which weights depend on each other."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from bayesify.distributions.correlations import Correlation
from bayesify.distributions.layout import ParameterLayout
from bayesify.distributions.posteriors import GaussianPosterior, MeanFieldGaussian, WeightDraw
from bayesify.distributions.softplus import inverse_softplus, softplus

__all__ = ["Group", "MomentsGiven", "PosteriorFamily", "ScaledGroup", "StructuredGaussian"]

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class Group:
    """Weights that depend on each other: their parameters, in the order of the layout, and how."""

    names: tuple[str, ...]
    correlation: Correlation


@dataclass(frozen=True)
class ScaledGroup(Group):
    """Weights that depend on each other, with the scale of each, shape (n,)."""

    scale: Tensor


class MomentsGiven(NamedTuple):
    """The distribution of the weights given some of the noise; all by the parameters' first names.

    Args:
        means: the mean of each parameter, with its shape.
        stds: the standard deviation of each parameter whose weights are independent, given that
            noise; the others have none left, or belong to a group of ``joint``.
        joint: the group of each parameter of which no noise was given.
    """

    means: dict[str, Tensor]
    stds: dict[str, Tensor]
    joint: dict[str, ScaledGroup]


class StructuredGaussian(GaussianPosterior):
    """A Gaussian over groups of weights; within a group they depend on each other.

    It is what a :class:`PosteriorFamily` makes. ``std`` holds the standard deviations of the
    marginals.

    Args:
        mean: initial means, shape (D,).
        std: initial standard deviations, positive: one number or a vector of shape (D,).
        layout: the position of each parameter in the vector.
        groups: the groups of parameters, of which each belongs to one.
        family: what made it.

    Example:
        >>> from bayesify import LowRankGaussian
        >>> layout = ParameterLayout.of(nn.Linear(3, 2))
        >>> q = LowRankGaussian(rank=1).centred_on(torch.zeros(8), 0.1, layout, seed=0)
        >>> q.std.detach()[:3], q.noise_size
        (tensor([0.1000, 0.1000, 0.1000]), 9)
    """

    def __init__(
        self,
        mean: Tensor,
        std: float | Tensor,
        layout: ParameterLayout,
        groups: Sequence[Group],
        family: PosteriorFamily,
    ) -> None:
        super().__init__(mean, std)
        self.family = family
        self.correlations = nn.ModuleList(group.correlation for group in groups)
        self._names = [group.names for group in groups]
        self._places = [_merged(layout.slice_of(name) for name in group.names) for group in groups]
        with torch.no_grad():  # so that the standard deviations are those asked for
            wanted = softplus(self.rho)
            self.rho.copy_(inverse_softplus(wanted * (wanted / self.full_std)))

    @classmethod
    def centred_on(cls, mean: Tensor, init_std: float | Tensor | None) -> Self:  # noqa: ARG003
        """Raise TypeError: a family says which weights depend on each other."""
        raise TypeError(
            f"{cls.__name__} must be made by a family; write posterior=LowRankGaussian(rank=4), "
            "MatrixGaussian(), FullGaussian() or PosteriorByGroup({...})"
        )

    @property
    def noise_size(self) -> int:
        """How many standard normals one weight sample needs, which may be more than D."""
        return sum(correlation.num_normals for correlation in self.group_correlations)

    @property
    def full_std(self) -> Tensor:
        """Standard deviation of each weight, shape (D,), pruned weights included."""
        scales = self.split(softplus(self.rho))
        with self._without_autocast():
            pairs = zip(self.group_correlations, scales, strict=True)
            return self._join([c.std(scale) for c, scale in pairs])

    @property
    def log_std(self) -> Tensor:
        """Its logarithm, shape (D,), finite where the scales underflow too."""
        with self._without_autocast():
            pairs = zip(self.group_correlations, self.split(self.log_scale), strict=True)
            return self._join([c.log_std(log_scale) for c, log_scale in pairs])

    @property
    def log_scale(self) -> Tensor:
        """The logarithm of the scale of each weight, shape (D,), finite for every finite rho."""
        scale = softplus(self.rho)
        # As log_softplus, of whose autograd function torch.compile may warn: softplus underflows
        # where its logarithm is rho.
        is_known = scale > 2.0 * torch.finfo(scale.dtype).tiny
        return torch.where(is_known, scale.where(is_known, 1.0).log(), self.rho)

    @property
    def group_correlations(self) -> list[Correlation]:
        """How the weights of each group depend on each other."""
        return list(self.correlations)  # type: ignore[arg-type]

    @torch.no_grad()
    def narrow(self, max_std: float, chosen: Tensor) -> None:
        """See :meth:`GaussianPosterior.narrow`; a ``MatrixGaussian`` gives up correlations."""
        scale = softplus(self.rho)
        parts = zip(self.group_correlations, self.split(scale), self.split(chosen), strict=True)
        found = [c.narrow(part, max_std) if bool(own.any()) else part for c, part, own in parts]
        narrowed = inverse_softplus(self._join(found).clamp(min=torch.finfo(scale.dtype).tiny))
        self.rho.copy_(torch.where(chosen, narrowed.minimum(self.rho), self.rho))

    def draw(self, noise: Tensor) -> WeightDraw:
        """Transform standard normals of shape (S, ``noise_size``) to S weight vectors."""
        scales = self.split(softplus(self.rho))
        normals = noise.split([c.num_normals for c in self.group_correlations], dim=-1)
        parts = zip(self.group_correlations, scales, normals, strict=True)
        with self._without_autocast():
            deviations = self._join([c.deviations(scale, part) for c, scale, part in parts])
        return WeightDraw(self._masked(self.mean + deviations), noise)

    def names_by_weight(self) -> list[str]:
        """See :meth:`Posterior.names_by_weight`."""
        names = super().names_by_weight()
        if all(correlation.scale_is_own for correlation in self.group_correlations):
            return names
        return [name for name in names if name != "rho"]

    @property
    def joint_groups(self) -> list[Group]:
        """The groups whose weights are independent only given all of their noise."""
        pairs = zip(self._names, self.group_correlations, strict=True)
        return [Group(names, correlation) for names, correlation in pairs if correlation.is_joint]

    def check_prunable(self) -> None:
        """Raise TypeError where the KL of a layer cannot be computed once weights are pruned."""
        for group in self.joint_groups:
            group.correlation.check_prunable()

    def num_given(self, local: Collection[str] = ()) -> int:
        """How many standard normals :meth:`moments_given` needs."""
        pairs = zip(self._names, self.group_correlations, strict=True)
        return sum(c.num_given for names, c in pairs if not _is_left(names, c, local))

    def moments_given(
        self, noise: Tensor, layout: ParameterLayout, local: Collection[str] = ()
    ) -> MomentsGiven:
        """Return the distribution of the weights given some of the noise of a sample.

        Args:
            noise: standard normals of shape (``num_given(local)``,).
            layout: the layout of the parameters.
            local: parameters whose noise is added within the operations: of a group of
                :attr:`joint_groups` that consists of such parameters no noise is given.
        """
        scales = self.split(softplus(self.rho))
        masks = [None] * len(scales) if self.mask is None else self.split(self.mask)
        joint: dict[str, ScaledGroup] = {}
        shifts: list[Tensor] = []
        stds: list[Tensor] = []
        place = 0
        with self._without_autocast():
            for names, correlation, scale in zip(
                self._names, self.group_correlations, scales, strict=True
            ):
                if _is_left(names, correlation, local):
                    mask = masks[len(shifts)]
                    scale = scale if mask is None else torch.where(mask, scale, 0.0)
                    shift = std = torch.zeros_like(scale)
                    joint.update(dict.fromkeys(names, ScaledGroup(names, correlation, scale)))
                else:
                    part = noise[place : place + correlation.num_given]
                    shift, std = correlation.given(scale, part)
                    place += correlation.num_given
                shifts.append(shift)
                stds.append(std)
        without_std = {name for group in self.joint_groups for name in group.names}
        by_name = layout.unflatten(self._masked(self._join(stds)))
        return MomentsGiven(
            layout.unflatten(self._masked(self.mean + self._join(shifts))),
            {name: std for name, std in by_name.items() if name not in without_std},
            joint,
        )

    def is_pruned(self, names: Iterable[str]) -> bool:
        """Return whether some weights of the parameters of a group are pruned."""
        if self.mask is None:
            return False
        places = self._places[self._names.index(tuple(names))]
        return not all(bool(self.mask[place].all()) for place in places)

    def log_prob_of(self, draw: WeightDraw) -> Tensor:
        """Return the log density of each weight of a draw under its marginal, in nats, (S, D).

        Computed from the noise, since w - mean is rounded to the precision of w.
        """
        normals = draw.noise.split([c.num_normals for c in self.group_correlations], dim=-1)
        parts = zip(self.group_correlations, self.split(self.log_scale), normals, strict=True)
        with self._without_autocast():
            z = self._join([c.standardised(log_scale, part) for c, log_scale, part in parts])
        return -0.5 * z.square() - self.log_std - _HALF_LOG_2PI

    def total_correlation(self) -> Tensor:
        """KL from q to the product of its marginals, in nats, over the unpruned weights."""
        scales = self.split(self.log_scale)
        masks = [None] * len(scales) if self.mask is None else self.split(self.mask)
        parts = zip(self.group_correlations, scales, masks, strict=True)
        with self._without_autocast():
            return torch.stack([c.total_correlation(log, mask) for c, log, mask in parts]).sum()

    def extra_repr(self) -> str:
        """Show the family."""
        return repr(self.family)

    def _without_autocast(self) -> torch.autocast:
        # Rounded to bfloat16, products would not be those of the KL's covariance.
        return torch.autocast(self.mean.device.type, enabled=False)

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return the part of a vector of shape (D,) that belongs to each group."""
        return [torch.cat([vector[place] for place in places]) for places in self._places]

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        """Put the parts of the groups, shapes (..., n), together to vectors (..., D)."""
        pieces: dict[tuple[int, int], Tensor] = {}  # those without a number share their start
        for part, places in zip(parts, self._places, strict=True):
            sizes = [place.stop - place.start for place in places]
            for place, piece in zip(places, part.split(sizes, dim=-1), strict=True):
                pieces[place.start, place.stop] = piece
        return torch.cat([pieces[place] for place in sorted(pieces)], dim=-1)


class PosteriorFamily(ABC):
    """A family of Gaussian posteriors in which weights depend on each other.

    Example:
        >>> from bayesify import BayesianModule, FullGaussian
        >>> bnn = BayesianModule(nn.Linear(3, 2), posterior=FullGaussian())
        >>> bnn.posterior.family
        FullGaussian(max_weights=3000)
    """

    default_init_std: ClassVar[float] = MeanFieldGaussian.default_init_std

    @abstractmethod
    def divide(
        self, layout: ParameterLayout, names: Sequence[str], like: Tensor, seed: int
    ) -> list[Group]:
        """Divide parameters into groups of weights that depend on each other.

        Args:
            layout: the position of each parameter in the flat vector.
            names: the first names of the parameters that this family is for.
            like: a vector with the dtype and device of the weights.
            seed: the seed of initial values.
        """

    def centred_on(
        self, mean: Tensor, init_std: float | Tensor | None, layout: ParameterLayout, seed: int
    ) -> StructuredGaussian:
        """Create a posterior centred on ``mean`` with std ``init_std``, by default 0.02."""
        std = self.default_init_std if init_std is None else init_std
        groups = self.divide(layout, layout.names, mean.detach(), seed)
        return StructuredGaussian(mean, std, layout, groups, self)


def _is_left(names: Iterable[str], correlation: Correlation, local: Collection[str]) -> bool:
    """Whether the noise of a group is left to the operations that use its parameters."""
    return correlation.is_joint and all(name in local for name in names)


def _merged(places: Iterable[slice]) -> tuple[slice, ...]:
    """Join slices that follow each other."""
    merged: list[slice] = []
    for place in places:
        if merged and merged[-1].stop == place.start:
            merged[-1] = slice(merged[-1].start, place.stop)
        else:
            merged.append(place)
    return tuple(merged)
