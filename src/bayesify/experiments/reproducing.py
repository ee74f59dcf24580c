"""Running an experiment unit by unit: each result is a file, and what is there is not redone."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bayesify.datasets import find_dataset, get_file
from bayesify.experiments.desk import Desk
from bayesify.experiments.experiment import Context, Experiment, Row, Watcher
from bayesify.storage import StorageError, atomic_write

__all__ = ["Outcome", "reproduce"]

QUICK_NOTE = "Quick run: shortened to see that it works. These numbers reproduce nothing."


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
        DataError: a data set that it needs is nowhere to be found.
        OSError: the folder cannot be written.
    """
    seeds = tuple(seeds) or experiment.usual_seeds(quick=quick)
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ValueError(
            f"seeds must be different numbers of at least 0, got {', '.join(map(str, seeds))}"
        )
    units, context = experiment.units(seeds, quick), context or Context()
    desk = Desk(experiment, out, watcher, context, quick=quick)
    left = [unit for unit in units if desk.stored(unit) is None]  # all are looked at first
    for unit in left:
        desk.check_beginning(unit)
    _check_folder(out)
    watcher.on_start(units, left)
    for name in dict.fromkeys(name for unit in left for name in unit.datasets):
        for file in find_dataset(name).files:  # before hours are spent
            get_file(file, context.data_dir, progress=context.on_download)
    out.mkdir(parents=True, exist_ok=True)
    experiment.go_through(units, out, desk.take)
    desk.tidy_up(units)
    rows = [row for unit in units if (row := desk.stored(unit)) is not None]
    return _summarise(experiment, out, rows, quick=quick)


def _check_folder(out: Path) -> None:
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise StorageError(
                f"results need a folder, but {path} is a file; choose another with --out"
            )


def _summarise(experiment: Experiment, out: Path, rows: list[Row], *, quick: bool) -> Outcome:
    try:
        table = experiment.table(rows)
        figures, files = experiment.figures(rows), experiment.files(rows)
    except (LookupError, TypeError, AttributeError) as error:
        raise StorageError(
            f"the results in {out} lack what the table needs ({type(error).__name__}: {error}); "
            "they were altered, or written by another version: remove them"
        ) from error
    text = f"**{QUICK_NOTE}**\n\n{table}" if quick else table
    written = [out / name for name in files]
    for name, content in {"table.md": text.rstrip("\n") + "\n", **files}.items():
        atomic_write(out / name, content)
    drawn = []
    for name, figure in figures.items():
        if quick:
            figure.suptitle(QUICK_NOTE, color="#D55E00", fontsize=9)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=150, metadata={"Software": None})
        drawn.append(out / f"{name}.png")
        atomic_write(drawn[-1], image.getvalue())  # several processes may be at it
    return Outcome(rows, out / "table.md", drawn, written)
