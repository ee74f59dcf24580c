"""Inputs of several passes of a network that may edit them in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from bayesify.estimators.module_attributes import is_plain_object

__all__ = ["Repeated", "Unedited", "copied"]

_T = TypeVar("_T")


def copied(inputs: _T) -> _T:
    """Return copies of tensors and containers, for a network that may edit its inputs in place.

    An object with tensors as attributes, such as a dataclass, is copied with these, and with
    tensors in lists and dictionaries that it holds; objects within objects are not.

    Args:
        inputs: tensors and objects, in any structure of tuples, lists and dictionaries.

    Example:
        >>> import torch
        >>> x = torch.ones(2)
        >>> copied(x).mul_(3.0), x
        (tensor([3., 3.]), tensor([1., 1.]))
    """
    copies: _T = tree_map(partial(_copied_leaf, of_tensor=torch.clone), inputs)
    return copies


def _with_own_containers(inputs: _T) -> _T:
    """Return the same tensors in containers and objects of their own."""
    made: _T = tree_map(partial(_copied_leaf, of_tensor=lambda each: each), inputs)
    return made


def _copied_leaf(value: object, of_tensor: Callable[[Tensor], Tensor]) -> object:
    if isinstance(value, Tensor):
        return of_tensor(value)
    if not (is_plain_object(value) and _tensors_of(value)):
        return value
    try:
        made = copy.copy(value)
    except Exception:  # an object may refuse it in its own code
        return value
    if made is not value:
        for name, each in list(vars(made).items()):
            if isinstance(each, Tensor | dict | list):
                vars(made)[name] = tree_map_only(Tensor, of_tensor, each)
    return made


def _tensors_of(inputs: object) -> list[Tensor]:
    leaves = tree_leaves(inputs)
    held = tree_leaves([vars(leaf) for leaf in leaves if is_plain_object(leaf)])
    return [each for each in (*leaves, *held) if isinstance(each, Tensor)]


class Repeated:
    """Gives several passes the same inputs, although a network may edit its inputs in place.

    The first pass gets copies. Where it leaves these as they were, later ones get the tensors
    themselves, in containers of their own.

    Args:
        num_parts: the number of batches into which each pass divides the inputs. ``take`` is called
            for each batch of each pass, in order; where one was edited, all later ones are copied.

    Example:
        >>> import torch
        >>> passes, x = Repeated(), torch.ones(2)
        >>> passes.take(x).mul_(3.0), passes.take(x).mul_(3.0)
        (tensor([3., 3.]), tensor([3., 3.]))
    """

    def __init__(self, num_parts: int = 1) -> None:
        self._parts_left = num_parts
        self._copies: list[Tensor] = []
        self._is_edited = False

    def take(self, inputs: _T) -> _T:
        """Return the inputs of the next pass; call it when the pass before is done.

        Args:
            inputs: tensors, in any structure of tuples, lists and dictionaries.
        """
        if torch.compiler.is_compiling():
            return inputs
        # An inference tensor does not count its edits.
        self._is_edited |= any(each.is_inference() or each._version for each in self._copies)
        self._copies = []
        if not (self._parts_left or self._is_edited):
            return _with_own_containers(inputs)
        copies = copied(inputs)
        if self._parts_left:
            self._parts_left -= 1
            self._copies = _tensors_of(copies)
        return copies


class Unedited:
    """Gives one pass its inputs, and a second one only if the first has left them as they were.

    Example:
        >>> import torch
        >>> passes, x = Unedited(), torch.ones(2)
        >>> passes.take(x).mul_(3.0)
        tensor([3., 3.])
        >>> passes.take(x)
        Traceback (most recent call last):
        RuntimeError: the network edits its inputs in place, so that a pass cannot be run again: ...
    """

    def __init__(self) -> None:
        self._versions: list[int] | None = None

    def take(self, inputs: _T) -> _T:
        """Return the tensors themselves, in containers of their own.

        Raises:
            RuntimeError: a pass before has edited them in place.
        """
        if torch.compiler.is_compiling():
            return inputs
        # An inference tensor does not count its edits.
        versions = [each._version for each in _tensors_of(inputs) if not each.is_inference()]
        if self._versions not in (None, versions):
            raise RuntimeError(
                "the network edits its inputs in place, so that a pass cannot be run again: a "
                "parameter was used in another way than before; begin its forward with "
                "x = x.clone()"
            )
        self._versions = versions
        return _with_own_containers(inputs)
