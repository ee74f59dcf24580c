"""Description of a network's pass, and later passes that are answered from it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch._C._functorch import maybe_current_level
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from bayesify.estimators.stateless import modules_of

__all__ = ["Call", "Forgotten", "Recording", "Replay", "State", "held_tensors"]
__all__ += ["tensors_in_containers"]

# Functions through which a tensor's values can change without a trace, and other ways to its
# memory.
_OPENED = frozenset({"numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__"})


class _Place(int):
    """The number of a known tensor, in the description of a call."""


class Call(NamedTuple):
    """A function, its arguments and its result, with places for tensors.

    Example:
        >>> with torch.no_grad(), Recording([torch.ones(2)], []) as recording:
        ...     x = recording.objects[0] + 1.0
        >>> recording.calls[0].args, recording.calls[0].result  # tensors 0 and 1
        ((0, 1.0), 1)
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    result: Any


class State(NamedTuple):
    """What tells that a tensor was edited in place.

    Example:
        >>> x = torch.ones(2)
        >>> before = State.of(x)
        >>> _ = x.add_(1.0)
        >>> State.of(x) == before
        False
    """

    version: int
    layout: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> State:
        """Return the state of a tensor; of an inference tensor the version is -1."""
        version = -1 if tensor.is_inference() else tensor._version
        if tensor.is_nested:
            return cls(version, ())
        if tensor.layout is not torch.strided:
            return cls(version, tuple(tensor.shape))
        return cls(version, (*tensor.shape, *tensor.stride(), tensor.storage_offset()))


class _UnknownError(Exception):
    """A value of a call that cannot be described."""


class Recording(TorchFunctionMode):
    """Describes the calls of a pass whose arguments do not depend on random weights.

    Known tensors are the inputs, those that the network holds, and results of described calls.

    Args:
        inputs: tensors of the network's inputs.
        outside: tensors that the network holds, without the random ones.

    Example:
        >>> x, frozen, random = torch.ones(2, 3), torch.ones(3, 3), torch.ones(3, 1)
        >>> with torch.no_grad(), Recording([x], [frozen]) as recording:
        ...     outputs = (x @ frozen).relu() @ random
        >>> recording.share, recording.is_sound(outputs)
        (0.6666666666666666, True)
    """

    def __init__(self, inputs: list[Tensor], outside: list[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call | None] = []
        self._places = WeakIdKeyDictionary()
        #: The tensors by place; None for those that a later pass does not need.
        self.objects: list[Tensor | None] = []
        self._states: list[State] = []
        places = [self._place_of(tensor, add=True) for tensor in (*inputs, *outside)]
        for place, tensor in zip(places, (*inputs, *outside), strict=True):
            self.objects[place] = tensor
        #: The places of the inputs.
        self.inputs = places[: len(inputs)]
        self._outside = self.objects.copy()
        self._at_start = self._states.copy()
        self._uses: dict[int, State] = {}
        self._is_sound = all(state.version >= 0 for state in self._states)
        self._generators = _generators()
        self._answered, self._computed, self._weights = 0, 0, 0

    @property
    def share(self) -> float:
        """The part of the operations that a later pass leaves out; 0 without a matrix product."""
        every = self._answered + self._computed
        return self._answered / every if self._weights and every else 0.0

    def is_sound(self, outputs: Tensor) -> bool:
        """Return whether a later pass may be answered from memory.

        Args:
            outputs: of the pass, whose other results are gone by now, unless the network keeps any.
        """
        for tensor in tensors_in_containers(outputs):
            if tensor in self._places:
                self._use(tensor)
        ended = [State.of(each) for each in self._outside if each is not None]
        for each in [each for each in self.objects if each is not None and each._is_view()]:
            if each._base in self._places:  # a view holds its memory anyway
                self.objects[self._places[each._base]] = each._base
        is_kept = any(self.objects[place] is None for place in self._places.values())
        return (
            self._is_sound
            and not is_kept
            and ended == self._at_start
            and all(
                torch.equal(*pair) for pair in zip(self._generators, _generators(), strict=True)
            )
            and all(State.of(self._object(place)) == use for place, use in self._uses.items())
        )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function, and describe the call if all of its arguments are known."""
        args, kwargs = tuple(args), {} if kwargs is None else dict(kwargs)
        tensors = tensors_in_containers((args, kwargs))
        known = [tensor for tensor in tensors if tensor in self._places]
        self._check(func, kwargs, known)
        result = func(*args, **kwargs)
        call: Call | None = None
        is_plain_pass = not torch.is_grad_enabled() and maybe_current_level() is None
        if is_plain_pass and len(known) == len(tensors):
            try:
                given = self._described(args), self._described(kwargs)
                call = Call(func, *given, self._described(result, add=True))
            except _UnknownError:
                pass
        if call is None:
            for tensor in known:
                self._use(tensor)
        else:
            for tensor in known:
                self._states[self._places[tensor]] = State.of(tensor)
        self._count(call, known, result)
        self.calls.append(call)
        return result

    def _check(
        self, func: Callable[..., Any], kwargs: Mapping[str, Any], known: Sequence[Tensor]
    ) -> None:
        """Note what makes later passes differ without a trace."""
        opened = known and (getattr(func, "__name__", "") in _OPENED or func == _DATA)
        edited = any(State.of(each) != self._states[self._places[each]] for each in known)
        if opened or edited or kwargs.get("generator") is not None:
            self._is_sound = False

    def _count(self, call: Call | None, known: Sequence[Tensor], result: Any) -> None:
        if not tensors_in_containers(result):
            return
        if call is None:
            self._computed += 1
            return
        self._answered += 1
        held = [self._places[tensor] for tensor in known if tensor.dim() > 1]
        self._weights += any(place < len(self._outside) for place in held)

    def _described(self, value: Any, *, add: bool = False) -> Any:
        """Return a value with places for its tensors; ``add`` gives new tensors a place."""
        if isinstance(value, Tensor):
            return self._place_of(value, add=add)
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, slice):
            ends = (value.start, value.stop, value.step)
            if all(isinstance(end, _PLAIN) for end in ends):
                return value
        if type(value) in (list, tuple) or (add and isinstance(value, tuple)):
            return _made_like(value, [self._described(each, add=add) for each in value])
        if type(value) is dict:
            return {name: self._described(each, add=add) for name, each in value.items()}
        raise _UnknownError

    def _place_of(self, tensor: Tensor, *, add: bool) -> _Place:
        place: _Place | None = self._places.get(tensor)
        if place is None:
            if not add:
                raise _UnknownError
            place = self._places[tensor] = _Place(len(self.objects))
            self.objects.append(None)
            self._states.append(State.of(tensor))
        return place

    def _use(self, tensor: Tensor) -> None:
        """Keep a tensor for a call that later passes compute; all see it in its last state."""
        place = self._places[tensor]
        self.objects[place] = tensor
        self._uses.setdefault(place, self._states[place])

    def _object(self, place: int) -> Tensor:
        found = self.objects[place]
        assert found is not None
        return found


class Replay(TorchFunctionMode):
    """Answers the described calls of a pass, and computes all others.

    Args:
        calls: the calls of the first pass, None where one was not described.
        objects: the known tensors by place.

    Example:
        >>> x = torch.ones(2)
        >>> with torch.no_grad(), Recording([x], []) as recording:
        ...     y = x.exp()
        >>> with torch.no_grad(), Replay(recording.calls, [x, y]):
        ...     again = x.exp()
        >>> again is y
        True
    """

    def __init__(self, calls: Sequence[Call | None], objects: Sequence[Any]) -> None:
        super().__init__()
        self._calls, self._objects, self._next = calls, objects, 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer a call, or compute it."""
        kwargs = {} if kwargs is None else kwargs
        call = self._calls[self._next] if self._next < len(self._calls) else None
        self._next += 1
        if (
            call is not None
            and call.function == func
            and self._is(tuple(args), call.args)
            and self._is(kwargs, call.kwargs)
        ):
            return self._filled(call.result)
        return func(*args, **kwargs)

    def _is(self, value: Any, described: Any) -> bool:
        kind = type(described)
        if kind is _Place:
            return value is self._objects[described]
        if kind is not type(value):
            return False
        if kind is tuple or kind is list:
            return len(value) == len(described) and all(map(self._is, value, described))
        if kind is dict:
            return value.keys() == described.keys() and all(
                self._is(value[name], each) for name, each in described.items()
            )
        if kind is float or kind is complex:  # 0.0 and -0.0 differ
            return repr(value) == repr(described)
        return bool(value == described)

    def _filled(self, result: Any) -> Any:
        if type(result) is _Place:
            return self._objects[result]
        if type(result) is list or isinstance(result, tuple):
            return _made_like(result, [self._filled(each) for each in result])
        if type(result) is dict:
            return {name: self._filled(each) for name, each in result.items()}
        return result


class _Answers(Protocol):
    is_used: bool


class Forgotten(Tensor):
    """A stand-in for a tensor that was not kept: every use raises an error, and ends the trunk.

    Args:
        trunk: what answers the passes.

    Example:
        >>> class Answers:
        ...     is_used = True
        >>> answers = Answers()
        >>> Forgotten(answers).exp()
        Traceback (most recent call last):
        RuntimeError: a prediction did not keep this tensor; run the network for it
        >>> answers.is_used
        False
    """

    _trunk: _Answers

    def __new__(cls, trunk: _Answers) -> Forgotten:
        """Make one without memory."""
        made: Forgotten = Tensor._make_wrapper_subclass(cls, (0,))
        made._trunk = trunk
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "a tensor that was not kept"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise an error, from Python."""
        cls._refuse((args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise an error, from PyTorch's C++ functions."""
        cls._refuse((args, kwargs))

    @classmethod
    def _refuse(cls, given: Any) -> NoReturn:
        for each in tree_iter(given):
            if isinstance(each, cls):
                each._trunk.is_used = False
        raise RuntimeError("a prediction did not keep this tensor; run the network for it")


def tensors_in_containers(value: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists and dictionaries.

    Example:
        >>> len(tensors_in_containers((torch.ones(1), {"mask": torch.ones(1)})))
        2
    """
    return [each for each in tree_iter(value) if isinstance(each, Tensor)]


def held_tensors(net: nn.Module) -> list[Tensor]:
    """Return the tensors that a network holds.

    Example:
        >>> len(held_tensors(nn.Linear(2, 1)))
        2
    """
    return [
        each
        for module in modules_of(net)
        for held in (module._parameters, module._buffers, vars(module))
        for each in held.values()
        if isinstance(each, Tensor)
    ]


def _generators() -> list[Tensor]:
    """Return the states of PyTorch's generators."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if used else [])]


def _made_like(value: Any, parts: list[Any]) -> Any:
    """Return parts in a list, a tuple, a named one or one of PyTorch's."""
    if hasattr(value, "_make"):
        return value._make(parts)
    return type(value)(parts)


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, range, enum.Enum, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
