"""The curve in the report of a table with one input: predictions in the unit of the target."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.app.cli.test_cli import bayesify, quick_runs

from bayesify.app.runs import Run
from bayesify.app.runs.one_column import one_column
from bayesify.prediction import GaussianPredictive
from bayesify.tabular.table_data import TableData

QUICK = ["--epochs", "1", "--passes", "30", "--threads", "1"]
SAMPLES = ["--test-samples", "20"]


def finished(place: Path, header: str, rows: list[str], *options: str) -> Run:
    """Train on a table, and open the run."""
    table = place / "table.csv"
    table.write_text("\n".join((header, *rows)) + "\n")
    target = header.rpartition(",")[2]
    result = bayesify("train", table, "--target", target, "--out", place / "run", *QUICK, *options)
    assert result.code == 0, result.err
    return Run.open(place / "run")


def hours(count: int = 80) -> list[str]:
    generator = np.random.default_rng(0)
    return [f"{h:.3f},{300 + 5 * h:.2f}" for h in generator.uniform(1000.0, 1016.0, count)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [SAMPLES, ["--baseline", "sgd"]], ids=["bayes", "sgd"])
def test_the_curve_is_what_is_predicted(tmp_path: Path, options: list[str]) -> None:
    run = finished(tmp_path, "hour,load", hours(), *options)
    assert (run.folder / "one_column.png").exists()
    assert 'id="one_column"' in (run.folder / "report.html").read_text(encoding="utf-8")
    data, bnn = run.load_data(), run.load_module()
    assert isinstance(data, TableData)
    assert run.table is not None
    figure = one_column(run, data, bnn)
    assert figure is not None
    (ax,) = figure.axes
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("hour", "load")
    lines = {line.get_label(): line.get_xydata() for line in ax.lines}
    x, median = lines["median prediction"].T
    # From the table's own values, as for new rows.
    inputs = torch.from_numpy(run.table.encode([x]))
    samples = 20 if options == SAMPLES else 1
    predictive = bnn.predict(inputs, samples)
    assert isinstance(predictive, GaussianPredictive)
    expected = predictive.quantile(0.5).flatten().double() * data.scale + data.shift
    np.testing.assert_allclose(median, expected, rtol=1e-4)
    rows = np.loadtxt(tmp_path / "table.csv", delimiter=",", skiprows=1)
    assert x[0] < rows[:, 0].min()
    assert x[-1] > rows[:, 0].max()
    known = {(round(a, 2), round(b, 1)) for a, b in rows}
    drawn = {(round(a, 2), round(b, 1)) for a, b in lines["data"].tolist()}
    assert len(drawn & known) > 0.9 * len(drawn)  # except for values that round the other way
    assert len(lines["data"]) == len(data.train_inputs)


@pytest.mark.parametrize(
    ("header", "rows"),
    [
        ("hour,day,load", [f"{row.split(',')[0]},{k % 7},{k}.5" for k, row in enumerate(hours())]),
        pytest.param(
            "hour,kind",
            [f"{row.split(',')[0]},{'ab'[k % 2]}" for k, row in enumerate(hours())],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "kind,load", [f"{'abc'[k % 3]},{k}.5" for k in range(80)], marks=pytest.mark.slow
        ),
    ],
    ids=["two inputs", "classes", "levels"],
)
def test_no_other_table_has_one(tmp_path: Path, header: str, rows: list[str]) -> None:
    with quick_runs():  # without the other figures
        run = finished(tmp_path, header, rows, *SAMPLES)
    assert not (run.folder / "one_column.png").exists()
