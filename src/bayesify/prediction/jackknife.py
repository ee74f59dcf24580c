"""Jackknife standard error of a function of independent samples."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from bayesify.noise.arguments import whole_number

__all__ = ["jackknife"]

_GROUPS = 25


def jackknife(
    statistic: Callable[[Tensor], Any], num_samples: int, groups: int | None = None
) -> Tensor:
    """Estimate a standard error by the delete-a-group jackknife for groups of unequal size.

    Busing, Meijer and van der Leeden, *Delete-m jackknife for unequal m*, Statistics and
    Computing 9 (1999), eqs 4 to 6. For a mean over equal groups the result is the standard error
    over the groups. For a smooth function of the samples' distribution it converges to the true
    standard error as the number of samples grows.

    Args:
        statistic: computes the statistic of the samples with the given indices, shape (m,).
        num_samples: S, the number of samples.
        groups: the number of groups; None stands for 25, or S if S is smaller.

    Raises:
        ValueError: there are fewer than two samples, or ``groups`` is not from 2 to S.
        TypeError: the statistic is neither a tensor nor a number, or ``groups`` no whole number.

    Example:
        >>> x = torch.tensor([1.0, 2.0, 4.0, 7.0])
        >>> jackknife(lambda indices: x[indices].mean(), 4), x.std() / 2
        (tensor(1.3229), tensor(1.3229))
    """
    if num_samples < 2:
        raise ValueError(
            f"a standard error needs at least 2 weight samples, got {num_samples}; call predict "
            "with num_samples=100"
        )
    count = min(num_samples, _GROUPS) if groups is None else whole_number("groups", groups, None)
    if not 2 <= count <= num_samples:
        raise ValueError(
            f"groups must lie from 2 to the number of weight samples, {num_samples}, got {groups}"
        )
    indices = torch.arange(num_samples)
    full = _as_float_tensor(statistic(indices))
    # Every G-th sample belongs to one group, so that consecutive samples spread over all groups.
    deviations, factors = [], []
    for group in range(count):
        rest = indices[indices % count != group]
        factor = num_samples / (num_samples - len(rest))  # h_j in the paper
        # The pseudo-value of the group, h_j * full - (h_j - 1) * statistic(rest), minus full.
        deviations.append((factor - 1.0) * (full - _as_float_tensor(statistic(rest))))
        factors.append(factor)
    values = torch.stack(deviations)
    h = values.new_tensor(factors).reshape(-1, *[1] * full.dim())
    centre = (values / h).sum(0)
    return ((values - centre).square() / (h - 1.0)).mean(0).sqrt()


def _as_float_tensor(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        value = result.detach()
        return value if value.dtype.is_floating_point else value.double()
    if isinstance(result, Real):
        return torch.tensor(float(result), dtype=torch.float64)
    raise TypeError(
        f"the statistic must return a tensor or a number, got {type(result).__name__}; return one "
        "value at a time"
    )
