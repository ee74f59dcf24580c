"""What of a network can be made Bayesian, and a clear word about what cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from glob import escape
from typing import TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["check_network", "check_same", "is_frozen", "named_weights", "random_weight"]

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)

#: A parameter, or what a quantised module holds in its place.
Weight: TypeAlias = Tensor | torch.ScriptObject

# float8 and the like have no arithmetic.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def named_weights(net: nn.Module) -> Iterator[tuple[str, Weight]]:
    """Every parameter under each of its names, and the packed weights of quantised modules.

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
    """Whether this is a parameter that was set not to train, as only floating ones can be.

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
    """Refuse a network that cannot be copied and then run with other parameters.

    Raises:
        TypeError: it is no module, is wrapped for parallel training, recomputes parameters by the
            hooks of old (``weight_norm``, ``spectral_norm``, ``prune``), or holds a lazy buffer,
            a sparse parameter or a tensor that carries a graph.

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
        place = f"the module {prefix!r}" if prefix else "the network"
        if getattr(module, "max_norm", None) is not None and isinstance(module, _EMBEDDINGS):
            raise TypeError(
                f"parameters must not be edited in place by a pass, but {place} has max_norm="
                f"{module.max_norm}; leave it out, a prior keeps weights small"
            )
        for hook in module._forward_pre_hooks.values():
            # weight_norm, spectral_norm and pruning of old: their results cannot be copied.
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
                    f"the network must be one that can be copied, but {place} holds {name!r}, the "
                    "result of a computation with its gradient; detach or delete it"
                )


def random_weight(name: str, weight: Weight, *, is_scripted: bool) -> Tensor:
    """The weight itself, if it can be random.

    Raises:
        TypeError: it cannot; the message says why, what to do, and how to leave it out.

    Example:
        >>> random_weight("scale", nn.Parameter(torch.zeros(2, device="meta")), is_scripted=False)
        Traceback (most recent call last):
        TypeError: ... 'scale' is on the meta device, which holds no values; load its values ...
    """
    if isinstance(weight, torch.ScriptObject):
        got = "quantised"
        mend = "take the network before that and quantise the plain network that to_module() gives"
    elif is_scripted:
        got = "scripted"
        mend = "take the network before that and script the plain network that to_module() gives"
    elif isinstance(weight, nn.parameter.UninitializedParameter):
        got, mend = "lazy", "pass one batch through the network first"
    elif weight.is_meta:
        got, mend = "on the meta device, which holds no values", "load its values first"
    elif not weight.dtype.is_floating_point:
        got, mend = str(weight.dtype), "store it as real floating-point numbers"
    elif weight.dtype not in _DTYPES:
        got, mend = str(weight.dtype), "convert the network with net.to(torch.float32)"
    else:
        return weight
    raise TypeError(
        "every random parameter must be a tensor of real floating-point numbers, but "
        f"{name!r} is {got}; {mend}, or keep it deterministic with exclude=({escape(name)!r},)"
    )


def check_same(
    attribute: str, mend: str, aliases: Mapping[int, list[str]], chosen: Mapping[int, Tensor]
) -> None:
    """Refuse random parameters that differ in ``attribute``, ``"dtype"`` or ``"device"``.

    Args:
        attribute: in what they must not differ.
        mend: how to make them agree, for the message.
        aliases: the names of each parameter.
        chosen: the random parameters, under the same keys.

    Raises:
        TypeError: they differ.

    Example:
        >>> check_same("dtype", "convert", {1: ["a"]}, {1: torch.zeros(2)})
    """
    found = {getattr(weight, attribute): aliases[key][0] for key, weight in chosen.items()}
    if len(found) > 1:
        listed = ", ".join(f"{name} is {value}" for value, name in found.items())
        raise TypeError(
            f"all random parameters must share one {attribute}, but {listed}; {mend} or exclude "
            "some"
        )
