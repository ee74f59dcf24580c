"""Attributes of modules, in which a pass of a network may leave tensors for later passes."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from bayesify.estimators.network_state import modules_of

__all__ = ["ModuleAttributes"]

#: The attributes that every module has: parameters, buffers, submodules, hooks and the mode.
_OF_ALL = frozenset(vars(nn.Module()))
#: Containers with more entries are taken for data, not for a cache.
_MOST = 1000


class ModuleAttributes:
    """The attributes of a network's modules before a pass, besides parameters and buffers.

    Args:
        net: the network.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> net.cache, net.calls = None, 0
        >>> before = ModuleAttributes(net)
        >>> net.cache, net.calls = net.weight * 2, 1
        >>> before.new_tensors()
        ['cache']
        >>> before.restore()
        >>> net.cache is None, before.new_tensors()
        (True, [])
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._own = {module: _attributes(module) for module in modules_of(net)}
        self._tensors = [
            each for own in self._own.values() for value in own.values() for each in _tensors(value)
        ]
        self._contents: list[tuple[Any, Any]] = [
            (value, copy.copy(value))
            for own in self._own.values()
            for value in own.values()
            if type(value) in (list, dict) and len(value) <= _MOST
        ]

    def new_tensors(self) -> list[str]:
        """Return the attributes that hold other tensors than before, in a list or a dict too."""
        known = {id(each) for each in self._tensors}
        return [
            f"{path}.{name}" if path else name
            for path, module in self._net.named_modules()
            for name, value in _attributes(module).items()
            if any(id(each) not in known for each in _tensors(value))
        ]

    def restore(self) -> None:
        """Give the modules the attributes that they had."""
        for module, own in self._own.items():
            held = vars(module)
            for name in _attributes(module).keys() - own.keys():
                del held[name]
            held.update(own)
        for value, content in self._contents:
            value.clear()
            value.extend(content) if type(value) is list else value.update(content)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_ALL}


def _tensors(value: object) -> list[Tensor]:
    """Return the tensors of a value: itself, or those in containers of few entries."""
    found: list[Tensor] = []
    left, seen = [value], set()
    while left:
        each = left.pop()
        if isinstance(each, Tensor):
            found.append(each)
        elif type(each) in (list, tuple, dict) and id(each) not in seen and len(each) <= _MOST:  # type: ignore[arg-type]
            seen.add(id(each))
            left.extend(each.values() if isinstance(each, dict) else each)  # type: ignore[arg-type]
    return found
