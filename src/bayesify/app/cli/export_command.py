"""``bayesify export``: the network of a run as a file that runs without bayesify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from bayesify.app.cli.opened_run import AsJson, DataDir, Folder, opened, read_data
from bayesify.app.runs.out_file import check_can_be_written

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.schema import Target

__all__ = ["export"]


def export(
    folder: Folder,
    out: Annotated[
        Path, typer.Option(help="File to write: .onnx, or .pt2 for a program of PyTorch.")
    ],
    samples: Annotated[
        int, typer.Option(help="Weight samples to average over; 0 for the mean weights alone.")
    ] = 32,
    fraction: Annotated[
        float | None,
        typer.Option(
            help="Remove this fraction of the weights first, above 0 and below 1; of images with "
            "--samples 0 also the units that are then without use.",
            show_default=False,
        ),
    ] = None,
    int8: Annotated[
        bool,
        typer.Option("--int8", help="Store the weights of an ONNX file in 8 bits; shows the cost."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the file of --out if it exists.")
    ] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Export the network of a run, with its uncertainty, to ONNX or a PyTorch program.

    The outputs are mean, the class probabilities; total, their entropy; and epistemic, the mutual
    information of class and weights; both in nats. The file also holds the names of the classes,
    the scaling of pixels, and a threshold of the total uncertainty that 95 % of the held-out
    examples stay below. Its outputs are compared with PyTorch's before it is written.

    The graph of a table's run takes the raw columns by name: numbers, dates as days since 1970,
    and texts; missing cells are NaN or empty texts. It does all that predict does, but for the
    intervals of counts and of Student's t. For numbers the outputs are mean, std, quantiles (not of
    counts and Student's t), and total and epistemic, which are variances.
    """
    from bayesify.app.runs.export import check_export, export_run
    from bayesify.app.runs.export_table import check_table_export, export_table_run

    check_export(out, samples=samples, fraction=fraction, int8=int8)
    check_can_be_written(out, overwrite=force)
    run = opened(folder)
    if run.table is not None:
        check_table_export(out, int8=int8)
    data = read_data(run, data_dir)
    console = Console(stderr=True)
    with console.status("exporting ..."):
        if run.table is None:
            found = export_run(run, out, data, samples=samples, fraction=fraction, int8=int8)
        else:
            found = export_table_run(run, out, data, samples=samples, fraction=fraction)
    if as_json:
        typer.echo(json.dumps(found))
        return
    lines = _lines(found) if run.table is None else _table_lines(found, run.table.target)
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    typer.echo(f"exported: {out}")


def _lines(found: dict[str, Any]) -> list[str]:
    samples = found["num_samples"]
    weights = f"{samples} weight samples" if samples else "the mean weights"
    lines = [
        f"{weights}, {found['bytes']:,} bytes; outputs {', '.join(found['outputs'])}",
        f"largest difference from PyTorch: {found['largest_difference']:.1g}",
        f"error on {found['held_out']:,} held-out examples: {found['error']:.2f} %",
        f"total uncertainty of {100 * found['coverage']:g} % of them: at most "
        f"{found['threshold']:.4f} nats",
    ]
    if found["int8"]:
        costs = found["int8"]
        lines.append(
            f"in int8: error {costs['error']:.2f} %; {costs['float_bytes'] / found['bytes']:.1f} "
            f"times smaller than {costs['float_bytes']:,} bytes in floating point"
        )
    return lines


def _table_lines(found: dict[str, Any], target: Target) -> list[str]:
    samples, num_inputs = found["num_samples"], len(found["inputs"])
    weights = f"{samples} weight samples" if samples else "the mean weights"
    lines = [
        f"{weights}, {found['bytes']:,} bytes; outputs {', '.join(found['outputs'])}",
        f"{num_inputs} input{'s'[: num_inputs != 1]}, the columns of the table",
        f"largest difference from PyTorch: {found['largest_difference']:.1g}",
    ]
    if not target.classes and "quantiles" not in found["outputs"]:
        lines.append(
            "no quantiles, hence no intervals: ONNX lacks the distribution function; bayesify "
            "predict and bayesify serve have them from the run"
        )
    if found["threshold"] is not None:
        unit = "nats" if target.classes else f"squared units of {target.name}"
        lines.append(
            f"total uncertainty of {100 * found['coverage']:g} % of {found['held_out']:,} held-out "
            f"rows: at most {found['threshold']:.4g} {unit}"
        )
    return lines
