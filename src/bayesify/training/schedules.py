"""Learning-rate schedules, stepped once a minibatch."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

__all__ = ["ScheduleFactory", "constant", "cosine", "kl_warmup"]

#: Makes a scheduler for an optimiser and the number of steps of the whole run.
ScheduleFactory = Callable[[Optimizer, int], LRScheduler]


def constant(optimizer: Optimizer, total_steps: int) -> LRScheduler:  # noqa: ARG001
    """The optimiser's own rate throughout.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        >>> constant(sgd, 10).get_last_lr()
        [0.5]
    """
    return LambdaLR(optimizer, lambda _: 1.0)


def cosine(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """Half a cosine from the optimiser's rate to zero (Loshchilov and Hutter 2017).

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        >>> schedule = cosine(sgd, 2)
        >>> sgd.step(); schedule.step(); schedule.get_last_lr()
        [0.25]
    """

    def factor(step: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * min(step, total_steps) / total_steps))

    return LambdaLR(optimizer, factor)


def kl_warmup(step: int, warmup_steps: float) -> float:
    """The factor on the KL at a step (from 0) of its linear warm-up.

    Example:
        >>> [kl_warmup(step, 2) for step in range(3)]
        [0.3333333333333333, 0.6666666666666666, 1.0]
    """
    return 1.0 if step >= warmup_steps else (step + 1) / (warmup_steps + 1)
