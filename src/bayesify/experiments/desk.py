"""Where an experiment's units are handed out, to one process or several, and their rows come in.

What a unit is at in the middle lies in ``.work`` beside the results until it is done. A lock in
there is held by the process that is at it, and by no process once that has ended, however it did.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bayesify.experiments.experiment import Context, Experiment, Row, Unit, Watcher
from bayesify.experiments.locks import ProcessLock, remove_unheld
from bayesify.runs.environment import commit, hardware, versions
from bayesify.storage import StorageError, atomic_write

__all__ = ["Desk", "read_row", "read_rows", "stored_row"]

_KEYS = (
    *("experiment", "quick", "unit", "config", "seed", "commit", "hardware", "versions"),
    *("metrics", "notes", "seconds"),
)
_WORK, _BEGINNING = ".work", "unit.json"
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
        self._commit = commit()  # of the code that runs, whatever is committed meanwhile

    def stored(self, unit: Unit) -> Row | None:
        """The row of a finished unit.

        Raises:
            StorageError: it is damaged, or of other settings.
        """
        name = unit.file_name
        if name not in self._rows:
            row = stored_row(self._experiment, self._out, unit, quick=self._quick)
            if row is None:
                return None
            self._rows[name] = row
        return self._rows[name]

    def check_beginning(self, unit: Unit) -> None:
        """See that what was begun of a unit can be gone on with.

        Raises:
            StorageError: it is of other settings.
        """
        self._beginning(unit)

    def take(self, unit: Unit, *, wait: bool) -> Row | None:
        """See ``experiment.Take``."""
        if unit.file_name in self._rows:
            return self._rows[unit.file_name]
        row = self.stored(unit)  # another process may have done it meanwhile
        if row is None:
            with self._claimed(unit, wait=wait) as claimed:
                if not claimed:
                    return None
                row = self.stored(unit)
                if row is None:
                    self._watcher.on_unit(unit)
                    row = self._run(unit)
                    atomic_write(self._out / unit.file_name, json.dumps(row, indent=2) + "\n")
                    self._rows[unit.file_name] = row
                shutil.rmtree(self._work(unit), ignore_errors=True)
        self._watcher.on_done(unit, row)
        return row

    def tidy_up(self, units: Sequence[Unit]) -> None:
        """Remove what is left in the middle of these units, all of which are done."""
        for unit in units:
            shutil.rmtree(self._work(unit), ignore_errors=True)
        remove_unheld(self._out / _WORK)

    @contextmanager
    def _claimed(self, unit: Unit, *, wait: bool) -> Iterator[bool]:
        lock = ProcessLock(Path(f"{self._work(unit)}.lock"))
        told = False
        while not lock.acquire(wait=False):
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

    def _run(self, unit: Unit) -> dict[str, Any]:
        begun = self._beginning(unit) or {"commit": self._commit, "seconds": 0.0}
        started = time.perf_counter() - begun["seconds"]
        self._write_beginning(unit, begun)

        def on_progress(part: float) -> None:
            self._write_beginning(unit, {**begun, "seconds": time.perf_counter() - started})
            self._watcher.on_progress(part)

        context = replace(self._context, work=self._work(unit), on_progress=on_progress)
        try:
            with _one_thread(), _noted() as notes:
                metrics = self._experiment.run(unit, context)
                where = hardware()
        except StorageError as error:
            raise StorageError(
                f"{error}; remove {self._work(unit)}, and the same command begins this run anew"
            ) from error
        if begun["commit"] != self._commit:
            notes.add(f"begun at commit {begun['commit']}")
        row = {
            **_settings(self._experiment, unit, quick=self._quick),
            **{"commit": self._commit, "hardware": where, "versions": versions()},
            **{"metrics": metrics, "notes": sorted(notes)},
            "seconds": time.perf_counter() - started,
        }
        return {key: row[key] for key in _KEYS}

    def _work(self, unit: Unit) -> Path:
        """The folder of what it is at in the middle."""
        return self._out / _WORK / unit.file_name.removesuffix(".json")

    def _beginning(self, unit: Unit) -> dict[str, Any] | None:
        """The commit at which a unit was begun, and the seconds it took so far."""
        path = self._work(unit) / _BEGINNING
        if not path.exists():
            return None
        begun = _read_object(path)
        settings = _settings(self._experiment, unit, quick=self._quick)
        _check_same(path, settings, begun, "the beginning of a result")
        return {"commit": begun.get("commit"), "seconds": float(begun.get("seconds", 0.0))}

    def _write_beginning(self, unit: Unit, begun: Mapping[str, Any]) -> None:
        path = self._work(unit) / _BEGINNING
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {**_settings(self._experiment, unit, quick=self._quick), **begun}
        atomic_write(path, json.dumps(document, indent=2) + "\n")


def stored_row(experiment: Experiment, out: Path, unit: Unit, *, quick: bool) -> Row | None:
    """The row of a finished unit in a folder of results, if it is there.

    Raises:
        StorageError: it is damaged, or of other settings.
    """
    path = out / unit.file_name
    if not path.exists():
        return None
    row = read_row(path)
    _check_same(path, _settings(experiment, unit, quick=quick), row, "a result")
    return row


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
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"{path} cannot be read as a result ({error}); remove it") from error
    if not isinstance(document, dict):
        raise StorageError(f"{path} is no result of an experiment; remove it")
    return document


def _settings(experiment: Experiment, unit: Unit, *, quick: bool) -> dict[str, Any]:
    return {
        "experiment": experiment.name,
        "quick": quick,
        "unit": unit.name,
        "seed": unit.seed,
        "config": json.loads(json.dumps(unit.config)),
    }


def _check_same(path: Path, wanted: Row, found: Row, what: str) -> None:
    for name, here, there in _differences(wanted, found):
        raise StorageError(
            f"{path} holds {what} of other settings: its {name} must be {here}, got {there}; "
            "choose another folder with --out, or remove it"
        )


def _differences(wanted: Row, found: Row, within: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where the wanted are not found, by dotted name, with the two values."""
    for key in {**wanted, **(found if within else {})}:
        here, there, name = wanted.get(key), found.get(key), f"{within}{key}"
        if isinstance(here, dict) and isinstance(there, dict):
            yield from _differences(here, there, f"{name}.")
        elif here != there:
            yield name, here, there


@contextmanager
def _noted() -> Iterator[set[str]]:
    """What is warned of meanwhile, but for what Python and PyTorch say once a process only."""
    notes: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        for category in (UserWarning, RuntimeWarning):
            warnings.simplefilter("always", category)
        yield notes
    said = (str(warning.message) for warning in caught)
    notes.update(text for text in said if "(Triggered internally at" not in text)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
