"""A context in which compiled parts of a network run operation by operation."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

__all__ = ["run_uncompiled"]


class _Stance:
    """The compiler's stance, which all threads share: eager while at least one of them is within.

    A thread that restored on its own what it had found would undo, or keep, that of another. A
    stance that a program sets itself meanwhile, in another thread, is overwritten.
    """

    def __init__(self) -> None:
        self._lock, self._count, self._kept = threading.Lock(), 0, ExitStack()

    def enter(self) -> None:
        with self._lock:
            if not self._count:
                self._kept.enter_context(torch.compiler.set_stance("force_eager"))
            self._count += 1

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._kept.close()


_STANCE = _Stance()


@contextmanager
def run_uncompiled() -> Iterator[None]:
    """Run compiled parts of a network as they are written, for a mode that sees operations.

    A mode sees none of code that was compiled before, and what is compiled within one holds the
    mode's state of that time.

    Example:
        >>> net = torch.compile(torch.nn.Linear(3, 2), backend="eager")
        >>> with run_uncompiled():
        ...     net(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """
    if "torch._dynamo" not in sys.modules:  # its import takes seconds, and nothing is compiled
        yield
        return
    _STANCE.enter()
    try:
        yield
    finally:
        _STANCE.leave()
