"""One predictor for held-out rows, calibration rows and new rows, outside the training data too."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.app.cli.test_cli import as_json, bayesify, quick_runs
from torch import Tensor

from bayesify.app.runs import Run, measure
from bayesify.app.runs.predict import Predictions
from bayesify.io import read_tensors, write_tensors
from bayesify.prediction.conformal import Conformal
from bayesify.tabular.new_table import NewTable
from bayesify.tabular.schema import TableSchema
from bayesify.tabular.stored_table import store_table, stored_table
from bayesify.tabular.table_data import TableData
from bayesify.tabular.training_table import fit_table

QUICK = ("--epochs", "4", "--passes", "5", "--hidden", "4", "--test-samples", "5")
ROWS, OUTSIDE = 520, 30
LEVELS = (0.5, 0.8, 0.9)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_runs():
        yield


def target_of(task: str, x: np.ndarray, seed: int) -> list[str]:
    """A number, or a class, that follows x within the training data alone."""
    noise = np.random.default_rng(seed).normal(size=len(x))
    values = np.where(abs(x) < 3.0, np.sin(x), 0.0) + 0.2 * noise
    names = np.array(["low", "middle", "high"])
    classes = names[np.digitize(values + 0.3 * noise, [-0.4, 0.4])]
    return [f"{100 + 7 * value}" for value in values] if task == "regression" else list(classes)


def write(path: Path, x: np.ndarray, target: list[str]) -> Path:
    lines = [f"{value},{answer}" for value, answer in zip(x.tolist(), target, strict=True)]
    path.write_text("\n".join(["x,y", *lines]) + "\n")
    return path


class Place(NamedTuple):
    """A run, and its held-out rows and training rows as files of their own."""

    run: Path
    held_out: Path
    train: Path
    task: str


@pytest.fixture(scope="module", params=["regression", "classification"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A run of which some held-out rows and one training row lie outside the training data."""
    folder, task = tmp_path_factory.mktemp("outside"), request.param
    x = np.random.default_rng(0).uniform(-3.0, 3.0, ROWS)
    target = target_of(task, x, 1)
    # Which rows are held out follows from the seed and the targets, whatever x is.
    data, schema = fit_table(write(folder / "table.csv", x, target), "y", seed=3)
    codes = schema.encode([x])
    held = np.array([bool((data.test_inputs == code).all(1).any()) for code in codes])
    assert held.sum() == len(data.test_inputs)
    x[np.flatnonzero(held)[:OUTSIDE]] += np.linspace(8.0, 60.0, OUTSIDE)
    x[np.flatnonzero(~held)[0]] = 40.0  # of 416 training values the largest may lie outside
    table = write(folder / "table.csv", x, target)
    with quick_runs():
        said = bayesify(
            "train", table, "--target", "y", "--out", folder / "run", "--seed", 3, *QUICK
        )
    assert said.code == 0, said.err
    parts = {}
    for name, rows in (("held_out", held), ("train", ~held)):
        kept = [answer for answer, row in zip(target, rows, strict=True) if row]
        parts[name] = write(folder / f"{name}.csv", x[rows], kept)
    return Place(folder / "run", parts["held_out"], parts["train"], task)


# --------------------------------------------------------------------------------------- measuring


def check_both_ways_of_measuring(place: Place) -> None:
    own = as_json("evaluate", place.run)
    assert own["test"] == json.loads((place.run / "metrics.json").read_text())["test"]
    for part, outside in (("held_out", OUTSIDE), ("train", 1)):
        found = as_json("evaluate", place.run, getattr(place, part))
        assert found["outside"] == outside
        expected = own["test" if part == "held_out" else "train"]
        assert found["metrics"] == pytest.approx(expected, rel=1e-5)


def test_a_run_is_measured_as_a_file_of_the_same_rows(place: Place) -> None:
    check_both_ways_of_measuring(place)


def plain_rows(bnn: Any, data: Any, inputs: Tensor, samples: int, **_: Any) -> Any:
    return bnn.predict(inputs, samples)


def test_that_check_notices_held_out_rows_that_are_not_widened(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_predicted", plain_rows)
    with pytest.raises(AssertionError):
        check_both_ways_of_measuring(place)


def test_pruning_measures_the_same_predictor(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.open(place.run)
    data, bnn = run.load_data(), run.load_module()
    assert isinstance(data, TableData)
    whole, _ = measure.evaluate(bnn, data, num_samples=5, with_train=False)
    (row,) = measure.prune_table(bnn, data, [])
    if place.task == "classification":
        assert row["error_predictive"] == whole["test"]["error_predictive"]
    else:
        rmse = math.sqrt(row["error_predictive"]) * data.scale
        assert rmse == pytest.approx(whole["test"]["rmse"], rel=1e-5)
        # A table of numbers has no more than its first rows, all of them the same.
        monkeypatch.setattr(measure, "MOST_PRUNED", 10)
        inputs, targets = (part[:10] for part in measure.shown(data))
        few = dataclasses.replace(data, test_inputs=inputs, test_targets=targets)
        assert measure.prune_table(bnn, data, [0.5]) == measure.prune_table(bnn, few, [0.5])


# ------------------------------------------------------------------------------------- calibrating


class Rows(NamedTuple):
    """Rows as the network reads them, with targets as a run's data have them."""

    inputs: Tensor
    targets: Tensor
    distances: Tensor
    answers: list[float | str]


def exchangeable_rows(place: Place, run: Run, folder: Path, count: int = 61) -> Rows:
    """Rows of one distribution, of which a third lie outside the training data."""
    rng = np.random.default_rng(5)
    x = np.where(rng.random(count) < 0.35, rng.uniform(8.0, 60.0, count), rng.normal(size=count))
    answers = target_of(place.task, x, 6)
    assert run.table is not None
    (rows,) = NewTable.open(write(folder / "rows.csv", x, answers), run.table)
    assert rows.targets is not None
    far = int((rows.distances > 0.0).sum())
    assert 10 < far < 30
    if place.task == "regression":
        standard = run.table.target.scaling.standardised(torch.from_numpy(rows.targets))
        targets = standard.float().unsqueeze(-1)
        return Rows(rows.inputs, targets, rows.distances, rows.targets.tolist())
    return Rows(rows.inputs, torch.from_numpy(rows.targets).long(), rows.distances, [*answers])


def held_without_each(place: Place, folder: Path, level: float) -> tuple[int, int]:
    """Predict each row after a calibration on all others.

    Returns:
        How many rows are held, and how many must be: of N rows those whose score is among the
        ceil(N level) smallest, and of classes also those whose most probable class is right.
    """
    run = Run.open(place.run)
    rows, data = exchangeable_rows(place, run, folder), run.load_data()
    predictions = Predictions.of(run, run.load_module(), level=level, samples=5)
    held = likeliest = 0
    for i, answer in enumerate(rows.answers):
        rest = torch.arange(len(rows.answers)) != i
        inputs, targets, distances = (part[rest] for part in rows[:3])
        predictions.calibrate(
            dataclasses.replace(
                data, test_inputs=inputs, test_targets=targets, test_distances=distances
            )
        )
        (cells,) = predictions.rows(rows.inputs[i : i + 1], None, rows.distances[i : i + 1])
        row = dict(zip(predictions.header, cells, strict=True))
        if place.task == "regression":
            percent = f"{100 * level:g}"
            held += float(row[f"lower_{percent}"]) <= answer <= float(row[f"upper_{percent}"])
        else:
            held += answer in json.loads(row["set"])
            likeliest += answer == row["prediction"]
    return held, max(likeliest, math.ceil(round(len(rows.answers) * level, 9)))


@pytest.mark.parametrize("level", LEVELS)
def test_coverage_is_exact_with_rows_outside(place: Place, tmp_path: Path, level: float) -> None:
    """The identity behind the guarantee: without each row in turn, exactly k of N are held."""
    held, expected = held_without_each(place, tmp_path, level)
    assert held == expected


def not_widened(self: Predictions, data: Any) -> None:
    calibrate(self, dataclasses.replace(data, test_distances=torch.zeros(len(data.test_inputs))))


def not_counting_itself(self: Conformal, level: float) -> int:
    return math.ceil(self.num_scores * Fraction(str(level)))


calibrate = Predictions.calibrate


@pytest.mark.parametrize("fault", ["calibrated without widening", "rank without + 1"])
def test_that_identity_notices_faults(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "rank without + 1":
        monkeypatch.setattr(Conformal, "_rank", not_counting_itself)
    else:
        monkeypatch.setattr(Predictions, "calibrate", not_widened)
    found = [held_without_each(place, tmp_path, level) for level in LEVELS]
    assert any(held != expected for held, expected in found)


# ----------------------------------------------------------------------------------------- storing


def stored_with_texts(place: Place, folder: Path) -> tuple[TableData, TableSchema]:
    """The data of a run, stored in a folder as if the rows had texts."""
    run = Run.open(place.run)
    data, schema = run.load_data(), run.table
    assert isinstance(data, TableData)
    assert schema is not None
    texts = tuple("text" for _ in data.test_inputs)
    store_table(folder, dataclasses.replace(data, test_texts=texts), schema)
    return data, schema


def test_distances_are_stored_with_a_table_of_texts(place: Place, tmp_path: Path) -> None:
    data, schema = stored_with_texts(place, tmp_path)
    same = stored_table(tmp_path, place.held_out, schema)
    assert same is not None
    assert same.test_distances.equal(data.test_distances)
    assert same.train_distances.equal(data.train_distances)
    assert same.marginal == data.marginal


def test_a_stored_table_without_distances_is_read_again(place: Place, tmp_path: Path) -> None:
    """Runs of earlier versions store none; theirs are needed only if predictions are widened."""
    _, schema = stored_with_texts(place, tmp_path)
    path = tmp_path / "table.safetensors"
    tensors, meta = read_tensors(path)
    write_tensors(path, {k: t for k, t in tensors.items() if "distances" not in k}, meta)
    assert stored_table(tmp_path, place.held_out, schema) is None
    early = dataclasses.replace(schema, target=dataclasses.replace(schema.target, marginal=()))
    found = stored_table(tmp_path, place.held_out, early)
    assert found is not None
    assert not found.test_distances.any()
