"""``bayesify predict --conformal``: calibrated on the run's held-out part, and on nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.app.cli.test_cli import as_json, bayesify, quick_runs
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_tables import QUICK, TABLES, rows_of

from bayesify.app.runs import Run
from bayesify.datasets import load_images

pytestmark = pytest.mark.usefixtures("quick")


def trained(place: Path, task: str, *options: str) -> Path:
    (place / "table.csv").write_text(TABLES[task])
    command = ("train", place / "table.csv", "--target", "price", "--out", place / "run")
    said = bayesify(*command, *(options or QUICK))
    assert said.code == 0, said.err
    return place


@pytest.fixture(scope="module", params=TABLES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a table of 60 rows and a run that holds 12 of them out."""
    with quick_runs():
        return trained(tmp_path_factory.mktemp("conformal"), request.param)


@pytest.mark.parametrize("level", [0.9, 0.5])
def test_the_ends_and_sets_are_those_of_the_held_out_rows(
    place: Path, tmp_path: Path, level: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bayesify.app.runs.predict._CHUNK_ROWS", 5)
    options = ("--conformal", "--level", level)
    said = as_json("predict", place / "run", place / "table.csv", "--out", tmp_path / "p", *options)
    assert {key: said[key] for key in ("method", "level", "calibration_rows")} == {
        "method": "conformal",
        "level": level,
        "calibration_rows": 12,
    }
    assert said["guaranteed_level"] == level
    rows = rows_of(tmp_path / "p")
    run = Run.open(place / "run")
    data = run.load_data()
    p = run.load_module().predict(data.test_inputs, said["weight_samples"])
    if not run.class_names:
        scores = ((p.mean - data.test_targets).abs() / p.total.sqrt()).flatten().sort().values
        factor = float(scores[math.ceil(13 * level) - 1])
        for row in rows:
            mean, std = float(row["mean"]), float(row["std"])
            low, high = (float(row[f"{end}_{100 * level:g}"]) for end in ("lower", "upper"))
            margin = 3e-5 * (1.0 + factor) * std  # of rounding, and of the digits of the file
            expected = [mean - factor * std, mean + factor * std]
            assert [low, high] == pytest.approx(expected, 1e-4, margin)
        return
    # Of two classes the first has a score of 0 and the second the probability of the first.
    own = p.mean.gather(1, data.test_targets[:, None]).flatten()
    scores = torch.where(own < 0.5, 1.0 - own, 0.0).sort().values
    most = float(scores[math.ceil(13 * level) - 1])
    for row in rows:
        likely = float(row[f"p({row['prediction']})"])
        members = json.loads(row["set"])
        assert row["prediction"] in members
        if abs(likely - most) > 1e-5:
            assert len(members) == (2 if likely < most else 1)


def test_without_the_option_nothing_changes(place: Path, tmp_path: Path) -> None:
    said = as_json("predict", place / "run", place / "table.csv", "--out", tmp_path / "p")
    assert "method" not in said
    assert "set" not in rows_of(tmp_path / "p")[0]


def test_the_rows_and_their_use_are_reported(place: Path, tmp_path: Path) -> None:
    options = ("--conformal", "--level", "0.9")
    command = ("predict", place / "run", place / "table.csv", "--out", tmp_path / "p", *options)
    assert "calibrated on 12 test rows, whose metrics are not independent" in bayesify(*command).err


def test_too_few_rows_for_the_level(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "p"
    said = bayesify("predict", place / "run", place / "table.csv", "--out", out, "--conformal")
    check_refused(
        said,
        "holds out 12 test rows to calibrate on: level 0.95 needs at least 19 calibration examples",
    )
    assert not out.exists()


def test_a_run_on_all_rows_has_none_to_calibrate_on(tmp_path: Path) -> None:
    place = trained(tmp_path, "regression", "--test-fraction", "0", "--epochs", "1")
    out = tmp_path / "p"
    said = bayesify("predict", place / "run", place / "table.csv", "--out", out, "--conformal")
    check_refused(said, "must hold out test rows to calibrate on, got none (--test-fraction 0)")
    assert not out.exists()


def test_the_run_needs_its_table(tmp_path: Path) -> None:
    place = trained(tmp_path, "regression")
    (place / "new.csv").write_text(TABLES["regression"])
    (place / "table.csv").unlink()
    command = ("predict", place / "run", place / "new.csv", "--out", place / "p")
    check_refused(bayesify(*command, "--conformal", "--level", "0.9"), "there is no file")
    assert bayesify(*command).code == 0


def test_a_baseline_is_calibrated_too(tmp_path: Path) -> None:
    place = trained(tmp_path, "regression", "--baseline", "sgd", "--epochs", "2")
    command = (
        "predict",
        place / "run",
        place / "table.csv",
        "--out",
        tmp_path / "p",
        "--conformal",
    )
    assert as_json(*command, "--level", "0.9")["weight_samples"] == 1


def test_digits_have_sets(finished: Path, tmp_path: Path) -> None:
    data = load_images("mnist", limit=3)
    np.save(tmp_path / "x.npy", (data.train_inputs * data.pixel_scale).round().numpy().astype("u1"))
    command = ("predict", finished, tmp_path / "x.npy", "--out", tmp_path / "p")
    said = as_json(*command, "--conformal", "--level", "0.99", "--samples", "2")
    assert said["calibration_rows"] == 500
    for row in rows_of(tmp_path / "p"):
        assert row["prediction"] in json.loads(row["set"])
