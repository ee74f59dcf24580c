"""Standardised columns: shift and scale of a table, undone outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

__all__ = ["Scaling"]


@dataclass(frozen=True, eq=False)
class Scaling:
    """Shift and scale of columns: what is standardised for training and undone outside.

    Args:
        shift: the columns' means, shape (F,), float64.
        scale: their standard deviations, shape (F,), float64; 1 for a constant column.

    Example:
        >>> scaling = Scaling.of(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        >>> scaling.standardised(torch.tensor([[1.0, 5.0], [4.0, 6.0]]))
        tensor([[-1.,  0.],
                [ 2.,  1.]], dtype=torch.float64)
    """

    shift: Tensor
    scale: Tensor

    @classmethod
    def of(cls, values: Tensor, weights: Tensor | None = None) -> Self:
        """The scaling that gives columns (N, F) mean 0 and standard deviation 1.

        Args:
            values: shape (N, F), finite.
            weights: how many times each row counts, shape (N,), positive; None for once.
        """
        values = values.to(torch.float64)
        counts = values.new_ones(len(values)) if weights is None else weights.to(values)
        # In units of the largest magnitude, so that no square overflows or vanishes.
        size = values.abs().amax(0)
        unit = torch.where(size > 0.0, size, 1.0)
        # From the first row, so that little is lost of columns that vary far from 0.
        first = values[:1] / unit
        part = values / unit - first
        share = (counts / counts.sum()).unsqueeze(-1)
        middle = (share * part).sum(0)
        spread = (share * (part - middle).square()).sum(0).sqrt()
        shift = first.squeeze(0) + middle
        # A column is constant where its spread is no more than rounding.
        varies = spread > 4.0 * torch.finfo(torch.float64).eps * shift.abs()
        return cls(shift * unit, torch.where(varies, spread * unit, 1.0))

    def standardised(self, values: Tensor) -> Tensor:
        """(values - shift) / scale, in float64."""
        scaled: Tensor = (values.to(torch.float64) - self.shift) / self.scale
        return scaled

    def to_json(self) -> dict[str, list[float]]:
        """Both as lists of numbers."""
        return {"shift": self.shift.tolist(), "scale": self.scale.tolist()}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """What ``to_json`` wrote.

        Example:
            >>> scaling = Scaling.of(torch.tensor([[1.0], [3.0]]))
            >>> Scaling.from_json(scaling.to_json()).shift
            tensor([2.], dtype=torch.float64)
        """
        shift, scale = (torch.tensor(stored[n], dtype=torch.float64) for n in ("shift", "scale"))
        return cls(shift, scale)
