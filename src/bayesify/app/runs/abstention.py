"""Find the threshold of abstention, for exported networks and the service alike."""

from __future__ import annotations

from torch import Tensor

__all__ = ["COVERAGE", "MOST_HELD_OUT", "threshold_of"]

#: Share of the held-out examples that are answered, unless another is asked for.
COVERAGE = 0.95
#: Held-out examples from which the threshold is found.
MOST_HELD_OUT = 2_000


def threshold_of(total: Tensor, coverage: float = COVERAGE) -> float:
    """Return the total uncertainty that a share of held-out examples has at most.

    Args:
        total: of each example, in nats, or in squared units of the target.
        coverage: the share, from 0 to 1.

    Example:
        >>> import torch
        >>> threshold_of(torch.arange(5.0), 0.6)
        3.0
    """
    return float(total.flatten().double().quantile(coverage, interpolation="higher"))
