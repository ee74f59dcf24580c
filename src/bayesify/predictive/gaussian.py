"""The predictive distribution of numbers: a mixture of Gaussians."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from bayesify.predictive.base import Predictive, check_joinable, check_level, chosen

__all__ = ["GaussianPredictive"]

#: The standard Gaussian's density at 0.
_PEAK = 1.0 / math.sqrt(2.0 * math.pi)
#: Of a quantile: bisection alone reaches float64's last digit in fewer.
_MOST_STEPS = 80


@dataclass(frozen=True, eq=False)
class GaussianPredictive(Predictive):
    """An equal mixture of S Gaussians for each part of each target.

    Args:
        means: the mean of the target under each weight sample, shape (S, N, ...).
        noise_std: standard deviation of the noise, broadcastable to ``means``.

    Raises:
        ValueError: the shapes do not fit.

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
        """The mean, which has the least expected squared error, shape (N, ...)."""
        return self.mean

    @property
    def total(self) -> Tensor:
        """Variance of the target, shape (N, ...): second moment less the mean squared."""
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
        """Another name of ``total``."""
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
        # From the mean of half of the samples: whatever these are, the squared distance of the
        # whole mean from it is at most their variance (Cauchy-Schwarz), so that subtracting it
        # costs one bit, however far from 0 the means lie.
        half = self.means[: (len(self.means) + 1) // 2]
        return self.means - half.mean(0)

    @property
    def _noise_variance(self) -> Tensor:
        # Squared before it is expanded, which would make S x N numbers of one.
        variance = self.noise_std.to(self.means).square()
        return variance.reshape([1] * (self.means.dim() - variance.dim()) + [*variance.shape])

    @property
    def _noise_std(self) -> Tensor:
        return self.noise_std.to(self.means).expand_as(self.means)

    def log_prob(self, targets: Tensor) -> Tensor:
        """log density of the mixture, in nats, summed over the parts of a target, shape (N,).

        Raises:
            ValueError: the targets do not have the shape of ``mean``.
        """
        self._check_targets(targets)
        std = self._noise_std
        # Divided before it is squared: the variance of a small noise would underflow.
        per_part = math.log(_PEAK) - std.log() - 0.5 * ((targets - self.means) / std).square()
        joint = per_part.flatten(2).sum(-1) if per_part.dim() > 2 else per_part
        return joint.logsumexp(0) - math.log(len(self.means))

    def cdf(self, targets: Tensor) -> Tensor:
        """The probability of a target of at most this value, of each part, shape (N, ...).

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
        """The q-quantile of the mixture of each part, shape (N, ...).

        By Newton's steps on the logarithm of the distribution function, kept between two ends
        that close in by bisection wherever a step leads out of them or does not halve the last.

        Raises:
            ValueError: q is not strictly between 0 and 1.
        """
        check_level(q)
        # From the nearer end, since 1 - q and the distribution function round to 1 far out.
        sign, tail = (1.0, q) if q <= 0.5 else (-1.0, 1.0 - q)
        normal = float(torch.special.ndtri(torch.tensor(tail, dtype=torch.float64)))
        # In float32 at least: in half precision the tail would not be met.
        wide = torch.promote_types(self.means.dtype, torch.float32)
        means, std = self.means.to(wide), self._noise_std.to(wide)
        component = means + sign * std * normal
        low: Tensor = component.amin(0)
        high: Tensor = component.amax(0)
        # The quantile of a Gaussian with the mixture's mean and variance.
        guess = means.mean(0) + sign * normal * self.total.sqrt()
        guess = guess.where(guess.isfinite(), 0.5 * (low + high))  # a variance can overflow
        value, moved = guess.clamp(low, high), high - low
        eps = torch.finfo(value.dtype).eps
        # A Newton step of this size leaves an error of its square, in units of std.
        enough, rounding = eps**0.6 * std.amin(0), 2.0 * eps
        done = torch.zeros_like(value, dtype=torch.bool)
        for _ in range(_MOST_STEPS):
            distance = sign * (means - value) / std
            beyond = 0.5 * torch.erfc(distance * math.sqrt(0.5)).mean(0)
            density = (torch.exp(-0.5 * distance.square()) / std).mean(0) * _PEAK
            below = beyond < tail if sign > 0.0 else beyond > tail
            low, high = torch.where(below, value, low), torch.where(below, high, value)
            newton = value - sign * torch.log(beyond / tail) * beyond / density
            step = (newton - value).abs()
            good = (low <= newton) & (newton <= high) & (step <= (0.5 * moved).maximum(enough))
            found = torch.where(good, newton, 0.5 * (low + high))
            moved = (found - value).abs()
            value = torch.where(done, value, found)
            done |= (good & (moved <= enough)) | (high - low <= rounding * value.abs())
            if bool(done.all()):
                break
        return value.to(self.means)

    def rescaled(self, shift: float | Tensor, scale: float | Tensor) -> GaussianPredictive:
        """The predictive distribution of ``shift + scale * y``.

        For networks that were trained on standardised targets: with the mean and the standard
        deviation of the training targets this is the answer in the target's own units.

        Args:
            shift: a number, or one for each part of a target, broadcastable to them.
            scale: likewise, positive.

        Raises:
            ValueError: they are not finite, ``scale`` is not positive, or a shape does not fit.

        Example:
            >>> p = GaussianPredictive(torch.tensor([[-1.0], [1.0]]), torch.tensor(0.5))
            >>> q = p.rescaled(shift=100.0, scale=10.0)
            >>> q.mean, q.aleatoric, q.epistemic
            (tensor([100.]), tensor([25.]), tensor([100.]))
        """
        moved, stretched = (
            torch.as_tensor(value, dtype=self.means.dtype, device=self.means.device)
            for value in (shift, scale)
        )
        parts = self.means.shape[2:]
        for name, value in (("shift", moved), ("scale", stretched)):
            try:
                value.expand(parts)
            except RuntimeError:
                raise ValueError(
                    f"{name} must be a number or one for each part of a target, {tuple(parts)}, "
                    f"got shape {tuple(value.shape)}"
                ) from None
            if not bool(value.isfinite().all()):
                raise ValueError(f"{name} must be finite, got {value.tolist()}")
        if not bool((stretched > 0.0).all()):
            raise ValueError(f"scale must be positive, got {stretched.tolist()}")
        noise = self.noise_std.to(self.means)
        return GaussianPredictive(self.means * stretched + moved, noise * stretched)

    def subset(self, samples: Sequence[int] | Tensor) -> Self:
        """See ``Predictive.subset``."""
        own = self.noise_std.dim() == self.means.dim() and len(self.noise_std) > 1
        noise = chosen(self.noise_std, samples) if own else self.noise_std
        return type(self)(chosen(self.means, samples), noise)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """See ``Predictive.joined``; they must have equally many weight samples."""
        check_joinable([tuple(part.means.shape) for part in parts])
        noises = [part.noise_std.to(part.means) for part in parts]
        means = torch.cat([part.means for part in parts])
        if all(noise.dim() == 0 for noise in noises) and len(set(map(float, noises))) == 1:
            return cls(means, noises[0])
        # One number a sample where that will do.
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
