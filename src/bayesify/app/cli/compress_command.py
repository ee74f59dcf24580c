"""``bayesify compress``: write a run's network in few bytes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bayesify.app.cli.formatting import plain_table
from bayesify.app.cli.opened_run import AsJson, DataDir, Folder, opened, read_data
from bayesify.app.runs import ConfigError, RunError
from bayesify.app.runs.compress import choose, measure_file, split_parts
from bayesify.app.runs.out_file import check_can_be_written
from bayesify.distributions.posteriors import Delta
from bayesify.io import atomic_write

__all__ = ["compress"]


def compress(
    folder: Folder,
    out: Annotated[Path, typer.Option(help="The new file to write, such as net.bfz.")],
    max_error_rise: Annotated[
        float,
        typer.Option(
            help="The most that the error of the mean weights may rise, in percentage points; for "
            "a regression in percent of the RMSE."
        ),
    ] = 0.1,
    fraction: Annotated[
        float | None,
        typer.Option(
            help="Fraction of the weights to remove, from 0 to 1, instead of choosing it.",
            show_default=False,
        ),
    ] = None,
    step_size: Annotated[
        float | None,
        typer.Option(
            help="Step size of the quantisation as a multiple of the weights' typical std, instead "
            "of choosing it.",
            show_default=False,
        ),
    ] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's network in few bytes: pruned, quantised and entropy-coded mean weights.

    The fraction to remove and the step size of the quantisation are chosen for the smallest file
    whose error rises by --max-error-rise at most, on examples that training has not seen: the
    training images beyond --limit of bayesify train, or else half of the held-out part. The table
    is measured on other examples: the held-out part, or its other half.

    The file gives a plain network, by bayesify.decompress in Python. It holds no standard
    deviations, so that it has no epistemic uncertainty.
    """
    _check(out, max_error_rise, fraction, step_size)
    run = opened(folder)
    bnn = run.load_module()
    if isinstance(bnn.posterior, Delta):
        raise RunError(
            f"{folder} holds a {run.config.baseline} baseline, whose weights have no std from "
            "which to take the steps; compress a run of Bayes by Backprop"
        )
    parts = split_parts(
        run,
        read_data(run, data_dir),
        choose=fraction is None or step_size is None,
        data_dir=data_dir,
    )
    messages = Console(stderr=True)
    chosen = None if parts.choosing is None else len(parts.choosing.test_targets)
    if chosen is not None and run.class_names and 100.0 / chosen > max_error_rise:
        note = (
            f"note: one of {chosen:,} examples to choose by is {100.0 / chosen:.2g} percentage "
            f"points, more than the {max_error_rise:g} that the error may rise"
        )
        messages.print(Text(note), soft_wrap=True)
    with messages.status("choosing ...") as status:
        trials = 0

        def on_trial() -> None:
            nonlocal trials
            trials += 1
            status.update(f"choosing: network {trials} ...")

        choice = choose(
            bnn,
            parts.choosing,
            max_error_rise=max_error_rise,
            fraction=fraction,
            step_size=step_size,
            on_trial=on_trial,
        )
        status.update("measuring the file ...")
        rows = measure_file(run, bnn, choice, parts.measuring)
    atomic_write(out, choice.content)
    size = choice.size
    document = {
        "out": str(out),
        "fraction": choice.fraction,
        "step_size": choice.step_size,
        **asdict(size),
        "bits_per_weight": size.bits_per_weight,
        "chosen_on": parts.chosen_on,
        "chosen_on_examples": chosen,
        "measured_on": parts.measured_on,
        "measured_on_examples": parts.num_measuring,
        "rows": rows,
    }
    if as_json:
        typer.echo(json.dumps(document))
        return
    console = Console()
    console.print(_table(rows, regression=run.config.task == "regression"))
    lines = [
        f"{out}: {size.num_bytes:,} bytes, {size.bits_per_weight:.3g} bits a weight; "
        f"{100 * choice.fraction:.4g} % of the weights removed, steps of {choice.step_size:g} std",
    ]
    if size.num_other_bytes:
        lines.append(
            f"{size.num_other_bytes:,} of the bytes are of buffers and of weights that are not "
            "random, which are stored as they are and not counted in the bits a weight"
        )
    if size.kl_bytes is not None:
        lines.append(f"KL divergence of the posterior that is left: {size.kl_bytes:,.0f} bytes")
    if chosen is not None:
        lines.append(f"chosen on {chosen:,} examples: {parts.chosen_on}")
    lines.append(f"measured on {parts.num_measuring:,} examples: {parts.measured_on}")
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _check(
    out: Path, max_error_rise: float, fraction: float | None, step_size: float | None
) -> None:
    if not 0.0 <= max_error_rise < math.inf:
        raise ConfigError(f"max-error-rise must be a number from 0, got {max_error_rise:g}")
    if fraction is not None and not 0.0 <= fraction <= 1.0:
        raise ConfigError(f"fraction must be a number from 0 to 1, got {fraction:g}")
    if step_size is not None and not 0.0 < step_size < math.inf:
        raise ConfigError(f"step-size must be positive and finite, got {step_size:g}")
    check_can_be_written(out, overwrite=None)


def _table(rows: list[dict[str, Any]], *, regression: bool) -> Table:
    name, places = ("RMSE", ".4g") if regression else ("error %", ".2f")
    table = plain_table("network", "weights", "bytes", name, "nll, nats", "ms, one example")
    for row in rows:
        averaged, at_mean = (
            ("rmse", "rmse_mean_weights")
            if regression
            else ("error_predictive", "error_mean_weights")
        )
        error = row[averaged if row["milliseconds"] is None else at_mean]
        time = "" if row["milliseconds"] is None else f"{row['milliseconds']:.3f}"
        table.add_row(
            row["network"],
            f"{row['weights']:,}",
            f"{row['bytes']:,}",
            format(error, places),
            f"{row['nll']:.4f}",
            time,
        )
    return table
