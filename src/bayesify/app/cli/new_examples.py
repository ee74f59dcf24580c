"""New rows and images for a run: how they are read, and what is said of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bayesify.app.cli.formatting import bytes_of, measure_label, plain_table
from bayesify.app.cli.row_progress import RowProgress
from bayesify.app.runs import Run, RunError
from bayesify.app.runs.memory import used_memory
from bayesify.app.runs.own_images import NewImages
from bayesify.app.runs.predict import Predictions

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.files import TableFile
    from bayesify.tabular.new_table import NewTable

__all__ = [
    "add_measures",
    "new_images_summary",
    "new_summary",
    "open_new",
    "print_new",
    "print_outside",
    "print_remarks",
]


def open_new(
    console: Console,
    run: Run,
    path: Path,
    *,
    lenient: bool,
    labelled: bool = False,
    max_memory: str | None = None,
    progress: RowProgress,
) -> NewTable:
    """Open a new table for a run, and print how it is read.

    Args:
        console: where to print.
        run: the run.
        path: file, folder or pattern; for a run that reads images also an image or a folder of
            them.
        lenient: as for ``NewTable.open``.
        labelled: whether a folder of images has one subfolder for each class.
        max_memory: memory that the process may use; None for no cap.
        progress: shows how many rows were read, here and when the table is iterated.

    Raises:
        RunError: the run is not of a table.
        ConfigError: the cap is no number of bytes.
        TableError: the table cannot be read surely, or the cap is too small for it.
    """
    from bayesify.tabular.image_table import new_table_file
    from bayesify.tabular.new_table import NewTable

    if run.table is None:
        raise RunError(f"{run.folder} is not a run of a table; leave INPUT out")
    cap = None if max_memory is None else bytes_of(max_memory)
    file = new_table_file(path, run.table, labelled=labelled)
    size = _rows_at_once(run, file, cap)
    progress.begin("reading the columns", file.num_rows)
    table = NewTable.open(file, run.table, lenient=lenient, size=size, on_rows=progress)
    print_remarks(console, table.remarks)
    progress.begin("predicting", progress.rows or file.num_rows)
    return table


def print_remarks(console: Console, remarks: Iterable[str]) -> None:
    """Print how new examples were found or read."""
    for remark in remarks:
        console.print(Text(f"note: {remark}"), soft_wrap=True)


def new_summary(table: NewTable, predictions: Predictions) -> dict[str, Any]:
    """Return what is known of a new table after all its rows were predicted."""
    measures = predictions.measures
    return {
        "outside": table.outside,
        "worst_column": table.worst_column,
        "warning": table.warning(),
        "rule": table.rule(),
        "metrics": measures.result() if measures.rows else None,
        "rows_measured": measures.rows,
        "rows_not_measured": table.target_remark() if measures.rows else None,
    }


def new_images_summary(images: NewImages, predictions: Predictions) -> dict[str, Any]:
    """Return what is known of new images after all of them were predicted."""
    measures = predictions.measures
    return {
        "metrics": measures.result() if measures.rows else None,
        "rows_measured": measures.rows,
        "rows_not_measured": images.rows_not_measured if measures.rows else None,
    }


def print_outside(console: Console, summary: dict[str, Any]) -> None:
    """Print how many rows of a new table lie outside the training data."""
    if summary.get("warning"):
        console.print(Text(f"warning: {summary['warning']}", style="yellow"), soft_wrap=True)
        console.print(Text(f"the rule: {summary['rule']}"), soft_wrap=True)


def print_new(summary: dict[str, Any], *, regression: bool) -> None:
    """Print the metrics on a new table."""
    table = plain_table("", "new rows")
    add_measures(table, [summary["metrics"]], regression=regression)
    table.add_row("rows", f"{summary['rows_measured']:,}")
    table.add_row("weight samples", str(summary["weight_samples"]))
    console = Console()
    console.print(table)
    if summary["rows_not_measured"]:
        console.print(Text(f"note: {summary['rows_not_measured']}"), soft_wrap=True)


def add_measures(table: Table, parts: Sequence[dict[str, float]], *, regression: bool) -> None:
    """Add a row for each measure to a table, with a column for each part of the data."""
    for name in parts[0]:
        places = ".2f" if name.startswith("error") else ".5g" if regression else ".4f"
        table.add_row(measure_label(name), *(format(part[name], places) for part in parts))


def _rows_at_once(run: Run, file: TableFile, max_memory: int | None) -> int | None:
    """Return the rows of a new table that a cap on memory allows at once; None without a cap."""
    from bayesify.tabular.streaming.memory import rows_at_once

    if max_memory is None:
        return None
    assert run.table is not None
    return rows_at_once(
        max_memory,
        used_memory(),
        columns=len(run.table.columns) + len(run.table.carried) + 1,
        inputs=len(run.table.features),
        as_text=file.num_rows is None,
    )
