"""``bayesify predict``: a run's answers for new data, row by row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from bayesify.cli.results import AsJson, Folder, opened
from bayesify.datasets import IMAGE_DATASETS, ImageData
from bayesify.runs import Run
from bayesify.runs.pixels import read_pixels
from bayesify.runs.predict import Predictions, check_can_be_written, write_predictions

__all__ = ["predict"]


def predict(
    folder: Folder,
    data: Annotated[
        Path,
        typer.Argument(
            help="A CSV with the training table's columns; of a run with images .npy, .csv or IDX.",
            metavar="INPUT",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The new CSV file with a row for each of INPUT's.")],
    level: Annotated[
        float, typer.Option(help="Probability of the intervals of a regression.")
    ] = 0.95,
    samples: Annotated[
        int | None,
        typer.Option(
            help=r"Weight samples to average over. \[default: as in training]", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict new data with a trained run: a number or a class, and how sure that is.

    Of a number: mean, std and interval of what will be observed. Of a class: the probability of
    each. Of both: the total uncertainty and its two parts, aleatoric (noise) and epistemic (what
    the network does not know); variances, or nats. Rows are numbered and in INPUT's order; the
    last column says in which of its columns a row lies far outside the training data.
    """
    console = Console(stderr=True)
    check_can_be_written(out)
    run = opened(folder)
    names = (
        run.table.target.classes if run.table else IMAGE_DATASETS[run.config.dataset].class_names
    )
    predictions = Predictions.of(
        run,
        level=level,
        samples=run.config.test_samples if samples is None else samples,
        class_names=names,
    )
    with console.status("predicting ..."):
        more = (
            _images(predictions, data, out)
            if run.table is None
            else _table(console, run, predictions, data, out)
        )
    summary = {**predictions.summary(), **more, "out": str(out)}
    if as_json:
        typer.echo(json.dumps(summary))
        return
    if summary.get("warning"):
        console.print(Text(f"warning: {summary['warning']}", style="yellow"), soft_wrap=True)
        console.print(Text(f"the rule: {summary['rule']}"), soft_wrap=True)
    console.print(Text(f"{summary['rows']:,} rows predicted"), soft_wrap=True)
    typer.echo(f"predictions: {out}")


def _images(predictions: Predictions, path: Path, out: Path) -> dict[str, Any]:
    inputs = read_pixels(path, ImageData.image_shape, ImageData.pixel_scale)
    rows = ([number, *cells] for number, cells in enumerate(predictions.rows(inputs), start=1))
    write_predictions(out, ["row", *predictions.header], rows)
    return {}


def _table(
    console: Console, run: Run, predictions: Predictions, path: Path, out: Path
) -> dict[str, Any]:
    from bayesify.tables.rows import NewTable

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
            answers = zip(predictions.rows(piece.inputs), piece.outside, strict=True)
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
