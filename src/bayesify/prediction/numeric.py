"""The common part of predictive distributions of numbers: moments, subsets, joins, errors."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from bayesify.prediction.checks import check_tensors
from bayesify.prediction.predictive import (
    Predictive,
    check_joinable,
    check_kind,
    has_values,
    select_samples,
    sum_components,
)

__all__ = ["NumericPredictive"]


class NumericPredictive(Predictive):
    """An equal mixture of S distributions of a number, for each component of each target.

    A subclass is a dataclass. Its first field has shape (S, N, ...); the others, the parameters of
    the noise, can be broadcast to it.

    Raises:
        TypeError: the first field is no floating-point tensor.
        ValueError: a shape is wrong.

    Example:
        >>> from bayesify.prediction import GaussianPredictive, PoissonPredictive
        >>> for p in (
        ...     GaussianPredictive(torch.tensor([[1.0], [3.0]]), torch.tensor(0.5)),
        ...     PoissonPredictive(torch.tensor([[1.0], [3.0]]).log()),
        ... ):
        ...     print(p.mean, p.aleatoric, p.epistemic)
        tensor([2.]) tensor([0.2500]) tensor([1.])
        tensor([2.]) tensor([2.]) tensor([1.])
    """

    #: Names of the fields.
    _fields: ClassVar[tuple[str, ...]]

    def __post_init__(self) -> None:
        """Check dtype and shapes."""
        first = self._fields[0]
        check_tensors(**{first: self._components})
        if not self._components.is_floating_point():
            raise TypeError(
                f"{first} must be floating-point numbers, got {self._components.dtype}; use "
                f"{first}.float()"
            )
        shape = tuple(self._components.shape)
        if len(shape) < 2 or shape[0] < 1:
            raise ValueError(
                f"{first} must have shape (S, N, ...) with S of at least 1, got {shape}"
            )
        for name in self._fields[1:]:
            value = getattr(self, name)
            try:
                value.expand(shape)
            except RuntimeError:
                raise ValueError(
                    f"{name} must be broadcastable to {first}, {shape}, got shape "
                    f"{tuple(value.shape)}"
                ) from None

    @property
    @abstractmethod
    def _means(self) -> Tensor:
        """Mean of the target under each weight sample, shape (S, N, ...)."""

    @property
    @abstractmethod
    def _noise_variance(self) -> Tensor:
        """Variance of the target under each weight sample, (S, N, ...) or 1 in some places."""

    @abstractmethod
    def _log_probs(self, targets: Tensor) -> Tensor:
        """Compute log p of each component under each weight sample, shape (S, N, ...)."""

    @abstractmethod
    def cdf(self, targets: Tensor) -> Tensor:
        """Return the probability that each component is at most its target value, shape (N, ...).

        Raises:
            TypeError: the targets are no tensor.
            ValueError: the targets do not have the shape of ``mean``.
        """

    @abstractmethod
    def simulate(self, num_draws: int, *, seed: int = 0) -> Tensor:
        """Draw targets from the mixture, such as for a statistic that has no closed form.

        The components of a target share the weight sample of their draw.

        Args:
            num_draws: number of draws for each example.
            seed: the draws are a function of it.

        Returns:
            Shape (num_draws, N, ...).

        Raises:
            ValueError: ``num_draws`` is below 1.

        Example:
            >>> from bayesify.prediction import GaussianPredictive
            >>> p = GaussianPredictive(torch.tensor([[-1.0], [1.0]]), torch.tensor(0.5))
            >>> p.simulate(1000).shape
            torch.Size([1000, 1])
        """

    @property
    def mean(self) -> Tensor:
        """Mean of the target, shape (N, ...)."""
        return self._means.mean(0)

    @property
    def prediction(self) -> Tensor:
        """The mean, which minimises the expected squared error, shape (N, ...)."""
        return self.mean

    @property
    def total(self) -> Tensor:
        """Variance of the target, shape (N, ...): second moment minus squared mean."""
        deviations = self._deviations
        moment = (deviations.square() + self._noise_variance).mean(0)
        found = moment - deviations.mean(0).square()
        if has_values(found) and bool(found.isfinite().all()):
            return found
        # A square overflows earlier than the variance, and then infinity minus infinity is NaN.
        return torch.where(found.isfinite(), found, self.aleatoric + self.epistemic)

    @property
    def aleatoric(self) -> Tensor:
        """Variance of the noise, averaged over the weight samples, shape (N, ...)."""
        variance = self._noise_variance
        return variance.mean(0).expand(self._means.shape[1:]).clone()

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
        return self._means

    @property
    def _deviations(self) -> Tensor:
        # Deviations from the mean of the first half of the samples. The squared distance between
        # this mean and the mean of all is at most the variance (Cauchy-Schwarz), so that
        # subtracting it loses at most one bit, however far from 0 the means lie.
        half = self._means[: (len(self._means) + 1) // 2]
        return self._means - half.mean(0)

    @property
    def _components(self) -> Tensor:
        components: Tensor = getattr(self, self._fields[0])
        return components

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return the joint log probability (density) of each target, in nats, shape (N,).

        Raises:
            TypeError: the targets are no tensor.
            ValueError: the targets do not have the shape of ``mean``.
        """
        self._check_targets(targets)
        joint = sum_components(self._log_probs(targets))
        return joint.logsumexp(0) - math.log(len(joint))

    def subset(self, samples: Sequence[int] | Tensor) -> Self:
        """See ``Predictive.subset``."""
        axes, fields = self._components.dim(), {}
        for name in self._fields:
            value = getattr(self, name)
            per_sample = value.dim() == axes and len(value) > 1
            is_first = name == self._fields[0]
            fields[name] = select_samples(value, samples) if per_sample or is_first else value
        return self._with(**fields)

    def at(self, index: Any) -> Self:
        """Return the distribution of some examples, or of some components of the targets.

        Args:
            index: as for a tensor of the shape of ``mean``, such as a mask (N,).

        Example:
            >>> from bayesify.prediction import GaussianPredictive
            >>> means = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
            >>> GaussianPredictive(means, torch.tensor(1.0)).at((..., 0)).mean
            tensor([2.])
        """
        places = (slice(None), *(index if isinstance(index, tuple) else (index,)))
        fields = {}
        for name in self._fields:
            value = getattr(self, name)
            # One number is for all.
            fields[name] = value.expand(self._components.shape)[places] if value.dim() else value
        return self._with(**fields)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """See ``Predictive.joined``; all must have the same number of weight samples."""
        check_kind(cls, parts)
        components = [part._components for part in parts]
        check_joinable([tuple(each.shape) for each in components])
        fields = {cls._fields[0]: torch.cat(components)}
        for name in cls._fields[1:]:
            values = [getattr(part, name).to(part._components) for part in parts]
            fields[name] = _joined(values, components)
        return parts[0]._with(**fields)

    def _with(self, **fields: Tensor) -> Self:
        """Return this distribution with other values of some fields."""
        found: Self = dataclasses.replace(self, **fields)  # type: ignore[type-var]
        return found

    def _check_targets(self, targets: Tensor) -> None:
        check_tensors(targets=targets)
        if targets.shape != self._components.shape[1:]:
            raise ValueError(
                f"targets must have shape {tuple(self._components.shape[1:])}, got "
                f"{tuple(targets.shape)}; nothing is broadcast"
            )


def _joined(values: Sequence[Tensor], components: Sequence[Tensor]) -> Tensor:
    """Join a parameter of several mixtures: one number where all agree, else one per sample."""
    if all(value.dim() == 0 for value in values) and len(set(map(float, values))) == 1:
        return values[0]
    # A parameter is expanded to one value per sample, and no further than the parts need.
    rows = []
    for value, component in zip(values, components, strict=True):
        row = value.reshape([1] * (component.dim() - value.dim()) + [*value.shape])
        rows.append(row.expand(len(component), *row.shape[1:]))
    widest = torch.broadcast_shapes(*(row.shape for row in rows))
    return torch.cat([row.expand(widest) for row in rows])
