"""Reuse of what a network computes before its first random weight, over weight samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from bayesify.module.random_network import RandomNetwork

__all__ = ["TrunkReuse"]

#: Bytes of inputs and results that are kept.
_LARGEST = 256 * 10**6


class TrunkReuse:
    """Runs modules without random weights once, where later weight samples call them alike.

    In the first weight sample the calls that come before the first module with a random weight are
    kept. In each later one such a call is answered by its result, if its inputs have the same
    values; they are compared every time. So the frozen body of a network whose last layer is random
    is run once, and not for each of the samples.

    A call is not kept if it draws random numbers, edits its inputs or its module's tensors, returns
    anything but tensors and plain values, or if forward hooks, TorchScript or ``torch.compile``
    would see that it is missing.

    Args:
        network: the network, in evaluation mode.

    Example:
        >>> from torch import nn
        >>> from bayesify.distributions.posteriors import Delta
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> reuse = TrunkReuse(RandomNetwork(net, posterior=Delta, include=("2.*",)))
        >>> reuse.num_modules
        2
    """

    def __init__(self, network: RandomNetwork) -> None:
        self._net = network.net
        owners = {path.rpartition(".")[0] for path in network.random_paths}
        self._trunk = list(_maximal_modules(self._net, owners))
        self._owners = [self._net.get_submodule(path) for path in owners]
        self._calls: dict[tuple[int, int], _Call] = {}
        self._counts = [0] * len(self._trunk)
        self._bytes = 0
        self._is_first, self._is_before = True, True

    @property
    def num_modules(self) -> int:
        """The number of modules whose calls may be kept."""
        return len(self._trunk)

    @contextmanager
    def sample(self) -> Iterator[None]:
        """Run the passes of one weight sample within this context, in the same order each time."""
        self._counts = [0] * len(self._trunk)
        patched: dict[nn.Module, Callable[..., Any]] = {}
        if self._trunk and (self._is_first or self._calls):
            for module in (*self._owners, self._net):
                patched[module] = partial(self._mark, module, module.forward)
            for number, module in enumerate(self._trunk):
                patched[module] = partial(self._answer, number, module, module.forward)
        usable = {module: new for module, new in patched.items() if "forward" not in vars(module)}
        if len(usable) < len(patched):  # someone else has put a forward of their own there
            usable = {}
        for module, forward in usable.items():
            vars(module)["forward"] = forward
        try:
            yield
        finally:
            for module in usable:
                del vars(module)["forward"]
            self._is_first = False

    def _mark(
        self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Note that a pass begins, or that it has reached a random weight."""
        self._is_before = module is self._net and module not in self._owners
        return forward(*args, **kwargs)

    def _answer(
        self,
        number: int,
        module: nn.Module,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        key = number, self._counts[number]
        self._counts[number] += 1
        kept = self._calls.get(key)
        if kept is not None and kept.is_of(args, kwargs):
            return kept.result()
        if kept is not None:
            del self._calls[key]  # it depends on the weights
        if not (self._is_first and self._is_before and self._bytes < _LARGEST):
            return forward(*args, **kwargs)
        result, call = _run(module, forward, args, kwargs)
        if call is not None:
            self._calls[key] = call
            self._bytes += call.nbytes
        return result


@dataclass
class _Call:
    """A call of a module: the leaves of its arguments, and those of what it returned for them."""

    leaves: list[Any]
    spec: TreeSpec
    parts: list[Any]
    result_spec: TreeSpec
    versions: list[int]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are kept."""
        return sum(tensor.nbytes for tensor in _tensors([*self.leaves, *self.parts]))

    def result(self) -> Any:
        """Return what the module returned, in new containers, which the network may change."""
        return tree_unflatten(self.parts, self.result_spec)

    def is_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether other arguments have the same values, and the result was not edited since."""
        leaves, spec = tree_flatten((args, kwargs))
        return (
            spec == self.spec
            and self.versions == _versions(self.parts)
            and all(map(_are_equal, leaves, self.leaves))
        )


def _run(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, _Call | None]:
    """Return the result, and the call if its result can be used again."""
    leaves, spec = tree_flatten((args, kwargs))
    held = [*leaves, *module.parameters(), *module.buffers()]
    if not all(map(_is_plain, held)):
        return forward(*args, **kwargs), None
    versions, states = _versions(held), _generator_states(_tensors(held))
    result = forward(*args, **kwargs)
    is_pure = versions == _versions(held) and all(
        map(torch.equal, states, _generator_states(_tensors(held)))
    )
    parts, result_spec = tree_flatten(result)
    if not is_pure or not all(map(_is_plain, parts)):
        return result, None
    return result, _Call(leaves, spec, parts, result_spec, _versions(parts))


def _tensors(values: Sequence[object]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def _versions(values: Sequence[object]) -> list[int]:
    return [tensor._version for tensor in _tensors(values)]


def _generator_states(tensors: list[Tensor]) -> list[Tensor]:
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, sorted(devices, key=str))]


def _is_plain(value: object) -> bool:
    """Whether values can be compared, and tensors tell when they are edited."""
    if isinstance(value, Tensor):
        is_dense = value.layout is torch.strided and not value.is_nested
        return type(value) in (Tensor, nn.Parameter) and is_dense and not value.is_inference()
    return value is None or isinstance(value, (bool, int, float, str))


def _are_equal(one: object, other: object) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return type(one) is type(other) and one == other
    same = one.dtype == other.dtype and one.device == other.device and one.shape == other.shape
    return same and (one is other or torch.equal(one, other))


def _maximal_modules(net: nn.Module, owners: set[str]) -> Iterator[nn.Module]:
    """Yield the largest modules in which no module owns a random weight, each once."""
    seen: set[nn.Module] = set()
    pending = [("", net)]
    while pending:
        path, module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        inside = f"{path}." if path else ""
        if not any(owner == path or owner.startswith(inside) for owner in owners):
            if _may_be_left_out(module):
                yield module
            continue
        pending += [(f"{inside}{name}", child) for name, child in module.named_children()]


def _may_be_left_out(module: nn.Module) -> bool:
    """Whether nothing but its result tells that a module was not called."""
    within = list(module.modules())
    return not any(
        isinstance(each, torch.jit.ScriptModule)
        or each._compiled_call_impl is not None
        or type(each).__name__ == "OptimizedModule"
        or (each is not module and (each._forward_hooks or each._forward_pre_hooks))
        for each in within
    )
