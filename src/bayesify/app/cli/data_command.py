"""``bayesify data``: list data sets, find their files or download them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from bayesify.datasets import (
    DataError,
    DataSet,
    Progress,
    find_dataset,
    find_file,
    get_file,
    known_datasets,
)

__all__ = ["data", "download_bar"]

data = typer.Typer(help="List data sets, find or download them.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@data.command("list")
def list_datasets(as_json: AsJson = False) -> None:
    """List the known data sets and where each was found; nothing is downloaded."""
    rows = [_describe(dataset) for dataset in known_datasets().values()]
    if as_json:
        typer.echo(json.dumps({"datasets": rows}))
        return
    table = Table("name", "what it is", "size", "licence")
    table.add_column("where", overflow="fold")  # never cut, because paths are copied
    for row in rows:
        size = f"{row['num_bytes'] / 1e6:.1f} MB"
        # Text, because Rich would read [brackets] in a path as markup.
        table.add_row(row["name"], row["description"], size, row["license"], Text(_where(row)))
    Console().print(table)


@data.command("get")
def get_dataset(
    name: Annotated[str, typer.Argument(help="Name of the data set; see 'bayesify data list'.")],
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Look only here, and download into here what is missing."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find a data set or download it, check it by SHA-256, and print where its files lie."""
    dataset = find_dataset(name)
    with download_bar() as progress:
        paths = [
            get_file(file, download_to=data_dir, progress=progress).path for file in dataset.files
        ]
    if as_json:
        files = [
            {"name": file.name, "path": str(path), "sha256": file.sha256}
            for file, path in zip(dataset.files, paths, strict=True)
        ]
        typer.echo(json.dumps({"name": name, "files": files}))
        return
    for path in paths:
        typer.echo(path)


@contextmanager
def download_bar() -> Iterator[Progress]:
    """Yield a ``progress`` for the loaders that draws one bar per file on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    bar = ProgressBar(*columns, TimeRemainingColumn(), console=Console(stderr=True))
    tasks: dict[str, TaskID] = {}

    def progress(name: str, done: int, total: int | None) -> None:
        bar.start()  # only now, so that nothing is drawn where nothing is downloaded
        if name not in tasks:
            tasks[name] = bar.add_task(name)
        bar.update(tasks[name], completed=done, total=total)

    try:
        yield progress
    finally:
        if tasks:
            bar.stop()


def _describe(dataset: DataSet) -> dict[str, Any]:
    """Return a row of the list; a damaged file is reported in it rather than raised."""
    directories: dict[str, None] = {}
    missing = []
    problem = None
    for file in dataset.files:
        try:
            found = find_file(file)
        except DataError as error:
            problem = str(error)
            break
        if found is None:
            missing.append(file.name)
        else:
            directories[str(found.path.parent)] = None
    return {
        "name": dataset.name,
        "description": dataset.description,
        "num_bytes": dataset.num_bytes,
        "license": dataset.license,
        "directories": list(directories),
        "missing": missing,
        "problem": problem,
    }


def _where(row: dict[str, Any]) -> str:
    if row["problem"]:
        return str(row["problem"])
    if not row["directories"]:
        return "not here"
    where = ", ".join(row["directories"])
    return f"{where}, without {', '.join(row['missing'])}" if row["missing"] else where
