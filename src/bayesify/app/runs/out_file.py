"""The file that a command writes, checked before there is content."""

from __future__ import annotations

import os
from pathlib import Path

from bayesify.app.runs.run_files import RunError
from bayesify.io.files import StorageError, named_file

__all__ = ["check_can_be_written"]


def check_can_be_written(
    out: Path, *, overwrite: bool | None = False, option: str = "--out"
) -> None:
    """Check that a file can be written, before its content is computed.

    Args:
        out: the file.
        overwrite: whether it may be there; None for a command that has no ``--force``.
        option: option of the command line that names it.

    Raises:
        RunError: the file exists and is not to be overwritten, or is a folder, a device or a pipe,
            or its folder does not exist or cannot be written to.

    Example:
        >>> check_can_be_written(Path("."))
        Traceback (most recent call last):
        bayesify.app.runs.run_files.RunError: . is a folder; choose a file with --out
    """
    if str(out) == "-":
        raise RunError(f"{option} must be a file, got -, and nothing is written to standard output")
    if out.is_dir():
        raise RunError(f"{out} is a folder; choose a file with {option}")
    try:
        place = named_file(out)
    except StorageError as error:
        raise RunError(f"{option}: {error}") from error
    if out.exists() and not overwrite:
        force = "" if overwrite is None else ", or overwrite it with --force"
        raise RunError(f"{out} exists already; choose a new file with {option}{force}")
    folder = place.parent
    if not folder.is_dir():
        raise RunError(f"{out} cannot be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise RunError(f"{out} cannot be written: {folder} may not be written to")
