"""The smallest tables: one row, one class, one column, one value of the target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.app.cli.test_cli import bayesify
from tests.app.cli.test_errors import check_refused

from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
SETTINGS: dict[str, Any] = {"steps": 20, "num_samples": 10, "random_state": 0}
X = np.random.default_rng(0).normal(size=(30, 2))


@pytest.mark.parametrize("rows", [1, 2, 30])
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("target", [0.0, 1e9])
def test_a_target_of_one_value_is_predicted(rows: int, columns: int, target: float) -> None:
    x, y = X[:rows, :columns], np.full(rows, target)
    model = BayesianMLPRegressor((4,), **SETTINGS).fit(x, y)
    mean, std = model.predict(x, return_std=True)
    lower, upper = model.predict_interval(x)
    # A spread of 0 has no unit: it counts as 1.
    assert (abs(mean - target) < 1.0).all()
    assert ((std > 0.0) & (std < 3.0)).all()
    assert ((lower < target) & (target < upper)).all()


@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("weight", [None, "balanced"])
def test_one_class_is_certain(rows: int, weight: Any) -> None:
    model = BayesianMLPClassifier((4,), class_weight=weight, **SETTINGS)
    model.fit(X[:rows], np.full(rows, "a"))
    assert model.predict_proba(X).tolist() == [[1.0]] * 30
    assert model.predict_set(X).all()
    assert not model.predictive(X[:rows]).total.any()


def test_too_few_rows_to_hold_some_out_or_to_calibrate() -> None:
    early = BayesianMLPRegressor((4,), early_stopping=True, **SETTINGS)
    with pytest.raises(ValueError, match="early stopping must hold out some rows and leave some"):
        early.fit(X[:1], X[:1, 0])
    model = BayesianMLPRegressor((4,), **SETTINGS).fit(X[:1], X[:1, 0])
    with pytest.raises(ValueError, match="from 2 to the number of rows, 1, got 2"):
        model.calibrate(X[:1], X[:1, 0], cv=2)
    model.calibrate(X[:1], X[:1, 0])
    with pytest.raises(ValueError, match="needs at least 9 calibration examples, got 1"):
        model.predict_interval(X, 0.9, method="conformal")


REFUSED = {
    "one row": ("x,y\n1.5,2\n", "has one value only, '2' (rows: 1), so there is nothing to learn"),
    "one class": ("x,y\n" + "1.5,a\n0.3,a\n" * 9, "has one value only, 'a'"),
    "one number": ("x,y\n" + "1.5,3.5\n0.3,3.5\n" * 9, "has one value only, '3.5'"),
    "three rows": ("x,y\n1.5,2\n0.3,4\n2.5,7\n", "must have at least 4 rows with a target"),
    "one value": ("x,y\n" + "1,2\n1,5\n1,4\n" * 9, "has no column to predict 'y' from"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_table_that_teaches_nothing(name: str, tmp_path: Any) -> None:
    text, message = REFUSED[name]
    (tmp_path / "d.csv").write_text(text)
    said = bayesify("train", tmp_path / "d.csv", "--target", "y", "--out", tmp_path / "run")
    check_refused(said, message)
    assert not (tmp_path / "run").exists()
