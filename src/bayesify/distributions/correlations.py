"""Correlations: how the weights of a group vary together, given a scale for each of them.

The deviation of n weights from their means is diag(scale) C, or for a matrix of weights
A (scale * E) B^T, where E holds standard normals. C, A and B have no unit and their diagonals are
1, so that an optimiser may use one learning rate for all of them; with zeros elsewhere the weights
are independent with ``scale`` as standard deviations.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.distributions.precision import WideModule
from bayesify.noise.keys import NoiseKey, Stream

__all__ = ["Correlation", "Independent", "Kronecker", "LowRank", "Triangular"]


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
        # Row i of the identity is noise i alone, so that row i holds what it does to all weights.
        noise = torch.eye(self.num_normals, dtype=scale.dtype, device=scale.device)
        size = num_outputs * inputs.shape[-1]
        weight, bias = self.deviations(scale, noise).split([size, self.num_weights - size], dim=-1)
        by_output = weight.view(len(noise), num_outputs, inputs.shape[-1])
        if bias.shape[-1]:
            by_output = torch.cat([by_output, bias.unsqueeze(-1)], dim=-1)
            inputs = F.pad(inputs, (0, 1), value=1.0)
        covariances = torch.einsum("eoi,eoj->oij", by_output, by_output)
        found: Tensor = torch.einsum("...i,oij,...j->...o", inputs, covariances, inputs)
        return found

    @abstractmethod
    def total_correlation(self, log_scale: Tensor, mask: Tensor | None) -> Tensor:
        """Return (sum of log std_i^2 - log det covariance) / 2 in nats, a scalar.

        Args:
            log_scale: the logarithm of the scale of each weight, shape (n,).
            mask: False for weights that do not count, shape (n,), or None.

        Raises:
            TypeError: see :meth:`check_prunable`.
        """

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
        return 0.5 * (factor.square().sum(dim=1).log1p().sum() - _log_det(inner))


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
        return scale * (noise @ _unit_lower(self.factor).T)

    def std(self, scale: Tensor) -> Tensor:
        """See :meth:`Correlation.std`."""
        return scale * _unit_lower(self.factor).square().sum(dim=1).sqrt()

    def total_correlation(self, log_scale: Tensor, mask: Tensor | None) -> Tensor:  # noqa: ARG002
        """See :meth:`Correlation.total_correlation`; the determinant of C C^T is 1."""
        factor = _unit_lower(self.factor)
        if mask is not None:
            factor = factor[mask]
        total = 0.5 * factor.square().sum(dim=1).log().sum()
        return total if mask is None else total - 0.5 * _log_det(factor @ factor.T)


class Kronecker(Correlation):
    """The weights of a layer, one row for each output: W - mean = A (scale * E) B^T.

    A correlates the outputs and B the inputs, both lower triangular with ones on their diagonals.
    It contains the matrix normal distribution (Louizos and Welling 2016, section 3), whose scale is
    an outer product, and the mean field, whose A and B are identities.

    Args:
        shape: how many rows and columns W has.
        rows: the part of A below its diagonal, shape (rows, rows); None where outputs stay
            uncorrelated.
        columns: the part of B below its diagonal, shape (columns, columns), or None.
        bias: whether the last column, of biases, follows the others in the vector of weights.

    Example:
        >>> below = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> correlation = Kronecker((2, 2), below, below)
        >>> correlation.std(torch.ones(4)).square().round(decimals=4).tolist()
        [1.0, 2.0, 2.0, 4.0]
        >>> variances, factor = correlation.output_noise(torch.ones(4), torch.tensor([[1.0, 1.0]]))
        >>> variances.tolist(), factor.tolist()
        ([[5.0, 5.0]], [[1.0, 0.0], [1.0, 1.0]])
    """

    scale_is_own = False

    def __init__(
        self,
        shape: tuple[int, int],
        rows: Tensor | None,
        columns: Tensor | None,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__(shape[0] * shape[1])
        self.shape, self.bias = shape, bias
        self.rows = None if rows is None else nn.Parameter(rows)
        self.columns = None if columns is None else nn.Parameter(columns)

    def deviations(self, scale: Tensor, noise: Tensor) -> Tensor:
        """See :meth:`Correlation.deviations`."""
        return self._flat(self._spread(self._grid(scale * noise), _unit_lower))

    def std(self, scale: Tensor) -> Tensor:
        """See :meth:`Correlation.std`."""
        # Relative to the largest, since the square of a small number underflows.
        most = scale.detach().amax().clamp(min=torch.finfo(scale.dtype).tiny)
        relative = self._grid((scale / most).square())
        squares = self._spread(relative, lambda each: _unit_lower(each).square())
        return most * (self._flat(squares) + _LEAST).sqrt()

    def total_correlation(self, log_scale: Tensor, mask: Tensor | None) -> Tensor:
        """See :meth:`Correlation.total_correlation`; the determinants of A and B are 1."""
        unit, relative = self._relative(log_scale)  # the unit of all scales cancels
        if mask is None or bool(mask.all()):
            return torch.sum(self.std(relative).log() - (log_scale - unit))
        self.check_prunable()
        # Row i of the identity is weight i's noise, so that row i holds what noise i does to all.
        each = torch.eye(self.num_weights, dtype=relative.dtype, device=relative.device)
        factor = self.deviations(relative, each)[:, mask]
        return self.std(relative)[mask].log().sum() - 0.5 * _log_det(factor.T @ factor)

    def check_prunable(self) -> None:
        """Raise TypeError for more than 4,096 weights, since there is no formula for some."""
        if self.num_weights > _LARGEST_DENSE:
            raise TypeError(
                "the KL of a MatrixGaussian of which weights are pruned, or are an embedding's "
                f"padding row, must be that of a layer of at most {_LARGEST_DENSE:,} weights, "
                f"got one of {self.num_weights:,}; predict with the pruned network, "
                "or train the layer with MeanFieldGaussian, by PosteriorByGroup"
            )

    def output_noise(self, scale: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return v and A: the outputs' deviations of a linear layer are A (sqrt(v) * e).

        For one row x of the inputs, with a 1 for the bias, (W - mean) x = A (scale * E) z with
        z = B^T x. The entries of (scale * E) z are independent, of variance
        v_i = sum over j of scale_ij^2 z_j^2; e holds standard normals. Under a matrix normal
        distribution, whose scale is an outer product r c^T, the covariance of the outputs is
        therefore A diag(r^2) A^T, that of the rows, times x^T B diag(c^2) B^T x, that of the
        columns (Louizos and Welling 2016, section 3).

        Args:
            scale: the scale of each weight, shape (n,).
            inputs: rows of the layer's inputs, shape (..., columns), or one less with ``bias``.

        Returns:
            Variances of shape (..., rows), in squared units of the outputs, and A of shape
            (rows, rows), or None where outputs are uncorrelated.
        """
        rows = F.pad(inputs, (0, 1), value=1.0) if self.bias else inputs
        if self.columns is not None:
            rows = rows @ _unit_lower(self.columns)
        variances = rows.square() @ self._grid(scale.square()).T
        return variances, None if self.rows is None else _unit_lower(self.rows)

    def output_variances(self, scale: Tensor, inputs: Tensor, num_outputs: int) -> Tensor:  # noqa: ARG002
        """See :meth:`Correlation.output_variances`."""
        variances, factor = self.output_noise(scale, inputs)
        return variances if factor is None else variances @ factor.square().T

    def _spread(self, grid: Tensor, factor_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Multiply matrices (..., rows, columns) by A from the left and B^T from the right."""
        if self.rows is not None:
            grid = factor_of(self.rows) @ grid
        return grid if self.columns is None else grid @ factor_of(self.columns).T

    def _grid(self, vectors: Tensor) -> Tensor:
        """Arrange vectors (..., n) as matrices (..., rows, columns)."""
        rows, columns = self.shape
        if not self.bias:
            grid: Tensor = vectors.unflatten(-1, self.shape)
            return grid
        weight, bias = vectors.split([rows * (columns - 1), rows], dim=-1)
        return torch.cat([weight.unflatten(-1, (rows, columns - 1)), bias.unsqueeze(-1)], dim=-1)

    def _flat(self, matrices: Tensor) -> Tensor:
        if not self.bias:
            return matrices.flatten(-2)
        return torch.cat([matrices[..., :-1].flatten(-2), matrices[..., -1]], dim=-1)


#: Added to squares of relative scales, since the gradient of the root overflows at 0.
_LEAST = 1e-36
#: The largest group whose covariance is computed as one matrix.
_LARGEST_DENSE = 4096


def _unit_lower(factor: Tensor) -> Tensor:
    ones = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return factor.tril(-1) + ones


def _log_det(matrix: Tensor) -> Tensor:
    """Return log det of a positive definite matrix."""
    return 2.0 * torch.sum(torch.linalg.cholesky(matrix).diagonal().log())
