"""How good class probabilities are: error, log loss, Brier score and calibration.

Every function takes probabilities (or their logarithms) of shape (N, K) and class indices of shape
(N,), and returns a Python float over the N data. For a Bayesian network give the probabilities
*averaged* over weight samples: that average is what the network claims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bayesify.predictive import CategoricalPredictive, Predictive

__all__ = [
    "Reliability",
    "brier",
    "classification_metrics",
    "error_percent",
    "expected_calibration_error",
    "nll",
    "reliability",
]


@dataclass(frozen=True, eq=False)
class Reliability:
    """Confidence against accuracy, in equal bins of confidence.

    Confidence is the probability of the most probable class. All tensors are on the CPU, the
    first three in float64.

    Args:
        edges: limits of the bins from 0 to 1, shape (bins + 1,); each bin holds its lower limit,
            the last one both.
        confidence: mean confidence of the data of each bin, shape (bins,), nan where empty.
        accuracy: share of them that is classified correctly, shape (bins,), nan where empty.
        counts: how many data each bin holds, shape (bins,), int64.
    """

    edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    counts: Tensor


def error_percent(probs: Tensor, y: Tensor) -> float:
    """Share of the data whose most probable class is not the true one, in percent.

    Args:
        probs: class probabilities, shape (N, K).
        y: class indices, shape (N,), dtype int64.

    Raises:
        ValueError: shapes, dtypes or values do not fit.

    Example:
        >>> error_percent(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        50.0
    """
    _check(probs, y)
    return 100.0 * float((probs.argmax(-1) != y).double().mean())


def nll(log_probs: Tensor, y: Tensor) -> float:
    """-log p(y), averaged over the data, in nats per example.

    Args:
        log_probs: logarithm of the class probabilities, shape (N, K); for several weight samples
            the log of the *averaged* probabilities (``CategoricalPredictive.log_mean``). A
            logarithm, so that a class thought impossible in float32 still has a finite price.
        y: class indices, shape (N,), dtype int64.

    Raises:
        ValueError: shapes, dtypes or values do not fit.

    Example:
        >>> round(nll(torch.tensor([[0.5, 0.5], [0.2, 0.8]]).log(), torch.tensor([0, 1])), 4)
        0.4581
    """
    _check(log_probs, y, logarithms=True)
    return -float(log_probs.gather(-1, y.unsqueeze(-1)).double().mean())


def brier(probs: Tensor, y: Tensor) -> float:
    """Squared distance to the truth, summed over classes, averaged over data: from 0 to 2.

    Args:
        probs: class probabilities, shape (N, K).
        y: class indices, shape (N,), dtype int64.

    Raises:
        ValueError: shapes, dtypes or values do not fit.

    Example:
        >>> round(brier(torch.tensor([[0.8, 0.2]]), torch.tensor([0])), 4)
        0.08
    """
    _check(probs, y)
    difference = probs.double()
    difference = difference - torch.nn.functional.one_hot(y, probs.shape[-1])
    return float(difference.square().sum(-1).mean())


def expected_calibration_error(probs: Tensor, y: Tensor, bins: int = 15) -> float:
    """Mean of |accuracy - confidence| over equal bins of confidence, as a fraction from 0 to 1.

    The L1 error of the top label: each bin weighs as many data as it holds (Guo et al. 2017).
    Summed in float64; in float32 it would be off by 1e-4 for 60,000 data.

    Args:
        probs: class probabilities, shape (N, K).
        y: class indices, shape (N,), dtype int64.
        bins: how many equal bins from 0 to 1.

    Raises:
        ValueError: shapes, dtypes or values do not fit, or ``bins`` is below 1.

    Example:
        >>> probs = torch.tensor([[0.75, 0.25], [0.75, 0.25]])
        >>> expected_calibration_error(probs, torch.tensor([0, 1]))
        0.25
    """
    diagram = reliability(probs, y, bins)
    share = diagram.counts / diagram.counts.sum()
    # nansum: the accuracy of an empty bin is nan.
    return float((share * (diagram.accuracy - diagram.confidence).abs()).nansum())


def reliability(probs: Tensor, y: Tensor, bins: int = 15) -> Reliability:
    """Accuracy and mean confidence in equal bins of confidence, for a reliability diagram.

    Args:
        probs: class probabilities, shape (N, K).
        y: class indices, shape (N,), dtype int64.
        bins: how many equal bins from 0 to 1.

    Raises:
        ValueError: shapes, dtypes or values do not fit, or ``bins`` is below 1.

    Example:
        >>> r = reliability(torch.tensor([[0.7, 0.3], [0.9, 0.1]]), torch.tensor([1, 0]), bins=2)
        >>> r.counts.tolist(), round(r.confidence[1].item(), 3), r.accuracy[1].item()
        ([0, 2], 0.8, 0.5)
    """
    _check(probs, y, bins=bins)
    confidence, predicted = probs.detach().double().cpu().max(-1)
    edges = torch.linspace(0.0, 1.0, bins + 1, dtype=torch.float64)
    # A confidence of 1, or above by rounding, belongs to the last bin.
    index = (torch.bucketize(confidence, edges, right=True) - 1).clamp_max(bins - 1)
    counts = torch.bincount(index, minlength=bins)
    sums = torch.zeros(2, bins, dtype=torch.float64)
    sums[0].index_add_(0, index, confidence)
    sums[1].index_add_(0, index, (predicted == y.cpu()).double())
    means = sums / counts
    return Reliability(edges, means[0], means[1], counts)


def classification_metrics(
    predictive: Predictive, mean_probs: Tensor, y: Tensor
) -> dict[str, float]:
    """The numbers that every run reports.

    Args:
        predictive: the averaged predictive distribution of N data, from ``bnn.predict(x)``.
        mean_probs: class probabilities of the mean-weights network, shape (N, K), from
            ``bnn.predict_mean(x).mean``.
        y: class indices, shape (N,), dtype int64.

    Returns:
        ``error_mean_weights`` and ``error_predictive`` in percent, and of the averaged predictive
        ``nll`` in nats per example, ``brier`` (from 0 to 2) and ``ece`` (from 0 to 1).

    Raises:
        TypeError: the predictive distribution is not one of classes.
        ValueError: shapes, dtypes or values do not fit.

    Example:
        >>> p = CategoricalPredictive.from_logits([torch.tensor([[2.0, 0.0], [0.0, 3.0]])])
        >>> sorted(classification_metrics(p, p.mean, torch.tensor([0, 1])))
        ['brier', 'ece', 'error_mean_weights', 'error_predictive', 'nll']
    """
    if not isinstance(predictive, CategoricalPredictive):
        raise TypeError(
            "classification metrics need a CategoricalPredictive, as a network with a "
            f"CategoricalLikelihood predicts, got {type(predictive).__name__}"
        )
    probs = predictive.mean
    return {
        "error_mean_weights": error_percent(mean_probs, y),
        "error_predictive": error_percent(probs, y),
        "nll": nll(predictive.log_mean, y),
        "brier": brier(probs, y),
        "ece": expected_calibration_error(probs, y),
    }


#: How far the probabilities of one datum may sum from 1; half precision stays well within.
_TOLERANCE = 0.01


def _check(probs: Tensor, y: Tensor, *, logarithms: bool = False, bins: int = 1) -> None:
    name = "log_probs" if logarithms else "probs"
    if probs.dim() != 2 or probs.shape[0] < 1 or probs.shape[1] < 2:
        raise ValueError(
            f"{name} must have shape (N, K) with N of at least 1 and K of at least 2, got "
            f"{tuple(probs.shape)}"
        )
    if not probs.dtype.is_floating_point:
        raise ValueError(f"{name} must be floating point, got {probs.dtype}")
    if y.shape != probs.shape[:1] or y.dtype != torch.int64:
        raise ValueError(
            f"y must be class indices of shape ({probs.shape[0]},) and dtype torch.int64, got "
            f"shape {tuple(y.shape)} and {y.dtype}"
        )
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= probs.shape[1]:
        raise ValueError(
            f"y must lie from 0 to {probs.shape[1] - 1}, for {name} has {probs.shape[1]} classes, "
            f"got {low if low < 0 else high}"
        )
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    values = probs.detach().double().exp() if logarithms else probs.detach().double()
    off = float((values.sum(-1) - 1.0).abs().max())
    least = float(values.min())
    # Written so that nan fails.
    if not (off <= _TOLERANCE and least >= -_TOLERANCE):
        kind = "logarithms of probabilities" if logarithms else "probabilities"
        mend = "log_softmax(-1)" if logarithms else "softmax(-1)"
        raise ValueError(
            f"every row of {name} must hold {kind}, which sum to 1, but a sum is off by {off:.3g} "
            f"and the least probability is {least:.3g}; turn logits into {kind} with {mend}"
        )
