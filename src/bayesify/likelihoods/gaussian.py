"""The likelihood of numbers with Gaussian noise: fixed, learned, or said by the network."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bayesify.likelihoods.base import Likelihood
from bayesify.predictive import GaussianPredictive, Predictive, SizedIterable, stacked
from bayesify.softplus import inverse_softplus, softplus

__all__ = ["GaussianLikelihood"]


class GaussianLikelihood(Likelihood):
    """y = mean + std * noise, independently over the parts of the target.

    The noise is one fixed number, one number that is trained along, or said by the network for
    each part of each datum (``input_dependent``). In the first two cases the network's outputs
    are the means, of the targets' shape (N, ...). In the third they have one axis more, of
    length 2, at the end: (N, K, 2) for targets (N, K). ``outputs[..., 0]`` is the mean and
    ``outputs[..., 1]`` the inverse softplus of the standard deviation, which is held at 1e-6 at
    least, so that nothing overflows: standardise targets that are of another order than 1. End
    the network with ``nn.Linear(..., 2 * K), nn.Unflatten(-1, (K, 2))``.

    Args:
        std: standard deviation of the noise, positive, in units of the target, at which a learned
            one starts; default 1.
        learn_std: whether the noise is trained along, as a point estimate.
        input_dependent: whether the network says the noise of each datum.

    Raises:
        ValueError: std is not positive and finite, or goes with input-dependent noise, as
            learn_std does not either.

    Example:
        >>> GaussianLikelihood(std=1.0).log_prob(torch.zeros(1, 2, 1), torch.zeros(2, 1))
        tensor([[-0.9189, -0.9189]])
        >>> outputs = torch.tensor([[[[0.0, 0.5413]]]])  # softplus(0.5413) = 1
        >>> GaussianLikelihood(input_dependent=True).log_prob(outputs, torch.zeros(1, 1))
        tensor([[-0.9189]])
    """

    error_name = "mean squared error"

    def __init__(
        self, std: float | None = None, *, learn_std: bool = False, input_dependent: bool = False
    ) -> None:
        super().__init__()
        if input_dependent and (learn_std or std is not None):
            given = "learn_std=True" if learn_std else f"std={std}"
            raise ValueError(
                f"input-dependent noise is said by the network, but got {given} too; leave out "
                "one or the other"
            )
        self.input_dependent = input_dependent
        value = 1.0 if std is None else std
        if not (value > 0.0 and math.isfinite(value)):
            raise ValueError(f"std must be positive and finite, got {std}")
        self._config: dict[str, float | int | bool] = (
            {"input_dependent": True} if input_dependent else {"std": value, "learn_std": learn_std}
        )
        self._fixed = torch.tensor(value, dtype=torch.float64)
        self.rho = (
            nn.Parameter(inverse_softplus(self._fixed).to(torch.get_default_dtype()))
            if learn_std
            else None
        )

    @property
    def std(self) -> Tensor:
        """Standard deviation of the noise, a scalar.

        Raises:
            ValueError: the noise is input-dependent.
        """
        if self.input_dependent:
            raise ValueError(
                "input-dependent noise has no one std; use bnn.predict(x).noise_std or aleatoric"
            )
        if self.rho is None:
            return self._fixed
        return softplus(self.rho)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """log N(y; mean, std^2), in nats, summed over the parts of a target, shape (S, N)."""
        means = self._means(outputs)
        self._check(means, targets)
        std = _floored(outputs[..., 1]) if self.input_dependent else self.std.to(outputs)
        per_part = -0.5 * ((targets - means) / std).square() - std.log() - _HALF_LOG_2PI
        return per_part.flatten(2).sum(-1) if per_part.dim() > 2 else per_part

    def predictive(
        self,
        outputs: SizedIterable,
        *,
        keep_samples: bool,  # noqa: ARG002
    ) -> Predictive:
        """The mixture of Gaussians over the weight samples, which it always keeps.

        S x N numbers, or twice as many with input-dependent noise: its densities and quantiles
        are functions of every component, not of mean and variance.
        """
        if not self.input_dependent:
            return GaussianPredictive(stacked(outputs), self.std.detach())
        means: Tensor | None = None
        stds: Tensor | None = None
        for index, sample in enumerate(outputs):
            mean = self._means(sample.unsqueeze(0))[0]
            if means is None or stds is None:
                means = mean.new_empty((len(outputs), *mean.shape))
                stds = torch.empty_like(means)
            means[index] = mean
            stds[index] = _floored(sample[..., 1])
        if means is None or stds is None:
            raise ValueError("at least one weight sample is needed, got none")
        return GaussianPredictive(means, stds)

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean squared error, in squared units of the target."""
        means = self._means(outputs.unsqueeze(0))
        self._check(means, targets)
        return (means[0] - targets).square().mean()

    def config(self) -> dict[str, float | int | bool]:
        """``std`` as given, and ``learn_std``; or ``input_dependent``."""
        return dict(self._config)

    def _means(self, outputs: Tensor) -> Tensor:
        if not self.input_dependent:
            return outputs
        if outputs.dim() < 3 or outputs.shape[-1] != 2:
            raise ValueError(
                "input-dependent noise needs outputs of shape (N, K, 2) from the network, mean "
                f"and inverse softplus of std last, got {tuple(outputs.shape[1:])}; end it with "
                "nn.Linear(..., 2 * K), nn.Unflatten(-1, (K, 2))"
            )
        return outputs[..., 0]

    def _check(self, means: Tensor, targets: Tensor) -> None:
        if targets.shape != means.shape[1:]:
            what = "means" if self.input_dependent else "output"
            raise ValueError(
                f"targets must have the shape of the network's {what}, {tuple(means.shape[1:])}, "
                f"got {tuple(targets.shape)}; nothing is broadcast: use y.unsqueeze(-1) or "
                "y.squeeze(-1)"
            )


#: The least standard deviation that a network can say, in units of the target.
_FLOOR = 1e-6


def _floored(raw: Tensor) -> Tensor:
    std = softplus(raw)
    # Added without gradient: that of a clamp is 0 where it holds, and training could not leave.
    return std + (_FLOOR - std).clamp_min(0.0).detach()


_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
