"""The correlation of the weights of a layer by its outputs and by its inputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bayesify.distributions.correlations import Correlation, log_volume, solved, unit_lower

__all__ = ["Kronecker"]


class Kronecker(Correlation):
    """The weights of a layer, one row for each output: W - mean = A (scale * E) B^T.

    A correlates the outputs and B the inputs, both lower triangular with ones on their diagonals.
    E holds standard normals. It contains the matrix normal distribution (Louizos and Welling 2016,
    section 3), whose scale is an outer product, and the mean field, whose A and B are identities.

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
        return self._flat(self._spread(self._grid(scale * noise), unit_lower))

    def std(self, scale: Tensor) -> Tensor:
        """See :meth:`Correlation.std`."""
        # Relative to the largest, since the square of a small number underflows.
        most = scale.detach().amax().clamp(min=torch.finfo(scale.dtype).tiny)
        relative = self._grid((scale / most).square())
        squares = self._spread(relative, lambda each: unit_lower(each).square())
        return most * (self._flat(squares) + _LEAST).sqrt()

    @torch.no_grad()
    def narrow(self, scale: Tensor, max_std: float) -> Tensor:
        """See :meth:`Correlation.narrow`; a standard deviation is made of many scales."""
        if not bool((self.std(scale) > max_std).any()):
            return scale
        for factor in self.parameters():
            factor.zero_()
        return scale.clamp(max=max_std)

    def total_correlation(self, log_scale: Tensor, mask: Tensor | None) -> Tensor:
        """See :meth:`Correlation.total_correlation`; the determinants of A and B are 1."""
        unit, relative = self._relative(log_scale)  # the unit of all scales cancels
        if mask is None or bool(mask.all()):
            return torch.sum(self.std(relative).log() - (log_scale - unit))
        self.check_prunable()
        factor = self._factor(relative)[:, mask]
        return self.std(relative)[mask].log().sum() - log_volume(factor)

    def kl(
        self,
        log_scale: Tensor,
        shift: Tensor,
        other: Kronecker,
        other_log_scale: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        """See :meth:`Correlation.kl`; the determinants are those of the scales.

        With A_o and B_o of the other, K = A_o^-1 A and L = B_o^-1 B, the whitened deviations are
        K (scale * E) L^T / scale_o. Their variances are (K * K) scale^2 (L * L)^T / scale_o^2.
        """
        if mask is not None and not bool(mask.all()):
            return self._marginal_kl(log_scale, shift, other, other_log_scale, mask)
        unit = other_log_scale.amax()  # the unit of all scales cancels
        variances = self._grid((2.0 * (log_scale - unit)).exp())
        moved = self._grid(shift / unit.exp())
        if self.rows is not None and other.rows is not None:
            variances = solved(other.rows, unit_lower(self.rows)).square() @ variances
            moved = solved(other.rows, moved)
        if self.columns is not None and other.columns is not None:
            variances = variances @ solved(other.columns, unit_lower(self.columns)).square().T
            moved = solved(other.columns, moved.T).T
        least = torch.finfo(log_scale.dtype).tiny
        before = self._grid((2.0 * (other_log_scale - unit)).exp().clamp(min=least))
        squares = (variances + moved.square()) / before - 1.0
        return 0.5 * squares.sum() - (log_scale - other_log_scale).sum()

    def check_prunable(self) -> None:
        """Raise TypeError for more than 4,096 weights: the KL of some takes a dense matrix."""
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
            rows = rows @ unit_lower(self.columns)
        variances = rows.square() @ self._grid(scale.square()).T
        return variances, None if self.rows is None else unit_lower(self.rows)

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
