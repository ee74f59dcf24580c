"""Where an experiment's units are handed out, to one process or several, and their rows come in.

What a unit is at in the middle lies in ``.work`` beside the results until it is done. A lock in
there is held by the process that is at it, and by no process once that has ended, however it did.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from bayesify.experiments.experiment import Context, Experiment, Row, Unit, Watcher
from bayesify.runs.environment import commit, hardware, versions
from bayesify.storage import StorageError, atomic_write

__all__ = ["Desk", "read_row", "read_rows"]

_KEYS = (
    *("experiment", "quick", "unit", "config", "seed", "commit", "hardware", "versions"),
    *("metrics", "notes", "seconds"),
)
_WORK = ".work"
_POLL = 0.5  # seconds


class Desk:
    """One experiment's units and rows.

    Args:
        experiment: which.
        out: the folder of its results.
        watcher: told how it gets on.
        context: what units are run with.
        quick: whether they are of the short version.
    """

    def __init__(
        self, experiment: Experiment, out: Path, watcher: Watcher, context: Context, *, quick: bool
    ) -> None:
        self._experiment, self._out, self._watcher, self._quick = experiment, out, watcher, quick
        self._context = replace(context, on_progress=watcher.on_progress)
        self._rows: dict[str, Row] = {}

    def stored(self, unit: Unit) -> Row | None:
        """The row of a finished unit.

        Raises:
            StorageError: it is damaged, or of other settings.
        """
        name = unit.file_name
        if name not in self._rows and (self._out / name).exists():
            row = read_row(self._out / name)
            _check_same(self._out / name, self._settings(unit), row, "a result")
            self._rows[name] = row
        return self._rows.get(name)

    def work(self, unit: Unit) -> Path:
        """The folder of what it is at in the middle."""
        return self._out / _WORK / unit.file_name.removesuffix(".json")

    def take(self, unit: Unit, *, wait: bool) -> Row | None:
        """See ``experiment.Take``."""
        row = self.stored(unit)
        if row is not None:
            return row
        with self._claimed(unit, wait=wait) as claimed:
            if not claimed:
                return None
            row = self.stored(unit)  # another process may have been faster
            if row is None:
                self._watcher.on_unit(unit)
                row = self._run(unit)
                atomic_write(self._out / unit.file_name, json.dumps(row, indent=2) + "\n")
                self._rows[unit.file_name] = row
            shutil.rmtree(self.work(unit), ignore_errors=True)
        self._watcher.on_done(unit, row)
        return row

    def tidy_up(self, units: Sequence[Unit]) -> None:
        """Remove what is left in the middle of these units, all of which are done."""
        for unit in units:
            shutil.rmtree(self.work(unit), ignore_errors=True)
        # With a folder in it, another process is at units that were not asked for.
        if not any(path.is_dir() for path in (self._out / _WORK).glob("*")):
            shutil.rmtree(self._out / _WORK, ignore_errors=True)

    @contextmanager
    def _claimed(self, unit: Unit, *, wait: bool) -> Iterator[bool]:
        lock = FileLock(f"{self.work(unit)}.lock")
        told = False
        while not self._acquired(lock):
            if not wait:
                yield False
                return
            if not told:
                self._watcher.on_wait(unit)
                told = True
            time.sleep(_POLL)
        try:
            yield True
        finally:
            lock.release()

    def _acquired(self, lock: FileLock) -> bool:
        try:
            (self._out / _WORK).mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except (Timeout, FileNotFoundError):  # held, or a process that has done all tidies up
            return False
        return True

    def _run(self, unit: Unit) -> dict[str, Any]:
        started = time.perf_counter()
        now = commit()
        begun = self._begun(unit, now)
        context = replace(self._context, work=self.work(unit))
        with _one_thread(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            metrics = self._experiment.run(unit, context)
            where = hardware()
        notes = {str(warning.message) for warning in caught}
        if begun != now:
            notes.add(f"begun at commit {begun}")
        row = {
            **self._settings(unit),
            **{"commit": now, "hardware": where, "versions": versions(), "metrics": metrics},
            **{"notes": sorted(notes), "seconds": time.perf_counter() - started},
        }
        return {key: row[key] for key in _KEYS}

    def _begun(self, unit: Unit, now: str | None) -> str | None:
        """The commit at which a unit was begun: an earlier one where it goes on."""
        path, settings = self.work(unit) / "unit.json", self._settings(unit)
        if path.exists():
            begun = _read_object(path)
            _check_same(path, settings, begun, "the beginning of a result")
            earlier: str | None = begun.get("commit")
            return earlier
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps({**settings, "commit": now}, indent=2) + "\n")
        return now

    def _settings(self, unit: Unit) -> dict[str, Any]:
        return {
            "experiment": self._experiment.name,
            "quick": self._quick,
            "unit": unit.name,
            "seed": unit.seed,
            "config": json.loads(json.dumps(unit.config)),
        }


def read_row(path: Path) -> Row:
    """A finished unit's file.

    Raises:
        StorageError: it is no such file, or was altered into none.
    """
    row = _read_object(path)
    if not set(_KEYS) <= set(row):
        raise StorageError(f"{path} is no result of an experiment; remove it")
    return row


def read_rows(folder: Path) -> list[Row]:
    """All results in a folder, by file name; none where there is no folder.

    Raises:
        StorageError: one of them is damaged.
    """
    return [read_row(path) for path in sorted(folder.glob("*-seed-*.json"))]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read as a result ({error}); remove it") from error
    if not isinstance(document, dict):
        raise StorageError(f"{path} is no result of an experiment; remove it")
    return document


def _check_same(path: Path, wanted: dict[str, Any], found: Row, what: str) -> None:
    for key, value in wanted.items():
        if found.get(key) != value:
            raise StorageError(
                f"{path} holds {what} of other settings: its {key} must be {value}, got "
                f"{found.get(key)}; choose another folder with --out, or remove it"
            )


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
