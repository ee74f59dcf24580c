"""Predictions of the estimators: labels, intervals, weights, rows in parts; clear errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris, make_friedman1
from sklearn.exceptions import DataConversionWarning, NotFittedError

from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")

X3 = np.array([[0.0, 1.0], [1.0, 0.0], [2.0, 5.0]])


def iris() -> tuple[Any, Any]:
    return load_iris(return_X_y=True)


@pytest.mark.parametrize(
    "labels",
    [
        np.array(["setosa", "versicolor", "virginica"]),
        np.array(["b", "a", "c"], dtype=object),
        np.array([-7, 10**12, 3]),
        np.array([0.0, 2.0, 1.0]),
        np.array([False, True, True]),
    ],
    ids=["text", "objects", "integers", "floats", "booleans"],
)
def test_labels_of_any_kind_come_back(labels: Any) -> None:
    x, y = iris()
    model = BayesianMLPClassifier(steps=40, random_state=0).fit(x, labels[y])
    found = model.predict(x)
    assert found.dtype == model.classes_.dtype
    np.testing.assert_array_equal(model.classes_, np.unique(labels))
    assert (found == labels[y]).mean() > 0.85
    probabilities = model.predict_proba(x)
    assert probabilities.shape == (150, len(np.unique(labels)))
    assert (probabilities <= 1.0).all()
    np.testing.assert_allclose(probabilities.sum(1), 1.0)
    np.testing.assert_array_equal(model.classes_[probabilities.argmax(1)], found)


def test_numbers_of_samples_may_be_of_numpy() -> None:
    """As in the grid of a search over ``np.arange``."""
    x, y = iris()
    for kind in (BayesianMLPClassifier, BayesianMLPRegressor):
        found, expected = (
            kind(steps=5, num_samples=number, random_state=0).fit(x, y).predict(x)
            for number in (np.int64(11), 11)
        )
        np.testing.assert_array_equal(found, expected)


def test_pandas_in_and_names_kept() -> None:
    data = load_diabetes(as_frame=True)
    model = BayesianMLPRegressor(steps=5, random_state=0).fit(data.data, data.target)
    assert list(model.feature_names_in_) == list(data.data.columns)
    assert model.n_features_in_ == 10
    plain = BayesianMLPRegressor(steps=5, random_state=0)
    plain.fit(data.data.to_numpy(), data.target.to_numpy())
    np.testing.assert_array_equal(model.predict(data.data), plain.predict(data.data.to_numpy()))
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(data.data[list(data.data.columns)[::-1]])
    labels = pd.Series(pd.Categorical(np.where(data.target > 140, "ill", "well")))
    classifier = BayesianMLPClassifier(steps=5).fit(data.data, labels)
    assert set(classifier.predict(data.data)) <= {"ill", "well"}


def test_the_uncertainty_is_split_in_the_units_of_y() -> None:
    x, y = load_diabetes(return_X_y=True)
    model = BayesianMLPRegressor(steps=100, random_state=0).fit(x, y)
    p = model.predictive(x)
    mean, std = model.predict(x, return_std=True)
    assert p.mean.shape == p.total.shape == (442,)
    np.testing.assert_allclose(p.mean, mean)
    np.testing.assert_allclose(p.total, p.aleatoric + p.epistemic, rtol=1e-12)
    np.testing.assert_allclose(p.total.sqrt(), std)
    assert 40.0 < float(p.aleatoric.mean().sqrt()) < 65.0  # the residuals of a linear fit: 54
    lower, upper = model.predict_interval(x, level=0.8)
    np.testing.assert_allclose(lower, p.quantile(0.1))
    np.testing.assert_allclose(upper, p.quantile(0.9))
    assert 0.75 < np.mean((lower < y) & (y < upper)) < 0.9
    far = model.predictive(x + 100.0 * x.std(0))
    assert far.epistemic.min() > 10.0 * p.epistemic.mean()


def test_the_uncertainty_of_classes_is_split() -> None:
    x, y = iris()
    p = BayesianMLPClassifier(steps=20, random_state=0).fit(x, y).predictive(x)
    assert p.epistemic.shape == (150,)
    assert (p.epistemic > 0.0).all()
    assert (p.total <= np.log(3.0) + 1e-12).all()


def test_units_of_the_targets_do_not_matter() -> None:
    x, y = load_diabetes(return_X_y=True)
    one = BayesianMLPRegressor(steps=30, random_state=0).fit(x, y)
    other = BayesianMLPRegressor(steps=30, random_state=0).fit(1e6 * x - 3.0, 1e9 * y + 1e12)
    mean, std = one.predict(x, return_std=True)
    scaled_mean, scaled_std = other.predict(1e6 * x - 3.0, return_std=True)
    np.testing.assert_allclose((scaled_mean - 1e12) / 1e9, mean, rtol=1e-4)
    np.testing.assert_allclose(scaled_std / 1e9, std, rtol=1e-4)


def test_a_scale_whose_square_overflows_has_a_standard_deviation() -> None:
    x, y = np.linspace(-1.0, 1.0, 20)[:, None], np.linspace(-1.0, 1.0, 20)
    one = BayesianMLPRegressor(steps=20, hidden_layer_sizes=np.array([5]), random_state=0)
    expected = one.fit(x, y).predict(x, return_std=True)[1]
    for size in (1e200, 1e-200):
        std = one.fit(x, size * y).predict(x, return_std=True)[1]
        np.testing.assert_allclose(std, size * expected, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_few_rows_are_not_predicted_worse_than_without_their_columns(num_rows: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows + 300, 5))
    y = 2.0 * x[:, 0] + 0.1 * rng.normal(size=len(x))
    model = BayesianMLPRegressor(steps=200, random_state=0).fit(x[:num_rows], y[:num_rows])
    rest = torch.from_numpy(y[num_rows:])
    nll = -model.predictive(x[num_rows:]).log_prob(rest).mean().item()
    known = torch.distributions.Normal(y[:num_rows].mean(), y[:num_rows].std())
    assert nll < -known.log_prob(rest).mean().item() + 0.25


def test_an_unknown_noise_is_an_error() -> None:
    for noise in ("gamma", None):
        with pytest.raises(ValueError, match='noise must be "learned" or "input-dependent"'):
            BayesianMLPRegressor(noise=noise).fit(X3, [0.0, 1.0, 0.0])  # type: ignore[arg-type]


def test_input_dependent_noise_is_found() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-2.0, 2.0, (400, 1))
    y = x[:, 0] + np.where(x[:, 0] > 0.0, 1.0, 0.1) * rng.standard_normal(400)
    places = np.array([[-1.0], [1.0]])
    low, high = (
        BayesianMLPRegressor(steps=500, random_state=0)
        .fit(x, y)
        .predict(places, return_std=True)[1]
    )
    assert low < 0.35 < 0.7 < high < 1.5
    same = BayesianMLPRegressor(noise="learned", random_state=0, steps=20).fit(x, y)
    assert np.ptp(same.predictive(places).aleatoric.sqrt().numpy()) < 1e-12


def test_several_targets_at_once() -> None:
    x, y = make_friedman1(200, noise=0.1, random_state=0)
    both = np.column_stack([y, 1000.0 * x[:, 3]])
    model = BayesianMLPRegressor(steps=100, random_state=0).fit(x, both)
    mean, std = model.predict(x, return_std=True)
    lower, upper = model.predict_interval(x)
    assert mean.shape == std.shape == lower.shape == upper.shape == (200, 2)
    assert model.score(x, both) > 0.7
    assert model.predictive(x).log_prob(torch.as_tensor(both)).shape == (200,)
    column = BayesianMLPRegressor(steps=5).fit(x, y[:, None])
    assert column.predict(x).shape == (200, 1)


def test_predictions_in_batches_equal_those_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((25_000, 1))
    model = BayesianMLPRegressor(hidden_layer_sizes=(1,), steps=5, num_samples=100)
    model.fit(x[:100], x[:100, 0])
    mean, std = model.predict(x, return_std=True)  # 20,000 rows of 100 samples at a time
    p = model.predictive(x)
    np.testing.assert_allclose(mean, p.mean, rtol=1e-9)
    np.testing.assert_allclose(std, p.total.sqrt(), rtol=1e-9)


def test_early_stopping_keeps_the_best_and_stops() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((60, 20)), rng.standard_normal(60)  # nothing to learn
    model = BayesianMLPRegressor(
        steps=1000, early_stopping=True, n_iter_no_change=2, random_state=0
    ).fit(x, y)
    full = BayesianMLPRegressor(steps=5, random_state=0).fit(x, y)
    assert full.n_iter_ == 5
    assert model.n_iter_ < model.recipe_.steps == 1000
    warm = model.recipe_.kl_warmup * model.recipe_.steps
    held_out = [row["validation_nll"] for row in model.history_ if 50 * row["epoch"] >= warm]
    assert int(np.argmin(held_out)) == len(held_out) - 3
    assert all(row["validation_nll"] is None for row in full.history_)


def test_early_stopping_without_rows_to_hold_out_is_an_error() -> None:
    model = BayesianMLPRegressor(early_stopping=True)
    with pytest.raises(ValueError, match="must hold out some rows and leave some"):
        model.fit(X3, [1.0, 2.0, 3.0])


def test_rows_in_parts_teach_as_much_as_all_at_once() -> None:
    x, y = iris()
    order = np.random.default_rng(0).permutation(150)
    x, y = x[order], y[order]
    model = BayesianMLPClassifier(steps=50, random_state=0)
    accuracies, spreads, seeds = [], [], set()
    for part in np.array_split(np.arange(100), 3):
        model.partial_fit(x[part], y[part], classes=[0, 1, 2])
        accuracies.append(model.score(x[100:], y[100:]))
        spreads.append(float(model.predictive(x[100:]).total.mean()))
        seeds.add(model.bnn_.seed)
    assert len(seeds) == 3  # errors of parts with the same noise would add up
    assert accuracies[-1] > 0.9
    assert spreads[-1] < spreads[0]
    assert model.n_iter_ == 150


@pytest.mark.parametrize(
    "posterior",
    [
        "mean-field",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("low-rank", "matrix")),
    ],
)
def test_one_more_row_undoes_nothing(tmp_path: Path, posterior: Any) -> None:
    """Noise and relevance of the columns have no posterior, and must not forget earlier rows."""
    random = np.random.default_rng(1)
    x = random.normal(size=(700, 3))
    y = 2.0 * x[:, 0] + random.normal(size=700)
    model = BayesianMLPRegressor(
        (10,), steps=200, noise="learned", posterior=posterior, random_state=0
    )
    model.partial_fit(x[:200], y[:200])
    model.save(tmp_path / "model")
    again = BayesianMLPRegressor.load(tmp_path / "model")
    errors, held = [], []
    for row in (199, 200, 201):
        if row >= 200:
            for each in (model, again):
                each.partial_fit(x[row : row + 1], y[row : row + 1])
        assert np.array_equal(model.predict(x), again.predict(x))
        mean, std = model.predict(x[203:], return_std=True)
        errors.append(float(np.sqrt(np.mean((mean - y[203:]) ** 2))))
        held.append(float(np.mean(np.abs(y[203:] - mean) < 1.645 * std)))
    assert max(errors) < 1.05 * errors[0]
    assert min(held) > held[0] - 0.03


@pytest.mark.parametrize(
    "y",
    [
        ["low", "high", "low"],
        pd.Series(["low", "high", "low"], dtype="category"),
        np.array(["low", "1", "2"], dtype=object),
    ],
)
def test_a_regressor_refuses_classes_by_their_name(y: Any) -> None:
    model = BayesianMLPRegressor(steps=2)
    for train in (model.fit, model.partial_fit):
        with pytest.raises(ValueError, match="y must hold numbers, got 'low'; use BayesianMLPC"):
            train(X3, y)


def test_a_regressor_refuses_dates_and_reads_numbers_in_texts() -> None:
    with pytest.raises(ValueError, match="y must hold numbers, got '2020-01-01"):
        BayesianMLPRegressor(steps=2).fit(X3, pd.date_range("2020-01-01", periods=3))
    BayesianMLPRegressor(steps=2).fit(X3, ["1.5", "2", "1e3"])


def test_partial_fit_raises_clear_errors() -> None:
    model = BayesianMLPClassifier(steps=2)
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        model.partial_fit(X3, [0, 1, 0])
    with pytest.raises(ValueError, match="y must hold only the classes"):
        model.partial_fit(X3, [0, 1, 2], classes=[0, 1])
    model.partial_fit(X3, [0, 1, 0], classes=[0, 1])
    with pytest.raises(ValueError, match="classes must be those of the first call"):
        model.partial_fit(X3, [0, 1, 0], classes=[0, 1, 2])
    regressor = BayesianMLPRegressor(steps=2).partial_fit(X3, X3)
    with pytest.raises(ValueError, match="of the first call, got shape"):
        regressor.partial_fit(X3, X3[:, 0])


@pytest.mark.slow
def test_partial_fit_takes_the_steps_of_its_own_rows() -> None:
    rng = np.random.default_rng(0)
    many, few = (rng.normal(size=(n, 1)) for n in (6000, 40))
    model = BayesianMLPClassifier((2,), batch_size=100, num_samples=2, random_state=0)
    model.partial_fit(many, many[:, 0] > 0.0, classes=[False, True])
    before = model.n_iter_
    assert before == 20 * 60
    model.partial_fit(few, few[:, 0] > 0.0)
    alone = clone(model).fit(few, few[:, 0] > 0.0)
    assert model.n_iter_ - before == alone.n_iter_ < before


@pytest.mark.parametrize("kind", [BayesianMLPClassifier, BayesianMLPRegressor])
def test_one_row_and_one_value_are_enough(kind: Any) -> None:
    for x in (X3[:1], np.ones((5, 2))):
        model = kind(steps=20, random_state=0).fit(x, np.full(len(x), 3))
        np.testing.assert_allclose(model.predict(X3), 3.0, atol=2.0)


@pytest.mark.parametrize("kind", [BayesianMLPClassifier, BayesianMLPRegressor])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_samples": 0}, "num_samples must be an integer of at least 1, got 0"),
        ({"num_samples": 2.5}, "num_samples must be an integer of at least 1"),
        ({"validation_fraction": 1.0}, "validation_fraction must lie strictly between 0 and 1"),
        ({"hidden_layer_sizes": ()}, "hidden_layer_sizes must be positive numbers"),
        ({"hidden_layer_sizes": "50"}, "hidden_layer_sizes must be positive numbers"),
        ({"hidden_layer_sizes": (5.5,)}, "hidden_layer_sizes must be positive numbers"),
        ({"steps": 10.5}, "steps must be an integer of at least 1"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1"),
        ({"validation_fraction": "a"}, "validation_fraction must lie strictly between 0 and 1"),
        ({"learning_rate_init": "a"}, "learning_rate_init must be positive and finite"),
        ({"steps": 0}, "steps must be an integer of at least 1"),
        ({"learning_rate_init": -1.0}, "learning_rate_init must be positive and finite"),
    ],
)
def test_wrong_settings(kind: Any, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings).fit(X3, [0, 1, 0])


@pytest.mark.parametrize("kind", [BayesianMLPClassifier, BayesianMLPRegressor])
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -1.0, 1.0], "finite and at least 0"),
        ([1.0, np.nan, 1.0], "finite and at least 0"),
        ([0.0, 0.0, 0.0], "positive for at least one row"),
        ([1.0, 1.0], r"expected \(3,\)"),
        ([[1.0], [1.0], [1.0]], "1D array or scalar"),
    ],
)
def test_wrong_weights(kind: Any, weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(steps=2).fit(X3, [0, 1, 0], sample_weight=weights)


@pytest.mark.parametrize("kind", [BayesianMLPClassifier, BayesianMLPRegressor])
def test_wrong_tables(kind: Any) -> None:
    model = kind(steps=2)
    with pytest.raises(NotFittedError):
        model.predict(X3)
    with pytest.raises(NotFittedError):
        model.predictive(X3)
    with pytest.raises(TypeError, match=r"(?i)sparse"):
        model.fit(sparse.csr_matrix(X3), [0, 1, 0])
    bad = X3.copy()
    bad[1, 1] = np.inf
    with pytest.raises(ValueError, match="infinity"):
        model.fit(bad, [0, 1, 0])
    with pytest.raises(ValueError, match=r"infinity in column 'b'"):
        model.fit(pd.DataFrame(bad, columns=["a", "b"]), [0, 1, 0])
    model.fit(X3, [0, 1, 0])
    with pytest.raises(ValueError, match="infinity"):
        model.predict(bad)
    with pytest.raises(ValueError, match="features"):
        model.predict(X3[:, :1])


def test_wrong_targets() -> None:
    with pytest.raises(ValueError, match="Unknown label type"):
        BayesianMLPClassifier(steps=2).fit(X3, [0.1, 0.2, 0.3])
    with pytest.warns(DataConversionWarning):
        BayesianMLPClassifier(steps=2).fit(X3, [[0], [1], [0]])
    with pytest.raises(ValueError, match="noise must be"):
        BayesianMLPRegressor(noise="loud", steps=2).fit(X3, [0.0, 1.0, 2.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="level must lie strictly"):
        BayesianMLPRegressor(steps=2).fit(X3, [0.0, 1.0, 2.0]).predict_interval(X3, level=1.0)
