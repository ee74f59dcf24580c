"""Folders of runs, claimed and locked, so that one process at a time trains in each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from bayesify.app.runs.run_files import CONFIG_NAME, LOCK_NAME, RunError
from bayesify.io.files import remove_leftovers

__all__ = ["claimed_folder", "locked_folder", "new_folder"]


def new_folder(dataset: str) -> Path:
    """Return a folder below ``runs`` that does not exist, named after the data of a run.

    Args:
        dataset: a name, a path or a pattern.

    Example:
        >>> print(new_folder("somewhere/sales-2026/*.parquet").name)
        sales-2026
    """
    parts = [part for part in Path(dataset).parts if not set("*?[") & set(part)]
    name = (Path(parts[-1]).stem if parts else "") or "run"
    folder, count = Path("runs", name), 1
    while folder.exists():
        count += 1
        folder = Path("runs", f"{name}-{count}")
    return folder


@contextmanager
def claimed_folder(dataset: str) -> Iterator[Path]:
    """Make a folder below ``runs`` that no other process has, as :func:`new_folder` names it.

    It is removed again if nothing was written into it.
    """
    has_parent = new_folder(dataset).parent.exists()
    while True:
        folder = new_folder(dataset)
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
        except (FileExistsError, FileNotFoundError):
            continue  # another process has just made it, or removed its empty parent
        break
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty: the run, or other runs
            folder.rmdir()
            if not has_parent:
                folder.parent.rmdir()


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it is not there.

    A folder that was made is removed again if nothing was written into it. The operating system
    releases the lock of a process that is killed.

    Raises:
        RunError: another process holds it.
        OSError: the folder cannot be made or written to.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as parent:
        ...     with locked_folder(Path(parent, "run")), locked_folder(Path(parent, "run")):
        ...         pass
        Traceback (most recent call last):
        bayesify.app.runs.run_files.RunError: another process is training the run in ...
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_NAME
    is_run = path.exists() or (folder / CONFIG_NAME).exists()
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise RunError(
            f"another process is training the run in {folder}; wait for it, stop it, or choose "
            "another --out"
        ) from error
    if is_run:
        remove_leftovers(folder)
    try:
        yield
    finally:
        # While it is held, so that no other process has it under the name that is removed.
        with suppress(OSError):
            path.unlink()
        lock.release()
        if is_new:
            with suppress(OSError):  # not empty: the run
                folder.rmdir()
