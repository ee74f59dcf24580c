"""Attributes of modules, in which a pass of a network may leave tensors for later passes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from bayesify.estimators.network_state import modules_of

__all__ = ["ModuleAttributes", "is_plain_object", "kept_attributes"]

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
            (each, [*each.items()] if isinstance(each, dict) else [*each])
            for own in self._own.values()
            for value in own.values()
            for each in _containers(value)
            if isinstance(each, dict | list | deque)
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
    """Return the containers of few entries in a value, and the attributes of plain objects."""
    found: list[Any] = []
    left, seen = [value], set[int]()
    while left:
        each: Any = left.pop()
        if is_plain_object(each):
            each = vars(each)
        if not isinstance(each, dict | list | tuple | deque) or id(each) in seen:
            continue
        seen.add(id(each))
        if len(each) <= _MOST:
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
    is_other = isinstance(value, Tensor | nn.Module | ModuleType | dict | list | tuple | deque)
    return hasattr(value, "__dict__") and not is_other and not callable(value)
