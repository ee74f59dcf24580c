"""Parameter layout: the random parameters of a network and their places in one flat vector."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from bayesify.distributions.eligible import (
    Weight,
    check_network,
    check_not_held_elsewhere,
    check_orthogonal_maps,
    check_random_weight,
    check_tables,
    check_uniform,
    is_frozen,
    named_weights,
)
from bayesify.distributions.normalization import affine_names_within, is_affine

__all__ = ["ParameterLayout", "Selector", "abbreviate", "pattern_pairs"]

#: A shell pattern over parameter names, or a module type: all parameters of such modules.
Selector: TypeAlias = str | type[nn.Module]


@dataclass(frozen=True)
class ParameterLayout:
    """The map between a network's random parameters and one flat vector of D weights.

    A parameter that several modules share is one entry: it is sampled once per forward pass and
    its KL is counted once. ``ties`` lists all of its names.

    Args:
        names: the first name of each random parameter, in the order of the flat vector.
        shapes: the shape of each random parameter.
        ties: all names of each random parameter, including the first.
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
                (``nn.Linear`` selects all parameters of modules of that type or a subclass, and of
                their sub-modules). Each must match something.
            exclude: patterns and types of the parameters that stay deterministic; they take
                precedence over ``include``. None, the default, excludes the affine parameters of
                normalisation layers and of layer scales, see ``is_affine``, since a prior centred
                at zero harms them. ``include`` can still select them: by a pattern other than
                ``"*"``, or by a type of normalisation layer. The type of a block that contains
                such a layer does not select it.

        Returns:
            The layout, with D > 0 weights.

        Raises:
            ValueError: a pattern or a type matches no parameter, or no weight is left.
            TypeError: an option is not a sequence of patterns and module types; a selected
                parameter is lazy, quantised, scripted, on the meta device, sparse, not real
                floating point or the table of an embedding with sparse gradients or a ``max_norm``;
                the selected parameters have several dtypes or devices; the network cannot be
                copied, or is wrapped for parallel training.
        """
        check_network(net)
        aliases: dict[int, list[str]] = {}
        weights: dict[int, Weight] = {}
        for name, weight in named_weights(net):
            aliases.setdefault(id(weight), []).append(name)
            weights[id(weight)] = weight
        included = _select("include", include, net, aliases)
        excluded = _select("exclude", () if exclude is None else exclude, net, aliases)
        fixed = set().union(*excluded.values())
        if exclude is None:
            named = (_affines_of(selector, net, keys) for selector, keys in included.items())
            affine = {id(weight) for name, weight in named_weights(net) if is_affine(net, name)}
            fixed |= affine.difference(*named)
        wanted = set().union(*included.values()) - fixed
        scripted = _keys_within(net, torch.jit.ScriptModule)
        chosen = {
            key: check_random_weight(aliases[key][0], weight, is_scripted=key in scripted)
            for key, weight in weights.items()
            if key in wanted and not is_frozen(weight)
        }
        check_tables(net, chosen)
        check_orthogonal_maps(net, chosen)
        if not any(parameter.numel() for parameter in chosen.values()):
            every_name = [name for names in aliases.values() for name in names]
            raise ValueError(
                "at least one parameter must be left to make Bayesian, but "
                f"include={_shown(include)}, exclude={exclude and _shown(exclude)} leave none of "
                f"{abbreviate(every_name) if every_name else 'a network without parameters'}; "
                "frozen parameters (requires_grad=False) do not count, nor do those of "
                "normalisation layers unless include names them or exclude=()"
            )
        check_not_held_elsewhere(net, {key: aliases[key][0] for key in chosen})
        check_uniform("dtype", "convert the network with net.to(torch.float32)", aliases, chosen)
        check_uniform("device", "move the network to one with net.to(device)", aliases, chosen)
        return cls(
            names=tuple(aliases[key][0] for key in chosen),
            shapes=tuple(parameter.shape for parameter in chosen.values()),
            ties=tuple(tuple(aliases[key]) for key in chosen),
            dtype=next(iter(chosen.values())).dtype,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of weights of each parameter."""
        return tuple(prod(shape) for shape in self.shapes)

    @property
    def num_weights(self) -> int:
        """D, the length of the flat vector."""
        return sum(self.sizes)

    @property
    def starts(self) -> tuple[int, ...]:
        """Start of each parameter in the flat vector, followed by D."""
        return tuple(accumulate(self.sizes, initial=0))

    def first_matches(self, patterns: Sequence[str], option: str, given: str) -> list[int]:
        """Return for each parameter the index of the first pattern that matches one of its names.

        Args:
            patterns: shell patterns over the names of parameters.
            option: what has the patterns, for error messages.
            given: what a pattern gives a parameter, for error messages.

        Raises:
            ValueError: no pattern matches a parameter, or a pattern decides none.

        Example:
            >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
            >>> ParameterLayout.of(net).first_matches(["1.*", "*"], "ByGroup", "a prior")
            [1, 1, 0, 0]
        """
        matching = [
            [
                number
                for number, pattern in enumerate(patterns)
                if any(fnmatchcase(name, pattern) for name in names)
            ]
            for names in self.ties
        ]
        for name, numbers in zip(self.names, matching, strict=True):
            if not numbers:
                raise ValueError(
                    f"{option} must give every random parameter {given}, but no pattern matches "
                    f'{name!r}; add "*" with {given} for all others as the last pattern'
                )
        for number, pattern in enumerate(patterns):
            if any(numbers[0] == number for numbers in matching):
                continue
            shadowed = [
                name
                for name, numbers in zip(self.names, matching, strict=True)
                if number in numbers
            ]
            raise ValueError(
                f"every pattern of {option} must decide a random parameter, but {pattern!r} "
                + (
                    f"matches only {abbreviate(shadowed)}, which earlier patterns decide; move it "
                    "before them or remove it"
                    if shadowed
                    else f"matches none of {abbreviate(self.names)}; correct or remove it"
                )
            )
        return [numbers[0] for numbers in matching]

    def slice_of(self, name: str) -> slice:
        """Return the slice of the flat vector that holds the parameter with this name.

        Any of the tied names of a parameter is valid.

        Raises:
            KeyError: no random parameter has this name.
        """
        start = 0
        for size, names in zip(self.sizes, self.ties, strict=True):
            if name in names:
                return slice(start, start + size)
            start += size
        raise KeyError(f"name must be that of a random parameter, {self.names}, got {name!r}")

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Concatenate one tensor per first name to a vector, shape (D,)."""
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Split the last axis of ``flat``, shape (..., D), into ``{name: (..., *shape)}``.

        The tensors are views. A tied parameter appears once, under its first name.
        """
        lead = flat.shape[:-1]
        # split instead of slices: the backward of each slice would allocate a zero vector of
        # length D.
        parts = flat.split_with_sizes(self.sizes, dim=-1)
        return {
            name: part.view((*lead, *shape))
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }


def _keys_within(net: nn.Module, kind: type) -> set[int]:
    modules = (module for module in net.modules() if isinstance(module, kind))
    return {id(weight) for module in modules for _, weight in named_weights(module)}


def _select(
    option: str, selectors: Sequence[Selector], net: nn.Module, aliases: Mapping[int, list[str]]
) -> dict[Selector, set[int]]:
    """Return the keys of the parameters that each pattern or type of an option selects."""
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
    selected: dict[Selector, set[int]] = {}
    for selector in selectors:
        if isinstance(selector, str):
            keys = {key for key, names in aliases.items() if _matches(names, selector)}
            available = [name for names in aliases.values() for name in names]
            rule = "pattern of {} must match a parameter name"
        elif isinstance(selector, type) and issubclass(selector, nn.Module):
            keys = _keys_within(net, selector)
            holders = (module for module in net.modules() if any(named_weights(module)))
            available = list(dict.fromkeys(type(module).__name__ for module in holders))
            rule = "type of {} must be that of a module with parameters"
        else:
            raise TypeError(
                f"{option} must hold patterns of parameter names such as 'head.*' and module "
                f"types such as nn.Linear, got {selector!r}"
            )
        if aliases and not keys:
            raise ValueError(
                f"every {rule.format(option)}, but {_name(selector)} matches none of "
                f"{abbreviate(available)}"
            )
        selected[selector] = keys
    return selected


def _matches(names: Sequence[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _affines_of(selector: Selector, net: nn.Module, keys: Collection[int]) -> set[int]:
    """Return the keys of affine parameters that a selector of ``include`` names, if any."""
    if isinstance(selector, str):
        return set() if selector == "*" else set(keys)
    names = affine_names_within(net, selector)
    return {id(weight) for name, weight in named_weights(net) if name in names}


def _name(selector: Selector | type) -> str:
    return selector.__name__ if isinstance(selector, type) else repr(selector)


def _shown(selectors: Sequence[Selector]) -> str:
    shown = ", ".join(_name(selector) for selector in selectors)
    return f"({shown},)" if len(selectors) == 1 else f"({shown})"


def abbreviate(names: Sequence[str], limit: int = 12) -> str:
    """Join names for an error message, the first ``limit`` of them if there are more.

    Example:
        >>> abbreviate(["a", "b", "c"], limit=2)
        'a, b, ... (3 in all)'
    """
    shown = ", ".join(names[:limit])
    return shown + (f", ... ({len(names)} in all)" if len(names) > limit else "")


def pattern_pairs(owner: str, groups: Any, example: str) -> tuple[tuple[str, Any], ...]:
    """Return name patterns and what each stands for, given as a mapping or as pairs.

    Args:
        owner: the class that is given them, for errors.
        groups: the mapping or pairs.
        example: a right call, for errors.

    Raises:
        TypeError: they are something else, or a pattern is no string.
        ValueError: there are none.

    Example:
        >>> pattern_pairs("ByGroup", {"*.bias": 1, "*": 2}, "")
        (('*.bias', 1), ('*', 2))
    """
    try:
        pairs = tuple(groups.items() if isinstance(groups, Mapping) else groups)
        checked = tuple((pattern, value) for pattern, value in pairs)
    except (TypeError, ValueError):
        raise TypeError(
            f"{owner} must be given a mapping of name patterns or pairs, got {groups!r}; write "
            f"{example}"
        ) from None
    if not checked:
        raise ValueError(f"{owner} must have at least one pattern, got none; write {example}")
    for pattern, _ in checked:
        if not isinstance(pattern, str):
            raise TypeError(
                f"{owner} must hold patterns of parameter names such as '*.bias', got {pattern!r}"
            )
    return checked
