"""Both estimators with scikit-learn's tools."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import joblib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import skops.io
import torch
from sklearn.base import clone
from sklearn.calibration import CalibrationDisplay
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")

CASES = [
    (BayesianMLPClassifier(steps=20, random_state=0), load_iris, 0.8),
    (BayesianMLPRegressor(steps=20, random_state=0), load_diabetes, 0.3),
]
each_estimator = pytest.mark.parametrize(("model", "load", "least"), CASES, ids=["class", "number"])


@pytest.mark.slow
@each_estimator
def test_pipeline_and_grid_search(model: Any, load: Any, least: float) -> None:
    x, y = load(return_X_y=True)
    pipeline = Pipeline([("scale", StandardScaler()), ("model", model)])
    grid = {"model__hidden_layer_sizes": [(5,)], "model__steps": [1, 50]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(x, y)
    assert search.best_params_["model__steps"] == 50
    assert search.best_score_ > least
    best = search.best_estimator_["model"]
    assert best.recipe_.hidden == (5,)
    # The estimator scales by itself: the scaler before it changes next to nothing.
    alone = clone(best).fit(x, y)
    np.testing.assert_allclose(search.predict(x[:5]), alone.predict(x[:5]), rtol=1e-3)


def test_a_pipeline_hands_return_std_through() -> None:
    x, y = load_diabetes(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), BayesianMLPRegressor(steps=5)).fit(x, y)
    mean, std = pipeline.predict(x[:5], return_std=True)
    assert mean.shape == std.shape == (5,)


@each_estimator
def test_clone_and_joblib(model: Any, load: Any, least: float) -> None:
    x, y = load(return_X_y=True)
    fitted = clone(model).fit(x, y)
    buffer = io.BytesIO()
    joblib.dump(fitted, buffer)
    buffer.seek(0)
    again = joblib.load(buffer)
    np.testing.assert_array_equal(again.predict(x), fitted.predict(x))
    copy = clone(fitted)
    assert copy.get_params() == model.get_params()
    assert not hasattr(copy, "bnn_")
    # A loaded estimator learns further as the first would.
    for one in (fitted, again):
        one.partial_fit(x[:20], y[:20])
    np.testing.assert_array_equal(again.predict(x), fitted.predict(x))


def stored_by_skops(model: Any) -> Any:
    """Return an estimator or pipeline written and read by skops, which trusts bayesify's class."""
    written = skops.io.dumps(model)
    own = [type(each) for each in (BayesianMLPClassifier(), BayesianMLPRegressor())]
    trusted = {f"{each.__module__}.{each.__name__}" for each in own}
    assert set(skops.io.get_untrusted_types(data=written)) <= trusted
    return skops.io.loads(written, trusted=list(trusted))


@each_estimator
def test_skops_stores_it_with_its_state(model: Any, load: Any, least: float) -> None:
    x, y = load(return_X_y=True)
    generator = np.random.RandomState(5)
    fitted = clone(model).set_params(random_state=generator).fit(x, y).calibrate(x, y)
    fitted.remark = "mine"
    random = torch.get_rng_state()
    again = stored_by_skops(make_pipeline(StandardScaler(), fitted))[-1]
    assert torch.equal(torch.get_rng_state(), random)
    assert {name: type(value) for name, value in vars(again).items()} == {
        name: type(value) for name, value in vars(fitted).items()
    }
    assert again.remark == "mine"
    assert again.random_state.randint(1000) == fitted.random_state.randint(1000)
    np.testing.assert_array_equal(again.conformal_.scores[0], fitted.conformal_.scores[0])
    for one in (fitted, again):
        one.partial_fit(x[:20], y[:20])
    np.testing.assert_array_equal(again.predict(x), fitted.predict(x))


@each_estimator
def test_skops_stores_it_untrained(model: Any, load: Any, least: float) -> None:
    assert stored_by_skops(model).get_params() == model.get_params()


def test_a_setting_that_has_no_form_in_json_is_pickled_as_before() -> None:
    x, y = load_iris(return_X_y=True)
    model = BayesianMLPClassifier(range(5, 7), steps=5, random_state=0).fit(x, y)
    with pytest.raises(TypeError, match="to be stored"):
        model.save("model.safetensors")
    again = pickle.loads(pickle.dumps(model))
    assert again.hidden_layer_sizes == range(5, 7)
    np.testing.assert_array_equal(again.predict_proba(x), model.predict_proba(x))


@pytest.mark.parametrize(("fitted", "changed"), [("gaussian", "poisson"), ("poisson", "gaussian")])
def test_another_likelihood_after_training_is_an_error(
    fitted: Any, changed: Any, tmp_path: Path
) -> None:
    x = np.arange(20.0)[:, None]
    model = BayesianMLPRegressor(likelihood=fitted, steps=5, random_state=0).fit(x, x[:, 0])
    model.set_params(likelihood=changed)
    for act in (
        lambda: model.save(tmp_path / "model.safetensors"),
        lambda: model.predict(x),
        lambda: model.partial_fit(x, x[:, 0]),
    ):
        with pytest.raises(ValueError, match=f"must be '{fitted}', as in training, got '{changed}"):
            act()
    assert len(model.set_params(likelihood=fitted).predict(x)) == 20


@pytest.mark.parametrize("change", ["setting", "failed fit", "half precision"])
def test_what_fits_no_more_is_pickled_as_it_is(change: str) -> None:
    x, y = load_diabetes(return_X_y=True)
    model = BayesianMLPRegressor(steps=5, random_state=0).fit(x, y)
    if change == "setting":
        model.set_params(likelihood="poisson")
    elif change == "half precision":
        model.bnn_.bfloat16()
    else:
        with pytest.raises(ValueError, match="num_samples"):
            model.set_params(num_samples=0).fit(x, np.column_stack([y, y]))
        model.set_params(num_samples=200)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again.bnn_.posterior.mean, model.bnn_.posterior.mean)
    assert vars(again).keys() == vars(model).keys()


class Short(BayesianMLPClassifier):
    """Its constructor sets what is no setting of it."""

    def __init__(self, extra: int = 3, random_state: Any = None) -> None:
        super().__init__((4,), steps=3, random_state=random_state)
        self.extra = extra


def test_a_subclass_keeps_what_its_constructor_set() -> None:
    x, y = load_iris(return_X_y=True)
    model = Short(random_state=0).fit(x, y)
    model.num_samples = 50
    again = pickle.loads(pickle.dumps(model))
    assert (again.extra, again.num_samples) == (3, 50)
    np.testing.assert_array_equal(again.predict_proba(x), model.predict_proba(x))


def test_in_threads_and_processes_of_joblib() -> None:
    x, y = load_iris(return_X_y=True)
    model = BayesianMLPClassifier(steps=5, random_state=0)
    alone = cross_val_score(model, x, y, cv=2)
    with joblib.parallel_backend("threading", n_jobs=2):
        np.testing.assert_array_equal(cross_val_score(model, x, y, cv=2), alone)


@pytest.mark.slow
def test_a_grid_search_in_two_processes_finds_what_one_finds() -> None:
    x, y = load_iris(return_X_y=True)
    grid = {"hidden_layer_sizes": [(4,), (8,)], "posterior": ["mean-field", "low-rank"]}
    found = []
    for jobs in (1, 2):
        model = BayesianMLPClassifier(steps=20, random_state=0)
        found.append(GridSearchCV(model, grid, cv=2, n_jobs=jobs).fit(x, y))
    scores = [each.cv_results_["mean_test_score"] for each in found]
    np.testing.assert_array_equal(*scores)
    assert found[0].best_params_ == found[1].best_params_
    np.testing.assert_array_equal(*(each.predict_proba(x) for each in found))


def test_calibration_display() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    model = BayesianMLPClassifier(steps=40, random_state=0).fit(x[:300], y[:300])
    display = CalibrationDisplay.from_estimator(model, x[300:], y[300:], n_bins=5)
    assert ((display.prob_true >= 0.0) & (display.prob_true <= 1.0)).all()
    plt.close("all")


def test_several_classifications_at_once() -> None:
    x, y = load_iris(return_X_y=True)
    both = np.column_stack([y, y == 0])
    model = MultiOutputClassifier(BayesianMLPClassifier(steps=40, random_state=0)).fit(x, both)
    assert (model.predict(x) == both).mean() > 0.85


@each_estimator
def test_random_state_governs_all_and_nothing_global_is_touched(
    model: Any, load: Any, least: float
) -> None:
    x, y = load(return_X_y=True)
    before = torch.get_rng_state(), torch.get_num_threads(), np.random.get_state()[1].copy()  # noqa: NPY002
    answers = [clone(model).fit(x, y).predict(x) for _ in range(2)]
    torch.rand(7)  # the state of the global generator must not matter either
    state = torch.get_rng_state()
    answers.append(clone(model).fit(x, y).predict(x))
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(answers[0], answers[1])
    np.testing.assert_array_equal(answers[0], answers[2])
    assert torch.get_num_threads() == before[1]
    np.testing.assert_array_equal(np.random.get_state()[1], before[2])  # noqa: NPY002
    torch.set_rng_state(before[0])


def test_another_random_state_gives_another_answer() -> None:
    x, y = load_diabetes(return_X_y=True)
    made = [
        BayesianMLPRegressor(steps=5, random_state=state).fit(x, y).predict(x[:5])
        for state in (0, 1, np.random.RandomState(0), np.random.RandomState(0))
    ]
    assert (made[0] != made[1]).all()
    np.testing.assert_array_equal(made[2], made[3])
