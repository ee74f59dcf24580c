"""The predictive distribution of real-valued targets: a mixture of Gaussians."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from bayesify.prediction.predictive import Predictive, check_joinable, check_level, select_samples

__all__ = ["GaussianPredictive"]

#: Density of the standard Gaussian at 0.
_PEAK = 1.0 / math.sqrt(2.0 * math.pi)
#: Limit of the search for a quantile; bisection alone reaches full float64 precision in fewer.
_MAX_STEPS = 80


@dataclass(frozen=True, eq=False)
class GaussianPredictive(Predictive):
    """An equal mixture of S Gaussians for each component of each target.

    Args:
        means: the mean of the target under each weight sample, shape (S, N, ...).
        noise_std: standard deviation of the noise, broadcastable to ``means``.

    Raises:
        ValueError: ``means`` has fewer than two axes or no sample, or ``noise_std`` cannot be
            broadcast to it.

    Example:
        >>> p = GaussianPredictive(torch.tensor([[[-1.0]], [[1.0]]]), torch.tensor(0.5))
        >>> p.mean.item(), p.aleatoric.item(), p.epistemic.item()
        (0.0, 0.25, 1.0)
    """

    means: Tensor
    noise_std: Tensor

    def __post_init__(self) -> None:
        """Check the shapes."""
        if self.means.dim() < 2 or len(self.means) < 1:
            raise ValueError(
                "means must have shape (S, N, ...) with S of at least 1, got "
                f"{tuple(self.means.shape)}"
            )
        try:
            self.noise_std.expand(self.means.shape)
        except RuntimeError:
            raise ValueError(
                f"noise_std must be broadcastable to means, {tuple(self.means.shape)}, got shape "
                f"{tuple(self.noise_std.shape)}"
            ) from None

    @property
    def mean(self) -> Tensor:
        """Mean of the target, shape (N, ...)."""
        return self.means.mean(0)

    @property
    def prediction(self) -> Tensor:
        """The mean, which minimises the expected squared error, shape (N, ...)."""
        return self.mean

    @property
    def total(self) -> Tensor:
        """Variance of the target, shape (N, ...): second moment minus squared mean."""
        deviations = self._deviations
        moment = (deviations.square() + self._noise_variance).mean(0)
        return moment - deviations.mean(0).square()

    @property
    def aleatoric(self) -> Tensor:
        """Variance of the noise, averaged over the weight samples, shape (N, ...)."""
        variance = self._noise_variance
        return variance.mean(0).expand(self.means.shape[1:]).clone()

    @property
    def epistemic(self) -> Tensor:
        """Variance of the means over the weight samples, shape (N, ...)."""
        return self._deviations.var(0, correction=0)

    @property
    def variance(self) -> Tensor:
        """Alias of ``total``."""
        return self.total

    @property
    def std(self) -> Tensor:
        """Standard deviation of the target, in its units, shape (N, ...)."""
        return self.total.sqrt()

    @property
    def samples(self) -> Tensor | None:
        """The mean of the target under each weight sample, shape (S, N, ...)."""
        return self.means

    @property
    def _deviations(self) -> Tensor:
        # Deviations from the mean of the first half of the samples. The squared distance between
        # this mean and the mean of all is at most the variance (Cauchy-Schwarz), so that
        # subtracting it loses at most one bit, however far from 0 the means lie.
        half = self.means[: (len(self.means) + 1) // 2]
        return self.means - half.mean(0)

    @property
    def _noise_variance(self) -> Tensor:
        # Squared before expanding, since squaring the expanded tensor would allocate S x N numbers.
        variance = self.noise_std.to(self.means).square()
        return variance.reshape([1] * (self.means.dim() - variance.dim()) + [*variance.shape])

    @property
    def _noise_std(self) -> Tensor:
        return self.noise_std.to(self.means).expand_as(self.means)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the joint log density of each target's components, in nats, shape (N,).

        Raises:
            ValueError: the targets do not have the shape of ``mean``.
        """
        self._check_targets(targets)
        std = self._noise_std
        # Divided before squaring, since the square of a small std would underflow.
        log_probs = math.log(_PEAK) - std.log() - 0.5 * ((targets - self.means) / std).square()
        joint = log_probs.flatten(2).sum(-1) if log_probs.dim() > 2 else log_probs
        return joint.logsumexp(0) - math.log(len(self.means))

    def cdf(self, targets: Tensor) -> Tensor:
        """Return the probability that each component is at most its target value, shape (N, ...).

        Raises:
            ValueError: the targets do not have the shape of ``mean``.

        Example:
            >>> p = GaussianPredictive(torch.tensor([[-1.0], [1.0]]), torch.tensor(0.5))
            >>> p.cdf(torch.tensor([0.0])), p.cdf(p.quantile(0.9))
            (tensor([0.5000]), tensor([0.9000]))
        """
        self._check_targets(targets)
        distance = (self.means - targets) / self._noise_std
        return (0.5 * torch.erfc(distance * math.sqrt(0.5))).mean(0)

    def quantile(self, q: float) -> Tensor:
        """Return the q-quantile of the mixture for each component, shape (N, ...).

        Newton's method on the logarithm of the distribution function, safeguarded by a bracket:
        a step that leaves the bracket, or is not at most half of the last one, is replaced by a
        bisection.

        Raises:
            ValueError: q is not strictly between 0 and 1.
        """
        check_level(q)
        # Computed in the nearer tail, since 1 - q and the distribution function round to 1.
        sign, tail = (1.0, q) if q <= 0.5 else (-1.0, 1.0 - q)
        normal = float(torch.special.ndtri(torch.tensor(tail, dtype=torch.float64)))
        # Half precision could not resolve the tail probability.
        wide = torch.promote_types(self.means.dtype, torch.float32)
        means, std = self.means.to(wide), self._noise_std.to(wide)
        component = means + sign * std * normal
        low: Tensor = component.amin(0)
        high: Tensor = component.amax(0)
        # Start from the quantile of a Gaussian with the mixture's mean and variance.
        guess = means.mean(0) + sign * normal * self.total.sqrt()
        guess = guess.where(guess.isfinite(), 0.5 * (low + high))  # a variance can overflow
        value, last_step = guess.clamp(low, high), high - low
        eps = torch.finfo(value.dtype).eps
        # A Newton step of this size leaves an error of its square, in units of std.
        tolerance, rounding = eps**0.6 * std.amin(0), 2.0 * eps
        done = torch.zeros_like(value, dtype=torch.bool)
        for _ in range(_MAX_STEPS):
            distance = sign * (means - value) / std
            beyond = 0.5 * torch.erfc(distance * math.sqrt(0.5)).mean(0)
            density = (torch.exp(-0.5 * distance.square()) / std).mean(0) * _PEAK
            below = beyond < tail if sign > 0.0 else beyond > tail
            low, high = torch.where(below, value, low), torch.where(below, high, value)
            newton = value - sign * torch.log(beyond / tail) * beyond / density
            step = (newton - value).abs()
            inside = (low <= newton) & (newton <= high)
            accept = inside & (step <= (0.5 * last_step).maximum(tolerance))
            proposal = torch.where(accept, newton, 0.5 * (low + high))
            last_step = (proposal - value).abs()
            value = torch.where(done, value, proposal)
            converged = accept & (last_step <= tolerance)
            done |= converged | (high - low <= rounding * value.abs())
            if bool(done.all()):
                break
        return value.to(self.means)

    def rescaled(self, shift: float | Tensor, scale: float | Tensor) -> GaussianPredictive:
        """Return the predictive distribution of ``shift + scale * y``.

        Use it for networks that were trained on standardised targets: with mean and standard
        deviation of the training targets the result is in the units of the targets.

        Args:
            shift: a number, or one per component of a target (broadcastable).
            scale: a positive number, or one per component of a target (broadcastable).

        Raises:
            ValueError: they are not finite, ``scale`` is not positive, or a shape does not fit.

        Example:
            >>> p = GaussianPredictive(torch.tensor([[-1.0], [1.0]]), torch.tensor(0.5))
            >>> q = p.rescaled(shift=100.0, scale=10.0)
            >>> q.mean, q.aleatoric, q.epistemic
            (tensor([100.]), tensor([25.]), tensor([100.]))
        """
        shifts, scales = (
            torch.as_tensor(value, dtype=self.means.dtype, device=self.means.device)
            for value in (shift, scale)
        )
        components = self.means.shape[2:]
        for name, value in (("shift", shifts), ("scale", scales)):
            try:
                value.expand(components)
            except RuntimeError:
                raise ValueError(
                    f"{name} must be a number or one per component of a target, shape "
                    f"{tuple(components)}, got shape {tuple(value.shape)}"
                ) from None
            if not bool(value.isfinite().all()):
                raise ValueError(f"{name} must be finite, got {value.tolist()}")
        if not bool((scales > 0.0).all()):
            raise ValueError(f"scale must be positive, got {scales.tolist()}")
        noise = self.noise_std.to(self.means)
        return GaussianPredictive(self.means * scales + shifts, noise * scales)

    def subset(self, samples: Sequence[int] | Tensor) -> Self:
        """See ``Predictive.subset``."""
        per_sample = self.noise_std.dim() == self.means.dim() and len(self.noise_std) > 1
        noise = select_samples(self.noise_std, samples) if per_sample else self.noise_std
        return type(self)(select_samples(self.means, samples), noise)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """See ``Predictive.joined``; all must have the same number of weight samples."""
        check_joinable([tuple(part.means.shape) for part in parts])
        noises = [part.noise_std.to(part.means) for part in parts]
        means = torch.cat([part.means for part in parts])
        if all(noise.dim() == 0 for noise in noises) and len(set(map(float, noises))) == 1:
            return cls(means, noises[0])
        # The noise is expanded to one value per sample, and no further than the parts need.
        axes = means.dim()
        rows = [noise.reshape([1] * (axes - noise.dim()) + [*noise.shape]) for noise in noises]
        rows = [
            row.expand(len(p.means), *row.shape[1:]) for row, p in zip(rows, parts, strict=True)
        ]
        widest = torch.broadcast_shapes(*(row.shape for row in rows))
        return cls(means, torch.cat([row.expand(widest) for row in rows]))

    def _check_targets(self, targets: Tensor) -> None:
        if targets.shape != self.means.shape[1:]:
            raise ValueError(
                f"targets must have shape {tuple(self.means.shape[1:])}, got "
                f"{tuple(targets.shape)}; nothing is broadcast"
            )
