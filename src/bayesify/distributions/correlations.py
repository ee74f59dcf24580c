"""Correlations: how the weights of a group vary together, given a scale for each of them.

The deviation of n weights from their means is diag(scale) C e, where e holds standard normals. C
has no unit and its diagonal is 1, so that an optimiser may use one learning rate for all of it;
with zeros elsewhere the weights are independent with ``scale`` as standard deviations. The
deviation under ``Kronecker`` is C diag(scale) e, so that the scale of a weight matters to others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.distributions.precision import WideModule
from bayesify.noise.keys import NoiseKey, Stream

__all__ = [
    "Correlation",
    "Independent",
    "LowRank",
    "Triangular",
    "log_volume",
    "solved",
    "unit_lower",
]


class Correlation(WideModule, ABC):
    """How n weights of a Gaussian posterior vary together.

    Args:
        num_weights: n, the number of weights.
        num_shared: how many standard normals one sample needs beyond one for each weight.

    Example:
        >>> Independent(2).deviations(torch.tensor([1.0, 2.0]), torch.ones(1, 2))
        tensor([[1., 2.]])
    """

    #: Whether the scale of a weight matters to no other weight.
    scale_is_own: ClassVar[bool] = True
    #: Whether the weights depend on each other also given the last ``num_shared`` normals.
    is_joint: ClassVar[bool] = True

    def __init__(self, num_weights: int, num_shared: int = 0) -> None:
        super().__init__()
        self.num_weights, self.num_shared = num_weights, num_shared

    @property
    def num_normals(self) -> int:
        """How many standard normals one sample needs."""
        return self.num_weights + self.num_shared

    @property
    def num_given(self) -> int:
        """How many standard normals :meth:`given` needs."""
        return self.num_normals if self.is_joint else self.num_shared

    @abstractmethod
    def deviations(self, scale: Tensor, noise: Tensor) -> Tensor:
        """Transform normals of shape (S, num_normals) to w - mean, shape (S, n)."""

    @abstractmethod
    def std(self, scale: Tensor) -> Tensor:
        """Return the standard deviation of each weight, shape (n,)."""

    def log_std(self, log_scale: Tensor) -> Tensor:
        """Return the logarithm of :meth:`std`, shape (n,), of logarithms of scales."""
        unit, relative = self._relative(log_scale)
        return unit + self.std(relative).log()

    def standardised(self, log_scale: Tensor, noise: Tensor) -> Tensor:
        """Return :meth:`deviations` in units of :meth:`std`, shape (S, n), finite for any scale."""
        _, relative = self._relative(log_scale)
        return self.deviations(relative, noise) / self.std(relative)

    def _relative(self, log_scale: Tensor) -> tuple[Tensor, Tensor]:
        """Split scales into the logarithm of a unit and what is left, which does not underflow.

        Of scales that differ by a factor deviations and standard deviations do too.
        """
        if self.scale_is_own:
            return log_scale, torch.ones_like(log_scale)
        most = log_scale.detach().amax()
        return most, (log_scale - most).exp()

    def given(self, scale: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Return shift and std, shapes (n,), given which the weights are independent Gaussians.

        Args:
            scale: the scale of each weight, shape (n,).
            shared: ``num_given`` normals of a sample: the last ``num_shared``, or all of them where
                the weights are not independent given less. Their std is then 0.
        """
        return self.deviations(scale, shared.unsqueeze(0))[0], torch.zeros_like(scale)

    def output_variances(self, scale: Tensor, inputs: Tensor, num_outputs: int) -> Tensor:
        """Return the variance of each output of a layer x W^T + b, shape (..., num_outputs).

        Var[(W x + b)_o] = x^T S_o x, where S_o is the covariance of the weights of output o, the
        bias with an input of 1 among them.

        Args:
            scale: the scale of each weight, shape (n,).
            inputs: rows of the layer's inputs, shape (..., inputs).
            num_outputs: the number of outputs; the n weights are those of W, of shape
                (num_outputs, inputs), and behind them b, if it is one of the group.
        """
        size = num_outputs * inputs.shape[-1]
        factor = self._factor(scale)
        weight, bias = factor.split([size, self.num_weights - size], dim=-1)
        by_output = weight.view(len(factor), num_outputs, inputs.shape[-1])
        if bias.shape[-1]:
            by_output = torch.cat([by_output, bias.unsqueeze(-1)], dim=-1)
            inputs = F.pad(inputs, (0, 1), value=1.0)
        covariances = torch.einsum("eoi,eoj->oij", by_output, by_output)
        found: Tensor = torch.einsum("...i,oij,...j->...o", inputs, covariances, inputs)
        return found

    def narrow(self, scale: Tensor, max_std: float) -> Tensor:
        """Return scales, shape (n,), with which no standard deviation is above ``max_std``.

        A class whose scales alone cannot do so gives up its correlations, in place.
        """
        return scale * (max_std / self.std(scale)).clamp(max=1.0)

    @abstractmethod
    def total_correlation(self, log_scale: Tensor, mask: Tensor | None) -> Tensor:
        """Return (sum of log std_i^2 - log det covariance) / 2 in nats, a scalar.

        Args:
            log_scale: the logarithm of the scale of each weight, shape (n,).
            mask: False for weights that do not count, shape (n,), or None.

        Raises:
            TypeError: see :meth:`check_prunable`.
        """

    @abstractmethod
    def kl(
        self,
        log_scale: Tensor,
        shift: Tensor,
        other: Any,
        other_log_scale: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """Return KL(N(mean, S) || N(mean - shift, S_other)) in nats, a scalar.

        Args:
            log_scale: the logarithm of the scale of each weight, shape (n,).
            shift: the means less those of the other, shape (n,).
            other: the correlation of the other, of the same class and shapes.
            other_log_scale: the logarithm of its scales, shape (n,).
            mask: False for weights that do not count, shape (n,), or None.

        Raises:
            TypeError: see :meth:`check_prunable`.
        """

    def _marginal_kl(
        self,
        log_scale: Tensor,
        shift: Tensor,
        other: Correlation,
        other_log_scale: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """Return :meth:`kl` of the weights that count, by their covariances."""
        self.check_prunable()
        unit = other_log_scale.amax()  # the unit of all scales cancels
        factor = self._factor((log_scale - unit).exp())[:, mask]
        before = other._factor((other_log_scale - unit).exp())[:, mask]
        upper, own = _triangle_of(before), _triangle_of(factor)
        moved = (shift / unit.exp())[mask].unsqueeze(-1)
        whitened = torch.linalg.solve_triangular(
            upper.T, torch.cat([factor.T, moved], dim=-1), upper=False
        )
        log_ratio = (own.diagonal() / upper.diagonal()).abs().log().sum()
        found: Tensor = 0.5 * (whitened.square().sum() - len(moved)) - log_ratio
        return found

    def _factor(self, scale: Tensor) -> Tensor:
        """Return F of shape (num_normals, n), whose F^T F is the covariance."""
        # Row i of the identity is noise i alone, so that row i holds what it does to all weights.
        noise = torch.eye(self.num_normals, dtype=scale.dtype, device=scale.device)
        return self.deviations(scale, noise)

    def check_prunable(self) -> None:
        """Raise TypeError where :meth:`total_correlation` needs that all weights count."""


class Independent(Correlation):
    """No correlation: C is the identity.

    Example:
        >>> float(Independent(2).total_correlation(torch.zeros(2), None))
        0.0
    """

    is_joint = False

    def deviations(self, scale: Tensor, noise: Tensor) -> Tensor:
        """See :meth:`Correlation.deviations`."""
        return scale * noise

    def std(self, scale: Tensor) -> Tensor:
        """See :meth:`Correlation.std`."""
        return scale

    def given(self, scale: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """See :meth:`Correlation.given`; there are none."""
        return torch.zeros_like(scale), scale

    def total_correlation(self, log_scale: Tensor, mask: Tensor | None) -> Tensor:  # noqa: ARG002
        """See :meth:`Correlation.total_correlation`."""
        return log_scale.new_zeros(())

    def kl(
        self,
        log_scale: Tensor,
        shift: Tensor,
        other: Independent,  # noqa: ARG002
        other_log_scale: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """See :meth:`Correlation.kl`; it is a sum over the weights."""
        each = _independent_kl(log_scale - other_log_scale, _relative(shift, other_log_scale))
        return (each if mask is None else torch.where(mask, each, 0.0)).sum()


class LowRank(Correlation):
    """C = [I, F] with F of shape (n, rank): the covariance is diag(scale) (I + F F^T) diag(scale).

    Example:
        >>> correlation = LowRank(torch.tensor([[1.0], [0.0]]))
        >>> correlation.std(torch.ones(2)).tolist()
        [1.4142135381698608, 1.0]
    """

    is_joint = False

    def __init__(self, factor: Tensor) -> None:
        num_weights, rank = factor.shape
        super().__init__(num_weights, rank)
        self.factor = nn.Parameter(factor)

    @classmethod
    def of_rank(cls, rank: int, like: Tensor, seed: int) -> LowRank:
        """Begin with a small random F; at F = 0 its gradient would vanish.

        Args:
            rank: the number of columns of F, at least 1.
            like: a tensor of shape (n,) with the dtype and device.
            seed: the seed of F.
        """
        key = NoiseKey(seed, Stream.INITIALIZATION, 0)
        size = like.numel() * rank
        normals = key.normals(range(1), size, dtype=like.dtype, device=like.device)
        return cls(normals.view(-1, rank) * (0.1 / math.sqrt(rank)))

    def deviations(self, scale: Tensor, noise: Tensor) -> Tensor:
        """See :meth:`Correlation.deviations`."""
        own, shared = noise.split([self.num_weights, self.num_shared], dim=-1)
        return torch.addcmul(scale * own, scale, shared @ self.factor.T)

    def given(self, scale: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Correlation.given`; they are those of the columns of F."""
        return scale * (self.factor @ shared), scale

    def std(self, scale: Tensor) -> Tensor:
        """See :meth:`Correlation.std`."""
        spread: Tensor = (1.0 + self.factor.square().sum(dim=1)).sqrt()
        return scale * spread

    def total_correlation(self, log_scale: Tensor, mask: Tensor | None) -> Tensor:  # noqa: ARG002
        """See :meth:`Correlation.total_correlation`; the determinant is that of I + F^T F."""
        factor = self.factor if mask is None else self.factor[mask]
        inner = torch.eye(factor.shape[1], dtype=factor.dtype, device=factor.device)
        inner = inner + factor.T @ factor
        return 0.5 * (factor.square().sum(dim=1).log1p().sum() - log_det(inner))

    def kl(
        self,
        log_scale: Tensor,
        shift: Tensor,
        other: LowRank,
        other_log_scale: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """See :meth:`Correlation.kl`; the weights that count are of low rank too.

        With F_o that of the other, (I + F_o F_o^T)^-1 = I - V V^T for V = F_o L^-T, where L is the
        Cholesky factor of I + F_o^T F_o.
        """
        kept = slice(None) if mask is None else mask
        factor, before = self.factor[kept], other.factor[kept]
        log_ratio = (log_scale - other_log_scale)[kept]
        ratio, moved = log_ratio.exp(), _relative(shift, other_log_scale)[kept]
        identity = torch.eye(self.num_shared, dtype=factor.dtype, device=factor.device)
        lower = torch.linalg.cholesky(identity + before.T @ before)
        taken = torch.linalg.solve_triangular(lower, before.T, upper=False).T
        own = ratio.unsqueeze(-1) * factor
        squares = own.square().sum() - (ratio.unsqueeze(-1) * taken).square().sum()
        squares = squares - (taken.T @ own).square().sum() - (taken.T @ moved).square().sum()
        log_dets = 2.0 * lower.diagonal().log().sum() - log_det(identity + factor.T @ factor)
        return _independent_kl(log_ratio, moved).sum() + 0.5 * torch.add(squares, log_dets)


class Triangular(Correlation):
    """C is lower triangular, shape (n, n): any covariance.

    Only the part of ``factor`` below the diagonal is used.

    Example:
        >>> Triangular(torch.tensor([[0.0, 9.0], [1.0, 0.0]])).std(torch.ones(2)).tolist()
        [1.0, 1.4142135381698608]
    """

    def __init__(self, factor: Tensor) -> None:
        super().__init__(len(factor))
        self.factor = nn.Parameter(factor)

    def deviations(self, scale: Tensor, noise: Tensor) -> Tensor:
        """See :meth:`Correlation.deviations`."""
        return scale * (noise @ unit_lower(self.factor).T)

    def std(self, scale: Tensor) -> Tensor:
        """See :meth:`Correlation.std`."""
        return scale * unit_lower(self.factor).square().sum(dim=1).sqrt()

    def total_correlation(self, log_scale: Tensor, mask: Tensor | None) -> Tensor:  # noqa: ARG002
        """See :meth:`Correlation.total_correlation`; the determinant of C C^T is 1."""
        factor = unit_lower(self.factor)
        if mask is not None:
            factor = factor[mask]
        total = 0.5 * factor.square().sum(dim=1).log().sum()
        return total if mask is None else total - log_volume(factor.T)

    def kl(
        self,
        log_scale: Tensor,
        shift: Tensor,
        other: Triangular,
        other_log_scale: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """See :meth:`Correlation.kl`; the determinants are those of the scales."""
        if mask is not None and not bool(mask.all()):
            return self._marginal_kl(log_scale, shift, other, other_log_scale, mask)
        # C_o^-1 diag(ratio) C has the diagonal of diag(ratio).
        log_ratio = log_scale - other_log_scale
        factor = torch.cat(
            [
                log_ratio.exp().unsqueeze(-1) * unit_lower(self.factor),
                _relative(shift, other_log_scale).unsqueeze(-1),
            ],
            dim=-1,
        )
        whitened = solved(other.factor, factor)
        each = _independent_kl(log_ratio, whitened[:, -1])
        return each.sum() + 0.5 * whitened[:, :-1].tril(-1).square().sum()


def _independent_kl(log_ratio: Tensor, shift: Tensor) -> Tensor:
    """Return KL(N(shift, ratio^2) || N(0, 1)) of each weight in nats."""
    return 0.5 * (shift.square() + torch.expm1(2.0 * log_ratio)) - log_ratio


def _relative(shift: Tensor, log_scale: Tensor) -> Tensor:
    """Return shifts in units of scales, which may underflow."""
    return shift / log_scale.exp().clamp(min=torch.finfo(log_scale.dtype).tiny)


def solved(factor: Tensor, right: Tensor) -> Tensor:
    """Return C^-1 times a matrix, for C = :func:`unit_lower` of a factor.

    Example:
        >>> solved(torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.ones(2, 1)).tolist()
        [[1.0], [-1.0]]
    """
    found: Tensor = torch.linalg.solve_triangular(factor, right, upper=False, unitriangular=True)
    return found


def unit_lower(factor: Tensor) -> Tensor:
    """Return the part of a square matrix below its diagonal, with ones on the diagonal.

    Example:
        >>> unit_lower(torch.tensor([[5.0, 6.0], [7.0, 8.0]])).tolist()
        [[1.0, 0.0], [7.0, 1.0]]
    """
    ones = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return factor.tril(-1) + ones


def _triangle_of(factor: Tensor) -> Tensor:
    """Return the upper triangular R of shape (m, m) with R^T R = F^T F, for F of shape (n, m).

    A product of F with itself would square its condition number.
    """
    upper: Tensor = torch.linalg.qr(factor).R
    return upper


def log_volume(factor: Tensor) -> Tensor:
    """Return log det(F^T F) / 2 for F of shape (n, m) and rank m, a scalar.

    Example:
        >>> round(float(log_volume(torch.tensor([[3.0], [4.0]])).exp()), 4)
        5.0
    """
    return _triangle_of(factor).diagonal().abs().log().sum()


def log_det(matrix: Tensor) -> Tensor:
    """Return log det of a positive definite matrix, a scalar.

    Example:
        >>> round(float(log_det(torch.eye(2) * torch.e)), 4)
        2.0
    """
    return 2.0 * torch.sum(torch.linalg.cholesky(matrix).diagonal().log())
