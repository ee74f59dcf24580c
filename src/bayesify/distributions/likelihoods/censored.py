"""The likelihood of censored targets, of which only bounds are known."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayesify.distributions.likelihoods.gaussian import GaussianLikelihood
from bayesify.distributions.likelihoods.likelihood import Likelihood, check_target_rows
from bayesify.distributions.likelihoods.location_scale import check_real
from bayesify.prediction.checks import signed

__all__ = ["CensoredGaussianLikelihood"]

_ROOT_HALF = math.sqrt(0.5)


class CensoredGaussianLikelihood(GaussianLikelihood):
    """y = mean + std * noise with Gaussian noise, where of some targets only bounds are known.

    A target is a pair (lower, upper), on the last axis: targets (N, K, 2) for means (N, K). An
    exact observation has equal bounds, and adds the log density. Else the pair adds the log
    probability of lower < y <= upper, in nats:

        log(Phi((upper - mean) / std) - Phi((lower - mean) / std)).

    Right-censored targets have the upper bound ``inf``, such as the time of a machine that still
    runs; left-censored ones the lower bound ``-inf``, such as a concentration below what can be
    measured. Bounds of ``(-inf, inf)`` say nothing, and add 0.

    For times use their logarithms: noise of the logarithm is log-normal, and the times that are
    predicted are positive. ``predict(x)`` is the distribution of y, as with ``GaussianLikelihood``;
    the probability of surviving time t is ``1 - predict(x).cdf(log t)``.

    Args:
        std: as for ``GaussianLikelihood``, and so are the other arguments.
        learn_std: whether the std is trained, as a point estimate.
        input_dependent: whether the network predicts the std of each example.
        min_std: added to a std that the network predicts.

    Raises:
        TypeError: as for ``GaussianLikelihood``.
        ValueError: as for ``GaussianLikelihood``.

    Example:
        >>> from math import inf
        >>> bounds = torch.tensor([[[0.0, 0.0]], [[0.0, inf]], [[-1.0, 1.0]]])
        >>> CensoredGaussianLikelihood().log_prob(torch.zeros(1, 3, 1), bounds)
        tensor([[-0.9189, -0.6931, -0.3817]])
    """

    def expected_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """Raise TypeError: a censored target has no closed form."""
        return Likelihood.expected_log_prob(self, mean, variance, targets)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared distance of the mean to the interval between the bounds."""
        means = self._locations(outputs.unsqueeze(0))
        self._check(means, targets)
        nearest = means[0].clamp(*signed(targets).unbind(-1))
        return (means[0] - nearest).square().mean()

    def _log_probs(self, locations: Tensor, scale: Tensor, targets: Tensor) -> Tensor:
        lower, upper = signed(targets).unbind(-1)
        has_lower, has_upper = lower.isfinite(), upper.isfinite()
        is_exact = lower == upper
        is_interval = has_lower & has_upper & ~is_exact
        # Where a branch is not used, its numbers must not make gradients of NaN.
        a = (torch.where(has_lower, lower, locations) - locations) / scale
        b = (torch.where(has_upper, upper, locations) - locations) / scale
        exact = self._log_density(a, scale.log())
        one_sided = _log_normal_cdf(torch.where(has_upper, b, -a))
        width = torch.where(is_interval, upper - lower, scale) / scale
        between = _log_normal_interval(a.where(is_interval, -0.5), b.where(is_interval, 0.5), width)
        known = torch.where(is_exact, exact, torch.where(is_interval, between, one_sided))
        return known.where(has_lower | has_upper, 0.0)

    def _check(self, locations: Tensor, targets: Tensor) -> None:
        expected = (*locations.shape[1:], 2)
        if targets.shape != expected:
            check_target_rows(targets, expected)
            raise ValueError(
                "targets must be bounds (lower, upper) on the last axis, shape "
                f"{expected}, got {tuple(targets.shape)}; use torch.stack([lower, upper], dim=-1), "
                "with equal bounds where the target is known"
            )
        check_real(targets)
        if targets.device.type != "cpu" or torch.compiler.is_compiling():
            return
        lower, upper = signed(targets).unbind(-1)
        is_right = (lower <= upper) & (lower < math.inf) & (upper > -math.inf)
        if not bool(is_right.all()):
            wrong = signed(targets)[~is_right][0].tolist()
            raise ValueError(
                "bounds must be numbers with lower <= upper, where only lower may be -inf and only "
                f"upper inf, got {wrong}"
            )


def _log_normal_cdf(x: Tensor) -> Tensor:
    """Compute log Phi(x).

    The gradient of ``torch.special.log_ndtr`` loses all its digits far below 0.
    """
    below, above = x.clamp(max=0.0), x.clamp(min=0.0)
    tail = -0.5 * below.square() + torch.log(0.5 * torch.special.erfcx(-below * _ROOT_HALF))
    return torch.where(x < 0.0, tail, torch.log1p(-0.5 * torch.erfc(above * _ROOT_HALF)))


def _log_normal_interval(a: Tensor, b: Tensor, width: Tensor) -> Tensor:
    """Compute log(Phi(b) - Phi(a)) with width = b - a, stable in both tails and for any width."""
    # By symmetry the interval lies at 0 or below. Both ends are given, since the near one would be
    # lost in the difference of a wide interval's middle and half width.
    is_above = a + b > 0.0
    low, high = torch.where(is_above, -b, a), torch.where(is_above, -a, b)
    middle = 0.5 * low + 0.5 * high
    # log(Phi(high) - Phi(low)) = log Phi(high) + log(1 - exp(d)) with d = log Phi(low / high).
    # In the tail Phi(x) = exp(-x^2 / 2) erfcx(-x / sqrt(2)) / 2; d needs no difference of squares.
    ends = torch.special.erfcx(-torch.stack([low, high.clamp(max=0.0)]) * _ROOT_HALF)
    in_tail = width * middle + (ends[0] / ends[1]).log()
    around = _log_normal_cdf(low) - _log_normal_cdf(high.clamp(min=0.0))
    d = torch.where(high < 0.0, in_tail, around)
    # Around the middle of a narrow interval, a series of the mean of exp(-middle t - t^2 / 2).
    is_narrow = width * (1.0 - middle) < 0.05
    wide = _log_normal_cdf(high) + torch.log(-torch.expm1(d.where(~is_narrow, -1.0)))
    w, m = width.where(is_narrow, 0.01).square(), middle.where(is_narrow, 0.0).square()
    series = w / 24.0 * (m - 1.0) + w.square() / 1920.0 * (m.square() - 6.0 * m + 3.0)
    density = -0.5 * middle.square() - 0.5 * math.log(2.0 * math.pi)
    narrow = density + width.log() + torch.log1p(series)
    return torch.where(is_narrow, narrow, wide)
