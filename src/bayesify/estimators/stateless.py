"""Stateless calls: run a network with given weights and leave the network unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from bayesify.distributions.layout import ParameterLayout
from bayesify.estimators.network_state import has_own_state, modules_of
from bayesify.estimators.recomputation import recomputable

__all__ = [
    "non_padding_mask",
    "parameter_paths",
    "placeholders",
    "remove_parameters",
    "restore_parameters",
    "run_with",
    "state_dict_of",
]


def remove_parameters(net: nn.Module, layout: ParameterLayout) -> dict[str, Tensor]:
    """Remove the random parameters from ``net`` and return their values.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> sorted(remove_parameters(net, ParameterLayout.of(net))), list(net.parameters())
        (['bias', 'weight'], [])
    """
    values = {}
    for name, aliases in zip(layout.names, layout.ties, strict=True):
        values[name] = net.get_parameter(name).detach()
        for owner, leaf in _owners(net, aliases):
            # None keeps the entry, so that a call without the weight raises an error.
            owner._parameters[leaf] = None
    for module in _recurrent(net):
        _forget_flat_weights(module)
    return values


def non_padding_mask(net: nn.Module, layout: ParameterLayout, values: Tensor) -> Tensor | None:
    """Return a mask that is False for padding rows of embeddings, shape (D,); None if all are True.

    The row of an embedding's ``padding_idx`` is 0 and receives no gradient from the network. As a
    random variable it would move to the prior, and padding would become noise. A padding row with
    other values is treated as a weight.

    Args:
        net: the network, before or after its random parameters were removed.
        layout: the layout of its random parameters.
        values: the values of these parameters, shape (D,).

    Example:
        >>> net = nn.Embedding(3, 2, padding_idx=0)
        >>> layout = ParameterLayout.of(net)
        >>> non_padding_mask(net, layout, net.weight.detach().flatten())
        tensor([False, False,  True,  True,  True,  True])
    """
    mask = torch.ones_like(values, dtype=torch.bool)
    for aliases in layout.ties:
        owners = [owner for owner, _ in _owners(net, aliases)]
        tables = [owner for owner in owners if isinstance(owner, nn.Embedding | nn.EmbeddingBag)]
        indices = {table.padding_idx for table in tables}
        # If the table is tied to a layer of another kind, the row receives gradients there.
        if len(tables) == len(owners) and len(indices) == 1 and None not in indices:
            width = tables[0].embedding_dim
            start = layout.slice_of(aliases[0]).start + (tables[0].padding_idx or 0) * width
            mask[start : start + width] = bool(values[start : start + width].any())
    return None if bool(mask.all()) else mask


def restore_parameters(
    net: nn.Module, layout: ParameterLayout, values: Mapping[str, Tensor]
) -> None:
    """Set the random parameters of ``net`` to these values, with the original ties."""
    for name, aliases in zip(layout.names, layout.ties, strict=True):
        parameter = nn.Parameter(values[name].clone())
        for owner, leaf in _owners(net, aliases):
            setattr(owner, leaf, parameter)


def parameter_paths(net: nn.Module, layout: ParameterLayout) -> dict[str, tuple[str, ...]]:
    """Return the paths at which the network holds each random parameter, by its first name.

    A module that is registered twice has one path, the first of its names.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        >>> net[1], net[2].weight = net[0], net[0].weight
        >>> parameter_paths(net, ParameterLayout.of(net))["0.weight"]
        ('0.weight', '2.weight')
    """
    found = {}
    for name, aliases in zip(layout.names, layout.ties, strict=True):
        places: dict[tuple[nn.Module, str], str] = {}
        for place, alias in zip(_owners(net, aliases), aliases, strict=True):
            places.setdefault(place, alias)
        found[name] = tuple(places.values())
    return found


def run_with(
    net: nn.Module,
    tensors: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    replaced: dict[str, Tensor] | None = None,
) -> Any:
    """Run ``net`` with the given tensors in place of its random parameters.

    Tensors that the pass replaces by others, as a running mean may be, go into ``replaced``.
    """
    if torch.compiler.is_compiling():  # with its own kind of recomputation
        with _without_flat_weights(net):
            return functional_call(net, dict(tensors), args, dict(kwargs), tie_weights=False)
    installed = partial(_installed, net, tensors)
    again = recomputable(installed) if torch.is_grad_enabled() else nullcontext()
    with again, installed():
        result = net(*args, **kwargs)
        if replaced is not None:
            held = {name: _held(net, name) for name in tensors}
            replaced |= {name: each for name, each in held.items() if each is not tensors[name]}
        return result


@contextmanager
def _installed(net: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Give a network these weights; ``functional_call`` takes twice the time for it."""
    owners = [
        (_holding(owner, leaf), leaf, tensors[name])
        for name in tensors
        for owner, leaf in _owners(net, (name,))
    ]
    before = [held[leaf] for held, leaf, _ in owners]
    with _without_flat_weights(net), _without_cached_parametrizations():
        for held, leaf, tensor in owners:
            held[leaf] = tensor
        try:
            yield
        finally:
            for (held, leaf, _), value in zip(owners, before, strict=True):
                held[leaf] = value


@contextmanager
def placeholders(net: nn.Module, layout: ParameterLayout) -> Iterator[None]:
    """Give a network zeros in place of its random parameters, so that it shows which it has.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> layout = ParameterLayout.of(net)
        >>> _ = remove_parameters(net, layout)
        >>> with placeholders(net, layout):
        ...     net
        Linear(in_features=3, out_features=2, bias=True)
        >>> net
        Linear(in_features=3, out_features=2, bias=False)
    """
    zero = torch.zeros((), dtype=layout.dtype)  # expanded, it has the memory of one number
    tensors: dict[str, Tensor] = {}
    paths = parameter_paths(net, layout)
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        shown = nn.Parameter(zero.expand(shape), requires_grad=False)
        tensors |= dict.fromkeys(paths[name], shown)
    with _installed(net, tensors):
        yield


def state_dict_of(
    owner: nn.Module, layout: ParameterLayout, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Return the state dict of a module whose ``net`` lacks its random parameters.

    Layers that write their own, as those of torch_geometric, may read these parameters. Entries
    for them are left out, and so are those that are no part of the module, as neuralop adds one.

    Args:
        owner: the module.
        layout: that of the random parameters of its ``net``.
        args: as for ``nn.Module.state_dict``.
        kwargs: as for ``nn.Module.state_dict``.

    Example:
        >>> owner = nn.Module()
        >>> owner.net = nn.Linear(3, 2)
        >>> layout = ParameterLayout.of(owner.net)
        >>> _ = remove_parameters(owner.net, layout)
        >>> list(state_dict_of(owner, layout))
        []
    """
    net = owner.get_submodule("net")
    if not has_own_state(net):
        usual: dict[str, Any] = nn.Module.state_dict(owner, *args, **kwargs)
        return usual
    named = dict(zip(("destination", "prefix"), args, strict=False)) | kwargs
    others, prefix = set(named.get("destination") or ()), named.get("prefix", "")
    with placeholders(net, layout):
        state: dict[str, Any] = nn.Module.state_dict(owner, *args, **kwargs)
    random = {f"{prefix}net.{name}" for names in layout.ties for name in names}
    own = tuple(f"{prefix}{each}" for each in (*owner._modules, *owner._buffers))
    for name in state.keys() - others:
        if name in random or not name.startswith(own):
            del state[name]
    return state


def _recurrent(net: nn.Module) -> list[nn.RNNBase]:
    return [module for module in modules_of(net) if isinstance(module, nn.RNNBase)]


@contextmanager
def _without_flat_weights(net: nn.Module) -> Iterator[None]:
    """Let recurrent layers collect their weights within the block, and again after it."""
    recurrent = _recurrent(net)
    for module in recurrent:
        _forget_flat_weights(module)
    try:
        yield
    finally:
        for module in recurrent:
            _forget_flat_weights(module)


@contextmanager
def _without_cached_parametrizations() -> Iterator[None]:
    """Within ``parametrize.cached()``, compute them anew for the weights of this pass."""
    if not parametrize._cache_enabled:
        yield
        return
    before, parametrize._cache = parametrize._cache, {}
    try:
        yield
    finally:
        parametrize._cache = before


def _forget_flat_weights(module: nn.RNNBase) -> None:
    # A recurrent layer caches the weights of its last call, which would hold the autograd graph and
    # prevent deepcopy. Dead references make it collect its weights again at the next call.
    names = module._flat_weights_names
    module._flat_weights = [module._parameters.get(name) for name in names]
    module._flat_weight_refs = [_dead_reference] * len(names)  # type: ignore[list-item]


def _dead_reference() -> None:
    """Return None, as a weak reference to a deleted object does."""


def _held(net: nn.Module, name: str) -> Any:
    [(owner, leaf)] = _owners(net, (name,))
    return _holding(owner, leaf)[leaf]


def _holding(owner: nn.Module, leaf: str) -> dict[str, Any]:
    """The parameters or the buffers of a module, those that have this name."""
    is_parameter = leaf in owner._parameters
    return owner._parameters if is_parameter else owner._buffers


def _owners(net: nn.Module, aliases: tuple[str, ...]) -> Iterator[tuple[nn.Module, str]]:
    for alias in aliases:
        *path, leaf = alias.split(".")
        owner = net
        for name in path:  # get_submodule takes ten times as long
            owner = owner._modules[name]  # type: ignore[assignment]
        yield owner, leaf
