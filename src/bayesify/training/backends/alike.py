"""Compare networks of which one forward pass is to compute the outputs of all."""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from bayesify.estimators.network_state import modules_of
from bayesify.module.bayesian import BayesianModule

__all__ = ["computed_names", "difference"]

_TENSORS = ("_parameters", "_buffers")
_HOOKS = [name for name, held in vars(nn.Module()).items() if "_hooks" in name and held == {}]
_original_class = parametrize.type_before_parametrizations


def difference(first: BayesianModule, other: BayesianModule) -> str | None:
    """Describe in what two networks differ other than their numbers; None if in nothing.

    The values of weights and buffers, the numbers of priors and the seeds may differ. Attributes of
    modules are compared by their values, functions and hooks by their code.

    Example:
        >>> first, other = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> first.power, other.power = [1.0], [2.0]
        >>> difference(BayesianModule(first), BayesianModule(other))
        "the attribute 'power' of its Linear"
    """
    kinds = _kinds(other)
    for name, kind in _kinds(first).items():
        if kind != kinds[name]:
            return f"its {name}"
    for mine, its in zip(modules_of(first.net), modules_of(other.net), strict=False):
        found = _difference_of_modules(mine, its)
        if found is not None:
            return f"{found} of its {_original_class(its).__name__}"
    return None


def computed_names(module: nn.Module) -> list[str]:
    """Return the attributes that hooks compute from the weights before each pass.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(action="ignore"):  # it is deprecated
        ...     computed_names(nn.utils.weight_norm(nn.Linear(2, 1)))
        ['weight']
    """
    hooks = module._forward_pre_hooks.values()
    return [hook.name for hook in hooks if hasattr(hook, "name")]


def _kinds(bnn: BayesianModule) -> dict[str, object]:
    mean = bnn.posterior.mean
    return {
        "layout": bnn.layout,
        "modules": str(bnn.net),
        "estimator": bnn.estimator,
        "output": bnn.output,
        "posterior": (getattr(bnn.posterior, "family", None), mean.dtype, mean.device),
        "prior": type(bnn.weight_prior),
        "likelihood": type(bnn.likelihood),
    }


def _difference_of_modules(first: nn.Module, other: nn.Module) -> str | None:
    # Parametrised modules have classes of their own, each of the name of the original one.
    are_graphs = isinstance(first, fx.GraphModule) and isinstance(other, fx.GraphModule)
    if _original_class(first) is not _original_class(other) and not are_graphs:
        return "the class"
    for kind in _TENSORS:
        mine, its = (_shapes(vars(module)[kind]) for module in (first, other))
        for name in {**mine, **its}:
            if mine.get(name) != its.get(name):
                return f"the {'parameter' if kind == '_parameters' else 'buffer'} {name!r}"
    alike = _Alike()
    mine, its = vars(first), vars(other)
    for name in {**mine, **its}:
        if name in (*_TENSORS, "_modules", *computed_names(first)):
            continue
        if are_graphs and name == "_graph":  # their code is compared
            continue
        if name not in mine or name not in its:
            return f"the attribute {name!r}"
        pair: tuple[Any, Any] = mine[name], its[name]
        if name in _HOOKS:  # by numbers that are other ones in each network
            pair = [*pair[0].values()], [*pair[1].values()]
        if not alike(*pair):
            return f"the attribute {name!r}"
    return None


def _shapes(tensors: Mapping[str, Tensor | None]) -> dict[str, object]:
    return {
        name: None if each is None else (each.shape, each.dtype, each.device)
        for name, each in tensors.items()
    }


class _Alike:
    """Whether two attributes have one meaning."""

    def __init__(self) -> None:
        # Objects may refer to each other in a circle. They are kept, as are so their ids.
        self._met: dict[tuple[int, int], object] = {}

    def __call__(self, first: Any, other: Any) -> bool:
        if first is other or (id(first), id(other)) in self._met:
            return True
        if type(first) is not type(other):
            return False
        self._met[id(first), id(other)] = first, other
        if isinstance(first, nn.Module):  # its own attributes are compared with it
            return True
        if isinstance(first, Tensor):
            kinds = [(each.shape, each.dtype, each.device) for each in (first, other)]
            is_weight = isinstance(first, nn.Parameter)  # whose values may differ
            return kinds[0] == kinds[1] and (is_weight or _equal_tensors(first, other))
        if isinstance(first, np.ndarray):
            has_nan = first.dtype.kind in "fc"
            return first.dtype == other.dtype and np.array_equal(first, other, equal_nan=has_nan)
        if isinstance(first, torch.Generator):
            return torch.equal(first.get_state(), other.get_state())
        if isinstance(first, np.random.Generator):
            return self(first.bit_generator.state, other.bit_generator.state)
        if isinstance(first, Mapping):
            return self([*first.keys()], [*other.keys()]) and self(
                [*first.values()], [*other.values()]
            )
        if isinstance(first, list | tuple | deque):
            return len(first) == len(other) and all(map(self, first, other))
        if isinstance(first, set | frozenset):
            of_modules = all(isinstance(each, nn.Module) for each in (*first, *other))
            return len(first) == len(other) if of_modules else bool(first == other)
        if isinstance(first, types.MethodType):
            return first.__func__ is other.__func__ and self(first.__self__, other.__self__)
        if isinstance(first, types.FunctionType):
            return first.__code__ == other.__code__ and self(_captured(first), _captured(other))
        if isinstance(first, weakref.ref):
            return self(first(), other())
        if isinstance(first, functools.partial):
            parts = ((p.func, p.args, p.keywords) for p in (first, other))
            return self(*parts)
        return self._objects(first, other)

    def _objects(self, first: Any, other: Any) -> bool:
        try:
            if bool(first == other) or bool(first != first and other != other):
                return True
        except Exception:  # of the object's own code
            return False
        return hasattr(first, "__dict__") and self(vars(first), vars(other))


def _equal_tensors(first: Tensor, other: Tensor) -> bool:
    if first.is_sparse or first.layout is not torch.strided:
        first, other = first.to_dense(), other.to_dense()
    return bool(((first == other) | ((first != first) & (other != other))).all())


def _captured(function: types.FunctionType) -> tuple[object, ...]:
    """Return what a function knows but for its arguments and its module."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return cells, function.__defaults__, function.__kwdefaults__
