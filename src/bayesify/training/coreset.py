"""Choice of the examples that continual learning sets aside."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from bayesify.distributions.precision import at_least_float32
from bayesify.noise.arguments import whole_number
from bayesify.noise.keys import Stream, derived_seed

__all__ = ["CoresetMethod", "choose_coreset"]

CoresetMethod = Literal["random", "k-center"]


def choose_coreset(
    inputs: Tensor, size: int, method: CoresetMethod = "random", *, seed: int = 0
) -> Tensor:
    """Choose examples of a task to set aside (Nguyen et al. 2018, section 2.1).

    The posterior is trained on the other examples of the task. Before predictions a copy of it is
    trained on the coresets of all tasks, see docs/continual-learning.md. An example must not be
    in both, or it would count twice.

    Args:
        inputs: the inputs of a task's N examples, shape (N, ...), finite.
        size: the number of examples to choose, from 1 to N.
        method: ``"random"``, or ``"k-center"``: the first at random, then always the example that
            is farthest from those chosen (Gonzalez 1985), in Euclidean distance of the inputs.
        seed: of the random choices.

    Returns:
        Indices into the examples, int64, shape (size,), on the CPU, in the order of choice.

    Raises:
        TypeError: ``inputs`` is not a tensor, or for "k-center" of complex numbers, or ``size`` is
            not an integer.
        ValueError: ``method`` is unknown, ``size`` is out of range, or, for "k-center",
            inputs or their differences are not finite.

    Example:
        >>> x = torch.tensor([[0.0], [0.1], [5.0], [5.1], [9.0]])
        >>> sorted(choose_coreset(x, 3, "k-center").tolist())
        [0, 2, 4]
    """
    if method not in get_args(CoresetMethod):
        known = ", ".join(f'"{name}"' for name in get_args(CoresetMethod))
        raise ValueError(f"method must be one of {known}, got {method!r}")
    if not isinstance(inputs, Tensor) or inputs.dim() == 0:
        raise TypeError(
            f"inputs must be a tensor whose first axis is N examples, got {inputs!r}; use "
            "torch.as_tensor(x)"
        )
    size, count = whole_number("size", size, None), len(inputs)
    if not 1 <= size <= count:
        raise ValueError(f"size must lie from 1 to {count}, the number of examples, got {size}")
    # Not the numbers of ``acquire``, which may choose from the same examples.
    generator = torch.Generator().manual_seed(derived_seed(seed, Stream.ACTING, 0, 1))
    order = torch.randperm(count, generator=generator)
    if method == "random":
        return order[:size]
    return _k_center(inputs.detach().unsqueeze(-1).flatten(1), int(order[0]), size)


def _k_center(rows: Tensor, first: int, size: int) -> Tensor:
    if rows.is_complex():
        raise TypeError(
            f'"k-center" needs inputs that are real numbers, got {rows.dtype}; use '
            "torch.view_as_real(x)"
        )
    if not rows.is_floating_point() and rows.element_size() > 2:
        rows = rows.double()  # float32 does not tell great whole numbers apart, such as times
    rows = at_least_float32(rows)
    if not bool(rows.isfinite().all()):
        raise ValueError("inputs must be finite, got NaN or infinite values")
    scale = _scale(rows, first)
    nearest = rows.new_full((len(rows),), torch.inf)  # squared distance to the nearest choice
    chosen = [first]
    while len(chosen) < size:
        newest = chosen[-1]
        # Not by squares and products, which cancel where the inputs are far from 0.
        distances = (rows - rows[newest]).mul_(scale).square_().sum(1)
        nearest = torch.minimum(nearest, distances)
        nearest[newest] = -1.0  # not again, also among equal examples
        chosen.append(int(nearest.argmax()))
    return torch.tensor(chosen)


def _scale(rows: Tensor, first: int) -> float:
    """Return a power of two that brings differences to a size at which their squares are finite."""
    largest = float((rows - rows[first]).abs().max()) if rows.numel() else 0.0
    if not math.isfinite(largest):
        raise ValueError(
            f"inputs must have differences within the range of {rows.dtype}, got one beyond it; "
            "divide the inputs by 4"
        )
    # The scale itself must be an ordinary number, and not change the digits of the differences.
    limit = -math.frexp(torch.finfo(rows.dtype).tiny)[1]
    return math.ldexp(1.0, min(max(-math.frexp(largest)[1], -limit), limit))
