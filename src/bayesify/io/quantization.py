"""Quantisation of weights to multiples of a step that follows from their posterior."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from bayesify.io.entropy_coding import IntArray

__all__ = ["FloatArray", "quantize", "typical_std"]

FloatArray: TypeAlias = npt.NDArray[np.float64]


def typical_std(means: FloatArray, stds: FloatArray) -> float:
    """Return one std for a tensor: the root of the sum of mean^2 over the sum of (mean / std)^2.

    It is a harmonic mean of the variances with the weights mean^2, so that the many weights of an
    unpruned network that are near zero compared with their std hardly count. It is 0 if all means
    are.

    Example:
        >>> typical_std(np.array([2.0, 0.0]), np.array([0.5, 1.0]))
        0.5
    """
    used = means != 0.0
    if not used.any():
        return 0.0
    squares = np.square(means[used])
    return float(np.sqrt(squares.sum() / (squares / np.square(stds[used])).sum()))


def quantize(means: FloatArray, stds: FloatArray, step: float) -> tuple[IntArray, float]:
    """Quantise the weights of a tensor to the nearest multiples of one step.

    Args:
        means: any shape; exactly zero where pruned.
        stds: the same shape; ignored where pruned.
        step: the step as a multiple of :func:`typical_std`.

    Returns:
        The integers, and the step in the weights' unit, which bfloat16 represents exactly; it is 0
        if all means are. Times the integers it differs from the means by half a step at most.

    Raises:
        ValueError: a mean is not finite, or an integer would not be below 2^30.

    Example:
        >>> integers, size = quantize(np.array([0.0, 1.0, -2.1]), np.full(3, 0.5), step=1.0)
        >>> integers.tolist(), size
        ([0, 2, -4], 0.5)
    """
    if not np.isfinite(means).all():
        raise ValueError("weights must be finite, got some that are not; train again")
    typical = typical_std(means, stds)
    if typical == 0.0:
        return np.zeros(means.shape, np.int64), 0.0
    size = float(torch.tensor(step * typical, dtype=torch.bfloat16))
    largest = float(np.abs(means).max())
    if not largest < size * 2.0**30:
        raise ValueError(
            f"weights must be below 2^30 steps, got {largest:g} and a step of {step:g} times the "
            f"typical std {typical:g}; give a larger step"
        )
    return np.rint(means / size).astype(np.int64), size
