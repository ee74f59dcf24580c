"""Temperature scaling: the confidence of a trained classifier, set on held-out examples."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from bayesify.prediction.checks import check_logits, check_tensors

__all__ = ["logit_temperature"]

#: Halvings of an interval, after which it is below the rounding of float32.
_BISECTIONS = 40


def logit_temperature(logits: Tensor, targets: Tensor) -> float:
    """Return the temperature T > 0 that minimises the nll of softmax(logits / T).

    Temperature scaling (Guo et al. 2017): T changes the confidence of a classifier, never its most
    probable class. Use held-out examples, since on the training set T makes it more confident.

    Args:
        logits: outputs of a trained network, shape (N, K), as from ``bnn.mean_outputs(x)``.
        targets: class indices, shape (N,), dtype int64.

    Raises:
        TypeError: an argument is no tensor, or the logits are no floating-point numbers.
        ValueError: shapes or values are invalid; or no temperature is best, because every example
            has its largest logit at its target, so that the nll falls as T approaches 0, or because
            the logits are no better than chance, so that it falls as T grows.

    Example:
        >>> logits = 10.0 * torch.eye(2)[[0, 0, 0, 1]]  # confident, and wrong once in four
        >>> round(logit_temperature(logits, torch.tensor([0, 0, 1, 1])), 3)
        9.102
    """
    check_tensors(logits=logits, targets=targets)
    check_logits(logits)
    if logits.dim() != 2 or targets.shape != logits.shape[:1] or not len(targets):
        raise ValueError(
            f"logits must have shape (N, K) and targets (N,), got {tuple(logits.shape)} and "
            f"{tuple(targets.shape)}"
        )
    if not bool(logits.isfinite().all()):
        raise ValueError("logits must be finite, got inf or nan")
    last = logits.shape[1] - 1
    if targets.dtype != torch.int64 or not 0 <= int(targets.min()) <= int(targets.max()) <= last:
        raise ValueError(
            f"targets must be class indices from 0 to {last} of dtype int64, got "
            f"{targets.dtype} from {targets.min()} to {targets.max()}"
        )
    wide = logits.detach().double()
    of_target = wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    if bool((of_target >= wide.max(-1).values).all()):
        raise ValueError(
            "no temperature is best: the largest logit of each example is that of its target; use "
            "more held-out examples"
        )
    if float(of_target.sum()) <= float(wide.mean(-1).sum()):
        raise ValueError(
            "no temperature is best: the logits predict the targets no better than chance"
        )

    def slope(inverse: float) -> float:
        """Return the derivative of the nll in 1 / T, which rises with 1 / T (the nll is convex)."""
        expected = (torch.softmax(inverse * wide, -1) * wide).sum(-1)
        return float((expected - of_target).mean())

    # Powers of two around the zero, so that the bisection is precise for every scale of logits.
    low, high = 0.5, 1.0
    while slope(high) < 0.0:
        low, high = high, 2.0 * high
    while slope(low) >= 0.0 and low > sys.float_info.min:
        low, high = 0.5 * low, low
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if slope(middle) < 0.0 else (low, middle)
    return 2.0 / (low + high)
