"""The standard error of a function of samples, from these samples alone."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

__all__ = ["jackknife"]

_GROUPS = 25


def jackknife(
    statistic: Callable[[Tensor], Any], num_samples: int, groups: int | None = None
) -> Tensor:
    """Delete-a-group jackknife for groups of unequal size, of independent samples.

    Busing, Meijer and van der Leeden, *Delete-m jackknife for unequal m*, Statistics and
    Computing 9 (1999), eqs 4 to 6. For a mean over equal groups it is the groups' own standard
    error; for a smooth function of the samples' distribution it tends to the right one as the
    samples become many.

    Args:
        statistic: takes the indices (m,) of the samples that it may look at.
        num_samples: S.
        groups: how many; None takes 25, or S if that is less.

    Raises:
        ValueError: there are fewer than two samples, or ``groups`` is not from 2 to S.
        TypeError: the statistic is neither a tensor nor a number.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 4.0, 7.0])
        >>> jackknife(lambda kept: x[kept].mean(), 4), x.std() / 2
        (tensor(1.3229), tensor(1.3229))
    """
    if num_samples < 2:
        raise ValueError(
            f"a standard error needs at least 2 weight samples, got {num_samples}; call predict "
            "with num_samples=100"
        )
    count = min(num_samples, _GROUPS) if groups is None else groups
    if not 2 <= count <= num_samples:
        raise ValueError(
            f"groups must lie from 2 to the number of weight samples, {num_samples}, got {groups}"
        )
    every = torch.arange(num_samples)
    whole = _value(statistic(every))
    # Every G-th sample makes a group, so that samples of one origin are spread over all groups.
    deviations, factors = [], []
    for group in range(count):
        rest = every[every % count != group]
        factor = num_samples / (num_samples - len(rest))  # h_j of the paper
        # What the group's pseudo-value h_j * whole - (h_j - 1) * rest differs from the whole by.
        deviations.append((factor - 1.0) * (whole - _value(statistic(rest))))
        factors.append(factor)
    values = torch.stack(deviations)
    h = values.new_tensor(factors).reshape(-1, *[1] * whole.dim())
    centre = (values / h).sum(0)
    return ((values - centre).square() / (h - 1.0)).mean(0).sqrt()


def _value(found: Any) -> Tensor:
    if isinstance(found, Tensor):
        value = found.detach()
        return value if value.dtype.is_floating_point else value.double()
    if isinstance(found, Real):
        return torch.tensor(float(found), dtype=torch.float64)
    raise TypeError(
        f"the statistic must be a tensor or a number, got {type(found).__name__}; ask for one "
        "thing at a time"
    )
