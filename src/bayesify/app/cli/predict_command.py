"""``bayesify predict``: predict new data with a trained run."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from bayesify.app.cli.new_examples import (
    new_images_summary,
    new_summary,
    open_new,
    print_new,
    print_outside,
    print_remarks,
)
from bayesify.app.cli.opened_run import (
    AsJson,
    Folder,
    Lenient,
    check_table_options,
    opened,
    read_data,
)
from bayesify.app.cli.predict_on_ray import predict_on_ray
from bayesify.app.cli.row_progress import RowProgress
from bayesify.app.runs import RunError
from bayesify.app.runs.memory import peak_memory
from bayesify.app.runs.out_file import check_can_be_written
from bayesify.app.runs.own_images import NewImages
from bayesify.app.runs.pixels import read_pixels
from bayesify.app.runs.predict import (
    Predictions,
    chosen_level,
    write_predictions,
    write_table,
)
from bayesify.datasets import ImageData

if TYPE_CHECKING:  # pandas takes its time to load
    from bayesify.tabular.new_table import NewTable

__all__ = ["predict"]

#: Endings of --out for which a file of text would be a surprise.
_OTHER_FORMATS = (".xlsx", ".xls", ".ods", ".json", ".jsonl", ".npy", ".npz", ".feather", ".gz")
#: Header and rows of the predictions.
_Rows = tuple[list[str], Iterator[list[object]]]


def predict(
    folder: Folder,
    data: Annotated[
        Path,
        typer.Argument(
            help="CSV or Parquet with the training table's columns: a file, a folder of them, or a "
            "pattern in quotes such as 'new/*.parquet'; for digits images as .npy, .csv or IDX; "
            "for a run on your own images an image, a folder, or a table of paths.",
            metavar="INPUT",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="CSV file to write, or for a table Parquet if it ends in .parquet, with one row "
            "per row or image of INPUT. With --on a folder, with one file per file of INPUT."
        ),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the file of --out if it exists.")
    ] = False,
    level: Annotated[
        float | None,
        typer.Option(
            help=r"Probability of a regression's intervals, or of --conformal. \[default: 0.95]",
            show_default=False,
        ),
    ] = None,
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
    pruned: Annotated[
        Path | None,
        typer.Option(
            help="Predict with the pruned network in this file, which prune --out wrote.",
            show_default=False,
        ),
    ] = None,
    lenient: Lenient = False,
    max_memory: Annotated[
        str | None,
        typer.Option(
            help="Of a table: memory that the command may use, such as 2GB. It is read, predicted "
            "and written in parts anyway; a table of very many columns needs smaller ones.",
            show_default=False,
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="ray: predict each file of a table on the Ray cluster of this machine, or on a "
            "new one; ray=ADDRESS: on the one there.",
            metavar="ray[=ADDRESS]",
            show_default=False,
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

    A table's columns are read in the formats that training found: dates, decimal commas, thousands,
    units, words for yes and no. A column in another format is read by it, with a note, if its
    meaning is beyond doubt; else nothing is predicted. Where the target is in INPUT too, the
    predictions are measured by it.

    A table is read, predicted and written in parts, so that it may be larger than memory. The file
    of --out has its name only when it is complete.

    With --conformal the intervals, or sets of classes in the column set, hold new values with the
    level as a guaranteed probability, if the rows are exchangeable with the run's test part. This
    reads the run's data again.

    With --on ray each file of INPUT is predicted alone, as the command does without it, and has its
    own file in the folder --out. All nodes must share the run, INPUT and --out. The same command
    predicts the rest after an interruption, and files that were changed since.
    """
    console = Console(stderr=True)
    if on is None:
        check_can_be_written(out, overwrite=force)
    if out.suffix.lower() in _OTHER_FORMATS:
        raise RunError(f"{out} must end in .csv, or in .parquet for a table")
    _check_is_no_input(out, data)
    run = opened(folder)
    check_table_options(run, lenient=lenient, max_memory=max_memory is not None, on=on is not None)
    if on is not None and (conformal or max_memory is not None):
        raise RunError("conformal and max-memory cannot be combined with on; leave them out")
    if run.table is None and out.suffix.lower() == ".parquet":
        raise RunError(f"{out} must not end in .parquet, which is for tables; use .csv")
    reads_files = run.table is not None and all(c.kind != "image" for c in run.table.columns)
    if on is None and reads_files and data.is_dir() and out.absolute().parent.samefile(data):
        raise RunError(
            f"{out} would be one of the files of the table in {data}; choose another folder with "
            "--out"
        )
    level = chosen_level(level, run.class_names, conformal=conformal)
    predictions = Predictions.of(
        run,
        run.load_module(pruned),
        level=level,
        samples=run.config.test_samples if samples is None else samples,
    )
    if on is not None:
        predict_on_ray(
            console,
            run,
            data,
            out,
            on=on,
            level=level,
            samples=predictions.samples,
            pruned=pruned,
            lenient=lenient,
            overwrite=force,
            as_json=as_json,
        )
        return
    if conformal:
        predictions.calibrate(read_data(run))
    table: NewTable | None = None
    images: NewImages | None = None
    progress = None if run.table is None else RowProgress(console)
    with console.status("predicting ...") if progress is None else progress:
        if run.table is not None:
            assert progress is not None
            table = open_new(
                console, run, data, lenient=lenient, max_memory=max_memory, progress=progress
            )
            if table.target_error:
                note = Text(f"note: nothing is measured: {table.target_error}")
                console.print(note, soft_wrap=True)
            write_table(out, table, predictions, overwrite=force)
        elif run.images is not None:
            images = NewImages.to_predict(data, run.images)
            print_remarks(console, images.found.remarks)
            write_predictions(out, *_files(images, predictions), overwrite=force)
        else:
            write_predictions(out, *_digits(predictions, data), overwrite=force)
    more = {}
    if table is not None:
        more = new_summary(table, predictions)
    elif images is not None:
        more = new_images_summary(images, predictions)
    summary = {**predictions.summary(), **more, "out": str(out)}
    if max_memory is not None:
        summary["peak_memory_bytes"] = peak_memory()
    if as_json:
        typer.echo(json.dumps(summary))
        return
    print_outside(console, summary)
    count = summary["rows"]
    rows = f"{count:,} row{'' if count == 1 else 's'} predicted"
    console.print(Text(rows), soft_wrap=True)
    if conformal:
        console.print(
            Text(
                f"calibrated on {summary['calibration_rows']:,} test rows, whose metrics are not "
                "independent of this calibration"
            ),
            soft_wrap=True,
        )
    if summary.get("metrics"):
        print_new(summary, regression=run.config.task == "regression")
    typer.echo(f"predictions: {out}")


def _check_is_no_input(out: Path, data: Path) -> None:
    """Check that the file of --out is none of those that are read, which may be a pattern's."""
    inputs = [data] if data.exists() else map(Path, glob.glob(str(data), recursive=True))  # noqa: PTH207
    if out.exists() and any(map(out.samefile, inputs)):
        what = "the input" if data.exists() else "a file of the input"
        raise RunError(f"{out} is {what}; choose another file with --out")


def _files(images: NewImages, predictions: Predictions) -> _Rows:
    def rows() -> Iterator[list[object]]:
        answers = (cells for chunk in images.chunks() for cells in predictions.rows(*chunk))
        for place, (name, cells) in enumerate(zip(images.names, answers, strict=True), start=1):
            yield [place, name, *cells]

    return ["row", "file", *predictions.header], rows()


def _digits(predictions: Predictions, path: Path) -> _Rows:
    inputs = read_pixels(path, ImageData.image_shape, ImageData.pixel_scale)
    rows = ([number, *cells] for number, cells in enumerate(predictions.rows(inputs), start=1))
    return ["row", *predictions.header], rows
