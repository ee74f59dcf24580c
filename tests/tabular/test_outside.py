"""Wider predictions for rows outside the training data: by how much, at each distance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bayesify.prediction import CategoricalPredictive, GaussianPredictive, Predictive
from bayesify.prediction.acquisition import joint_information
from bayesify.sklearn import BayesianMLPClassifier, BayesianMLPRegressor
from bayesify.tabular import outside

pytestmark = pytest.mark.filterwarnings("ignore::bayesify.training.ConvergenceWarning")
#: Interquartile ranges beyond training's; d / (1 + d) of each.
DISTANCES = [0.0, 0.25, 1.0, 3.0]
SHARES = np.array([0.0, 0.2, 0.5, 0.75])

X = np.random.default_rng(0).uniform(-1.0, 1.0, (80, 1))


def rows_at_distances(model: Any) -> np.ndarray:
    """Rows of training, moved so that they lie outside by the distances."""
    rows = np.full((len(DISTANCES), 1), X.max())
    low, high = 1.0, 100.0
    for place, distance in enumerate(DISTANCES[1:], start=1):
        for _ in range(60):  # bisection
            middle = 0.5 * (low + high)
            far = model.outside_scores([[middle]])[0] > distance
            low, high = (low, middle) if far else (middle, high)
        rows[place], low, high = low, low, 100.0
    np.testing.assert_allclose(model.outside_scores(rows), DISTANCES, atol=1e-9)
    return rows


def without_widening(predict: Callable[[], Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bayesify.tabular.estimator.widened", lambda p, *_: p)
        return predict()


def check_numbers(num_samples: int) -> None:
    """The variance grows by d / (1 + d) times that of the training targets; the mean stays."""
    y = 50.0 + 10.0 * np.sin(3.0 * X[:, 0])
    model = BayesianMLPRegressor((4,), steps=30, num_samples=num_samples, random_state=0)
    rows = rows_at_distances(model.fit(X, y))
    wide = model.predictive(rows)
    plain = without_widening(lambda: model.predictive(rows))
    more = (wide.total - plain.total) / model.target_scaling_.scale**2
    np.testing.assert_allclose(more, SHARES, atol=1e-6)
    np.testing.assert_allclose(wide.mean, plain.mean, rtol=1e-9)


@pytest.mark.parametrize("num_samples", [2, 100])
def test_the_variance_of_numbers_grows_by_the_share_of_the_distance(num_samples: int) -> None:
    check_numbers(num_samples)


def test_classes_are_mixed_with_the_training_frequencies() -> None:
    """With half the share as the weight of the frequencies."""
    labels = np.where(X[:, 0] > 0.4, "b", "a")
    model = BayesianMLPClassifier((4,), steps=30, num_samples=10, random_state=0).fit(X, labels)
    rows = rows_at_distances(model)
    wide = model.predict_proba(rows)
    plain = without_widening(lambda: model.predict_proba(rows))
    part = SHARES[:, None] / 2.0
    expected = (1.0 - part) * plain + part * model.class_prior_
    np.testing.assert_allclose(wide, expected, rtol=1e-9)
    parts = model.predictive(rows)
    alone = without_widening(lambda: model.predictive(rows))
    np.testing.assert_allclose(parts.aleatoric, (1.0 - part[:, 0]) * alone.aleatoric.numpy())
    np.testing.assert_allclose(parts.total, parts.aleatoric + parts.epistemic, rtol=1e-9)


def test_kept_samples_disagree_where_the_row_lies_outside() -> None:
    """What is added is epistemic in them too: some become certain of a class."""
    labels = np.where(X[:, 0] > 0.4, "b", "a")
    model = BayesianMLPClassifier((8,), steps=100, num_samples=400, random_state=0).fit(X, labels)
    rows = rows_at_distances(model)
    p = model.predictive(rows, keep_samples=True)
    plain = without_widening(lambda: model.predictive(rows, keep_samples=True))
    assert p.samples is not None
    assert torch.equal(p.samples[:, 0], plain.samples[:, 0])
    torch.testing.assert_close(p.samples.sum(-1), torch.ones(400, 4, dtype=p.samples.dtype))
    found = p.subset(range(400))
    for name in ("mean", "epistemic", "aleatoric"):
        of_samples, wanted = getattr(found, name), getattr(p, name)
        torch.testing.assert_close(of_samples, wanted, rtol=0.0, atol=0.02)
    for place in range(4):  # BALD of one row
        assert joint_information(p, [place]).item() == pytest.approx(found.epistemic[place])
    certain = (p.samples[:, 1:] == 1.0).double().mean(0) - (
        plain.samples[:, 1:] == 1.0
    ).double().mean(0)
    expected = SHARES[1:, None] / 2.0 * model.class_prior_
    np.testing.assert_allclose(certain, expected, atol=2 / 400)


def test_each_target_has_its_own_variance() -> None:
    p = GaussianPredictive(torch.randn(50, 2, 3), torch.tensor(0.5))
    wide = outside.widened(p, torch.tensor([0.0, float("inf")]), torch.tensor([1.0, 4.0, 9.0]))
    more = torch.tensor([[0.0, 0.0, 0.0], [1.0, 4.0, 9.0]])
    torch.testing.assert_close(wide.total - p.total, more, atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------- planted faults


def std_for_variance(right: Callable[..., Predictive]) -> Callable[..., Predictive]:
    """The share of the variance as a standard deviation: (d / (1 + d))^2 in its place."""

    def wrong(p: Predictive, distances: Tensor, marginal: Tensor) -> Predictive:
        squares = outside.doubt(distances).square()
        return right(p, squares / (1.0 - squares), marginal)

    return wrong


def wider_noise(right: Callable[..., Predictive]) -> Callable[..., Predictive]:
    """Twice the share."""

    def wrong(p: Predictive, distances: Tensor, marginal: Tensor) -> Predictive:
        if isinstance(p, CategoricalPredictive):
            return right(p, 2.0 * distances, marginal)
        return right(p, distances, 2.0 * marginal)

    return wrong


@pytest.mark.parametrize("num_samples", [2, 100])
@pytest.mark.parametrize("fault", [std_for_variance, wider_noise])
def test_that_check_notices_faults(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any], num_samples: int
) -> None:
    monkeypatch.setattr("bayesify.tabular.estimator.widened", fault(outside.widened))
    with pytest.raises(AssertionError):
        check_numbers(num_samples)
