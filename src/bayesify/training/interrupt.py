"""Deferred Ctrl-C: a step ends before the run stops, so that its files are consistent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupt", "deferred_interrupt"]


class Interrupt:
    """Whether Ctrl-C was pressed."""

    requested = False


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Turn the first Ctrl-C into a request and leave the second as it is.

    Only a main thread receives signals; elsewhere nothing changes.

    Example:
        >>> with deferred_interrupt() as interrupt:
        ...     interrupt.requested
        False
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    previous = signal.getsignal(signal.SIGINT)
    if not callable(previous):  # ignored by whoever started us, as with nohup
        yield interrupt
        return

    def request(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        interrupt.requested = True
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, request)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)
