"""Which parameters of a network are random, and where each lies in the flat weight vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import Tensor, nn

__all__ = ["NORMALIZATION_LAYERS", "ParameterLayout"]

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
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    ties: tuple[tuple[str, ...], ...]
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(
        cls,
        net: nn.Module,
        include: Sequence[str] = ("*",),
        exclude: Sequence[str] | None = None,
    ) -> ParameterLayout:
        """Choose the random parameters of ``net``.

        Args:
            net: any module whose parameters are initialised. Frozen parameters
                (``requires_grad=False``) are never random.
            include: shell patterns over parameter names (``"head.*"``); at least one must match.
            exclude: patterns of names that stay deterministic. None, the default, excludes the
                affine parameters of normalisation layers (a prior centred at zero harms them),
                save those that a pattern of ``include`` other than ``"*"`` names.

        Returns:
            The layout, with D > 0 weights.

        Raises:
            ValueError: a pattern matches no parameter, or no parameter is left.
            TypeError: a chosen parameter is lazy, or not real floating point, or the chosen
                parameters have several dtypes.
        """
        aliases: dict[int, list[str]] = {}
        parameters: dict[int, nn.Parameter] = {}
        for name, parameter in net.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
            parameters[id(parameter)] = parameter
        every_name = [name for names in aliases.values() for name in names]
        for option, patterns in (("include", include), ("exclude", exclude or ())):
            if isinstance(patterns, str):
                raise TypeError(
                    f"{option} must be a sequence of patterns, got the string {patterns!r}; "
                    f"write {option}=({patterns!r},)"
                )
            for pattern in patterns:
                if not isinstance(pattern, str):
                    raise TypeError(
                        f"{option} must hold patterns of parameter names such as 'head.*', got "
                        f"{pattern!r}"
                    )
                if every_name and not _matches(every_name, (pattern,)):
                    raise ValueError(
                        f"every pattern of {option} must match a parameter name, but {pattern!r} "
                        f"matches none of {_shortened(every_name)}"
                    )
        named_patterns = tuple(pattern for pattern in include if pattern != "*")
        affine = _normalization_parameters(net) if exclude is None else set()

        chosen: list[int] = []
        for key, names in aliases.items():
            if not parameters[key].requires_grad or not _matches(names, include):
                continue
            if _matches(names, exclude or ()):
                continue
            if key in affine and not _matches(names, named_patterns):
                continue
            _check(names[0], parameters[key])
            chosen.append(key)
        if not chosen:
            raise ValueError(
                "at least one parameter must be left to make Bayesian, but include="
                f"{tuple(include)!r}, exclude={exclude!r} leave none of "
                f"{_shortened(every_name) if every_name else 'a network without parameters'}; "
                "frozen parameters (requires_grad=False) do not count"
            )
        dtypes = {parameters[key].dtype: aliases[key][0] for key in chosen}
        if len(dtypes) > 1:
            listed = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
            raise TypeError(
                f"all random parameters must share one dtype, but {listed}; convert the network "
                "with net.to(torch.float32) or exclude some"
            )
        return cls(
            names=tuple(aliases[key][0] for key in chosen),
            shapes=tuple(parameters[key].shape for key in chosen),
            ties=tuple(tuple(aliases[key]) for key in chosen),
            dtype=next(iter(dtypes)),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of weights of each parameter."""
        return tuple(prod(shape) for shape in self.shapes)

    @property
    def num_weights(self) -> int:
        """D, the length of the flat vector."""
        return sum(self.sizes)

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

    def with_ties(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Repeat each tensor under all the names by which the network reaches it."""
        return {
            alias: tensors[name]
            for name, aliases in zip(self.names, self.ties, strict=True)
            for alias in aliases
        }


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _normalization_parameters(net: nn.Module) -> set[int]:
    return {
        id(parameter)
        for module in net.modules()
        if isinstance(module, NORMALIZATION_LAYERS)
        for parameter in module.parameters(recurse=False)
    }


def _check(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise TypeError(
            f"every random parameter must be initialised, but {name!r} is lazy; pass one batch "
            "through the network first"
        )
    if not parameter.dtype.is_floating_point:
        raise TypeError(
            f"every random parameter must be real floating point, but {name!r} is "
            f"{parameter.dtype}; keep it deterministic with exclude=({name!r},)"
        )


def _shortened(names: Sequence[str], limit: int = 12) -> str:
    shown = ", ".join(names[:limit])
    return shown + (f", ... ({len(names)} in all)" if len(names) > limit else "")
