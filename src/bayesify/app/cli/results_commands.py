"""``bayesify evaluate``, ``prune``, ``inspect`` and ``report``: the results of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bayesify import io as bayesify_io
from bayesify.app.cli.data_command import download_bar
from bayesify.app.cli.formatting import (
    NOTHING_HELD_OUT,
    bytes_of,
    measure_label,
    reading,
    weights_of,
)
from bayesify.app.cli.row_progress import RowProgress
from bayesify.app.runs import ConfigError, Run, RunData, RunError, rewrite_report
from bayesify.app.runs.measure import FEW_SAMPLES, FRACTIONS, prune_table
from bayesify.app.runs.measure import evaluate as measured
from bayesify.app.runs.memory import used_memory
from bayesify.app.runs.own_images import NewImages
from bayesify.app.runs.predict import Predictions, check_can_be_written
from bayesify.app.runs.train import use_threads
from bayesify.datasets import ImageSchema
from bayesify.distributions.posteriors import Delta, GaussianPosterior
from bayesify.module.pruning import prune as pruned
from bayesify.module.pruning import snr_decibels

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.files import TableFile
    from bayesify.tabular.new_table import NewTable

__all__ = [
    "AsJson",
    "DataDir",
    "Folder",
    "Lenient",
    "evaluate",
    "inspect",
    "new_images_summary",
    "new_summary",
    "open_new",
    "opened",
    "print_new",
    "print_outside",
    "prune",
    "read_data",
    "report",
]

_FRACTIONS = ",".join(f"{fraction:g}" for fraction in FRACTIONS)

Folder = Annotated[Path, typer.Argument(help="Folder of the run.", metavar="DIR")]
DataDir = Annotated[
    str | None, typer.Option(help="Look for the data only in this folder.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


Lenient = Annotated[
    bool,
    typer.Option(
        "--lenient",
        help="Read a table's columns as in training even where their cells look otherwise.",
    ),
]


def evaluate(
    folder: Folder,
    data: Annotated[
        Path | None,
        typer.Argument(
            help="Measure on this table instead, CSV or Parquet with the target's column; for a "
            "run on your own images also on a folder of such.",
            metavar="[INPUT]",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help=r"Weight samples to average over. \[default: as in training]", show_default=False
        ),
    ] = None,
    data_dir: DataDir = None,
    lenient: Lenient = False,
    as_json: AsJson = False,
) -> None:
    """Measure the network of a run again, on its test and training data or on new ones."""
    run = opened(folder)
    if samples is not None and samples < 1:
        raise ConfigError(f"samples must be at least 1, got {samples}")
    num_samples = samples or run.config.test_samples
    if data is not None:
        if data_dir is not None:
            raise ConfigError("data-dir is for the run's own data; leave it out with INPUT")
        _evaluate_new(run, data, num_samples, lenient=lenient, as_json=as_json)
        return
    if lenient:
        raise ConfigError("lenient would do nothing here: it is for a new table, INPUT")
    bnn = run.load_module()
    own = read_data(run, data_dir)
    with Console(stderr=True).status("measuring ..."):
        metrics, _ = measured(bnn, own, num_samples=num_samples)
    if as_json:
        typer.echo(json.dumps(metrics))
        return
    names = {"test": "test", "train": "training"}
    names = {part: name for part, name in names.items() if metrics[part] is not None}
    table = _table("", *names.values())
    _add_measures(
        table, [metrics[part] for part in names], regression=run.config.task == "regression"
    )
    table.add_row("weight samples", *(str(metrics[f"{part}_samples"]) for part in names))
    Console().print(table)
    if metrics["test"] is None:
        Console(stderr=True).print(NOTHING_HELD_OUT, highlight=False, soft_wrap=True)


def _add_measures(table: Table, parts: Sequence[dict[str, float]], *, regression: bool) -> None:
    for name in parts[0]:
        places = ".2f" if name.startswith("error") else ".5g" if regression else ".4f"
        table.add_row(measure_label(name), *(format(part[name], places) for part in parts))


def _evaluate_new(run: Run, path: Path, num_samples: int, *, lenient: bool, as_json: bool) -> None:
    """Measure a run on a new table, or on new images."""
    console = Console(stderr=True)
    predictions = Predictions.of(
        run, run.load_module(), level=0.95, samples=num_samples, class_names=run.class_names
    )
    if run.images is not None:
        if lenient:
            raise RunError("lenient would do nothing here: it is for tables")
        with console.status("measuring ..."):
            summary = _measured_images(run.images, predictions, path)
    else:
        with RowProgress(console) as progress:
            table = open_new(console, run, path, lenient=lenient, labelled=True, progress=progress)
            summary = _measured_table(table, predictions)
    if as_json:
        typer.echo(json.dumps(summary))
        return
    print_outside(console, summary)
    print_new(summary, regression=run.config.task == "regression")


def _measured_images(schema: ImageSchema, predictions: Predictions, path: Path) -> dict[str, Any]:
    images = NewImages.to_measure(path, schema)
    for inputs, targets in images.chunks():
        assert targets is not None
        predictions.measure(inputs, targets, inputs.new_zeros(len(inputs)))
    summary = {"rows": len(images.names), "weight_samples": predictions.samples}
    return summary | new_images_summary(images, predictions)


def _measured_table(table: NewTable, predictions: Predictions) -> dict[str, Any]:
    name, path = table.schema.target.name, table.file.path
    if table.target is None:
        raise RunError(
            f"{path}: {table.target_error}"
            if table.target_error
            else f"{path} has no column {name!r}, the target to measure by; add it, or use "
            "bayesify predict"
        )
    for rows in table:
        assert rows.targets is not None
        predictions.measure(rows.inputs, torch.from_numpy(rows.targets), rows.distances)
    if not predictions.measures.rows:
        raise RunError(f"{path} has no row with a target {name!r} to measure by; add some")
    summary = {"rows": table.rows, "weight_samples": predictions.samples}
    return summary | new_summary(table, predictions)


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
    for remark in table.remarks:
        console.print(Text(f"note: {remark}"), soft_wrap=True)
    progress.begin("predicting", progress.rows or file.num_rows)
    return table


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
    table = _table("", "new rows")
    _add_measures(table, [summary["metrics"]], regression=regression)
    table.add_row("rows", f"{summary['rows_measured']:,}")
    table.add_row("weight samples", str(summary["weight_samples"]))
    console = Console()
    console.print(table)
    if summary["rows_not_measured"]:
        console.print(Text(f"note: {summary['rows_not_measured']}"), soft_wrap=True)


def prune(
    folder: Folder,
    fractions: Annotated[
        str, typer.Option(help="Fractions of the weights to remove, from 0 to 1.")
    ] = _FRACTIONS,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the network with the largest fraction removed to this new file.",
            show_default=False,
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Weight samples to average over.")] = FEW_SAMPLES,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove the weights with the lowest signal-to-noise ratio, and measure the rest."""
    wanted = _fractions(fractions)
    run = opened(folder)
    if samples < 1:
        raise ConfigError(f"samples must be at least 1, got {samples}")
    if out is not None:
        check_can_be_written(out, overwrite=None)
    bnn = run.load_module()
    if isinstance(bnn.posterior, Delta):
        raise RunError(
            f"{folder} holds a {run.config.baseline} baseline, whose weights have no std and "
            "hence no signal-to-noise ratio; prune a run of Bayes by Backprop"
        )
    data = read_data(run, data_dir)
    with Console(stderr=True).status("pruning ..."):
        rows = prune_table(bnn, data, wanted, num_samples=samples)
    written: dict[str, Any] = {}
    if out is not None:
        bayesify_io.save(pruned(bnn, max(wanted)), out)
        written = {
            "file": str(out),
            "fraction": max(row["fraction"] for row in rows),
            "bytes": out.stat().st_size,
            "bytes_unpruned": rows[0]["file_bytes"],
        }
    if as_json:
        typer.echo(json.dumps({"rows": rows, "written": written or None}))
        return
    regression = run.config.task == "regression"
    unit, places = ("mse", ".4f") if regression else ("%", ".2f")
    table = _table(
        "removed %", "weights left", f"error, averaged {unit}", f"mean weights {unit}", "file, kB"
    )
    for row in rows:
        table.add_row(
            f"{100 * row['fraction']:.4g}",
            f"{row['weights_left']:,}",
            format(row["error_predictive"], places),
            format(row["error_mean_weights"], places),
            f"{row['file_bytes'] / 1000:,.0f}",
        )
    console = Console()
    console.print(table)
    if written:
        text = (
            f"{out}: {written['bytes']:,} bytes, {written['bytes_unpruned']:,} unpruned "
            f"({written['bytes_unpruned'] / written['bytes']:.1f} times smaller)"
        )
        console.print(Text(text), soft_wrap=True)


def inspect(folder: Folder, as_json: AsJson = False) -> None:
    """Show the settings of a run, and a summary of each parameter."""
    run = opened(folder)
    bnn = run.load_module()
    posterior = bnn.posterior
    gaussian = isinstance(posterior, GaussianPosterior)
    decibels = snr_decibels(bnn) if gaussian else None
    # Two examples, so that their axis differs from those of size 1.
    summary = bnn.summary(torch.zeros(2, run.num_inputs))
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        means = bnn.layout.unflatten(posterior.mean)
        stds = bnn.layout.unflatten(posterior.std)
        ratios = bnn.layout.unflatten(decibels) if decibels is not None else None
        for name, shape, treatment, reason in summary:
            rows.append(
                {
                    "name": name,
                    "shape": list(shape),
                    "treatment": treatment if gaussian else None,
                    "reason": reason if gaussian else None,
                    "mean_rms": float(means[name].square().mean().sqrt()),
                    "std_median": float(stds[name].median()) if gaussian else None,
                    "snr_db_median": float(ratios[name].median()) if ratios else None,
                }
            )
    document = {**run.document, "settings": run.config.to_json()}
    if as_json:
        typer.echo(
            json.dumps({**document, "num_weights": bnn.layout.num_weights, "parameters": rows})
        )
        return
    console = Console()
    settings = _table("setting", "value")
    idle = run.config.idle()
    for name, value in run.config.to_json().items():
        if value not in (None, []) and name not in idle:
            settings.add_row(name.replace("_", "-"), Text(_shown(value)))
    for name in ("command", "commit", "hardware"):
        settings.add_row(name, Text(_shown(document.get(name))))
    console.print(settings)
    table = _table("parameter", "shape", "rms of mean", "median std", "median SNR, dB")
    for row in rows:
        table.add_row(
            row["name"],
            " x ".join(map(str, row["shape"])),
            f"{row['mean_rms']:.4f}",
            "-" if row["std_median"] is None else f"{row['std_median']:.4f}",
            "-" if row["snr_db_median"] is None else f"{row['snr_db_median']:.1f}",
        )
    console.print(table)
    if gaussian:
        treatments = Table(box=None, header_style="bold", pad_edge=False)
        for title in ("parameter", "treatment in training", "why"):
            treatments.add_column(title, overflow="fold")
        for row in rows:
            treatments.add_row(row["name"], row["treatment"], row["reason"])
        console.print("", treatments, "")
    console.print(weights_of(bnn), highlight=False)


def report(
    folder: Folder,
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            help="Another finished run to compare with; may be repeated.",
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


def _fractions(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0.0 <= value <= 1.0 for value in values):
        raise ConfigError(f"fractions must be numbers from 0 to 1 such as 0.5,0.95, got {text!r}")
    return values


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
