"""Parts of a network that are run once for all weight samples of a prediction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bayesify.estimators import stateless
from bayesify.module.random_network import RandomNetwork

__all__ = ["parts_of", "run_once"]


def parts_of(network: RandomNetwork, patterns: str | Sequence[str]) -> dict[str, nn.Module]:
    """Return the parts of a network that these patterns name, by name, the outermost only.

    Args:
        network: the network.
        patterns: shell patterns over the names of its submodules.

    Raises:
        ValueError: a pattern matches none, or one that has random parameters.

    Example:
        >>> from bayesify import BayesianModule
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> list(parts_of(BayesianModule(net, include=("2.*",)), "0"))
        ['0']
    """
    wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    modules = {name: module for name, module in network.net.named_modules() if name}
    chosen: dict[str, nn.Module] = {}
    for pattern in wanted:
        matched = [name for name in modules if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(
                f"once must name submodules of the network, such as {next(iter(modules), None)!r}, "
                f"and {pattern!r} matches none"
            )
        chosen |= {name: modules[name] for name in matched}
    outermost = {
        name: module
        for name, module in chosen.items()
        if not any(name.startswith(f"{other}.") for other in chosen)
    }
    paths = stateless.parameter_paths(network.net, network.layout)
    for name in outermost:
        own = [path for each in paths.values() for path in each if path.startswith(f"{name}.")]
        if own:
            raise ValueError(
                f"once must name submodules without random parameters, and {name!r} has {own[0]!r}"
            )
    return outermost


@contextmanager
def run_once(parts: Mapping[str, nn.Module]) -> Iterator[Callable[[], None]]:
    """Within the block, run the parts in the first pass and answer from memory in later ones.

    Args:
        parts: submodules by name, in evaluation mode, whose outputs depend on their inputs only.

    Yields:
        A function to call before each pass.

    Raises:
        ValueError: the inputs of a part differ between passes; from within the pass.

    Example:
        >>> linear, x = nn.Linear(2, 1).eval(), torch.ones(1, 2)
        >>> with torch.no_grad(), run_once({"linear": linear}) as begin:
        ...     begin(); first = linear(x)
        ...     begin(); second = linear(x.clone())
        >>> torch.equal(second, first)
        True
    """
    memories = [_Memory(name, module) for name, module in parts.items()]

    def begin() -> None:
        for memory in memories:
            memory.begin()

    with ExitStack() as stack:
        for memory in memories:
            stack.enter_context(memory.answering())
        yield begin


class _Call(NamedTuple):
    """The arguments and the result of one call of a part."""

    given: tuple[tuple[Any, ...], dict[str, Any]]
    result: Any


class _Memory:
    """What one part was asked in a pass, and its answers."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module, self._forward = name, module, module.forward
        self._calls: list[_Call] = []
        self._next = 0

    def begin(self) -> None:
        self._next = 0

    @contextmanager
    def answering(self) -> Iterator[None]:
        own = vars(self._module).get("forward")
        self._module.forward = self._answer
        try:
            yield
        finally:
            if own is None:
                del self._module.forward
            else:
                self._module.forward = own

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():  # a derivative within the pass, which needs a graph
            return self._forward(*args, **kwargs)
        place, self._next = self._next, self._next + 1
        if place == len(self._calls):
            self._calls.append(_Call((args, kwargs), self._forward(*args, **kwargs)))
        elif not _are_same(self._calls[place].given, (args, kwargs)):
            raise ValueError(
                f"once names {self._name!r}, whose inputs differ between weight samples; name only "
                "what comes before the first random parameter"
            )
        # A copy, since what follows may edit it in place.
        return tree_map_only(Tensor, torch.clone, self._calls[place].result)


def _are_same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one is two or (
            one.shape == two.shape
            and one.dtype == two.dtype
            and one.device == two.device
            and torch.equal(one, two)
        )
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(_are_same, one, two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_are_same(one[key], two[key]) for key in one)
    return one is two or (isinstance(one, _PLAIN) and isinstance(two, _PLAIN) and bool(one == two))


_PLAIN = (bool, int, float, str, torch.dtype, torch.device)
