"""Measure a run on a new table with its target: ``predict`` and ``evaluate RUN INPUT``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from tests.app.cli.test_cli import as_json, bayesify
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_tables import QUICK, TABLES, trained

from bayesify.app.runs import Run
from bayesify.app.runs.measure import evaluate
from bayesify.tabular.table_data import TableData

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module", params=TABLES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("scored")
    trained(place, TABLES[request.param])
    return place


def is_regression(place: Path) -> bool:
    return Run.open(place / "run").config.task == "regression"


def whole_table(place: Path) -> dict[str, float]:
    """The metrics on all rows of training's table, measured as those of the held-out rows."""
    run = Run.open(place / "run")
    data = run.load_data()
    assert isinstance(data, TableData)
    both = dataclasses.replace(
        data,
        test_inputs=torch.cat([data.train_inputs, data.test_inputs]),
        test_targets=torch.cat([data.train_targets, data.test_targets]),
        test_distances=torch.cat([data.train_distances, data.test_distances]),
    )
    metrics, _ = evaluate(run.load_module(), both, num_samples=3, with_train=False)
    return metrics["test"]


@pytest.mark.parametrize("at_once", [10_000, 7])
def test_the_metrics_are_those_of_a_run(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr("bayesify.app.runs.predict._CHUNK_ROWS", at_once)
    monkeypatch.setattr("bayesify.tabular.files.table_file.CHUNK_ROWS", 4 * at_once)
    expected = whole_table(place)
    assert expected.keys() == json.loads((place / "run/metrics.json").read_text())["test"].keys()
    table = place / "table.csv"
    found = as_json("evaluate", place / "run", table)
    assert found["metrics"] == pytest.approx(expected, rel=1e-4)
    assert (found["rows"], found["rows_measured"], found["rows_not_measured"]) == (60, 60, None)
    predicted = as_json("predict", place / "run", table, "--out", tmp_path / "p.csv")
    assert predicted["metrics"] == pytest.approx(expected, rel=1e-4)


def test_they_are_printed(place: Path, tmp_path: Path) -> None:
    said = bayesify("evaluate", place / "run", place / "table.csv")
    assert said.code == 0, said.err
    assert "new rows" in said.out
    assert ("RMSE, averaged predictions" in said.out) == is_regression(place)
    said = bayesify("predict", place / "run", place / "table.csv", "--out", tmp_path / "p.csv")
    assert "negative log-likelihood" in said.out


def test_rows_without_a_usable_target_are_counted(place: Path, tmp_path: Path) -> None:
    lines = (place / "table.csv").read_text().splitlines()
    for number, cell in ((1, ""), (2, "NA"), (3, "medium")):
        lines[number] = f"{lines[number].rpartition(',')[0]},{cell}"
    (tmp_path / "new.csv").write_text("\n".join(lines) + "\n")
    found = as_json("evaluate", place / "run", tmp_path / "new.csv")
    assert (found["rows"], found["rows_measured"]) == (60, 57)
    what = "with one that is no number" if is_regression(place) else "of a class that training"
    assert f"2 without a target, 1 {what}" in found["rows_not_measured"]
    said = bayesify("evaluate", place / "run", tmp_path / "new.csv")
    assert "note: price: 1 cell like 'medium' is not measured" in said.err


def test_without_the_target_evaluate_tells_what_is_lacking(place: Path, tmp_path: Path) -> None:
    lines = (place / "table.csv").read_text().splitlines()
    new = tmp_path / "new.csv"
    new.write_text("\n".join(line.rpartition(",")[0] for line in lines) + "\n")
    said = bayesify("evaluate", place / "run", new)
    check_refused(said, "has no column 'price', the target to measure by; add it, or use bayesify")
    assert as_json("predict", place / "run", new, "--out", tmp_path / "p")["metrics"] is None
    new.write_text("\n".join([lines[0], *(f"{x.rpartition(',')[0]}," for x in lines[1:])]) + "\n")
    check_refused(bayesify("evaluate", place / "run", new), "has no row with a target 'price' to")


def test_a_target_in_another_format(place: Path, tmp_path: Path) -> None:
    """It is read if its meaning is beyond doubt; else evaluate stops, and predict predicts."""
    head, *lines = (place / "table.csv").read_text().splitlines()
    change = {True: lambda cell: f"${cell}", False: str.upper}[is_regression(place)]

    def write(change: object) -> Path:
        parts = [line.rpartition(",") for line in lines]
        text = "\n".join([head, *(f"{rest},{change(cell)}" for rest, _, cell in parts)])  # type: ignore[operator]
        (tmp_path / "new.csv").write_text(text + "\n")
        return tmp_path / "new.csv"

    expected = as_json("evaluate", place / "run", place / "table.csv")["metrics"]
    found = as_json("evaluate", place / "run", write(change))
    assert found["metrics"] == pytest.approx(expected)
    new = write(lambda cell: f"about {cell}")
    check_refused(bayesify("evaluate", place / "run", new), "the column 'price' must hold")
    said = bayesify("predict", place / "run", new, "--out", tmp_path / "p.csv")
    assert said.code == 0
    assert "note: nothing is measured: the column 'price' must hold" in said.err


def test_targets_too_large_to_measure(place: Path, tmp_path: Path) -> None:
    if not is_regression(place):
        pytest.skip("classes have no size")
    lines = (place / "table.csv").read_text().splitlines()
    lines[5] = f"{lines[5].rpartition(',')[0]},1e300"
    (tmp_path / "new.csv").write_text("\n".join(lines) + "\n")
    said = bayesify("evaluate", place / "run", tmp_path / "new.csv")
    check_refused(said, "the target 'price' must be at most 1e+150 in size, got 1e+300 in row 5")


def test_options_that_do_nothing(place: Path, tmp_path: Path) -> None:
    check_refused(bayesify("evaluate", place / "run", "--lenient"), "lenient would do nothing")
    table = place / "table.csv"
    check_refused(bayesify("evaluate", place / "run", table, "--data-dir", "."), "leave it out")
    check_refused(bayesify("evaluate", place / "run", table, "--samples", "0"), "at least 1")
    run = tmp_path / "images"
    tiny = ["--hidden", "2", "--epochs", "1", "--limit", "20", "--test-samples", "1"]
    assert bayesify("train", "mnist", "--out", run, *tiny).code == 0
    check_refused(bayesify("evaluate", run, table), "is not a run of a table; leave INPUT out")
    words = ["--out", tmp_path / "p.csv", "--lenient"]
    check_refused(bayesify("predict", run, table, *words), "lenient would do nothing here")


def test_no_rows_held_out(place: Path, tmp_path: Path) -> None:
    """Every command works on such a run; each says in one line that nothing is measured."""
    table, run = place / "table.csv", tmp_path / "run"
    command = ["train", table, "--target", "price", "--out", run, *QUICK, "--test-fraction", "0"]
    said = bayesify(*command)
    assert said.code == 0, said.err
    assert "60 rows for training, 0 held out" in said.err
    assert "no rows are held out, so that nothing tells how well it predicts new ones" in said.err
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["test"] is metrics["baseline"] is metrics["importance"] is None
    assert as_json("report", run).items() >= {"baseline": None, "importance": None}.items()
    assert metrics["train"].keys() == whole_table(place).keys()
    report = (run / "report.html").read_text()
    assert "none held out: the figures are of training rows" in report
    loss = "RMSE, averaged" if is_regression(place) else "error, averaged (%)"
    assert f"{loss}</th>" in report  # of the table of pruning
    said = bayesify("evaluate", run)
    assert said.code == 0, said.err
    assert "training" in said.out
    assert "test" not in said.out
    assert "no rows are held out" in said.err
    for words in (["prune"], ["inspect"], ["report"], ["report", "--compare", run]):
        assert bayesify(words[0], run, *words[1:]).code == 0, words
    found = as_json("predict", run, table, "--out", tmp_path / "p.csv")
    assert found["metrics"].keys() == metrics["train"].keys()
    assert "held-out" not in found["rule"]
    assert bayesify(*command, "--resume").code == 0
