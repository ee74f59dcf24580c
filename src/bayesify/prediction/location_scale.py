"""The common part of predictive distributions of real-valued targets."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Self

import torch
from torch import Tensor

from bayesify.prediction.checks import check_level
from bayesify.prediction.numeric import NumericPredictive
from bayesify.prediction.predictive import choose_samples, has_values

__all__ = ["LocationScalePredictive"]

#: Limit of the search for a quantile; bisection alone reaches full float64 precision in fewer.
_MAX_STEPS = 80


class LocationScalePredictive(NumericPredictive):
    """An equal mixture of S symmetric distributions for each component of each target.

    Component s is ``means[s] + scale * noise``. A subclass is a dataclass of ``means``, of the
    scale under a name of its own, and of the other parameters of the noise.

    Raises:
        ValueError: a shape is wrong, or a scale is negative.

    Example:
        >>> from bayesify.prediction import GaussianPredictive, StudentTPredictive
        >>> means, scale, df = torch.tensor([[-1.0], [1.0]]), torch.tensor(0.5), torch.tensor(4.0)
        >>> for p in (GaussianPredictive(means, scale), StudentTPredictive(means, scale, df)):
        ...     print(p.mean, p.aleatoric, p.epistemic)
        tensor([0.]) tensor([0.2500]) tensor([1.])
        tensor([0.]) tensor([0.5000]) tensor([1.])
    """

    #: Mean of the target under each weight sample, shape (S, N, ...).
    means: Tensor

    def __post_init__(self) -> None:
        """Check shapes and values."""
        super().__post_init__()
        scale = self._scale.detach()
        if not has_values(scale) or scale.numel() == 0 or _smallest(scale) >= 0.0:
            return
        negative = scale[scale < 0.0]  # none where a network predicts NaN of inputs that are NaN
        if len(negative):
            raise ValueError(
                f"{self._fields[1]} must be 0 or more, got {float(negative.min()):g}; give the "
                "width of the noise itself, not its logarithm"
            )

    @abstractmethod
    def _variance_factor(self) -> Tensor | float:
        """Return the variance of the noise of scale 1, broadcastable to ``means``."""

    @abstractmethod
    def _log_density(self, z: Tensor) -> Tensor:
        """Compute the log density of the noise of scale 1 at z, shape (S, N, ...)."""

    @abstractmethod
    def _upper_tail(self, z: Tensor) -> Tensor:
        """Compute the probability that the noise of scale 1 is above z, shape (S, N, ...)."""

    @abstractmethod
    def _noise(self, index: Tensor, generator: torch.Generator) -> Tensor:
        """Draw noise of scale 1 in float64 on the CPU, for the weight samples of ``index``."""

    @abstractmethod
    def _tail_quantile(self, tail: float) -> Tensor:
        """Return where the upper tail of the noise of scale 1 is ``tail``, at most 1 / 2."""

    @property
    def _means(self) -> Tensor:
        return self.means

    @property
    def _scale(self) -> Tensor:
        scale: Tensor = getattr(self, self._fields[1])
        return scale

    @property
    def _scales(self) -> Tensor:
        return self._scale.to(self.means).expand_as(self.means)

    @property
    def _noise_variance(self) -> Tensor:
        # Squared before expanding, since squaring the expanded tensor would allocate S x N numbers.
        variance = self._scale.to(self.means).square() * self._variance_factor()
        return variance.reshape([1] * (self.means.dim() - variance.dim()) + [*variance.shape])

    def _log_probs(self, targets: Tensor) -> Tensor:
        scales = self._scales
        certain = scales == 0.0
        wide = torch.where(certain, 1.0, scales)
        found = self._log_density((targets - self.means) / wide) - wide.log()
        # Without noise the density is 0 but at the mean, where it is infinite; NaN stays NaN.
        apart = (targets - self.means).detach().abs()
        there = torch.where(apart == 0.0, math.inf, -math.inf * apart).to(found)
        return torch.where(certain, there, found)

    def cdf(self, targets: Tensor) -> Tensor:
        """Return the probability that each component is at most its target value, shape (N, ...).

        Raises:
            TypeError: the targets are no tensor.
            ValueError: the targets do not have the shape of ``mean``.

        Example:
            >>> from bayesify.prediction import GaussianPredictive
            >>> p = GaussianPredictive(torch.tensor([[-1.0], [1.0]]), torch.tensor(0.5))
            >>> p.cdf(torch.tensor([0.0])), p.cdf(p.quantile(0.9))
            (tensor([0.5000]), tensor([0.9000]))
        """
        self._check_targets(targets)
        scales = self._scales
        distance = (self.means - targets) / scales
        # Without noise a component is at most its own mean, where the quotient is 0 / 0.
        certain = (scales == 0.0) & (self.means == targets)
        return self._upper_tail(distance.masked_fill(certain, -math.inf)).mean(0)

    def quantile(self, q: float) -> Tensor:
        """Return the q-quantile of the mixture for each component, shape (N, ...).

        Newton's method on the logarithm of the distribution function, safeguarded by a bracket:
        a step that leaves the bracket, or is not at most half of the last one, is replaced by a
        bisection.

        Raises:
            TypeError: q is not one number.
            ValueError: q is not strictly between 0 and 1.
        """
        check_level("q", q)
        # Computed in the nearer tail, since 1 - q and the distribution function round to 1.
        sign, tail = (1.0, q) if q <= 0.5 else (-1.0, 1.0 - q)
        # Half precision could not resolve the tail probability.
        wide = torch.promote_types(self.means.dtype, torch.float32)
        means, std = self.means.to(wide), self._scales.to(wide)
        standard = self._tail_quantile(tail).to(means)
        component = means - sign * std * standard
        low: Tensor = component.amin(0)
        high: Tensor = component.amax(0)
        # Start from the quantile of a Gaussian with the mixture's mean and variance.
        normal = float(torch.special.ndtri(torch.tensor(tail, dtype=torch.float64)))
        guess = means.mean(0) + sign * normal * self.total.sqrt()
        guess = guess.where(guess.isfinite(), 0.5 * (low + high))  # a variance can overflow
        value, last_step = guess.clamp(low, high), high - low
        eps = torch.finfo(value.dtype).eps
        # A Newton step of this size leaves an error of its square, in units of std.
        least, rounding = eps**0.6 * std.amin(0), 2.0 * eps
        done = torch.zeros_like(value, dtype=torch.bool)
        for _ in range(_MAX_STEPS):
            distance = sign * (means - value) / std
            # As in cdf: a component without noise is at most its own mean.
            distance.masked_fill_((std == 0.0) & (means == value), -sign * math.inf)
            beyond = self._upper_tail(distance).mean(0)
            density = (self._log_density(distance).exp() / std).mean(0)
            below = beyond < tail if sign > 0.0 else beyond > tail
            low, high = torch.where(below, value, low), torch.where(below, high, value)
            newton = value - sign * torch.log(beyond / tail) * beyond / density
            step = (newton - value).abs()
            inside = (low <= newton) & (newton <= high)
            tolerance = least.maximum(rounding * value.abs())
            accept = inside & (step <= (0.5 * last_step).maximum(tolerance))
            proposal = torch.where(accept, newton, 0.5 * (low + high))
            last_step = (proposal - value).abs()
            value = torch.where(done, value, proposal)
            converged = accept & (last_step <= tolerance)
            done |= converged | (high - low <= rounding * value.abs())
            if bool(done.all()):
                break
        return value.to(self.means)

    def simulate(self, num_draws: int, *, seed: int = 0) -> Tensor:
        """See ``NumericPredictive.simulate``."""
        generator, index = choose_samples(self.means, num_draws, seed)
        noise = self._noise(index.cpu(), generator).to(self.means)
        return self.means.gather(0, index) + self._scales.gather(0, index) * noise

    def rescaled(self, shift: float | Tensor, scale: float | Tensor) -> Self:
        """Return the predictive distribution of ``shift + scale * y``.

        Use it for networks that were trained on standardised targets: with mean and standard
        deviation of the training targets the result is in the units of the targets.

        Args:
            shift: a number, or one per component of a target (broadcastable).
            scale: a positive number, or one per component of a target (broadcastable).

        Raises:
            ValueError: they are not finite, ``scale`` is not positive, or a shape does not fit.

        Example:
            >>> from bayesify.prediction import GaussianPredictive
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
        noise = self._scale.to(self.means) * scales
        return self._with(means=self.means * scales + shifts, **{self._fields[1]: noise})


def _smallest(scale: Tensor) -> float:
    """Return the smallest number; NaN if there is one.

    The minimum is several times faster than a comparison of each number. It is NumPy's where it can
    be: a tensor of one number would count in the memory that a prediction of one example takes.
    """
    if scale.device.type == "cpu" and scale.dtype != torch.bfloat16:
        return float(scale.numpy().min())
    return float(scale.amin())
