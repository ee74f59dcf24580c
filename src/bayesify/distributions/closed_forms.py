"""Closed forms of KL(q || p) for each weight, in nats, where q is Gaussian."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bayesify.distributions.by_group import EmpiricalGaussian, empirical_variance
from bayesify.distributions.log_magnitude import log_magnitude_excess
from bayesify.distributions.posteriors import MeanFieldGaussian
from bayesify.distributions.precision import at_least_float32
from bayesify.distributions.priors import PRIOR_LIMITS, Gaussian, Laplace
from bayesify.distributions.softplus import log_std_from, softplus, softplus_ratio
from bayesify.distributions.sparsity import GroupedGaussianBlock, LogUniform, SpikeAndSlabBlock

__all__ = [
    "gaussian_empirical",
    "gaussian_gaussian",
    "gaussian_grouped",
    "gaussian_laplace",
    "gaussian_log_uniform",
    "gaussian_spike_and_slab",
    "mean_magnitude_gradients",
]


def gaussian_gaussian(q: MeanFieldGaussian, p: Gaussian) -> Tensor:
    """Compute log(s / std) + (std^2 + mean^2) / (2 s^2) - 1/2 for a prior N(0, s^2), shape (D,).

    Example:
        >>> gaussian_gaussian(MeanFieldGaussian(torch.ones(2), std=1.0), Gaussian(1.0)).tolist()
        [0.5, 0.5]
    """
    if not q.std_is_softplus:
        squares = 0.5 / p.std**2 * (q.full_std.square() + q.mean.square())
        return squares - q.log_std + (math.log(p.std) - 0.5)
    value: Tensor = _GaussianGaussian.apply(q.mean, q.rho, p.std)  # type: ignore[no-untyped-call]
    return value


class _GaussianGaussian(torch.autograd.Function):
    """The KL with a manual backward: less than half of autograd's passes over D numbers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, rho: Tensor, prior_std: float) -> Tensor:
        std = softplus(rho)
        squares = torch.addcmul(std.square(), mean, mean).mul_(0.5 / prior_std**2)
        return squares.sub_(log_std_from(std, rho)).add_(math.log(prior_std) - 0.5)

    @staticmethod
    def setup_context(
        ctx: Any,
        inputs: tuple[Tensor, Tensor, float],
        output: Tensor,  # noqa: ARG004
    ) -> None:
        mean, rho, ctx.prior_std = inputs
        ctx.save_for_backward(mean, rho)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        mean, rho = ctx.saved_tensors
        precision = 1.0 / ctx.prior_std**2
        std = softplus(rho)
        grad_rho = (std.square() * precision).sub_(1.0) * softplus_ratio(std)
        return grad * (precision * mean), grad * grad_rho, None


def gaussian_empirical(q: MeanFieldGaussian, p: EmpiricalGaussian) -> Tensor:
    """Compute ``gaussian_gaussian`` with the s that minimises the KL of this group of D weights.

    Only the sum over the group is meaningful: the squares are spread evenly over its weights.
    The gradients are those of the KL minimised over s.

    Example:
        >>> q = MeanFieldGaussian(torch.full((2,), 3.0**0.5), std=1.0)
        >>> gaussian_empirical(q, EmpiricalGaussian(min_size=2)).exp()  # q's std is 1, s is 2
        tensor([2., 2.], grad_fn=<ExpBackward0>)
    """
    if q.mean.numel() < p.min_size:
        return gaussian_gaussian(q, Gaussian(p.small_std))
    average, variance = empirical_variance(q.mean, q.full_std, q.mask)
    return 0.5 * (variance.log() + average / variance - 1.0) - q.log_std


def gaussian_laplace(q: MeanFieldGaussian, p: Laplace) -> Tensor:
    """Compute E|w| / b + log(2 b) - log std - log(2 pi e) / 2 for a prior of scale b, shape (D,).

    Example:
        >>> q = MeanFieldGaussian(torch.zeros(1), std=1.0)
        >>> gaussian_laplace(q, Laplace(1.0))
        tensor([0.0721], grad_fn=<SubBackward0>)
    """
    magnitude, _, _ = _MeanMagnitude.apply(q.mean, q.full_std)  # type: ignore[no-untyped-call]
    entropy = q.log_std + 0.5 * (1.0 + math.log(2.0 * math.pi))
    value: Tensor = magnitude / p.scale + math.log(2.0 * p.scale) - entropy
    return value


class _MeanMagnitude(torch.autograd.Function):
    """E|w| of a Gaussian: mean erf(z / sqrt 2) + std sqrt(2 / pi) exp(-z^2 / 2), z = mean / std.

    The backward is manual. The terms through z cancel in the derivatives, but autograd would
    compute them as 0 * inf as std vanishes. What remains are the two factors above: erf(z / sqrt 2)
    for the mean and sqrt(2 / pi) exp(-z^2 / 2) for the std. The forward returns them too, so that
    the backward can use them again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad_mean, grad_std = mean_magnitude_gradients(mean, std)
        return torch.addcmul(grad_mean * mean, grad_std, std), grad_mean, grad_std

    @staticmethod
    def setup_context(
        ctx: Any,
        inputs: tuple[Tensor, Tensor],
        output: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        mean, std, grad_mean, grad_std = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            grad_mean, grad_std = mean_magnitude_gradients(mean, std)
        return grad * grad_mean, grad * grad_std


def gaussian_log_uniform(q: MeanFieldGaussian, p: LogUniform) -> Tensor:  # noqa: ARG001
    """Compute E log |w| - log std + (log 2 + Euler's constant) / 2, shape (D,).

    The constant is that of the improper prior, which is free: here the KL of mean 0 is zero.

    Example:
        >>> gaussian_log_uniform(MeanFieldGaussian(torch.ones(1), std=1.0), LogUniform()).detach()
        tensor([0.4267])
    """
    return log_magnitude_excess(q.mean, q.log_std)


def gaussian_grouped(q: MeanFieldGaussian, p: GroupedGaussianBlock) -> Tensor:
    """Compute ``gaussian_gaussian`` with the s of each group that minimises its KL.

    Only the sum over a group is meaningful: the squares are spread evenly over its weights.

    Example:
        >>> q = MeanFieldGaussian(torch.full((2,), 3.0**0.5), std=1.0)
        >>> gaussian_grouped(q, GroupedGaussianBlock((1, 1, 2))).exp().detach()  # s is 2
        tensor([2., 2.])
    """
    squares = at_least_float32(q.mean).square() + at_least_float32(q.full_std).square()
    average = p.sum_by_unit(squares, q.mask) / p.count_by_unit(squares, q.mask)
    low, high = PRIOR_LIMITS
    variance = average.clamp(low**2, high**2)
    return p.spread(0.5 * (variance.log() + average / variance - 1.0)) - q.log_std


def gaussian_spike_and_slab(q: MeanFieldGaussian, p: SpikeAndSlabBlock) -> Tensor:
    """Compute the KL of weights and choices, at the best distribution of the choices, shape (D,).

    Only the sum over a unit is meaningful: its logarithm is spread evenly over its weights.

    Example:
        >>> q = MeanFieldGaussian(torch.zeros(2), std=0.5)
        >>> p = SpikeAndSlabBlock((1, 1, 2), pi=0.2, std1=0.5, std2=1e-4)
        >>> gaussian_spike_and_slab(q, p).sum().exp()  # 1 / pi, as the slab is q
        tensor(5., grad_fn=<ExpBackward0>)
    """
    squares = at_least_float32(q.mean).square() + at_least_float32(q.full_std).square()
    total, count = p.sum_by_unit(squares, q.mask), p.count_by_unit(squares, q.mask)
    slab = math.log(p.pi) - 0.5 * total / p.std1**2 - count * math.log(p.std1)
    spike = math.log1p(-p.pi) - 0.5 * total / p.std2**2 - count * math.log(p.std2)
    # Second derivatives of torch.logaddexp are NaN where the two differ much.
    return -p.spread((slab + softplus(spike - slab)) / count) - q.log_std - 0.5


def mean_magnitude_gradients(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the derivatives of E|w| by mean and by std, for w ~ N(mean, std^2), elementwise.

    Example:
        >>> mean_magnitude_gradients(torch.zeros(1), torch.ones(1))
        (tensor([0.]), tensor([0.7979]))
    """
    # Clamping the numerator keeps z finite, and its own derivatives 0 beyond the bound.
    positive = std.clamp_min(torch.finfo(std.dtype).tiny)
    bound = _MAX_Z * positive
    z = mean.clamp(-bound, bound) / positive
    grad_mean = torch.erf(z * math.sqrt(0.5))
    return grad_mean, torch.exp(-0.5 * z.square() + 0.5 * math.log(2.0 / math.pi))


# At this many standard deviations the density of a Gaussian is 0, also in float64.
_MAX_Z = 50.0
