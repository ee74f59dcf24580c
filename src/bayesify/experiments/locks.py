"""Locks that no dead process can hold, as files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

__all__ = ["ProcessLock", "remove_unheld"]


class ProcessLock:
    """Held by one process, and by none once that has ended, however it did.

    Args:
        path: of the file; its folder is made where it is not there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     one, other = (ProcessLock(Path(folder) / "a.lock") for _ in range(2))
        ...     with one.held():
        ...         other.acquire(wait=False)
        False
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, FileLock(path)

    def acquire(self, *, wait: bool = True) -> bool:
        """Whether it is held now, as often as this was called."""
        while True:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=-1 if wait else 0)
            except Timeout:
                return False
            except FileNotFoundError:  # a process that has done all tidies up
                continue
            return True

    def release(self) -> None:
        """Let it go, once for each time that it was acquired."""
        self._lock.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it meanwhile."""
        self.acquire()
        try:
            yield
        finally:
            self.release()


def remove_unheld(folder: Path) -> None:
    """Remove a folder of locks if it holds nothing else and no process holds one of them."""
    with ExitStack() as held:
        paths = list(folder.glob("*.lock"))
        for path in paths:
            lock = FileLock(path)
            try:
                lock.acquire(timeout=0)
            except (Timeout, FileNotFoundError):
                return  # a process is at something, or tidies up itself
            held.callback(lock.release)
        if any(path.suffix != ".lock" for path in folder.glob("*")):
            return
        for path in paths:
            path.unlink(missing_ok=True)
        with suppress(OSError):  # there is a new lock in it
            folder.rmdir()
