"""Description of a network's pass, from which later passes can be answered."""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from bayesify.estimators.interception import READERS
from bayesify.estimators.network_state import modules_of
from bayesify.estimators.transforms import is_transformed

__all__ = [
    "Mark",
    "Place",
    "RecordedCall",
    "Recording",
    "held_tensors",
    "made_like",
    "tensors_in_containers",
    "version_of",
]

# Ways to a tensor's memory, in which its values can change without a trace.
_OPENED = frozenset({"numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__"})
_PRODUCTS = frozenset({
    "__matmul__", "__rmatmul__", "addmm", "baddbmm", "bilinear", "bmm", "conv1d", "conv2d",
    "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "einsum", "gru",
    "linear", "lstm", "matmul", "mm", "multi_head_attention_forward", "mv", "rnn_relu",
    "rnn_tanh", "scaled_dot_product_attention",
})  # fmt: skip
#: The price of calling a function, and of answering it, in multiplications.
_CALL, _ANSWER = 10_000, 5_000
#: Bytes of the results that are kept for calls that later passes compute.
_MOST_KEPT = 256 * 10**6


class RecordedCall(NamedTuple):
    """A function, its arguments and its result, with places for the tensors that are known.

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


def version_of(tensor: Tensor) -> int:
    """Return the number of edits in place of a tensor, of its layout too; -1 if it counts none.

    Example:
        >>> x = torch.ones(2, 3)
        >>> before = version_of(x)
        >>> _ = x.add_(1.0), x.t_()
        >>> version_of(x) - before
        2
    """
    return -1 if tensor.is_inference() else tensor._version


class Place(int):
    """The number of a known tensor, in the description of a call."""


class _Places:
    """Numbers of tensors by identity, for as long as they live.

    PyTorch's ``WeakIdKeyDictionary`` does the same, in more Python calls for each of its own.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Place, weakref.ref[Tensor]]] = {}

    def get(self, tensor: Tensor) -> Place | None:
        """Return the number of a tensor, None if it has none."""
        entry = self._entries.get(id(tensor))
        return None if entry is None else entry[0]

    def add(self, tensor: Tensor, place: Place) -> None:
        """Give a tensor a number, which goes with it, before another can have its identity."""
        key, places = id(tensor), weakref.ref(self)

        def forget(_: weakref.ref[Tensor]) -> None:
            owner = places()
            if owner is not None:
                del owner._entries[key]

        self._entries[key] = place, weakref.ref(tensor, forget)

    def alive(self) -> list[Place]:
        """Return the numbers of the tensors that live."""
        return [place for place, _ in list(self._entries.values())]


class Mark(enum.Enum):
    """A tensor that depends on random weights; a result that later passes compute."""

    RANDOM = 0
    COMPUTED = 1


class _OpaqueError(Exception):
    """A value that cannot be compared."""


class Recording(TorchFunctionMode):
    """Describes the calls of a pass, and which of them do not depend on random weights.

    Known tensors are the inputs, those that the network holds, and results of calls whose tensors
    are all known. A pass is not sound where a later one might differ in more than the values of
    random tensors, or in a way that does not show: where values of random tensors become Python
    numbers, with gradients, random numbers, opened memory, or arguments that cannot be compared.

    Args:
        inputs: tensors of the network's inputs.
        outside: tensors that the network holds, without the random ones.

    Example:
        >>> x, frozen, random = torch.ones(2, 3), torch.ones(3, 3), torch.ones(3, 1)
        >>> with torch.no_grad(), Recording([x], [frozen]) as recording:
        ...     outputs = (x @ frozen).relu() @ random
        >>> recording.is_sound(outputs), recording.share > 0.5
        (True, True)
    """

    def __init__(self, inputs: list[Tensor], outside: list[Tensor]) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self._places = _Places()
        #: The tensors by place; None for those that a later pass does not need.
        self.objects: list[Tensor | None] = []
        self._versions: list[int] = []
        self._is_sound = True
        places = [self._place_of(tensor) for tensor in (*inputs, *outside)]
        for place, tensor in zip(places, (*inputs, *outside), strict=True):
            self.objects[place] = tensor
        #: The places of the inputs.
        self.inputs = places[: len(inputs)]
        self._outside = self.objects.copy()
        self._at_start = self._versions.copy()
        self._uses: dict[int, int] = {}
        self._dispatch_modes = torch._C._len_torch_dispatch_stack()
        self._generators = _generators()
        self._generator = torch.get_rng_state()
        self._answered = self._total = 0

    @property
    def share(self) -> float:
        """The part of the work, in multiplications, that a later pass leaves out."""
        return self._answered / self._total if self._total else 0.0

    @property
    def saving(self) -> float:
        """The part of the work that is saved, where each call that is compared costs some."""
        answering = _ANSWER * len(self.calls)
        return (self._answered - answering) / self._total if self._total else 0.0

    def is_sound(self, outputs: Tensor) -> bool:
        """Return whether a later pass may be answered from memory.

        Args:
            outputs: of the pass, whose other results are gone by now, unless the network keeps any.
        """
        if not self._is_sound or self._places.get(outputs) is not None:
            return False
        for each in [each for each in self.objects if each is not None and each._is_view()]:
            base = each._base
            place = None if base is None else self._places.get(base)
            if place is not None:  # a view holds its memory anyway
                self.objects[place] = base
        is_kept = any(self.objects[place] is None for place in self._places.alive())
        ended = [version_of(each) for each in self._outside if each is not None]
        results = [each for each in self.objects[len(self._outside) :] if each is not None]
        return (
            not is_kept
            and ended == self._at_start
            and _are_equal(self._generators, _generators())
            and all(version_of(self._object(place)) == use for place, use in self._uses.items())
            and sum(each.nbytes for each in results) <= _MOST_KEPT
        )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function, and describe the call."""
        args, kwargs = tuple(args), {} if kwargs is None else dict(kwargs)
        if not self._is_sound:
            return func(*args, **kwargs)
        tensors = tensors_in_containers((args, kwargs))
        found = [(tensor, self._places.get(tensor)) for tensor in tensors]
        known = {place: tensor for tensor, place in found if place is not None}
        random = [tensor for tensor, place in found if place is None]
        self._is_sound = _is_plain() and self._is_closed(func, random, known)
        result = func(*args, **kwargs)
        if not self._is_sound:
            return result
        self._is_sound = _is_plain() and torch.equal(self._generator, torch.get_rng_state())
        made = tensors_in_containers(result)
        self._is_sound &= torch._C._len_torch_dispatch_stack() == self._dispatch_modes
        try:
            given = self._described(args), self._described(kwargs)
        except _OpaqueError:
            self._is_sound = False
            return result
        answer: Any = Mark.COMPUTED
        # Without any tensor it may be called for what it does.
        if not random and (tensors or made) and _is_of_pytorch(func):
            with contextlib.suppress(_OpaqueError):
                answer = self._described(result, add=True)
        self.calls.append(RecordedCall(func, *given, answer))
        for place, tensor in known.items():
            if answer is Mark.COMPUTED:
                # Kept for later passes, which all see it in its last state.
                self.objects[place] = tensor
                self._uses.setdefault(place, self._versions[place])
            else:
                self._versions[place] = version_of(tensor)
        if made:
            work = _CALL + _work(func, tensors, made)
            self._total += work
            self._answered += 0 if answer is Mark.COMPUTED else work
        return result

    def _is_closed(
        self,
        func: Callable[..., Any],
        random: Sequence[Tensor],
        known: Mapping[Place, Tensor],
    ) -> bool:
        """Return whether a call shows all that later calls may depend on."""
        name = getattr(func, "__name__", "")
        # A branch on a random value may change what else is called, or kept.
        if random and (name in READERS or name in _OPENED):
            return False
        if known and (name in _OPENED or func in _UNSEEN):
            return False
        return all(version_of(each) == self._versions[place] for place, each in known.items())

    def _described(self, value: Any, *, add: bool = False) -> Any:
        """Return a value with places for its tensors; ``add`` gives new tensors a place."""
        kind = type(value)
        if isinstance(value, Tensor):
            place = self._places.get(value)
            if place is None:
                return self._place_of(value) if add else Mark.RANDOM
            return place
        if kind in _PLAIN or isinstance(value, enum.Enum):
            return value
        if kind is slice:
            if not {type(value.start), type(value.stop), type(value.step)} <= {int, type(None)}:
                raise _OpaqueError
            return value
        if kind in (list, tuple) or (add and isinstance(value, tuple)):
            return made_like(value, [self._described(each, add=add) for each in value])
        if kind is dict:
            return {name: self._described(each, add=add) for name, each in value.items()}
        raise _OpaqueError

    def _place_of(self, tensor: Tensor) -> Place:
        place = self._places.get(tensor)
        if place is None:
            place = Place(len(self.objects))
            self._places.add(tensor, place)
            self.objects.append(None)
            self._versions.append(version_of(tensor))
            self._is_sound &= not tensor.is_inference()
        return place

    def _object(self, place: int) -> Tensor:
        found = self.objects[place]
        assert found is not None
        return found


def tensors_in_containers(value: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists and dictionaries.

    Example:
        >>> len(tensors_in_containers((torch.ones(1), {"mask": torch.ones(1)})))
        2
    """
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    # No function within a function, whose cycle of references would keep the tensors.
    kind = type(value)
    if isinstance(value, Tensor):
        found.append(value)
    elif kind is tuple or kind is list:
        for each in value:
            _collect(each, found)
    elif kind is dict:
        for each in value.values():
            _collect(each, found)
    elif kind not in _PLAIN:  # PyTorch knows more containers, and takes five times as long
        found.extend(each for each in tree_iter(value) if isinstance(each, Tensor))


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


def made_like(value: Any, parts: list[Any]) -> Any:
    """Return parts in a list, a tuple, a named one or one of PyTorch's."""
    if hasattr(value, "_make"):
        return value._make(parts)
    return type(value)(parts)


def _is_plain() -> bool:
    """Return whether no gradients are taken, and no transform of functions is at work."""
    return not torch.is_grad_enabled() and not is_transformed()


def _is_of_pytorch(func: Callable[..., Any]) -> bool:
    """Return whether a function is PyTorch's own; others may have a state."""
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(func).startswith("aten")
    return True


def _work(func: Callable[..., Any], tensors: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Return about how many multiplications a function takes."""
    numbers = sum(each.numel() for each in made)
    if getattr(func, "__name__", "") not in _PRODUCTS:
        return numbers
    matrices = [each for each in tensors if each.dim() > 1 and each.numel()]
    return numbers * min((each.numel() // each.shape[0] for each in matrices), default=1)


def _are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


_ATTRIBUTES: Any = Tensor
_UNSEEN = (
    _ATTRIBUTES.data.__get__,
    _ATTRIBUTES.data.__set__,
    _ATTRIBUTES.grad.__get__,
    _ATTRIBUTES.grad.__set__,
)
_PLAIN = frozenset({
    type(None), bool, int, float, complex, str, bytes, range, type(...), torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.Size,
})  # fmt: skip
