"""Transforms of functions that are at work: those of ``torch.func``, and forward-mode derivatives.

PyTorch has no public functions that tell.
"""

from __future__ import annotations

from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

__all__ = ["is_transformed", "transform_levels"]


def transform_levels() -> tuple[int | None, int]:
    """Return the levels of the transforms of ``torch.func`` and of forward mode around.

    Example:
        >>> transform_levels()
        (None, -1)
    """
    return maybe_current_level(), forward_ad._current_level


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` or forward mode is at work.

    Example:
        >>> import torch
        >>> found = []
        >>> def noted(x):
        ...     found.append(is_transformed())
        ...     return x
        >>> noted(torch.ones(2)).shape, torch.vmap(noted)(torch.ones(2)).shape, found
        (torch.Size([2]), torch.Size([2]), [False, True])
    """
    return transform_levels() != (None, -1)
