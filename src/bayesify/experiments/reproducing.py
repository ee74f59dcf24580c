"""Running an experiment unit by unit: each result is a file, and what is there is not redone.

What a unit is at in the middle lies in ``.work`` beside the results until it is done. A lock in
there is held by the process that is at it, and by no process once that has ended, however it did.
"""

from __future__ import annotations

import io
import json
import shutil
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from filelock import FileLock, Timeout

from bayesify.experiments.experiment import Context, Experiment, Row, Unit
from bayesify.runs.environment import commit, hardware, versions
from bayesify.storage import StorageError, atomic_write

__all__ = ["Outcome", "Watcher", "read_row", "read_rows", "reproduce"]

_KEYS = (
    *("experiment", "quick", "unit", "config", "seed", "commit", "hardware", "versions"),
    *("metrics", "notes", "seconds"),
)
_WORK = ".work"
_POLL = 0.5  # seconds
QUICK_NOTE = "Quick run: shortened to see that it works. These numbers reproduce nothing."


class Watcher(Protocol):
    """Told how an experiment gets on."""

    def on_start(self, units: Sequence[Unit], left: Sequence[Unit]) -> None:
        """Of these units so many are still to be run."""

    def on_unit(self, unit: Unit) -> None:
        """A unit begins."""

    def on_progress(self, part: float) -> None:
        """Such a part of the unit is done, from 0 to 1."""

    def on_wait(self, unit: Unit) -> None:
        """Another process is at it, and nothing else is left."""

    def on_done(self, unit: Unit, row: Row) -> None:
        """It is finished, and stored."""


class Outcome(NamedTuple):
    """What an experiment left in its folder."""

    rows: list[Row]
    table: Path
    figures: list[Path]
    files: list[Path]


def reproduce(
    experiment: Experiment,
    out: Path,
    watcher: Watcher,
    *,
    seeds: Sequence[int] = (),
    quick: bool = False,
    context: Context | None = None,
) -> Outcome:
    """Run what is missing of an experiment, then write its table, figures and other files.

    Each finished unit is one file, written whole or not at all: a run that was killed at any
    moment goes on with the unit that it was in, from its last epoch. Several processes can share a
    folder, each with units of its own; all end when all is done. One thread is used by each, so
    that results do not depend on the number of cores.

    Args:
        experiment: which.
        out: the folder of its results, made where it is not there.
        watcher: told how it gets on.
        seeds: of all randomness; none are the experiment's own.
        quick: run a short version instead, which says so everywhere.
        context: where the data are; its ``on_progress`` is the watcher's.

    Raises:
        ValueError: a seed is given twice or is negative.
        StorageError: the folder holds a result that is damaged, or of other settings.
        OSError: the folder cannot be written.
    """
    seeds = tuple(seeds) or experiment.usual_seeds(quick=quick)
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ValueError(
            f"seeds must be different numbers of at least 0, got {', '.join(map(str, seeds))}"
        )
    units = experiment.units(seeds, quick)
    desk = _Desk(experiment, out, watcher, context or Context(), quick=quick)
    done = [unit for unit in units if desk.stored(unit) is not None]  # all are looked at first
    watcher.on_start(units, [unit for unit in units if unit not in done])
    out.mkdir(parents=True, exist_ok=True)
    experiment.go_through(units, out, desk.take)
    for unit in units:
        shutil.rmtree(desk.work(unit), ignore_errors=True)
    # With a folder in it, another process is at units that were not asked for.
    if not any(path.is_dir() for path in (out / _WORK).glob("*")):
        shutil.rmtree(out / _WORK, ignore_errors=True)
    rows = [row for unit in units if (row := desk.stored(unit)) is not None]
    return _summarise(experiment, out, rows, quick=quick)


class _Desk:
    """Where units are handed out and their rows come in."""

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


def _summarise(experiment: Experiment, out: Path, rows: list[Row], *, quick: bool) -> Outcome:
    text = experiment.table(rows)
    if quick:
        text = f"**{QUICK_NOTE}**\n\n{text}"
    table = out / "table.md"
    atomic_write(table, text.rstrip("\n") + "\n")
    paths = []
    for name, figure in experiment.figures(rows).items():
        if quick:
            figure.suptitle(QUICK_NOTE, color="#D55E00", fontsize=9)
        path = out / f"{name}.png"
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=150, metadata={"Software": None})
        atomic_write(path, drawn.getvalue())  # several processes may be at it
        paths.append(path)
    files = []
    for name, text in experiment.files(rows).items():
        atomic_write(out / name, text)
        files.append(out / name)
    return Outcome(rows, table, paths, files)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
