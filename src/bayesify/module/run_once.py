"""Parts of a network that are run once for all weight samples of a prediction."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

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
    # A module that is registered twice has two names.
    modules = dict(network.net.named_modules(remove_duplicate=False))
    modules.pop("")
    chosen: dict[nn.Module, str] = {}
    for pattern in wanted:
        matched = [name for name in modules if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(
                f"once must name submodules of the network, such as {next(iter(modules), None)!r}, "
                f"and {pattern!r} matches none"
            )
        for name in matched:
            chosen.setdefault(modules[name], name)
    inner = {each for module in chosen for each in module.modules() if each is not module}
    parts = {name: module for module, name in chosen.items() if module not in inner}
    random = [name for names in network.layout.ties for name in names]
    for part in parts:
        own = [name for name in random if name.startswith(f"{part}.")]
        if own:
            raise ValueError(
                f"once must name submodules without random parameters, and {part!r} has {own[0]!r}"
            )
    return parts


@contextmanager
def run_once(parts: Mapping[str, nn.Module]) -> Iterator[Callable[[], None]]:
    """Within the block, run the parts in the first pass and answer from memory in later ones.

    Later passes receive copies of the results. Edits in place of the arguments are repeated, and a
    result that shares memory with an argument shares it again.

    Args:
        parts: submodules by name, in evaluation mode, whose outputs depend on their inputs only.

    Yields:
        A function to call before each pass.

    Raises:
        ValueError: the inputs of a part differ between passes, or cannot be compared, or its result
            cannot be copied; from within the pass.

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


class _Memory:
    """The calls of one part in a pass, and its answers."""

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
        given = _Arguments(self._name, args, kwargs)
        if place < len(self._calls):
            call = self._calls[place]
            # What is measured of a pass is the network's own.
            with _disable_current_modes():
                if given.match(call.frame, call.before):
                    return call.repeat(given.tensors)
                is_edited = given.match(call.frame, call.after)
            # Memory that outlasts a pass, such as the network's input, still holds the part's edit.
            if not is_edited:
                raise ValueError(
                    f"once names {self._name!r}, whose inputs differ between weight samples; name "
                    "only what comes before the first random parameter"
                )
        result, call = self._run(given, args, kwargs)
        self._calls[place : place + 1] = [call]
        return result

    def _run(
        self, given: _Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, _Call]:
        before = [tensor.clone() for tensor in given.tensors]
        memory = [tensor.data_ptr() for tensor in given.tensors]
        result = self._forward(*args, **kwargs)
        left = _Arguments(self._name, args, kwargs)
        if left.frame != given.frame or [each.data_ptr() for each in left.tensors] != memory:
            raise ValueError(
                f"once names {self._name!r}, which must edit nothing of its inputs but the values "
                "of tensors, got another edit, such as of a list; name a part without it"
            )
        after = [
            old if _are_equal(new, old) else new.clone()
            for new, old in zip(left.tensors, before, strict=True)
        ]
        try:
            with _Keeping(given.tensors) as keeping:
                kept = copy.deepcopy(result)
        except (TypeError, copy.Error, NotImplementedError) as error:
            raise ValueError(
                f"once names {self._name!r}, whose result must be one that copy.deepcopy copies "
                f"for each weight sample, got {type(result).__name__}: {error}; name another part"
            ) from error
        return result, _Call(given.frame, before, after, kept, keeping.views)


class _Call(NamedTuple):
    """One call of a part: its arguments before and after, and its result.

    Attributes:
        frame: all of the arguments but the values of their tensors.
        before: the values of their tensors before the call.
        after: the values after it; the same object where the call did not edit the tensor.
        result: a copy of the result.
        views: tensors in it that share the memory of an argument, and the argument's place.
    """

    frame: object
    before: list[Tensor]
    after: list[Tensor]
    result: Any
    views: list[tuple[Tensor, int]]

    def repeat(self, tensors: list[Tensor]) -> Any:
        """Edit these tensors of the arguments as the call did, and return a copy of its result."""
        for tensor, old, new in zip(tensors, self.before, self.after, strict=True):
            if new is not old:
                tensor.copy_(new)
        known: dict[int, Any] = {
            id(view): tensors[place].as_strided(view.shape, view.stride(), view.storage_offset())
            for view, place in self.views
        }
        return copy.deepcopy(self.result, known)


class _Keeping(TorchFunctionMode):
    """A context in which ``copy.deepcopy`` drops graphs, and keeps and lists views of arguments."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.views: list[tuple[Tensor, int]] = []
        self._tensors = tensors
        self._detached: list[Tensor] = []  # kept alive, since deepcopy knows objects by their id

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation; a copy in the way that the class states."""
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor = args[0].detach() if args[0].requires_grad else args[0]
        self._detached.append(tensor)
        for place, argument in enumerate(self._tensors):
            if _is_dense(tensor) and _is_view(tensor, argument):
                self.views.append((tensor.detach(), place))
                return self.views[-1][0]
        return Tensor.__deepcopy__(tensor, args[1])


class _Arguments:
    """The tensors of a call's arguments, each once, and a frame: all else, in a form to compare."""

    def __init__(self, part: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self._part = part
        self._places: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        self.frame = [(name, self._frame_of(value, name)) for name, value in named]

    def match(self, frame: object, values: list[Tensor]) -> bool:
        """Return True if the arguments are the same, bit for bit."""
        return self.frame == frame and all(map(_are_equal, self.tensors, values))

    def _frame_of(self, value: Any, argument: int | str) -> object:
        kind, inner = type(value), _children(value)
        if isinstance(value, Tensor) and _is_dense(value):
            return kind, self._place_of(value)
        if isinstance(value, _PLAIN):
            return kind, value
        if inner is None:
            raise ValueError(
                f"once names {self._part!r}, whose inputs must be tensors (not nested or "
                "quantised), plain values such as numbers and text, or lists, tuples, dicts and "
                f"dataclasses of these, so that weight samples can be compared, got "
                f"{kind.__name__} in argument {argument!r}; name a part that is not given one"
            )
        return kind, [[self._frame_of(each, argument) for each in pair] for pair in inner]

    def _place_of(self, tensor: Tensor) -> object:
        """Return the tensor's place among all, that of its memory, and its layout."""
        place = self._places.setdefault(id(tensor), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(tensor)
        memory = self._storages.setdefault(tensor.untyped_storage()._cdata, place)
        layout = (tensor.shape, tensor.stride(), tensor.storage_offset())
        return place, memory, tensor.dtype, tensor.device, layout


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """Return what a container holds, with its attributes; None if it is not one."""
    if isinstance(value, Tensor):
        names = _COMPONENTS.get(value.layout, ())
        components = [(name, getattr(value, name)()) for name in names]
        return [("shape", value.shape), *components] if names else None
    if isinstance(value, dict):
        held = list(value.items())
    elif isinstance(value, list | tuple):
        held = list(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = [(each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value)]
    else:
        return None
    return [*held, *getattr(value, "__dict__", {}).items()]


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def _is_view(tensor: Tensor, other: Tensor) -> bool:
    """Return True if both share memory, so that one can be had from the other by ``as_strided``."""
    kinds = [(each.dtype, each.is_conj(), each.is_neg()) for each in (tensor, other)]
    storages = [each.untyped_storage()._cdata for each in (tensor, other)]
    return kinds[0] == kinds[1] and storages[0] == storages[1]


def _are_equal(one: Tensor, two: Tensor) -> bool:
    return torch.equal(_bits(one), _bits(two))


def _bits(tensor: Tensor) -> Tensor:
    # NaN must equal itself, and 0.0 must not equal -0.0.
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().view(_INTEGERS[tensor.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_COMPONENTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
}

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
