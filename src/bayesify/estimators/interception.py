"""Interception of the PyTorch functions that use a network's random parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bayesify.estimators.last_outputs import LastOutputs
from bayesify.estimators.operations import LinearOperation, linear_operation
from bayesify.estimators.products import product
from bayesify.estimators.transforms import transform_levels
from bayesify.estimators.views import Views, shape_before_folding, transposition

__all__ = ["READERS", "WeightInterceptor", "tensors_in"]

_DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
#: Functions that read a tensor's values but return no tensor, besides those that work on lists of
#: tensors in place. All others that return no tensor read metadata only, such as shape and dtype.
READERS = frozenset(
    {
        "allclose",
        "equal",
        "is_nonzero",
        "item",
        "numpy",
        "tolist",
        "__array__",
        "__bool__",
        "__complex__",
        "__contains__",
        "__float__",
        "__index__",
        "__int__",
        "__setitem__",
    }
)


class WeightInterceptor(TorchFunctionMode):
    """A mode that intercepts every PyTorch function that uses one of the given tensors.

    Tensors are recognised by identity, and so are their transposed views. Subclasses decide what to
    do with the uses.

    Args:
        tensors: the tensors that the network is run with, by name.
        grad_mode: whether gradients are enabled when the network is called.
        attributes: whether the attributes ``T`` and ``mT`` of a tensor are views that are followed.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], *, grad_mode: bool, attributes: bool = True
    ) -> None:
        super().__init__()
        # Strong references, since Python reuses the id of a deleted tensor.
        self._tensors = list(tensors.values())
        self._names = list(tensors)
        self._grad_mode = grad_mode
        self._attributes = attributes
        self._compiling = torch.compiler.is_compiling()
        # Compiled code has no ids; there ``_name_of`` compares with each tensor.
        self._by_id = {} if self._compiling else {id(tensors[name]): name for name in tensors}
        self._level = None if self._compiling else transform_levels()
        self._views = Views(compiling=self._compiling)
        self.last = LastOutputs()

    def on_linear(self, operation: LinearOperation, weight: str | None, bias: str | None) -> Tensor:
        """Compute a linear operation on intercepted tensors, and record it as the last one.

        Args:
            operation: the operation.
            weight: the name of its weight, or None if that is not intercepted.
            bias: the name of its bias, or None if that is not intercepted.
        """
        raise NotImplementedError

    def on_other(self, name: str, function: str) -> None:
        """Record any other function that uses an intercepted tensor."""
        raise NotImplementedError

    def resumable(self) -> Callable[[], AbstractContextManager[object]]:
        """Return a function that makes a context for a part of this pass that is run again.

        It is called where the part begins, and its result whenever the part is run again.
        """
        return nullcontext

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Handle one call of a PyTorch function; PyTorch calls this method."""
        kwargs = {} if kwargs is None else kwargs
        operation = self._operation(func, args, kwargs)
        if operation is not None:
            weight, bias = self._name_of(operation.weight), self._name_of(operation.bias)
            outputs = self.on_linear(operation, weight, bias)
            if operation.reshape is None:
                return outputs
            reshaped = operation.reshape(outputs)
            self.last.reshape(operation.reshape, reshaped)
            return reshaped
        result = func(*args, **kwargs)
        self.last.follow(func, args, kwargs, result)
        if self._follow(func, args, kwargs, result):
            return result
        # A derivative within the forward pass uses all weights: noise that is added to outputs does
        # not depend on the inputs, so that derivatives by the inputs would be wrong.
        derivative = func in _DERIVATIVES
        names = self._names if derivative else self._names_in([args, kwargs])
        function = getattr(func, "__name__", str(func))
        if names and (derivative or _reads(function) or tensors_in(result)):
            for name in names:
                self.on_other(name, function)
        return result

    def _operation(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> LinearOperation | None:
        """Return a linear operation with an intercepted weight or bias, in terms of its axes."""
        operation = linear_operation(func, args, kwargs)
        if operation is None:
            operation = product(func, args, kwargs, self._is_known)
        if operation is None or not self._in_forward_pass() or self._is_known(operation.inputs):
            return None
        found = self._views.weight_of(operation.weight)
        if found is not None:
            if operation.function is not F.linear:
                return None
            weight, order = found
            operation = replace(
                operation,
                weight=weight,
                output_axes=tuple(order[axis] for axis in operation.output_axes),
                input_axes=tuple(order[axis] for axis in operation.input_axes),
            )
        if not self._is_known(operation.weight) and not self._is_known(operation.bias):
            return None
        # The rows of (N, T, features) tell which of them belong to one example; N T rows do not.
        unfolded = self._views.unfolded(operation.inputs)
        return operation if unfolded is None else operation.on_unfolded(unfolded)

    def _follow(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
    ) -> bool:
        """Remember a view; return whether it is one of a weight, and so no use of it yet."""
        shape = shape_before_folding(func, args, result)
        if shape is not None and not self._is_known(args[0]):
            self._views.add_folded(result, shape)
            return False
        order = transposition(func, args, kwargs, attributes=self._attributes)
        if order is None or not self._is_known(args[0]) or not self._in_forward_pass():
            return False
        self._views.add_transposed(result, args[0], order)
        return True

    def _is_known(self, value: object) -> bool:
        return self._name_of(value) is not None

    def _in_forward_pass(self) -> bool:
        # False in a user's autograd.Function, where gradients are off and whose backward uses the
        # weight itself, and in a torch.func transform or in forward mode, which differentiate the
        # outputs.
        if torch.is_grad_enabled() != self._grad_mode:
            return False
        return self._compiling or transform_levels() == self._level

    def _names_in(self, value: object) -> list[str]:
        parts = _parts(value)
        if parts is None:
            name = self._name_of(value)
            return [] if name is None else [name]
        names: list[str] = []
        for part in parts:
            names += self._names_in(part)
        return names

    def _name_of(self, value: object) -> str | None:
        if not isinstance(value, Tensor):
            return None
        found = self._views.weight_of(value)
        if found is not None:
            value = found[0]
        if not self._compiling:
            return self._by_id.get(id(value))
        for name, tensor in zip(self._names, self._tensors, strict=True):
            if tensor is value:
                return name
        return None


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts.

    Example:
        >>> len(tensors_in({"a": [torch.zeros(2), 3], "b": (torch.ones(1),)}))
        2
    """
    parts = _parts(value)
    if parts is None:
        return [value] if isinstance(value, Tensor) else []
    found: list[Tensor] = []
    for part in parts:
        found += tensors_in(part)
    return found


def _reads(function: str) -> bool:
    """Return whether a function that returns no tensor reads the values of its arguments."""
    return function in READERS or function.startswith("_foreach")


def _parts(value: object) -> list[object] | None:
    # Only lists, tuples and dicts: iterating over a generator would exhaust it.
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else None
