"""scikit-learn's own checks of both estimators, all of them, with no failure expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.utils.estimator_checks import (
    check_sample_weight_equivalence_on_dense_data,
    parametrize_with_checks,
)

from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from bayesify.tabular.weights import DistinctRows

# No check depends on the number of steps. So few end before the standard deviations converge; some
# checks give weights that sum to many more than the rows; one is for array libraries that are not
# installed.
pytestmark = [
    pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore::bayesify.tabular.TableWarning"),
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning"),
]


@parametrize_with_checks(
    [BayesianMLPRegressor(steps=15, num_samples=20)], expected_failed_checks=lambda _: {}
)
def test_scikit_learn_checks_of_the_regressor(estimator: Any, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [BayesianMLPClassifier(steps=15, num_samples=20)], expected_failed_checks=lambda _: {}
)
def test_scikit_learn_checks_of_the_classifier(estimator: Any, check: Any) -> None:
    check(estimator)


def test_a_check_catches_a_planted_fault() -> None:
    with pytest.raises(AssertionError):
        check_sample_weight_equivalence_on_dense_data("ignorant", Ignorant())


class Ignorant(BayesianMLPClassifier):
    """A planted fault: it ignores the size of weights, unless they are 0."""

    def __init__(self, *, steps: int = 2, random_state: Any = None) -> None:
        super().__init__(steps=steps, random_state=random_state)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:  # noqa: N803
        flat = None if sample_weight is None else np.sign(np.asarray(sample_weight, dtype=float))
        return super().fit(X, y, flat)


@pytest.mark.parametrize("kind", [BayesianMLPClassifier, BayesianMLPRegressor])
def test_a_row_of_weight_2_is_the_row_twice_with_minibatches_too(kind: Any) -> None:
    check_sample_weight_equivalence_on_dense_data("small batches", kind(steps=20, batch_size=4))


@pytest.mark.parametrize("kind", [BayesianMLPClassifier, BayesianMLPRegressor])
def test_a_row_of_weight_2_is_the_row_twice_with_early_stopping_too(kind: Any) -> None:
    model = kind(steps=100, early_stopping=True, validation_fraction=0.3, n_iter_no_change=1)
    check_sample_weight_equivalence_on_dense_data("early stopping", model)


def test_rows_do_not_depend_on_order_repetition_or_the_sign_of_0() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(-1, 2, (40, 2)) * 1.0, rng.integers(0, 2, (40, 1)) * 1.0
    counts = rng.integers(0, 3, 40)
    order = rng.permutation(40)
    one = DistinctRows.of(x, y, counts * 1.0)
    other = DistinctRows.of(
        np.where(x == 0.0, -0.0, x)[order].repeat(counts[order], 0),
        y[order].repeat(counts[order], 0),
        np.ones(counts.sum()),
    )
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)
    assert one.weights.sum() == counts.sum()
    table = np.hstack([one.inputs, one.targets]).tolist()
    assert table == sorted(table)
    assert len(one.inputs) == len(np.unique(np.hstack([x, y])[counts > 0], axis=0))


def test_sums_of_weights_do_not_depend_on_the_order_of_rows() -> None:
    rng = np.random.default_rng(0)
    weights = rng.exponential(size=100)
    order = rng.permutation(100)
    x, y = np.zeros((100, 1)), np.zeros((100, 1))
    assert DistinctRows.of(x, y, weights).weights == DistinctRows.of(x, y, weights[order]).weights


@pytest.mark.parametrize("kind", ["object", "string"])
def test_labels_that_are_missing_are_counted(kind: str) -> None:
    x = np.random.default_rng(0).normal(size=(60, 2))
    labels = pd.Series(np.where(x[:, 0] > 0, "b", "a")).astype(kind)
    labels[x[:, 0] > 1.0] = None
    count = int((x[:, 0] > 1.0).sum())
    with pytest.raises(ValueError, match=f"got {count} of 60 rows without one; leave these rows"):
        BayesianMLPClassifier(steps=2).fit(x, labels)
