"""Metrics of class probabilities: error, log loss, Brier score and calibration.

Every function takes probabilities (or their logarithms) of shape (N, K) and class indices of shape
(N,), and returns a Python float over the N examples. For a Bayesian network pass the probabilities
*averaged* over weight samples: that average is its prediction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bayesify.metrics.calibration import expected_calibration_error
from bayesify.metrics.checks import check_probabilities
from bayesify.prediction import BernoulliPredictive, CategoricalPredictive, Predictive
from bayesify.prediction.bernoulli import check_labels
from bayesify.prediction.checks import check_tensors

__all__ = ["brier", "classification_metrics", "error_percent", "nll"]


def error_percent(probs: Tensor, targets: Tensor) -> float:
    """Return the share of examples whose most probable class is wrong, in percent.

    Args:
        probs: class probabilities, shape (N, K).
        targets: class indices, shape (N,), dtype int64.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes or values are invalid.

    Example:
        >>> error_percent(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
        50.0
    """
    check_probabilities(probs, targets)
    return 100.0 * float((probs.argmax(-1) != targets).double().mean())


@torch.no_grad()
def nll(log_probs: Tensor, targets: Tensor) -> float:
    """Return -log p(target), averaged over the examples, in nats per example.

    Args:
        log_probs: logarithm of the class probabilities, shape (N, K); for several weight samples
            the log of the *averaged* probabilities (``CategoricalPredictive.log_mean``). With
            logarithms, a probability that vanishes in float32 still has a finite nll.
        targets: class indices, shape (N,), dtype int64.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes or values are invalid.

    Example:
        >>> round(nll(torch.tensor([[0.5, 0.5], [0.2, 0.8]]).log(), torch.tensor([0, 1])), 4)
        0.4581
    """
    check_probabilities(log_probs, targets, logarithms=True)
    return -float(log_probs.gather(-1, targets.unsqueeze(-1)).double().mean())


@torch.no_grad()
def brier(probs: Tensor, targets: Tensor) -> float:
    """Return the squared error summed over classes and averaged over examples, from 0 to 2.

    Args:
        probs: class probabilities, shape (N, K).
        targets: class indices, shape (N,), dtype int64.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes, dtypes or values are invalid.

    Example:
        >>> round(brier(torch.tensor([[0.8, 0.2]]), torch.tensor([0])), 4)
        0.08
    """
    check_probabilities(probs, targets)
    difference = probs.double()
    difference = difference - torch.nn.functional.one_hot(targets, probs.shape[-1])
    return float(difference.square().sum(-1).mean())


@torch.no_grad()
def classification_metrics(
    predictive: Predictive, mean_probs: Tensor, targets: Tensor, *, ignore_index: int | None = None
) -> dict[str, float]:
    """Return the metrics that every run of classification reports.

    Args:
        predictive: the averaged predictive distribution of N examples, from ``bnn.predict(x)``.
        mean_probs: ``bnn.predict_mean(x).mean`` of the mean-weights network: class probabilities
            (N, ..., K), or the probability of 1 (N, ...).
        targets: class indices, shape (N, ...), dtype int64, or labels 0 and 1. Each of them, such
            as that of a pixel or of a token, counts as an example.
        ignore_index: class index of targets that are left out, as of ``CategoricalLikelihood``.

    Returns:
        ``error_mean_weights`` and ``error_predictive`` in percent, and of the averaged prediction
        ``nll`` in nats per example, ``brier`` (from 0 to 2) and ``ece`` (from 0 to 1).

    Raises:
        TypeError: the predictive distribution is not over classes, or an argument is no tensor.
        ValueError: shapes, dtypes or values are invalid.

    Example:
        >>> p = CategoricalPredictive.from_logits([torch.tensor([[2.0, 0.0], [0.0, 3.0]])])
        >>> sorted(classification_metrics(p, p.mean, torch.tensor([0, 1])))
        ['brier', 'ece', 'error_mean_weights', 'error_predictive', 'nll']
    """
    check_tensors(targets=targets, mean_probs=mean_probs)
    if isinstance(predictive, BernoulliPredictive):
        if ignore_index is not None:
            raise ValueError(
                f"ignore_index must be None where labels are 0 and 1, got {ignore_index}; leave "
                "the labels that do not count out of what the network predicts"
            )
        if not targets.shape == mean_probs.shape == predictive.log_mean.shape[:-1]:
            raise ValueError(
                f"targets and mean_probs must have shape {tuple(predictive.log_mean.shape[:-1])}, "
                f"got {tuple(targets.shape)} and {tuple(mean_probs.shape)}"
            )
        check_labels(targets, tuple(targets.shape))
        log_probs, targets = predictive.log_mean.reshape(-1, 2), targets.reshape(-1).long()
        mean_probs = torch.stack((1.0 - mean_probs, mean_probs), -1).reshape(-1, 2)
    elif isinstance(predictive, CategoricalPredictive):
        log_probs = predictive.log_mean
        if not mean_probs.shape == log_probs.shape == (*targets.shape, log_probs.shape[-1]):
            raise ValueError(
                f"mean_probs must have shape {tuple(log_probs.shape)} and targets "
                f"{tuple(log_probs.shape[:-1])}, got {tuple(mean_probs.shape)} and "
                f"{tuple(targets.shape)}"
            )
        log_probs, mean_probs = log_probs.flatten(0, -2), mean_probs.flatten(0, -2)
        targets = targets.flatten()
        if ignore_index is not None:
            counts = targets != ignore_index
            log_probs, mean_probs, targets = log_probs[counts], mean_probs[counts], targets[counts]
    else:
        raise TypeError(
            "classification metrics need a CategoricalPredictive, from a network with "
            "a CategoricalLikelihood, or a BernoulliPredictive, got "
            f"{type(predictive).__name__}"
        )
    probs = log_probs.exp()
    return {
        "error_mean_weights": error_percent(mean_probs, targets),
        "error_predictive": error_percent(probs, targets),
        "nll": nll(log_probs, targets),
        "brier": brier(probs, targets),
        "ece": expected_calibration_error(probs, targets),
    }
