"""Learning-rate schedules, stepped once per minibatch, and the warm-up of the KL."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from bayesify.noise.arguments import number_from_0, positive_number

__all__ = [
    "KLWarmup",
    "ScheduleFactory",
    "check_length",
    "check_scaled_rate",
    "check_schedule",
    "constant",
    "cosine",
    "recompute_rates",
]

#: A function of an optimiser and the number of steps of the whole run that builds a scheduler.
ScheduleFactory = Callable[[Optimizer, int], LRScheduler]


def constant(optimizer: Optimizer, total_steps: int) -> LRScheduler:  # noqa: ARG001
    """The optimiser's own rate throughout.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        >>> constant(sgd, 10).get_last_lr()
        [0.5]
    """
    return _Constant(optimizer)


class _Constant(LRScheduler):
    """Leaves the rates as they are: those of groups that are added in training, too."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


def cosine(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """Return a schedule that falls from the optimiser's rate to zero along half a cosine.

    Loshchilov and Hutter 2017.

    Args:
        optimizer: the optimiser, whose learning rate the schedule starts from.
        total_steps: the number of the optimiser's steps in the whole training, at least 1; the rate
            is zero after them.

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


def check_schedule(schedule: object, optimizer: Optimizer) -> None:
    """Check that a schedule can be stepped after each minibatch, and is the optimiser's.

    Raises:
        TypeError: it is no scheduler of torch, or one that steps by a metric.
        ValueError: it is the scheduler of another optimiser.

    Example:
        >>> import torch
        >>> one, other = (torch.optim.SGD([torch.zeros(1)], lr=0.5) for _ in range(2))
        >>> check_schedule(constant(one, 10), one)
        >>> check_schedule(constant(one, 10), other)
        Traceback (most recent call last):
        ValueError: scheduler must be one of the optimizer that trains, got that of another; ...
    """
    if not isinstance(schedule, LRScheduler):
        raise TypeError(
            f"the function scheduler must return a scheduler of torch, got {schedule!r}"
        )
    if isinstance(schedule, ReduceLROnPlateau):
        raise TypeError(
            "scheduler must be stepped after each minibatch without a metric, got a "
            "ReduceLROnPlateau; use one such as bayesify.training.schedules.cosine, or step it in "
            "a callback"
        )
    if getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "scheduler must be one of the optimizer that trains, got that of another; pass its "
            "optimizer= too, or a function of optimiser and total number of steps as scheduler"
        )


def check_scaled_rate(schedule: object, optimizer: Optimizer, rho_lr_scale: float) -> None:
    """Check that a schedule leaves rho a rate of its own, where it was scaled.

    One that makes the rates equal in a later step is not found, such as ``CyclicLR`` with two rates
    as ``base_lr`` and one as ``max_lr``.

    Args:
        schedule: the schedule, just made.
        optimizer: has rho in a group of its own, if its rate was scaled.
        rho_lr_scale: the rate of rho as a multiple of the others', before the schedule was made.

    Raises:
        ValueError: the schedule has set one rate for all groups.

    Example:
        >>> import torch
        >>> from torch.optim.lr_scheduler import OneCycleLR
        >>> groups = [{"params": [torch.zeros(1)], "lr": rate} for rate in (0.05, 0.5)]
        >>> sgd = torch.optim.SGD(groups)
        >>> check_scaled_rate(constant(sgd, 8), sgd, 10.0)
        >>> check_scaled_rate(OneCycleLR(sgd, max_lr=0.05, total_steps=8), sgd, 10.0)
        Traceback (most recent call last):
        ValueError: rho_lr_scale must be 1 under a OneCycleLR that sets one rate for all groups, ...
    """
    groups = optimizer.param_groups
    first = {float(group.get("initial_lr", group["lr"])) for group in groups}
    now = {float(group["lr"]) for group in groups}  # 0 for all in a warm-up
    are_equal = len(first) == 1 or (len(now) == 1 and now != {0.0})
    if rho_lr_scale != 1.0 and len(groups) > 1 and are_equal:
        raise ValueError(
            f"rho_lr_scale must be 1 under a {type(schedule).__name__} that sets one rate for all "
            f"groups, got {rho_lr_scale}, which would do nothing; leave it out and give the "
            "scheduler a rate for each group, rho's last, as in max_lr=[0.05, 0.5]"
        )


def check_length(schedule: LRScheduler, last_step: int) -> None:
    """Check that a schedule of a fixed length, such as ``OneCycleLR``, lasts until a step.

    Args:
        schedule: the schedule, after those of its steps that are done.
        last_step: the number of steps at the end of the training.

    Raises:
        ValueError: it ends before.

    Example:
        >>> import torch
        >>> from torch.optim.lr_scheduler import OneCycleLR
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        >>> check_length(OneCycleLR(sgd, max_lr=0.5, total_steps=8), 16)
        Traceback (most recent call last):
        ValueError: scheduler must last for the 16 steps of the training, got a OneCycleLR of 8; ...
    """
    total = getattr(schedule, "total_steps", None)
    if isinstance(total, int) and total < last_step:
        raise ValueError(
            f"scheduler must last for the {last_step} steps of the training, got a "
            f"{type(schedule).__name__} of {total}; make it by a function of optimiser and number "
            "of steps. One that is resumed keeps its length, which a checkpoint holds: resume it "
            "with the epochs that it was made for"
        )


def recompute_rates(schedule: LRScheduler, optimizer: Optimizer) -> None:
    """Set the rates of a resumed schedule by a function of the step, which may be another one now.

    ``cosine`` of more epochs is. Left as they are: rates that a callback has set, also those that
    the schedule multiplies, and rates of a function with a state of its own or of other kinds of
    schedules.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        >>> short, long = cosine(sgd, 1), cosine(sgd, 2)
        >>> sgd.step(); short.step(); short.get_last_lr()
        [0.0]
        >>> long.load_state_dict(short.state_dict())
        >>> recompute_rates(long, sgd)
        >>> sgd.param_groups[0]["lr"]
        0.25
    """
    # Only the rates of a function of the step are known without having made the steps.
    if not isinstance(schedule, LambdaLR) or type(schedule).get_lr is not LambdaLR.get_lr:
        return
    factors = schedule.lr_lambdas
    if any(not isinstance(f, FunctionType) and getattr(f, "__dict__", None) for f in factors):
        return
    rates = list(schedule.get_last_lr())
    several = zip(optimizer.param_groups, schedule.base_lrs, factors, rates, strict=True)
    for place, (group, base, factor, last) in enumerate(several):
        if float(group["lr"]) != float(last) or float(group["initial_lr"]) != float(base):
            continue
        rates[place] = rate = base * factor(schedule.last_epoch)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    schedule._last_lr = rates


@dataclass(frozen=True)
class KLWarmup:
    """The rise of the KL's weight to 1 in the first epochs.

    Args:
        epochs: over so many, at least 0.
        power: as this power of a straight line, positive.

    Raises:
        TypeError: one is no number.
        ValueError: one is out of its range.

    Example:
        >>> [KLWarmup(1).scale(step, batches=3) for step in range(4)]
        [0.25, 0.5, 0.75, 1.0]
        >>> [KLWarmup(1, power=2.0).scale(step, batches=3) for step in range(4)]
        [0.0625, 0.25, 0.5625, 1.0]
    """

    epochs: float
    power: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", number_from_0("kl_warmup_epochs", self.epochs))
        object.__setattr__(self, "power", positive_number("kl_warmup_power", self.power))

    def scale(self, step: int, batches: int) -> float:
        """The factor on the KL at ``step``, from 0, with ``batches`` minibatches per epoch."""
        steps = self.epochs * batches
        return 1.0 if step >= steps else float(((step + 1) / (steps + 1)) ** self.power)

    @property
    def settings(self) -> dict[str, float]:
        """The settings for a checkpoint; power 1 is left out, as in older checkpoints."""
        settings = {"kl_warmup_epochs": self.epochs}
        return settings if self.power == 1.0 else {**settings, "kl_warmup_power": self.power}
