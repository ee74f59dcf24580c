"""The interface of a kernel: one step on the flat vectors, from gradients to new weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bayesify.training.convergence import StdResidual
from bayesify.training.kernel.formulas import LeafKind, OptimizerRule, PriorBlocks, Rates

__all__ = ["Kernel", "Recipe", "SampleNoise", "SampledPosterior", "Vectors"]


@dataclass(frozen=True)
class Recipe:
    """The computation of a kernel.

    Args:
        prior: of each block of weights, and how the KL is found.
        optimizer: which rule moves mean and rho.
        leaf: what the network runs on.
        dtype: of the vectors, float32 or float64.
        num_samples: S, weight samples a step; more than one only where the leaf is weights.
        from_sums: whether the sums of an update hold all S samples.
    """

    prior: PriorBlocks
    optimizer: OptimizerRule
    leaf: LeafKind
    dtype: torch.dtype
    num_samples: int = 1
    from_sums: bool = False


class SampleNoise(NamedTuple):
    """The key of the noise of one weight sample.

    ``opposite`` is whether it is the negative of the key's, as in an antithetic pair.
    """

    key: tuple[int, int]
    opposite: bool = False


class SampledPosterior(NamedTuple):
    """What the weights of a sample and their KL depend on, each of shape (D,)."""

    mean: Tensor
    rho: Tensor
    #: Or None for zeros.
    prior_mean: Tensor | None
    #: Or None where nothing was pruned.
    mask: Tensor | None


@dataclass(frozen=True)
class Vectors:
    """The vectors of a kernel, each of shape (D,), contiguous, allocated once.

    Args:
        mean: of the posterior.
        rho: of the posterior.
        leaf: what the network runs on: the sampled weights, standard deviations or variances.
        of_mean: the optimiser's moments of the mean: none, one or two.
        of_rho: those of rho.
        starts: where each parameter begins, and the end.
        prior_mean: or None for zeros.
        mask: or None where nothing was pruned.
        sums: over the weight samples of a step but the last, of the loss's derivatives in mean and
            log std; none where a step has one sample. Over all of them with ``Recipe.from_sums``.
    """

    mean: Tensor
    rho: Tensor
    leaf: Tensor
    of_mean: tuple[Tensor, ...]
    of_rho: tuple[Tensor, ...]
    starts: tuple[int, ...]
    prior_mean: Tensor | None
    mask: Tensor | None
    sums: tuple[Tensor, ...] = ()


class Kernel(Protocol):
    """In-place functions on the vectors of one network, and their noise."""

    def refresh(self, step: int) -> None:
        """Fill ``leaf`` for a step, with its first sample."""

    def accumulate(
        self,
        in_mean: Sequence[Tensor | None],
        *,
        step: int,
        kl_factor: float,
        first: bool,
        then: SampleNoise | None,
    ) -> None:
        """Add the gradients of one of several samples to ``sums``; fill ``leaf`` with the next.

        :meth:`update` is for the last of them, and reads the sums. With ``Recipe.from_sums`` the
        last is added here too, and the update's own gradients are None.

        Args:
            in_mean: as for :meth:`update`, of the sample's part of the averaged nll.
            step: whose samples they are.
            kl_factor: as for :meth:`update`; where the KL is estimated at the weights, a sample
                adds its part of the estimate.
            first: whether the sums begin with this sample.
            then: noise of the next; None where there is none.
        """

    def update(
        self,
        in_mean: Sequence[Tensor | None],
        in_spread: Sequence[Tensor | None],
        *,
        step: int,
        kl_factor: float,
        rates: tuple[Rates, Rates],
        with_residual: bool = False,
    ) -> StdResidual | None:
        """Update mean and rho by the gradients of a step, and fill ``leaf`` for the next.

        Args:
            in_mean: the nll's gradients in the weights or the means, one for each parameter;
                None for zeros.
            in_spread: those in the standard deviations or variances; empty where the network ran
                on weights.
            step: whose noise the weights had; ``leaf`` is then that of the next.
            kl_factor: what multiplies the KL in the loss.
            rates: of mean and of rho.
            with_residual: whether to return the loss's derivatives in log std.
        """

    def normals(self, key: tuple[int, int], step: int, size: int) -> Tensor:
        """Draw standard normals for other uses than weights, shape (size,); see ``threefry``."""

    def signs(self, key: tuple[int, int], step: int, size: int) -> Tensor:
        """Draw -1 or 1, each with probability 1/2, shape (size,); see ``threefry``."""
