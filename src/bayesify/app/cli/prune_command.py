"""``bayesify prune``: the errors of a run with fewer weights, and a file of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from bayesify import io as bayesify_io
from bayesify.app.cli.formatting import plain_table
from bayesify.app.cli.opened_run import AsJson, DataDir, Folder, opened, read_data
from bayesify.app.runs import ConfigError, RunError
from bayesify.app.runs.measure import (
    FRACTIONS,
    prune_table,
    pruning_samples,
    rows_in_units,
)
from bayesify.app.runs.out_file import check_can_be_written
from bayesify.distributions.posteriors import Delta
from bayesify.module.pruning import prune as pruned

__all__ = ["prune"]

_FRACTIONS = ",".join(f"{fraction:g}" for fraction in FRACTIONS)
_ERRORS = ("error_predictive", "error_mean_weights")


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
    samples: Annotated[
        int | None,
        typer.Option(
            help=r"Weight samples to average over. \[default: 5; for a regression with held-out "
            "rows as in training]",
            show_default=False,
        ),
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Remove the weights with the lowest signal-to-noise ratio, and measure the rest.

    For a regression the error is the RMSE of the first 2,000 held-out rows at most, in the unit of
    the target. With --json error_predictive and error_mean_weights are mean squares of the
    standardised target.
    """
    wanted = _fractions(fractions)
    run = opened(folder)
    if samples is not None and samples < 1:
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
        samples = samples or pruning_samples(data, run.config.test_samples)
        rows = prune_table(bnn, data, wanted, num_samples=samples)
    regression = run.config.task == "regression"
    if regression:
        # The errors are mean squares of the standardised target; a reader has its own unit.
        scale = 1.0 if run.table is None else run.table.target.scale
        for row, own in zip(rows, rows_in_units(rows, scale), strict=True):
            row["rmse"], row["rmse_mean_weights"] = (own[name] for name in _ERRORS)
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
        typer.echo(json.dumps({"rows": rows, "samples": samples, "written": written or None}))
        return
    names, places = _ERRORS, ".2f"
    labels = ["error, averaged %", "mean weights %"]
    if regression:
        names, places = ("rmse", "rmse_mean_weights"), ".5g"
        labels = ["RMSE, averaged", "RMSE, mean weights"]
    table = plain_table("removed %", "weights left", *labels, "file, kB")
    for row in rows:
        table.add_row(
            f"{100 * row['fraction']:.4g}",
            f"{row['weights_left']:,}",
            *(format(row[name], places) for name in names),
            f"{row['file_bytes'] / 1000:,.0f}",
        )
    console = Console()
    console.print(table)
    console.print(f"averaged over {samples} weight sample{'s' if samples > 1 else ''}")
    if written:
        text = (
            f"{out}: {written['bytes']:,} bytes, {written['bytes_unpruned']:,} unpruned "
            f"({written['bytes_unpruned'] / written['bytes']:.1f} times smaller)"
        )
        console.print(Text(text), soft_wrap=True)


def _fractions(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0.0 <= value <= 1.0 for value in values):
        raise ConfigError(f"fractions must be numbers from 0 to 1 such as 0.5,0.95, got {text!r}")
    return values
