"""Traced forward passes: which random parameter is used where, and how often."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.perturbations.base import Use
from bayesify.perturbations.operations import LinearCall
from bayesify.perturbations.watching import WeightWatch, tensors_in
from bayesify.stateless import snapshot

__all__ = ["Traces", "Uses", "num_data_of", "trace"]

#: The uses of each random parameter, by its first name, in one forward pass.
Uses = dict[str, tuple[Use, ...]]


def num_data_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """N, the common length of all tensors among a network's arguments; None if there is none."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    lengths = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
    # Compared, not hashed: compiled code then serves every size of the minibatch.
    alike = bool(lengths) and lengths[0] > 0 and all(n == lengths[0] for n in lengths)
    return lengths[0] if alike else None


class Traces:
    """What the passes of one network were seen to do, by the kind of their inputs.

    Attributes:
        last: what was found of the kind of pass that was asked for last, or None.
    """

    def __init__(self) -> None:
        self._seen: dict[object, Uses] = {}
        self.last: Uses | None = None

    def uses(
        self,
        net: nn.Module,
        forward: Callable[..., Any],
        tensors: Callable[[], Mapping[str, Tensor]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Uses:
        """The uses of each parameter in a pass with inputs of this kind.

        Args:
            net: the network, whose buffers are left as they were.
            forward: its pass, ``forward(tensors, *args, **kwargs)``.
            tensors: called for one tensor for each parameter, by its first name.
            args: the inputs.
            kwargs: those by name.
        """
        kind = _kind_of_pass(net, args, kwargs)
        if kind not in self._seen:
            undo = snapshot(net)
            try:
                self._seen[kind] = trace(forward, tensors(), args, kwargs)
            finally:
                undo()
        self.last = self._seen[kind]
        return self.last

    def note(self, name: str, function: str) -> None:
        """Add a use that the last kind of pass made of a parameter, and the trace did not show."""
        if self.last is not None:
            self.last[name] += (Use(function),)


def _kind_of_pass(net: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """What decides, beside the size of the minibatch, which way a pass takes."""
    # With gradients a function that has a backward of its own is another use than without.
    modes = torch.is_grad_enabled(), *(module.training for module in net.modules())
    return modes, tuple(map(_kind, args)), tuple((name, _kind(kwargs[name])) for name in kwargs)


def _kind(value: object) -> object:
    if isinstance(value, Tensor):
        return tuple(value.shape[1:]), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind, value))
    # Not numbers: one that changes at every call would have a trace of its own each time.
    return value if isinstance(value, (bool, str)) else type(value)


def trace(
    forward: Callable[..., Any],
    tensors: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Uses:
    """Run a network twice, with N and with N + 1 data, and list the uses of its parameters.

    Whether the rows that an operation sees are data cannot be told from one pass: in a network
    that puts the time first, time steps may be as many as data. So a use counts as one of rows of
    data only if their number grew with N.

    Args:
        forward: the network: ``forward(tensors, *args, **kwargs)``.
        tensors: one tensor for each parameter, by its first name.
        args: the inputs.
        kwargs: those by name.
    """
    num_data = num_data_of(args, kwargs)
    uses, rows = _uses(forward, tensors, args, kwargs, num_data)
    if num_data is None:
        return _none_by_row(uses, "and the inputs do not tell the number of data")
    if not rows:
        return _none_by_row(uses, "and the outputs are no rows of data")
    try:
        longer = torch.arange(num_data + 1) % num_data
        more = [_repeated(value, longer) for value in args]
        named = {name: _repeated(value, longer) for name, value in kwargs.items()}
        again, rows = _uses(forward, tensors, tuple(more), named, num_data + 1)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = f"in a network that fails on a minibatch of another size ({type(error).__name__})"
        return _none_by_row(uses, reason)
    if not rows:
        return _none_by_row(uses, "and the outputs are no rows of data")
    return {
        name: found if again[name] == found else _not_by_row(found) for name, found in uses.items()
    }


def _none_by_row(uses: Uses, why: str) -> Uses:
    return {name: _not_by_row(uses[name], why) for name in uses}


def _not_by_row(uses: tuple[Use, ...], why: str = Use("").why) -> tuple[Use, ...]:
    return tuple(Use(use.function, why=why) for use in uses)


def _repeated(value: Any, index: Tensor) -> Any:
    return value[index.to(value.device)] if isinstance(value, Tensor) else value


def _uses(
    forward: Callable[..., Any],
    tensors: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_data: int | None,
) -> tuple[Uses, bool]:
    """The uses in one pass, and whether an output has the data as its first axis."""
    # Copies: a pass may edit weights in place. The watch tells parameters apart by identity.
    watched = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    watch = _Tracer(watched, num_data)
    with watch:
        outputs = forward(watched, *args, **kwargs)
    rows = any(part.dim() > 0 and len(part) == num_data for part in tensors_in(outputs))
    return {name: tuple(found) for name, found in watch.uses.items()}, rows


class _Tracer(WeightWatch):
    def __init__(self, tensors: Mapping[str, Tensor], num_data: int | None) -> None:
        super().__init__(tensors, grad_mode=torch.is_grad_enabled())
        self._num_data = num_data
        self.uses: dict[str, list[Use]] = {name: [] for name in tensors}

    def on_linear(self, call: LinearCall, weight: str | None, bias: str | None) -> Tensor:
        outputs = call.apply(call.inputs, call.weight, call.bias)
        for name, of_bias in ((weight, False), (bias, True)):
            if name is not None:
                self.uses[name].append(call.use(outputs, self._num_data, of_bias=of_bias))
        return outputs

    def on_other(self, name: str, function: str) -> None:
        self.uses[name].append(Use(function))
