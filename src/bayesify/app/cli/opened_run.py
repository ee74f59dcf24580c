"""The run that a command is about: its options, opening it, and reading its data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from bayesify.app.cli.data_command import download_bar
from bayesify.app.cli.formatting import reading
from bayesify.app.runs import Run, RunData, RunError
from bayesify.app.runs.train import use_threads

__all__ = ["AsJson", "DataDir", "Folder", "Lenient", "check_table_options", "opened", "read_data"]

Folder = Annotated[Path, typer.Argument(help="Folder of the run.", metavar="DIR")]
DataDir = Annotated[
    str | None,
    typer.Option(
        help="Look only in this folder for data known by a name, such as mnist.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Lenient = Annotated[
    bool,
    typer.Option(
        "--lenient",
        help="Read a table's columns as in training even where their cells look otherwise.",
    ),
]


def opened(folder: Path) -> Run:
    """Open a run, use its number of threads, and print a note if it is unfinished."""
    run = Run.open(folder)
    use_threads(run)
    if run.is_unfinished():
        Console(stderr=True).print(
            Text(
                f"note: this run stopped before its last epoch, {run.config.epochs}; resume with: "
                f"{run.command} --resume"
            ),
            soft_wrap=True,
        )
    return run


def check_table_options(run: Run, **given: bool) -> None:
    """Check that options for tables are given for the run of a table only.

    Args:
        run: the run.
        given: whether each option is given, by its name.

    Raises:
        RunError: one is given, and the run is of no table.
    """
    for name, is_given in given.items():
        if is_given and run.table is None:
            option = name.replace("_", "-")
            raise RunError(f"{option} would do nothing here: it is for tables; leave it out")


def read_data(run: Run, data_dir: str | None = None) -> RunData:
    """Load the data of a run, and show the progress of what takes its time."""
    if run.table is not None:
        what = "texts" if run.config.text else "images"
        with reading(Console(stderr=True), what) as on_rows:
            return run.load_data(data_dir, on_rows=on_rows)
    if run.images is not None:
        with reading(Console(stderr=True), "images") as on_images:
            return run.load_data(data_dir, on_images=on_images)
    with download_bar() as progress:
        return run.load_data(data_dir, progress=progress)
