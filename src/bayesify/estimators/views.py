"""Views that a pass makes before a product: transposed weights, and axes folded into rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Views", "shape_before_folding", "transposition"]

# Attributes arrive as the getters of their properties, of which each access makes another object.
_MATRIX_ATTRIBUTES = ("T", "mT")
_MATRIX: frozenset[Callable[..., Any]] = frozenset({torch.t, Tensor.t})
_SWAPS: frozenset[Callable[..., Any]] = frozenset(
    {
        torch.transpose,
        Tensor.transpose,
        torch.swapaxes,
        Tensor.swapaxes,
        torch.swapdims,
        Tensor.swapdims,
    }
)
_PERMUTES: frozenset[Callable[..., Any]] = frozenset({torch.permute, Tensor.permute})
_FOLDS: frozenset[Callable[..., Any]] = frozenset(
    {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten}
)


class Views:
    """The views that a forward pass has made of weights and of inputs.

    Args:
        compiling: whether the pass is compiled; compiled code has no ids.
    """

    def __init__(self, *, compiling: bool) -> None:
        # Strong references, since Python reuses the id of a deleted tensor.
        self._transposed: list[tuple[Tensor, Tensor, tuple[int, ...]]] = []
        self._by_id: dict[int, int] | None = None if compiling else {}
        self._folded: tuple[Tensor, torch.Size] | None = None

    def copy(self) -> Views:
        """Return the views so far, to which later ones are not added."""
        views = Views(compiling=self._by_id is None)
        views._transposed = list(self._transposed)
        views._by_id = None if self._by_id is None else dict(self._by_id)
        views._folded = self._folded
        return views

    def add_transposed(self, view: Tensor, weight: Tensor, order: tuple[int, ...]) -> None:
        """Remember that axis i of a view is axis ``order[i]`` of a weight, or of a view of it."""
        found = self.weight_of(weight)
        if found is not None:
            weight, outer = found
            order = tuple(outer[axis] for axis in order)
        if self._by_id is not None:
            self._by_id[id(view)] = len(self._transposed)
        self._transposed.append((view, weight, order))

    def weight_of(self, value: object) -> tuple[Tensor, tuple[int, ...]] | None:
        """Return the weight that a transposed view shows and the order of its axes, or None."""
        if self._by_id is not None:
            index = self._by_id.get(id(value))
            return None if index is None else self._transposed[index][1:]
        for view, weight, order in self._transposed:
            if view is value:
                return weight, order
        return None

    def add_folded(self, folded: Tensor, shape: torch.Size) -> None:
        """Remember the shape that inputs had before their axes were folded into rows."""
        self._folded = folded, shape  # the last one only: activations are large

    def unfolded(self, inputs: object) -> Tensor | None:
        """Return inputs in the shape before their axes were folded into rows, or None."""
        if self._folded is None or self._folded[0] is not inputs:
            return None
        return self._folded[0].view(self._folded[1])


def transposition(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    attributes: bool = True,
) -> tuple[int, ...] | None:
    """Return the order of the axes that a function gives its first argument, or None.

    Args:
        function: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        attributes: whether the attributes ``T`` and ``mT`` count.

    Example:
        >>> transposition(Tensor.permute, (torch.zeros(2, 3, 4), 2, 0, 1), {})
        (2, 0, 1)
        >>> transposition(torch.relu, (torch.zeros(2, 3),), {}) is None
        True
    """
    if kwargs or not args or not isinstance(args[0], Tensor):
        return None
    dims = args[0].dim()
    if function in _MATRIX or (attributes and _attribute(function) in _MATRIX_ATTRIBUTES):
        return (1, 0) if dims == 2 else None
    if function in _SWAPS and len(args) == 3:
        first, second = (axis % dims for axis in args[1:])
        order = list(range(dims))
        order[first], order[second] = second, first
        return tuple(order)
    if function in _PERMUTES:
        axes = args[1] if len(args) == 2 else args[1:]
        return tuple(axis % dims for axis in axes) if len(axes) == dims else None
    return None


def _attribute(function: Callable[..., Any]) -> str | None:
    owner = getattr(function, "__self__", None)
    is_getter = getattr(function, "__name__", None) == "__get__"
    return getattr(owner, "__name__", None) if is_getter else None


def shape_before_folding(
    function: Callable[..., Any], args: Sequence[Any], result: object
) -> torch.Size | None:
    """Return the shape (rows, ..., features) that a function made into (n, features), or None.

    Example:
        >>> x = torch.zeros(5, 7, 3)
        >>> shape_before_folding(Tensor.view, (x, -1, 3), x.view(-1, 3))
        torch.Size([5, 7, 3])
    """
    if function not in _FOLDS or not isinstance(result, Tensor) or result.dim() != 2:
        return None
    inputs = args[0] if args else None
    if not isinstance(inputs, Tensor) or inputs.dim() < 3:
        return None
    return inputs.shape if inputs.shape[-1] == result.shape[-1] else None
