"""Posteriors whose weights depend on each other, on the command line and in the estimators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.app.cli.test_cli import as_json, bayesify
from tests.app.cli.test_errors import check_refused

from bayesify import LowRankGaussian, MatrixGaussian, open_run
from bayesify.app.runs import Run
from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor

QUICK = ("--epochs", "2", "--passes", "2", "--hidden", "4", "--test-samples", "3")
FAMILIES = {"low-rank": LowRankGaussian(), "matrix": MatrixGaussian()}
each_name = pytest.mark.parametrize("name", FAMILIES)

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    x = np.random.default_rng(0).normal(size=(60, 2))
    frame = pd.DataFrame(x, columns=["a", "b"]).assign(y=x[:, 0] - x[:, 1] ** 2)
    frame.to_csv(tmp_path / "table.csv", index=False)
    return tmp_path / "table.csv"


@each_name
def test_a_run_with_it_goes_through_every_command(name: str, table: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train = ("train", table, "--target", "y", "--posterior", name, "--out", run, *QUICK)
    as_json(*train)
    again = as_json(*train, "--resume")
    assert Run.open(run).load_module().posterior.family == FAMILIES[name]
    assert as_json("evaluate", run)["test"] == again["test"]
    as_json("prune", run, "--fractions", "0.5", "--out", tmp_path / "small.safetensors")
    predicted = open_run(run).predict(table)
    assert np.isfinite(predicted["std"]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--posterior", "full"), "posterior must be one of mean-field, low-rank, matrix"),
        (("--posterior", "matrix", "--estimator", "flipout"), "antithetic or local, got flipout"),
        (("--posterior", "low-rank", "--backend", "compiled"), "needs --posterior mean-field"),
        (("--posterior", "low-rank", "--baseline", "sgd"), "posterior"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: tuple[str, ...], message: str, table: Path, tmp_path: Path
) -> None:
    said = bayesify("train", table, "--target", "y", "--out", tmp_path / "run", *QUICK, *options)
    check_refused(said, message)


@each_name
@pytest.mark.parametrize("kind", [BayesianMLPRegressor, BayesianMLPClassifier])
@pytest.mark.filterwarnings("ignore:.*:sklearn.exceptions.ConvergenceWarning")
def test_estimators_take_its_name(name: Any, kind: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 2))
    y = x[:, 0] > 0.0 if kind is BayesianMLPClassifier else x[:, 0]
    model = kind((4,), posterior=name, steps=20, random_state=0).fit(x, y)
    assert model.bnn_.posterior.family == FAMILIES[name]
    model.save(tmp_path / "model")
    again = kind.load(tmp_path / "model")
    assert np.array_equal(again.predict(x), model.predict(x))
    assert torch.equal(again.bnn_.posterior.std, model.bnn_.posterior.std)
    with pytest.raises(ValueError, match="must be one of 'mean-field', 'low-rank', 'matrix'"):
        kind(posterior="full").fit(x, y)
