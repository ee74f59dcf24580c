"""Attributes of modules, in which a pass of a network may leave tensors for later passes."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from bayesify.estimators.network_state import modules_of

__all__ = ["ModuleAttributes", "is_plain_object", "kept_attributes"]

#: The attributes that every module has: parameters, buffers, submodules, hooks and the mode.
_OF_ALL = frozenset(vars(nn.Module()))
#: Values with more entries are taken for data, not for a cache.
_MOST = 1000
#: Types that are cleared and filled as a list or a dictionary is, and the tuple.
_CONTAINERS = (dict, OrderedDict, defaultdict, list, deque, tuple)


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
        self._contents = [
            (each, copy.copy(each))
            for own in self._own.values()
            for value in own.values()
            for each in _containers(value)
            if type(each) is not tuple
        ]

    def new_tensors(self) -> list[str]:
        """Return the attributes that hold other tensors than before, in a container too."""
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
            if list(map(id, _entries(value))) != list(map(id, _entries(content))):
                value.clear()
                value.update(content) if isinstance(value, dict) else value.extend(content)


@contextmanager
def kept_attributes(net: nn.Module) -> Iterator[None]:
    """Restore the attributes of a network's modules on exit.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> with kept_attributes(net):
        ...     net.cache = net.weight * 2
        >>> hasattr(net, "cache")
        False
    """
    attributes = ModuleAttributes(net)
    try:
        yield
    finally:
        attributes.restore()


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_ALL}


def _entries(container: Any) -> list[Any]:
    is_mapping = isinstance(container, dict)
    return [*container, *container.values()] if is_mapping else [*container]


def _tensors(value: object) -> list[Tensor]:
    """Return the tensors of a value: itself, or those in containers of few entries."""
    if isinstance(value, Tensor):
        return [value]
    return [
        each
        for container in _containers(value)
        for each in (container.values() if isinstance(container, dict) else container)
        if isinstance(each, Tensor)
    ]


def _containers(value: object) -> list[Any]:
    """Return the containers in a value, and the attributes of a plain object; none of many entries.

    Only of types that are cleared and filled as a list or a dictionary is.
    """
    found: list[Any] = []
    left: list[Any] = [vars(value) if is_plain_object(value) else value]
    seen, entries = set[int](), 0
    while left:
        each = left.pop()
        if type(each) not in _CONTAINERS or id(each) in seen:
            continue
        seen.add(id(each))
        entries += len(each)
        if entries > _MOST:
            return []
        found.append(each)
        left.extend(each.values() if isinstance(each, dict) else each)
    return found


def is_plain_object(value: object) -> bool:
    """Return whether a value is an object that holds others in its attributes, and no code.

    Example:
        >>> from types import SimpleNamespace
        >>> is_plain_object(SimpleNamespace(x=1)), is_plain_object(nn.ReLU()), is_plain_object({})
        (True, False, False)
    """
    is_other = isinstance(value, Tensor | nn.Module | ModuleType | type | FunctionType)
    is_container = isinstance(value, dict | list | tuple | set | deque)
    return hasattr(value, "__dict__") and not is_other and not is_container
