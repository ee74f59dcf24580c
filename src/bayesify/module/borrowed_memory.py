"""The memory that the copy of a network shares with the original, until one of them changes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BorrowedMemory"]


class BorrowedMemory:
    """Parameters of a copy that share the memory of the original, which must not change.

    Args:
        net: a copy by :func:`~bayesify.estimators.network_state.copy_network`, whose frozen
            parameters do.

    Example:
        >>> from bayesify.estimators.network_state import copy_network
        >>> net = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2))
        >>> copied = copy_network(net)
        >>> borrowed = BorrowedMemory(copied)
        >>> _ = copied[0].requires_grad_(True)
        >>> borrowed.own_trained(copied)
        >>> copied[0].weight.data_ptr() == net[0].weight.data_ptr()
        False
    """

    def __init__(self, net: nn.Module) -> None:
        self._names = {name for name, each in net.named_parameters() if not each.requires_grad}

    def own_trained(self, net: nn.Module) -> None:
        """Give parameters that are trained by now memory of their own."""
        if not self._names:
            return
        trained = {n: each for n, each in self._borrowed(net).items() if each.requires_grad}
        if trained:
            # Made here: as a decorator it would import the compiler, which takes seconds.
            torch.compiler.disable(self._own)(trained)

    def own_loaded(self, net: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        """Give parameters into which a state dict will write other values memory of their own."""
        changed = {
            name: each
            for name, each in self._borrowed(net).items()
            if (loaded := state.get(f"{prefix}{name}")) is not None and not _is_equal(each, loaded)
        }
        self._own(changed)

    def _borrowed(self, net: nn.Module) -> dict[str, nn.Parameter]:
        return {name: each for name, each in net.named_parameters() if name in self._names}

    def _own(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            parameter.data = parameter.data.clone()
            self._names.discard(name)


def _is_equal(some: Tensor, other: Tensor) -> bool:
    kinds = [(each.dtype, each.device, each.shape) for each in (some, other)]
    return kinds[0] == kinds[1] and torch.equal(_comparable(some), _comparable(other))


def _comparable(values: Tensor) -> Tensor:
    # PyTorch does not compare numbers of 8 bits.
    is_float8 = values.is_floating_point() and values.element_size() == 1
    return values.view(torch.uint8) if is_float8 else values
