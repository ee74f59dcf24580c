"""Tracing of forward passes: the functions that use each random parameter, and how often."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bayesify.estimators.estimator import ParameterUse
from bayesify.estimators.interception import WeightInterceptor, tensors_in
from bayesify.estimators.module_attributes import ModuleAttributes
from bayesify.estimators.network_state import snapshot
from bayesify.estimators.operations import LinearOperation
from bayesify.estimators.out_of_memory import is_out_of_memory
from bayesify.estimators.uncompiled import run_uncompiled
from bayesify.noise.keys import kept_generators

__all__ = ["ParameterUses", "TraceCache", "minibatch_size", "trace"]

#: Passes are told apart by so many values of each whole number among their inputs: one that changes
#: at every call, such as the number of a step, would cause a trace at every call.
_MOST_NUMBERS = 32

#: The uses of each random parameter, by its first name, in one forward pass.
ParameterUses = dict[str, tuple[ParameterUse, ...]]


def minibatch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Return the common length of all tensors among a network's arguments, or None."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    lengths = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
    # Compared instead of hashed, so that compiled code is valid for every minibatch size.
    equal = bool(lengths) and lengths[0] > 0 and all(n == lengths[0] for n in lengths)
    return lengths[0] if equal else None


class TraceCache:
    """The traced parameter uses of one network, by the kind of its inputs.

    Attributes:
        last: the uses in the kind of pass that was requested last, or None.
    """

    def __init__(self) -> None:
        self._by_kind: dict[tuple[object, object], ParameterUses] = {}
        #: The values of each whole number among the inputs of a kind.
        self._seen: dict[tuple[object, int], list[set[int | None]]] = {}
        self.last: ParameterUses | None = None

    def uses(
        self,
        net: nn.Module,
        forward: Callable[..., Any],
        tensors: Callable[[], Mapping[str, Tensor]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        compiled: bool = False,
    ) -> ParameterUses:
        """Return the uses of each parameter in a pass with inputs of this kind.

        Args:
            net: the network; its buffers and attributes are restored after tracing, and so are
                the global generators of torch, Python and NumPy.
            forward: the forward pass, ``forward(tensors, *args, **kwargs)``.
            tensors: returns one tensor for each parameter, by its first name.
            args: positional inputs.
            kwargs: keyword inputs.
            compiled: as for :func:`trace`.
        """
        inputs = compiled, _trace_key(net, args, kwargs)
        kind = inputs, self._known(inputs, _numbers(args, kwargs))
        if kind not in self._by_kind:
            undo, attributes = snapshot(net), ModuleAttributes(net)

            def alone(*given: Any, **named: Any) -> Any:
                attributes.restore()  # what one size of minibatch leaves may not suit another
                return forward(*given, **named)

            try:
                with kept_generators():
                    self._by_kind[kind] = trace(alone, tensors(), args, kwargs, compiled=compiled)
            finally:
                undo()
                attributes.restore()
        self.last = self._by_kind[kind]
        return self.last

    def _known(self, inputs: object, numbers: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Return the numbers, with None for those of an input that has had too many values."""
        seen = self._seen.setdefault((inputs, len(numbers)), [set() for _ in numbers])
        for number, values in zip(numbers, seen, strict=True):
            if len(values) < _MOST_NUMBERS:
                values.add(number)
        return tuple(n if n in values else None for n, values in zip(numbers, seen, strict=True))

    def add_use(self, name: str, function: str) -> None:
        """Add a use that tracing missed to the kind of pass that was requested last."""
        if self.last is not None:
            self.last[name] += (ParameterUse(function),)


def _trace_key(net: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Return a key of all that the uses may depend on, except the size of the minibatch."""
    # Whether a custom autograd function is a linear use depends on gradients being enabled.
    modes = torch.is_grad_enabled(), *(module.training for module in net.modules())
    return modes, tuple(map(_kind, args)), tuple((name, _kind(kwargs[name])) for name in kwargs)


def _kind(value: object) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape[1:]), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    return value if isinstance(value, (bool, str)) else type(value)


def _numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return the whole numbers among the inputs, which may select a part of the network."""
    if torch.compiler.is_compiling():  # which would be compiled anew for each
        return ()
    found = tree_leaves((args, kwargs))
    return tuple(each if isinstance(each, int) else None for each in found)


def trace(
    forward: Callable[..., Any],
    tensors: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    compiled: bool = False,
) -> ParameterUses:
    """Run a network with N and with N + 1 examples, and list the uses of its parameters.

    A single pass does not tell whether the rows of an operation are examples: in a network whose
    first axis is time, there may be as many time steps as examples. A use therefore counts as one
    on rows of examples only if the number of rows grows with N.

    Args:
        forward: the forward pass, ``forward(tensors, *args, **kwargs)``.
        tensors: one tensor for each parameter, by its first name.
        args: positional inputs.
        kwargs: keyword inputs.
        compiled: whether the pass will be compiled; compiled code does not show the attributes
            ``T`` and ``mT``, so that a weight of which they are taken counts as used otherwise.

    Raises:
        torch.OutOfMemoryError: the memory does not suffice for N + 1 examples.
    """
    size = minibatch_size(args, kwargs)
    uses, has_rows = _uses(forward, tensors, args, kwargs, size, compiled)
    if size is None:
        return _none_by_row(uses, "and the inputs do not tell the number of examples")
    if not has_rows:
        return _none_by_row(uses, "and the outputs are not rows of examples")
    try:
        index = torch.arange(size + 1) % size
        longer_args = tuple(_repeat(value, index) for value in args)
        longer_kwargs = {name: _repeat(value, index) for name, value in kwargs.items()}
        longer_uses, has_rows = _uses(
            forward, tensors, longer_args, longer_kwargs, size + 1, compiled
        )
    except Exception as error:  # the user's network may raise any kind of error
        if is_out_of_memory(error):
            raise
        reason = f"in a network that fails on a minibatch of another size ({type(error).__name__})"
        return _none_by_row(uses, reason)
    if not has_rows:
        return _none_by_row(uses, "and the outputs are not rows of examples")
    return {
        name: found if longer_uses[name] == found else _not_by_row(found)
        for name, found in uses.items()
    }


def _none_by_row(uses: ParameterUses, why: str) -> ParameterUses:
    return {name: _not_by_row(uses[name], why) for name in uses}


def _not_by_row(
    uses: tuple[ParameterUse, ...], why: str = ParameterUse("").why
) -> tuple[ParameterUse, ...]:
    return tuple(ParameterUse(use.function, why=why) for use in uses)


def _repeat(value: Any, index: Tensor) -> Any:
    return value[index.to(value.device)] if isinstance(value, Tensor) else value


def _uses(
    forward: Callable[..., Any],
    tensors: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    batch_size: int | None,
    compiled: bool,
) -> tuple[ParameterUses, bool]:
    """Return the uses in one pass, and whether the first axis of an output is the examples."""
    # Copies, as a pass may edit weights in place, and the tracer needs a separate tensor for each;
    # and of the inputs, which the passes to come need as they are.
    weights = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    args, kwargs = tree_map_only(Tensor, torch.clone, (args, dict(kwargs)))
    tracer = _Tracer(weights, batch_size, compiled=compiled)
    with nullcontext() if compiled else run_uncompiled(), tracer:
        outputs = forward(weights, *args, **kwargs)
    parts = tensors_in(outputs)
    has_rows = any(part.dim() > 0 and len(part) == batch_size for part in parts)
    for name in tracer.last.names if any(map(tracer.last.are, parts)) else ():
        tracer.uses[name][-1] = tracer.uses[name][-1]._replace(is_output=True)
    return {name: tuple(found) for name, found in tracer.uses.items()}, has_rows


class _Tracer(WeightInterceptor):
    """Records the uses of each parameter."""

    def __init__(
        self, tensors: Mapping[str, Tensor], batch_size: int | None, *, compiled: bool
    ) -> None:
        super().__init__(tensors, grad_mode=torch.is_grad_enabled(), attributes=not compiled)
        self._batch_size = batch_size
        self.uses: dict[str, list[ParameterUse]] = {name: [] for name in tensors}

    def on_linear(self, operation: LinearOperation, weight: str | None, bias: str | None) -> Tensor:
        outputs = operation.apply(operation.inputs, operation.weight, operation.bias)
        layer = operation.layer_of(weight, bias)
        for name, of_bias in ((weight, False), (bias, True)):
            if name is not None:
                use = operation.use(outputs, self._batch_size, of_bias=of_bias, layer=layer)
                self.uses[name].append(use)
        self.last.record(outputs, tuple(name for name in (weight, bias) if name is not None))
        return outputs

    def on_other(self, name: str, function: str) -> None:
        self.uses[name].append(ParameterUse(function))
