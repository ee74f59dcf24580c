"""Calibration of the top label: reliability diagram and expected calibration errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bayesify.metrics.checks import check_probabilities

__all__ = [
    "Reliability",
    "adaptive_calibration_error",
    "calibration_error",
    "expected_calibration_error",
    "reliability",
]


@dataclass(frozen=True, eq=False)
class Reliability:
    """Confidence against accuracy, in bins of confidence.

    Confidence is the probability of the most probable class. All tensors are on the CPU, the
    first three in float64.

    Args:
        edges: limits of the bins from 0 to 1, shape (num_bins + 1,); each bin includes its lower
            limit, the last bin both limits.
        confidence: mean confidence of the examples of each bin, shape (num_bins,), nan where empty.
        accuracy: share of them that is classified correctly, shape (num_bins,), nan where empty.
        counts: number of examples in each bin, shape (num_bins,), int64.

    Example:
        >>> r = reliability(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]), 2)
        >>> r.counts, r.accuracy[1].item(), r.mean_gap
        (tensor([0, 2]), 0.5, 0.25)
    """

    edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    counts: Tensor

    @property
    def mean_gap(self) -> float:
        """The mean of |accuracy - confidence|, each bin weighted by its number of examples."""
        share = self.counts.double() / self.counts.sum()
        # nansum: the accuracy of an empty bin is nan.
        return float((share * (self.accuracy - self.confidence).abs()).nansum())


def expected_calibration_error(probs: Tensor, targets: Tensor, num_bins: int = 15) -> float:
    """Return the mean of |accuracy - confidence| over equal bins of confidence, from 0 to 1.

    The L1 error of the top label: each bin is weighted by its number of examples (Guo et al.
    2017). Summed in float64, because float32 sums over 60,000 confident examples err by 3e-5.

    Args:
        probs: class probabilities, shape (N, K).
        targets: class indices, shape (N,), dtype int64.
        num_bins: number of equal bins from 0 to 1.

    Raises:
        TypeError: an argument is no tensor, or ``num_bins`` no whole number.
        ValueError: shapes, dtypes or values are invalid, or ``num_bins`` is below 1.

    Example:
        >>> probs = torch.tensor([[0.75, 0.25], [0.75, 0.25]])
        >>> expected_calibration_error(probs, torch.tensor([0, 1]))
        0.25
    """
    return reliability(probs, targets, num_bins).mean_gap


def adaptive_calibration_error(probs: Tensor, targets: Tensor, num_bins: int = 15) -> float:
    """Return the calibration error over bins with equal numbers of examples, from 0 to 1.

    Bins of equal width are nearly empty where the network is rarely unsure, and their error is
    then mostly noise (Nixon et al. 2019, section 3.3; here of the top label). Examples of equal
    confidence share a bin, so that the result does not depend on their order.

    Args:
        probs: class probabilities, shape (N, K).
        targets: class indices, shape (N,), dtype int64.
        num_bins: number of bins, each of N / num_bins examples.

    Raises:
        TypeError: an argument is no tensor, or ``num_bins`` no whole number.
        ValueError: shapes, dtypes or values are invalid, or ``num_bins`` is below 1.

    Example:
        >>> probs = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.9, 0.1], [0.9, 0.1]])
        >>> round(adaptive_calibration_error(probs, torch.tensor([0, 1, 0, 0]), num_bins=2), 4)
        0.175
    """
    check_probabilities(probs, targets, num_bins=num_bins)
    ordered = _confidence(probs)[0].sort().values
    inner = ordered[[number * len(ordered) // num_bins for number in range(1, num_bins)]]
    edges = torch.cat((torch.zeros(1), inner, torch.ones(1)))
    return _binned(probs, targets, edges.double()).mean_gap


def calibration_error(
    probs: Tensor, targets: Tensor, num_bins: int = 15, *, norm: Literal["l1", "l2", "max"] = "l1"
) -> float:
    """Return the top-label calibration error in a given norm over equal bins of confidence.

    The norm ``"l1"`` is :func:`expected_calibration_error`.

    Args:
        probs: class probabilities, shape (N, K).
        targets: class indices, shape (N,), dtype int64.
        num_bins: number of equal bins from 0 to 1.
        norm: ``"l1"`` for the mean gap, ``"l2"`` for its root mean square, ``"max"`` for the
            largest gap.

    Raises:
        TypeError: an argument is no tensor, or ``num_bins`` no whole number.
        ValueError: shapes, dtypes or values are invalid, or ``num_bins`` is below 1.

    Example:
        >>> probs = torch.tensor([[0.75, 0.25], [0.75, 0.25]])
        >>> calibration_error(probs, torch.tensor([0, 1]), norm="max")
        0.25
    """
    check_probabilities(probs, targets, num_bins=num_bins)
    if norm not in ("l1", "l2", "max"):
        raise ValueError(f'norm must be "l1", "l2" or "max", got {norm!r}')
    found = reliability(probs, targets, num_bins)
    if norm == "l1":
        return found.mean_gap
    filled = found.counts > 0
    gaps = (found.accuracy - found.confidence)[filled].abs()
    if norm == "max":
        return float(gaps.max())
    share = found.counts[filled].double() / found.counts.sum()
    return float((share * gaps.square()).sum().sqrt())


def reliability(probs: Tensor, targets: Tensor, num_bins: int = 15) -> Reliability:
    """Compute accuracy and mean confidence in equal bins of confidence.

    Args:
        probs: class probabilities, shape (N, K).
        targets: class indices, shape (N,), dtype int64.
        num_bins: number of equal bins from 0 to 1.

    Raises:
        TypeError: an argument is no tensor, or ``num_bins`` no whole number.
        ValueError: shapes, dtypes or values are invalid, or ``num_bins`` is below 1.

    Example:
        >>> probs = torch.tensor([[0.7, 0.3], [0.9, 0.1]])
        >>> r = reliability(probs, torch.tensor([1, 0]), num_bins=2)
        >>> r.counts.tolist(), round(r.confidence[1].item(), 3), r.accuracy[1].item()
        ([0, 2], 0.8, 0.5)
    """
    check_probabilities(probs, targets, num_bins=num_bins)
    return _binned(probs, targets, torch.arange(num_bins + 1, dtype=torch.float64) / num_bins)


def _confidence(probs: Tensor) -> tuple[Tensor, Tensor]:
    confidence, predicted = probs.detach().double().cpu().max(-1)
    return confidence, predicted


def _binned(probs: Tensor, targets: Tensor, edges: Tensor) -> Reliability:
    confidence, predicted = _confidence(probs)
    num_bins = len(edges) - 1
    # In the dtype of the probabilities, as .9 of float32 is less than .9 of float64.
    limits = edges.to(probs.dtype).double()
    # A confidence of 1, or above by rounding, belongs to the last bin.
    index = (torch.bucketize(confidence, limits, right=True) - 1).clamp_max(num_bins - 1)
    counts = torch.bincount(index, minlength=num_bins)
    sums = torch.zeros(2, num_bins, dtype=torch.float64)
    sums[0].index_add_(0, index, confidence)
    sums[1].index_add_(0, index, (predicted == targets.cpu()).double())
    means = sums / counts
    return Reliability(edges, means[0], means[1], counts)
