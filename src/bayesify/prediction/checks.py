"""Checks of tensors, probabilities and levels, shared by predictions, objectives and metrics."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_level", "check_logits", "check_sums", "check_tensors", "signed"]

_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)

#: Largest error of the sum of the probabilities of an example: bfloat16 rounds a logarithm below
#: -8, and so every probability of thousands of equal classes, by up to 1 / 32.
_TOLERANCE = 0.04


def check_tensors(**values: object) -> None:
    """Raise TypeError unless all are tensors, given by their names.

    Example:
        >>> check_tensors(targets=[0, 1])
        Traceback (most recent call last):
        TypeError: targets must be a tensor, got list; use torch.as_tensor(targets)
    """
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} must be a tensor, got {type(value).__name__}; use torch.as_tensor({name})"
            )


def signed(values: Tensor) -> Tensor:
    """Return unsigned integers of several bytes as int64, and other tensors as they are.

    PyTorch neither compares nor adds them.

    Example:
        >>> signed(torch.tensor([3], dtype=torch.uint16)) > 2
        tensor([True])
    """
    return values.to(torch.int64) if values.dtype in _UNSIGNED else values


def check_logits(logits: Tensor) -> None:
    """Raise TypeError unless logits are floating-point numbers.

    Example:
        >>> import torch
        >>> check_logits(torch.tensor([[3, 0, 0]]))
        Traceback (most recent call last):
        TypeError: logits must be floating-point numbers, got torch.int64; use logits.float()
    """
    if not logits.is_floating_point():
        raise TypeError(
            f"logits must be floating-point numbers, got {logits.dtype}; use logits.float()"
        )


def check_sums(name: str, values: Tensor, *, logarithms: bool = False) -> None:
    """Raise ValueError unless every row holds probabilities, or their logarithms.

    Example:
        >>> import torch
        >>> check_sums("probs", torch.tensor([[0.5, 0.5]]))
        >>> check_sums("probs", torch.tensor([[2.0, -1.0]]))
        Traceback (most recent call last):
        ValueError: every row of probs must hold probabilities, which sum to 1, but a sum is off ...
    """
    if not values.numel():
        return
    probs = values.detach().double().exp() if logarithms else values.detach().double()
    off = float((probs.sum(-1) - 1.0).abs().max())
    least = float(probs.min())
    # Written so that nan fails.
    if not (off <= _TOLERANCE and least >= -_TOLERANCE):
        kind = "logarithms of probabilities" if logarithms else "probabilities"
        mend = "log_softmax(-1)" if logarithms else "softmax(-1)"
        raise ValueError(
            f"every row of {name} must hold {kind}, which sum to 1, but a sum is off by {off:.3g} "
            f"and the least probability is {least:.3g}; turn logits into {kind} with {mend}"
        )


def check_level(name: str, level: Any) -> None:
    """Check that a level is one number strictly between 0 and 1.

    Raises:
        TypeError: it is not one number.
        ValueError: it is out of range.

    Example:
        >>> check_level("q", [0.1, 0.9])
        Traceback (most recent call last):
        TypeError: q must be one number between 0 and 1, got [0.1, 0.9]; call this once for each ...
    """
    # An array or tensor without axes is one number.
    if not isinstance(level, Real) and getattr(level, "ndim", None) != 0:
        raise TypeError(
            f"{name} must be one number between 0 and 1, got {level!r}; call this once for each "
            "level"
        )
    if not 0.0 < level < 1.0:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {level}")
