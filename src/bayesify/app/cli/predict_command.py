"""``bayesify predict``: predict new data with a trained run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from bayesify.app.cli.results_commands import AsJson, Folder, opened, read_data
from bayesify.app.runs import Run
from bayesify.app.runs.pixels import read_pixels
from bayesify.app.runs.predict import Predictions, check_can_be_written, write_predictions
from bayesify.datasets import ImageData, ImageSchema, find_images

__all__ = ["predict"]

_IMAGES_AT_ONCE = 256


def predict(
    folder: Folder,
    data: Annotated[
        Path,
        typer.Argument(
            help="CSV or Parquet with the training table's columns; for digits images as .npy, "
            ".csv or IDX; for a folder's run an image or a folder of images.",
            metavar="INPUT",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="New CSV file, with one row per row or image of INPUT.")
    ],
    level: Annotated[
        float, typer.Option(help="Probability of a regression's intervals, or of --conformal.")
    ] = 0.95,
    conformal: Annotated[
        bool,
        typer.Option(
            "--conformal",
            help="Calibrate intervals, or sets of classes, on the run's held-out test part.",
        ),
    ] = False,
    samples: Annotated[
        int | None,
        typer.Option(
            help=r"Weight samples to average over. \[default: as in training]", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict new data with a trained run, with uncertainties.

    For regression: mean, std and interval of the value to be observed. For classification: the
    predicted class and the probability of each. For both: the total uncertainty and its aleatoric
    part (noise) and epistemic part (too few training examples), as variances or in nats. Rows are
    numbered and in the order of INPUT. For a table the last column names the input column, if
    any, in which a row lies far outside the training data.

    With --conformal the intervals, or sets of classes in the column set, hold new values with the
    level as a guaranteed probability, if the rows are exchangeable with the run's test part. This
    reads the run's data again.
    """
    console = Console(stderr=True)
    check_can_be_written(out)
    run = opened(folder)
    predictions = Predictions.of(
        run,
        level=level,
        samples=run.config.test_samples if samples is None else samples,
        class_names=run.class_names,
    )
    if conformal:
        predictions.calibrate(read_data(run))
    with console.status("predicting ..."):
        if run.table is not None:
            more = _table(console, run, predictions, data, out)
        elif run.images is not None:
            more = _files(run.images, predictions, data, out)
        else:
            more = _digits(predictions, data, out)
    summary = {**predictions.summary(), **more, "out": str(out)}
    if as_json:
        typer.echo(json.dumps(summary))
        return
    if summary.get("warning"):
        console.print(Text(f"warning: {summary['warning']}", style="yellow"), soft_wrap=True)
        console.print(Text(f"the rule: {summary['rule']}"), soft_wrap=True)
    console.print(Text(f"{summary['rows']:,} rows predicted"), soft_wrap=True)
    if conformal:
        console.print(
            Text(
                f"calibrated on {summary['calibration_rows']:,} test rows, whose metrics are not "
                "independent of this calibration"
            ),
            soft_wrap=True,
        )
    typer.echo(f"predictions: {out}")


def _files(schema: ImageSchema, predictions: Predictions, path: Path, out: Path) -> dict[str, Any]:
    paths = [path] if path.is_file() else find_images(path)

    def rows() -> Iterator[list[object]]:
        for start in range(0, len(paths), _IMAGES_AT_ONCE):
            some = paths[start : start + _IMAGES_AT_ONCE]
            answers = zip(some, predictions.rows(schema.inputs(some)), strict=True)
            for place, (each, cells) in enumerate(answers, start=start + 1):
                name = each.name if each == path else each.relative_to(path).as_posix()
                yield [place, name, *cells]

    write_predictions(out, ["row", "file", *predictions.header], rows())
    return {}


def _digits(predictions: Predictions, path: Path, out: Path) -> dict[str, Any]:
    inputs = read_pixels(path, ImageData.image_shape, ImageData.pixel_scale)
    rows = ([number, *cells] for number, cells in enumerate(predictions.rows(inputs), start=1))
    write_predictions(out, ["row", *predictions.header], rows)
    return {}


def _table(
    console: Console, run: Run, predictions: Predictions, path: Path, out: Path
) -> dict[str, Any]:
    from bayesify.tabular.new_table import NewTable

    assert run.table is not None
    table = NewTable.open(path, run.table)
    for remark in table.remarks():
        console.print(Text(f"note: {remark}"), soft_wrap=True)
    carried = [name for name in run.table.carried if name in table.file.columns]
    own = ["row", *predictions.header, "outside_training", "outside_column"]
    header = [own[0], *(f"{name} (input)" if name in own else name for name in carried), *own[1:]]

    def rows() -> Iterator[list[object]]:
        for piece in table:
            columns = [piece.carried[name] for name in carried]
            answers = zip(
                predictions.rows(piece.inputs, piece.distances), piece.outside, strict=True
            )
            for place, (cells, outside) in enumerate(answers):
                ids = [column[place] for column in columns]
                flag = "true" if outside else "false"
                yield [piece.first + place, *ids, *cells, flag, outside]

    write_predictions(out, header, rows())
    return {
        "outside": table.outside,
        "worst_column": table.worst_column,
        "warning": table.warning(),
        "rule": table.rule(),
    }
