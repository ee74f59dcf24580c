"""Names of the files in the folder of a run, and folders that are free for a new one."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path

__all__ = [
    "CONFIG_NAME",
    "LOCK_NAME",
    "MADE_FIRST",
    "TUNING_STUDY",
    "TUNING_SUMMARY",
    "RunError",
    "check_is_free",
    "is_tuning",
]

CONFIG_NAME = "config.json"
#: Written by a search of settings, before there is a run: an Optuna study, and what it chose.
TUNING_STUDY, TUNING_SUMMARY = "tuning.db", "tuning.json"
#: Held by the process that trains the run; one that was killed leaves the file.
LOCK_NAME = ".lock"
#: Written before config.json: a run that was killed while it was made leaves them and its lock.
MADE_FIRST = ("table.json", "table.safetensors", "images.json")


class RunError(ValueError):
    """A folder does not hold the requested run, or holds another."""


def is_tuning(folder: Path) -> bool:
    """Return whether a folder holds a search of settings and no run yet."""
    found = any((folder / name).exists() for name in (TUNING_STUDY, TUNING_SUMMARY))
    return found and not (folder / CONFIG_NAME).exists()


def check_is_free(folder: Path, *, after_tuning: bool = False) -> None:
    """Check that a new run can be created in a folder.

    Args:
        folder: path of the folder.
        after_tuning: whether it may hold a search of settings.

    Raises:
        RunError: it holds something already, or cannot be made or written to.
    """
    # access() is False, where Path.exists() raises, for what lies in a folder that cannot be read.
    there = next(each for each in (folder, *folder.absolute().parents) if os.access(each, os.F_OK))
    if there != folder and not there.is_dir():
        raise RunError(
            f"{folder} must be a new or empty folder, but {there} is a file; choose another folder "
            "with --out"
        )
    is_link_to_nothing = there != folder and folder.is_symlink()
    if is_link_to_nothing or not there.is_dir():
        kind = "a link to what is not there" if is_link_to_nothing else "a file"
        raise RunError(
            f"{folder} must be a new or empty folder, but is {kind}; choose another folder with "
            "--out"
        )
    if there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
        raise RunError(
            f"{folder} must be a folder that can be written to, but {there} cannot; choose another "
            "folder with --out, or change its permissions"
        )
    if after_tuning and is_tuning(folder):
        return
    if folder.is_dir() and not all(map(_is_no_run, folder.iterdir())):
        held, mend = "other files", ""
        if (folder / CONFIG_NAME).exists():
            held, mend = "another run", ", or continue that run with --resume"
        elif is_tuning(folder):
            held = "an unfinished search of settings"
            mend = ", or continue that search with the same command and --resume"
        raise RunError(f"{folder} holds {held}; choose a new folder with --out{mend}")


def _is_no_run(path: Path) -> bool:
    """Return whether a file is a lock, or of a run that was killed before it had its settings."""
    if path.name == LOCK_NAME:
        return True
    # Without its lock they are the user's own.
    is_begun = path.with_name(LOCK_NAME).exists() and not path.with_name(CONFIG_NAME).exists()
    temporary = (f".{name}.*.tmp" for name in (*MADE_FIRST, CONFIG_NAME))
    return is_begun and any(fnmatchcase(path.name, each) for each in (*MADE_FIRST, *temporary))
