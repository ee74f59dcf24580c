"""Distances between predictive distributions, against closed forms and SciPy."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from tests.cases import normals

from bayesify import metrics
from bayesify.prediction import CategoricalPredictive, GaussianPredictive


def test_classes() -> None:
    p, q = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5]]), torch.eye(3)[[0, 0]]
    assert metrics.agreement(p, q) == 50.0
    assert metrics.total_variation(p, q) == pytest.approx((0.1 + 0.8) / 2)
    assert metrics.agreement(p, p) == 100.0
    assert metrics.total_variation(p, p) == 0.0
    assert metrics.total_variation(torch.eye(3), torch.eye(3)[[1, 2, 0]]) == 1.0
    assert metrics.total_variation(p, q) == metrics.total_variation(q, p)


@pytest.mark.parametrize("count", [1, 6, 9])
def test_samples_give_the_distance_of_scipy(count: int) -> None:
    some, other = normals(7, 2, 3), 1.5 * normals(count, 2, 3, seed=1) + 0.3
    found = metrics.wasserstein_of_samples(some, other)
    assert found.shape == (2, 3)
    for place in [(0, 0), (1, 2)]:
        exact = stats.wasserstein_distance(some[:, *place].numpy(), other[:, *place].numpy())
        assert found[place].item() == pytest.approx(exact, rel=1e-12)
    shifted = metrics.wasserstein_of_samples(some, some + 2.0)
    torch.testing.assert_close(shifted, torch.full((2, 3), 2.0).double())


def test_whole_numbers_are_exact() -> None:
    for whole, other in (
        (257, torch.tensor([256.0]).bfloat16()),
        (2**24 + 1, torch.tensor([2.0**24])),
    ):
        assert metrics.wasserstein_of_samples(torch.tensor([whole]), other) == 1.0
    half = torch.tensor([1e4]).half()  # 1e5 is beyond it
    assert metrics.wasserstein_of_samples(torch.tensor([10**5]), half) == 9e4


def test_distributions_of_numbers() -> None:
    p = GaussianPredictive(normals(5, 4), torch.tensor(0.7))
    assert metrics.wasserstein(p, p) == 0.0
    assert metrics.wasserstein(p, p.rescaled(-2.0, 1.0)) == pytest.approx(2.0, rel=1e-6)
    # Of two Gaussians of one mean the distance is E|Z| times the difference of their std.
    one = GaussianPredictive(torch.zeros(1, 4).double(), torch.tensor(1.0))
    wide = GaussianPredictive(torch.zeros(1, 4).double(), torch.tensor(3.0))
    found = metrics.wasserstein(one, wide, num_quantiles=2000)
    assert found == pytest.approx(2.0 * math.sqrt(2.0 / math.pi), rel=2e-3)
    # The quantiles of a mixture and its simulated targets agree.
    by_samples = metrics.wasserstein_of_samples(p.simulate(20_000), one.simulate(20_000, seed=1))
    assert metrics.wasserstein(p, one) == pytest.approx(by_samples.mean().item(), abs=0.02)


def test_errors() -> None:
    p = GaussianPredictive(normals(5, 4), torch.tensor(0.7))
    probs = torch.eye(3)
    with pytest.raises(ValueError, match="one shape"):
        metrics.agreement(probs, probs[:2])
    with pytest.raises(ValueError, match="every row of other must hold probabilities"):
        metrics.total_variation(probs, 2.0 * probs)
    with pytest.raises(TypeError, match="got CategoricalPredictive"):
        metrics.wasserstein(p, CategoricalPredictive.from_logits([probs]))
    with pytest.raises(ValueError, match="same examples"):
        metrics.wasserstein(p, GaussianPredictive(normals(5, 3), torch.tensor(0.7)))
    with pytest.raises(ValueError, match="num_quantiles must be at least 1"):
        metrics.wasserstein(p, p, num_quantiles=0)
    with pytest.raises(TypeError, match=r"num_quantiles must be a whole number, got 2\.5"):
        metrics.wasserstein(p, p, num_quantiles=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="same components"):
        metrics.wasserstein_of_samples(torch.zeros(3, 2), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="same components"):
        metrics.wasserstein_of_samples(torch.zeros(3), torch.tensor(1.0))
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match=f"samples must be finite, got {value} for 3 of 6"):
            metrics.wasserstein_of_samples(torch.full((3,), value), torch.zeros(3))
