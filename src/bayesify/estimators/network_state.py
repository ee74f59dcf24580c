"""An ordinary network's copies, modules, modes and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from bayesify.distributions.layout import ParameterLayout
from bayesify.estimators.out_of_memory import is_out_of_memory

__all__ = [
    "copy_network",
    "edits_in_place",
    "evaluation_mode",
    "frozen_in_evaluation",
    "has_own_code",
    "has_own_state",
    "kept_tensors",
    "modules_of",
    "snapshot",
    "with_own_elements",
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
        return with_own_elements(copy.deepcopy(net, memo))
    except Exception as error:  # of any kind that an object's own code raises
        if is_out_of_memory(error):
            raise
        refusal = _uncopied(net)
        if refusal is None:
            raise
        raise TypeError(refusal) from error


def with_own_elements(net: nn.Module) -> nn.Module:
    """Replace buffers of ``Tensor.expand``, whose elements share memory, by copies.

    PyTorch does not write to such a buffer, so that a saved network could not be loaded.

    Example:
        >>> net = nn.Module()
        >>> net.register_buffer("mean", torch.zeros(1).expand(3))
        >>> with_own_elements(net).mean.stride()
        (1,)
    """
    copies: dict[int, Tensor] = {}  # of a buffer that several modules share, one
    for module in modules_of(net):
        for name, each in module._buffers.items():
            if each is None or is_lazy(each) or each.layout is not torch.strided:
                continue
            axes = zip(each.shape, each.stride(), strict=True)
            if any(size > 1 and stride == 0 for size, stride in axes):
                module._buffers[name] = copies.setdefault(id(each), each.clone())
    return net


def kept_tensors(net: nn.Module) -> dict[int, Any]:
    """Return copies of the results of passes that a network keeps, as a memo for ``deepcopy``.

    PyTorch copies no tensor that carries its graph; these do not.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> net.last = net(torch.zeros(1, 3))
        >>> copy.deepcopy(net, kept_tensors(net)).last.requires_grad
        False
    """
    values = [value for module in modules_of(net) for value in tree_leaves(vars(module))]
    results = [each for each in values if isinstance(each, Tensor) and not each.is_leaf]
    return {id(each): each.detach().clone() for each in results}


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


def has_own_state(net: nn.Module) -> bool:
    """Return whether a module's own code writes its state dict, and may read its parameters there.

    Example:
        >>> has_own_state(nn.Sequential(nn.Linear(2, 2)))
        False
    """
    usual = nn.Module.state_dict, nn.Module._save_to_state_dict
    kinds = {type(module) for module in modules_of(net)}
    return any((kind.state_dict, kind._save_to_state_dict) != usual for kind in kinds)


def edits_in_place(net: nn.Module) -> bool:
    """Return whether a module of PyTorch's is set to edit its input, such as ReLU(inplace=True).

    Example:
        >>> edits_in_place(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)))
        True
    """
    return any(vars(module).get("inplace", False) for module in modules_of(net))


@contextmanager
def evaluation_mode(net: nn.Module) -> Iterator[None]:
    """Set all modules of ``net`` to evaluation mode, and restore their modes on exit."""
    modules = modules_of(net)
    modes = [(module, module.training) for module in modules]
    is_usual = True
    if any(training for _, training in modes):
        is_usual = all(map(_has_usual_modes, modules))
        if is_usual:
            for module, _ in modes:
                _set_training(module, False)
        else:  # a network may have its own idea of a mode
            net.eval()
    try:
        yield
    finally:
        for module, training in modes:  # a parent before its children, whose modes it sets
            if module.training != training:
                if is_usual:
                    _set_training(module, training)
                else:
                    module.train(training)


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
