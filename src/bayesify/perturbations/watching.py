"""Watching what a network does with its random parameters while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.overrides import TorchFunctionMode

from bayesify.perturbations.operations import LinearCall, linear_call

__all__ = ["WeightWatch", "tensors_in"]

_DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
# What reads a tensor's values and returns no tensor; anything else that returns none asks for its
# shape, its dtype and the like.
_READERS = frozenset(
    {
        *("allclose", "equal", "is_nonzero", "item", "numpy", "tolist", "__array__"),
        *("__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__"),
    }
)


class WeightWatch(TorchFunctionMode):
    """Sees every use of the given tensors, whatever module or function makes it.

    Tensors are recognised by identity.

    Args:
        tensors: what the network is run with, by name.
        grad_mode: whether gradients are on where the network is entered.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, grad_mode: bool) -> None:
        super().__init__()
        # Held strongly: an id is used again once its tensor is gone.
        self._tensors = list(tensors.values())
        self._names = list(tensors)
        self._grad_mode = grad_mode
        self._compiling = torch.compiler.is_compiling()
        # Compiled code has no ids; there the tensors are gone through.
        self._by_id = {} if self._compiling else {id(tensors[name]): name for name in tensors}
        self._level = 0 if self._compiling else maybe_current_level()

    def on_linear(self, call: LinearCall, weight: str | None, bias: str | None) -> Tensor:
        """Answer a linear operation; a name is None for a tensor that is not watched."""
        raise NotImplementedError

    def on_other(self, name: str, function: str) -> None:
        """Take note of any other function that takes a watched tensor and returns tensors."""
        raise NotImplementedError

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by PyTorch for each of its functions."""
        kwargs = {} if kwargs is None else kwargs
        call = linear_call(func, args, kwargs)
        if call is not None and self._is_of_the_pass():
            weight, bias = self._name_of(call.weight), self._name_of(call.bias)
            if self._name_of(call.inputs) is None and (weight is not None or bias is not None):
                return self.on_linear(call, weight, bias)
        result = func(*args, **kwargs)
        # Noise on outputs is no function of the inputs: its derivative in them is not a weight's.
        derivative = func in _DERIVATIVES
        names = self._names if derivative else self._names_in([args, kwargs])
        function = getattr(func, "__name__", str(func))
        if names and (derivative or function in _READERS or tensors_in(result)):
            for name in names:
                self.on_other(name, function)
        return result

    def _is_of_the_pass(self) -> bool:
        # In a user's autograd.Function gradients are off, and its backward uses the weight itself;
        # in a transform (torch.func) the output's derivative is asked for.
        if torch.is_grad_enabled() != self._grad_mode:
            return False
        return self._compiling or maybe_current_level() == self._level

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
        if not self._compiling:
            return self._by_id.get(id(value))
        for name, tensor in zip(self._names, self._tensors, strict=True):
            if tensor is value:
                return name
        return None


def tensors_in(value: object) -> list[Tensor]:
    """The tensors among nested lists, tuples and dicts.

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


def _parts(value: object) -> list[object] | None:
    # Lists, tuples and dicts only: another iterable may be a generator, which looking would drain.
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else None
