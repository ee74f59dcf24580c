"""What an experiment is: units of work, and what is made of their results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bayesify.training.history import History
from bayesify.training.history import Row as HistoryRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    *("Context", "Experiment", "GoThrough", "Progress", "Row", "Take", "Unit", "Watcher"),
    *("in_turn", "no_files"),
]

#: A finished unit, as its file holds it: see ``desk.read_row``.
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Unit:
    """One piece of work, whose result is a file.

    Args:
        name: what it is called, and its file; seed and experiment are not part of it.
        seed: what all its randomness is a function of.
        config: everything else that determines it, as JSON.
        seconds: about what it costs on one core of the machine that it was measured on.
        datasets: names of what it needs, as in ``bayesify data list``.
    """

    name: str
    seed: int
    config: Mapping[str, Any]
    seconds: float
    datasets: tuple[str, ...] = ()

    @property
    def file_name(self) -> str:
        """The file of its result.

        Example:
            >>> Unit("yacht", 0, {}, 60.0).file_name
            'yacht-seed-0.json'
        """
        return f"{self.name}-seed-{self.seed}.json"


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


@dataclass(frozen=True)
class Context:
    """What a unit is run with, beside its settings.

    Args:
        data_dir: look for data in this directory and in no other.
        on_progress: told which part of the unit is done, from 0 to 1.
        on_download: told how a download gets on, see ``bayesify.datasets.Progress``.
        work: a folder of the unit's own for the state of its training, from which it goes on
            after it was killed; it is removed with all that it holds when the unit is done. None
            keeps nothing.
    """

    data_dir: str | Path | None = None
    on_progress: Callable[[float], None] | None = None
    on_download: Callable[[str, int, int | None], None] | None = None
    work: Path | None = None

    def part(self, name: str, place: int, count: int) -> Context:
        """What the ``place``-th of ``count`` equal parts of the unit is run with.

        Example:
            >>> told = []
            >>> Context(on_progress=told.append).part("second", 1, 4).on_progress(0.5)
            >>> told
            [0.375]
        """
        tell = self.on_progress
        return replace(
            self,
            on_progress=None if tell is None else lambda part: tell((place + part) / count),
            work=None if self.work is None else self.work / name,
        )


class Progress:
    """A callback of ``fit`` that passes on which part of the epochs is done.

    Args:
        context: told of it.
        epochs: in all.
        then: called after each epoch.
    """

    def __init__(
        self, context: Context, epochs: int, then: Callable[[], None] | None = None
    ) -> None:
        self._context, self._epochs, self._then = context, epochs, then

    def on_start(self, *, epochs: int, batches: int, history: History) -> None:  # noqa: ARG002
        """Tell where it goes on."""
        self._tell(len(history))

    def on_note(self, text: str) -> None:
        """Warn where the fused step was not taken, for its noise is another: a row keeps that."""
        if "not fused:" in text:
            warnings.warn(text, UserWarning, stacklevel=2)

    def on_step(self, *, epoch: int, batch: int) -> None:
        """Say nothing."""

    def on_epoch(self, row: HistoryRow) -> None:
        """Tell of the epoch."""
        self._tell(int(row["epoch"] or 0))
        if self._then is not None:
            self._then()

    def _tell(self, done: int) -> None:
        if self._context.on_progress is not None:
            self._context.on_progress(done / self._epochs)


class Take(Protocol):
    """Has a unit done, once for all processes that share a folder of results."""

    def __call__(self, unit: Unit, *, wait: bool) -> Row | None:
        """Its row, as it is there or after running it here.

        Args:
            unit: which.
            wait: for another process that is at it; else None is returned.
        """


#: How units are gone through: with ``take``, in a folder of results.
GoThrough = Callable[[Sequence[Unit], Path, Take], None]


def in_turn(units: Sequence[Unit], folder: Path, take: Take) -> None:  # noqa: ARG001
    """One after the other; those that other processes are at last."""
    for unit in [unit for unit in units if take(unit, wait=False) is None]:
        take(unit, wait=True)


def no_files(rows: Sequence[Row]) -> dict[str, str]:  # noqa: ARG001
    """None beside table and figures."""
    return {}


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of the literature, as this library reproduces it.

    Args:
        name: what users call it.
        source: the paper or document, with the number of its table or figure.
        reported: what that says, in one line.
        seeds: those of the full run, unless others are asked for.
        memory_mb: about the most that a full run takes, in megabytes.
        units: the work for some seeds, in full or quick.
        run: one unit's metrics, as JSON.
        table: Markdown of the rows, in which the reported numbers stand beside ours; it may be
            given a part of them.
        figures: by name, of the rows; likewise.
        go_through: in which order its units are run.
        files: further results as text, by file name, of the rows; likewise. Its tables have a
            column that says of each line whether it is quick.
    """

    name: str
    source: str
    reported: str
    seeds: tuple[int, ...]
    memory_mb: int
    units: Callable[[Sequence[int], bool], list[Unit]]
    run: Callable[[Unit, Context], dict[str, Any]]
    table: Callable[[Sequence[Row]], str]
    figures: Callable[[Sequence[Row]], dict[str, Figure]]
    go_through: GoThrough = in_turn
    files: Callable[[Sequence[Row]], dict[str, str]] = no_files

    def seconds(self, *, quick: bool = False) -> float:
        """What its units cost, about; see :class:`Unit`."""
        return sum(unit.seconds for unit in self.units(self.usual_seeds(quick=quick), quick))

    def usual_seeds(self, *, quick: bool = False) -> tuple[int, ...]:
        """Those of a run for which none are asked: of a quick one, the first."""
        return self.seeds[:1] if quick else self.seeds
