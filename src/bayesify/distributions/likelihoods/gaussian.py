"""The likelihood of real-valued targets with Gaussian noise."""

from __future__ import annotations

import math

from torch import Tensor

from bayesify.distributions.likelihoods.location_scale import LocationScaleLikelihood
from bayesify.prediction import GaussianPredictive
from bayesify.prediction.predictive import sum_components

__all__ = ["GaussianLikelihood"]

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class GaussianLikelihood(LocationScaleLikelihood[GaussianPredictive]):
    """y = mean + std * noise, independently over the components of the target.

    The noise std is one fixed number, one learned number, or predicted by the network for each
    component of each example (``input_dependent``). In the first two cases the network's outputs
    are the means and have the shape of the targets, (N, ...). In the third they have an additional
    last axis of length 2: (N, K, 2) for targets (N, K). ``outputs[..., 0]`` is the mean and
    ``outputs[..., 1]`` the inverse softplus of the std, to which ``min_std`` is added. A predicted
    std is at least 1e-6, so that nothing overflows: standardise targets whose scale is far from 1.
    The last layers of such a network are ``nn.Linear(..., 2 * K), nn.Unflatten(-1, (K, 2))``.

    Args:
        std: standard deviation of the noise, positive, in units of the target; the initial value
            if it is learned; default 1.
        learn_std: whether the std is trained, as a point estimate.
        input_dependent: whether the network predicts the std of each example.
        min_std: added to a std that the network predicts, in units of the target. Where some
            targets have no noise at all, the density is unbounded without it, and training gives
            them all weight.

    Raises:
        TypeError: std or min_std is not one number.
        ValueError: std is not positive and finite; min_std is negative or not finite, or not 0
            without ``input_dependent``; or ``input_dependent`` is combined with std or
            ``learn_std``.

    Example:
        >>> import torch
        >>> GaussianLikelihood(std=1.0).log_prob(torch.zeros(1, 2, 1), torch.zeros(2, 1))
        tensor([[-0.9189, -0.9189]])
        >>> outputs = torch.tensor([[[[0.0, 0.5413]]]])  # softplus(0.5413) = 1
        >>> GaussianLikelihood(input_dependent=True).log_prob(outputs, torch.zeros(1, 1))
        tensor([[-0.9189]])
    """

    _name, _predictive_name = "std", "noise_std"

    def __init__(
        self,
        std: float | None = None,
        *,
        learn_std: bool = False,
        input_dependent: bool = False,
        min_std: float = 0.0,
    ) -> None:
        if input_dependent and learn_std:
            raise ValueError(
                "input-dependent noise is predicted by the network, but got learn_std=True too; "
                "remove one of the two"
            )
        super().__init__(std, learn=learn_std, input_dependent=input_dependent, minimum=min_std)

    def expected_log_prob(self, mean: Tensor, variance: Tensor, targets: Tensor) -> Tensor:
        """Return E[log p(y | f)] over outputs f of these means and variances, exactly.

        For each component it is log N(y | mean, std^2) - variance / (2 std^2), in nats, since the
        log density is quadratic in f: correlations of the components do not matter.

        Raises:
            TypeError: the noise is input-dependent, for which there is no closed form.
            ValueError: the targets have another shape than the outputs.

        Example:
            >>> import torch
            >>> zeros, variance = torch.zeros(1, 2, 1), torch.tensor([[[0.0], [2.0]]])
            >>> GaussianLikelihood(std=1.0).expected_log_prob(zeros, variance, zeros[0])
            tensor([[-0.9189, -1.9189]])
        """
        if self.input_dependent:
            raise TypeError(
                "ClosedFormLastLayer needs a noise that is one number, got input-dependent noise; "
                "use GaussianLikelihood(std=..., learn_std=True), or "
                "estimator=LocalReparameterization()"
            )
        loss = 0.5 * variance / self.std.to(variance).square()
        return self.log_prob(mean, targets) - sum_components(loss)

    @property
    def std(self) -> Tensor:
        """Standard deviation of the noise, a scalar.

        Raises:
            ValueError: the noise is input-dependent.
        """
        return self._scale

    def _log_density(self, standardised: Tensor, log_scale: Tensor) -> Tensor:
        return -0.5 * standardised.square() - log_scale - _HALF_LOG_2PI

    def _mixture(self, locations: Tensor, scale: Tensor) -> GaussianPredictive:
        return GaussianPredictive(locations, scale)
