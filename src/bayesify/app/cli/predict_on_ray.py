"""``bayesify predict --on ray``: predict many files on a cluster, with a progress bar."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from bayesify.app.cli.progress_bar import progress_bar
from bayesify.app.on_ray import address_of
from bayesify.app.runs import Run

__all__ = ["predict_on_ray"]


def predict_on_ray(
    console: Console,
    run: Run,
    data: Path,
    out: Path,
    *,
    on: str,
    level: float,
    samples: int,
    pruned: Path | None,
    lenient: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Predict the files of a table on a cluster, and print a summary.

    Args:
        console: where notes and the progress are printed.
        run: the run.
        data: a file, a folder or a pattern.
        out: folder of the predictions.
        on: value of the option ``--on``.
        level: probability of the intervals of a regression.
        samples: weight samples.
        pruned: file of the pruned network that predicts; None for the run's own.
        lenient: as for ``NewTable.open``.
        overwrite: whether files that are there already are predicted again.
        as_json: whether to print one JSON object.

    Raises:
        ConfigError: ``on`` names no cluster.
        RunError: the folder holds something else.
        ImportError: Ray is not installed.
    """
    address = address_of(on)
    from bayesify.app.on_ray.predict_files import PredictionSettings, pending_files, predict_files
    from bayesify.tabular.files import table_paths

    network = None if pruned is None else pruned.absolute()
    settings = PredictionSettings(run.folder.absolute(), level, samples, network, lenient)
    files = table_paths(data)
    targets = pending_files(files, out, settings, overwrite=overwrite)
    count = len(files)
    before = count - len(targets)
    console.print(Text(f"{count:,} file{'s'[: count != 1]}, {before:,} predicted already"))
    rows = outside = 0
    remarks: dict[str, str] = {}
    bar = progress_bar(
        console,
        MofNCompleteColumn(),
        TextColumn("files"),
        TimeRemainingColumn(),
        label="predicting",
    )
    with bar:
        task = bar.add_task("", total=count, completed=before)
        for found in predict_files(address, settings, targets) if targets else ():
            if isinstance(found, str):
                console.print(Text(f"on Ray: {found}"))
                continue
            rows, outside = rows + found.rows, outside + found.outside
            for remark in found.remarks:
                remarks.setdefault(remark, found.source)
            bar.advance(task)
    for remark, name in remarks.items():
        console.print(Text(f"note: {name}: {remark}"), soft_wrap=True)
    if outside:
        text = f"warning: {outside:,} of {rows:,} rows lie far outside the training data"
        console.print(Text(text, style="yellow"), soft_wrap=True)
    if as_json:
        summary = {
            "rows": rows,
            "outside": outside,
            "files": count,
            "predicted_before": before,
            "weight_samples": samples,
            "out": str(out),
        }
        typer.echo(json.dumps(summary))
        return
    done = f"{rows:,} rows of {len(targets):,} files predicted"
    console.print(Text(done if targets else "nothing is left to predict"), soft_wrap=True)
    typer.echo(f"predictions: {out}")
