"""Activation checkpointing: parts of a network that run again in the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.overrides import _get_current_function_mode_stack

from bayesify.estimators.interception import WeightInterceptor
from bayesify.estimators.uncompiled import run_uncompiled

__all__ = ["recomputable"]

#: What enters the state of a pass again: its weights, and the noise within its operations.
_Resume = Callable[[], AbstractContextManager[object]]


@contextmanager
def recomputable(weights: _Resume) -> Iterator[None]:
    """Give the parts of a pass that ``torch.utils.checkpoint`` runs again the same weights.

    PyTorch has no hook for this: ``checkpoint`` keeps the function that it runs again, and the
    network's weights are gone by then. So the two functions within PyTorch that keep it are
    wrapped while a network is run; in threads that run no such network they do as ever.

    Args:
        weights: makes a context in which the network has the weights of the pass.

    Example:
        >>> from contextlib import nullcontext
        >>> from torch.utils.checkpoint import checkpoint
        >>> x = torch.ones(3, requires_grad=True)
        >>> with recomputable(nullcontext):
        ...     y = checkpoint(torch.exp, x, use_reentrant=False)
        >>> y.sum().backward()
        >>> bool((x.grad == y).all())
        True
    """
    passes = _passes()
    passes.append(weights)
    _wrapping.enter()
    try:
        yield
    finally:
        _wrapping.exit()
        passes.pop()


class _Local(threading.local):
    """The passes in which this thread is, the innermost last."""

    def __init__(self) -> None:
        self.passes: list[_Resume] = []


_local = _Local()


def _passes() -> list[_Resume]:
    return _local.passes


def _resumed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs in the state of the current pass, where there is one."""
    passes = _passes()
    if not passes or not torch.is_grad_enabled():
        return function
    weights = passes[-1]
    modes = [
        mode.resumable()
        for mode in _get_current_function_mode_stack()
        if isinstance(mode, WeightInterceptor)
    ]

    @wraps(function)
    def again(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            if modes:
                stack.enter_context(run_uncompiled())
            for resume in (weights, *modes):
                stack.enter_context(resume())
            # A part may itself have parts that are run again.
            stack.enter_context(recomputable(weights))
            return function(*args, **kwargs)

    return again


def _refused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that says why it cannot be run again, where it lacks its weights."""
    if not _passes():
        return function

    @wraps(function)
    def again(*args: Any) -> Any:
        try:
            return function(*args)
        except TypeError as error:
            if torch._C._current_graph_task_id() == -1 or "NoneType" not in str(error):
                raise
            raise RuntimeError(
                "a part with random parameters cannot be run again by the reentrant "
                "torch.utils.checkpoint; pass use_reentrant=False"
            ) from error

    return again


class _Wrapping:
    """Wraps the functions of PyTorch while any thread runs a network."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._originals: tuple[Any, Any] | None = None
        self._wrappers: tuple[Any, Any] | None = None

    def enter(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth > 1:
                return
            generator = torch_checkpoint._checkpoint_without_reentrant_generator
            reentrant = torch_checkpoint.CheckpointFunction
            # Made once, because to make a class takes longer than a pass of a small layer; anew
            # where another library has wrapped them since.
            if self._wrappers is None or self._originals != (generator, reentrant):
                self._originals = generator, reentrant
                self._wrappers = _wrapped(generator), _wrapped_class(reentrant)
            wrapped, wrapped_class = self._wrappers
            torch_checkpoint._checkpoint_without_reentrant_generator = wrapped
            torch_checkpoint.CheckpointFunction = wrapped_class  # type: ignore[misc]

    def exit(self) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0 and self._originals is not None:
                generator, reentrant = self._originals
                torch_checkpoint._checkpoint_without_reentrant_generator = generator
                torch_checkpoint.CheckpointFunction = reentrant  # type: ignore[misc]


def _wrapped(generator: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(_resumed(fn), *args, **kwargs)

    return wrapped


def _wrapped_class(reentrant: Any) -> Any:
    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], *args: Any) -> Any:
            return reentrant.apply(_refused(function), *args)

    return Reentrant


_wrapping = _Wrapping()
