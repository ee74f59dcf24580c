"""The most bytes of tensors that a step holds at one time."""

from __future__ import annotations

import gc
from collections.abc import Callable

from bayesify.bench.contestants import Step
from bayesify.footprint import MemoryTracker

__all__ = ["built_and_weighed"]


def built_and_weighed(build: Callable[[], Step], *, warmup: int) -> tuple[Step, int]:
    """Build a step, take a few, and count the tensors of one more.

    Counted is what building left behind and still exists (parameters, buffers, the optimiser's
    state, vectors that are kept, the minibatch) and what the step itself makes, at the worst
    moment; not what an operation of PyTorch takes within itself.

    Returns:
        The step, and the bytes.

    Example:
        >>> import torch
        >>> def build():
        ...     kept = torch.zeros(100)
        ...     return lambda: (kept + 1).exp()
        >>> built_and_weighed(build, warmup=1)[1]         # kept, its sum, and the result
        1200
    """
    with MemoryTracker() as tracker:
        step = build()
        for _ in range(warmup):
            step()
        gc.collect()
        tracker.peak = tracker.live
        step()
    return step, tracker.peak
