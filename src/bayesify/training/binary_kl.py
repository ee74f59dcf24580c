"""The KL divergence of two Bernoulli distributions, and its inverse, which bounds errors."""

from __future__ import annotations

import math
import sys
from typing import Literal

__all__ = ["binary_kl", "binary_kl_inverse"]

_ROUNDING = 8.0 * sys.float_info.epsilon


def binary_kl(q: float, p: float) -> float:
    """Compute KL(Bernoulli(q) || Bernoulli(p)) in nats.

    Args:
        q: a share, from 0 to 1.
        p: a share, from 0 to 1.

    Raises:
        ValueError: a share is out of its range.

    Example:
        >>> binary_kl(0.5, 0.5), round(binary_kl(0.0, 0.5), 6), binary_kl(0.5, 1.0)
        (0.0, 0.693147, inf)
    """
    for name, share in (("q", q), ("p", p)):
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{name} must be from 0 to 1, got {share}")
    total = 0.0
    for a, b, difference in ((q, p, p - q), (1.0 - q, 1.0 - p, q - p)):
        if a > 0.0 and b == 0.0:
            return math.inf
        if a > 0.0:
            # Where a and b are close, log(b / a) from the difference, which does not cancel.
            is_close = abs(difference) < 0.5 * a
            total -= a * (math.log1p(difference / a) if is_close else math.log(b / a))
    return max(total, 0.0)


def binary_kl_inverse(
    q: float, divergence: float, side: Literal["upper", "lower"] = "upper"
) -> float:
    """Return the largest p with ``binary_kl(q, p) <= divergence``, or with "lower" the least.

    It is found by bisection and rounded outwards, so that the bound holds for the exact divergence.

    Args:
        q: a share, from 0 to 1.
        divergence: in nats, at least 0.
        side: ``"upper"`` for p >= q, ``"lower"`` for p <= q.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> round(binary_kl_inverse(0.0, 0.1), 9) == round(1 - math.exp(-0.1), 9)
        True
        >>> binary_kl_inverse(0.2, 0.0), round(binary_kl_inverse(0.2, 0.05, "lower"), 4)
        (0.2, 0.0952)
    """
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"q must be from 0 to 1, got {q}")
    if not divergence >= 0.0:
        raise ValueError(f"divergence must be at least 0, got {divergence}")
    if side not in ("upper", "lower"):
        raise ValueError(f'side must be "upper" or "lower", got {side!r}')
    if divergence == 0.0:
        return q

    def is_inside(p: float) -> bool:
        # The two terms of the divergence, of the size of |p - q|, cancel.
        return binary_kl(q, p) <= divergence + _ROUNDING * (divergence + abs(p - q))

    inside, outside = q, 1.0 if side == "upper" else 0.0
    if is_inside(outside):
        return outside
    while True:
        middle = 0.5 * (inside + outside)
        if middle in (inside, outside):
            return outside
        if is_inside(middle):
            inside = middle
        else:
            outside = middle
