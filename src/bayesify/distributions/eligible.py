"""Eligibility of a network and of its parameters: whether they can be made random."""

from __future__ import annotations

import dis
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from glob import escape
from types import FunctionType
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

__all__ = [
    "Weight",
    "check_network",
    "check_not_held_elsewhere",
    "check_orthogonal_maps",
    "check_random_weight",
    "check_tables",
    "check_uniform",
    "is_frozen",
    "named_weights",
    "warn_of_closures",
]

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
#: Classes of a module that holds a part of each parameter.
_SHARDED = ("FSDPModule", "FullyShardedDataParallel")

#: A parameter, or the packed weights that a quantised module holds instead.
Weight: TypeAlias = Tensor | torch.ScriptObject

# Narrower dtypes such as float8 have no arithmetic.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def named_weights(net: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Yield every parameter under each of its names, and the packed weights of quantised modules.

    Example:
        >>> [name for name, _ in named_weights(nn.Sequential(nn.Linear(3, 2)))]
        ['0.weight', '0.bias']
    """
    for prefix, module in net.named_modules(remove_duplicate=False):
        own: dict[str, Weight] = dict(
            module.named_parameters(recurse=False, remove_duplicate=False)
        )
        if any(kind.__module__.startswith("torch.ao.nn.quantized") for kind in type(module).mro()):
            own |= {n: v for n, v in vars(module).items() if isinstance(v, torch.ScriptObject)}
        for name, weight in own.items():
            yield (f"{prefix}.{name}" if prefix else name), weight


def is_frozen(weight: Weight) -> bool:
    """Return True if this is a floating-point parameter with ``requires_grad=False``.

    Parameters of other dtypes can never require a gradient and do not count as frozen.

    Example:
        >>> is_frozen(nn.Parameter(torch.zeros(2), requires_grad=False))
        True
    """
    return (
        isinstance(weight, Tensor)
        and not weight.requires_grad
        and (weight.dtype.is_floating_point or weight.dtype.is_complex)
    )


def check_network(net: nn.Module) -> None:
    """Check that a network can be copied and then run with other parameters.

    Raises:
        TypeError: the network is not a module, is wrapped or sharded for parallel training,
            recomputes parameters with hooks of ``torch.nn.utils`` (``weight_norm``,
            ``spectral_norm``, ``prune``), or holds a lazy buffer, a sparse parameter or a tensor
            with an autograd graph.

    Example:
        >>> check_network(nn.DataParallel(nn.Linear(3, 2)))
        Traceback (most recent call last):
        TypeError: the network must not be wrapped for parallel training, got a DataParallel; ...
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"net must be an nn.Module, got {net!r}")
    if isinstance(net, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"the network must not be wrapped for parallel training, got a {type(net).__name__}; "
            "pass the network inside, net.module"
        )
    for prefix, module in net.named_modules():
        # By name: torch.distributed.fsdp takes its time to load, and may be missing.
        if any(base.__name__ in _SHARDED for base in type(module).__mro__):
            part = f"its part {prefix!r}" if prefix else "it"
            raise TypeError(
                f"the network must hold whole parameters, but {part} was sharded by fully_shard; "
                "make the BayesianModule first, then call fully_shard on the parts of bnn.net and "
                "on the ELBO, see docs/several-processes.md"
            )
        place = f"the module {prefix!r}" if prefix else "the network"
        for hook in module._forward_pre_hooks.values():
            # The hooks of weight_norm, spectral_norm and prune set tensors that cannot be copied.
            kind = type(hook)
            trains = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
            if kind.__module__.startswith("torch.nn.utils.") and trains:
                raise TypeError(
                    f"parameters must not be recomputed by a hook, but {place} has a "
                    f"{kind.__name__}; use torch.nn.utils.parametrizations instead, or make it "
                    "permanent with remove_weight_norm, remove_spectral_norm or prune.remove"
                )
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in (vars(module) | dict(own)).items():
            if isinstance(tensor, nn.Parameter) and tensor.layout is not torch.strided:
                raise TypeError(
                    f"every parameter must be dense, but {name!r} of {place} is {tensor.layout}; "
                    "convert it with .to_dense(), or hold it as a buffer"
                )
            if isinstance(tensor, nn.parameter.UninitializedBuffer):
                raise TypeError(
                    f"every buffer must be initialised, but {name!r} of {place} is lazy; pass one "
                    "batch through the network first"
                )
            if isinstance(tensor, Tensor) and not tensor.is_leaf:
                raise TypeError(
                    f"the network must be one that can be copied, but {name!r} of {place} is the "
                    "result of a computation and carries its graph; detach or delete it"
                )


def check_random_weight(name: str, weight: Weight, *, is_scripted: bool) -> Tensor:
    """Return the weight if it can be random.

    Raises:
        TypeError: it cannot; the message gives the reason and the remedy.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2, device="meta"))
        >>> check_random_weight("scale", weight, is_scripted=False)
        Traceback (most recent call last):
        TypeError: ... 'scale' is on the meta device, which holds no values; load its values ...
    """
    if isinstance(weight, torch.ScriptObject):
        got = "quantised"
        fix = "pass the network before quantisation and quantise the result of to_module()"
    elif is_scripted:
        got = "scripted"
        fix = "pass the network before scripting and script the result of to_module()"
    elif isinstance(weight, nn.parameter.UninitializedParameter):
        got, fix = "lazy", "pass one batch through the network first"
    elif hasattr(weight, "device_mesh"):
        got, fix = "sharded", "make the BayesianModule first, then shard its parts"
    elif weight.is_meta:
        got, fix = "on the meta device, which holds no values", "load its values first"
    elif not weight.dtype.is_floating_point:
        got, fix = str(weight.dtype), "store it as real floating-point numbers"
    elif weight.dtype not in _DTYPES:
        got, fix = str(weight.dtype), "convert the network with net.to(torch.float32)"
    else:
        return weight
    raise TypeError(
        "every random parameter must be a tensor of real floating-point numbers, but "
        f"{name!r} is {got}; {fix}, or keep it deterministic with exclude=({escape(name)!r},)"
    )


def check_uniform(
    attribute: str, fix: str, aliases: Mapping[int, list[str]], chosen: Mapping[int, Tensor]
) -> None:
    """Check that all random parameters have the same ``"dtype"`` or ``"device"``.

    Args:
        attribute: the attribute that must be equal.
        fix: the remedy, for the error message.
        aliases: the names of each parameter.
        chosen: the random parameters, under the same keys.

    Raises:
        TypeError: the attribute differs.

    Example:
        >>> check_uniform("dtype", "convert", {1: ["a"]}, {1: torch.zeros(2)})
    """
    found = {getattr(weight, attribute): aliases[key][0] for key, weight in chosen.items()}
    if len(found) > 1:
        listed = ", ".join(f"{name} is {value}" for value, name in found.items())
        raise TypeError(
            f"all random parameters must share one {attribute}, but {listed}; {fix} or exclude some"
        )


def check_not_held_elsewhere(net: nn.Module, names: Mapping[int, str]) -> None:
    """Check that no module keeps a random parameter in a list or dictionary of its own.

    A pass that reads it there would not see the weights that it is given.

    Args:
        net: the network.
        names: the name of each random parameter, by the parameter's id.

    Raises:
        TypeError: a module does.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> net.held = [net.weight]
        >>> check_not_held_elsewhere(net, {id(net.weight): "weight"})
        Traceback (most recent call last):
        TypeError: ... but 'held' of the network holds 'weight' too; read the module's own ...
    """
    for prefix, module in net.named_modules():
        for attribute, value in vars(module).items():
            # Recurrent layers keep such a list, which is filled anew in each pass.
            own = attribute.startswith("_flat_weight") or attribute in ("_parameters", "_buffers")
            if own or not isinstance(value, list | tuple | dict):
                continue
            parts = value.values() if isinstance(value, dict) else value
            held = next((names[id(part)] for part in parts if id(part) in names), None)
            if held is not None:
                place = f"the module {prefix!r}" if prefix else "the network"
                raise TypeError(
                    "random parameters must be read from the modules that hold them, but "
                    f"{attribute!r} of {place} holds {held!r} too; read the module's own attribute "
                    "in forward, or use nn.ParameterList or nn.ParameterDict"
                )


def warn_of_closures(net: nn.Module) -> None:
    """Warn of functions on modules, such as hooks, that hold a module of the network themselves.

    A function is not copied with the network: it would act on the modules that were passed.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> hook = net.register_forward_hook(lambda *_: setattr(net, "called", True))
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     warn_of_closures(net)
        >>> str(caught[0].message)[:43]
        "a function in '_forward_hooks' of the netwo"
    """
    modules = {id(module) for module in net.modules()}
    for prefix, module in net.named_modules():
        for attribute, value in vars(module).items():
            if attribute == "_compiled_call_impl":  # a copy of the module compiles its own
                continue
            for each in value.values() if isinstance(value, dict) else (value,):
                if isinstance(each, FunctionType) and modules & set(map(id, _variables_of(each))):
                    place = f"the module {prefix!r}" if prefix else "the network"
                    warnings.warn(
                        f"a function in {attribute!r} of {place} holds a module of the network, so "
                        "that it acts on the network that was passed, and not on the Bayesian "
                        "copy; use a method, or the module that a hook is called with",
                        stacklevel=4,
                    )


def _variables_of(function: FunctionType) -> Iterator[object]:
    """Yield what the variables hold that a function takes from where it was written.

    Of a method that is its object too, as where a function wraps a module's forward.
    """
    names = {each.argval for each in dis.get_instructions(function) if each.opname == "LOAD_GLOBAL"}
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it was never set
            values.append(cell.cell_contents)
    for value in values:
        yield value
        yield getattr(value, "__self__", None)


def check_tables(net: nn.Module, chosen: Collection[int]) -> None:
    """Check that random tables of embeddings have dense gradients, and are not edited by a pass.

    Args:
        net: the network.
        chosen: the ids of the random parameters.

    Raises:
        TypeError: one has sparse gradients or a ``max_norm``.

    Example:
        >>> net = nn.Embedding(3, 2, sparse=True)
        >>> check_tables(net, {id(net.weight)})
        Traceback (most recent call last):
        TypeError: every weight of a random parameter has a gradient, but the network has ...
    """
    for prefix, module in net.named_modules():
        if not isinstance(module, _EMBEDDINGS) or id(module.weight) not in chosen:
            continue
        place = f"the module {prefix!r}" if prefix else "the network"
        if module.sparse:
            raise TypeError(
                f"every weight of a random parameter has a gradient, but {place} has sparse=True; "
                "set it to False, or exclude its parameter"
            )
        if module.max_norm is not None:
            raise TypeError(
                f"a forward pass must not edit random parameters in place, but {place} has "
                f"max_norm={module.max_norm}; remove it, since a prior keeps weights small, or "
                "exclude its parameter"
            )


def check_orthogonal_maps(net: nn.Module, chosen: Collection[int]) -> None:
    """Check that no random parameter is read as Householder reflections.

    Their signs are the whole numbers that PyTorch cuts the parameter's diagonal to: noise towards 0
    makes a 0 of a 1, and of a column of the matrix.

    Args:
        net: the network.
        chosen: the ids of the random parameters.

    Raises:
        TypeError: one is.

    Example:
        >>> net = nn.utils.parametrizations.orthogonal(nn.Linear(3, 2))
        >>> check_orthogonal_maps(net, {id(net.parametrizations.weight.original)})
        Traceback (most recent call last):
        TypeError: a random parameter must not be cut to whole numbers, but ...
    """
    for prefix, module in net.named_modules():
        if not isinstance(module, ParametrizationList):
            continue
        original = getattr(module, "original", None)
        maps = (getattr(each, "orthogonal_map", None) for each in module)
        if id(original) in chosen and any(getattr(m, "name", "") == "householder" for m in maps):
            raise TypeError(
                "a random parameter must not be cut to whole numbers, but "
                f"{prefix + '.original'!r} holds Householder reflections, whose signs PyTorch cuts "
                'so; use orthogonal(..., orthogonal_map="cayley") or "matrix_exp", or exclude it'
            )
