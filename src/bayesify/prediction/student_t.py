"""The predictive distribution of real-valued targets with heavy-tailed noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bayesify.prediction.location_scale import LocationScalePredictive
from bayesify.prediction.special import scipy_function

__all__ = ["StudentTPredictive", "log1p_square", "student_t_log_density"]


@dataclass(frozen=True, eq=False)
class StudentTPredictive(LocationScalePredictive):
    """An equal mixture of S Student's t distributions for each component of each target.

    Args:
        means: the mean of the target under each weight sample, shape (S, N, ...).
        scale: width of the noise, 0 or more, broadcastable to ``means``.
        df: degrees of freedom of the noise, above 2, broadcastable to ``means``. The variance of
            the noise is scale^2 df / (df - 2).

    Raises:
        ValueError: ``means`` has fewer than two axes or no sample, ``scale`` or ``df`` cannot be
            broadcast to it, ``scale`` is negative, or ``df`` is not above 2.

    Example:
        >>> means = torch.tensor([[[-1.0]], [[1.0]]])
        >>> p = StudentTPredictive(means, scale=torch.tensor(0.5), df=torch.tensor(4.0))
        >>> p.mean.item(), p.aleatoric.item(), p.epistemic.item()
        (0.0, 0.5, 1.0)
        >>> p.interval(0.99)
        (tensor([[-2.9166]]), tensor([[2.9166]]))
    """

    means: Tensor
    scale: Tensor
    df: Tensor

    _fields: ClassVar = ("means", "scale", "df")

    def __post_init__(self) -> None:
        """Check shapes and values."""
        super().__post_init__()
        if not bool((self.df > 2.0).all()):
            raise ValueError(
                f"df must be above 2, so that the variance exists, got {float(self.df.min())}"
            )

    def _variance_factor(self) -> Tensor:
        df = self.df.to(self.means)
        return df / (df - 2.0)

    def _log_density(self, z: Tensor) -> Tensor:
        return student_t_log_density(z, self.df.to(z))

    def _upper_tail(self, z: Tensor) -> Tensor:
        return scipy_function("stdtr")(self.df.to(z), -z)

    def _noise(self, index: Tensor, generator: torch.Generator) -> Tensor:
        # Bailey, Polar generation of random variates with the t-distribution (1994), eq. 3.
        u, v = torch.rand(2, *index.shape, dtype=torch.float64, generator=generator)
        df = self.df.double().cpu()
        df = df.expand(self.means.shape).gather(0, index) if df.dim() else df
        radius = (df * torch.expm1(-2.0 / df * torch.log1p(-u))).sqrt()
        return radius * torch.cos(2.0 * math.pi * v)

    def _tail_quantile(self, tail: float) -> Tensor:
        df = self.df.double()
        return -scipy_function("stdtrit")(df, torch.full_like(df, tail))


def student_t_log_density(z: Tensor, df: Tensor) -> Tensor:
    """Compute the log density of Student's t of scale 1, differentiable in both arguments.

    Example:
        >>> student_t_log_density(torch.tensor([0.0, 1e30]), torch.tensor(3.0))
        tensor([  -1.0009, -275.1139])
    """
    peak = log_gamma_step(0.5 * df) - 0.5 * torch.log(math.pi * df)
    return peak - 0.5 * (df + 1.0) * log1p_square(z.abs() / df.sqrt())


def log1p_square(x: Tensor) -> Tensor:
    """Compute log(1 + x^2) for x of at least 0, where x^2 may overflow.

    Example:
        >>> log1p_square(torch.tensor([1.0, 1e30]))
        tensor([  0.6931, 138.1551])
    """
    # It is log(1 + min(x, 1 / x)^2) + 2 log max(x, 1).
    far = x > 1.0
    large = torch.where(far, x, 1.0)
    small = torch.where(far, 1.0, x) / large
    return torch.log1p(small.square()) + 2.0 * torch.log(large)


def log_gamma_step(x: Tensor) -> Tensor:
    """Compute log Gamma(x + 1/2) - log Gamma(x), differentiable, to full precision for great x.

    Example:
        >>> log_gamma_step(torch.tensor([0.5, 1e8]))
        tensor([-0.5724,  9.2103])
    """
    far = x > 15.0
    near = x.clamp(max=15.0)  # of great numbers the difference would lose digits
    exact = torch.lgamma(near + 0.5) - torch.lgamma(near)
    r = x.clamp(min=15.0).reciprocal()
    s = r.square()
    series = r * (-1 / 8 + s * (1 / 192 + s * (-1 / 640 + s * 17 / 14336)))
    return torch.where(far, series - 0.5 * r.log(), exact)
