"""Stateless calls: run a network with given weights and leave the network unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from bayesify.distributions.layout import ParameterLayout
from bayesify.estimators.recomputation import recomputable

__all__ = [
    "copy_network",
    "evaluation_mode",
    "frozen_in_evaluation",
    "has_own_code",
    "is_out_of_memory",
    "modules_of",
    "non_padding_mask",
    "parameter_paths",
    "placeholders",
    "remove_parameters",
    "restore_parameters",
    "run_with",
    "snapshot",
]


def copy_network(net: nn.Module) -> nn.Module:
    """Return a copy of a network whose frozen parameters share the memory of the original's.

    Each is a parameter of its own, so that moving or converting the copy leaves the original alone.

    Raises:
        TypeError: an attribute of a module cannot be copied, such as a lock.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> net.bias.requires_grad = False
        >>> copied = copy_network(net)
        >>> copied.bias is net.bias, copied.bias.data_ptr() == net.bias.data_ptr()
        (False, True)
        >>> copied.weight.data_ptr() == net.weight.data_ptr()
        False
    """
    # A subclass, as libraries of quantised weights have them, knows itself how it is copied.
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach(), requires_grad=False)
        for parameter in net.parameters()
        if type(parameter) is nn.Parameter and not parameter.requires_grad
    }
    try:
        return copy.deepcopy(net, memo)
    except Exception as error:  # of any kind that an object's own code raises
        if is_out_of_memory(error):
            raise
        refusal = _uncopied(net)
        if refusal is None:
            raise
        raise TypeError(refusal) from error


def _uncopied(net: nn.Module) -> str | None:
    """Return which attribute of a network cannot be copied, and what to do; None if all can."""
    for path, module in net.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                place = f"{path}.{name}" if path else name
                return (
                    "the network must be one that copy.deepcopy copies, but its attribute "
                    f"{place!r}, of type {type(value).__name__}, cannot be copied; create it when "
                    f"it is first used, or give {type(module).__name__} a __deepcopy__ method"
                )
    return None


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
) -> Any:
    """Run ``net`` with the given tensors in place of its random parameters."""
    if torch.compiler.is_compiling():  # with its own kind of recomputation
        with _without_flat_weights(net):
            return functional_call(net, dict(tensors), args, dict(kwargs), tie_weights=False)
    installed = partial(_installed, net, tensors)
    again = recomputable(installed) if torch.is_grad_enabled() else nullcontext()
    with again, installed():
        return net(*args, **kwargs)


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


def modules_of(net: nn.Module) -> list[nn.Module]:
    """Return ``net`` and all modules within it, each once, in a third of ``net.modules()``'s time.

    Example:
        >>> modules_of(nn.Sequential(nn.ReLU()))
        [Sequential(
          (0): ReLU()
        ), ReLU()]
    """
    found, seen = [net], {net}
    for module in found:  # which grows
        for each in module._modules.values():
            if each is not None and each not in seen:
                seen.add(each)
                found.append(each)
    return found


def has_own_code(net: nn.Module) -> bool:
    """Return whether a module of the network is of a class that is not PyTorch's.

    Example:
        >>> class Own(nn.Linear): ...
        >>> has_own_code(nn.Sequential(nn.ReLU())), has_own_code(nn.Sequential(Own(2, 2)))
        (False, True)
    """
    return not all(type(module).__module__.startswith("torch.nn.") for module in modules_of(net))


@contextmanager
def evaluation_mode(net: nn.Module) -> Iterator[None]:
    """Set all modules of ``net`` to evaluation mode, and restore their modes on exit."""
    modules = modules_of(net)
    modes = [(module, module.training) for module in modules]
    if any(training for _, training in modes):
        if all(map(_has_usual_modes, modules)):
            for module, _ in modes:
                _set_training(module, False)
        else:  # a network may have its own idea of a mode
            net.eval()
    try:
        yield
    finally:
        for module, training in modes:
            if module.training != training:
                _set_training(module, training)


def _has_usual_modes(module: nn.Module) -> bool:
    own = getattr(module.train, "__func__", None), getattr(module.eval, "__func__", None)
    return own == (nn.Module.train, nn.Module.eval)


def _set_training(module: nn.Module, training: bool) -> None:
    # ``nn.Module.__setattr__`` looks for parameters first, which takes a tenth of the time of a
    # small network's pass. A class with another one, such as a scripted module's, needs it.
    if type(module).__setattr__ is nn.Module.__setattr__:
        object.__setattr__(module, "training", training)
    else:
        module.training = training


def frozen_in_evaluation(net: nn.Module, layout: ParameterLayout) -> list[nn.Module]:
    """Return the parts that were set to evaluation mode within a network in training mode.

    They have neither random nor trained parameters, such as the frozen body of a pretrained
    network. A network that is in evaluation mode as a whole, as it may come from a hub, has none.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 3).requires_grad_(False).eval(), nn.Linear(3, 2))
        >>> layout = ParameterLayout.of(net)
        >>> frozen_in_evaluation(net, layout)
        [Linear(in_features=3, out_features=3, bias=True)]
    """
    random = [name for names in layout.ties for name in names]
    found, open_ones = [], [("", net)] if net.training else []
    for prefix, module in open_ones:  # which grows
        for name, child in module.named_children():
            path = f"{prefix}{name}."
            if child.training:
                open_ones.append((path, child))
                continue
            trained = any(parameter.requires_grad for parameter in child.parameters())
            if not trained and not any(each.startswith(path) for each in random):
                found.append(child)
    return found


def snapshot(net: nn.Module) -> Callable[[], None]:
    """Save the buffers and generator states that a pass may change; return a function to restore.

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
            # A pass may have replaced a buffer by another tensor.
            module._buffers[name] = buffer
            if buffer is not None and value is not None:
                buffer.copy_(value)
        torch.set_rng_state(generator)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return undo


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that memory is exhausted.

    Example:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("a shape is wrong"))
        (True, False)
    """
    # PyTorch's CPU allocator raises a plain RuntimeError; its words differ between versions.
    words = ("can't allocate memory", "DefaultCPUAllocator")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    )


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
