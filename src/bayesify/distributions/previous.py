"""A posterior as it was: the prior of examples that come later."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from bayesify.distributions.correlations import Correlation, Independent
from bayesify.distributions.posteriors import GaussianPosterior
from bayesify.distributions.precision import WideModule

__all__ = ["PreviousPosterior"]


class PreviousPosterior(WideModule):
    """A copy of a Gaussian posterior that no training changes.

    Args:
        posterior: what is copied, pruned weights included.

    Example:
        >>> from bayesify import MeanFieldGaussian
        >>> q = MeanFieldGaussian(torch.zeros(2), std=0.1)
        >>> previous = PreviousPosterior(q)
        >>> _ = q.mean.data.add_(0.1)           # by one standard deviation, for each of two weights
        >>> round(previous.kl_of(q).item(), 4)
        1.0
    """

    mean: Tensor
    log_scale: Tensor

    def __init__(self, posterior: GaussianPosterior) -> None:
        super().__init__()
        self.register_buffer("mean", posterior.mean.detach().clone())
        self.register_buffer("log_scale", posterior.log_scale.detach().clone())
        self.correlations = nn.ModuleList(map(_of_buffers, posterior.group_correlations))

    def kl_of(self, posterior: GaussianPosterior) -> Tensor:
        """Return KL(posterior || this) over the unpruned weights, in nats, a scalar.

        Raises:
            TypeError: weights of a large layer under ``MatrixGaussian`` are pruned.
        """
        split, count = posterior.split, len(self.correlations)
        groups = zip(
            posterior.group_correlations,
            self._correlations,
            split(posterior.log_scale),
            split(posterior.mean - self.mean),
            split(self.log_scale),
            [None] * count if posterior.mask is None else split(posterior.mask),
            strict=True,
        )
        # Rounded to bfloat16, products would not be those of the covariances.
        with torch.autocast(self.mean.device.type, enabled=False):
            parts = [now.kl(log, shift, was, *rest) for now, was, log, shift, *rest in groups]
            return torch.stack(parts).sum()

    @torch.no_grad()
    def renew(self, posterior: GaussianPosterior, new: Tensor, mean: Tensor, std: Tensor) -> None:
        """Replace the Gaussian of some weights by one under which they are independent.

        Args:
            posterior: what was copied.
            new: True for these weights, shape (D,).
            mean: means, shape (D,), of which those of the new weights count.
            std: standard deviations, alike.

        Raises:
            ValueError: some of the weights that depend on each other are new, and others are not.
        """
        parts = list(zip(self._correlations, posterior.split(new), strict=True))
        for correlation, part in parts:
            if not isinstance(correlation, Independent) and bool(part.any() & ~part.all()):
                raise ValueError(
                    f"new must name all parameters of a group under {posterior.extra_repr()}, or "
                    f"none, since their weights depend on each other, got {int(part.sum()):,} of "
                    f"{len(part):,} weights; put new parameters into groups of their own by "
                    "PosteriorByGroup"
                )
        for correlation, part in parts:
            if bool(part.all()):
                for factor in correlation.buffers():
                    factor.zero_()
        self.mean.copy_(torch.where(new, mean, self.mean))
        self.log_scale.copy_(torch.where(new, std.log(), self.log_scale))

    @property
    def _correlations(self) -> list[Correlation]:
        return list(self.correlations)  # type: ignore[arg-type]


def _of_buffers(correlation: Correlation) -> Correlation:
    """Return a copy whose parameters are buffers, which no optimiser can hold."""
    copied = copy.deepcopy(correlation)
    for name, parameter in list(copied.named_parameters()):
        delattr(copied, name)
        copied.register_buffer(name, parameter.detach())
    return copied
