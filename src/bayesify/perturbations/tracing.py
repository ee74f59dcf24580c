"""Traced forward passes: which random parameter is used where, and how often."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayesify.perturbations.base import Use
from bayesify.perturbations.operations import LinearCall
from bayesify.perturbations.watching import WeightWatch
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
        last: the uses of the kind of pass that was asked for last, or None.
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
    return value if isinstance(value, (bool, int, float, str)) else type(value)


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
    uses = _uses(forward, tensors, args, kwargs, num_data)
    if num_data is None:
        return {name: tuple(map(_not_by_row, found)) for name, found in uses.items()}
    longer = torch.arange(num_data + 1) % num_data
    more = [
        value[longer.to(value.device)] if isinstance(value, Tensor) else value for value in args
    ]
    named = {
        name: value[longer.to(value.device)] if isinstance(value, Tensor) else value
        for name, value in kwargs.items()
    }
    try:
        again = _uses(forward, tensors, tuple(more), named, num_data + 1)
    except Exception:
        # A network for minibatches of this very size: nothing is known of its rows.
        again = {}
    return {
        name: found if again.get(name) == found else tuple(_not_by_row(use) for use in found)
        for name, found in uses.items()
    }


def _not_by_row(use: Use) -> Use:
    return Use(use.function)


def _uses(
    forward: Callable[..., Any],
    tensors: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_data: int | None,
) -> Uses:
    # Views of their own: the watch tells parameters apart by identity.
    watched = {name: tensor.detach().view_as(tensor) for name, tensor in tensors.items()}
    watch = _Tracer(watched, num_data)
    with watch:
        forward(watched, *args, **kwargs)
    return {name: tuple(found) for name, found in watch.uses.items()}


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
