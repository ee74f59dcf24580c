"""``bayesify report --compare``: other data are refused; each run has its label and unit."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.app.cli.test_cli import bayesify, quick_runs
from tests.app.cli.test_errors import check_refused
from tests.app.cli.test_folders import QUICK as QUICK_IMAGES
from tests.app.cli.test_folders import write_images
from tests.app.cli.test_tables import QUICK

pytestmark = pytest.mark.usefixtures("quick")

#: A target with a large spread, so that the scale of a standardised one matters.
ROWS = "".join(f"{i % 13},{(i * i) % 17},{9 * (i % 13) + i % 4}\n" for i in range(80))
OPTIONS = {
    "own": ["--task", "regression"],
    "target": ["--target", "x", "--task", "regression"],
    "task": ["--task", "classification"],
    "seed": ["--task", "regression", "--seed", "1"],
    "test fraction": ["--task", "regression", "--test-fraction", "0.3"],
    "limit": ["--task", "regression", "--limit", "60"],
    "counts": ["--likelihood", "poisson"],
    "pruned": ["--task", "regression", "--prune-fraction", "0.9"],
}


def train(place: Path, name: str, rows: str = ROWS) -> Path:
    (place / "table.csv").write_text("x,z,y\n" + rows)
    run = place / name.replace(" ", "-") / "run"
    options = [*QUICK, "--target", "y", *OPTIONS.get(name, OPTIONS["own"])]
    with quick_runs():
        said = bayesify("train", place / "table.csv", "--out", run, *options)
    assert said.code == 0, said.err
    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run ``own/run``, which no test changes."""
    place = tmp_path_factory.mktemp("compared")
    train(place, "own")
    return place


@pytest.mark.parametrize("what", ["target", "task", "seed", "test fraction", "limit"])
def test_a_run_that_was_measured_otherwise_is_refused(place: Path, what: str) -> None:
    other = train(place, what)
    said = bayesify("report", place / "own" / "run", "--compare", other)
    check_refused(said, f"--compare needs a run with the same {what} as", f"but {other} has")


def test_a_run_on_another_table_is_refused(place: Path, tmp_path: Path) -> None:
    other = train(tmp_path, "other", ROWS.replace("12,", "11,"))
    said = bayesify("report", place / "own" / "run", "--compare", other)
    check_refused(said, "--compare needs a run with the same digest of the data as")


def test_runs_on_images_and_tables_are_not_compared(place: Path, finished: Path) -> None:
    said = bayesify("report", place / "own" / "run", "--compare", finished)
    check_refused(said, "--compare needs a run with the same task as")
    said = bayesify("report", finished, "--compare", place / "own" / "run")
    check_refused(said, "--compare needs a run with the same task as")


def test_other_images_are_refused(run: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    config["settings"]["dataset"] = "fashion-mnist"
    (other / "config.json").write_text(json.dumps(config))
    said = bayesify("report", run, "--compare", other)
    check_refused(said, "--compare needs a run with the same data as", "mnist, but")


def test_runs_on_mnist_and_on_a_folder_are_not_compared(run: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "photos", 5)
    other = tmp_path / "other"
    assert bayesify("train", tmp_path / "photos", "--out", other, *QUICK_IMAGES).code == 0
    said = bayesify("report", run, "--compare", other)
    check_refused(said, "--compare needs a run with the same data as", "mnist, but", "other data")
    said = bayesify("report", other, "--compare", run)
    check_refused(said, "needs a run with the same digest of the data as", "has other data")
    said = bayesify("predict", other, tmp_path / "nowhere.png", "--out", tmp_path / "p.csv")
    check_refused(said, "there is no file or folder", "nowhere.png")


def compared(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> dict[str, Any]:
    """What a report is drawn of."""
    seen: dict[str, Any] = {}
    finish = importlib.import_module("bayesify.app.runs.finish")
    monkeypatch.setattr(finish, "build_figures", lambda *_, **given: seen.update(given) or {})
    said = bayesify("report", *arguments)
    assert said.code == 0, said.err
    return seen


def test_runs_in_folders_of_one_name_have_labels_of_their_own(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, *others = (
        Path(shutil.copytree(place / "own" / "run", tmp_path / name / "run")) for name in "abc"
    )
    options = [word for other in others for word in ("--compare", other)]
    seen = compared(monkeypatch, run, *options)
    labels = [f"Bayes by Backprop ({other})" for other in others]
    assert list(seen["baselines"]) == list(seen["baseline_weights"]) == labels
    page = (run / "report.html").read_text()
    assert all(label in page for label in labels)


def test_each_run_has_its_own_scale(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = train(place, "counts")
    run = Path(shutil.copytree(place / "own" / "run", tmp_path / "run"))
    seen = compared(monkeypatch, run, "--compare", counts)
    last = seen["baselines"]["Bayes by Backprop (run)"][-1]["test_error"]
    measured = json.loads((counts / "metrics.json").read_text())["test"]["rmse_mean_weights"]
    assert last == pytest.approx(measured, rel=1e-3)


def test_the_weights_of_a_pruned_run_are_those_that_are_left(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruned = train(place, "pruned")
    run = Path(shutil.copytree(place / "own" / "run", tmp_path / "run"))
    seen = compared(monkeypatch, run, "--compare", pruned)
    [weights] = seen["baseline_weights"].values()
    left = json.loads((pruned / "metrics.json").read_text())["num_weights"]
    assert bool(weights.all())
    assert len(weights) < 0.2 * left
