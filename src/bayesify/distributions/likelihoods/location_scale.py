"""The common part of likelihoods of real-valued targets: y = location + scale * noise."""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic

import torch
from torch import Tensor, nn

from bayesify.distributions.likelihoods.likelihood import (
    Likelihood,
    check_target_rows,
)
from bayesify.distributions.precision import wide_default_dtype
from bayesify.distributions.softplus import inverse_softplus, softplus
from bayesify.noise.arguments import number_from_0, positive_number
from bayesify.prediction import SizedIterable, stack_samples
from bayesify.prediction.predictive import P_co, sum_components

__all__ = ["LocationScaleLikelihood", "check_real"]

#: Smallest scale that a network can predict, in units of the target.
_LEAST_SCALE = 1e-6


class LocationScaleLikelihood(Likelihood[P_co], Generic[P_co]):
    """y = location + scale * noise, independently over the components of the target.

    The scale is one fixed number, one learned number, or predicted by the network. A subclass adds
    the density of the noise. Its constructor has arguments ``NAME``, ``learn_NAME`` and
    ``min_NAME``, where NAME is what it calls its scale (``_name``).

    Args:
        scale: the scale, or its initial value if it is learned; None stands for 1.
        learn: whether the scale is trained, as a point estimate.
        input_dependent: whether the network predicts the scale of each example.
        minimum: added to a scale that the network predicts.

    Raises:
        TypeError: the scale or the minimum is not one number.
        ValueError: the scale is not positive and finite; the minimum is negative or not finite, or
            not 0 without ``input_dependent``; or ``input_dependent`` is combined with a scale.
    """

    error_name = "mean squared error"
    #: What the scale is called by the likelihood, and by its predictive distribution.
    _name: str
    _predictive_name: str

    def __init__(
        self,
        scale: float | None,
        *,
        learn: bool,
        input_dependent: bool,
        minimum: float,
    ) -> None:
        super().__init__()
        name = self._name
        if input_dependent and scale is not None:
            raise ValueError(
                f"input-dependent noise is predicted by the network, but got {name}={scale} too; "
                "remove one of the two"
            )
        minimum = number_from_0(f"min_{name}", minimum)
        if minimum and not input_dependent:
            raise ValueError(
                f"min_{name}={minimum} is for a {name} that the network predicts; add "
                f"input_dependent=True, or give {name} itself"
            )
        several = f"; for a {name} of each component or example use input_dependent=True"
        value = 1.0 if scale is None else positive_number(name, scale, several)
        learn, input_dependent = bool(learn), bool(input_dependent)
        self.input_dependent, self._minimum = input_dependent, minimum
        self._config: dict[str, float | int | bool] = (
            {"input_dependent": True} if input_dependent else {name: value, f"learn_{name}": learn}
        )
        if minimum:
            self._config[f"min_{name}"] = minimum
        self._fixed = torch.tensor(value, dtype=torch.float64)
        self.rho = (
            nn.Parameter(inverse_softplus(self._fixed).to(wide_default_dtype()))
            if learn and not input_dependent
            else None
        )

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return log p(y | output), in nats, summed over the components, shape (S, N)."""
        locations, scale = self.location_and_scale(outputs)
        self._check(locations, targets)
        return sum_components(self._log_probs(locations, scale, targets))

    def predictive(
        self,
        outputs: SizedIterable,
        *,
        keep_samples: bool,  # noqa: ARG002
    ) -> P_co:
        """Return the mixture of the distributions under all weight samples.

        It always keeps the samples, S x N numbers or twice as many with input-dependent noise,
        because its densities and quantiles depend on every component, not only on mean and
        variance.

        Raises:
            ValueError: there is no weight sample.
        """
        if not self.input_dependent:
            return self._mixture(stack_samples(outputs), self._scale.detach())
        locations: Tensor | None = None
        scales: Tensor | None = None
        for index, sample in enumerate(outputs):
            location = self._locations(sample.unsqueeze(0))[0]
            if locations is None or scales is None:
                locations = location.new_empty((len(outputs), *location.shape))
                scales = torch.empty_like(locations)
            locations[index] = location
            scales[index] = self._predicted_scale(sample)
        if locations is None or scales is None:
            raise ValueError("at least one weight sample is needed, got none")
        return self._mixture(locations, scales)

    def location_and_scale(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return location (S, N, ...) and scale, in units of the target, from outputs (S, N, ...).

        The scale can be broadcast to the location.
        """
        if self.input_dependent:
            return self._locations(outputs), self._predicted_scale(outputs)
        return outputs, self._scale.to(outputs)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error, in squared units of the target."""
        locations = self._locations(outputs.unsqueeze(0))
        self._check(locations, targets)
        return (locations[0] - targets).square().mean()

    def config(self) -> dict[str, float | int | bool]:
        """Return the arguments that were given, and the initial value of the scale."""
        return dict(self._config)

    @property
    def _scale(self) -> Tensor:
        """The scale that is the same for every example, a scalar."""
        if self.input_dependent:
            raise ValueError(
                "input-dependent noise has no single "
                f"{self._name}; use bnn.predict(x).{self._predictive_name} or aleatoric"
            )
        return self._fixed if self.rho is None else softplus(self.rho)

    @abstractmethod
    def _log_density(self, standardised: Tensor, log_scale: Tensor) -> Tensor:
        """Compute the log density of the target from (target - location) / scale, elementwise."""

    @abstractmethod
    def _mixture(self, locations: Tensor, scale: Tensor) -> P_co:
        """Return the predictive distribution, from the locations (S, N, ...) and the scale."""

    def _log_probs(self, locations: Tensor, scale: Tensor, targets: Tensor) -> Tensor:
        """Compute log p of each component, shape (S, N, ...)."""
        return self._log_density((targets - locations) / scale, scale.log())

    def _predicted_scale(self, outputs: Tensor) -> Tensor:
        scale = softplus(outputs[..., 1]) + self._minimum
        # The correction has no gradient. A clamp would have gradient 0 below the minimum, so that
        # training could not increase the scale again.
        return scale + (_LEAST_SCALE - scale).clamp_min(0.0).detach()

    def _locations(self, outputs: Tensor) -> Tensor:
        if not self.input_dependent:
            return outputs
        if outputs.dim() < 3 or outputs.shape[-1] != 2:
            raise ValueError(
                "input-dependent noise needs outputs of shape (N, K, 2) from the network, mean "
                f"and inverse softplus of {self._name} last, got {tuple(outputs.shape[1:])}; end "
                "the network with nn.Linear(..., 2 * K), nn.Unflatten(-1, (K, 2))"
            )
        return outputs[..., 0]

    def _check(self, locations: Tensor, targets: Tensor) -> None:
        if targets.shape != locations.shape[1:]:
            check_target_rows(targets, tuple(locations.shape[1:]))
            name = "means" if self.input_dependent else "output"
            raise ValueError(
                f"targets must have the shape of the network's {name}, "
                f"{tuple(locations.shape[1:])}, got {tuple(targets.shape)}; nothing is broadcast: "
                "use y.unsqueeze(-1) or y.squeeze(-1)"
            )
        check_real(targets)


def check_real(targets: Tensor) -> None:
    """Raise ValueError where targets are no real numbers.

    Example:
        >>> check_real(torch.tensor([True]))
        Traceback (most recent call last):
        ValueError: targets must be real numbers, got torch.bool; for labels use Bern...
    """
    if targets.dtype == torch.bool or targets.is_complex():
        raise ValueError(
            f"targets must be real numbers, got {targets.dtype}; for labels use "
            "BernoulliLikelihood, or convert them with .float()"
        )
