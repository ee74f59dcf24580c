"""Running an experiment unit by unit: each result is a file, and what is there is not redone."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from bayesify.experiments.experiment import Context, Experiment, Row, Unit
from bayesify.runs.environment import commit, hardware, versions
from bayesify.storage import StorageError, atomic_write

__all__ = ["Outcome", "Watcher", "read_row", "read_rows", "reproduce"]

_KEYS = (
    *("experiment", "quick", "unit", "config", "seed", "commit", "hardware", "versions"),
    *("metrics", "notes", "seconds"),
)
QUICK_NOTE = "Quick run: shortened to see that it works. These numbers reproduce nothing."


class Watcher(Protocol):
    """Told how an experiment gets on."""

    def on_start(self, units: Sequence[Unit], left: Sequence[Unit]) -> None:
        """Of these units so many are still to be run."""

    def on_unit(self, unit: Unit) -> None:
        """A unit begins."""

    def on_progress(self, part: float) -> None:
        """Such a part of the unit is done, from 0 to 1."""

    def on_done(self, unit: Unit, row: Row) -> None:
        """It is finished, and stored."""


class Outcome(NamedTuple):
    """What an experiment left in its folder."""

    rows: list[Row]
    table: Path
    figures: list[Path]


def reproduce(
    experiment: Experiment,
    out: Path,
    watcher: Watcher,
    *,
    seeds: Sequence[int] = (),
    quick: bool = False,
    context: Context | None = None,
) -> Outcome:
    """Run what is missing of an experiment, then write its table and figures.

    Each finished unit is one file, written whole or not at all: a run that was killed at any
    moment goes on with the unit that it was in. One thread is used, so that results do not depend
    on the number of cores.

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
    rows: dict[str, Row] = {}
    for unit in units:  # all are looked at before hours are spent
        path = out / unit.file_name
        if path.exists():
            rows[unit.file_name] = _checked(path, experiment, unit, quick)
    left = [unit for unit in units if unit.file_name not in rows]
    watcher.on_start(units, left)
    out.mkdir(parents=True, exist_ok=True)
    context = replace(context or Context(), on_progress=watcher.on_progress)
    for unit in left:
        watcher.on_unit(unit)
        row = _run(experiment, unit, context, quick=quick)
        atomic_write(out / unit.file_name, json.dumps(row, indent=2) + "\n")
        rows[unit.file_name] = row
        watcher.on_done(unit, row)
    return _summarise(experiment, out, [rows[unit.file_name] for unit in units], quick=quick)


def read_row(path: Path) -> Row:
    """A finished unit's file.

    Raises:
        StorageError: it is no such file, or was altered into none.
    """
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read as a result ({error}); remove it") from error
    if not isinstance(row, dict) or not set(_KEYS) <= set(row):
        raise StorageError(f"{path} is no result of an experiment; remove it")
    return row


def read_rows(folder: Path) -> list[Row]:
    """All results in a folder, by file name; none where there is no folder.

    Raises:
        StorageError: one of them is damaged.
    """
    return [read_row(path) for path in sorted(folder.glob("*-seed-*.json"))]


def _checked(path: Path, experiment: Experiment, unit: Unit, quick: bool) -> Row:
    row = read_row(path)
    wanted = {
        "experiment": experiment.name,
        "quick": quick,
        "unit": unit.name,
        "seed": unit.seed,
        "config": json.loads(json.dumps(unit.config)),
    }
    for key, value in wanted.items():
        if row[key] != value:
            raise StorageError(
                f"{path} holds a result of other settings: its {key} must be {value}, got "
                f"{row[key]}; choose another folder with --out, or remove the file"
            )
    return row


def _run(experiment: Experiment, unit: Unit, context: Context, *, quick: bool) -> dict[str, Any]:
    started = time.perf_counter()
    with _one_thread(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        metrics = experiment.run(unit, context)
        where = hardware()
    values: tuple[Any, ...] = (
        *(experiment.name, quick, unit.name, dict(unit.config), unit.seed, commit(), where),
        *(versions(), metrics, sorted({str(warning.message) for warning in caught})),
        time.perf_counter() - started,
    )
    return dict(zip(_KEYS, values, strict=True))


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
        temporary = path.with_name(f".{path.name}.part")
        try:
            figure.savefig(temporary, format="png", dpi=150, metadata={"Software": None})
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        paths.append(path)
    return Outcome(rows, table, paths)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
