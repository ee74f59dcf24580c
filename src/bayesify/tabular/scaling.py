"""Standardise the columns of a table: subtract the mean, divide by the standard deviation.

scikit-learn's ``StandardScaler`` is not used: squares of values beyond 1e154 overflow in it, and it
then leaves the column unscaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

__all__ = ["Scaling"]

#: Columns with a relative spread below this are measured by differences to their first row.
_FAR_FROM_0 = 1e-6


@dataclass(frozen=True, eq=False)
class Scaling:
    """Shift and scale of columns that are standardised for training.

    Args:
        shift: means of the columns, shape (F,), float64; or one number.
        scale: standard deviations of the columns, as ``shift``; 1 for a constant column.

    Example:
        >>> scaling = Scaling.of(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        >>> scaling.standardised(torch.tensor([[1.0, 5.0], [4.0, 6.0]]))
        tensor([[-1.,  0.],
                [ 2.,  1.]], dtype=torch.float64)
        >>> huge = torch.tensor([[1e200], [3e200]], dtype=torch.float64)
        >>> Scaling.of(huge).standardised(huge).round(decimals=9).flatten()
        tensor([-1.,  1.], dtype=torch.float64)
    """

    shift: Tensor
    scale: Tensor

    @classmethod
    def of(cls, values: Tensor, weights: Tensor | None = None) -> Self:
        """Return the scaling that gives columns (N, F) mean 0 and standard deviation 1.

        Args:
            values: shape (N, F), finite.
            weights: the number of times that each row counts, shape (N,), positive; None for once.
        """
        values = values.to(torch.float64)
        counts = values.new_ones(len(values)) if weights is None else weights.to(values)
        share = (counts / counts.sum()).unsqueeze(-1)
        mean, std, unit = _moments(values, share)
        far = std < _FAR_FROM_0 * mean.abs()
        if bool(far.any()):
            # Differences to the first row keep the digits that division by the unit would round.
            first = values[0]
            near, spread, size = _moments(values - torch.where(far, first, 0.0), share)
            mean = torch.where(far, first / unit + near * (size / unit), mean)
            std = torch.where(far, spread * (size / unit), std)
        # A column is constant if its spread is no more than rounding.
        varies = std > 4.0 * torch.finfo(torch.float64).eps * mean.abs()
        return cls(mean * unit, torch.where(varies, std * unit, 1.0))

    @classmethod
    def of_numbers(cls, shift: float, scale: float) -> Self:
        """Return the scaling of one column with this mean and standard deviation."""
        return cls(*torch.tensor([shift, scale], dtype=torch.float64))

    def standardised(self, values: Tensor) -> Tensor:
        """Return (values - shift) / scale, in float64."""
        scaled: Tensor = (values.to(torch.float64) - self.shift) / self.scale
        return scaled


def _moments(values: Tensor, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and standard deviation of columns in units of their largest value; the units."""
    # In these units no square overflows or vanishes.
    size = values.abs().amax(0)
    unit = torch.where(size > 0.0, size, 1.0)
    first = values[:1] / unit
    part = values / unit - first
    middle = (share * part).sum(0)
    spread = (share * (part - middle).square()).sum(0).sqrt()
    return first.squeeze(0) + middle, spread, unit
