"""``bayesify reproduce``: tables and figures of the literature."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from bayesify.app.cli.data_command import download_bar
from bayesify.app.cli.formatting import duration
from bayesify.app.cli.progress_bar import progress_bar
from bayesify.app.launch import requested_device
from bayesify.app.runs import ConfigError
from bayesify.app.runs.environment import check_committed, checkout, commit, has_fast_bfloat16
from bayesify.io import StorageError
from bayesify.reproduce import (
    EXPERIMENTS,
    Context,
    Experiment,
    Job,
    Result,
    find_experiment,
    named_jobs,
    stored_result,
)
from bayesify.reproduce import reproduce as run_experiment

__all__ = ["reproduce"]

_GPU = "; takes --device cuda"
_NO_BFLOAT16 = "this CPU has no bfloat16 instructions:"


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="The experiment; see --list.", show_default=False)
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="About a minute at most, to see that it works; reproduces nothing."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The folder of its results; within a clone the default is in its root. "
            r"\[default: results/NAME, or results/NAME-quick]",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help=r"Such as 0,1,2. \[default: the experiment's own]", show_default=False),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            help="Run only the jobs of these names, such as 'yacht-*,energy-*'; the table has "
            "what is there.",
            metavar="NAMES",
            show_default=False,
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Look for the data only in this folder.", show_default=False)
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="ray: run the jobs on the Ray cluster of this machine, or on a new one; "
            "ray=ADDRESS: on the one there. All nodes must share the folder --out.",
            metavar="ray[=ADDRESS]",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="Where networks are trained: cpu, cuda, or auto for a GPU where there is one. Of "
            "the experiments that --list marks; others train on the CPU only."
        ),
    ] = "cpu",
    uncommitted: Annotated[
        bool,
        typer.Option("--uncommitted", help="Run although the code differs from its commit."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Reproduce a table or a figure of the literature, next to the reported numbers.

    Each finished job is a JSON file in the folder --out; table.md, the figures and, for some
    experiments, CSV files are written next to them. The same command resumes a run that was
    stopped or killed at any moment, after its last epoch; finished jobs are not run again. The
    same command in a second terminal shares the work, and so does each CPU of a Ray cluster with
    --on ray, where a job whose worker or node dies resumes on another.

    A result names the commit of the code that made it. Where the code of the checkout differs from
    that commit, nothing is run without --uncommitted, which marks the results as such.
    """
    if list_ == (name is not None):
        raise ConfigError("reproduce needs the name of an experiment, or --list and no name")
    if name is None:
        given = {
            "quick": quick,
            "out": out,
            "seeds": seeds,
            "only": only,
            "data-dir": data_dir,
            "on": on,
            "uncommitted": uncommitted,
            "device": device != "cpu",
        }
        idle = [option for option, value in given.items() if value]
        if idle:
            raise ConfigError(f"{idle[0]} would do nothing with --list; leave it out")
        _list(as_json=as_json)
        return
    experiment = find_experiment(name)
    device = _device(experiment, device, on)
    names = () if only is None else tuple(part.strip() for part in only.split(","))
    folder = out or _results() / (f"{name}-quick" if quick else name)
    if not (quick or uncommitted):
        _check_committed(experiment, folder, _numbers(seeds), names)
    console = Console(stderr=True)
    display = _Display(console, experiment, folder, device, quick=quick)
    try:
        with download_bar() as on_download:
            outcome = run_experiment(
                experiment,
                folder,
                display,
                seeds=_numbers(seeds),
                only=names,
                quick=quick,
                context=Context(data_dir=data_dir, on_download=on_download, device=device),
                on=on,
            )
    except KeyboardInterrupt:
        display.close()
        console.print("stopped; the same command resumes it", soft_wrap=True)
        raise
    finally:
        display.close()
    if as_json:
        document = {
            "experiment": name,
            "quick": quick,
            "rows": list(outcome.results),
            "table": str(outcome.table),
            "figures": [str(path) for path in outcome.figures],
            "files": [str(path) for path in outcome.files],
        }
        typer.echo(json.dumps(document))
        return
    typer.echo(outcome.table.read_text(encoding="utf-8"))
    for path in (outcome.table, *outcome.figures, *outcome.files):
        console.print(Text(str(path)), soft_wrap=True)


def _results() -> Path:
    """Return the folder of all results: the checkout's own, from each folder within it."""
    root, here = checkout(), Path.cwd()
    if root is not None and here.is_relative_to(root):
        return Path(os.path.relpath(root / "results", here))
    return Path("results")


def _device(experiment: Experiment, asked: str, on: str | None) -> str:
    """Return where the networks of an experiment are trained, ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigError: there is no such device, or the experiment does not use it.
    """
    found = requested_device(asked)
    if found == "cuda" and asked == "auto" and not (experiment.on_gpu and on is None):
        return "cpu"
    if found == "cuda" and not experiment.on_gpu:
        raise ConfigError(f"{experiment.name} trains on the CPU only; leave --device out")
    if found == "cuda" and on is not None:
        raise ConfigError("on Ray jobs train on CPUs; leave --device or --on out")
    return found


def _check_committed(
    experiment: Experiment, folder: Path, seeds: Sequence[int], only: Sequence[str]
) -> None:
    """Check that new results can be traced to a commit.

    Raises:
        ConfigError: the code differs from its commit, and results are missing.
    """
    jobs = named_jobs(experiment.jobs(tuple(seeds) or experiment.seeds, False), only)
    if any(stored_result(experiment, folder, job, quick=False) is None for job in jobs):
        check_committed(commit())


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
    table = Table(Column("name", no_wrap=True), "source, what it reports, and the cost")
    for row in rows:
        about = f"{row['source']}\n{row['reported']}\n{row['cost']}; stored: {row['stored']}"
        table.add_row(Text(row["name"]), Text(about))
        table.add_section()
    Console().print(table)


def _describe(experiment: Experiment) -> dict[str, Any]:
    jobs, folder = experiment.jobs(experiment.seeds, False), _results() / experiment.name
    stored, other = 0, 0
    for job in jobs:
        try:
            stored += stored_result(experiment, folder, job, quick=False) is not None
        except StorageError:
            other += 1
    damaged = f", {other} damaged or of other settings" if other else ""
    return {
        "name": experiment.name,
        "source": experiment.source,
        "reported": experiment.reported,
        "cost": f"{duration(experiment.seconds())} on one core, {experiment.memory_mb} MB; --quick "
        f"{duration(experiment.seconds(quick=True))}{_GPU if experiment.on_gpu else ''}",
        "stored": f"{stored} of {len(jobs)} in {folder}{damaged}",
    }


class _Display:
    """Prints the estimated cost, a line for each finished job, and a progress bar."""

    def __init__(
        self, console: Console, experiment: Experiment, out: Path, device: str, *, quick: bool
    ) -> None:
        self._console, self._experiment, self._out = console, experiment, out
        self._on_cpu = device == "cpu"
        self._quick = quick
        self._noted: set[str] = set()
        self._bar = progress_bar(
            console, TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn()
        )
        self._task: TaskID | None = None
        self._started = 0.0

    def on_start(self, jobs: Sequence[Job], left: Sequence[Job]) -> None:
        """Print how many jobs there are, and how long the missing ones take."""
        self._total, self._done = len(jobs), len(jobs) - len(left)
        seconds = sum(job.seconds for job in left)
        quick = " --quick, which reproduces nothing" if self._quick else ""
        there = f", {self._done} of them there already" if self._done else ""
        self._say(
            f"{self._experiment.name}{quick} ({self._experiment.source}): {len(jobs)} runs{there}"
            f"; about {duration(seconds)} on one core and {self._experiment.memory_mb} MB"
        )
        if left and self._on_cpu and not has_fast_bfloat16():
            if self._experiment.half_precision:
                self._say(f"{_NO_BFLOAT16} training is in float32, expect it to take longer")
            elif self._experiment.names_bfloat16(left):
                self._say(f"{_NO_BFLOAT16} expect some thirty times as long")
        self._say(f"results in {self._out}; stop at any time, the same command resumes")

    def on_cluster(self, size: str) -> None:
        """Print how large the cluster is."""
        self._say(f"on Ray: {size}")

    def on_job(self, job: Job) -> None:
        """Show a progress bar for the job."""
        self._started = time.monotonic()
        self._bar.start()
        self._task = self._bar.add_task(f"{job.name}, seed {job.seed}", total=1.0)

    def on_progress(self, part: float) -> None:
        """Update the bar."""
        if self._task is not None:
            self._bar.update(self._task, completed=part)

    def on_wait(self, job: Job) -> None:
        """Print which job another process runs."""
        self._say(f"{job.name}, seed {job.seed}: another process runs it; waiting")

    def on_done(self, job: Job, result: Result) -> None:
        """Print that the result is stored, with its notes."""
        self._done += 1
        self.close()
        took = duration(float(result["seconds"]))
        self._say(f"{self._done}/{self._total} {job.name}, seed {job.seed}: {took}")
        for note in result["notes"]:
            if note not in self._noted:  # jobs of one kind often have the same notes
                self._say(f"    note: {note}")
        self._noted.update(result["notes"])

    def close(self) -> None:
        """Remove the bar."""
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        self._bar.stop()

    def _say(self, text: str) -> None:
        # Text, because Rich would read [brackets] in a path as markup.
        self._console.print(Text(text), soft_wrap=True)
