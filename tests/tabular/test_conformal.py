"""Calibrated intervals and sets of the estimators: rows, folds, dropping, coverage, errors."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom
from sklearn.base import clone
from sklearn.datasets import load_iris, make_friedman1
from sklearn.exceptions import NotFittedError

from bayesify.datasets import load_regression
from bayesify.io import StorageError, read_tensors, write_tensors
from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")


def regressor(**settings: Any) -> BayesianMLPRegressor:
    return BayesianMLPRegressor((4,), steps=20, num_samples=10, random_state=0, **settings)


def classifier() -> BayesianMLPClassifier:
    return BayesianMLPClassifier((4,), steps=20, num_samples=10, random_state=0)


X, Y = make_friedman1(90, noise=1.0, random_state=0)
IRIS, LABELS = load_iris(return_X_y=True)
NAMES = np.array(["setosa", "versicolor", "virginica"])[LABELS]


def test_intervals_hold_the_calibration_rows_of_their_rank() -> None:
    model = regressor().fit(X[:40], Y[:40])
    lower, upper = model.calibrate(X[40:], Y[40:]).predict_interval(X[40:], 0.9, "conformal")
    # ceil(51 * 0.9) = 46 of the 50 scores are at most the quantile.
    # The 46th lies on an end, up to rounding.
    assert ((lower - 1e-9 <= Y[40:]) & (Y[40:] <= upper + 1e-9)).sum() == 46
    mean, std = model.predict(X[40:], return_std=True)
    assert np.allclose((lower + upper) / 2, mean)
    assert np.ptp((upper - lower) / std) < 1e-9


@pytest.mark.parametrize("cv", [None, 2])
def test_a_missing_label_is_one_clear_error(cv: int | None) -> None:
    model = classifier().fit(IRIS, NAMES)
    with pytest.raises(ValueError, match="labels must all be there, got 1 of 150 rows without one"):
        model.calibrate(IRIS, np.array([None, *NAMES[1:]], dtype=object), cv=cv)


def test_calibration_leaves_other_predictions_as_they_are() -> None:
    model = regressor().fit(X[:40], Y[:40])
    before = [*model.predict(X, return_std=True), *model.predict_interval(X)]
    model.calibrate(X[40:], Y[40:])
    after = [*model.predict(X, return_std=True), *model.predict_interval(X)]
    assert all(map(np.array_equal, before, after))


@pytest.mark.parametrize("noise", ["learned", "input-dependent"])
@pytest.mark.parametrize("cv", [None, 4])
def test_each_target_has_its_own_calibration(noise: Any, cv: int | None) -> None:
    both = np.column_stack([Y, 1e200 * X[:, 3]])
    model = regressor(noise=noise).fit(X, both).calibrate(X, both, cv=cv)
    lower, upper = model.predict_interval(X[:7], 0.9, method="conformal")
    assert lower.shape == upper.shape == (7, 2)
    assert (lower < upper).all()
    assert np.isfinite([lower, upper]).all()
    assert (upper - lower)[:, 1].min() > 1e150
    column = regressor(noise=noise).fit(X, both[:, :1]).calibrate(X, both[:, :1], cv=cv)
    assert column.predict_interval(X[:7], method="conformal")[0].shape == (7, 1)


class Watched(BayesianMLPRegressor):
    """It raises an error if it predicts a row that it was trained on."""

    trained: Any = ()

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:  # noqa: N803
        self.trained = {row.tobytes() for row in np.asarray(X)}
        return super().fit(X, y, sample_weight)

    def predict(self, X: Any, return_std: bool = False) -> Any:  # noqa: N803
        assert not self.trained & {row.tobytes() for row in np.asarray(X)}
        return super().predict(X, return_std=return_std)


def test_no_fold_is_scored_by_a_model_that_was_trained_on_it() -> None:
    model = Watched((4,), steps=5, num_samples=2, random_state=0).fit(X, Y)
    model.calibrate(X, Y, cv=4)
    # 90 rows are 4 folds of 22; the other 2 rows are for training only.
    assert [len(scores) for scores in model.conformal_.scores] == [22] * 4
    assert [len(fold.trained) for fold in model.fold_models_] == [68] * 4
    everything = set.intersection(*(fold.trained for fold in model.fold_models_))
    assert len(everything) == 2
    with pytest.raises(AssertionError):
        model.calibrate(X, Y)


def test_all_models_of_the_folds_answer() -> None:
    model = regressor().fit(X, Y).calibrate(X, Y, cv=3)
    lower, upper = model.predict_interval(X[:5], 0.9, method="conformal")
    ends = np.concatenate(
        [
            np.array([mean - score * std, mean + score * std])
            for fold, scores in zip(model.fold_models_, model.conformal_.scores, strict=True)
            for mean, std in [fold.predict(X[:5], return_std=True)]
            for score in scores.numpy()
        ]
    ).reshape(90, 2, 5)
    # floor(0.1 * 91) = 9 and ceil(0.9 * 91) = 82, counted from 1.
    assert np.allclose(lower, np.sort(ends[:, 0], axis=0)[8])
    assert np.allclose(upper, np.sort(ends[:, 1], axis=0)[81])


@pytest.mark.parametrize("cv", [None, 3])
def test_names_of_columns_and_labels_are_kept(cv: int | None) -> None:
    table = pd.DataFrame(IRIS, columns=list("abcd"))
    model = classifier().fit(table, NAMES).calibrate(table, NAMES, cv=cv)
    sets = model.predict_set(table, 0.9, method="conformal")
    assert sets.dtype == bool
    assert sets.shape == (150, 3)
    assert sets[np.arange(150), LABELS].mean() >= 0.9
    assert sets[model.predict(table)[:, None] == model.classes_].all()


def test_sets_without_calibration_reach_the_level() -> None:
    model = classifier().fit(IRIS, NAMES)
    sets, p = model.predict_set(IRIS, 0.9), model.predict_proba(IRIS)
    assert ((sets * p).sum(1) >= 0.9 - 1e-12).all()
    # Without its least probable label a set would not.
    least = np.where(sets, p, np.inf).min(1)
    assert (((sets * p).sum(1) - least < 0.9) | (sets.sum(1) == 1)).all()


def test_a_class_that_a_fold_lacks_is_not_impossible() -> None:
    labels = NAMES.copy()
    labels[149] = "one of its kind"
    model = classifier().fit(IRIS, labels).calibrate(IRIS, labels, cv=5)
    assert {len(fold.classes_) for fold in model.fold_models_} == {3, 4}
    sets = model.predict_set(IRIS, 0.9, method="conformal")
    assert sets.shape == (150, 4)
    # Classes keep their places: the others are told apart as they were.
    usual = classifier().fit(IRIS, NAMES).calibrate(IRIS, NAMES, cv=5)
    size = usual.predict_set(IRIS, 0.9, method="conformal").sum(1).mean()
    assert sets[:, 1:].sum(1).mean() == pytest.approx(size, abs=0.3)


def test_a_fold_may_lack_a_class_with_a_weight() -> None:
    labels = NAMES[:60].copy()
    labels[0] = "rare"
    model = classifier().set_params(class_weight={"rare": 3.0, "setosa": 2.0})
    model.fit(IRIS[:60], labels).calibrate(IRIS[:60], labels, cv=3)
    weights = [fold.class_weight for fold in model.fold_models_]
    assert sorted(map(len, weights)) == [1, 2, 2]
    assert all(each["setosa"] == 2.0 for each in weights)
    assert model.class_weight == {"rare": 3.0, "setosa": 2.0}
    assert model.predict_set(IRIS, 0.9, method="conformal").shape == (150, 3)


def folds_of(count: int, cv: int, seed: int) -> list[tuple[Any, Any]]:
    """The rows of each fold, and those that its model is trained on."""
    order, size = np.random.default_rng(seed).permutation(count), count // cv
    held = [order[k * size : (k + 1) * size] for k in range(cv)]
    return [(fold, np.setdiff1d(order, fold)) for fold in held]


def test_folds_are_trained_with_the_weights_of_their_rows() -> None:
    weights = np.linspace(0.5, 1.5, 90)
    weights[::9] = 0.0
    model = regressor().fit(X, Y, weights).calibrate(X, Y, cv=3, sample_weight=weights)
    for (held, rest), fold, scores in zip(
        folds_of(90, 3, model.bnn_.seed), model.fold_models_, model.conformal_.scores, strict=True
    ):
        same = regressor().fit(X[rest], Y[rest], weights[rest])
        mean, std = same.predict(X[held], return_std=True)
        assert np.allclose(fold.predict(X), same.predict(X), rtol=1e-6)
        # Rows of weight 0 too have a score, each row one.
        assert np.allclose(np.sort(scores), np.sort(abs(Y[held] - mean) / std), 2e-5, 1e-5)
    plain = regressor().fit(X, Y, weights).calibrate(X, Y, cv=3)
    assert not np.allclose(plain.fold_models_[0].predict(X), model.fold_models_[0].predict(X))


def test_rows_of_weight_0_teach_the_folds_nothing() -> None:
    wrong, weights = Y.copy(), np.ones(90)
    wrong[::9], weights[::9] = 1e4, 0.0
    model = regressor().fit(X, wrong, weights)
    model.calibrate(X, wrong, cv=3, sample_weight=weights)
    assert max(fold.target_scaling_.scale.item() for fold in model.fold_models_) < 10.0
    model.calibrate(X, wrong, cv=3)
    assert min(fold.target_scaling_.scale.item() for fold in model.fold_models_) > 1e3


def test_a_class_of_weight_0_in_a_fold_may_have_a_class_weight() -> None:
    labels, weights = NAMES[:60].copy(), np.ones(60)
    labels[:3], weights[1:3] = "rare", 0.0
    model = classifier().set_params(class_weight={"rare": 3.0})
    model.fit(IRIS[:60], labels, weights)
    model.calibrate(IRIS[:60], labels, cv=3, sample_weight=weights)
    # The one row of weight 1 is held out once; the others of its class teach nothing.
    assert sorted(len(fold.classes_) for fold in model.fold_models_) == [2, 3, 3]
    assert model.predict_set(IRIS, 0.9, method="conformal").shape == (150, 3)


def test_weights_of_folds_are_checked() -> None:
    model = regressor().fit(X, Y)
    with pytest.raises(ValueError, match="sample_weight must come with cv, whose models are"):
        model.calibrate(X, Y, sample_weight=np.ones(90))
    with pytest.raises(ValueError, match="one for each row"):
        model.calibrate(X, Y, cv=3, sample_weight=np.ones(89))
    with pytest.raises(ValueError, match="finite and at least 0"):
        model.calibrate(X, Y, cv=3, sample_weight=-np.ones(90))


def test_targets_of_a_data_frame_are_accepted() -> None:
    table = pd.DataFrame({"y": Y})
    model = regressor().fit(X, table["y"])
    read_only = model.calibrate(X, table["y"]).conformal_.scores[0]
    assert read_only.equal(model.calibrate(X, Y).conformal_.scores[0])


@pytest.mark.parametrize("again", ["fit", "partial_fit"])
@pytest.mark.parametrize("cv", [None, 3])
def test_training_drops_the_calibration(again: str, cv: int | None) -> None:
    model = regressor().fit(X, Y).calibrate(X, Y, cv=cv)
    assert not hasattr(clone(model), "conformal_")
    getattr(model, again)(X, Y)
    assert not hasattr(model, "conformal_")
    assert not hasattr(model, "fold_models_")
    message = r"needs a calibration since the last fit: call calibrate\(X, y\) with rows that"
    with pytest.raises(NotFittedError, match=message):
        model.predict_interval(X, method="conformal")


def test_a_second_calibration_replaces_the_first() -> None:
    model = regressor().fit(X, Y).calibrate(X, Y, cv=3).calibrate(X[:30], Y[:30])
    assert model.conformal_.num_scores == 30
    assert model.fold_models_ == []


def test_a_calibrated_model_can_be_pickled() -> None:
    model = regressor().fit(X, Y).calibrate(X, Y, cv=3)
    same = pickle.loads(pickle.dumps(model))
    ends = [each.predict_interval(X, method="conformal") for each in (model, same)]
    assert np.array_equal(*ends)


@pytest.mark.parametrize("cv", [None, 3])
def test_a_file_keeps_the_calibration(cv: int | None, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = regressor().fit(X, Y).calibrate(X, Y, cv=cv)
    model.save(path)
    same = BayesianMLPRegressor.load(path)
    assert len(same.fold_models_) == (cv or 0)
    ends = [each.predict_interval(X, method="conformal") for each in (model, same)]
    assert np.array_equal(*ends)


@pytest.mark.parametrize("cv", [None, 3])
def test_a_file_knows_the_classes_of_its_sets(cv: int | None, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    classifier().fit(IRIS, NAMES).calibrate(IRIS, NAMES, cv=cv).save(path)
    assert BayesianMLPClassifier.load(path).conformal_.num_classes == 3


def test_a_file_from_before_calibrations_were_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = regressor().fit(X, Y)
    model.save(path)
    tensors, meta = read_tensors(path)
    del meta["calibration"]
    write_tensors(path, tensors, meta)
    same = BayesianMLPRegressor.load(path)
    assert np.array_equal(same.predict(X), model.predict(X))
    with pytest.raises(NotFittedError, match="needs a calibration"):
        same.predict_interval(X, method="conformal")


@pytest.mark.parametrize("lost", ["networks", "folds", "scores.0", "calibration", "model"])
def test_a_damaged_calibration_is_an_error(lost: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    regressor().fit(X, Y).calibrate(X, Y).save(path)
    tensors, meta = read_tensors(path)
    if lost in tensors:
        del tensors[lost]
    elif lost == "calibration":
        meta[lost] = "none"
    else:
        del (meta if lost == "model" else meta["calibration"])[lost]
    write_tensors(path, tensors, meta)
    with pytest.raises(StorageError, match="does not describe an estimator"):
        BayesianMLPRegressor.load(path)


def test_folds_are_a_function_of_the_seed() -> None:
    scores = [
        regressor().fit(X, Y).calibrate(X, Y, cv=3).conformal_.scores[0].tolist() for _ in range(2)
    ]
    assert scores[0] == scores[1]


def test_errors() -> None:
    with pytest.raises(NotFittedError, match="not fitted yet"):
        regressor().calibrate(X, Y)
    model = regressor().fit(X, Y)
    for wrong in (1, 91, 2.5, True, "5"):
        with pytest.raises(ValueError, match=r"cv must be None or .* from 2 to .* 90, got"):
            model.calibrate(X, Y, cv=wrong)
    with pytest.raises(ValueError, match=r"y must have the shape \(N,\) of the first call"):
        model.calibrate(X, np.column_stack([Y, Y]))
    with pytest.raises(ValueError, match="X has 9 features"):
        model.calibrate(X[:, 1:], Y)
    with pytest.raises(ValueError, match="NaN"):
        model.calibrate(X, np.where(Y > 20, np.nan, Y))
    with pytest.raises(ValueError, match='method must be "bayes" or "conformal", got \'exact\''):
        model.predict_interval(X, method="exact")
    model.calibrate(X[:18], Y[:18])
    with pytest.raises(ValueError, match="needs at least 19 calibration examples, got 18"):
        model.predict_interval(X, 0.95, method="conformal")
    classes = classifier().fit(IRIS[:100], NAMES[:100])
    with pytest.raises(ValueError, match="got \\['virginica'\\] too; train it on rows of every"):
        classes.calibrate(IRIS, NAMES)
    with pytest.raises(ValueError, match="strictly between 0 and 1, got 1"):
        classes.predict_set(IRIS, 1.0)
    with pytest.raises(NotFittedError, match="needs a calibration"):
        classes.predict_set(IRIS, method="conformal")


@pytest.mark.slow
@pytest.mark.parametrize("cv", [None, 5])
def test_coverage_on_yacht(cv: int | None) -> None:
    data = load_regression("yacht")
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(3):
        train, middle, new = np.split(rng.permutation(308), [100, 200])
        rows = middle if cv is None else train
        # The guarantee holds whatever the model; few steps leave one that is far from good.
        model = BayesianMLPRegressor(steps=300, random_state=0)
        model.fit(data.inputs[train], data.targets[train])
        model.calibrate(data.inputs[rows], data.targets[rows], cv=cv)
        lower, upper = model.predict_interval(data.inputs[new], 0.9, method="conformal")
        held += int(((lower <= data.targets[new]) & (data.targets[new] <= upper)).sum())
    # Both calibration and new rows are chance: twice a binomial's variance, false alarm 1e-4.
    spread = 3.9 * np.sqrt(2.0 * binom(3 * 108, 0.9).var())
    assert abs(held - 0.9 * 3 * 108) < spread
