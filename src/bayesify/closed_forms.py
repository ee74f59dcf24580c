"""KL(q || p) of each weight in closed form, in nats, for the pairs that have one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bayesify.groups import EmpiricalGaussian, variances
from bayesify.posteriors import MeanFieldGaussian
from bayesify.priors import Gaussian, Laplace
from bayesify.softplus import log_of_softplus, softplus, softplus_ratio

__all__ = ["gaussian_empirical", "gaussian_gaussian", "gaussian_laplace", "magnitude_slopes"]


def gaussian_gaussian(q: MeanFieldGaussian, p: Gaussian) -> Tensor:
    """log(s / std) + (std^2 + mean^2) / (2 s^2) - 1/2 for a prior of standard deviation s.

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
    """With a backward of its own: less than half the passes over D numbers of autograd's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, rho: Tensor, prior_std: float) -> Tensor:
        std = softplus(rho)
        squares = torch.addcmul(std.square(), mean, mean).mul_(0.5 / prior_std**2)
        return squares.sub_(log_of_softplus(std, rho)).add_(math.log(prior_std) - 0.5)

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
        in_rho = (std.square() * precision).sub_(1.0) * softplus_ratio(std)
        return grad * (precision * mean), grad * in_rho, None


def gaussian_empirical(q: MeanFieldGaussian, p: EmpiricalGaussian) -> Tensor:
    """As ``gaussian_gaussian``, with the s that the group itself gives: of q, D weights.

    Only the sum over the group has a meaning: its squares are spread evenly over its weights.
    The gradients are those of the KL minimised over s.

    Example:
        >>> q = MeanFieldGaussian(torch.full((2,), 3.0**0.5), std=1.0)
        >>> gaussian_empirical(q, EmpiricalGaussian(min_size=2)).exp()  # std 1 in a prior of 2
        tensor([2., 2.], grad_fn=<ExpBackward0>)
    """
    if q.mean.numel() < p.min_size:
        return gaussian_gaussian(q, Gaussian(p.small_std))
    average, variance = variances(q.mean, q.full_std, q.kept)
    return 0.5 * (variance.log() + average / variance - 1.0) - q.log_std


def gaussian_laplace(q: MeanFieldGaussian, p: Laplace) -> Tensor:
    """E|w| / b + log(2 b) - log std - log(2 pi e) / 2 for a prior of scale b.

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

    With a backward of its own: the derivatives through z cancel, and would be 0 * inf as std
    vanishes. The two factors above are what is left, the derivatives in mean and in std; they are
    put out as well, to be there for the backward pass.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        in_mean, in_std = magnitude_slopes(mean, std)
        return torch.addcmul(in_mean * mean, in_std, std), in_mean, in_std

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
        mean, std, in_mean, in_std = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            in_mean, in_std = magnitude_slopes(mean, std)
        return grad * in_mean, grad * in_std


def magnitude_slopes(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """The derivatives of E|w| in mean and in std, for w ~ N(mean, std^2), elementwise.

    Example:
        >>> magnitude_slopes(torch.zeros(1), torch.ones(1))
        (tensor([0.]), tensor([0.7979]))
    """
    # The numerator is bounded, so that z is finite and its derivatives vanish far out.
    positive = std.clamp_min(torch.finfo(std.dtype).tiny)
    bound = _FAR * positive
    z = mean.clamp(-bound, bound) / positive
    in_mean = torch.erf(z * math.sqrt(0.5))
    return in_mean, torch.exp(-0.5 * z.square() + 0.5 * math.log(2.0 / math.pi))


# In standard deviations: from here on the density of a Gaussian is 0 in float64 too.
_FAR = 50.0
