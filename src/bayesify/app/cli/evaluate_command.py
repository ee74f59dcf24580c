"""``bayesify evaluate``: measure a run again, on its own data or on new ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console

from bayesify.app.cli.formatting import NOTHING_HELD_OUT, plain_table
from bayesify.app.cli.new_examples import (
    add_measures,
    new_images_summary,
    new_summary,
    open_new,
    print_new,
    print_outside,
    print_remarks,
)
from bayesify.app.cli.opened_run import (
    AsJson,
    DataDir,
    Folder,
    Lenient,
    check_table_options,
    opened,
    read_data,
)
from bayesify.app.cli.row_progress import RowProgress
from bayesify.app.runs import ConfigError, Run, RunError
from bayesify.app.runs.measure import evaluate as measured
from bayesify.app.runs.own_images import NewImages
from bayesify.app.runs.predict import Predictions

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.new_table import NewTable

__all__ = ["evaluate"]


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
        check_table_options(run, lenient=lenient)
        _evaluate_new(run, data, num_samples, lenient=lenient, as_json=as_json)
        return
    if lenient:
        raise ConfigError(
            "lenient would do nothing here: it is for a new table, INPUT; leave it out"
        )
    bnn = run.load_module()
    own = read_data(run, data_dir)
    with Console(stderr=True).status("measuring ..."):
        metrics, _ = measured(bnn, own, num_samples=num_samples)
    if as_json:
        typer.echo(json.dumps(metrics))
        return
    names = {"test": "test", "train": "training"}
    names = {part: name for part, name in names.items() if metrics[part] is not None}
    table = plain_table("", *names.values())
    add_measures(
        table, [metrics[part] for part in names], regression=run.config.task == "regression"
    )
    table.add_row("weight samples", *(str(metrics[f"{part}_samples"]) for part in names))
    Console().print(table)
    if metrics["test"] is None:
        Console(stderr=True).print(NOTHING_HELD_OUT, highlight=False, soft_wrap=True)


def _evaluate_new(run: Run, path: Path, num_samples: int, *, lenient: bool, as_json: bool) -> None:
    """Measure a run on a new table, or on new images."""
    console = Console(stderr=True)
    predictions = Predictions.of(run, run.load_module(), level=0.95, samples=num_samples)
    if run.images is not None:
        images = NewImages.to_measure(path, run.images)
        print_remarks(console, images.found.remarks)
        with console.status("measuring ..."):
            summary = _measured_images(images, predictions)
    else:
        with RowProgress(console) as progress:
            table = open_new(console, run, path, lenient=lenient, labelled=True, progress=progress)
            summary = _measured_table(table, predictions)
    if as_json:
        typer.echo(json.dumps(summary))
        return
    print_outside(console, summary)
    print_new(summary, regression=run.config.task == "regression")


def _measured_images(images: NewImages, predictions: Predictions) -> dict[str, Any]:
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
