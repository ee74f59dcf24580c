"""The predictive distribution of real-valued targets with Gaussian noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayesify.prediction.location_scale import LocationScalePredictive

__all__ = ["GaussianPredictive"]

_LOG_PEAK = -0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True, eq=False)
class GaussianPredictive(LocationScalePredictive):
    """An equal mixture of S Gaussians for each component of each target.

    Args:
        means: the mean of the target under each weight sample, shape (S, N, ...).
        noise_std: standard deviation of the noise, 0 or more, broadcastable to ``means``.

    Raises:
        ValueError: ``means`` has fewer than two axes or no sample, or ``noise_std`` cannot be
            broadcast to it or is negative.

    Example:
        >>> p = GaussianPredictive(torch.tensor([[[-1.0]], [[1.0]]]), torch.tensor(0.5))
        >>> p.mean.item(), p.aleatoric.item(), p.epistemic.item()
        (0.0, 0.25, 1.0)
    """

    means: Tensor
    noise_std: Tensor

    _fields: ClassVar = ("means", "noise_std")

    def _variance_factor(self) -> float:
        return 1.0

    def _log_density(self, z: Tensor) -> Tensor:
        return _LOG_PEAK - 0.5 * z.square()

    def _upper_tail(self, z: Tensor) -> Tensor:
        tail: Tensor = 0.5 * torch.erfc(z * math.sqrt(0.5))
        return tail

    def _noise(self, index: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randn(index.shape, dtype=torch.float64, generator=generator)

    def _tail_quantile(self, tail: float) -> Tensor:
        quantile: Tensor = -torch.special.ndtri(torch.tensor(tail, dtype=torch.float64))
        return quantile
