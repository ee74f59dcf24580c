"""Later passes of a network, answered from the description of the first."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from bayesify.module.recorded_pass import Mark, Place, RecordedCall, made_like

__all__ = ["Forgotten", "Replay"]


class Replay(TorchFunctionMode):
    """Runs a pass in step with the first: answers what it can, and computes all other calls.

    A call that differs from that of the first pass in more than the values of random tensors
    raises an error, and ends the answers.

    Args:
        calls: the calls of the first pass.
        objects: the known tensors by place.
        answers: what answers the passes.

    Example:
        >>> import torch
        >>> from bayesify.module.recorded_pass import Recording
        >>> class Answers:
        ...     is_used = True
        >>> x = torch.ones(2)
        >>> with torch.no_grad(), Recording([x], []) as recording:
        ...     y = x.exp()
        >>> with torch.no_grad(), Replay(recording.calls, [x, y], Answers()):
        ...     again = x.exp()
        >>> again is y
        True
    """

    def __init__(
        self, calls: Sequence[RecordedCall], objects: Sequence[Any], answers: _Answers
    ) -> None:
        super().__init__()
        self._calls, self._objects, self._answers, self._next = calls, objects, answers, 0

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
            call is None
            or call.function != func
            or not self._is(tuple(args), call.args)
            or not self._is(kwargs, call.kwargs)
        ):
            self._answers.is_used = False
            raise RuntimeError("this pass of the prediction differs from the first; run it whole")
        if call.result is Mark.COMPUTED:
            return func(*args, **kwargs)
        return self._filled(call.result)

    def _is(self, value: Any, described: Any) -> bool:
        kind = type(described)
        if kind is Place:
            return value is self._objects[described]
        if described is Mark.RANDOM:
            return isinstance(value, Tensor)
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
        if type(result) is Place:
            return self._objects[result]
        if type(result) is list or isinstance(result, tuple):
            return made_like(result, [self._filled(each) for each in result])
        if type(result) is dict:
            return {name: self._filled(each) for name, each in result.items()}
        return result


class _Answers(Protocol):
    is_used: bool


class Forgotten(Tensor):
    """A stand-in for a tensor that was not kept: every use raises an error, and ends the trunk.

    Args:
        answers: what answers the passes.

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

    _answers: weakref.ref[_Answers]

    def __new__(cls, answers: _Answers) -> Forgotten:
        """Make one without memory."""
        made: Forgotten = Tensor._make_wrapper_subclass(cls, (0,))
        made._answers = weakref.ref(answers)  # which holds this
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
            answers = each._answers() if isinstance(each, cls) else None
            if answers is not None:
                answers.is_used = False
        raise RuntimeError("a prediction did not keep this tensor; run the network for it")
