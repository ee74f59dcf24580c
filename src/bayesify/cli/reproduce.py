"""``bayesify reproduce``: tables and figures of the literature."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from bayesify.cli.data import download_bar
from bayesify.cli.words import duration
from bayesify.experiments import (
    EXPERIMENTS,
    Context,
    Experiment,
    Row,
    Unit,
    find_experiment,
    stored_row,
)
from bayesify.experiments import reproduce as run_experiment
from bayesify.runs import ConfigError
from bayesify.storage import StorageError

__all__ = ["reproduce"]

_RESULTS = Path("results")


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="The experiment; see --list.", show_default=False)
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="About a minute, to see that it works; reproduces nothing."),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help=r"The folder of its results. \[default: results/NAME, or results/NAME-quick]",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help=r"Such as 0,1,2. \[default: the experiment's own]", show_default=False),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Look for the data only in this folder.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Reproduce a table or a figure of the literature, and set ours beside it.

    Each finished piece of work is a JSON file in the folder --out; beside them come table.md,
    the figures and, of some, a CSV. A run that was stopped or killed at any moment goes on with
    the same command, from its last epoch, and what is there already is not run again. The same
    command in a second terminal takes its share of the work.
    """
    if list_ == (name is not None):
        raise ConfigError("reproduce needs the name of an experiment, or --list and no name")
    if name is None:
        given = {"quick": quick, "out": out, "seeds": seeds, "data-dir": data_dir}
        idle = [option for option, value in given.items() if value]
        if idle:
            raise ConfigError(f"{idle[0]} would do nothing with --list; leave it out")
        _list(as_json=as_json)
        return
    experiment = find_experiment(name)
    folder = out or _RESULTS / (f"{name}-quick" if quick else name)
    console = Console(stderr=True)
    watcher = _Watcher(console, experiment, folder, quick=quick)
    try:
        with download_bar() as on_download:
            outcome = run_experiment(
                experiment,
                folder,
                watcher,
                seeds=_numbers(seeds),
                quick=quick,
                context=Context(data_dir=data_dir, on_download=on_download),
            )
    except KeyboardInterrupt:
        watcher.close()
        console.print("stopped; the same command goes on", soft_wrap=True)
        raise
    finally:
        watcher.close()
    if as_json:
        document = {
            "experiment": name,
            "quick": quick,
            "rows": list(outcome.rows),
            "table": str(outcome.table),
            "figures": [str(path) for path in outcome.figures],
            "files": [str(path) for path in outcome.files],
        }
        typer.echo(json.dumps(document))
        return
    typer.echo(outcome.table.read_text(encoding="utf-8"))
    for path in (outcome.table, *outcome.figures, *outcome.files):
        console.print(Text(str(path)), soft_wrap=True)


def _numbers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"seeds must be numbers such as 0,1,2, got {text!r}") from error


def _list(*, as_json: bool) -> None:
    rows = [_describe(experiment) for experiment in EXPERIMENTS.values()]
    if as_json:
        typer.echo(json.dumps({"experiments": rows}))
        return
    table = Table(Column("name", no_wrap=True), "source", "reported", "cost", "stored")
    for row in rows:
        table.add_row(row["name"], row["source"], row["reported"], row["cost"], row["stored"])
    Console().print(table)


def _describe(experiment: Experiment) -> dict[str, Any]:
    units, folder = experiment.units(experiment.seeds, False), _RESULTS / experiment.name
    stored, other = 0, 0
    for unit in units:
        try:
            stored += stored_row(experiment, folder, unit, quick=False) is not None
        except StorageError:
            other += 1
    damaged = f", {other} damaged or of other settings" if other else ""
    return {
        "name": experiment.name,
        "source": experiment.source,
        "reported": experiment.reported,
        "cost": f"{duration(experiment.seconds())} on one core, {experiment.memory_mb} MB; --quick "
        f"{duration(experiment.seconds(quick=True))}",
        "stored": f"{stored} of {len(units)} in {folder}{damaged}",
    }


class _Watcher:
    """Says what it will cost, then a line a unit, and beneath them a bar."""

    def __init__(self, console: Console, experiment: Experiment, out: Path, *, quick: bool) -> None:
        self._console, self._experiment, self._out = console, experiment, out
        self._quick = quick
        self._noted: set[str] = set()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=40),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._started = 0.0

    def on_start(self, units: Sequence[Unit], left: Sequence[Unit]) -> None:
        """Say what will be done, and about how long it takes."""
        self._total, self._done = len(units), len(units) - len(left)
        seconds = sum(unit.seconds for unit in left)
        quick = " --quick, which reproduces nothing" if self._quick else ""
        there = f", {self._done} of them there already" if self._done else ""
        self._say(
            f"{self._experiment.name}{quick} ({self._experiment.source}): {len(units)} runs{there}"
            f"; about {duration(seconds)} on one core and {self._experiment.memory_mb} MB"
        )
        self._say(f"results in {self._out}; stop at any time, the same command goes on")

    def on_unit(self, unit: Unit) -> None:
        """Begin its bar."""
        self._started = time.monotonic()
        self._bar.start()
        self._task = self._bar.add_task(f"{unit.name}, seed {unit.seed}", total=1.0)

    def on_progress(self, part: float) -> None:
        """Move the bar."""
        if self._task is not None:
            self._bar.update(self._task, completed=part)

    def on_wait(self, unit: Unit) -> None:
        """Say what is waited for."""
        self._say(f"{unit.name}, seed {unit.seed}: another process is at it; waiting for it")

    def on_done(self, unit: Unit, row: Row) -> None:
        """Say that it is stored."""
        self._done += 1
        self.close()
        took = duration(float(row["seconds"]))
        self._say(f"{self._done}/{self._total} {unit.name}, seed {unit.seed}: {took}")
        for note in row["notes"]:
            if note not in self._noted:  # many runs of a kind have the same to say
                self._say(f"    note: {note}")
        self._noted.update(row["notes"])

    def close(self) -> None:
        """Take the bar away."""
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        self._bar.stop()

    def _say(self, text: str) -> None:
        # Text, because Rich would read [brackets] in a path as markup.
        self._console.print(Text(text), soft_wrap=True)
