"""Turns: one thread at a time runs a network, which holds the weights of a pass in its modules."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["Turns"]


class Turns:
    """A lock that a thread may take again; a copy or a pickle of its owner has a new one.

    Example:
        >>> import copy
        >>> turns = Turns()
        >>> with turns.taken(), turns.taken():
        ...     copy.deepcopy(turns) is turns
        False
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def taken(self) -> AbstractContextManager[object]:
        """Return a context in which no other thread has its turn; compiled code takes none."""
        return nullcontext() if torch.compiler.is_compiling() else self._lock

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()
