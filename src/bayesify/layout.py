"""Which parameters of a network are random, and where each lies in the flat weight vector."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor, nn

from bayesify.eligible import (
    Weight,
    check_network,
    check_same,
    is_frozen,
    named_weights,
    random_weight,
)

__all__ = ["NORMALIZATION_LAYERS", "ParameterLayout", "Selector", "shortened"]

#: A shell pattern over parameter names, or a module type: all parameters of such modules.
Selector: TypeAlias = str | type[nn.Module]

NORMALIZATION_LAYERS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


@dataclass(frozen=True)
class ParameterLayout:
    """The map between a network's random parameters and one flat vector of D weights.

    A parameter that several modules share is one entry: it is sampled once a pass and its KL is
    counted once. ``ties`` lists every name under which the network reaches it.

    Args:
        names: the first name of each random parameter, in the order of the flat vector.
        shapes: the shape of each.
        ties: for each, all its names, the first one included.
        dtype: the floating dtype that all of them share.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
        >>> layout = ParameterLayout.of(net)
        >>> layout.names
        ('0.weight', '0.bias', '2.weight', '2.bias')
        >>> layout.num_weights, layout.slice_of("2.weight")
        (11, slice(8, 10, None))
        >>> ParameterLayout.of(net, include=(nn.Linear,), exclude=("0.*",)).names
        ('2.weight', '2.bias')
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    ties: tuple[tuple[str, ...], ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(
        cls,
        net: nn.Module,
        include: Sequence[Selector] = ("*",),
        exclude: Sequence[Selector] | None = None,
    ) -> ParameterLayout:
        """Choose the random parameters of ``net``.

        Args:
            net: any module whose parameters are initialised. Frozen parameters
                (``requires_grad=False``) are never random.
            include: shell patterns over parameter names (``"head.*"``) and module types
                (``nn.Linear``, which stands for all parameters of the modules of that type or of
                one derived from it, those of their sub-modules too). Each must match something.
            exclude: patterns and types likewise, of what stays deterministic; they outdo
                ``include``. None, the default, excludes the affine parameters of normalisation
                layers (a prior centred at zero harms them), save those that ``include`` names: by
                a pattern other than ``"*"``, or by a type of normalisation layer. The type of a
                block that holds such a layer does not name it.

        Returns:
            The layout, with D > 0 weights.

        Raises:
            ValueError: a pattern or a type matches no parameter, or no weight is left.
            TypeError: an option is no sequence of patterns and module types; or what is chosen
                cannot be made Bayesian: it is lazy, quantised, scripted, on the meta device,
                sparse, or not real floating point, has several dtypes or devices; or the network
                cannot be copied, or is wrapped for parallel training.
        """
        check_network(net)
        aliases: dict[int, list[str]] = {}
        weights: dict[int, Weight] = {}
        for name, weight in named_weights(net):
            aliases.setdefault(id(weight), []).append(name)
            weights[id(weight)] = weight
        included = _reached("include", include, net, aliases)
        excluded = _reached("exclude", () if exclude is None else exclude, net, aliases)
        fixed = set().union(*excluded.values())
        if exclude is None:
            named = (keys for selector, keys in included.items() if _names_affines(selector))
            fixed |= _keys_within(net, NORMALIZATION_LAYERS).difference(*named)
        wanted = set().union(*included.values()) - fixed
        scripted = _keys_within(net, torch.jit.ScriptModule)
        chosen = {
            key: random_weight(aliases[key][0], weight, is_scripted=key in scripted)
            for key, weight in weights.items()
            if key in wanted and not is_frozen(weight)
        }
        if not any(parameter.numel() for parameter in chosen.values()):
            every_name = [name for names in aliases.values() for name in names]
            raise ValueError(
                "at least one parameter must be left to make Bayesian, but "
                f"include={_shown(include)}, exclude={exclude and _shown(exclude)} leave none of "
                f"{shortened(every_name) if every_name else 'a network without parameters'}; "
                "frozen parameters (requires_grad=False) do not count, nor do those of "
                "normalisation layers unless include names them or exclude=()"
            )
        check_same("dtype", "convert the network with net.to(torch.float32)", aliases, chosen)
        check_same("device", "move the network to one with net.to(device)", aliases, chosen)
        return cls(
            names=tuple(aliases[key][0] for key in chosen),
            shapes=tuple(parameter.shape for parameter in chosen.values()),
            ties=tuple(tuple(aliases[key]) for key in chosen),
            dtype=next(iter(chosen.values())).dtype,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of weights of each parameter."""
        return tuple(prod(shape) for shape in self.shapes)

    @property
    def num_weights(self) -> int:
        """D, the length of the flat vector."""
        return sum(self.sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each parameter begins in the flat vector, and D."""
        return tuple(accumulate(self.sizes, initial=0))

    def slice_of(self, name: str) -> slice:
        """Where the parameter of this name (any of its tied names) lies in the flat vector.

        Raises:
            KeyError: no random parameter has this name.
        """
        start = 0
        for size, names in zip(self.sizes, self.ties, strict=True):
            if name in names:
                return slice(start, start + size)
            start += size
        raise KeyError(f"no random parameter is called {name!r}; there are {self.names}")

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Gather one tensor per name into a vector, shape (D,)."""
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut the last axis of ``flat``, shape (..., D), into ``{name: (..., *shape)}``.

        Views, not copies; tied parameters appear once, under their first name.
        """
        lead = flat.shape[:-1]
        # split, never slices: the backward of D-sized slices allocates a zero vector for each.
        parts = flat.split(self.sizes, dim=-1)
        return {
            name: part.view((*lead, *shape))
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }


def _keys_within(net: nn.Module, kinds: type | tuple[type, ...]) -> set[int]:
    modules = (module for module in net.modules() if isinstance(module, kinds))
    return {id(weight) for module in modules for _, weight in named_weights(module)}


def _reached(
    option: str, selectors: Sequence[Selector], net: nn.Module, aliases: Mapping[int, list[str]]
) -> dict[Selector, set[int]]:
    """The keys of the parameters that each pattern or type of an option reaches."""
    if isinstance(selectors, str | type):
        shown = "string" if isinstance(selectors, str) else "type"
        raise TypeError(
            f"{option} must be a sequence of patterns and module types, got the {shown} "
            f"{_name(selectors)}; write {option}=({_name(selectors)},)"
        )
    if not isinstance(selectors, Collection):
        raise TypeError(
            f"{option} must be a sequence of patterns and module types such as ('head.*',), got "
            f"{selectors!r}"
        )
    reached: dict[Selector, set[int]] = {}
    for selector in selectors:
        if isinstance(selector, str):
            keys = {key for key, names in aliases.items() if _matches(names, selector)}
            there = [name for names in aliases.values() for name in names]
            what = "pattern of {} must match a parameter name"
        elif isinstance(selector, type) and issubclass(selector, nn.Module):
            keys = _keys_within(net, selector)
            holders = (module for module in net.modules() if any(named_weights(module)))
            there = list(dict.fromkeys(type(module).__name__ for module in holders))
            what = "type of {} must be that of a module with parameters"
        else:
            raise TypeError(
                f"{option} must hold patterns of parameter names such as 'head.*' and module "
                f"types such as nn.Linear, got {selector!r}"
            )
        if aliases and not keys:
            raise ValueError(
                f"every {what.format(option)}, but {_name(selector)} matches none of "
                f"{shortened(there)}"
            )
        reached[selector] = keys
    return reached


def _matches(names: Sequence[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _names_affines(selector: Selector) -> bool:
    if isinstance(selector, str):
        return selector != "*"
    return issubclass(selector, NORMALIZATION_LAYERS)


def _name(selector: Selector | type) -> str:
    return selector.__name__ if isinstance(selector, type) else repr(selector)


def _shown(selectors: Sequence[Selector]) -> str:
    shown = ", ".join(_name(selector) for selector in selectors)
    return f"({shown},)" if len(selectors) == 1 else f"({shown})"


def shortened(names: Sequence[str], limit: int = 12) -> str:
    """Names for an error message, the first few of many.

    Example:
        >>> shortened(["a", "b", "c"], limit=2)
        'a, b, ... (3 in all)'
    """
    shown = ", ".join(names[:limit])
    return shown + (f", ... ({len(names)} in all)" if len(names) > limit else "")
