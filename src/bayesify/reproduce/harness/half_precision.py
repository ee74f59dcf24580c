"""bfloat16 where the machine has instructions for it."""

from __future__ import annotations

import warnings

import torch

from bayesify.app.runs.environment import has_fast_bfloat16

__all__ = ["half_precision"]


def half_precision(device: str) -> torch.autocast:
    """Return a context of bfloat16, or of float32 on a CPU without bfloat16 instructions.

    Without these instructions bfloat16 takes some thirty times as long as with them. float32 is
    reported by a warning, which a job's result keeps.

    Args:
        device: ``"cpu"`` or ``"cuda"``.

    Example:
        >>> with warnings.catch_warnings(action="ignore"):
        ...     half_precision("cpu").fast_dtype
        torch.bfloat16
    """
    has_instructions = device != "cpu" or has_fast_bfloat16()
    if not has_instructions:
        warnings.warn(
            "trained in float32: this CPU has no bfloat16 instructions", UserWarning, stacklevel=2
        )
    return torch.autocast(device, torch.bfloat16, enabled=has_instructions)
