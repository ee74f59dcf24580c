"""``bayesify report``: draw the figures and write the report of a run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bayesify.app.cli.opened_run import AsJson, DataDir, Folder, opened, read_data
from bayesify.app.runs import Run
from bayesify.app.runs.finish import rewrite_report

__all__ = ["report"]


def report(
    folder: Folder,
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            help="Another finished run on the same data to compare with; may be repeated.",
            metavar="DIR",
            show_default=False,
        ),
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Draw the figures and write report.html of a finished run again."""
    run = opened(folder)
    others = [Run.open(other) for other in compare or []]
    for each in (run, *others):
        each.metrics()
    data = read_data(run, data_dir)
    with Console(stderr=True).status("measuring and drawing ..."):
        path = rewrite_report(run, data, others, data_dir=data_dir)
    if not as_json:
        typer.echo(f"report: {path}")
        return
    metrics = run.metrics()
    found = {name: metrics[name] for name in ("baseline", "importance") if name in metrics}
    typer.echo(json.dumps({"report": str(path), **found}))
