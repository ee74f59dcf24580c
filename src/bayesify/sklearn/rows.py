"""The rows of a training table, such that only what they say matters, and not their order."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["Array", "Rows", "checked_weights"]

Array = npt.NDArray[Any]


class Rows(NamedTuple):
    """Different rows, and how many times each counts.

    Rows of weight 0 are left out, equal ones are one with the sum of their weights, and all are
    sorted by their first column, then their second and so on. So a row of weight 2 *is* the row
    twice, to the last bit of what is trained on it, and no unit of a column changes the order.

    Example:
        >>> x, y = np.array([[2.0], [1.0], [1.0], [3.0]]), np.array([[0.0], [1.0], [1.0], [0.0]])
        >>> rows = Rows.of(x, y, np.array([1.0, 1.0, 1.0, 0.0]))
        >>> rows.inputs[:, 0], rows.weights
        (tensor([1., 2.], dtype=torch.float64), tensor([2., 1.], dtype=torch.float64))
    """

    #: Shape (M, F), float64.
    inputs: Tensor
    #: Shape (M, K), float64; of classes their indices, K = 1.
    targets: Tensor
    #: Shape (M,), float64, positive.
    weights: Tensor

    @classmethod
    def of(cls, inputs: Array, targets: Array, weights: Array) -> Self:
        """The rows of a table.

        Args:
            inputs: shape (N, F), finite.
            targets: shape (N, K), finite.
            weights: shape (N,), at least 0 and not all 0.
        """
        kept = weights > 0.0
        # Adding 0 turns -0 into 0, which is the same number in other bytes.
        table = np.ascontiguousarray(np.column_stack([inputs, targets])[kept], np.float64) + 0.0
        _, first, place = np.unique(_sortable(table), return_index=True, return_inverse=True)
        # Sorted, so that the sums of weights do not depend on the order of the rows either.
        order = np.lexsort((weights[kept], place))
        sums = np.bincount(place[order], weights=weights[kept][order])
        rows = torch.from_numpy(table[first])
        cut = inputs.shape[1]
        return cls(rows[:, :cut].contiguous(), rows[:, cut:].contiguous(), torch.from_numpy(sums))

    def part(self, index: Tensor) -> Self:
        """Some of the rows."""
        return type(self)(*(column[index] for column in self))

    def split(self, fraction: float, seed: int) -> tuple[Self, Self]:
        """A part to train on and a random one, of this fraction of the rows, to hold out.

        Raises:
            ValueError: one of the two would be empty.
        """
        count = len(self.weights)
        held = round(fraction * count)
        if not 0 < held < count:
            raise ValueError(
                f"early stopping must hold out some rows and leave some, but validation_fraction="
                f"{fraction} of {count} different rows with positive weight is {held}; give more "
                "rows or another fraction"
            )
        order = torch.from_numpy(np.random.default_rng(seed).permutation(count))
        return self.part(order[held:]), self.part(order[:held])


def _sortable(table: Array) -> Array:
    """Each row of finite float64 as a string of bytes, which sorts as its numbers do."""
    bits = table.view(np.uint64)
    sign = np.uint64(1 << 63)
    # Negative numbers sort by their magnitude backwards, and before the others.
    ordered = np.where(bits & sign, ~bits, bits | sign).astype(">u8")
    found: Array = ordered.view(np.dtype((np.void, 8 * table.shape[1]))).ravel()
    return found


def checked_weights(sample_weight: Any, num_rows: int) -> Array:
    """One weight for each row, ones by default, shape (N,), float64.

    Raises:
        ValueError: they are not of that shape, one is negative, NaN or infinite, or all are 0.

    Example:
        >>> checked_weights(None, 2), checked_weights(3, 2)
        (array([1., 1.]), array([3., 3.]))
    """
    weights: Array = np.asarray(1.0 if sample_weight is None else sample_weight, dtype=np.float64)
    if weights.ndim == 0:
        weights = np.full(num_rows, weights)
    if weights.ndim != 1:
        raise ValueError(f"Sample weights must be 1D array or scalar, got {weights.ndim}D array")
    if weights.shape != (num_rows,):
        raise ValueError(
            f"sample_weight.shape == {weights.shape}, expected {(num_rows,)}: one for each row"
        )
    if not np.isfinite(weights).all() or (weights < 0.0).any():
        raise ValueError("sample_weight must be finite and at least 0; mend the others")
    if not (weights > 0.0).any():
        raise ValueError("sample_weight must be positive for at least one row, got only zeros")
    return weights
