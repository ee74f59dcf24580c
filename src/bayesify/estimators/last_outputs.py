"""The outputs of the last linear operation of a pass, followed through views."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__ = ["LastOutputs"]

#: Functions that rearrange or select numbers, so that they apply to variances as to outputs.
_VIEWS: frozenset[Callable[..., Any]] = frozenset(
    {
        torch.squeeze,
        Tensor.squeeze,
        torch.unsqueeze,
        Tensor.unsqueeze,
        Tensor.view,
        torch.reshape,
        Tensor.reshape,
        torch.flatten,
        Tensor.flatten,
        torch.unflatten,
        Tensor.unflatten,
        Tensor.__getitem__,
        operator.getitem,
        torch.permute,
        Tensor.permute,
        torch.transpose,
        Tensor.transpose,
        torch.movedim,
        Tensor.movedim,
        Tensor.contiguous,
        Tensor.float,
        Tensor.double,
    }
)


class LastOutputs:
    """The outputs of the last linear operation with random parameters, and their variances.

    Example:
        >>> last, outputs = LastOutputs(), torch.zeros(3, 1)
        >>> last.record(outputs, ("weight",), variances=torch.ones(3, 1))
        >>> squeezed = outputs.squeeze(-1)
        >>> last.follow(Tensor.squeeze, (outputs, -1), {}, squeezed)
        >>> last.variances_of(squeezed), last.variances_of(torch.zeros(3))
        (tensor([1., 1., 1.]), None)
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        # A strong reference, since Python reuses the id of a deleted tensor.
        self._outputs: Tensor | None = None
        self._version = 0
        self._variances: Tensor | None = None

    def record(
        self, outputs: Tensor, names: tuple[str, ...], variances: Tensor | None = None
    ) -> None:
        """Record the outputs of an operation with these random parameters."""
        self.names, self._outputs, self._variances = names, outputs, variances
        self._version = _version_of(outputs)

    def follow(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: object,
    ) -> None:
        """Follow a view of the outputs; other functions of them are not followed.

        What changes the outputs in place ends the following.
        """
        if self._outputs is None or not args or args[0] is not self._outputs:
            return
        if function in _VIEWS and isinstance(result, Tensor):
            self.reshape(partial(_applied, function, args[1:], kwargs), result)
        elif result is self._outputs:
            self._outputs = self._variances = None

    def reshape(self, view: Callable[[Tensor], Tensor], result: Tensor) -> None:
        """Replace the outputs by their view."""
        if not self._is_unchanged():
            return
        variances = None if self._variances is None else view(self._variances)
        self._outputs, self._variances = result, variances
        self._version = _version_of(result)

    def are(self, tensor: object) -> bool:
        """Return whether a tensor is the outputs, or the last view of them."""
        return self._outputs is not None and tensor is self._outputs and self._is_unchanged()

    def variances_of(self, tensor: object) -> Tensor | None:
        """Return the variances of a tensor, or None if it is not the outputs."""
        return self._variances if self.are(tensor) else None

    def _is_unchanged(self) -> bool:
        return self._outputs is None or _version_of(self._outputs) == self._version


def _version_of(tensor: Tensor) -> int:
    """Return the number of changes in place, also by way of views; 0 where none are counted."""
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


def _applied(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], tensor: Tensor
) -> Tensor:
    found: Tensor = function(tensor, *args, **kwargs)
    return found
