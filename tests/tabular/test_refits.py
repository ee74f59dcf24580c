"""Further calls of fit and partial_fit: what cannot be trained leaves the trained model alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from bayesify.tabular.estimator import BayesianMLP
from bayesify.tabular.recipe import TableRecipe
from bayesify.tabular.weights import Array

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")

QUICK: dict[str, Any] = {
    "hidden_layer_sizes": (4,),
    "steps": 20,
    "num_samples": 20,
    "random_state": 0,
}
X = np.random.default_rng(0).normal(1000.0, 50.0, (80, 1))
SIZES = ["small", "medium", "large"]
SIZE = np.array(SIZES)[np.digitize(X[:, 0], [980.0, 1020.0])]


def regressor() -> BayesianMLPRegressor:
    return BayesianMLPRegressor(**QUICK).fit(X, X[:, 0])


def classifier() -> BayesianMLPClassifier:
    return BayesianMLPClassifier(**QUICK).fit(X, SIZE)


def predictions(model: BayesianMLP) -> Array:
    return model.predictive(X).mean.numpy()


@pytest.mark.parametrize(
    ("make", "settings", "rows", "y", "reason"),
    [
        (regressor, {"num_samples": 0}, X, X[:, 0], "num_samples must be"),
        (regressor, {}, X[:, [0, 0]], np.full(80, np.nan), "NaN"),
        (regressor, {"validation_fraction": 2.0}, X - 1000.0, X[:, 0], "validation_fraction"),
        (classifier, {"class_weight": {"huge": 2.0}}, X, SIZE, "huge"),
        (classifier, {"steps": 0}, X, SIZE == "small", "steps must be"),
    ],
)
def test_a_fit_that_fails_leaves_the_trained_model(
    make: Callable[[], BayesianMLP], settings: dict[str, Any], rows: Array, y: Array, reason: str
) -> None:
    model = make()
    before, found, usual = predictions(model), dict(vars(model)), model.get_params()
    model.set_params(**settings)
    for train in (model.fit, model.partial_fit):
        with pytest.raises(ValueError, match=reason):
            train(rows, y)
    model.set_params(**usual)
    assert vars(model).keys() == found.keys()
    np.testing.assert_array_equal(predictions(model), before)


def test_an_interrupted_fit_leaves_the_trained_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = regressor()
    before, whole = predictions(model), TableRecipe.fit

    def interrupted(*args: Any, **options: Any) -> None:
        whole(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(TableRecipe, "fit", interrupted)
    for train in (model.fit, model.partial_fit):
        with pytest.raises(KeyboardInterrupt):
            train(X, -X[:, 0])
        np.testing.assert_array_equal(predictions(model), before)
    monkeypatch.undo()
    once = predictions(regressor().partial_fit(X, -X[:, 0]))
    np.testing.assert_array_equal(predictions(model.partial_fit(X, -X[:, 0])), once)
    monkeypatch.setattr(TableRecipe, "fit", interrupted)
    untrained = BayesianMLPRegressor(**QUICK)
    with pytest.raises(KeyboardInterrupt):
        untrained.fit(X, X[:, 0])
    assert not [name for name in vars(untrained) if name.endswith("_")]


@pytest.mark.parametrize(
    ("first", "later", "was"),
    [
        (SIZES, SIZES[::-1], r"for \['small', 'medium', 'large'\], got \['large'"),
        (SIZES, False, r"for \['small', 'medium', 'large'\], got False"),
        (False, SIZES, "without an order, got"),
    ],
)
def test_the_order_of_classes_stays_as_in_training(
    first: Any, later: Any, was: str, tmp_path: Path
) -> None:
    model = BayesianMLPClassifier(ordered=first, **QUICK).partial_fit(X, SIZE, classes=SIZES)
    before = predictions(model)
    model.set_params(ordered=later)
    calls: list[Callable[[], object]] = [
        lambda: model.partial_fit(X[:5], SIZE[:5]),
        lambda: model.save(tmp_path / "model.safetensors"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"ordered must be as in training, which was {was}"):
            call()
    assert not list(tmp_path.iterdir())
    np.testing.assert_array_equal(predictions(model), before)
    model.set_params(ordered=first).save(tmp_path / "model.safetensors")
    loaded = BayesianMLPClassifier.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(predictions(loaded), before)


@pytest.mark.parametrize(
    "changed", [{"hidden_layer_sizes": (7,)}, {"posterior": "low-rank"}, {"noise": "learned"}]
)
def test_partial_fit_keeps_the_network(changed: dict[str, Any]) -> None:
    model = regressor()
    before, [(name, value)] = predictions(model), changed.items()
    own = model.get_params()[name]
    model.set_params(**changed)
    with pytest.raises(ValueError, match=f"{name} must be .*, as in training, got .*call fit"):
        model.partial_fit(X, X[:, 0])
    np.testing.assert_array_equal(predictions(model), before)
    model.set_params(**{name: own}).partial_fit(X, X[:, 0])
    model.set_params(**changed).fit(X, X[:, 0])
    assert model.get_params()[name] == value


def test_partial_fit_follows_changed_settings_of_training() -> None:
    model = regressor()
    steps = model.n_iter_
    model.set_params(steps=100, batch_size=7, learning_rate_init=0.004).partial_fit(X, X[:, 0])
    recipe = model.recipe_
    assert model.n_iter_ >= steps + 100
    assert (recipe.steps, recipe.batch_size, recipe.lr) == (100, 7, 0.004)


def test_rows_at_the_limit_of_a_censored_target_train_a_model_further() -> None:
    settings = {**QUICK, "steps": 100}
    model = BayesianMLPRegressor(likelihood="censored", censored_above=1000.0, **settings)
    with pytest.raises(ValueError, match="y must have numbers between the limits"):
        model.partial_fit(X, np.full(len(X), 1000.0))
    model.partial_fit(X, X[:, 0].clip(max=1000.0))
    for _ in range(3):
        model.partial_fit(np.full((50, 1), 1100.0), np.full(50, 1000.0))
    assert model.n_iter_ == 400
    assert model.predict([[1100.0]]) > 1000.0


def test_conformal_intervals_of_a_censored_target_take_numbers_beyond_the_limit() -> None:
    x = np.random.default_rng(1).uniform(-2.0, 2.0, (600, 1))
    y = 2.0 * x[:, 0] + np.random.default_rng(2).normal(0.0, 0.5, 600)
    model = BayesianMLPRegressor(likelihood="censored", censored_above=0.0, **QUICK)
    model.fit(x[:200], y[:200])
    found = [
        model.calibrate(x[200:], each[200:]).predict_interval(x, 0.9, "conformal")
        for each in (y, y.clip(max=0.0))
    ]
    np.testing.assert_array_equal(found[0], found[1])
