"""Running a network with weights that are given to it, and leaving it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bayesify.layout import ParameterLayout

__all__ = [
    "evaluating",
    "places_of",
    "put_back",
    "run_with",
    "snapshot",
    "take_out",
    "without_padding",
]


def take_out(net: nn.Module, layout: ParameterLayout) -> dict[str, Tensor]:
    """Remove the random parameters from ``net`` and return their values.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> sorted(take_out(net, ParameterLayout.of(net))), list(net.parameters())
        (['bias', 'weight'], [])
    """
    values = {}
    for name, aliases in zip(layout.names, layout.ties, strict=True):
        values[name] = net.get_parameter(name).detach()
        for owner, leaf in _places(net, aliases):
            # None keeps the place: forgetting to supply the weight then fails loudly.
            owner._parameters[leaf] = None
    for module in _recurrent(net):
        _forget_flat_weights(module)
    return values


def without_padding(net: nn.Module, layout: ParameterLayout, values: Tensor) -> Tensor | None:
    """Which weights are not padding, shape (D,), or None if all are weights.

    The row of an embedding's ``padding_idx`` is 0 and no gradient of the network reaches it: as a
    random variable it would only fall back to the prior, and padding would become noise. A row
    that holds other values is a weight like any other.

    Args:
        net: the network, as it was before its parameters were taken out or after.
        layout: its random parameters.
        values: their values, shape (D,).

    Example:
        >>> net = nn.Embedding(3, 2, padding_idx=0)
        >>> layout = ParameterLayout.of(net)
        >>> without_padding(net, layout, net.weight.detach().flatten())
        tensor([False, False,  True,  True,  True,  True])
    """
    kept = torch.ones_like(values, dtype=torch.bool)
    for aliases in layout.ties:
        owners = [owner for owner, _ in _places(net, aliases)]
        tables = [owner for owner in owners if isinstance(owner, nn.Embedding | nn.EmbeddingBag)]
        indices = {table.padding_idx for table in tables}
        # Tied to a layer of another kind, a gradient reaches the row there.
        if len(tables) == len(owners) and len(indices) == 1 and None not in indices:
            width = tables[0].embedding_dim
            start = layout.slice_of(aliases[0]).start + (tables[0].padding_idx or 0) * width
            kept[start : start + width] = bool(values[start : start + width].any())
    return None if bool(kept.all()) else kept


def put_back(net: nn.Module, layout: ParameterLayout, values: Mapping[str, Tensor]) -> None:
    """Give ``net`` parameters of these values again, tied as they were."""
    for name, aliases in zip(layout.names, layout.ties, strict=True):
        parameter = nn.Parameter(values[name].clone())
        for owner, leaf in _places(net, aliases):
            setattr(owner, leaf, parameter)


def places_of(net: nn.Module, layout: ParameterLayout) -> dict[str, tuple[str, ...]]:
    """For each random parameter one name of each place where the network keeps it.

    A module that is registered twice is one place, under two names.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        >>> net[1], net[2].weight = net[0], net[0].weight
        >>> places_of(net, ParameterLayout.of(net))["0.weight"]
        ('0.weight', '2.weight')
    """
    found = {}
    for name, aliases in zip(layout.names, layout.ties, strict=True):
        places: dict[tuple[nn.Module, str], str] = {}
        for place, alias in zip(_places(net, aliases), aliases, strict=True):
            places.setdefault(place, alias)
        found[name] = tuple(places.values())
    return found


def run_with(
    net: nn.Module,
    tensors: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Run ``net`` with one tensor under each name of a random parameter."""
    recurrent = _recurrent(net)
    for module in recurrent:
        _forget_flat_weights(module)
    try:
        return functional_call(net, dict(tensors), args, dict(kwargs), tie_weights=False)
    finally:
        for module in recurrent:
            _forget_flat_weights(module)


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Put every part of ``net`` in evaluation mode, and back as it was afterwards."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def snapshot(net: nn.Module) -> Callable[[], None]:
    """Note the buffers and the generators that a pass may change; call the result to undo it.

    Example:
        >>> net = nn.BatchNorm1d(2)
        >>> undo = snapshot(net)
        >>> _ = net(torch.ones(3, 2))
        >>> undo()
        >>> net.running_mean
        tensor([0., 0.])
    """
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in net.modules()
        for name, buffer in module._buffers.items()
    ]
    generator = torch.get_rng_state()
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = torch.cuda.get_rng_state_all() if used else []

    @torch.no_grad()
    def undo() -> None:
        for module, name, buffer, value in buffers:
            # A pass may have put another tensor in the place of a buffer.
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.copy_(value)
        torch.set_rng_state(generator)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return undo


def _recurrent(net: nn.Module) -> list[nn.RNNBase]:
    return [module for module in net.modules() if isinstance(module, nn.RNNBase)]


def _forget_flat_weights(module: nn.RNNBase) -> None:
    # A recurrent layer keeps a list of what it ran with, which would hold the graph and defy
    # deepcopy. A reference to nothing makes it gather its weights anew at the next call.
    names = module._flat_weights_names
    module._flat_weights = [module._parameters.get(name) for name in names]
    module._flat_weight_refs = [_nothing] * len(names)  # type: ignore[list-item]


def _nothing() -> None:
    """What a weak reference gives whose object is gone."""


def _places(net: nn.Module, aliases: tuple[str, ...]) -> Iterator[tuple[nn.Module, str]]:
    for alias in aliases:
        owner, _, leaf = alias.rpartition(".")
        yield net.get_submodule(owner), leaf
